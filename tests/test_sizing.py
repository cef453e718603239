"""From quotas to slots, in numbers."""

from __future__ import annotations

from fractions import Fraction

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
from kvcore.control.sizing import (
    cold_weights,
    gpu_grain,
    layer_group_weights,
    min_quota,
    quota_of,
    resume_limit,
    slot_floors,
    solve_slots,
)
from kvcore.layout import build_layout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOST_GRAIN = 4096
FULL, SSM = "full", "ssm"


def setup(*groups, T=32, **kw):
    """(layout, config) with one layer per (FULL | SSM | window | (window, sinks), size, ...)."""
    layers = []
    for index, (kind, *sizes) in enumerate(groups):
        buffers = [BufferConfig(role=f"b{i}", size=size) for i, size in enumerate(sizes)]
        if kind == SSM:
            layers.append(SsmLayerConfig(layer_id=index, buffers=buffers))
            continue
        window, sinks = (None, None) if kind == FULL else kind
        layers.append(
            AttentionLayerConfig(
                layer_id=index, buffers=buffers, sliding_window_size=window, num_sink_tokens=sinks
            )
        )
    config = KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[GpuCacheTierConfig(quota=GIB)],
        layers=layers,
        commit_min_snapshot=True,
        **kw,
    )
    return build_layout(config), config


def batch(count, capacity, history, system=0, **kw):
    desc = KVCacheDesc(capacity=capacity, history_length=history, **kw)
    return BatchDesc(kv_caches=[desc] * count, system_prompt_length=system)


WINDOWED = ((128, 32), 786_432)
GLOBAL = (FULL, 1_310_720)


@pytest.mark.parametrize(
    ("quota", "grain"),
    [
        (1, 2),
        (512 * MIB, 2),
        (GIB - 1, 2),
        (GIB, 2),
        (2 * GIB - 1, 2),
        (2 * GIB, 4),
        (3 * GIB, 4),
        (8 * GIB, 16),
        (16 * GIB - 1, 16),
        (16 * GIB, 32),
        (40 * GIB, 32),
        (140 * GIB, 32),
    ],
)
def test_gpu_grain(quota, grain):
    assert gpu_grain(quota) == grain * MIB


@pytest.mark.parametrize(
    ("sizes", "quota", "slots"),
    [
        ([256 * KIB], 16 * 256 * KIB, 16),
        ([128 * KIB, 128 * KIB], 16 * 256 * KIB, 16),
        ([256 * KIB], 16 * 256 * KIB + HOST_GRAIN - 1, 16),
        ([256 * KIB], 16 * 256 * KIB - 1, 15),
        ([4096, 1], 10 * 4096, 9),
        ([3000], 4 * 4096, 5),
        ([5000, 3000], 4 * 8192, 4),
        ([1], 4096, 4096),
    ],
)
def test_one_pool_group_gets_the_whole_quota(sizes, quota, slots):
    layout, config = setup((FULL, *sizes), T=4)
    assert solve_slots(layout, config, quota, HOST_GRAIN) == (slots,)
    assert quota_of(layout, (slots,), HOST_GRAIN) <= quota
    assert quota_of(layout, (slots + 1,), HOST_GRAIN) > quota // HOST_GRAIN * HOST_GRAIN


def test_two_groups_by_ratio():
    layout, config = setup((FULL, 256 * KIB), ((128, None), MIB), initial_pool_ratio=[0.75, 0.25])
    assert solve_slots(layout, config, 8 * GIB, 16 * MIB) == (24576, 2048)


def test_a_floor_pins_its_group():
    """The floor of 4000 slots takes 250 of the 512 grains; the other group keeps 262."""
    layout, config = setup(
        (FULL, 256 * KIB),
        (SSM, MIB),
        initial_pool_ratio=[0.75, 0.25],
        constraints=[batch(4000, 1, 0)],
        max_util_for_resume=1.0,
    )
    assert slot_floors(layout, config) == (4000, 4000)
    assert solve_slots(layout, config, 8 * GIB, 16 * MIB) == (16768, 4000)


def test_floors_have_headroom_to_resume():
    groups = ((FULL, 256), ((128, None), 512))
    demand = batch(2, 2049, 2048, system=1000)
    assert slot_floors(*setup(*groups, constraints=[demand])) == (103, 11)
    together = ((FULL, 256), ((128, None), 256))
    assert slot_floors(*setup(*together, constraints=[demand])) == (113,)
    assert slot_floors(*setup(*groups, constraints=[demand], max_util_for_resume=1)) == (99, 10)


def test_headroom_is_exact_in_decimals():
    """97 / 0.97 is a little more than 100 in floating point."""
    layout, config = setup((FULL, 256), constraints=[batch(97, 1, 0)])
    assert slot_floors(layout, config) == (100,)
    assert resume_limit(layout, config, layout.pool_groups[0]) == Fraction(97, 100)


