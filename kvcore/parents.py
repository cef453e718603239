"""Parents on their way from the device to the host.

A beam step reorders rows on the device at once. The host follows when the copy of the parents has
arrived, step by step in their order, and frees then what no row reaches. Until that moment its own
rows are those of before: it neither shows them nor changes them, but may add blocks behind them and
give back all of them, which needs no order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.control.beams import apply_parents
from kvcore.device.base import Array, Device, Event, Stream
from kvcore.device.staging import StagingRing

if TYPE_CHECKING:
    from kvcore.runtime import Runtime

Int32 = NDArray[np.int32]


@dataclass(slots=True)
class Part:
    """One sequence of a beam step, as it was when the step was prepared."""

    sequence: int
    first: int
    """Where its parents begin in the batch."""

    width: int
    shared: int
    blocks: int


@dataclass(slots=True)
class _Step:
    event: Event
    buffer: NDArray[np.uint8]
    parts: list[Part]


class PendingParents:
    """The beam steps that the host has not followed yet, the oldest first."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ring: StagingRing | None = None
        self._steps: deque[_Step] = deque()
        self._waiting: dict[int, int] = {}  # steps by sequence

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._waiting

    def fetch(self, parents: Array, count: int, parts: list[Part], stream: Stream) -> None:
        """Enqueues the copy of `count` parents to the host. Does not block."""
        device: Device = self._runtime.device
        if self._ring is None:
            self._ring = StagingRing(device, 4096)
        buffer = self._ring.lease(4 * count)
        try:
            device.fetch(parents[:count], buffer[: 4 * count].view(np.int32), stream=stream)
            event = stream.record()
        except BaseException:
            self._ring.retire(buffer, None)
            raise
        self._steps.append(_Step(event, buffer, parts))
        for part in parts:
            self._waiting[part.sequence] = self._waiting.get(part.sequence, 0) + 1

    def take_arrived(self) -> None:
        """Follows every step whose parents have arrived."""
        while self._steps and self._steps[0].event.done():
            self._follow()

    def settle(self, sequence: int) -> None:
        """BLOCKS until the parents of all steps of one sequence have arrived, and follows them."""
        while sequence in self._waiting:
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """BLOCKS until the parents of the oldest step have arrived, and follows it."""
        self._steps[0].event.synchronize()
        self._follow()

    def forget(self, sequence: int) -> None:
        """A sequence is gone, with everything it held."""
        if self._waiting.pop(sequence, None):
            for step in self._steps:
                step.parts = [part for part in step.parts if part.sequence != sequence]

    def close(self) -> None:
        """Drops everything. The device is idle."""
        self._steps.clear()
        self._waiting.clear()
        if self._ring is not None:
            self._ring.close()

    def _follow(self) -> None:
        runtime, step = self._runtime, self._steps.popleft()
        words = step.buffer[: step.buffer.nbytes & -4].view(np.int32)
        for part in step.parts:
            given = words[part.first : part.first + part.width].tolist()
            parents = [p if 0 <= p < part.width else i for i, p in enumerate(given)]
            apply_parents(runtime.control, part.sequence, parents, part.shared, part.blocks)
            runtime.bound_rows.refresh(part.sequence)
            self._waiting[part.sequence] -= 1
            if not self._waiting[part.sequence]:
                del self._waiting[part.sequence]
        if self._ring is not None:
            self._ring.retire(step.buffer, None)
