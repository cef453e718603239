"""How many slots a shape needs: the one place that counts, for sizing, floors, clamping, admission.

Ranges are half-open block ordinals as `range`, falsy when empty. `T` is tokens per block, `h` the
history length, `C` the capacity, `W` the beam width. Everything is exact integer arithmetic, O(1)
per sequence and layer group.
"""

from __future__ import annotations

from kvcore.config import BatchDesc, KVCacheDesc, SwaScratchReuseConfig
from kvcore.errors import wrong
from kvcore.ids import div_ceil
from kvcore.layout import LayerGroup, Layout


def stale_range(
    window: int | None, num_sink_blocks: int, tokens_per_block: int, history_length: int
) -> range:
    """The blocks that no later token of an attention layer looks at.

    >>> stale_range(128, 0, 32, 1000)
    range(0, 27)
    >>> stale_range(None, 0, 32, 1000)
    range(0, 0)
    """
    start = min(div_ceil(history_length, tokens_per_block), num_sink_blocks)
    if window is None:
        return range(start, start)
    # The next token is at position h and sees [h + 1 - window, h]; sinks are kept. A negative
    # quotient ends below the start, so the rounding of negative numbers does not matter.
    return range(start, max(start, (history_length + 1 - window) // tokens_per_block))


def group_stale_range(group: LayerGroup, tokens_per_block: int, history_length: int) -> range:
    """The blocks of `history_length` tokens that a layer group no longer needs.

    A recurrent state has absorbed every full block: `[0, h // T)`.
    """
    if group.kind == "ssm":
        return range(history_length // tokens_per_block)
    return stale_range(group.window, group.num_sink_blocks, tokens_per_block, history_length)


def scratch_range(
    window: int | None,
    num_sink_blocks: int,
    tokens_per_block: int,
    desc: KVCacheDesc,
    max_rewind_len: int,
) -> range:
    """The new blocks of a step that are out of the window when it ends, and so need no page.

    >>> scratch_range(8, 0, 4, KVCacheDesc(capacity=32, history_length=0), 0)
    range(0, 6)
    """
    end = max(0, desc.capacity - max_rewind_len)
    stale = stale_range(window, num_sink_blocks, tokens_per_block, end)
    start = max(stale.start, div_ceil(desc.history_length, tokens_per_block))
    return range(start, max(start, stale.stop))


def slots_for(
    group: LayerGroup,
    desc: KVCacheDesc,
    tokens_per_block: int,
    *,
    system_blocks: int = 0,
    scratch: SwaScratchReuseConfig | None = None,
) -> int:
    """Slots of a layer group for one sequence, besides `system_blocks` leading shared blocks.

    Blocks of the prompt count once, later ones once per beam; stale ones not at all. Scratch blocks
    share slots between the layers and do not multiply with beams. A state takes a slot per beam.
    """
    if group.kind == "ssm":
        return desc.beam_width
    end = div_ceil(desc.capacity, tokens_per_block)
    stale = group_stale_range(group, tokens_per_block, desc.history_length)
    transient = range(0)
    if scratch is not None:
        transient = scratch_range(
            group.window, group.num_sink_blocks, tokens_per_block, desc, scratch.max_rewind_len
        )
    single = range(min(system_blocks, end), min(_shared_blocks(desc, tokens_per_block), end))
    private = range(max(single.start, single.stop), end)
    pages = [
        len(part) - _overlap(part, stale) - _overlap(part, transient) for part in (single, private)
    ]
    fraction = group.scratch_fraction
    shared_scratch = div_ceil(len(transient) * fraction.numerator, fraction.denominator)
    return pages[0] + desc.beam_width * pages[1] + shared_scratch


def batch_slots(
    layout: Layout, batch: BatchDesc, scratch: SwaScratchReuseConfig | None = None
) -> tuple[int, ...]:
    """Slots per layer group for sequences that live at the same time.

    Full blocks of the system prompt that any sequence still needs count once. States are never
    shared.
    """
    return tuple(
        _group_slots(group, layout.tokens_per_block, batch, scratch)
        for group in layout.layer_groups
    )


def _group_slots(
    group: LayerGroup,
    tokens_per_block: int,
    batch: BatchDesc,
    scratch: SwaScratchReuseConfig | None,
) -> int:
    system = batch.system_prompt_length // tokens_per_block
    own = sum(
        slots_for(group, desc, tokens_per_block, system_blocks=system, scratch=scratch)
        for desc in batch.kv_caches
    )
    if group.kind == "ssm":
        return own
    stale = [
        group_stale_range(group, tokens_per_block, desc.history_length) for desc in batch.kv_caches
    ]
    unused = range(max(r.start for r in stale), min(r.stop for r in stale))
    return system - _overlap(unused, range(system)) + own


def structural_floor(group: LayerGroup, tokens_per_block: int) -> int:
    """Slots without which one sequence of the group could not slide: 1 unless it has a window.

    A window of 128 at T=32 touches up to 5 blocks while it moves through one.
    """
    if group.kind == "ssm" or group.window is None:
        return 1
    return group.num_sink_blocks + (group.window + tokens_per_block - 2) // tokens_per_block + 1


def structural_floors(layout: Layout) -> tuple[int, ...]:
    """Structural floors per layer group; groups without a window keep pace with the largest one."""
    floors = [structural_floor(group, layout.tokens_per_block) for group in layout.layer_groups]
    largest = max(floors)
    return tuple(
        largest if group.kind != "ssm" and group.window is None else floor
        for group, floor in zip(layout.layer_groups, floors, strict=True)
    )


def pool_group_sums(layout: Layout, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Slots per layer group added up by pool group."""
    if len(slots) != len(layout.layer_groups):
        raise wrong("slots", f"{len(layout.layer_groups)} values, one per layer group", slots)
    return tuple(sum(slots[index] for index in group.layer_groups) for group in layout.pool_groups)


def _shared_blocks(desc: KVCacheDesc, tokens_per_block: int) -> int:
    """Leading blocks that all beams share: the full blocks of the prompt."""
    return (desc.prompt_length or 0) // tokens_per_block


def _overlap(left: range, right: range) -> int:
    return max(0, min(left.stop, right.stop) - max(left.start, right.start))