def test_states_need_no_headroom():
    layout, config = setup((FULL, 10), (SSM, 20), constraints=[batch(50, 32, 0)])
    assert slot_floors(layout, config) == (52, 50)
    assert resume_limit(layout, config, layout.pool_groups[1]) == 1
    mixed, config = setup((FULL, 10), (SSM, 10), constraints=[batch(50, 32, 0)])
    assert slot_floors(mixed, config) == (104,)


def test_floors_take_the_largest_constraint():
    constraints = [batch(8, 256, 255), batch(1, 2048, 0)]
    layout, config = setup(WINDOWED, GLOBAL, constraints=constraints, max_util_for_resume=1)
    assert slot_floors(layout, config) == (64, 64)
    assert slot_floors(*setup(WINDOWED, GLOBAL)) == (6, 6)
    assert slot_floors(*setup((FULL, 1))) == (1,)


@pytest.mark.parametrize(
    ("system", "slots", "mib"),
    [(0, (64, 64), 128), (64, (58, 58), 118), (50, (61, 61), 124), (256, (37, 40), 78)],
)
def test_a_quota_that_is_exactly_enough(system, slots, mib):
    layout, config = setup(
        WINDOWED,
        GLOBAL,
        constraints=[batch(4, 512, system, system)],
        typical_step=batch(1, 100_000, 0),
        max_util_for_resume=1,
    )
    assert slot_floors(layout, config) == slots
    assert min_quota(layout, config, 2 * MIB) == mib * MIB
    got = solve_slots(layout, config, mib * MIB, 2 * MIB)
    assert all(n >= floor for n, floor in zip(got, slots, strict=True))
    with pytest.raises(ValueError, match=rf"quota: expected at least {mib * MIB} bytes"):
        solve_slots(layout, config, mib * MIB - 1, 2 * MIB)


def test_scratch_in_constraints():
    layers = [((128, 32), 49_152)] * 16 + [(FULL, 81_920)] * 16
    layout, config = setup(
        *layers,
        constraints=[batch(4, 512, 0)],
        max_util_for_resume=1,
        swa_scratch_reuse=SwaScratchReuseConfig(),
    )
    assert slot_floors(layout, config) == (24, 64)


def test_slots_that_are_one_byte_short_of_a_grain():
    layout, config = setup(
        ((32, None), 2 * MIB - 1), (FULL, 2 * MIB), constraints=[batch(1, 32, 0)]
    )
    assert solve_slots(layout, config, 5 * 2 * MIB, 2 * MIB) == (2, 3)


def test_three_groups_at_their_minimum_keep_it():
    grain = 16 * MIB
    layout, config = setup(
        (FULL, 16_252_928, 4_063_232),
        (SSM, 491_520, 126_720, 15_872),
        ((1, None), 31_457_280, 7_864_320),
        T=1,
        initial_pool_ratio=[0.2, 0.5, 0.3],
        constraints=[batch(157, 1, 0)],
        max_util_for_resume=1,
    )
    assert [group.layer_groups for group in layout.pool_groups] == [(1,), (0,), (2,)]
    minimum = min_quota(layout, config, grain)
    got = solve_slots(layout, config, minimum, grain)
    assert got[1:] == (157, 157)
    assert got[0] >= 157
    assert quota_of(layout, got, grain) == minimum


def test_what_a_count_needs_holds_that_count():
    grain = 16 * MIB
    layout, config = setup((FULL, 16_252_928, 4_063_232))
    quota = quota_of(layout, [157], grain)
    (slots,) = solve_slots(layout, config, quota, grain)
    assert slots >= 157
    assert quota_of(layout, [slots], grain) <= quota


def test_left_over_grains_go_to_a_group_that_can_use_them():
    """Of 13 grains 5 go to slots of two grains, which can use 4: the other 8 become 9."""
    layout, config = setup(
        (FULL, HOST_GRAIN, HOST_GRAIN - 1),
        ((8, None), HOST_GRAIN),
        T=8,
        initial_pool_ratio=[0.4, 0.6],
    )
    assert [group.slot_bytes for group in layout.pool_groups] == [(4096,), (4096, 4095)]
    assert solve_slots(layout, config, 13 * HOST_GRAIN, HOST_GRAIN) == (9, 2)


def test_left_over_grains_go_to_the_heaviest_first():
    layout, config = setup(
        (FULL, HOST_GRAIN - 1),
        ((8, None), HOST_GRAIN),
        ((7, None), HOST_GRAIN, HOST_GRAIN - 1),
        T=8,
        initial_pool_ratio=[0.3, 0.45, 0.25],
    )
    # 20 grains: 6, 9 and 5, of which the slots of two grains leave one.
    assert solve_slots(layout, config, 20 * HOST_GRAIN, HOST_GRAIN) == (6, 10, 2)


def test_the_lightest_share_is_rounded_first():
    layout, config = setup(
        (FULL, HOST_GRAIN - 1), ((8, None), HOST_GRAIN), T=8, initial_pool_ratio=[0.7, 0.3]
    )
    assert solve_slots(layout, config, 15 * HOST_GRAIN, HOST_GRAIN) == (10, 5)


