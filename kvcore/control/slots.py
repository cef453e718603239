"""The slots of one pool group on one cache level: which are free, who holds the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import InternalError
from kvcore.ids import NO_TICKET, Ticket

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class SlotTable:
    """Structure of arrays over the slots `[0, capacity)`.

    Free slots form a stack, so that taking or giving back k of them is one slice; a fresh table
    hands them out in ascending runs. A held slot counts its holders, one per cell of a page table
    that names it. A freed slot can be handed out at once: it carries the ticket of the moment after
    which it may be overwritten, and its next owner's stream waits for that.
    """

    __slots__ = ("_stack", "capacity", "newest_ticket", "num_free", "refs", "reusable_after")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_free = capacity
        self.refs: Int32 = np.zeros(capacity, np.int32)
        self.reusable_after: Int64 = np.zeros(capacity, np.int64)
        self.newest_ticket: Ticket = NO_TICKET
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
        """Adds a holder per entry; entries may repeat. O(n log n)."""
        distinct, counts = np.unique(slots, return_counts=True)
        self.refs[distinct] += counts.astype(np.int32)

    def release(self, slots: Int32, ticket: Ticket | None, *, distinct: bool) -> None:
        """Removes a holder per entry and frees what nobody holds any more.

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
            left = self.refs[slots] - 1
        else:
            slots, counts = np.unique(slots, return_counts=True)
            left = self.refs[slots] - counts.astype(np.int32)
        if left.min() < 0:
            raise InternalError(f"slots {slots[left < 0].tolist()} were released once too often")
        self.refs[slots] = left
        freed = slots[left == 0]
        self._give_back(freed, ticket)

    def _give_back(self, freed: Int32, ticket: Ticket | None) -> None:
        end = self.num_free + freed.size
        self._stack[self.num_free : end] = freed[::-1]
        self.num_free = end
        if ticket is not None:
            self.reusable_after[freed] = ticket
            self.newest_ticket = max(self.newest_ticket, ticket)

    def free_slots(self) -> Int32:
        """The free slots, in no particular order. A copy."""
        return self._stack[: self.num_free].copy()
