"""What is evicted next: among the tips of the prefix tree the least important, longest unused one.

A node waits while its last block could go: nothing hangs below it and nobody holds it. The order
is exact at any time, because a node leaves the line when it is used again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcore.control.node import GONE, NOT_WAITING, Node
from kvcore.control.pieces import SortedPieces
from kvcore.control.slots import SlotTable

STAMP_BITS: Final = 48
RECLAIM: Final = 0
"""Below every priority: pages that nothing can find any more."""


class EvictionQueue:
    """Tips in the order of (priority, stamp of their last block).

    Two tips never share a stamp: one stamp marks one path, and a path has one tip.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._order: SortedPieces[int, Node] = SortedPieces()
        self._by_last: dict[int, Node] | None = None  # by the slot of their last block, once asked

    def offer(self, node: Node) -> None:
        """Lets `node` wait if its last block can go. O(sqrt n)."""
        if node.waiting != NOT_WAITING or node.children or not node.size:
            return
        slot = node.slots.item(0, node.size - 1)
        if not self._slots.refs.item(slot):
            node.waiting = self._key(node, slot)
            self._order.put(node.waiting, node)
            if self._by_last is not None:
                self._by_last[slot] = node

    def leave(self, node: Node) -> None:
        """`node` waits no longer."""
        if node.waiting >= 0:
            self._order.remove(node.waiting)
            node.waiting = NOT_WAITING

    def requeue(self, node: Node) -> None:
        """Puts a waiting node, whose last block is another one now, where it belongs."""
        slot = node.slots.item(0, node.size - 1)
        if self._slots.refs.item(slot) or self._key(node, slot) != node.waiting:
            self.leave(node)
            self.offer(node)
        elif self._by_last is not None:
            self._by_last[slot] = node

    def first(self) -> Node | None:
        """The node whose last block goes next; None if nobody waits."""
        return self._order.first()

    def take_first(self) -> None:
        """`first` waits no longer, because it is gone."""
        self._order.pop_first().waiting = GONE

    def with_last_in(self, slots: NDArray[np.int32]) -> list[Node]:
        """The waiting nodes whose last block is in one of some slots. O(tips) the first time."""
        if self._by_last is None:
            self._by_last = {node.slots.item(0, node.size - 1): node for node in self._order}
        named = [(slot, self._by_last.pop(slot, None)) for slot in slots.tolist()]
        found = [
            node
            for slot, node in named
            if node is not None and node.waiting >= 0 and node.slots.item(0, node.size - 1) == slot
        ]
        self._by_last.update({node.slots.item(0, node.size - 1): node for node in found})
        return found

    def waiting(self) -> list[Node]:
        """All waiting nodes, the first to go first."""
        return list(self._order)

    def tail(self, node: Node, most: int) -> int:
        """How many blocks at the end of a waiting node go before any other node's."""
        steps = node.steps
        count = node.size - steps[2] if len(steps) > 2 else node.size
        if count > most:
            count = most
        if count == 1:
            return 1
        pages = node.slots[0, node.size - count : node.size]
        unheld = pages[_after_last(self._slots.refs[pages] != 0) :]
        priority = self._slots.priority[unheld]
        return unheld.size - _after_last(priority != priority[-1])

    def _key(self, node: Node, slot: int) -> int:
        rank = RECLAIM if node.root.stale else 1 + self._slots.priority.item(slot)
        return rank << STAMP_BITS | node.steps[1]


def _after_last(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """The index after the last true entry, 0 if there is none."""
    found = flags.nonzero()[0]
    return int(found[-1]) + 1 if found.size else 0
