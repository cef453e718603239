"""What works together with beams, pair by pair; `docs/beams.md` is the table of these tests."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvcore as k
from kvcore.testing import check
from tests.helpers import opaque_manager, row, typed_manager, used
from tests.test_step_beams import Search

ROOT = Path(__file__).parents[1]


def beams_manager(slots=32, **settings):
    settings = {"max_beam_width": 4, "enable_partial_commit": False} | settings
    return opaque_manager(slots, **settings)


def begun(manager, prompt, width, scope=None, **settings):
    """A cache whose prompt is computed, with beams."""
    kv = manager.create_kv_cache(scope, prompt[:-1], expected_prompt_length=len(prompt), **settings)
    assert kv.resume()
    assert kv.resize(len(prompt), len(prompt))
    kv.commit(prompt[kv.num_committed_tokens :])
    assert kv.set_beam_width(width)
    return kv


def ended(kv, answer):
    """Its first beam won, and has these tokens."""
    assert kv.set_beam_width(1, parents=[0])
    kv.commit(answer)
    kv.close()


P = list(range(100, 110))  # two full blocks of 4, and half a block


@pytest.mark.parametrize("other", [k.ReuseScope(lora_id=8), k.ReuseScope(lora_id=7, salt=1), None])
def test_adapters_share_nothing(other):
    m = beams_manager()
    mine = k.ReuseScope(lora_id=7)
    a, b = begun(m, P, 3, mine), begun(m, P, 3, other)
    assert not {s for i in range(3) for s in row(a, i)} & {s for i in range(3) for s in row(b, i)}
    for kv in (a, b):
        assert kv.resize(13, 13)
    ended(a, [1, 2, 3])
    found = [*P, 1, 2]
    assert (m.probe_reuse(mine, found), m.probe_reuse(other, found)) == (12, 8)
    again = begun(m, [*found, 9], 2, mine)
    assert again.num_committed_tokens == 13
    check(m)
    again.close()
    b.close()
    assert used(m) == 0


def test_new_weights_leave_open_beams_alone():
    m = beams_manager()
    kv = begun(m, P, 3, k.ReuseScope(lora_id=7))
    pages = [row(kv, i) for i in range(3)]
    m.set_weights_epoch(1, lora_id=7)
    assert [row(kv, i) for i in range(3)] == pages
    kv.reorder_beams([2, 2, 0])
    ended(kv, [])
    assert m.probe_reuse(k.ReuseScope(lora_id=7), P) == 0
    check(m)


@pytest.mark.parametrize("prompts", [(8, 5, 7), (1, 12, 4)])
def test_rejected_drafts_are_taken_back_from_all_beams(prompts):
    s = Search(5, prompts, (4, 1, 3))
    for _ in range(12):
        before = [kv.history_length for kv in s.kvs]
        assert s.m.advance(s.kvs, 6)  # drafts, written and then refused
        s.batch.prepare(s.kvs, 6)
        s.append(s.values(6 * 8))
        s.m.truncate(s.kvs, before)
        check(s.m)
        s.step(s.random())
        for kv in s.kvs:
            kv.settle()
    s.right()
    assert [kv.num_blocks for kv in s.kvs] == [-(-kv.history_length // 4) for kv in s.kvs]
    with pytest.raises(ValueError, match="capacities"):
        s.m.truncate(s.kvs, [kv.history_length - 1 for kv in s.kvs])


def test_beams_that_a_mask_ends_leave_or_go_on_from_others():
    m = beams_manager()
    kv = begun(m, P, 4)
    assert kv.resize(14, 14)
    rows, before = [row(kv, i) for i in range(4)], used(m)
    assert kv.set_beam_width(2, parents=[3, 1])  # 0 and 2 have no allowed token
    assert [row(kv, i) for i in range(2)] == [rows[3], rows[1]]
    assert used(m) == before - 2 * 2  # two private blocks each
    assert kv.set_beam_width(4, parents=[1, 0, 0, 1])  # wide again, from those that live
    assert [row(kv, i)[:2] for i in range(4)] == [rows[0][:2]] * 4
    check(m)


def test_a_constrained_search_on_pages_is_the_one_on_dense_arrays():
    """Every third byte must be a space: some beams end there, and the width follows."""
    pytest.importorskip("safetensors")
    from kvcore.demo.run import open_session
    from kvcore.demo.search import Choice, Hypotheses, expand
    from kvcore.demo.stores import DenseStore, PagedStore

    def search(session, store, widths):
        beams, tokens = Hypotheses(), np.array([list(b"In the beginning God created")])
        for step in range(24):
            logits = session.decoder.step(tokens, store).copy()
            if step % 3 == 2:
                logits[:, np.arange(256) != 32] = -np.inf
            with np.errstate(invalid="ignore"):
                choice = expand(beams.log_probs, logits, 4)
            alive = np.isfinite(choice.log_probs)
            choice = Choice(*(a[alive] for a in (choice.parents, choice.tokens, choice.log_probs)))
            beams.follow(choice)
            store.follow(choice.parents)
            widths.append(len(choice.tokens))
            tokens = choice.tokens[:, None]
        return beams.texts

    with open_session("host") as session:
        shape = session.weights.shape
        paged = PagedStore(
            shape, prompt_length=28, capacity=60, width=4, device=session.device, stream=None
        )
        narrow, wide = [], []
        try:
            on_pages = search(session, paged, narrow)
        finally:
            paged.close()
        assert on_pages == search(session, DenseStore(shape, 60, np), wide)
    assert narrow == wide
    assert all(text[2::3] == b" " * 8 for text in on_pages)


@pytest.mark.parametrize("tokens_per_block", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_of_any_size(tokens_per_block, layout):
    s = Search(6, (16, 5, 15), (4, 1, 3), layout, T=tokens_per_block)
    for _ in range(20):
        s.step(s.random())
    s.right()
    for kv in s.kvs:
        kv.settle()
    check(s.m)


def test_found_prefixes_are_shared_by_beams_and_winners_are_found():
    m = beams_manager()
    ended(begun(m, P[:8], 1), [])
    prompt = [*P[:6], 50, 51, 52]  # the second block only in part: it is copied first
    kv = m.create_kv_cache(input_tokens=prompt[:-1], expected_prompt_length=9)
    assert (kv.num_committed_tokens, kv.resume(), kv.resize(9, 9)) == (6, True, True)
    assert kv.set_beam_width(3)
    first = row(kv)[0]
    assert [row(kv, i)[0] for i in range(3)] == [first] * 3
    kv.commit(prompt[6:8])  # a block that all share is published while there are beams
    assert kv.resize(12, 12)
    with pytest.raises(k.StateError, match="winner"):
        kv.commit([52, 60, 61, 62])
    before = used(m)
    assert kv.set_beam_width(1, parents=[2])
    kv.commit([52, 60, 61, 62])
    assert used(m) == before - 2
    kv.close()
    assert m.probe_reuse(None, [*prompt, 60, 61, 62]) == 12
    check(m)


def test_beams_need_partial_commit_off():
    m = beams_manager(enable_partial_commit=True)
    kv = begun(m, P, 1)
    with pytest.raises(k.StateError, match="enable_partial_commit=False"):
        kv.set_beam_width(2)


def test_forks_may_have_beams_and_beams_do_not_fork():
    m = beams_manager(64)
    kv = begun(m, P, 1)
    forks = kv.fork(2)
    for each in (kv, *forks):
        assert each.set_beam_width(3)
        assert each.resize(13, 13)
    everyone = [(each, beam) for each in (kv, *forks) for beam in range(3)]
    assert len({tuple(row(*one)[:2]) for one in everyone}) == 1
    assert len({slot for one in everyone for slot in row(*one)[2:]}) == 9 * 2
    with pytest.raises(k.StateError, match="several beams"):
        kv.fork(1)
    check(m)
    m.close_kv_caches([kv, *forks])
    assert used(m) == 0


def test_suspended_beams_keep_what_they_have():
    s = Search(7, (5, 8), (4, 3))
    for _ in range(6):
        s.step(s.random())
    for kv in s.kvs:
        kv.settle()
        kv.suspend()
    assert row(s.kvs[0], 3) == [-1] * s.kvs[0].num_blocks
    other = s.device.create_stream()
    assert all(kv.resume(other) for kv in s.kvs)
    s.right()
    for _ in range(6):
        s.step(s.random())
    s.right()
    for kv in s.kvs:
        kv.settle()
    check(s.m)


def test_a_suspended_cache_gets_narrower_and_not_wider():
    m = beams_manager()
    kv = begun(m, P, 4)
    assert kv.resize(13, 13)
    rows, before = [row(kv, i) for i in range(4)], used(m)
    kv.suspend()
    assert kv.set_beam_width(1)
    with pytest.raises(k.StateError, match=r"resume\(\) it first"):
        kv.set_beam_width(2)
    assert kv.beam_width == 1
    assert used(m) == before - 3 * 2
    assert kv.resume()
    assert row(kv) == rows[0]
    check(m)


def test_a_latent_buffer_moves_with_its_beam():
    """kind="mla": one buffer, one head."""
    buffers = [k.BufferConfig(role="key", size=4 * 16 * 4, dtype="float32", shape=(16,))]
    m = k.KVCacheManager(
        k.KVCacheManagerConfig(
            tokens_per_block=4,
            cache_tiers=[k.GpuCacheTierConfig(quota=1 << 14)],
            layers=[k.AttentionLayerConfig(layer_id=0, kind="mla", buffers=buffers)],
            max_beam_width=3,
            enable_partial_commit=False,
        ),
        device="host",
    )
    kv = begun(m, P, 3)
    assert m.advance([kv], 1)
    step = m.create_batch(3, 64)
    step.prepare([kv], 1)
    news = np.arange(48, dtype=np.float32).reshape(3, 16)
    step.append(0, {"key": news})
    kv.reorder_beams([2, 0, 2])
    step.prepare([kv], 1)
    (got,) = step.gather(0, ("key",))
    assert got.reshape(3, 16).tolist() == news[[2, 0, 2]].tolist()
    check(m)


HALVES = [k.BufferConfig(role=role, size=1024) for role in ("key", "value")]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("layer", "settings", "reason"),
    [
        (k.AttentionLayerConfig(layer_id=0, buffers=HALVES, kind="sparse"), {}, "sparse"),
        (
            k.AttentionLayerConfig(layer_id=0, buffers=HALVES, sliding_window_size=8),
            {},
            "sliding windows",
        ),
        (k.SsmLayerConfig(layer_id=0, buffers=HALVES), {}, "recurrent"),
        (
            k.AttentionLayerConfig(layer_id=0, buffers=HALVES),
            {"lower": k.HostCacheTierConfig(quota=1 << 20)},
            "host and disk tiers",
        ),
    ],
)
def test_what_is_not_built_is_refused_before_anything_is_allocated(
    layer, settings, reason, width, monkeypatch
):
    from kvcore.device.host import HostDevice

    device = HostDevice()
    monkeypatch.setattr(device, "reserve", lambda *_: pytest.fail("memory was reserved"))
    config = k.KVCacheManagerConfig(
        tokens_per_block=4,
        cache_tiers=[k.GpuCacheTierConfig(quota=1 << 16), *settings.values()],
        layers=[layer],
        max_beam_width=width,
        enable_partial_commit=False,
        commit_min_snapshot=isinstance(layer, k.SsmLayerConfig),
    )
    with pytest.raises(NotImplementedError, match=reason):
        k.KVCacheManager(config, device=device)


def test_beams_over_float4_latents_are_refused_and_one_beam_is_not():
    latent = k.BufferConfig(role="key", size=4 * 8, dtype="float4_e2m1fn", shape=(16,))
    settings = {
        "tokens_per_block": 4,
        "cache_tiers": [k.GpuCacheTierConfig(quota=1 << 16)],
        "layers": [k.AttentionLayerConfig(layer_id=0, kind="mla", buffers=[latent])],
        "enable_partial_commit": False,
    }
    k.KVCacheManager(k.KVCacheManagerConfig(**settings), device="host").shutdown()
    with pytest.raises(NotImplementedError, match="float4 MLA"):
        k.KVCacheManager(k.KVCacheManagerConfig(**settings, max_beam_width=2), device="host")


def test_a_prompt_that_has_not_arrived_is_not_widened():
    """What disaggregation needs: pages are there, keys and values come later, in one beam."""
    m = beams_manager()
    kv = m.create_kv_cache(expected_prompt_length=10)
    assert kv.resume()
    assert kv.resize(10)  # the sender writes into these pages
    before = used(m)
    for history in (0, 9):
        assert kv.resize(None, history)
        with pytest.raises(k.StateError, match="prompt is not computed"):
            kv.set_beam_width(4)
    assert (kv.beam_width, used(m)) == (1, before)
    assert kv.resize(None, 10)  # received
    assert kv.set_beam_width(4)
    assert used(m) == before + 3
    check(m)


def test_one_batch_of_several_widths():
    s = Search(8, (4, 7, 1, 9), (4, 1, 2, 3))
    for _ in range(15):
        s.step(s.random())
    s.right()


def test_a_cross_cache_is_read_by_all_beams_and_kept_by_their_prompt():
    """Encoder-decoder: two managers, one device, pages of both or of neither."""
    own, cross = beams_manager(16), typed_manager(slots=8, layers=1)
    decoder, encoder = own.create_kv_cache(expected_prompt_length=1), cross.create_kv_cache()
    assert decoder.resume()
    assert encoder.resume()
    pages = cross.get_storage_statistics()[0].total
    assert not k.reserve_all([(decoder, 1), (encoder, 4 * pages + 1)])
    assert (decoder.capacity, encoder.capacity) == (0, 0)
    assert k.reserve_all([(decoder, 1), (encoder, 11)])
    assert encoder.resize(None, 11)
    encoder.commit(list(range(11)))
    assert decoder.resize(None, 1)
    assert decoder.set_beam_width(4)
    offsets = cross.create_batch_tables().offsets([encoder], 0, decoder.beam_width)
    assert offsets.shape == (1, 4, 2, 4)
    assert (offsets == offsets[:, :1]).all()
    encoder.close()
    assert cross.probe_reuse(None, list(range(11))) == 11
    for manager in (own, cross):
        check(manager)


def test_every_test_that_the_table_names_exists():
    page = (ROOT / "docs" / "beams.md").read_text("utf-8")
    named = re.findall(r"`(\w+)::(test_\w+)`", page)
    assert len(named) > 15
    for file, test in named:
        source = (ROOT / "tests" / f"{file}.py").read_text("utf-8")
        assert f"def {test}(" in source, f"{file}.py has no {test}"
