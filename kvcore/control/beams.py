"""Beams in fork mode: widen, reorder and shrink are one operation, giving rows new parents.

Blocks before floor(history / T) are final and shared by reference. The blocks after are private to
a row: the first child of a parent takes over the parent's slots, every further child gets a copy of
them in slots of beams without children, or in fresh ones if the width grows. So sources and targets
of the copies never overlap, and a width that does not grow needs no slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.control.plane import ControlPlane
from kvcore.control.slots import SlotTable
from kvcore.ids import NO_SLOT, Ticket, div_ceil
from kvcore.plan import PageCopies, Rebinding

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def rows_and_pages(control: ControlPlane, sequence: int, width: int) -> tuple[int, int]:
    """Table rows, and pages of each layer group, that `width` beams take beyond what it has."""
    seqs = control.seqs
    blocks, size = seqs.num_blocks.item(sequence), seqs.shape.tokens_per_block
    rows = max(0, width - seqs.width.item(sequence))
    return rows, rows * max(0, blocks - seqs.history.item(sequence) // size)


def plan_rebinding(
    control: ControlPlane, sequence: int, parents: tuple[int, ...], valid_tokens: int
) -> Rebinding | None:
    """Works out rows in which beam i continues old beam `parents[i]`, and takes the slots it needs.

    Nothing of the sequence changes yet. Returns None if slots or table rows are short. Only tokens
    before `valid_tokens` are copied. O(beams * blocks).
    """
    seqs = control.seqs
    width, old = len(parents), seqs.page_rows(sequence)
    shared = int(seqs.history[sequence]) // seqs.shape.tokens_per_block
    shared = min(shared, old.shape[2])
    fresh_rows, pages = rows_and_pages(control, sequence, width)
    if fresh_rows > seqs.num_free_rows or not control.make_room(pages, "beams"):
        return None
    takers, donors, spare = _share_out(parents, len(old))
    new = old[list(parents)]
    copied = min(max(div_ceil(valid_tokens, seqs.shape.tokens_per_block), shared), old.shape[2])
    counts = written_tokens(shared, copied, valid_tokens, seqs.shape.tokens_per_block)
    taken, surplus, tickets, copies = [], [], [], []
    for group, slots in enumerate(control.slots_of):
        fresh = slots.take(pages)
        after = slots.tickets(fresh)
        if after is not None and pages:
            tickets.append(after)
        private = np.concatenate(
            [old[spare, group, shared:], fresh.reshape(fresh_rows, old.shape[2] - shared)]
        )
        new[takers, group, shared:] = private[: len(takers)]
        taken.append(fresh)
        surplus.append(private[len(takers) :].reshape(-1))
        sources = old[donors, group, shared:copied].reshape(-1)
        targets = new[takers, group, shared:copied].reshape(-1)
        tokens = np.broadcast_to(counts, (len(takers), counts.size)).reshape(-1)
        copies.append(PageCopies(group, sources, targets, tokens))
    return Rebinding(
        sequence, parents, new, tuple(taken), tuple(surplus), tuple(copies), tuple(tickets)
    )


def written_tokens(first: int, end: int, valid_tokens: int, tokens_per_block: int) -> Int32:
    """Tokens before `valid_tokens` in each of blocks `first` to `end - 1`."""
    left = valid_tokens - np.arange(first, end, dtype=np.int32) * tokens_per_block
    return np.maximum(np.minimum(left, tokens_per_block), 0)


def _share_out(parents: tuple[int, ...], width: int) -> tuple[list[int], list[int], list[int]]:
    """Further children, their parents, and the old beams without children whose slots are spare."""
    first_child: dict[int, int] = {}
    takers, donors = [], []
    for child, parent in enumerate(parents):
        if first_child.setdefault(parent, child) != child:
            takers.append(child)
            donors.append(parent)
    return takers, donors, [beam for beam in range(width) if beam not in first_child]


def cancel_rebinding(control: ControlPlane, plan: Rebinding, ticket: Ticket | None) -> None:
    """Gives back what a plan took, untouched (None) or perhaps written to before `ticket`."""
    for slots, taken in zip(control.slots_of, plan.taken, strict=True):
        slots.release(taken, ticket, distinct=True)


def publish_rebinding(control: ControlPlane, plan: Rebinding, ticket: Ticket) -> None:
    """Makes the planned rows the sequence's. Cannot fail. O(beams * blocks that differ)."""
    seqs, sequence = control.seqs, plan.sequence
    old, new = seqs.page_rows(sequence), plan.rows
    blocks = new.shape[2]
    shared = min(int(seqs.history[sequence]) // seqs.shape.tokens_per_block, blocks)
    seqs.touch(sequence)
    if len(old) == 1:
        _first_widening(control, plan, shared, ticket)
        return
    for group, slots in enumerate(control.slots_of):
        _move_holders(slots, old[:, group, :shared], new[:, group, :shared], ticket)
        slots.release(plan.surplus[group], ticket, distinct=True)
    _resize_rows(control, sequence, len(new), ticket)
    if sequence in seqs.parked:
        seqs.parked[sequence] = new
        return
    rows = seqs.rows[sequence, : len(new)]
    changed = seqs.table[rows, :, :blocks] != new
    seqs.table[rows, :, :blocks] = new
    beams, groups, ordinals = np.nonzero(changed)
    index = rows[beams] * seqs.row_stride + groups * seqs.shape.max_blocks + ordinals
    seqs.mark(index, ticket)


def _first_widening(control: ControlPlane, plan: Rebinding, shared: int, ticket: Ticket) -> None:
    """One row becomes several: it stays, and the others are new."""
    seqs, sequence, more = control.seqs, plan.sequence, len(plan.rows) - 1
    for group, slots in enumerate(control.slots_of):
        if shared:
            slots.hold_distinct(plan.rows[0, group, :shared], more)
    seqs.common[sequence] = shared
    _resize_rows(control, sequence, more + 1, ticket)
    rows, blocks = seqs.rows[sequence, 1 : more + 1], plan.rows.shape[2]
    seqs.table[rows, :, :blocks] = plan.rows[1:]
    seqs.mark_blocks(rows, blocks, ticket)


def _move_holders(slots: SlotTable, old: Int32, new: Int32, ticket: Ticket) -> None:
    """Recounts the holders of the blocks shared by reference, where rows differ at all."""
    if len(old) == len(new):
        moved = old != new
        old, new = old[moved], new[moved]
    if old.size:
        slots.hold(new.reshape(-1))
        slots.release(old.reshape(-1), ticket, distinct=False)


def _resize_rows(control: ControlPlane, sequence: int, width: int, ticket: Ticket) -> None:
    """Gives the sequence exactly `width` table rows; rows given up are cleared first."""
    seqs = control.seqs
    before = int(seqs.width[sequence])
    for beam in range(before, width):
        seqs.rows[sequence, beam] = seqs.take_row()
    if width < before:
        gone = seqs.rows[sequence, width:before].copy()
        blocks = int(seqs.num_blocks[sequence])
        if sequence not in seqs.parked:
            seqs.table[gone, :, :blocks] = NO_SLOT
            seqs.mark_blocks(gone, blocks, ticket)
        seqs.rows[sequence, width:before] = -1
        seqs.give_rows(gone.tolist())
    seqs.width[sequence] = width
