"""Start-up with dummy requests of full width in a small pool: it works, or says what is missing.

256 pages were not enough to warm up 8 x 32 beams (NVIDIA/TensorRT-LLM#19527).
"""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.testing import FakeEngine, check
from kvcore.testing.small import small_config
from tests.helpers import opaque_manager, opened, row, used

PAGES, WIDTH, T, REQUESTS = 256, 32, 32, 8


def pool(**settings):
    return k.KVCacheManager(
        small_config(slots=PAGES, max_beam_width=WIDTH, tokens_per_block=T, **settings),
        device="host",
    )


def dummies(engine, count, prompt):
    """Requests nobody made, their prompts written, in one beam each."""
    made = []
    for _ in range(count):
        kv = engine.create_kv_cache(expected_prompt_length=prompt, stats_excluded=True)
        assert kv.resume()
        assert engine.resize(kv, prompt)
        engine.write([kv], prompt)
        assert kv.resize(None, prompt)
        made.append(kv)
    return made


def engine_of(m):
    return FakeEngine(m, max_rows=REQUESTS * WIDTH, max_tokens=8192)


def test_short_dummies_fill_the_pool_to_the_last_page():
    """A page for each beam: 8 x 32. A whole block of tokens, and not one token more."""
    m = pool()
    engine = engine_of(m)
    kvs = dummies(engine, REQUESTS, 1)
    for kv in kvs:
        assert engine.set_beam_width(kv, WIDTH)
    assert used(m) == PAGES
    for step in range(1, T):
        assert m.advance(kvs, 1)
        engine.write(kvs)
        for kv in kvs:
            assert kv.resize(None, kv.capacity)
            if step in (1, 2, T - 2):
                engine.reorder_beams(kv, np.random.default_rng(step).integers(0, 32, 32).tolist())
    engine.verify(kvs)
    before = [row(kv, beam) for kv in kvs for beam in range(WIDTH)]
    assert m.missing_pages(kvs, 0) == 0
    assert m.advance(kvs, 1) is False
    assert m.missing_pages(kvs, 1) == REQUESTS * WIDTH
    assert m.missing_pages(kvs[:2], [1, T + 1]) == 3 * WIDTH
    assert before == [row(kv, beam) for kv in kvs for beam in range(WIDTH)]
    check(m, device=True)
    engine.close(kvs.pop())
    assert m.missing_pages(kvs[:1], 1) == 0
    assert m.advance(kvs[:1], 1)
    engine.verify(kvs)


def test_a_widening_that_does_not_fit_says_how_many_pages_are_missing():
    """33 pages each for a prompt of 40: the eighth finds 23 free and takes 31 more."""
    m = pool()
    engine = engine_of(m)
    kvs = dummies(engine, REQUESTS, 40)
    for kv in kvs[:-1]:
        assert engine.set_beam_width(kv, WIDTH)
    last = kvs[-1]
    assert used(m) == 7 * 33 + 2
    rows = [row(kv, beam) for kv in kvs for beam in range(kv.beam_width)]
    assert last.set_beam_width(WIDTH) is False
    with pytest.raises(k.OutOfPagesError) as caught:
        last.beam_width = WIDTH
    assert str(caught.value) == (
        "beam_width: 32 beams take 31 more pages of pool group 0, 23 are free and 0 evictable: "
        "8 missing; close or shrink other caches and retry"
    )
    assert caught.value.missing == 8
    assert rows == [row(kv, beam) for kv in kvs for beam in range(kv.beam_width)]
    check(m, device=True)
    engine.verify(kvs)
    assert engine.set_beam_width(last, 1 + 23)
    assert used(m) == PAGES
    engine.verify(kvs)
    engine.close(kvs.pop(0))
    assert engine.set_beam_width(last, WIDTH)
    engine.verify(kvs)


