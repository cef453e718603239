"""Parents on their way from the device to the host.

A beam step reorders rows on the device at once. The host follows when the copy of the parents has
arrived, step by step in their order, and frees then what no row reaches. Until that moment its own
rows are those of before: it neither shows them nor changes them, but may add blocks behind them and
give back all of them, which needs no order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.control.following import follow
from kvcore.device.base import Array, Event, Stream
from kvcore.device.staging import StagingRing

if TYPE_CHECKING:
    from kvcore.runtime import Runtime

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

GONE = -1


class Members(NamedTuple):
    """The sequences of a beam step that have beams, as they were when it was prepared."""

    sequences: Index
    first: Index
    """Where the parents of each begin in the batch."""

    width: Int32
    low: Int32
    high: Int32
    """What changed of them, in the mode's words: see `kvcore.control.following.follow`."""

    tails: Int32
    """Private blocks that hold data."""


@dataclass(slots=True)
class _Step:
    event: Event
    buffer: NDArray[np.uint8]
    members: Members


class PendingParents:
    """The beam steps that the host has not followed yet, the oldest first."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ring: StagingRing | None = None
        self._steps: deque[_Step] = deque()
        self._waiting: Int32 = np.zeros(runtime.config.max_sequences, np.int32)  # steps of each

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __contains__(self, sequence: int) -> bool:
        return self._waiting.item(sequence) > 0

    def lease(self, count: int) -> NDArray[np.uint8]:
        """A pinned buffer for `count` parents. May pin memory, so it comes before any launch."""
        if self._ring is None:
            self._ring = StagingRing(self._runtime.device, 4096)
        return self._ring.lease(4 * count)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Returns a leased buffer that no copy was enqueued into."""
        if self._ring is not None:
            self._ring.retire(buffer, None)

    def fetch(
        self, parents: Array, buffer: NDArray[np.uint8], members: Members, stream: Stream
    ) -> None:
        """Enqueues the copy of the parents into a leased buffer. Does not block."""
        if not members.sequences.size:
            self.give_back(buffer)
            return
        target = buffer[: 4 * parents.shape[0]].view(np.int32)
        self._runtime.device.fetch(parents, target, stream=stream)
        self._steps.append(_Step(stream.record(), buffer, members))
        self._waiting[members.sequences] += 1

    def take_arrived(self) -> None:
        """Follows every step whose parents have arrived."""
        while self._steps and self._steps[0].event.done():
            self._follow()

    def settle(self, sequence: int) -> None:
        """BLOCKS until the parents of all steps of one sequence have arrived, and follows them."""
        while self._waiting[sequence]:
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """BLOCKS until the parents of the oldest step have arrived, and follows it."""
        self._steps[0].event.synchronize()
        self._follow()

    def forget(self, sequence: int) -> None:
        """A sequence is gone, with everything it held."""
        if self._waiting[sequence]:
            self._waiting[sequence] = 0
            for step in self._steps:
                step.members.sequences[step.members.sequences == sequence] = GONE

    def close(self) -> None:
        """Drops everything. The device is idle."""
        self._steps.clear()
        self._waiting[:] = 0
        if self._ring is not None:
            self._ring.close()

    def _follow(self) -> None:
        runtime, step = self._runtime, self._steps.popleft()
        given = step.buffer[: step.buffer.nbytes & -4].view(np.int32)
        members = step.members
        open_ones = members.sequences != GONE
        for width in np.unique(members.width[open_ones]).tolist():
            chosen = np.flatnonzero(open_ones & (members.width == width))
            sequences = members.sequences[chosen]
            parents = given[members.first[chosen][:, None] + np.arange(width)].astype(np.intp)
            low, high = members.low[chosen], members.high[chosen]
            children = follow(runtime.control, sequences, parents, low, high)
            runtime.control.stats.stepped(sequences, children * members.tails[chosen])
            self._waiting[sequences] -= 1
        if self._ring is not None:
            self._ring.retire(step.buffer, None)
        if runtime.bound_rows:
            runtime.bound_rows.refresh_all(members.sequences[open_ones])
