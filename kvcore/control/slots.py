"""The slots of one pool group on one cache level: which are free, who holds the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import InternalError
from kvcore.ids import NO_TICKET, Ticket

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]

PRIVATE, PUBLISHED, SHARED = 0, 1, 2
"""What `in_tree` says of a slot.

A shared page is not in the tree, but several sequences may hold it: it left the tree while it was
held, or forks go on from it.
"""

WORTH_A_LOOK = 1024  # slots: from here on a look at whether they are a run pays

Join = Callable[[Int64, Ticket], "Int64 | Ticket"]
"""Tickets that stand for each of some earlier moments and a later one."""


def _later(before: Int64, ticket: Ticket) -> Int64 | Ticket:
    """`Join` where all work runs on one stream."""
    return ticket


class SlotTable:
    """Structure of arrays over the slots `[0, capacity)`.

    Free slots form a stack, so that taking or giving back k of them is one slice; a fresh table
    hands them out in ascending runs. A held slot counts its holders, one per cell of a page table
    that names it. A freed slot can be handed out at once: it carries the ticket of the moment after
    which it may be overwritten, and its next owner's stream waits for that.

    A page in the prefix tree stays when nobody holds it any more: its slot is *evictable*.
    """

    __slots__ = (
        "_readable_after",
        "_stack",
        "capacity",
        "in_tree",
        "join",
        "newest_ticket",
        "num_evictable",
        "num_free",
        "priority",
        "refs",
        "reusable_after",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_free = capacity
        self.refs: Int32 = np.zeros(capacity, np.int32)
        self.reusable_after: Int64 = np.zeros(capacity, np.int64)
        self.newest_ticket: Ticket = NO_TICKET
        self.in_tree: UInt8 = np.zeros(capacity, np.uint8)
        self.priority: UInt8 = np.zeros(capacity, np.uint8)
        self.num_evictable = 0
        self._readable_after: Int64 | None = None  # of published pages; made for the first ticket
        self.join: Join = _later
        self._stack: Int32 = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    def take(self, count: int) -> Int32:
        """Hands out `count` slots with one holder each.

        The caller has checked `num_free`. O(count).
        """
        left = self.num_free - count
        if left < 0:
            raise InternalError(f"took {count} of {self.num_free} free slots without asking first")
        slots = self._stack[left : self.num_free][::-1].copy()
        self.num_free = left
        self.refs[slots] = 1
        return slots

    def take_one(self) -> int:
        """`take(1)` without arrays."""
        if not self.num_free:
            raise InternalError("took a slot of none without asking first")
        self.num_free -= 1
        slot = int(self._stack[self.num_free])
        self.refs[slot] = 1
        return slot

    def tickets(self, slots: Int32) -> Int64 | None:
        """The moments to wait for before `slots` are written; None if no ticket was ever given."""
        return self.reusable_after[slots] if self.newest_ticket else None

    def next_tickets(self, count: int) -> Int64 | None:
        """`tickets` of the slots that `count` takes would hand out next."""
        if not self.newest_ticket:
            return None
        return self.reusable_after[self._stack[self.num_free - count : self.num_free]]

    def hold(self, slots: Int32) -> None:
        """Adds a holder per entry of held slots; entries may repeat. O(n log n)."""
        distinct, counts = np.unique(slots, return_counts=True)
        self.refs[distinct] += counts.astype(np.int32)

    def hold_distinct(self, slots: Int32, holders: int = 1) -> None:
        """Adds holders to each of some distinct slots, held or in the tree. O(n)."""
        where = as_index(slots)
        before = self.refs[where]
        self.num_evictable -= before.size - int(np.count_nonzero(before))
        self.refs[where] = before + holders

    def hold_more(self, slots: Int32, holders: int) -> None:
        """Adds holders to each of some distinct slots that have one. O(n)."""
        self.refs[as_index(slots)] += holders

    def release(self, slots: Int32, ticket: Ticket | None, *, distinct: bool) -> None:
        """Removes a holder per entry; frees what nobody holds any more, unless it is in the tree.

        Parameters
        ----------
        slots : int32 array
            Held slots. They may repeat unless `distinct`.
        ticket : Ticket or None
            The moment after which the freed slots may be overwritten; None leaves it as it was.
        distinct : bool
            Promises that no slot repeats: O(n) instead of O(n log n).
        """
        if not slots.size:
            return
        if distinct:
            self._release(slots, ticket, 1)
        else:
            slots, counts = np.unique(slots, return_counts=True)
            self._release(slots, ticket, counts.astype(np.int32))

    def release_each(self, slots: Int32, ticket: Ticket, holders: int) -> None:
        """Removes so many holders from each of some distinct slots."""
        if slots.size:
            self._release(slots, ticket, holders)

    def _release(self, slots: Int32, ticket: Ticket | None, counts: Int32 | int) -> None:
        where = as_index(slots)
        left = self.refs[where] - counts
        if left.min() < 0:
            raise InternalError(f"slots {slots[left < 0].tolist()} were released once too often")
        self.refs[where] = left
        kept = self.in_tree[where]
        if not np.count_nonzero(kept):
            self._give_back(slots[left == 0], ticket)
            return
        shared = kept != PRIVATE
        if ticket is not None and (ticket or self.newest_ticket):
            seen = slots[shared]
            self._note(seen, self.join(self.reusable_after[seen], ticket))
        ended = left == 0
        self.num_evictable += int(np.count_nonzero(ended & (kept == PUBLISHED)))
        if np.count_nonzero(shared) < shared.size:
            self._give_back(slots[ended & ~shared], ticket)
        left_over = ended & (kept == SHARED)
        if np.count_nonzero(left_over):
            self._free_shared(slots[left_over])

    def _note(self, slots: Int32, tickets: Int64 | Ticket) -> None:
        self.reusable_after[slots] = tickets
        newest = tickets if isinstance(tickets, int) else int(tickets.max(initial=NO_TICKET))
        self.newest_ticket = Ticket(max(self.newest_ticket, newest))

    def _give_back(self, freed: Int32, ticket: Ticket | None) -> None:
        end = self.num_free + freed.size
        self._stack[self.num_free : end] = freed[::-1]
        self.num_free = end
        if ticket is not None:
            self.reusable_after[freed] = ticket
            self.newest_ticket = max(self.newest_ticket, ticket)

    # -- published pages ---------------------------------------------------------------------------

    def publish(self, slots: Int32, ready: Ticket) -> None:
        """Distinct held pages are in the tree from now on; they may be read after `ready`."""
        where = as_index(slots)
        self.in_tree[where] = PUBLISHED
        if ready and self._readable_after is None:
            self._readable_after = np.zeros(self.capacity, np.int64)
        if self._readable_after is not None:
            self._readable_after[where] = ready

    def ready(self, slots: Int32) -> Int64 | None:
        """The moments after which published `slots` may be read; None if all have passed."""
        return None if self._readable_after is None else self._readable_after[slots]

    def withdraw(self, slots: Int32) -> None:
        """Published pages leave the tree: those that nobody holds are free."""
        held = self.refs[slots] > 0
        self.in_tree[slots] = SHARED
        unheld = slots[~held]
        self.num_evictable -= unheld.size
        self._free_shared(unheld)

    def share(self, slots: Int32, holders: int) -> None:
        """Adds holders of other sequences to each of some distinct held slots."""
        self.hold_distinct(slots, holders)
        private = slots[self.in_tree[slots] == PRIVATE]
        self.in_tree[private] = SHARED

    def withdraw_one(self, slot: int) -> None:
        """`withdraw` of a page that nobody holds, without arrays."""
        self.in_tree[slot] = PRIVATE
        self._stack[self.num_free] = slot
        self.num_free += 1
        self.num_evictable -= 1

    def _free_shared(self, slots: Int32) -> None:
        self.in_tree[slots] = PRIVATE
        self._give_back(slots, None)

    def free_slots(self) -> Int32:
        """The free slots, in no particular order. A copy."""
        return self._stack[: self.num_free].copy()


def as_index(slots: Int32) -> slice | NDArray[np.intp]:
    """Distinct slots as the fastest index: a slice where they ascend without gaps.

    >>> as_index(np.arange(2000, dtype=np.int32))
    slice(0, 2000, None)
    """
    count = slots.size
    if count >= WORTH_A_LOOK:
        first = slots.item(0)
        if slots.item(count - 1) - first == count - 1 and (slots[1:] - slots[:-1] == 1).all():
            return slice(first, first + count)
    return slots.astype(np.intp)
