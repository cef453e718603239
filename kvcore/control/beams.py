"""Beams in fork mode: widen, reorder and shrink are one operation, giving rows new parents.

Blocks before floor(history / T) are final and shared by reference. The blocks after are private to
a row: the first child of a parent takes over the parent's slots, every further child gets a copy of
them in slots of beams without children, or in fresh ones if the width grows. So sources and targets
of the copies never overlap, and a width that does not grow needs no slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.control.plane import ControlPlane
from kvcore.control.rebinding import (
    BeamPlan,
    resize_rows,
    shared_by_beams,
    take_pages,
    written_tokens,
)
from kvcore.control.slots import SlotTable
from kvcore.ids import Ticket, div_ceil
from kvcore.plan import PageCopies

Int32 = NDArray[np.int32]


@dataclass(slots=True)
class Reordering(BeamPlan):
    """New rows for the beams."""

    rows: Int32
    """The new page rows `[beam, layer group, ordinal]`."""

    surplus: tuple[Int32, ...]
    """Private slots that no beam keeps, by layer group."""

    def publish(self, control: ControlPlane, ticket: Ticket) -> None:
        """O(beams * blocks that differ)."""
        seqs, sequence, shared = control.seqs, self.sequence, self.shared
        old, new = seqs.page_rows(sequence), self.rows
        blocks = new.shape[2]
        seqs.touch(sequence)
        for group, slots in enumerate(control.slots_of):
            _move_holders(slots, old[:, group, :shared], new[:, group, :shared], ticket)
            slots.release(self.surplus[group], ticket, distinct=True)
        resize_rows(control, sequence, len(new), ticket)
        if sequence in seqs.parked:
            seqs.parked[sequence] = new
            return
        rows = seqs.rows[sequence, : len(new)]
        changed = seqs.table[rows, :, :blocks] != new
        seqs.table[rows, :, :blocks] = new
        beams, groups, ordinals = np.nonzero(changed)
        index = rows[beams] * seqs.row_stride + groups * seqs.shape.max_blocks + ordinals
        seqs.mark(index, ticket)


def plan_reordering(
    control: ControlPlane, sequence: int, parents: tuple[int, ...], valid_tokens: int
) -> Reordering | None:
    """Works out rows in which beam i continues old beam `parents[i]`, and takes the slots it needs.

    None, with nothing changed, if slots or table rows are short. Only tokens before `valid_tokens`
    are copied. O(beams * blocks).
    """
    seqs = control.seqs
    width, old = len(parents), seqs.page_rows(sequence)
    size, blocks = seqs.shape.tokens_per_block, old.shape[2]
    shared = shared_by_beams(control, sequence)
    found = take_pages(control, max(0, width - len(old)), blocks - shared)
    if found is None:
        return None
    fresh, tickets = found
    takers, donors, spare = _share_out(parents, len(old))
    new = old[list(parents)]
    copied = min(max(div_ceil(valid_tokens, size), shared), blocks)
    counts = written_tokens(shared, copied, valid_tokens, size)
    tokens = np.tile(counts, len(takers))
    surplus, copies = [], []
    for group, pages in enumerate(fresh):
        private = np.concatenate([old[spare, group, shared:], pages])
        new[takers, group, shared:] = private[: len(takers)]
        surplus.append(private[len(takers) :].reshape(-1))
        sources = old[donors, group, shared:copied].reshape(-1)
        targets = new[takers, group, shared:copied].reshape(-1)
        copies.append(PageCopies(group, np.stack([sources, targets, tokens])))
    return Reordering(
        sequence, width, shared, tuple(fresh), tickets, tuple(copies), (), new, tuple(surplus)
    )


def _share_out(parents: tuple[int, ...], width: int) -> tuple[list[int], list[int], list[int]]:
    """Further children, their parents, and the old beams without children whose slots are spare."""
    first_child: dict[int, int] = {}
    takers, donors = [], []
    for child, parent in enumerate(parents):
        if first_child.setdefault(parent, child) != child:
            takers.append(child)
            donors.append(parent)
    return takers, donors, [beam for beam in range(width) if beam not in first_child]


def _move_holders(slots: SlotTable, old: Int32, new: Int32, ticket: Ticket) -> None:
    """Recounts the holders of the blocks shared by reference, where rows differ at all."""
    if len(old) == len(new):
        moved = old != new
        old, new = old[moved], new[moved]
    if old.size:
        slots.hold(new.reshape(-1))
        slots.release(old.reshape(-1), ticket, distinct=False)
