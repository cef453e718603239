"""Pages whose priority ends at a moment of the caller's clock."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvcore.control.slots import SlotTable

Int32 = NDArray[np.int32]

NEVER = np.inf


class Deadlines:
    """Moments by slot. A later setting of a page's priority replaces its moment.

    The arrays are made when the first moment is set.
    """

    def __init__(self, slots_of: list[SlotTable]) -> None:
        self._capacity = slots_of[0].capacity
        self._moment: NDArray[np.float64] | None = None
        self._heap: list[tuple[float, int, Int32]] = []
        self._count = 0

    def add(self, moment: float, pages: Int32) -> None:
        """The priority of `pages` `[layer groups, n]` ends at `moment`. O(n)."""
        if self._moment is None:
            self._moment = np.full(self._capacity, NEVER)
        slots = pages[0].copy()
        self._moment[slots] = moment
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, slots))

    def remove(self, pages: Int32) -> None:
        """The priority of `pages` lasts."""
        if self._moment is not None:
            self._moment[pages[0]] = NEVER

    def passed(self, now: float) -> Int32:
        """The slots whose moment has come, once."""
        moments, found = self._moment, [np.empty(0, np.int32)]
        while moments is not None and self._heap and self._heap[0][0] <= now:
            moment, _, slots = heapq.heappop(self._heap)
            due = slots[moments[slots] == moment]
            moments[due] = NEVER
            found.append(due)
        return np.concatenate(found)
