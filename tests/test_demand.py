"""The demand function: every published number, and a block-by-block model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kvcore.control.demand import (
    batch_slots,
    group_stale_range,
    pool_group_sums,
    scratch_range,
    slots_for,
    stale_range,
    structural_floors,
)
from kvcore.layout import build_layout

FULL, SSM = "full", "ssm"


def layout(*groups, T=32, layers=1):
    """One layer group per entry: FULL, SSM, or (window, sink tokens); `layers` layers in each."""
    made = []
    for group in groups:
        for _ in range(layers):
            buffers = [BufferConfig(role="key", size=1000 + len(made) // layers)]
            if group == SSM:
                made.append(SsmLayerConfig(layer_id=len(made), buffers=buffers))
                continue
            window, sinks = (None, None) if group == FULL else group
            made.append(
                AttentionLayerConfig(
                    layer_id=len(made),
                    buffers=buffers,
                    sliding_window_size=window,
                    num_sink_tokens=sinks,
                )
            )
    return build_layout(
        KVCacheManagerConfig(
            tokens_per_block=T,
            cache_tiers=[GpuCacheTierConfig(quota=1)],
            layers=made,
            commit_min_snapshot=True,
        )
    )


def desc(capacity, history_length, beam_width=1, prompt_length=None):
    return KVCacheDesc(
        capacity=capacity,
        history_length=history_length,
        beam_width=beam_width,
        prompt_length=prompt_length,
    )


def batch(*descs, system=0):
    return BatchDesc(kv_caches=descs, system_prompt_length=system)


def demand(groups, *descs, system=0, T=32):
    return batch_slots(layout(*groups, T=T), batch(*descs, system=system))


@pytest.mark.parametrize(
    ("window", "sinks", "T", "history", "expected"),
    [
        (128, 0, 32, 1000, range(27)),
        (128, 0, 32, 2048, range(60)),
        (128, 0, 32, 1087, range(30)),
        (8, 0, 4, 14, range(1)),
        (8, 0, 4, 15, range(2)),
        (8, 0, 4, 16, range(2)),
        (8, 0, 4, 0, range(0)),
        (8, 0, 4, 10, range(0)),
        (8, 0, 4, 11, range(1)),
        (128, 1, 32, 2048, range(1, 60)),
        (128, 1, 32, 256, range(1, 4)),
        (8, 3, 4, 5, range(2, 2)),
        (8, 3, 4, 15, range(3, 3)),
        (1, 0, 4, 4, range(1)),
        (None, 0, 4, 1000, range(0)),
    ],
)
def test_stale_range(window, sinks, T, history, expected):
    got = stale_range(window, sinks, T, history)
    assert (got.start, got.stop) == (expected.start, expected.stop)
    assert bool(got) == (expected.start < expected.stop)


@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 7), st.integers(0, 120))
def test_stale_blocks_are_those_no_later_query_sees(window, sinks, T, history):
    got = stale_range(window, sinks, T, history)
    for block in range(history // T + 1):
        seen = (block + 1) * T > history + 1 - window  # by the token at position `history`
        full = (block + 1) * T <= history
        assert (block in got) == (full and not seen and block >= sinks)


def test_a_state_has_absorbed_every_full_block():
    group = layout(SSM).layer_groups[0]
    assert group_stale_range(group, 32, 31) == range(0)
    assert group_stale_range(group, 32, 64) == range(2)


@pytest.mark.parametrize(
    ("window", "sinks", "T", "shape", "rewind", "expected"),
    [
        (8, 0, 4, (32, 0), 0, range(6)),
        (8, 0, 4, (32, 0), 4, range(5)),
        (8, 0, 4, (32, 0), 99, range(0)),
        (8, 0, 4, (32, 10), 0, range(3, 6)),
        (8, 1, 4, (32, 0), 0, range(1, 6)),
        (8, 0, 4, (32, 31), 0, range(8, 8)),
        (128, 1, 32, (512, 0), 0, range(1, 12)),
        (None, 0, 4, (32, 0), 0, range(0)),
    ],
)
def test_scratch_range(window, sinks, T, shape, rewind, expected):
    got = scratch_range(window, sinks, T, desc(*shape), rewind)
    assert (got.start, got.stop) == (expected.start, expected.stop)


def test_shared_system_prompt():
    shapes = [desc(2049, 2048)] * 2
    assert demand([FULL, (128, None), SSM], *shapes, system=1000) == (99, 10, 2)


def test_beams_share_the_prompt():
    assert demand([FULL], desc(1200, 1000, 4, 1000)) == (59,)
    assert demand([FULL], desc(1200, 1199, 4, 1000)) == (59,)
    assert demand([FULL], desc(1200, 1000, 4)) == (4 * 38,)
    assert demand([FULL], desc(1200, 1000, 4, 5000)) == (38,)


@pytest.mark.parametrize(("width", "expected"), [(1, (34, 4, 1)), (4, (40, 10, 4))])
def test_beams_with_windows_and_states(width, expected):
    assert demand([FULL, (128, None), SSM], desc(1088, 1087, width, 1024)) == expected


def test_the_system_prompt_is_shared_by_beams_too():
    assert demand([FULL], desc(12, 12, 3), desc(12, 12, 3), system=8, T=4) == (2 + 2 * 3,)
    assert demand([FULL], desc(16, 12, 3, 12), system=4, T=4) == (1 + 2 + 3,)


@pytest.mark.parametrize(
    ("prompt", "capacity", "width", "expected"),
    [(8, 8, 3, 2), (8, 12, 3, 5), (10, 10, 3, 5), (10, 16, 3, 8), (6, 7, 4, 5), (0, 10, 3, 9)],
)
def test_widened_sequences(prompt, capacity, width, expected):
    assert demand([FULL], desc(capacity, prompt, width, prompt), T=4) == (expected,)


@pytest.mark.parametrize(
    ("system", "expected"), [(0, (64, 64)), (64, (58, 58)), (50, (61, 61)), (256, (37, 40))]
)
def test_four_sequences_behind_a_system_prompt(system, expected):
    assert demand([(128, 32), FULL], *[desc(512, system)] * 4, system=system) == expected


def test_a_sequence_without_capacity_takes_only_a_state():
    assert demand([SSM, FULL], desc(64, 63), desc(0, 0)) == (2, 2)


def test_the_default_request():
    assert demand([(128, 32), FULL], desc(2049, 2048)) == (6, 65)


@pytest.mark.parametrize("history", range(0, 400, 7))
def test_a_system_prompt_without_sharers_changes_nothing(history):
    shape = desc(history + 40, history)
    groups = [FULL, (128, None), (96, 32)]
    assert demand(groups, shape, system=history) == demand(groups, shape)


def test_scratch_blocks_share_slots_between_layers():
    groups = layout((128, 32), FULL, layers=16)
    four = batch(*[desc(512, 0)] * 4)
    assert batch_slots(groups, four) == (64, 64)
    assert batch_slots(groups, four, SwaScratchReuseConfig()) == (4 * (5 + 1), 64)
    pair = layout((8, None), T=4, layers=2)
    window = pair.layer_groups[0]
    scratch = SwaScratchReuseConfig()
    assert slots_for(window, desc(32, 0), 4, scratch=scratch) == 2 + 3
    assert slots_for(window, desc(32, 0, 4), 4, scratch=scratch) == 4 * 2 + 3
    rewinding = SwaScratchReuseConfig(max_rewind_len=4)
    assert slots_for(window, desc(32, 0), 4, scratch=rewinding) == 3 + 3


def test_structural_floors():
    assert structural_floors(layout((128, None), FULL, SSM)) == (5, 5, 1)
    assert structural_floors(layout((32, None), (128, 33), FULL)) == (2, 7, 7)
    assert structural_floors(layout(FULL)) == (1,)
    assert structural_floors(layout(SSM, FULL)) == (1, 1)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 7))
def test_the_windowed_floor_is_the_most_a_sliding_sequence_holds(window, sinks, T):
    made = layout((window, sinks), T=T)
    most = max(
        batch_slots(made, batch(desc(length + 1, length)))[0]
        for length in range(window + sinks + 4 * T)
    )
    assert most == structural_floors(made)[0]


def test_pool_group_sums():
    made = layout(FULL, (8, None), SSM)
    assert pool_group_sums(made, (1, 2, 3)) == (1, 2, 3)
    with pytest.raises(ValueError, match="3 values, one per layer group"):
        pool_group_sums(made, (1, 2))


shapes = st.builds(
    lambda history, more, width, prompt: desc(history + more, history, width, prompt),
    st.integers(0, 60),
    st.integers(0, 40),
    st.integers(1, 4),
    st.none() | st.integers(0, 70),
)


def counted(group, T, descs, system):
    """Blocks counted one by one."""
    shared = system // T
    stale = [group_stale_range(group, T, d.history_length) for d in descs]
    total = sum(any(block not in s for s in stale) for block in range(shared))
    for d, gone in zip(descs, stale, strict=True):
        for block in range(shared, -(-d.capacity // T)):
            if block not in gone:
                total += 1 if block < (d.prompt_length or 0) // T else d.beam_width
    return total


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(0, 30), st.integers(1, 6))
def test_demand_equals_counting_blocks(descs, system, T):
    made = layout(FULL, (9, None), (7, 5), T=T)
    expected = tuple(counted(group, T, descs, system) for group in made.layer_groups)
    assert batch_slots(made, batch(*descs, system=system)) == expected
