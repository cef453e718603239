"""How prefix caches failed elsewhere: publishing and finding.

Each test names its case and, where the failure is public, whose it was.
"""

from __future__ import annotations

import gc
from threading import Barrier, Thread

import numpy as np
import pytest

import kvcore as k
from kvcore.control.slots import SlotTable
from kvcore.testing import check
from tests.helpers import opaque_manager, row, typed_manager
from tests.prefixes import Author, began, fresh, probe, squeeze, stats, turn


def told(m):
    """Kinds and sizes of events since the last call."""
    m.event_manager.flush_iteration_events()
    seen = []
    for event in m.event_manager.get_latest_events(0):
        name = type(event.data).__name__
        if "Stored" in name:
            seen.append(("stored", [len(b.tokens.ids) for b in event.data.blocks]))
        elif "Removed" in name:
            seen.append(("removed", len(event.data.block_hashes)))
    return seen


def with_events(**settings):
    config = opaque_manager(**settings).config
    return k.KVCacheManager(config, device="host", event_manager=k.KVCacheEventManager(1000))


# -- publishing ------------------------------------------------------------------------------------


def test_a_commit_that_evicts_keeps_its_own_path():
    """A1: the room for a snapshot came from the committer's path (NVIDIA/TensorRT-LLM#17926)."""
    m = typed_manager(slots=4, T=4, layers=1, heads=2, dim=64, commit_min_snapshot=True)
    assert stats(m)[0] == 4
    author = Author(m)
    a = fresh(12)
    kv = author.began(capacity=12)
    for start in range(0, 12, 2):
        author.computes(kv, a[start : start + 2])
        check(m)
        assert probe(m, a) == [start + 2]
    author.engine.verify([kv])
    author.engine.close(kv)
    assert probe(m, a) == [12]


def test_a_tree_that_is_reset_under_a_live_sequence():
    """A1, third variant; B12: it goes on with its pages and publishes nothing more."""
    m = with_events()
    a = fresh(12)
    kv = began(m, None, 12)
    kv.commit(a[:4])
    with pytest.raises(k.StateError, match=r"1 KV cache\(s\) still open"):
        m.clear_reusable_blocks()
    assert (told(m), probe(m, a)) == ([("stored", [4])], [4])
    mine = row(kv)
    m.set_weights_epoch(1)
    kv.commit(a[4:8])
    kv.commit(a[8:11], is_end=True)
    assert (kv.num_committed_tokens, row(kv), probe(m, a)) == (11, mine, [0])
    kv.close()
    assert told(m) == [("removed", 1)]
    check(m)
    assert stats(m) == (16, 15, 1)  # reclaimed when room is needed
    m.clear_reusable_blocks()
    assert stats(m) == (16, 16, 0)


def test_epochs_rise():
    """B12: weights that come back get another number, so nothing of the first time comes back."""
    m = with_events()
    a = fresh(8)
    m.set_weights_epoch(1)
    kv = began(m, None, 8)
    kv.commit(a[:4])
    m.set_weights_epoch(2)
    with pytest.raises(ValueError, match="epochs rise"):
        m.set_weights_epoch(1)
    told(m)
    kv.commit(a[4:])
    assert (told(m), probe(m, a)) == ([], [0])
    kv.close()
    check(m)


def test_a_partial_block_is_not_swapped_for_the_full_one():
    """A2: the writer went on in a shared page (NVIDIA/TensorRT-LLM#12306)."""
    m = typed_manager(slots=16, T=4, layers=1)
    author = Author(m)
    author.turn([0, 1, 2, 3])
    kv = author.began(capacity=4)
    mine = row(kv)
    author.computes(kv, [0, 1])
    author.computes(kv, [8, 9])
    assert row(kv) == mine
    reader = author.began([0, 1, 2, 3, 7])
    assert reader.num_committed_tokens == 4
    assert row(reader)[0] != mine[0]
    author.engine.verify([kv, reader])
    author.engine.close(kv)
    author.engine.verify([reader])
    assert probe(m, [0, 1, 8, 9], [0, 1, 2, 3]) == [4, 4]


@pytest.mark.parametrize("short", [1, 5, 7])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("held", [False, True])
def test_an_endpoint_inside_a_block_survives_the_full_one(short, order, held):
    """A3: a rewind point was lost, or its page (NVIDIA/TensorRT-LLM#17122)."""
    m = opaque_manager(T=8)
    prompts = [list(range(short)), list(range(8))][::order]
    caches = [began(m, None, len(prompt)) for prompt in prompts]
    for kv, prompt in zip(caches, prompts, strict=True):
        kv.commit(prompt)
        kv.stop_committing()
        if not held:
            kv.close()
    cuts = [n for n in (short, 3, 8) if n <= 8]
    assert probe(m, *([*range(n), 99] for n in cuts)) == cuts
    m.close_kv_caches(caches)
    check(m)
    assert stats(m) == (16, 15, 1)
    m.clear_reusable_blocks()
    assert stats(m) == (16, 16, 0)


