"""The NumPy reference of the operations on beams: what the kernels must do, exactly.

A *tail place* is where one buffer of a block lies: the backed bytes of its pool as one uint8 array,
then `slot_bytes`, `offset`, `nbytes` and `token_bytes` of a `TailPlace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import BeamArrays, Int32
from kvcore.device.beams import MAX_BEAMS
from kvcore.device.reference import num_slots
from kvcore.ids import NO_SLOT

Place = tuple[NDArray[np.uint8], int, int, int, int]
Index = NDArray[np.intp]


def step_rows(table: Int32, beams: BeamArrays, parents: Int32, sources: Int32) -> None:
    """Rows that continue their parents', and where further children copy their tails from."""
    sources[...] = NO_SLOT
    for first, width in requests(len(table), beams):
        chosen = chosen_parents(parents[first : first + width], width)
        parent_with_child, first_child = np.unique(chosen, return_index=True)
        is_further = np.ones(width, bool)
        is_further[first_child] = False
        take = chosen.copy()
        take[is_further] = np.setdiff1d(np.arange(width), parent_with_child)
        rows = beams.rows[first : first + width]
        blocks = int(np.clip(beams.blocks[first], 0, table.shape[2]))
        shared = int(np.clip(beams.shared[first], 0, blocks))
        old = table[rows, :, :blocks]
        table[rows, :, :shared] = old[chosen, :, :shared]
        table[rows, :, shared:blocks] = old[take, :, shared:]
        donors = first_child[np.searchsorted(parent_with_child, chosen[is_further])]
        sources[first : first + width][is_further] = rows[donors]


def requests(num_rows: int, beams: BeamArrays) -> Iterator[tuple[int, int]]:
    """(position of beam 0, width) of every request of more than one beam."""
    most = beams.max_width or min(len(beams.rows), MAX_BEAMS)
    real = (beams.rows >= 0) & (beams.rows < num_rows)
    starts = real & (beams.first == np.arange(len(real)))
    for first in np.flatnonzero(starts).tolist():
        width = int(beams.width[first])
        if 1 < width <= most and first + width <= len(real):
            yield first, width


def chosen_parents(parents: Int32, width: int) -> Index:
    """The parent of each beam; the beam itself where `parents` names none."""
    chosen = np.arange(width)
    given = parents.astype(np.intp)
    named = np.flatnonzero((given >= 0) & (given < width))
    chosen[named] = given[named]
    return chosen


def copy_tails(
    places: Sequence[Place],
    table: Int32,
    beams: BeamArrays,
    sources: Int32,
    tokens_per_block: int,
) -> None:
    """The written part of own blocks, from the rows in `sources` to those of the batch."""
    num_rows, num_blocks = table.shape
    real = (beams.rows >= 0) & (beams.rows < num_rows) & (sources >= 0) & (sources < num_rows)
    for i in np.flatnonzero(real).tolist():
        blocks = min(int(beams.blocks[i]), num_blocks)
        ordinals = np.arange(max(int(beams.shared[i]), 0), max(blocks, 0))
        tokens = int(beams.valid[i]) - ordinals * tokens_per_block
        tokens = np.clip(tokens, 0, tokens_per_block).astype(np.int32)
        copy_tokens(places, table[sources[i], ordinals], table[beams.rows[i], ordinals], tokens)


def copy_tokens(places: Sequence[Place], src: Int32, dst: Int32, tokens: Int32) -> None:
    """The first tokens of some slots to others."""
    end = num_slots([place[:2] for place in places])
    real = (tokens > 0) & (src >= 0) & (src < end) & (dst >= 0) & (dst < end)
    for data, slot_bytes, offset, nbytes, token_bytes in places:
        view = np.ndarray((end, nbytes), np.uint8, data, offset, (slot_bytes, 1)) if end else data
        for a, b, count in zip(src[real], dst[real], tokens[real].tolist(), strict=True):
            size = min(count * token_bytes, nbytes) if token_bytes else nbytes
            view[b, :size] = view[a, :size]


def permute_rows(
    arrays: Sequence[NDArray[Any]],
    parents: Int32,
    width: int,
    starts: Int32 | None,
    tokens: Int32 | None,
    token_axis: int,
) -> None:
    """Rows that continue their parents', request by request."""
    if starts is None:
        starts = np.arange(0, len(parents) + 1, width, dtype=np.int32)
    for request, (first, end) in enumerate(pairwise(starts.tolist())):
        if not (0 <= first < end <= len(parents) and end - first <= width):
            continue
        chosen = chosen_parents(parents[first:end], end - first)
        moved = np.flatnonzero(chosen != np.arange(end - first))
        for array in arrays:
            rows = array[first:end]
            if tokens is not None:
                rows = np.moveaxis(rows, token_axis, 1)[:, : max(int(tokens[request]), 0)]
            rows[moved] = rows[chosen[moved]]
