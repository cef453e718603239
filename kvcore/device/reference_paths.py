"""The NumPy reference of the operations on paths: what the kernels must do, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Int32, PageGeometry, PathArrays
from kvcore.device.beams import MAX_BEAMS
from kvcore.device.reference import Place, append, gather, locate
from kvcore.device.reference_beams import chosen_parents

Index = NDArray[np.intp]


def step_paths(cells: Int32, beams: PathArrays, parents: Int32) -> None:
    """Paths that continue their parents'."""
    most = beams.max_width or min(len(beams.rows), MAX_BEAMS)
    for first in np.flatnonzero(beams.first == np.arange(len(beams.rows))).tolist():
        width = int(beams.width[first])
        rows = beams.rows[first : first + width]
        if not 1 < width <= most or len(rows) < width:
            continue
        if not ((rows >= 0) & (rows < len(cells))).all():
            continue
        chosen = chosen_parents(parents[first : first + width], width)
        base = max(int(beams.base[first]), 0)
        positions = np.arange(base, min(int(beams.valid[first]), cells.shape[1]))
        found = [beams_at(cells, beams, first + i, positions) for i in range(width)]
        for i, parent in enumerate(chosen.tolist()):
            cells[rows[i], positions] = found[parent]


def beams_at(cells: Int32, beams: PathArrays, i: int, positions: Index) -> Index:
    """Which beam of its request has each position of the batch's row `i`, whose row exists."""
    width, own_beam = int(beams.width[i]), i - int(beams.first[i])
    found = np.full(positions.shape, own_beam, np.intp)
    inside = (positions < beams.own[i]) & (positions < cells.shape[1])
    named = cells[beams.rows[i], positions[inside]]
    found[inside] = np.where((named >= 0) & (named < width), named, own_beam)
    found[positions < beams.base[i]] = 0
    return found


def has_beams(beams: PathArrays, i: int, num_rows: int) -> bool:
    """Whether row `i` of the batch exists and is one of several beams."""
    first, width = int(beams.first[i]), int(beams.width[i])
    inside = 0 <= beams.rows[i] < num_rows and 0 <= first <= i < first + width
    return bool(inside and width > 1 and first + width <= len(beams.rows))


def take_paths(cells: Int32, beams: PathArrays, out: Int32) -> None:
    """Who has each position, row by row of the batch."""
    positions = np.arange(out.shape[1])
    out[...] = 0
    for i in range(len(out)):
        if has_beams(beams, i, len(cells)):
            out[i] = beams_at(cells, beams, i, positions)


def map_paths(
    tables: Int32,
    cells: Int32,
    beams: PathArrays,
    starts: Int32,
    ends: Int32,
    out: Int32,
    tokens_per_block: int,
) -> None:
    """(slot, token within the block) of each token of a ragged batch, or (-1, 0)."""
    out[:] = -1, 0
    num_rows, num_blocks = tables.shape[1:]
    begin = 0
    for i, end in enumerate(ends.tolist()):
        n = np.arange(begin, min(end, out.shape[1]))
        positions = int(starts[i]) + n - begin
        begin = max(begin, end)
        row = np.full(n.shape, beams.rows[i], np.intp)
        if has_beams(beams, i, len(cells)):
            row = beams.rows[beams.first[i] + beams_at(cells, beams, i, np.maximum(positions, 0))]
        block, token = np.divmod(positions, tokens_per_block)
        real = (row >= 0) & (row < num_rows) & (block >= 0) & (block < num_blocks)
        slots = tables[:, row[real], block[real]]
        out[:, n[real], 0] = np.maximum(slots, -1)
        out[:, n[real], 1] = np.where(slots >= 0, token[real], 0)


def move_tokens(
    places: Sequence[Place], num_roles: int, geometry: PageGeometry, src: Int32, dst: Int32
) -> None:
    """Tokens from page to page, for all places of a stack."""
    real = np.intersect1d(locate(places, geometry, src).n, locate(places, geometry, dst).n)
    shape = len(places) // num_roles, real.size, geometry.heads, geometry.dim
    held = [np.empty(shape, f"V{geometry.itemsize}") for _ in range(num_roles)]
    gather(places, num_roles, geometry, src[real], held)
    append(places, num_roles, geometry, dst[real], held)
