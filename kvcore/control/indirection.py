"""Beams in indirection mode: pages stay where they are, and paths follow the parents.

Every beam owns the blocks from `common` on; row 0 alone has those before. New parents change no
page: only the paths. When beams leave, what the others still read in their pages moves into pages
that nobody reads, position by position: there are always enough, since W beams read at most W pages
at a position. Publishing does the same, into beam 0's pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.control.paths import Paths, slots_of_positions, spare_beams
from kvcore.control.plane import ControlPlane
from kvcore.control.rebinding import BeamPlan, resize_rows, shared_by_beams, take_pages
from kvcore.errors import InternalError
from kvcore.ids import NO_SLOT, Ticket
from kvcore.plan import TokenMoves

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]


@dataclass(slots=True)
class Redirection(BeamPlan):
    """New paths for the beams."""

    cells: Int32
    """Who has each position from the paths' `base` on, `[beam, n]`."""

    def publish(self, control: ControlPlane, ticket: Ticket) -> None:
        seqs, sequence, shared = control.seqs, self.sequence, self.shared
        old, paths = seqs.page_rows(sequence), paths_of(control)
        blocks, before = old.shape[2], len(old)
        seqs.touch(sequence)
        for group, slots in enumerate(control.slots_of):
            slots.release(old[self.width :, group, shared:].reshape(-1), ticket, distinct=True)
        resize_rows(control, sequence, self.width, ticket)
        if sequence in seqs.parked:
            seqs.parked[sequence] = old[: self.width]
        rows = seqs.rows[sequence, before : self.width]
        if rows.size:
            for group, taken in enumerate(self.taken):
                seqs.table[rows, group, shared:blocks] = taken
            seqs.mark_blocks(rows, blocks, ticket)
        paths.put(sequence, self.cells, ticket)


def plan_redirection(
    control: ControlPlane, sequence: int, parents: tuple[int, ...], valid_tokens: int
) -> Redirection | None:
    """Works out paths in which beam i continues old beam `parents[i]`.

    None, with nothing changed, if slots or table rows for more beams are short. Tokens from
    `valid_tokens` on hold nothing. O(beams * positions since the prompt).
    """
    seqs, paths = control.seqs, paths_of(control)
    width, old = len(parents), int(seqs.width[sequence])
    blocks, shared = int(seqs.num_blocks[sequence]), shared_by_beams(control, sequence)
    found = take_pages(control, max(0, width - old), blocks - shared)
    if found is None:
        return None
    base = int(paths.base[sequence])
    cells = paths.beams_at(sequence, np.arange(base, max(valid_tokens, base)))[list(parents)]
    moves: tuple[TokenMoves, ...] = ()
    if width < old:
        used = np.zeros((old, cells.shape[1]), np.bool_)
        used[cells, np.arange(cells.shape[1])] = True
        beam, to, position = spare_beams(used, width)
        moves = _moves(seqs.page_rows(sequence), beam, to, base + position, control)
        instead = np.tile(np.arange(old, dtype=np.int32)[:, None], cells.shape[1])
        instead[beam, position] = to
        cells = instead[cells, np.arange(cells.shape[1])]
    return Redirection(sequence, width, shared, tuple(found[0]), found[1], (), moves, cells)


def plan_gathering(
    control: ControlPlane, sequence: int, first: int, last: int
) -> tuple[TokenMoves, ...]:
    """What brings the positions from `first` to `last`, on which beams agree, into beam 0's pages.

    Changes nothing.
    """
    positions = np.arange(first, last)
    path = paths_of(control).beams_at(sequence, positions)[0]
    elsewhere = np.flatnonzero(path)
    rows, to = control.seqs.page_rows(sequence), np.zeros(elsewhere.size, np.intp)
    return _moves(rows, path[elsewhere].astype(np.intp), to, positions[elsewhere], control)


def let_go_of_published(control: ControlPlane, sequence: int, blocks: int, ticket: Ticket) -> None:
    """Beam 0 alone keeps the first `blocks` blocks, and reads as every beam's history there.

    The others' pages are out of use after `ticket`. Cannot fail.
    """
    seqs, paths = control.seqs, paths_of(control)
    common, width = int(seqs.common[sequence]), int(seqs.width[sequence])
    if blocks <= common or width == 1:
        return
    rows = seqs.rows[sequence, 1:width]
    for group, slots in enumerate(control.slots_of):
        pages = seqs.table[rows, group, common:blocks]
        slots.release(pages.reshape(-1), ticket, distinct=True)
    seqs.table[rows, :, common:blocks] = NO_SLOT
    seqs.mark_blocks(rows, blocks, ticket)
    seqs.common[sequence] = blocks
    seqs.touch(sequence)
    paths.advance(sequence, blocks * seqs.shape.tokens_per_block)


def map_through_paths(
    control: ControlPlane, sequences: Index, starts: Int32, counts: Int32, layer_group: int
) -> tuple[Int32, Int32]:
    """Slot and offset of `counts[i]` positions from `starts[i]` on, for each beam of a sequence.

    Ranges from the history on are for writing, see `Paths.own_from`.
    """
    seqs, paths = control.seqs, paths_of(control)
    paths.end[sequences] = paths.own_from(sequences, starts, counts)
    slots, offsets = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for sequence, start, count in zip(sequences.tolist(), starts, counts, strict=True):
        positions = np.arange(start, start + count)
        width = seqs.width.item(sequence)
        beams: Index | Int32 = np.broadcast_to(np.arange(width)[:, None], (width, positions.size))
        if width > 1 and start < paths.end[sequence]:
            beams = paths.beams_at(sequence, positions)
        block, offset = np.divmod(positions, seqs.shape.tokens_per_block)
        slots.append(seqs.table[seqs.rows[sequence, beams], layer_group, block].reshape(-1))
        offsets.append(np.tile(offset, width))
    return np.concatenate(slots), np.concatenate(offsets).astype(np.int32)


def paths_of(control: ControlPlane) -> Paths:
    """The paths of a manager in indirection mode."""
    if control.paths is None:
        raise InternalError("paths were asked for in fork mode")
    return control.paths


def _moves(
    rows: Int32, beam: Index, to: Index, positions: Index, control: ControlPlane
) -> tuple[TokenMoves, ...]:
    if not beam.size:
        return ()
    size = control.seqs.shape.tokens_per_block
    return tuple(
        TokenMoves(
            group,
            slots_of_positions(rows[:, group], beam, positions, size),
            slots_of_positions(rows[:, group], to, positions, size),
        )
        for group in range(rows.shape[1])
    )
