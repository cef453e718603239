"""Pages whose priority ends at a moment of the caller's clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

NEVER = np.inf


class Deadlines:
    """Moments by slot. A later setting of a page's priority replaces its moment.

    The array is made when the first moment is set.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._moment: NDArray[np.float64] | None = None
        self._earliest = NEVER  # no page's moment is before

    def __bool__(self) -> bool:
        return self._moment is not None

    def set(self, slots: Int32, moment: float | None) -> None:
        """The priority of `slots` ends at `moment`; None: it lasts. O(n)."""
        if moment is None:
            if self._moment is not None:
                self._moment[slots] = NEVER
            return
        if self._moment is None:
            self._moment = np.full(self._capacity, NEVER)
        self._moment[slots] = moment
        self._earliest = min(self._earliest, moment)

    def passed(self, now: float) -> Int32:
        """The slots whose moment has come, once. O(1) before the earliest, else O(capacity)."""
        if self._moment is None or now < self._earliest:
            return np.empty(0, np.int32)
        due = np.flatnonzero(self._moment <= now)
        self._moment[due] = NEVER
        self._earliest = float(self._moment.min())
        return due.astype(np.int32)
