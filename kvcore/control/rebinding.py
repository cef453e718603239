"""Giving the beams of a sequence new parents, in three steps.

A plan is worked out and paid for; then its copies are enqueued; then it is published, which cannot
fail. Before that it can be cancelled, and nothing has happened. `widening`, `beams` (fork mode) and
`indirection` make plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.control.plane import ControlPlane
from kvcore.ids import NO_SLOT, Ticket
from kvcore.plan import PageCopies, TokenMoves

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class BeamPlan(ABC):
    """What the beams of one sequence become. Nothing of the sequence has changed yet."""

    sequence: int
    width: int
    """Beams afterwards."""

    shared: int
    """Blocks before this one belong to all beams, those from here on to one beam each."""

    taken: tuple[Int32, ...]
    """Fresh slots by layer group, `[new rows, blocks from `shared` on]`."""

    tickets: tuple[Int64, ...]
    """The moments after which these may be written."""

    copies: tuple[PageCopies, ...]
    moves: tuple[TokenMoves, ...]

    @abstractmethod
    def publish(self, control: ControlPlane, ticket: Ticket) -> None:
        """Makes the plan the sequence's state; `ticket` comes after its copies. Cannot fail."""

    def cancel(self, control: ControlPlane, ticket: Ticket | None) -> None:
        """Gives back what was taken, untouched (None) or perhaps written to before `ticket`."""
        for slots, taken in zip(control.slots_of, self.taken, strict=True):
            slots.release(taken.reshape(-1), ticket, distinct=True)

    @property
    def copied_blocks(self) -> int:
        """Blocks that are copied, or get tokens of another one."""
        if self.copies:
            return int(self.copies[0].pairs.shape[1])
        return np.unique(self.moves[0].dst[:, 0]).size if self.moves else 0


def shared_by_beams(control: ControlPlane, sequence: int) -> int:
    """Blocks that more beams would not get pages for: those from there on are one beam's each."""
    seqs = control.seqs
    if control.paths is not None and seqs.width[sequence] > 1:
        return seqs.common.item(sequence)
    full = seqs.history.item(sequence) // seqs.shape.tokens_per_block
    return min(full, seqs.num_blocks.item(sequence))


def rows_and_pages(control: ControlPlane, sequence: int, width: int) -> tuple[int, int]:
    """Table rows, and pages of each layer group, that `width` beams take beyond what it has."""
    seqs = control.seqs
    rows = max(0, width - seqs.width.item(sequence))
    return rows, rows * (seqs.num_blocks.item(sequence) - shared_by_beams(control, sequence))


def take_pages(
    control: ControlPlane, fresh_rows: int, blocks: int
) -> tuple[list[Int32], tuple[Int64, ...]] | None:
    """Slots `[fresh_rows, blocks]` of each layer group, and the moments after which to write them.

    None, with nothing taken, if slots or table rows are short.
    """
    pages = fresh_rows * blocks
    if fresh_rows > control.seqs.num_free_rows or not control.make_room(pages, "beams"):
        return None
    taken: list[Int32] = []
    tickets: list[Int64] = []
    for slots in control.slots_of:
        fresh = slots.take(pages)
        after = slots.tickets(fresh) if pages else None
        if after is not None:
            tickets.append(after)
        taken.append(fresh.reshape(fresh_rows, blocks))
    return taken, tuple(tickets)


def written_tokens(first: int, end: int, valid_tokens: int, tokens_per_block: int) -> Int32:
    """Tokens before `valid_tokens` in each of blocks `first` to `end - 1`."""
    size, ends = tokens_per_block, range(first, end)
    counts = [min(max(valid_tokens - ordinal * size, 0), size) for ordinal in ends]
    return np.array(counts, np.int32)


def resize_rows(control: ControlPlane, sequence: int, width: int, ticket: Ticket) -> None:
    """Gives the sequence exactly `width` table rows; rows given up are cleared first."""
    seqs = control.seqs
    before = seqs.width.item(sequence)
    if width > before:
        seqs.rows[sequence, before:width] = [seqs.take_row() for _ in range(before, width)]
    if width < before:
        gone = seqs.rows[sequence, width:before].copy()
        blocks = int(seqs.num_blocks[sequence])
        if sequence not in seqs.parked:
            seqs.table[gone, :, :blocks] = NO_SLOT
            seqs.mark_blocks(gone, blocks, ticket)
        seqs.rows[sequence, width:before] = -1
        seqs.give_rows(gone.tolist())
    seqs.width[sequence] = width