def test_halves_are_rounded_up():
    layout, config = setup(
        (FULL, HOST_GRAIN), ((8, None), HOST_GRAIN - 1), T=8, initial_pool_ratio=[0.5, 0.5]
    )
    assert [group.slot_bytes for group in layout.pool_groups] == [(4095,), (4096,)]
    assert solve_slots(layout, config, 9 * HOST_GRAIN, HOST_GRAIN) == (5, 4)


def test_default_weights():
    layout, config = setup(WINDOWED, GLOBAL)
    windowed, full = 6 * 786_432, 65 * 1_310_720
    total = windowed + full
    assert layer_group_weights(layout, config) == (
        Fraction(windowed, total),
        Fraction(full, total),
    )


def test_weights_of_small_descriptions_are_not_rounded_to_grains():
    """65 against 5 blocks of 256 KiB is 0.93 to 0.07, whatever the grain."""
    layout, config = setup((FULL, 256 * KIB), ((128, None), 128 * KIB, 128 * KIB))
    assert layer_group_weights(layout, config) == (Fraction(65, 70), Fraction(5, 70))


@pytest.mark.parametrize(
    ("step", "slots"),
    [(batch(64, 64, 32), (128, 128)), (batch(32, 4096, 4000), (32 * 8, 32 * 128))],
)
def test_typical_step_decides_the_weights(step, slots):
    layout, config = setup(WINDOWED, GLOBAL, typical_step=step, constraints=[batch(9, 512, 0)])
    parts = [slots[0] * 786_432, slots[1] * 1_310_720]
    assert layer_group_weights(layout, config) == tuple(Fraction(p, sum(parts)) for p in parts)


def test_constraints_decide_the_weights_without_a_typical_step():
    layout, config = setup(WINDOWED, GLOBAL, constraints=[batch(1, 32, 0), batch(4, 2049, 2048)])
    windowed, full = 25 * 786_432, 269 * 1_310_720  # 24 and 260 slots with headroom
    assert layer_group_weights(layout, config)[0] == Fraction(windowed, windowed + full)


def test_the_ratio_overrides_everything_but_floors():
    layout, config = setup(
        WINDOWED,
        GLOBAL,
        initial_pool_ratio=[0.75, 0.25],
        typical_step=batch(1, 99_999, 0),
        constraints=[batch(4, 512, 0)],
        max_util_for_resume=1,
    )
    assert layer_group_weights(layout, config) == (Fraction(3, 4), Fraction(1, 4))
    # 64 slots of 1.25 MiB are 40 grains of 2 MiB; 24 remain for slots of 0.75 MiB.
    assert solve_slots(layout, config, 128 * MIB, 2 * MIB) == (64, 64)


def test_layer_groups_of_one_pool_group_add_up():
    layout, config = setup((FULL, 100), ((8, None), 100), initial_pool_ratio=[0.25, 0.75])
    assert solve_slots(layout, config, 40_960, HOST_GRAIN) == (409,)


def test_a_step_without_tokens_still_weighs():
    layout, config = setup((FULL, 100), ((8, None), 200), typical_step=batch(1, 0, 0))
    assert layer_group_weights(layout, config) == (Fraction(1, 3), Fraction(2, 3))


def test_cold_weights():
    hot = (Fraction(4, 5), Fraction(1, 5))
    assert cold_weights(hot, [256, 1024], [128, 1024]) == (Fraction(2, 3), Fraction(1, 3))


def test_page_indices_must_fit_int32():
    layout, config = setup((FULL, 1, 1), T=4)
    assert solve_slots(layout, config, 2**31, HOST_GRAIN) == (2**30,)
    with pytest.raises(ValueError, match=r"page indices below 2\*\*31"):
        solve_slots(layout, config, 2**31 + HOST_GRAIN, HOST_GRAIN)


@pytest.mark.parametrize(("quota", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_bad_quotas(quota, error):
    with pytest.raises(error, match="quota"):
        solve_slots(*setup((FULL, 1)), quota, HOST_GRAIN)


sizes = st.integers(1, 30_000)


@given(
    st.lists(sizes, min_size=1, max_size=3),
    st.lists(sizes, min_size=1, max_size=3),
    st.lists(sizes, min_size=1, max_size=2),
    st.tuples(*[st.integers(1, 50)] * 3),
    st.integers(1, 9),
    st.integers(0, 400),
)
def test_the_solver_spends_the_quota_well(full, window, state, parts, requests, extra):
    layout, config = setup(
        (FULL, *full),
        ((40, None), *window),
        (SSM, *state),
        T=8,
        initial_pool_ratio=[part / sum(parts) for part in parts],
        constraints=[batch(requests, 64, 0)],
    )
    floors = slot_floors(layout, config)
    quota = min_quota(layout, config, HOST_GRAIN) + extra * HOST_GRAIN
    slots = solve_slots(layout, config, quota, HOST_GRAIN)
    assert quota_of(layout, slots, HOST_GRAIN) <= quota
    for index, (count, floor) in enumerate(zip(slots, floors, strict=True)):
        assert count >= floor
        more = [n + (i == index) for i, n in enumerate(slots)]
        assert quota_of(layout, more, HOST_GRAIN) > quota