def test_short_lives_leave_nothing_behind(monkeypatch):
    """A7: chains of freed blocks ended in a crash (NVIDIA/TensorRT-LLM#16037)."""
    monkeypatch.setattr("kvcore.control.ghosts.MOST", 20)
    m = opaque_manager(slots=64)

    def live(times):
        for i in range(times):
            with m.create_kv_cache() as kv:
                kv.resume()
                kv.resize(20)
                if i % 4 == 0:
                    kv.commit([i % 7, i % 11, i % 13, i, *range(16)])

    live(200)
    gc.collect()
    before = len(gc.get_objects())
    live(5_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    check(m)
    m.clear_reusable_blocks()
    assert stats(m) == (64, 64, 0)


def test_a_million_blocks_are_one_sequence():
    """A7: without recursion, published and not."""
    m = opaque_manager(slots=1_000_000, T=1, device="meta", max_sequences=2)
    tokens = np.arange(1_000_000, dtype=np.int32)
    for publishes in (False, True):
        kv = began(m, None, 1_000_000)
        if publishes:
            kv.commit(tokens)
        kv.close()
    assert probe(m, tokens) == [1_000_000]
    m.clear_reusable_blocks()
    assert stats(m) == (1_000_000, 1_000_000, 0)


def test_a_deep_tree_is_no_recursion():
    """A7: a branch at each of 500 blocks."""
    m = opaque_manager(slots=1024, T=1, device="meta")
    a = fresh(500)
    turn(m, a)
    for end in range(1, 500):
        turn(m, [*a[:end], 7])
    assert probe(m, a, [*a[:250], 7]) == [500, 251]
    check(m)
    m.clear_reusable_blocks()
    assert stats(m) == (1024, 1024, 0)


def test_what_is_closed_publishes_nothing_more():
    """A8: a late store left pages without an owner (NVIDIA/TensorRT-LLM#15018)."""
    m = opaque_manager(slots=8)
    for late in (True, False):
        a = fresh(12)
        kv = began(m, None, 12)
        if late:
            kv.close()
            with pytest.raises(k.StateError, match="closed"):
                kv.commit(a)
            with pytest.raises(k.StateError, match="closed"):
                kv.stop_committing()
        else:
            kv.commit(a)
            kv.close()
        kv.close()
        check(m)
        assert stats(m) == (8, 8 if late else 5, 0 if late else 3)
        assert probe(m, a) == [0 if late else 12]


def test_closing_and_committing_race():
    """A8: whoever comes first, the pages are freed once."""
    m = opaque_manager(slots=8)
    for _ in range(200):
        a = fresh(12)
        kv = began(m, None, 12)
        start, outcome = Barrier(2), []

        def commit(kv=kv, a=a, start=start, outcome=outcome):
            start.wait(10)
            try:
                kv.commit(a)
            except k.StateError as error:
                outcome.append(error)

        thread = Thread(target=commit)
        thread.start()
        start.wait(10)
        kv.close()
        thread.join()
        check(m)
        assert probe(m, a) == [0 if outcome else 12]
        m.clear_reusable_blocks()
        assert stats(m) == (8, 8, 0)


def test_full_pools_are_an_answer():
    """A9: no victim was an assertion (NVIDIA/TensorRT-LLM#1687)."""
    m = opaque_manager(slots=4)
    a, b = fresh(8), fresh(6)
    turn(m, a)
    turn(m, b)
    held, other = began(m, a), began(m, b[:4], 8)  # which evicts the tail of b
    assert stats(m) == (4, 0, 0)
    fresh_one = m.create_kv_cache(input_tokens=a[:6])
    before = (stats(m), probe(m, a, b), fresh_one.capacity)
    assert fresh_one.resume() is False
    assert m.advance([held], 1) is False
    assert other.resize(9) is False
    assert (stats(m), probe(m, a, b), fresh_one.capacity) == before
    check(m)
    other.close()
    assert fresh_one.resume()
    assert m.advance([held], 1)
    check(m)


# -- finding ---------------------------------------------------------------------------------------


def test_what_was_evicted_is_not_found():
    """A10: a recycled page was still found (vllm-project/vllm#4764)."""
    m = typed_manager(slots=1, T=4, layers=1, heads=2, dim=64)
    assert stats(m)[0] == 1
    author = Author(m)
    a, b = [0, 1, 2, 3], [50, 51, 52, 53]
    author.turn(a)
    kv = author.began(capacity=4)
    author.computes(kv, b, commit=False)
    assert probe(m, a, b) == [0, 0]
    kv.commit(b)
    assert probe(m, a, b) == [0, 4]
    author.engine.verify([kv])


def test_a_published_slot_is_let_go_once():
    """A11: pages were freed twice (vllm-project/vllm#1584)."""
    slots = SlotTable(4)
    p, q = slots.take(2)
    slots.publish(np.array([p], np.int32), 0)
    with pytest.raises(k.InternalError, match="released once too often"):
        slots.release(np.array([p, p], np.int32), 0, distinct=False)
    slots.release(np.array([p, q], np.int32), 0, distinct=True)
    assert (slots.num_free, slots.num_evictable) == (3, 1)
    for distinct in (True, False):
        with pytest.raises(k.InternalError, match="released once too often"):
            slots.release(np.array([p], np.int32), 0, distinct=distinct)
    slots.release(np.array([], np.int32), 0, distinct=True)
    assert (slots.num_free, slots.num_evictable) == (3, 1)
    slots.withdraw(np.array([p], np.int32))
    assert (slots.num_free, slots.num_evictable) == (4, 0)
    assert sorted(slots.take(4).tolist()) == [0, 1, 2, 3]
    with pytest.raises(k.InternalError):
        slots.take_one()


def test_shared_prefixes_close_in_one_call():
    """A11: one release names a page as often as it is shared."""
    m = opaque_manager()
    a = fresh(8)
    turn(m, a)
    m.close_kv_caches([began(m, a + fresh(4)) for _ in range(3)])
    check(m)
    assert stats(m) == (16, 14, 2)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("partial", [False, True])
def test_a_prompt_that_is_cached_to_its_end(length, partial):
    """A13: at least one token is computed, in a page of its own (vllm-project/vllm#11186)."""
    m = typed_manager(slots=16, T=4, layers=1, enable_partial_reuse=partial)
    author = Author(m)
    a = list(range(9))
    author.turn(a[:8])
    kv = author.began(a[: length - 1], length)
    found = kv.num_committed_tokens
    assert found == (length - 1 if partial else (length - 1) // 4 * 4)
    author.computes(kv, a[found:length])
    author.engine.verify([kv])
    author.engine.close(kv)
    check(m)
    assert probe(m, a) == [max(8, length)]
    assert stats(m)[2] == 2 + (length == 9)  # no block is stored twice


def test_a_probe_is_no_promise():
    """A14: a hit length was kept from the probe on (vllm-project/vllm#17305)."""
    m = opaque_manager(slots=4)
    a = fresh(8)
    turn(m, a)
    assert probe(m, a) == [8]
    squeeze(m, 16)
    kv = m.create_kv_cache(input_tokens=a)
    assert (kv.num_committed_tokens, kv.capacity) == (0, 0)


def test_what_is_not_computed_yet_is_not_found():
    """A15: the second of a batch read unwritten pages (vllm-project/vllm#7822)."""
    m = typed_manager(slots=16, T=4, layers=1)
    author = Author(m)
    a = fresh(8)
    first, second = author.began(a), author.began(a)
    assert (first.num_committed_tokens, second.num_committed_tokens) == (0, 0)
    author.computes(first, a)
    third = author.began(a)
    assert third.num_committed_tokens == 8
    before = stats(m)[1]
    author.computes(second, a)
    assert row(first) == row(second) == row(third)
    assert stats(m)[1] == before + 2
    author.engine.verify([first, second, third])
    m.close_kv_caches([first, second, third])
    assert stats(m) == (16, 14, 2)


def test_a_partial_key_does_not_come_back():
    """A16: each later call stored it again (vllm-project/vllm#49125)."""
    m = with_events(T=16, commit_min_snapshot=True)
    a = fresh(24)
    kv = began(m, None, 24)
    kv.commit(a[:8])
    assert told(m) == [("stored", [8])]
    kv.commit(a[8:16])
    assert sorted(told(m)) == [("removed", 1), ("stored", [16])]
    for _ in range(5):
        kv.commit([])
    assert told(m) == []
    kv.commit(a[16:])
    assert told(m) == [("stored", [8])]
    keys = [key for _, key in k.sequence_to_blockchain_keys(16, k.ReuseScope(), a[:8])]
    assert m.match_block_keys(keys[1:]) == (0, 0)
    assert probe(m, a[:8], a) == [8, 24]
