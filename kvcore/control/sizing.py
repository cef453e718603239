"""From bytes to slots: how a quota is divided, what it must hold, how long a sequence may become.

A quota is spent in grains, the unit of pool memory. All arithmetic is exact (integers, fractions),
so that every platform computes the same layout; shares are rounded once, halves up.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from kvcore.checks import LONGEST, as_int
from kvcore.config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from kvcore.control.demand import batch_slots, pool_group_sums, slots_for, structural_floors
from kvcore.errors import wrong
from kvcore.ids import div_ceil
from kvcore.layout import Layout, PoolGroup

_MIB: Final = 1 << 20
_DEFAULT_STEP: Final = BatchDesc(kv_caches=(KVCacheDesc(capacity=2049, history_length=2048),))


def gpu_grain(quota: int) -> int:
    """The grain of GPU pools: 2 MiB below 2 GiB, doubling with the quota up to 32 MiB from 16 GiB.

    >>> [gpu_grain(gib << 30) // _MIB for gib in (1, 3, 8, 40)]
    [2, 4, 16, 32]
    """
    doublings = max(0, (quota >> 30).bit_length() - 1)
    return 2 * _MIB << min(4, doublings)


def layer_group_weights(layout: Layout, config: KVCacheManagerConfig) -> tuple[Fraction, ...]:
    """The share of the bytes each layer group should get, summing to 1.

    The first of: `initial_pool_ratio`; the demand of `typical_step`; the largest demand over the
    `constraints` with floors and headroom; one sequence of 2049 tokens.
    """
    if config.initial_pool_ratio is not None:
        return _normalised([_exact(ratio) for ratio in config.initial_pool_ratio])
    if config.typical_step is None and config.constraints:
        slots = _constrained_slots(layout, config)
    else:
        step = config.typical_step or _DEFAULT_STEP
        slots = [max(1, n) for n in batch_slots(layout, step, config.swa_scratch_reuse)]
    sizes = [sum(layout.pool_groups[group.pool_group].slot_bytes) for group in layout.layer_groups]
    return _normalised([Fraction(n * size) for n, size in zip(slots, sizes, strict=True)])


def cold_weights(
    hot_weights: Sequence[Fraction], hot_bytes: Sequence[int], cold_bytes: Sequence[int]
) -> tuple[Fraction, ...]:
    """Weights of a level whose pages have other sizes, keeping the proportions of slots.

    >>> hot = [Fraction(4, 5), Fraction(1, 5)]
    >>> cold_weights(hot, hot_bytes=[256, 1024], cold_bytes=[128, 1024])
    (Fraction(2, 3), Fraction(1, 3))
    """
    parts = zip(hot_weights, hot_bytes, cold_bytes, strict=True)
    return _normalised([weight * cold / hot for weight, hot, cold in parts])


def slot_floors(layout: Layout, config: KVCacheManagerConfig) -> tuple[int, ...]:
    """Slots each pool group must have: structure, and every constraint with headroom to resume."""
    floors = list(pool_group_sums(layout, structural_floors(layout)))
    for batch in config.constraints:
        demand = pool_group_sums(layout, batch_slots(layout, batch, config.swa_scratch_reuse))
        for index, group in enumerate(layout.pool_groups):
            limit = resume_limit(layout, config, group)
            floors[index] = max(floors[index], _divided(demand[index], limit))
    return tuple(floors)


def resume_limit(layout: Layout, config: KVCacheManagerConfig, group: PoolGroup) -> Fraction:
    """The part of a pool group that may be in use at `resume`: 1 where nothing in it ever grows."""
    if all(layout.layer_groups[index].kind == "ssm" for index in group.layer_groups):
        return Fraction(1)
    return _exact(config.max_util_for_resume)


def quota_of(layout: Layout, slots: Sequence[int], grain: int) -> int:
    """Bytes of pools with so many slots per pool group, each pool rounded up to the grain."""
    groups = zip(layout.pool_groups, slots, strict=True)
    return sum(_grains(group, count, grain) for group, count in groups) * grain


def min_quota(layout: Layout, config: KVCacheManagerConfig, grain: int) -> int:
    """The smallest quota in bytes that holds the floors."""
    return quota_of(layout, slot_floors(layout, config), grain)


def solve_slots(
    layout: Layout, config: KVCacheManagerConfig, quota: int, grain: int
) -> tuple[int, ...]:
    """Divides a quota between the pool groups.

    Parameters
    ----------
    layout : Layout
        Of `config`.
    config : KVCacheManagerConfig
        Weights and floors come from it.
    quota : int
        Bytes; rounded down to the grain and never exceeded.
    grain : int
        Bytes of the unit that pools are made of.

    Returns
    -------
    tuple of int
        Slots per pool group. Each gets its share of the bytes, but not less than its floor; what
        rounding leaves over goes to the groups that can use it, heaviest first.

    Raises
    ------
    ValueError
        The quota is below the floors (the message names the bytes needed), or page indices would
        not fit int32.
    """
    quota, grain = as_int("quota", quota, 1), as_int("grain", grain, 1)
    floors = slot_floors(layout, config)
    needed = [_grains(*pair, grain) for pair in zip(layout.pool_groups, floors, strict=True)]
    if sum(needed) > quota // grain:
        expected = f"at least {sum(needed) * grain} bytes for {floors} slots per pool group"
        raise wrong("quota", expected, quota, "raise the quota or relax constraints")
    weights = _pool_group_weights(layout, config)
    shares = _shares(weights, needed, quota // grain)
    slots = [_fitting(*pair, grain) for pair in zip(layout.pool_groups, shares, strict=True)]
    left = quota // grain - quota_of(layout, slots, grain) // grain
    for index in sorted(range(len(slots)), key=lambda i: -weights[i]):
        group = layout.pool_groups[index]
        before = _grains(group, slots[index], grain)
        slots[index] = _fitting(group, before + left, grain)
        left -= _grains(group, slots[index], grain) - before
    _check_int32(layout, slots, quota)
    return tuple(slots)


def max_seq_len_that_fits(
    layout: Layout,
    config: KVCacheManagerConfig,
    slots: Sequence[int],
    *,
    bound: int,
    batch_size: int = 1,
    system_prompt_length: int = 0,
    beam_width: int = 1,
    prompt_length: int | None = None,
    max_step_tokens: int = 1,
) -> int:
    """The longest one sequence can become beside `batch_size - 1` minimal ones.

    The demand is that of the hungriest step on the way there: the one that opens the last block,
    with `max_step_tokens` tokens still in flight. The last of several sequences to arrive must also
    pass the test of `max_util_for_resume`.

    Parameters
    ----------
    slots : sequence of int
        Slots per pool group.
    bound : int
        The largest answer, in tokens.
    batch_size : int
        Sequences alive; a minimal one holds the system prompt and one token.
    system_prompt_length : int
        Tokens they share.
    beam_width : int
        Beams of each.
    prompt_length : int, optional
        Prompt of the long one, for what its beams share; by default the system prompt.
    max_step_tokens : int
        Tokens added by a step: 1 in decoding, a chunk in prefill, 0 for the finished sequence only.

    Returns
    -------
    int
        `min(whole blocks * T, bound)` tokens, 0 if not even one block fits.
    """
    bound, batch_size = min(as_int("bound", bound, 0), LONGEST), as_int("batch_size", batch_size, 1)
    step = as_int("max_step_tokens", max_step_tokens, 0)
    size = layout.tokens_per_block
    shared = as_int("system_prompt_length", system_prompt_length, 0) // size * size
    small = KVCacheDesc(capacity=shared + 1, history_length=shared, beam_width=beam_width)
    low, high = 0, div_ceil(bound, size)
    while low < high:  # the answer is in [low, high]
        blocks = (low + high + 1) // 2
        last = (blocks - 1) * size + 1 if step else blocks * size
        long = KVCacheDesc(
            capacity=last,
            history_length=max(0, last - step),
            beam_width=beam_width,
            prompt_length=prompt_length,
        )
        fits = _fits(layout, config, slots, (long, small), batch_size, shared)
        low, high = (blocks, high) if fits else (low, blocks - 1)
    return min(low * size, bound)


def _fits(
    layout: Layout,
    config: KVCacheManagerConfig,
    slots: Sequence[int],
    pair: tuple[KVCacheDesc, KVCacheDesc],
    batch_size: int,
    shared: int,
) -> bool:
    """Whether the first of the pair fits beside `batch_size - 1` of the second."""
    size, scratch = layout.tokens_per_block, config.swa_scratch_reuse
    batch = BatchDesc(kv_caches=pair[:batch_size], system_prompt_length=shared)
    one = pool_group_sums(
        layout,
        tuple(
            slots_for(group, pair[1], size, system_blocks=shared // size, scratch=scratch)
            for group in layout.layer_groups
        ),
    )
    totals = pool_group_sums(layout, batch_slots(layout, batch, scratch))
    for group, available, total, last in zip(layout.pool_groups, slots, totals, one, strict=True):
        needed = total + last * max(0, batch_size - 2)
        before = needed - last if batch_size > 1 else 0  # in use when the last one resumes
        if needed > available or before > available * resume_limit(layout, config, group):
            return False
    return True


def _constrained_slots(layout: Layout, config: KVCacheManagerConfig) -> list[int]:
    slots = list(structural_floors(layout))
    for batch in config.constraints:
        demand = batch_slots(layout, batch, config.swa_scratch_reuse)
        for index, group in enumerate(layout.layer_groups):
            limit = resume_limit(layout, config, layout.pool_groups[group.pool_group])
            slots[index] = max(slots[index], _divided(demand[index], limit))
    return slots


def _pool_group_weights(layout: Layout, config: KVCacheManagerConfig) -> list[Fraction]:
    weights = layer_group_weights(layout, config)
    return [
        sum((weights[index] for index in group.layer_groups), Fraction(0))
        for group in layout.pool_groups
    ]


def _shares(weights: Sequence[Fraction], floors: Sequence[int], budget: int) -> list[int]:
    """Grains per pool group: by weight, at least the floor, `budget` in all.

    A group whose share is at or under its floor is pinned to it and leaves; the others share the
    rest again. Needs `sum(floors) <= budget`.
    """
    shares = list(floors)
    active = sorted(range(len(weights)), key=lambda i: weights[i])
    while active:
        left, weight = budget, sum((weights[i] for i in active), Fraction(0))
        for i in active:
            shares[i] = int(left * weights[i] / weight + Fraction(1, 2))
            left, weight = left - shares[i], weight - weights[i]
        pinned = [i for i in active if shares[i] <= floors[i]]
        if not pinned:
            break
        for i in pinned:
            shares[i] = floors[i]
            budget -= floors[i]
        active = [i for i in active if i not in pinned]
    return shares


def _fitting(group: PoolGroup, grains: int, grain: int) -> int:
    """The most slots whose pools take at most `grains` grains."""
    low, high = 0, grains * grain // sum(group.slot_bytes)
    while low < high:  # the answer is in [low, high]
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _grains(group, middle, grain) <= grains else (low, middle - 1)
    return low


def _grains(group: PoolGroup, slots: int, grain: int) -> int:
    return sum(div_ceil(slots * size, grain) for size in group.slot_bytes)


def _check_int32(layout: Layout, slots: Sequence[int], quota: int) -> None:
    for place in layout.places.values():
        if place.scale * place.expansion * slots[place.pool_group] > 2**31:
            name = f"quota (layer {place.layer_id}, {place.role!r})"
            raise wrong(name, "page indices below 2**31", quota, "raise tokens_per_block")


def _divided(count: int, limit: Fraction) -> int:
    """`count / limit` rounded up."""
    return div_ceil(count * limit.denominator, limit.numerator)


def _exact(value: float) -> Fraction:
    """The decimal that the caller wrote: 0.97 is 97/100, so 97 pages fit 100 slots."""
    return Fraction(repr(value))


def _normalised(weights: Sequence[Fraction]) -> tuple[Fraction, ...]:
    total = sum(weights, Fraction(0))
    return tuple(weight / total for weight in weights)