def test_64_tokens_of_32_beams_take_97_pages_beside_whatever_else_fits():
    m = pool()
    engine = engine_of(m)
    kvs = dummies(engine, 2, T)
    for kv in kvs:
        assert engine.set_beam_width(kv, WIDTH)
    assert used(m) == 2  # the prompt fills its block: 64 rows read two pages
    for _ in range(2 * T):
        assert m.advance(kvs, 1)
        engine.write(kvs)
        for kv in kvs:
            assert kv.resize(None, kv.capacity)
    assert used(m) == 2 * (1 + 2 * WIDTH)
    engine.verify(kvs)
    assert m.missing_pages(kvs, 2 * T) == 2 * 2 * WIDTH - (PAGES - used(m))
    assert m.advance(kvs, 2 * T) is False
    assert m.missing_pages(kvs, T) == 0
    assert m.advance(kvs, T)


def test_dummies_of_one_prompt_share_one_page():
    """What a warm-up needs are rows that can be read: 256 of them, on one page."""
    m = pool()
    engine, prompt = engine_of(m), [1] * T
    first = engine.create_kv_cache(None, prompt, stats_excluded=True)
    assert first.resume()
    assert engine.resize(first, T)
    engine.write([first], T, tokens=[prompt])
    first.commit(prompt)
    kvs = [first]
    for _ in range(REQUESTS - 1):
        kvs.append(engine.create_kv_cache(None, prompt, stats_excluded=True))
        assert kvs[-1].resume()
    for kv in kvs:
        assert engine.set_beam_width(kv, WIDTH)
    assert used(m) == 1
    step = m.create_batch(REQUESTS * WIDTH, REQUESTS * WIDTH)
    step.prepare(kvs, 0)
    table = m.device.to_host(step.page_table(0), stream=first.stream)
    assert table[:, 0].tolist() == row(first) * (REQUESTS * WIDTH)
    engine.verify(kvs)
    assert m.get_committed_stats() == k.KVCacheStats()


# -- what is missing, exactly ----------------------------------------------------------------------


def test_pages_that_only_the_prefix_cache_holds_are_not_missing():
    m = opaque_manager(slots=8, max_beam_width=8, enable_partial_commit=False)
    (old,) = opened(m, 8)
    old.commit(list(range(8)))
    old.close()
    (kv,) = opened(m, 3)
    kv.resize(None, 3)
    assert [m.missing_pages([kv], n) for n in (1, 29, 30)] == [0, 0, 1]
    with pytest.raises(k.OutOfPagesError, match=r"take 8 more .* 5 are free and 2 .* 1 missing"):
        kv.fork(8)
    assert m.probe_reuse(None, list(range(8))) == 8
    assert kv.resize(8)
    with pytest.raises(k.OutOfPagesError, match=r"take 14 more .* 4 are free and 2 .* 8 m") as it:
        kv.beam_width = 8
    assert it.value.missing == 8
    kv.beam_width = 4
    assert (used(m), m.probe_reuse(None, list(range(8)))) == (8, 0)


def test_table_rows_that_are_missing_are_counted_too():
    m = opaque_manager(slots=8, max_beam_width=8, enable_partial_commit=False, max_rows=8)
    kv, *others = opened(m, 3, 3, 3)
    kv.resize(None, 3)
    with pytest.raises(k.OutOfPagesError) as caught:
        kv.beam_width = 8
    assert str(caught.value) == (
        "beam_width: 8 beams take 7 more table rows, 5 of max_rows=8 are free: 2 missing; close or "
        "narrow other caches, or raise max_rows"
    )
    assert (caught.value.missing, kv.beam_width) == (0, 1)
    m.close_kv_caches(others)
    kv.beam_width = 8


@pytest.mark.parametrize("n", [-1, 2**31, [1], [1, 2, 3], 0.5])
def test_wrong_questions_after_missing_pages(n):
    m = opaque_manager(slots=8, max_seq_len=12)
    kvs = opened(m, 3, 12)
    with pytest.raises((ValueError, TypeError)):
        m.missing_pages(kvs, n)
    with pytest.raises(ValueError, match="capacity: expected at most max_seq_len=12"):
        m.missing_pages(kvs, 1)
    kvs[0].suspend()
    with pytest.raises(ValueError, match="active"):
        m.missing_pages(kvs, 1)
