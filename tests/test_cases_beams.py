"""How beam search on paged caches failed elsewhere.

Each test says what it guards and, where the failure is public, whose it was.
"""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.testing import FakeEngine, FaultError, Lockstep, check, fail_at
from kvcore.testing.small import small_config
from tests.helpers import opaque_manager, opened, row, typed_manager, used


def beams(slots=32, width=4, **settings):
    """A manager of typed pages, T = 4, that allows beams."""
    return k.KVCacheManager(
        small_config(slots=slots, max_beam_width=width, **settings), device="host"
    )


def prefilled(manager, engine, prompt, width=1):
    """A cache whose prompt is computed, with `width` beams."""
    (kv,) = manager.create_kv_caches([prompt])
    assert kv.resume()
    assert kv.resize(prompt)
    engine.write([kv], prompt)
    assert kv.resize(None, prompt)
    assert engine.set_beam_width(kv, width)
    return kv


# -- sharing and writing ---------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "widened", "grown"), [(6, 5, (5, 5, 8)), (8, 2, (6, 6, 6))])
def test_no_beam_writes_into_a_page_of_another(prompt, widened, grown):
    """A fork shared the partly filled last page (vllm-project/vllm#417, #1584)."""
    m = beams()
    engine = FakeEngine(m)
    kv = prefilled(m, engine, prompt, width=4)
    refs = m._runtime.control.slots[0].refs
    assert used(m) == widened
    for pages in grown:  # at position 8 the second block is full: three parents keep three of it
        assert m.advance([kv], 1)
        assert used(m) == pages
        engine.write([kv])  # another token for each beam
        assert kv.resize(None, kv.capacity)
        engine.reorder_beams(kv, [0, 0, 1, 3])
        engine.verify([kv])
        check(m, device=True)
        assert refs[row(kv)[0]] == 4
    assert engine.set_beam_width(kv, 2)
    assert refs[row(kv)[0]] == 2
    engine.verify([kv])
    engine.close(kv)
    assert used(m) == 0


def test_a_copy_that_fails_leaves_one_beam():
    m = beams()
    engine = FakeEngine(m)
    kv = prefilled(m, engine, 6)
    before = (row(kv), used(m))
    with fail_at(m, "copy"), pytest.raises(FaultError):
        kv.set_beam_width(4)
    assert (kv.beam_width, row(kv), used(m)) == (1, *before[:1], before[1])
    check(m)
    engine.verify([kv])
    assert engine.set_beam_width(kv, 4)
    engine.verify([kv])


def test_every_beam_has_a_row_of_every_block():
    """Blocks before the history had one row, readers failed (NVIDIA/TensorRT-LLM#15197)."""
    m = opaque_manager(slots=32, max_beam_width=3, enable_partial_commit=False)
    (kv,) = opened(m, 12)
    kv.resize(None, 12)
    assert kv.set_beam_width(3)
    assert kv.resize(14)
    table = np.array([row(kv, beam) for beam in range(3)])
    assert table.shape == (3, 4)
    assert (table[:, :3] == table[0, :3]).all()
    assert table.min() >= 0
    assert len(set(table[:, 3])) == 3
    for beam in range(3):
        assert kv.get_aggregated_page_indices(0, beam).tolist() == table[beam].tolist()
    step = m.create_batch(3, 1)
    step.prepare([kv], 0)
    assert m.device.to_host(step.page_table(0), stream=kv.stream).tolist() == table.tolist()


# -- reordering ------------------------------------------------------------------------------------

PARENTS = [[1, 2, 0], [2, 0, 1], [1, 0, 2], [1, 1, 0], [0, 1, 2], [2, 2, 2], [0, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize("parents", PARENTS)
def test_reordering_with_cycles(parents):
    """In place, [1, 2, 0] gave b, c, b (ggml-org/whisper.cpp#1243). Two caches, written tails."""
    m = beams(slots=48)
    pair = Lockstep(m)
    first, second = pair.create([0, 0])
    for kv, length in ((first, 6), (second, 9)):
        pair.resume(kv)
        assert pair.resize(kv, length)
        pair.write([kv], [0], [length])
        assert pair.resize(kv, length + 5, length)
        assert pair.set_beam_width(kv, 3)
        pair.write([kv], [length], [5])
    with fail_at(m, "copy", 10**6) as copies:
        pair.reorder_beams(first, parents)
    assert copies.calls == (len(set(parents)) < 3)  # only a repeated parent is copied, in one go
    pair.look([first, second])
    pair.settle()
    pair.reorder_beams(second, parents, 11)
    assert pair.set_beam_width(first, 2)
    assert pair.set_beam_width(first, 4, [1, 0, 0, 1])
    assert pair.set_beam_width(second, 2, [2, 0])
    pair.look([first, second])
    pair.settle()


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 2, 0], [0, 0, 3], [0, 0, -1], [0, 0, 0.5]])
def test_wrong_parents_change_nothing(wrong):
    m = beams()
    engine = FakeEngine(m)
    kv = prefilled(m, engine, 6, width=3)
    for call in (kv.reorder_beams, lambda parents: kv.set_beam_width(3, parents)):
        with pytest.raises((ValueError, TypeError), match="parents"):
            call(wrong)
    check(m)
    engine.verify([kv])


