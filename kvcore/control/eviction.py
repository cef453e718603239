"""What is evicted next: among the tips of the prefix tree the least important, longest unused one.

A node waits while its last block could go: nothing hangs below it and nobody holds it. The order
is exact at any time, because a node leaves the line when it is used again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvcore.control.node import NOT_WAITING, Node
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
        self._order: SortedPieces[int] = SortedPieces()
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def offer(self, node: Node) -> None:
        """Lets `node` wait if its last block can go. O(sqrt n)."""
        if node.waiting != NOT_WAITING or node.children or not (node.alive and node.size):
            return
        slot = node.slots.item(0, node.size - 1)
        if self._slots.refs.item(slot):
            return
        key = self._key(node, slot)
        node.waiting = key
        self._nodes[key] = node
        self._order.add(key)

    def leave(self, node: Node) -> None:
        """`node` waits no longer."""
        if node.waiting != NOT_WAITING:
            self._order.remove(node.waiting)
            del self._nodes[node.waiting]
            node.waiting = NOT_WAITING

    def requeue(self, node: Node) -> None:
        """Puts a waiting node, whose last block is another one now, where it belongs."""
        slot = node.slots.item(0, node.size - 1)
        if self._slots.refs.item(slot) or self._key(node, slot) != node.waiting:
            self.leave(node)
            self.offer(node)

    def first(self) -> Node:
        """The node whose last block goes next. There is one."""
        return self._nodes[self._order.first()]

    def waiting(self) -> list[Node]:
        """All waiting nodes, in no particular order."""
        return list(self._nodes.values())

    def tail(self, node: Node, most: int) -> int:
        """How many blocks at the end of a waiting node go before any other node's."""
        stairs = node.stairs
        count = min(most, node.size - (stairs[1][0] if len(stairs) > 1 else 0))
        if count == 1:
            return 1
        pages = node.slots[0, node.size - count : node.size]
        unheld = pages[_after_last(self._slots.refs[pages] != 0) :]
        priority = self._slots.priority[unheld]
        return unheld.size - _after_last(priority != priority[-1])

    def _key(self, node: Node, slot: int) -> int:
        rank = RECLAIM if node.root.stale else 1 + self._slots.priority.item(slot)
        return rank << STAMP_BITS | node.stairs[0][1]


def _after_last(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """The index after the last true entry, 0 if there is none."""
    found = flags.nonzero()[0]
    return int(found[-1]) + 1 if found.size else 0
