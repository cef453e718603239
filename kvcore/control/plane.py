"""The control plane: every decision about where pages live. NumPy only; it never touches a device.

Each method either does all of its work or nothing. Room is checked before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcore.control.paths import Paths
from kvcore.control.reuse import PrefixReuse, ReuseRules
from kvcore.control.sequences import NO_LIMIT, SequenceTable, TableShape
from kvcore.control.slots import SlotTable
from kvcore.control.statistics import Statistics
from kvcore.errors import OutOfPagesError
from kvcore.ids import NO_SLOT, Ticket, div_ceil

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

Wait = Callable[[Index, tuple[Int64, ...]], None]
"""Makes the streams of some sequences wait for tickets."""


class ControlPlane:
    """Sequences, slots, and the transactions between them.

    Parameters
    ----------
    shape : TableShape
        Sizes of the tables.
    num_slots : sequence of int
        Slots of each pool group.
    pool_group_of : sequence of int
        The pool group of each layer group.
    rules : ReuseRules, optional
        What may be reused.
    slot_bytes : sequence of int, optional
        Bytes of a slot of each pool group. Without, nothing is counted.
    """

    def __init__(
        self,
        shape: TableShape,
        num_slots: tuple[int, ...],
        pool_group_of: tuple[int, ...],
        rules: ReuseRules | None = None,
        slot_bytes: tuple[int, ...] | None = None,
    ) -> None:
        self.seqs = SequenceTable(shape)
        self.paths = Paths(self.seqs) if shape.indirect else None  # of beams in indirection mode
        self.slots = [SlotTable(count) for count in num_slots]
        self.pool_group_of = pool_group_of
        self.slots_of = [self.slots[group] for group in pool_group_of]  # by layer group
        self._groups_in = [pool_group_of.count(group) for group in range(len(num_slots))]
        self.reuse = PrefixReuse(self.seqs, self.slots_of, rules or ReuseRules())
        nbytes = [0 if slot_bytes is None else slot_bytes[group] for group in pool_group_of]
        self.stats = Statistics(self.seqs, nbytes, slot_bytes is not None)

    # -- growing -----------------------------------------------------------------------------------

    def make_room(self, pages_per_group: int, call: str) -> bool:
        """Whether so many pages of each layer group are free, after evicting what it takes.

        False, with nothing evicted, if they can't be. `call` is what they are needed for.
        """
        short = 0
        for slots, groups in zip(self.slots, self._groups_in, strict=True):
            missing = pages_per_group * groups - slots.num_free
            if missing > 0:
                if missing > slots.num_evictable:
                    return False
                short = max(short, div_ceil(missing, groups))
        if short:
            self.stats.dropped(self.reuse.make_room(short, call))
        return True

    def missing(self, pages_per_group: int) -> int:
        """Pages that `make_room` would be short of, over all pool groups; 0 if there is room."""
        return sum(
            max(0, pages_per_group * groups - slots.num_free - slots.num_evictable)
            for slots, groups in zip(self.slots, self._groups_in, strict=True)
        )

    def refusal(self, who: str, pages_per_group: int) -> OutOfPagesError:
        """What to raise where `make_room` answered False: how many pages `who` is short of."""
        short = []
        for number, (slots, groups) in enumerate(zip(self.slots, self._groups_in, strict=True)):
            pages, free, evictable = pages_per_group * groups, slots.num_free, slots.num_evictable
            if pages > free + evictable:
                short.append(
                    f"{pages} more pages of pool group {number}, {free} are free and {evictable} "
                    f"evictable: {pages - free - evictable} missing"
                )
        return OutOfPagesError(
            f"{who} take {' and '.join(short)}; close or shrink other caches and retry",
            self.missing(pages_per_group),
        )

    def take_block(self) -> tuple[Int32, tuple[Int64, ...]]:
        """A slot of each layer group `[layer groups, 1]`, and the moments to wait for.

        The caller has made room.
        """
        taken = np.array([[slots.take_one()] for slots in self.slots_of], np.int32)
        after = (slots.tickets(one) for slots, one in zip(self.slots_of, taken, strict=True))
        return taken, tuple(tickets for tickets in after if tickets is not None)

    def give_back(self, pages: Int32, ticket: Ticket | None) -> None:
        """Frees distinct slots `[layer groups, n]`, out of use after `ticket`. None: untouched."""
        for slots, taken in zip(self.slots_of, pages, strict=True):
            slots.release(taken, ticket, distinct=True)

    def _await_next(self, sequences: Index, pages_per_group: int, wait: Wait) -> None:
        """Calls `wait` with the moments after which the next slots may be written, if any."""
        ahead = (
            slots.next_tickets(pages_per_group * groups)
            for slots, groups in zip(self.slots, self._groups_in, strict=True)
        )
        tickets = tuple(after for after in ahead if after is not None)
        if tickets:
            wait(sequences, tickets)

    def grow(self, sequences: Index, blocks: Int32, wait: Wait) -> bool:
        """Gives every beam of `sequences[i]` pages up to `blocks[i]` blocks, all or none.

        `blocks` is above the present block counts. False if slots are short. `wait` gets the
        moments to wait for before the new slots are written, and may fail: nothing has changed
        yet. Capacities are the caller's to write. O(new pages), a handful of vector operations for
        any batch.
        """
        seqs = self.seqs
        low = seqs.num_blocks[sequences]
        count = blocks - low
        pages = int(np.add.reduce(np.multiply(count, seqs.width[sequences], dtype=np.int64)))
        if not self.make_room(pages, "growing"):
            return False
        index = seqs.span(sequences, low, count, pages)
        self._await_next(sequences, pages, wait)
        for group, slots in enumerate(self.slots_of):
            taken = slots.take(pages)
            where = index + group * seqs.shape.max_blocks if group else index
            seqs.cells[where] = taken
            seqs.mark(where)
        self._set_blocks(sequences, blocks)
        return True

    def grow_by_one(self, sequence: int, wait: Wait) -> bool:
        """`grow` of one sequence of width 1 by one block, without array arithmetic."""
        seqs = self.seqs
        if not self.make_room(1, "growing"):
            return False
        self._await_next(np.array([sequence]), 1, wait)
        block = int(seqs.num_blocks[sequence])
        first = int(seqs.rows[sequence, 0]) * seqs.row_stride + block
        for group, slots in enumerate(self.slots_of):
            where = first + group * seqs.shape.max_blocks
            slot = slots.take_one()
            seqs.cells[where] = slot
            if seqs.shape.twin:
                seqs.mark(np.array([where]))
        seqs.num_blocks[sequence] = block + 1
        seqs.limit[sequence] = seqs.limit_of(block + 1)
        return True

    def _set_blocks(self, sequences: Index, blocks: Int32) -> None:
        shape = self.seqs.shape  # the longest sequence ends below 2**31
        self.seqs.num_blocks[sequences] = blocks
        reach = np.minimum(blocks * shape.tokens_per_block, shape.max_seq_len)
        self.seqs.limit[sequences] = reach

    # -- shrinking ---------------------------------------------------------------------------------

    def shrink(self, sequences: Index, blocks: Int32, ticket: Ticket) -> None:
        """Cuts every beam of active `sequences[i]` down to `blocks[i]` blocks and frees the rest.

        The freed slots, and the old values of the cleared cells, are out of use after `ticket`.
        """
        seqs = self.seqs
        low = np.minimum(blocks, seqs.num_blocks[sequences])
        count = seqs.num_blocks[sequences] - low
        some = np.flatnonzero(count)
        if some.size:
            cut, count = sequences[some], count[some]
            pages = int(np.multiply(count, seqs.width[cut], dtype=np.int64).sum())
            index = seqs.span(cut, low[some], count, pages)
            seqs.touch(cut)
            self._clear(index, ticket, distinct=self._distinct(sequences, blocks))
            self._take_back(cut, low[some])
        self._set_blocks(sequences, low)

    def _take_back(self, sequences: Index, blocks: Int32) -> None:
        """Cut blocks are not counted any more, as far as they were not reported."""
        seqs = self.seqs
        seqs.stat_from[sequences] = np.minimum(seqs.stat_from[sequences], blocks)
        generating = seqs.gen_from[sequences]
        seqs.gen_from[sequences] = np.where(
            generating == NO_LIMIT, NO_LIMIT, np.minimum(generating, blocks)
        )
        if self.stats.enabled:
            for sequence, left in zip(sequences.tolist(), blocks.tolist(), strict=True):
                self.stats.cut(sequence, left)

    def _clear(self, index: Int64, ticket: Ticket, *, distinct: bool) -> None:
        seqs = self.seqs
        for group, slots in enumerate(self.slots_of):
            where = index + group * seqs.shape.max_blocks if group else index
            slots.release(self._held(seqs.cells[where]), ticket, distinct=distinct)
            seqs.cells[where] = NO_SLOT
            seqs.mark(where, ticket)

    def _held(self, cells: Int32) -> Int32:
        """Cells that name a slot: in indirection mode beam 0 alone has the blocks all share."""
        return cells if self.paths is None else cells[cells >= 0]

    def _distinct(self, sequences: Index, blocks: Int32) -> bool:
        """Whether no slot is released twice: beams share pages, and so do published prefixes."""
        alone = sequences.size == 1 or int(blocks.min()) > 0  # a prefix goes only as a whole
        return alone and int(self.seqs.width[sequences].max()) == 1

    def destroy(self, sequence: int, ticket: Ticket) -> None:
        """Frees everything of one sequence and forgets it."""
        seqs = self.seqs
        parked = seqs.parked.get(sequence)
        if parked is not None:
            for group, slots in enumerate(self.slots_of):
                held = self._held(parked[:, group].reshape(-1))
                slots.release(held, ticket, distinct=len(parked) == 1)
        elif seqs.num_blocks[sequence]:
            self.shrink(np.array([sequence]), np.zeros(1, np.int32), ticket)
        if self.paths is not None:
            self.paths.begin(sequence, 0)
        self.reuse.let_go(sequence)
        self.stats.ended(sequence)
        seqs.destroy(sequence)

    # -- questions ---------------------------------------------------------------------------------

    def held_alone(self, sequence: int) -> list[int]:
        """Slots of each pool group that nobody but the sequence holds."""
        rows = self.seqs.page_rows(sequence)
        alone = [0] * len(self.slots)
        for group, pool_group in enumerate(self.pool_group_of):
            pages, refs = rows[:, group], self.slots_of[group].refs
            if len(pages) == 1:
                alone[pool_group] += int(np.count_nonzero(refs[pages[0]] == 1))
            else:
                pages, holders = np.unique(self._held(pages), return_counts=True)
                alone[pool_group] += int(np.count_nonzero(refs[pages] == holders))
        return alone

    def utilisation_without(self, sequence: int) -> float:
        """The largest share of a pool group's slots that others hold."""
        alone = self.held_alone(sequence)
        return max(
            (slots.capacity - slots.num_free - slots.num_evictable - mine) / slots.capacity
            for slots, mine in zip(self.slots, alone, strict=True)
        )

    def batch_rows(self, sequences: Index) -> tuple[Index, Index]:
        """Table rows of a batch, sequence by sequence and beam by beam, and whose each one is.

        Returns
        -------
        rows, owner : intp arrays [number of rows]
            Table rows, and the position in `sequences` that each belongs to.
        """
        widths = self.seqs.width[sequences]
        if widths.max(initial=1) == 1:
            return self.seqs.rows[sequences, 0], np.arange(sequences.size)
        owner = np.repeat(np.arange(sequences.size), widths)
        beam = np.arange(owner.size) - (np.cumsum(widths) - widths)[owner]
        return self.seqs.rows[sequences[owner], beam], owner

    def map_tokens(
        self, rows: Index, starts: Int64, counts: Int64, layer_group: int
    ) -> tuple[Int32, Int32]:
        """Slot and offset of `counts[i]` positions from `starts[i]` on in each of `rows`."""
        shape = self.seqs.shape
        which = np.repeat(np.arange(rows.size), counts)
        position = starts[which] + np.arange(which.size) - (np.cumsum(counts) - counts)[which]
        block, offset = np.divmod(position, shape.tokens_per_block)
        inside = block < shape.max_blocks
        cells = self.seqs.table[rows[which], layer_group, np.where(inside, block, 0)]
        slots = np.where(inside, cells, NO_SLOT).astype(np.int32)
        return slots, np.where(slots < 0, 0, offset).astype(np.int32)