def test_reordering_needs_no_free_page():
    """A full pool is where beam search lives; a step must not ask for more."""
    m = beams(slots=5)
    engine = FakeEngine(m)
    kv = prefilled(m, engine, 6, width=4)
    assert used(m) == 5
    for parents in ([3, 2, 1, 0], [1, 1, 1, 1], [0, 2, 2, 0]):
        engine.reorder_beams(kv, parents)
        engine.verify([kv])
        check(m)
    assert used(m) == 5


# -- sizes -----------------------------------------------------------------------------------------


def test_wide_beams_fit_where_their_count_says():
    """256 pages were not enough for a request that needs 97 (NVIDIA/TensorRT-LLM#19527)."""
    m = beams(slots=97, width=32, tokens_per_block=32)
    engine = FakeEngine(m, max_tokens=4096)
    kv = prefilled(m, engine, 40, width=32)
    assert used(m) == 1 + 32
    for _ in range(64):
        assert m.advance([kv], 1)
        engine.write([kv])
        assert kv.resize(None, kv.capacity)
    assert used(m) == 1 + 32 * 3
    engine.verify([kv])
    assert m.advance([kv], 32) is False


@pytest.mark.parametrize("width", [1, 128, 256])
def test_the_metadata_of_very_wide_beams(width):
    """Width 128 failed in a copy of the metadata (NVIDIA/TensorRT-LLM#12071)."""
    m = beams(slots=2 + width, width=256, max_sequences=2)
    engine = FakeEngine(m, max_rows=256, max_tokens=2048)
    kv = prefilled(m, engine, 5, width=width)
    assert used(m) == 1 + width
    assert kv.resize(7)
    engine.write([kv], 2)
    step = m.create_batch(256, 512)
    step.prepare([kv], 2)
    assert (step.num_rows, step.num_tokens) == (width, 2 * width)
    slots, offsets = m.slot_mapping([kv], 2)
    mapping = m.device.to_host(step.mapping[0], stream=kv.stream)
    assert mapping[: 2 * width].tolist() == np.stack([slots, offsets], -1).tolist()
    assert (mapping[2 * width :, 0] == -1).all()
    table = m.device.to_host(step.page_table(0), stream=kv.stream)
    assert table.tolist() == [row(kv, beam) for beam in range(width)]
    engine.verify([kv])
    engine.reorder_beams(kv, list(range(width - 1, -1, -1)))
    engine.verify([kv])


# -- neighbours ------------------------------------------------------------------------------------


def run_a(m, others):
    """Gathers of a cache that decodes with two beams, whatever else is in the batch."""
    generator = np.random.default_rng(7)
    values = generator.standard_normal((2, 11, 2, 8)).astype(np.float32)
    (kv,) = m.create_kv_caches([6])
    assert kv.resume()
    assert kv.resize(6)
    step = m.create_batch(8, 64)
    caches = [kv, *others]

    def append(start, per_row):
        """`per_row` [rows of kv, n, H, D]; the others get noise."""
        count = per_row.shape[1]
        rows = sum(other.beam_width for other in others)
        noise = generator.standard_normal((rows * count, 2, 8)).astype(np.float32)
        step.prepare(caches, count, start=[start] + [other.capacity - count for other in others])
        tokens = np.concatenate([per_row.reshape(-1, 2, 8), noise])
        for layer in (0, 1):
            step.append(layer, {"key": tokens + layer, "value": -tokens - layer})

    append(0, values[:1, :6])
    assert kv.resize(None, 6)
    assert kv.set_beam_width(2)
    for position in range(6, 11):
        assert m.advance(caches, 1)
        append(position, values[:, position : position + 1])
        assert kv.resize(None, position + 1)
        kv.reorder_beams([1, 1] if position == 7 else [1, 0])
    step.prepare([kv], 11, start=0)
    gathered = [array.copy() for layer in (0, 1) for array in step.gather(layer)]
    kv.close()
    return gathered


def test_a_result_does_not_depend_on_the_batch():
    """The same sentence, another translation when batched (OpenNMT/CTranslate2#546)."""

    def manager():
        return typed_manager(slots=64, max_beam_width=4, enable_partial_commit=False)

    alone = run_a(manager(), [])
    m = manager()
    (other,) = opened(m, 9)
    other.resize(None, 9)
    assert other.set_beam_width(3)
    together = run_a(m, [other])
    other.close()
    afterwards = run_a(m, [])  # in the same rows and slots
    for one, two, three in zip(alone, together, afterwards, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()
    assert not np.array_equal(alone[0][:11], alone[0][11:])  # the beams differ
