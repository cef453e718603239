"""Beams in indirection mode: pages stay, paths follow, all read what a naive copy would hold."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import kvcore as k
from kvcore.errors import ParentsPending
from kvcore.testing import check
from tests.helpers import row, typed_manager, used
from tests.test_step_beams import D, H, Search

Indirect = partial(Search, beam_mode="indirection")


def check_all(search):
    for kv in search.kvs:
        kv.settle()
    check(search.m)
    if not getattr(search.device, "deferred", False):
        check(search.m, device=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prompts", [(8, 5, 7), (1, 12, 4)])
def test_random_parents_over_many_steps(seed, layout, prompts):
    s = Indirect(seed, prompts, (4, 1, 3), layout, deferred=seed % 2 == 0)
    for step in range(40):
        s.step(s.random())
        if step % 9 == 8:
            s.right()
        if step % 13 == 12:
            check_all(s)
    s.right()
    for kv in s.kvs:
        kv.close()
    s.device.drain()
    s.m.create_kv_cache().close()
    assert used(s.m) == 0
    check(s.m)


@pytest.mark.parametrize("prompt", [8, 9, 11])
@pytest.mark.parametrize("kind", ["random", "equal", "distinct", "cycle"])
def test_hundreds_of_steps_are_alike_in_both_modes_and_without_pages(prompt, kind):
    """Equal keys and values in fork mode, through paths, in dense rows and in a naive copy."""
    both = [Search(7, (prompt,), (4,), deferred=False, beam_mode=m, slots=900, max_tokens=1024)
            for m in ("fork", "indirection")]  # fmt: skip
    rng = np.random.default_rng(prompt)
    make = {
        "random": lambda: rng.integers(0, 4, 4).tolist(),
        "equal": lambda: [int(rng.integers(0, 4))] * 4,
        "distinct": lambda: rng.permutation(4).tolist(),
        "cycle": lambda: [1, 2, 3, 0],
    }[kind]
    dense = np.zeros((4, 2, prompt + 220, H, D), np.float32)  # [beams, layers, tokens, H, D]
    dense[:, :, :prompt] = both[0].seen[0]
    for step in range(220):
        parents = make()
        for s in both:
            s.step(parents)
        new = [seen[:, -1] for seen in both[0].seen[0]]  # of the beams that have followed
        k.permute_dense(both[0].device, [dense], np.array(parents, np.int32), width=4)
        dense[:, :, prompt + step] = new
        if step % 55 == 54:
            for mine, naive in zip(dense, both[0].seen[0], strict=True):
                np.testing.assert_array_equal(mine[:, : prompt + step + 1], naive)
            fork, indirect = (s.content() for s in both)
            for a, b in zip(fork, indirect, strict=True):
                np.testing.assert_array_equal(a, b)
            both[0].right()
            check_all(both[1])


def test_parents_out_of_range_mean_the_beam_itself():
    s = Indirect(2, (6,), (4,), deferred=False)
    for parents in ([4, 0, -1, 1 << 30], [-(1 << 31), 2, 2, 7], [1, 1, 9, 0]):
        s.step(parents)
    s.right()
    check_all(s)
    for wrong in ([4, 0, 0, 0], [0, -1, 0, 0], [0] * 3):
        with pytest.raises(ValueError, match="parents"):
            s.kvs[0].reorder_beams(wrong)
    s.right()


def test_pages_do_not_depend_on_the_parents():
    s = Indirect(1, (6,), (3,), deferred=False)
    (kv,) = s.kvs
    before = [row(kv, b) for b in range(3)]
    assert [r[0] < 0 for r in before] == [False, True, True]
    for _ in range(7):
        s.step(s.random())
        kv.settle()
        assert [row(kv, b)[:2] for b in range(3)] == before
    assert used(s.m) == 1 + 3 * 3


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("seed", range(12))
def test_beams_come_and_go(seed, layout):
    """Survivors, additions and host-side parents between steps on the device."""
    s = Indirect(seed, (7, 4), (4, 4), layout, deferred=seed % 2 == 0)
    for _ in range(30):
        s.step(s.random())
        if s.rng.random() < 0.5:
            i = int(s.rng.integers(0, 2))
            kv = s.kvs[i]
            kv.settle()
            new = int(s.rng.integers(1, 5))
            parents = s.rng.integers(0, s.widths[i], new).tolist()
            if new == s.widths[i]:
                kv.reorder_beams(parents, valid_tokens=kv.history_length)
            else:
                assert kv.set_beam_width(new, parents=parents)
            s.seen[i] = [s.seen[i][p] for p in parents]
            s.widths = tuple(new if j == i else w for j, w in enumerate(s.widths))
            if s.rng.random() < 0.5:
                s.right()
            check_all(s)
    s.right()


def test_narrowing_moves_only_what_leaves():
    """Of three survivors two read in the pages of beams that leave: their tokens move."""
    s = Indirect(3, (4,), (4,), deferred=False)
    (kv,) = s.kvs
    s.step([3, 2, 3, 1])
    s.step([0, 1, 0, 3])
    kv.settle()
    first, second = row(kv, 0), row(kv, 1)
    assert kv.set_beam_width(2)
    assert [row(kv, 0), row(kv, 1)] == [first, second]
    s.seen[0], s.widths = s.seen[0][:2], (2,)
    s.right()
    assert used(s.m) == 1 + 2
    check_all(s)


@pytest.mark.parametrize("winner", range(3))
def test_collapse_gathers_the_winner_into_beam_0(winner):
    s = Indirect(4, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    for _ in range(9):
        s.step(s.random())
    kv.settle()
    own = row(kv, 0)
    kv.collapse(winner)
    assert (kv.beam_width, row(kv)) == (1, own)
    s.seen[0], s.widths = [s.seen[0][winner]], (1,)
    s.right()
    tokens = list(range(14))
    kv.commit(tokens)
    assert s.m.probe_reuse(input_tokens=tokens) == 12
    check_all(s)


def test_collapse_in_fork_mode_keeps_the_winners_path():
    s = Search(4, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    for _ in range(9):
        s.step(s.random())
    kv.settle()
    winner = row(kv, 2)
    kv.collapse(2)
    assert (kv.beam_width, row(kv)) == (1, winner)
    with pytest.raises(ValueError, match="parents"):
        kv.collapse(1)


def test_a_block_on_which_beams_agree_is_published_from_beam_0():
    """Its path lies in beam 2's page: the tokens move, and the others' pages are freed once."""
    s = Indirect(5, (6,), (3,), deferred=False)
    (kv,) = s.kvs
    kv.commit(range(6))
    for parents in ([0, 1, 2], [2, 2, 2], [1, 0, 0]):  # positions 6, 7, 8
        s.step(parents)
    kv.settle()
    assert used(s.m) == 1 + 3 * 2
    with pytest.raises(k.StateError, match="beams differ"):
        kv.commit([6, 7, 8])
    kv.commit([6, 7])
    assert used(s.m) == 2 + 3
    assert [[slot >= 0 for slot in row(kv, b)] for b in range(3)] == [
        [True, True, True], [False, False, True], [False, False, True]
    ]  # fmt: skip
    s.right()
    reader = s.m.create_kv_cache(input_tokens=[*range(8), 99])
    assert reader.num_committed_tokens == 8
    check_all(s)
    for _ in range(6):
        s.step(s.random())
    s.right()
    check_all(s)


@pytest.mark.parametrize("seed", range(20))
def test_a_path_moves_after_what_another_stream_writes_there(seed):
    """Tokens are computed again where a batch has the pages on loan, and then published."""
    s = Indirect(seed, (6,), (3,))
    (kv,) = s.kvs
    kv.commit(range(6))
    for parents in ([0, 1, 2], [2, 2, 2], [1, 0, 0]):
        s.step(parents)
    kv.settle()
    new = s.values(2)
    for history in s.seen[0]:
        history[:, 6:8] = new
    s.batch.prepare([kv], 2, start=[6], stream=s.device.create_stream())
    s.append(np.tile(new, (1, 3, 1, 1)))
    kv.commit([6, 7])
    s.right()


def test_a_known_block_is_replaced_by_the_tree_s():
    s = Indirect(6, (4,), (2,), deferred=False)
    (kv,) = s.kvs
    for _ in range(4):
        s.step([1, 1])
    other = s.m.create_kv_cache(input_tokens=range(8))
    assert other.resume(s.stream)
    assert other.resize(8, 8)
    s.batch.prepare([other], 8, start=[0])
    s.append(s.seen[0][0])
    other.commit(range(8))
    kv.settle()
    kv.commit(range(8))
    assert row(kv)[:2] == row(other)
    assert row(kv, 1)[:2] == [-1, -1]
    assert used(s.m) == 2
    s.right()
    check_all(s)


def test_commit_waits_for_nothing_and_is_refused_while_beams_differ():
    s = Indirect(7, (4,), (2,))
    (kv,) = s.kvs
    s.step([0, 1])
    with pytest.raises(ParentsPending):
        kv.commit([1] * 5)
    kv.settle()
    with pytest.raises(k.StateError, match="beams differ"):
        kv.commit([1] * 5)
    kv.commit([1] * 4)


def test_rejected_drafts_are_written_again():
    """Three tokens in a step, of which one stays: what is written there next is each beam's own."""
    s = Indirect(8, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    for _ in range(7):
        start = kv.history_length
        assert kv.resize(start + 3)
        s.batch.prepare([kv], 3)
        new, parents = s.values(9), s.random()
        s.append(new)
        s.m.step_beams(s.batch, s.put(np.array(parents, np.int32)))
        kv.settle()
        kept = [np.concatenate([s.seen[0][b], new[:, 3 * b : 3 * b + 1]], axis=1) for b in range(3)]
        s.seen[0] = [kept[p] for p in parents]
        kv.resize(None, start + 1)
        s.m.truncate([kv], [start + 1])
        s.right()
        check_all(s)


def test_suspended_beams_keep_their_paths():
    s = Indirect(9, (6,), (4,), deferred=False)
    (kv,) = s.kvs
    for _ in range(6):
        s.step(s.random())
    kv.settle()
    kv.suspend()
    check_all(s)
    parents = [3, 1]
    assert kv.set_beam_width(2, parents=parents)
    s.seen[0], s.widths = [s.seen[0][p] for p in parents], (2,)
    check_all(s)
    assert kv.resume(s.device.create_stream())
    s.right()
    for _ in range(5):
        s.step(s.random())
    s.right()
    kv.suspend()
    kv.close()
    assert used(s.m) == 0


def test_widening_in_steps_takes_pages_and_copies_nothing():
    s = Indirect(10, (6, 3), (2, 4), deferred=False, slots=40)
    (kv, _) = s.kvs
    s.step([1, 0, 3, 2, 1, 0])
    kv.settle()
    before = used(s.m)
    s.m.get_and_reset_iteration_stats()
    assert kv.set_beam_width(4, parents=[1, 0, 1, 1])
    stats = s.m.get_and_reset_iteration_stats()[0]
    assert (used(s.m) - before, stats.intra_device_copy_blocks) == (2, 0)
    s.seen[0], s.widths = [s.seen[0][p] for p in (1, 0, 1, 1)], (4, 4)
    s.batch = s.m.create_batch(8, 512)
    s.right()
    for _ in range(5):
        s.step(s.random())
    s.right()
    check_all(s)


def test_opaque_tokens_do_not_move_and_say_so():
    config = k.KVCacheManagerConfig(
        tokens_per_block=4,
        cache_tiers=[k.GpuCacheTierConfig(quota=1 << 20)],
        layers=[
            k.AttentionLayerConfig(layer_id=0, buffers=[k.BufferConfig(role="key", size=4096)])
        ],
        max_beam_width=2,
        beam_mode="indirection",
        enable_partial_commit=False,
    )
    m = k.KVCacheManager(config, device="host")
    kv = m.create_kv_cache(expected_prompt_length=5)
    assert kv.resume()
    assert kv.resize(6, 5)
    assert kv.set_beam_width(2)
    kv.reorder_beams([1, 0])
    before = [row(kv, b) for b in range(2)], used(m)
    with pytest.raises(k.StateError, match="shape, dtype"):
        kv.collapse(0)
    assert ([row(kv, b) for b in range(2)], used(m), kv.beam_width) == (*before, 2)
    kv.reorder_beams([1, 0])
    kv.collapse(0)
    check(m)


def test_the_indirection_of_a_batch():
    """0 before the prompt's end, the beam itself from the step's first position on."""
    s = Indirect(11, (3, 5), (3, 1), deferred=False)
    s.step([2, 0, 1, 0])
    s.step([1, 1, 0, 0])
    assert s.m.advance(s.kvs, 1)
    s.batch.prepare(s.kvs, 1)
    found = s.batch.cache_indirection()
    assert found.tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 2, 0, 2, 2, 2],
        [0] * 8,
    ]
    out = np.full((4, 2), -7, np.int32)
    assert s.batch.cache_indirection(2, out=out) is out
    assert out.tolist() == [[0, 0]] * 4
    for wrong in (np.zeros((3, 2), np.int32), np.zeros((4, 2), np.int64)):
        with pytest.raises(ValueError, match="out"):
            s.batch.cache_indirection(2, out=wrong)
    fork = Search(11, (3,), (2,), deferred=False)
    fork.batch.prepare(fork.kvs, 0)
    with pytest.raises(k.StateError, match="beam_mode"):
        fork.batch.cache_indirection()


def test_the_host_maps_like_the_device():
    s = Indirect(12, (3, 6), (4, 2), deferred=False)
    for _ in range(6):
        s.step(s.random())
    for kv in s.kvs:
        kv.settle()
    lengths = [kv.history_length for kv in s.kvs]
    s.batch.prepare(s.kvs, lengths, start=[0, 0])
    slots, offsets = s.m.slot_mapping(s.kvs, lengths, start=[0, 0])
    on_device = s.batch.mapping[0, : slots.size]
    np.testing.assert_array_equal(on_device, np.stack([slots, offsets], axis=1))


def test_one_beam_in_indirection_mode_is_like_fork_mode():
    m = typed_manager(beam_mode="indirection")
    assert m._runtime.control.paths is None
