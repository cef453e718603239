"""Latches, captured graphs and free memory, for the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cupy
import numpy as np

LIMIT = 6_000_000_000  # cycles, about three seconds: no test may hang the device


class Latch:
    """Holds a stream until `open`; as a context manager opens at the end in any case."""

    def __init__(self, device, stream):
        self._words = device.pinned(8).view(np.int32)
        self._words[:] = 0
        start = self._words.ctypes.data
        device.launch("latch", "latch")(stream, 1, 1, 1, start, start + 4, LIMIT)

    def open(self):
        self._words[0] = 1

    @property
    def gave_up(self):
        """Whether it opened by itself, which makes whatever the test found worthless."""
        return bool(self._words[1])


@contextmanager
def held(device, *streams) -> Iterator[None]:
    """The streams stand still inside the block, and have run out after it."""
    latches = [Latch(device, stream) for stream in streams]
    try:
        yield
    finally:
        for latch in latches:
            latch.open()
        for stream in streams:
            stream.synchronize()
    assert not any(latch.gave_up for latch in latches)


def delay(device, stream, milliseconds):
    """Keeps a stream busy for about so long."""
    device.launch("latch", "delay")(stream, 1, 1, 1, int(milliseconds * 1_500_000))


def capturable(device):
    """A new stream that can be captured."""
    return cupy.cuda.Stream(non_blocking=True)


class Graph:
    """What `work(stream)` enqueues, captured once, on a stream of the graph's own or on `on`."""

    def __init__(self, device, work, on=None):
        self._cupy = capturable(device) if on is None else on
        self.stream = device.stream(self._cupy)
        self._cupy.begin_capture()
        try:
            work(self.stream)
        finally:
            self._graph = self._cupy.end_capture()

    def launch(self):
        """Enqueues it."""
        self._graph.launch(self._cupy)

    def replay(self):
        """Runs it to the end."""
        self.launch()
        self._cupy.synchronize()


def free_bytes() -> int:
    """Device memory that nobody has."""
    return int(cupy.cuda.runtime.memGetInfo()[0])


def device_count() -> int:
    return int(cupy.cuda.runtime.getDeviceCount())
