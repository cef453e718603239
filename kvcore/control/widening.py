"""One beam becomes several: the full blocks of its history are shared, the rest is copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcore.control.plane import ControlPlane
from kvcore.control.rebinding import (
    BeamPlan,
    resize_rows,
    shared_by_beams,
    take_pages,
    written_tokens,
)
from kvcore.ids import Ticket, div_ceil
from kvcore.plan import PageCopies


@dataclass(slots=True)
class Widening(BeamPlan):
    """Row 0 stays as it is; the others are new."""

    def publish(self, control: ControlPlane, ticket: Ticket) -> None:
        seqs, sequence, shared = control.seqs, self.sequence, self.shared
        first, blocks = seqs.rows.item(sequence, 0), seqs.num_blocks.item(sequence)
        seqs.touch(sequence)
        seqs.common[sequence] = shared
        resize_rows(control, sequence, self.width, ticket)
        rows = seqs.rows[sequence, 1 : self.width]
        fresh_rows = self.width - 1
        for group, slots in enumerate(control.slots_of):
            seqs.table[rows, group, shared:blocks] = self.taken[group]
            if shared and control.paths is None:
                pages = seqs.table[first, group, :shared]
                slots.hold_more(pages, fresh_rows)
                seqs.table[rows, group, :shared] = pages
        if control.paths is not None:
            control.paths.begin(sequence, seqs.history.item(sequence))
        seqs.mark_blocks(rows, blocks, ticket)


def plan_widening(
    control: ControlPlane, sequence: int, width: int, valid_tokens: int
) -> Widening | None:
    """Works out how an active sequence of one beam gets `width`, and takes the slots it needs.

    None, with nothing changed, if slots or table rows are short. Only tokens before `valid_tokens`
    are copied. O(blocks that are not shared * beams).
    """
    seqs = control.seqs
    size, blocks = seqs.shape.tokens_per_block, seqs.num_blocks.item(sequence)
    shared = shared_by_beams(control, sequence)
    found = take_pages(control, width - 1, blocks - shared)
    if found is None:
        return None
    fresh, tickets = found
    copied = min(max(div_ceil(valid_tokens, size), shared), blocks)
    copies = []
    if copied > shared:
        row, shape = seqs.rows.item(sequence, 0), (3, width - 1, copied - shared)
        counts = written_tokens(shared, copied, valid_tokens, size)
        for group, pages in enumerate(fresh):
            pairs = np.empty(shape, np.int32)
            pairs[0] = seqs.table[row, group, shared:copied]
            pairs[1], pairs[2] = pages[:, : shape[2]], counts
            copies.append(PageCopies(group, pairs.reshape(3, -1)))
    return Widening(sequence, width, shared, tuple(fresh), tickets, tuple(copies), ())
