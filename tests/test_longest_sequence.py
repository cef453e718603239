"""How long a sequence may become in given pools, in numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import BatchDesc, KVCacheDesc, SwaScratchReuseConfig
from kvcore.control.demand import batch_slots
from kvcore.control.sizing import max_seq_len_that_fits
from tests.test_sizing import FULL, SSM, setup


def longest(groups, slots, bound, *, T=32, config=None, **kw):
    layout, made = setup(*groups, T=T, **(config or {}))
    return max_seq_len_that_fits(layout, made, slots, bound=bound, **kw)


@pytest.mark.parametrize(
    ("batch_size", "bound", "expected"),
    [(1, 0, 0), (1, 32, 32), (1, 64, 32), (1, 20, 20), (2, 64, 0), (3, 64, 0)],
)
def test_one_slot_of_full_attention(batch_size, bound, expected):
    assert longest([(FULL, 1)], (1,), bound, batch_size=batch_size) == expected


def test_a_window_slides_in_its_structural_floor():
    window = [((32, None), 1)]
    assert longest(window, (2,), 96) == 96
    assert longest(window, (1,), 96) == 32
    assert longest([((128, None), 1)], (5,), 10**9) == 10**9
    assert longest([((128, None), 1)], (4,), 10**9) == 128


def test_the_hungriest_step_decides():
    """At 96 tokens a window of 32 holds one block, but the token after 64 needs two."""
    groups = [((32, None), 1), (FULL, 1)]
    assert longest(groups, (4,), 96) == 64
    assert longest(groups, (5,), 96) == 96
    assert longest(groups, (4,), 96, max_step_tokens=0) == 96
    assert longest(groups, (4,), 96, max_step_tokens=0, batch_size=2) == 32


def test_a_prefill_chunk_needs_its_blocks_at_once():
    window = [((32, None), 1)]
    assert longest(window, (5,), 10**6, max_step_tokens=96) == 10**6
    assert longest(window, (4,), 10**6, max_step_tokens=96) == 128
    assert longest(window, (12,), 10**6, max_step_tokens=320) == 10**6


def test_scratch_blocks_make_long_chunks_cheap():
    """A chunk of 320 tokens touches 12 blocks; 8 of them share the 2 slots of 4 layers."""
    layers = [((32, None), 1)] * 4
    scratch = {"swa_scratch_reuse": SwaScratchReuseConfig()}
    assert longest(layers, (6,), 10**6, max_step_tokens=320, config=scratch) == 10**6
    assert longest(layers, (5,), 10**6, max_step_tokens=320, config=scratch) < 10**6
    assert longest(layers, (11,), 10**6, max_step_tokens=320) < 10**6


def test_the_last_to_arrive_must_pass_the_resume_limit():
    half = {"max_util_for_resume": 0.5}
    assert longest([(FULL, 1)], (10,), 10**6, config=half) == 10 * 32
    # When the last of them arrives, 5 of the 10 slots may be in use.
    assert longest([(FULL, 1)], (10,), 10**6, config=half, batch_size=2) == 5 * 32
    assert longest([(FULL, 1)], (10,), 10**6, config=half, batch_size=6) == 1 * 32
    assert longest([(FULL, 1)], (10,), 10**6, config=half, batch_size=7) == 0
    assert longest([(FULL, 1)], (10,), 10**6, batch_size=7) == 4 * 32


def test_states_count_at_block_boundaries_too():
    groups = [(FULL, 1), (SSM, 2)]
    assert longest(groups, (100, 3), 10**6, batch_size=3) == 96 * 32
    assert longest(groups, (100, 2), 10**6, batch_size=3) == 0


def test_a_shared_prompt_counts_once():
    # Of 100 slots 4 hold the prompt of all; each other sequence takes one.
    arguments = {"system_prompt_length": 150, "config": {"max_util_for_resume": 1}}
    groups = [(FULL, 1)]
    assert longest(groups, (100,), 10**6, batch_size=4, **arguments) == (4 + 93) * 32
    assert longest(groups, (100,), 10**6, batch_size=96, **arguments) == (4 + 1) * 32
    assert longest(groups, (100,), 10**6, batch_size=97, **arguments) == 4 * 32
    assert longest(groups, (100,), 10**6, batch_size=98, **arguments) == 0


def test_beams_multiply_what_follows_the_prompt():
    # 10 prompt blocks and 22 times 4 make 98 of 100
    arguments = {"beam_width": 4, "config": {"max_beam_width": 4}}
    assert longest([(FULL, 1)], (100,), 10**6, prompt_length=330, **arguments) == 32 * 32
    assert longest([(FULL, 1)], (100,), 10**6, **arguments) == 25 * 32


def test_the_beams_of_the_others_count_too():
    arguments = {"beam_width": 4, "config": {"max_beam_width": 4}, "batch_size": 3}
    # Two others hold a page per beam: 92 of 100 slots remain, 23 blocks of 4 beams.
    assert longest([(FULL, 1)], (100,), 10**6, **arguments) == 23 * 32
    # Behind a shared block it is one slot for all and 4 a block: 1 + 8 + 4 * 22 = 97.
    assert longest([(FULL, 1)], (100,), 10**6, system_prompt_length=32, **arguments) == 23 * 32


@pytest.mark.parametrize(
    "bad",
    [
        {"bound": -1},
        {"batch_size": 0},
        {"beam_width": 0},
        {"system_prompt_length": -1},
        {"max_step_tokens": -1},
    ],
)
def test_bad_questions(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        longest([(FULL, 1)], (4,), **({"bound": 10} | bad))


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 50), st.integers(1, 9))
def test_every_step_up_to_the_answer_fits_and_the_next_does_not(slots, width, window, T):
    groups = [(FULL, 1), ((window, None), 1)]
    got = longest(groups, (slots,), 10**6, T=T, beam_width=width)
    layout, _ = setup(*groups, T=T)

    def needed(length):  # to compute the last of `length` tokens
        desc = KVCacheDesc(capacity=length, history_length=length - 1, beam_width=width)
        return sum(batch_slots(layout, BatchDesc(kv_caches=[desc])))

    assert all(needed(length) <= slots for length in range(1, got + 1))
    assert needed(got + 1) > slots
