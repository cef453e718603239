"""The sequence table: what every sequence is, and which slot holds each of its pages.

Structures of arrays, one row a sequence: the public objects are handles on a row number. Indices
are `intp` (indexing with int32 arrays is several times slower), values int32.
"""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import CacheCapacityError, OutOfMemoryError
from kvcore.ids import NO_SLOT, NO_TICKET, Ticket
from kvcore.plan import DirtyCells

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NORESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which mmap does not name
NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """How much the tables can hold."""

    max_sequences: int
    max_rows: int
    max_beam_width: int
    num_groups: int
    max_blocks: int
    max_seq_len: int
    tokens_per_block: int
    twin: bool
    """Whether a device twin follows: without one, dirty cells are not collected."""

    indirect: bool = False
    """Whether beams find their history through an indirection: see `kvcore.control.paths`."""


def reserved(cells: tuple[int, int, int]) -> Int32:
    """A table's addresses; the system backs a row with memory when it is first written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        memory = mmap.mmap(-1, 4 * math.prod(cells), flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemoryError(
            f"a table of {cells} rows, layer groups and blocks (or positions) does not fit into "
            "the address space; lower max_rows (or max_sequences) or max_seq_len"
        ) from error
    return np.frombuffer(memory, np.int32).reshape(cells)


class SequenceTable:
    """Columns over sequences and one page table `[table row, layer group, ordinal]` of slots.

    A live beam owns one table row. Cells beyond a sequence's blocks are `NO_SLOT`, and so are all
    cells of a suspended sequence, whose slots are parked aside. Rows are initialised when first
    used.
    """

    def __init__(self, shape: TableShape) -> None:
        n = shape.max_sequences
        self.shape = shape
        # First, because it says what to lower where all that follows is too large as well
        self.table = reserved((shape.max_rows, shape.num_groups, shape.max_blocks))
        self.capacity: Int32 = np.zeros(n, np.int32)
        self.history: Int32 = np.zeros(n, np.int32)
        self.num_blocks: Int32 = np.zeros(n, np.int32)
        self.limit: Int32 = np.zeros(n, np.int32)  # tokens reachable without a new block
        # Leading blocks that are the same in all rows, or that only row 0 has (indirection mode)
        self.common: Int32 = np.zeros(n, np.int32)
        self.width: Int32 = np.zeros(n, np.int32)  # live beams; 0: no such sequence
        self.active: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.block_bound: Int32 = np.full(
            n, NO_LIMIT, np.int32
        )  # shortest table bound by the caller
        self.stream: Int32 = np.zeros(n, np.int32)  # which of the manager's streams
        self.stat_from: Int32 = np.zeros(n, np.int32)  # first block not reported yet
        self.gen_from: Int32 = np.full(n, NO_LIMIT, np.int32)  # first block added in generation
        self.prompt: Int32 = np.full(n, NO_LIMIT, np.int32)  # history at which generation starts
        self.rows: Index = np.full((n, shape.max_beam_width), -1, np.intp)
        self.cells: Int32 = self.table.reshape(-1)
        self.row_stride = shape.num_groups * shape.max_blocks
        self.used_rows = 0  # rows initialised so far
        self.changes = 0  # rises when a sequence loses or changes pages it had
        self.version: Int64 = np.zeros(n, np.int64)  # the latest of these changes, by sequence
        self.parked: dict[int, Int32] = {}  # sequence -> [beam, layer group, ordinal]
        self.dirty: list[DirtyCells] = []
        self._free_sequences = list(range(n - 1, -1, -1))
        self._free_rows: list[int] = []
        self._stamp: Index = np.zeros(n, np.intp)
        self._iota: Index = np.arange(n, dtype=np.intp)
        self._first_cells = self._cells_of_row_0(64)

    # -- sequences and rows ------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences that exist."""
        return self.shape.max_sequences - len(self._free_sequences)

    @property
    def num_free_rows(self) -> int:
        """Table rows not owned by a beam."""
        return len(self._free_rows) + self.shape.max_rows - self.used_rows

    def create(self, count: int) -> list[int]:
        """Adds `count` empty sequences of width 1, all or none.

        Raises
        ------
        CacheCapacityError
            `max_sequences` or `max_rows` is reached.
        """
        if count > len(self._free_sequences):
            raise CacheCapacityError(
                f"{count} more sequences do not fit: {self.num_sequences} of max_sequences="
                f"{self.shape.max_sequences} are open; close some or raise max_sequences"
            )
        if count > self.num_free_rows:
            raise CacheCapacityError(
                f"{count} more sequences need a table row each, {self.num_free_rows} of max_rows="
                f"{self.shape.max_rows} are free; close some, narrow beams or raise max_rows"
            )
        created = [self._free_sequences.pop() for _ in range(count)]
        for sequence in created:
            self.capacity[sequence] = self.history[sequence] = self.num_blocks[sequence] = 0
            self.limit[sequence] = 0
            self.block_bound[sequence] = NO_LIMIT
            self.width[sequence] = 1
            self.rows[sequence, 0] = self.take_row()
        return created

    def destroy(self, sequence: int) -> None:
        """Forgets a sequence whose pages were released and whose cells were cleared."""
        width = int(self.width[sequence])
        self.give_rows(self.rows[sequence, :width].tolist())
        self.rows[sequence, :width] = -1
        self.width[sequence] = 0
        self.active[sequence] = False
        self.parked.pop(sequence, None)
        self.touch(sequence)
        self._free_sequences.append(sequence)

    def set_history(self, sequences: Index, history: Int32) -> None:
        """Sets history lengths; those that reach their prompt's end begin to generate."""
        self.history[sequences] = history
        reached = history >= self.prompt[sequences]
        if np.count_nonzero(reached):
            some = sequences[reached]
            self.gen_from[some], self.prompt[some] = self.num_blocks[some], NO_LIMIT

    def set_history_of_one(self, sequence: int, history: int) -> None:
        """`set_history` without arrays."""
        self.history[sequence] = history
        if history >= self.prompt.item(sequence):
            self.gen_from[sequence], self.prompt[sequence] = self.num_blocks[sequence], NO_LIMIT

    def take_row(self) -> int:
        """A table row full of `NO_SLOT`. The caller has checked `num_free_rows`."""
        if self._free_rows:
            return self._free_rows.pop()
        row = self.used_rows
        self.table[row] = NO_SLOT
        self.used_rows += 1
        return row

    def give_rows(self, rows: list[int]) -> None:
        """Takes back rows whose cells are all `NO_SLOT`."""
        self._free_rows.extend(reversed(rows))

    def first_duplicate(self, sequences: Index) -> int | None:
        """A sequence that occurs twice, or None. O(n), no sorting."""
        iota = self._iota[: sequences.size]
        if iota.size < sequences.size:  # more than there are
            return int(np.bincount(sequences).argmax())
        self._stamp[sequences] = iota
        twice = self._stamp[sequences] != iota
        return int(sequences[np.argmax(twice)]) if np.count_nonzero(twice) else None

    # -- cells -------------------------------------------------------------------------------------

    def span(self, sequences: Index, low: Int32, count: Int32, cells: int) -> Int64:
        """Flat indices of the cells of `count[i] >= 1` ordinals from `low[i]` on, for all beams.

        Order: sequence by sequence, beam by beam, ordinal by ordinal; `cells` of them in all. For
        layer group 0; add `g * max_blocks` for group g. O(cells).
        """
        if sequences.size == 1:
            return self._span_of_one(int(sequences[0]), int(low[0]), int(count[0]))
        if cells == sequences.size:  # one block for one beam each, the rhythm of decoding
            first: Int64 = self.rows[sequences, 0] * self.row_stride + low
            return first
        widths = self.width[sequences]
        per_sequence = (count * widths).astype(np.intp)
        which = np.repeat(np.arange(sequences.size), per_sequence)
        start = np.cumsum(per_sequence) - per_sequence
        within = np.arange(which.size) - start[which]
        beam, step = np.divmod(within, count[which])
        flat: Int64 = self.rows[sequences[which], beam] * self.row_stride + low[which] + step
        return flat

    def _span_of_one(self, sequence: int, low: int, count: int) -> Int64:
        width = int(self.width[sequence])
        steps = np.arange(low, low + count, dtype=np.int64)
        if width == 1:
            steps += int(self.rows[sequence, 0]) * self.row_stride
            return steps
        rows = self.rows[sequence, :width] * self.row_stride
        return (rows[:, None] + steps).reshape(-1)

    def mark(self, index: Int64, after: Ticket = NO_TICKET) -> None:
        """Notes cells that the device twin must take over, once `after` has passed."""
        if self.shape.twin and index.size:
            self.dirty.append(DirtyCells(index, after))

    def cells_of(self, sequence: int, layer_group: int, beam: int) -> Int32:
        """The table cells of one beam, int32 `[num_blocks]`. A copy."""
        blocks = int(self.num_blocks[sequence])
        cells: Int32 = self.table[self.rows[sequence, beam], layer_group, :blocks].copy()
        return cells

    def page_rows(self, sequence: int) -> Int32:
        """The slots of a sequence `[beam, layer group, ordinal]`, also of a suspended one.

        A copy.
        """
        if sequence in self.parked:
            return self.parked[sequence].copy()
        width, blocks = int(self.width[sequence]), int(self.num_blocks[sequence])
        return self.table[self.rows[sequence, :width], :, :blocks]

    def touch(self, sequences: Index | int) -> None:
        """Notes that `sequences` lost or changed pages or rows: steps prepared before are void."""
        self.changes += 1
        self.version[sequences] = self.changes

    def park(self, sequence: int, after: Ticket) -> None:
        """Hides the slots of a sequence: they are kept aside, its cells become `NO_SLOT`."""
        self.parked[sequence] = self.page_rows(sequence)
        self._write_rows(sequence, NO_SLOT, after)
        self.active[sequence] = False
        self.touch(sequence)

    def unpark(self, sequence: int) -> None:
        """Shows the slots of a sequence again."""
        rows = self.parked.pop(sequence, None)
        if rows is not None:
            self._write_rows(sequence, rows, NO_TICKET)
        self.active[sequence] = True

    def _write_rows(self, sequence: int, values: Int32 | int, after: Ticket) -> None:
        width, blocks = int(self.width[sequence]), int(self.num_blocks[sequence])
        rows = self.rows[sequence, :width]
        self.table[rows, :, :blocks] = values
        self.mark_blocks(rows, blocks, after)

    def mark_blocks(self, rows: Index, blocks: int, after: Ticket) -> None:
        """Notes the first `blocks` cells of every layer group of `rows`."""
        shape = self.shape
        if not shape.twin:
            return
        if blocks > self._first_cells.shape[1]:
            self._first_cells = self._cells_of_row_0(min(2 * blocks, shape.max_blocks))
        ordinals = self._first_cells[:, :blocks]
        index = (rows * self.row_stride)[:, None, None] + ordinals
        self.mark(index.reshape(-1), after)

    def _cells_of_row_0(self, blocks: int) -> Int64:
        groups: Int64 = np.arange(self.shape.num_groups)[:, None] * self.shape.max_blocks
        return groups + np.arange(blocks)

    def limit_of(self, blocks: int) -> int:
        """Tokens that fit into `blocks` blocks."""
        return min(blocks * self.shape.tokens_per_block, self.shape.max_seq_len)
