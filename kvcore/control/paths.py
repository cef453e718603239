"""Indirection mode: the beams of a sequence keep their pages, and a table says who has what.

A beam's *path* names, for each position, the beam whose page holds it. Positions before `base` are
beam 0's: the prompt, and what was published. Positions from `end` on are a beam's own: nothing has
followed parents there yet. In between stand the cells of this table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.control.sequences import SequenceTable, reserved
from kvcore.ids import Ticket
from kvcore.plan import DirtyCells

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

MOST_STEPS = 64  # noted one by one before the cells take them over


class Paths:
    """The host's cells `[table row, 1, position]`, and the steps that they do not contain yet.

    The device's twin is ahead: it follows parents at once. The host notes them when they arrive and
    works the cells out when it is asked, many steps at a time.

    Parameters
    ----------
    seqs : SequenceTable
    """

    def __init__(self, seqs: SequenceTable) -> None:
        shape = seqs.shape
        self._seqs = seqs
        self.num_positions = min(shape.max_blocks * shape.tokens_per_block, shape.max_seq_len)
        self.table: Int32 = reserved((shape.max_rows, 1, self.num_positions))
        self.base: Int32 = np.zeros(shape.max_sequences, np.int32)
        self.end: Int32 = np.zeros(shape.max_sequences, np.int32)
        self.dirty: list[DirtyCells] = []
        self._steps: dict[int, list[tuple[Index, int, int]]] = {}

    def begin(self, sequence: int, position: int) -> None:
        """All beams have one history up to `position`, and nothing behind it."""
        self.base[sequence] = self.end[sequence] = position
        self._steps.pop(sequence, None)

    def follow(self, sequences: Index, parents: Index, own: Int32, valid: Int32) -> None:
        """Notes a step of sequences of one width W.

        Parameters
        ----------
        sequences : intp array [n]
            Distinct.
        parents : intp array [n, W]
            In range.
        own, valid : int32 arrays [n]
            Before the step, positions from `own` on were a beam's own. Now those before `valid` are
            what they were to the parent.
        """
        each = zip(sequences.tolist(), parents, own.tolist(), valid.tolist(), strict=True)
        for sequence, chosen, first, last in each:
            steps = self._steps.setdefault(sequence, [])
            steps.append((chosen, first, last))
            if len(steps) >= MOST_STEPS:
                self._take_over(sequence)

    def own_from(self, sequences: Index, starts: Int32, counts: int | Int32) -> Int32:
        """Where each sequence's `end` is for a step of `counts[i]` tokens from `starts[i]` on.

        A step that starts at or after the history writes, into each beam's own pages: whatever
        paths said about these positions was about tokens that were given up, or never written.
        """
        end = self.end[sequences]
        writes = (starts >= self._seqs.history[sequences]) & (starts < end) & (counts > 0)
        own: Int32 = np.where(writes, starts, end)
        return own

    def of(self, sequence: int) -> Int32:
        """Who has the positions from `base` to `end`, `[beams, n]`. A copy."""
        self._take_over(sequence)
        part = slice(self.base.item(sequence), self.end.item(sequence))
        return self.table[self._rows(sequence), 0, part]

    def put(self, sequence: int, cells: Int32, after: Ticket) -> None:
        """Sets the paths of all beams from `base` on, `[beams, n]`, once their rows are theirs."""
        base, rows = self.base.item(sequence), self._rows(sequence)
        self.end[sequence] = base + cells.shape[1]
        self._steps.pop(sequence, None)
        if len(rows) == 1:
            self.base[sequence] = self.end[sequence]
            return
        self._write(rows, base, cells)
        if self._seqs.shape.twin and cells.size:
            index = (rows * self.num_positions)[:, None] + np.arange(base, base + cells.shape[1])
            self.dirty.append(DirtyCells(index.reshape(-1), after))

    def advance(self, sequence: int, position: int) -> None:
        """Everything before `position` is beam 0's now. The twin's cells behind it stay right."""
        self._take_over(sequence)
        self.base[sequence] = max(self.base.item(sequence), position)
        self.end[sequence] = max(self.end.item(sequence), position)

    def resend(self, sequence: int, after: Ticket) -> None:
        """The twin takes the host's cells over again."""
        self.put(sequence, self.of(sequence), after)

    def beams_at(self, sequence: int, positions: Index) -> Int32:
        """Who has `positions`, `[beams, n]`."""
        base, end, cells = self.base.item(sequence), self.end.item(sequence), self.of(sequence)
        own = np.arange(len(cells), dtype=np.int32)[:, None]
        found = np.broadcast_to(own, (len(cells), positions.size)).copy()
        found[:, positions < base] = 0
        inside = (positions >= base) & (positions < end)
        found[:, inside] = cells[:, positions[inside] - base]
        return found

    def agree(self, sequence: int, first: int, last: int) -> bool:
        """Whether all beams have one history from position `first` to `last`."""
        found = self.beams_at(sequence, np.arange(first, last))
        return bool((found == found[0]).all())

    # -- steps -------------------------------------------------------------------------------------

    def _rows(self, sequence: int) -> Index:
        rows: Index = self._seqs.rows[sequence, : self._seqs.width.item(sequence)]
        return rows

    def _write(self, rows: Index, base: int, cells: Int32) -> None:
        self.table[rows, 0, base : base + cells.shape[1]] = cells

    def _take_over(self, sequence: int) -> None:
        """Works the noted steps into the cells, the newest first: each position once.

        O(steps * beams + beams * positions).
        """
        steps = self._steps.pop(sequence, None)
        if not steps:
            return
        rows, base, high = self._rows(sequence), self.base.item(sequence), steps[-1][2]
        cells = np.empty((len(rows), max(high - base, 0)), np.int32)
        beam = np.arange(len(rows))
        for parents, own, valid in reversed(steps):
            low = max(own, base)
            beam = parents[beam]
            cells[:, low - base : max(min(valid, high), low) - base] = beam[:, None]
            high = min(high, low)
        if high > base:
            cells[:, : high - base] = self.table[rows, 0, base:high][beam]
        self._write(rows, base, cells)


def spare_beams(used: NDArray[np.bool_], width: int) -> tuple[Index, Index, Index]:
    """Who has to move so that the first `width` beams hold everything that is used.

    Parameters
    ----------
    used : bool array [beams, n]
        Which beam's page is used at each position; never more than `width` of them.
    width : int

    Returns
    -------
    beam, to, position : intp arrays [m]
        Each moves into a page of the first `width` that nobody uses.

    >>> used = np.array([[True, False], [False, False], [True, True]])
    >>> [array.tolist() for array in spare_beams(used, 2)]
    [[2, 2], [1, 0], [0, 1]]
    """
    beam, position = np.nonzero(used[width:])
    rank = (np.cumsum(used[width:], axis=0) - 1)[beam, position]
    spare = np.argsort(used[:width], axis=0, kind="stable")  # those without use come first
    return beam + width, spare[rank, position], position


def slots_of_positions(
    rows: Int32, beams: Index | int, positions: Index, tokens_per_block: int
) -> Int32:
    """(slot, token within the block) of positions in the pages of `beams`, `[n, 2]`.

    `rows` are the slots `[beam, ordinal]` of one layer group.
    """
    ordinal, within = np.divmod(positions, tokens_per_block)
    return np.stack([rows[beams, ordinal], within], axis=1).astype(np.int32)
