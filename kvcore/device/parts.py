"""What devices are made of: arrays, events, streams, memory. `kvcore.device.base` has it all."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.device.holds import Holds
from kvcore.layout import PageGeometry

Array = Any
"""An array of the device: `numpy.ndarray` or `cupy.ndarray`."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Event(Protocol):
    """A moment in a stream. Events are recorded when made and never re-recorded."""

    def done(self) -> bool:
        """Whether the moment has passed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the moment has passed."""
        ...


class Stream(Protocol):
    """A queue of device work, executed in order. The device hands out one object per handle."""

    @property
    def handle(self) -> int:
        """The raw handle (`CUstream` as an integer; a serial number on the host)."""
        ...

    @property
    def deputy(self) -> Stream | None:
        """Another stream, whose moments come after the earlier work of this one in any thread.

        Only where this means each thread's own.
        """
        ...

    def record(self) -> Event:
        """Marks the present end of the queue."""
        ...

    def wait(self, event: Event) -> None:
        """Later work of this stream starts only after `event`. Does not block the host."""
        ...

    def follow(self, other: Stream) -> None:
        """Later work of this stream starts only after what `other` has enqueued so far."""
        ...

    def is_capturing(self) -> bool:
        """Whether work goes into a graph instead of to the device."""
        ...

    def is_idle(self) -> bool:
        """Whether the queue is empty.

        Also False while a graph is being captured from it, and where only an event could tell.
        """
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the queue is empty."""
        ...


class Memory(Protocol):
    """One address range whose base never moves; its first `nbytes` bytes are backed by memory."""

    @property
    def base(self) -> int:
        """First address."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes backed by memory, a multiple of the grain."""
        ...

    @property
    def holds(self) -> Holds:
        """Who uses it: as long as that is anybody, `close` and `resize` below that refuse."""
        ...

    def resize(self, nbytes: int) -> None:
        """Backs exactly the first `nbytes` (rounded up to the grain).

        Raises `OutOfMemoryError` with nothing changed, `ValueError` for more than was reserved,
        `LeaseInUse` for less than is held and `StateError` after `close`. What stays backed keeps
        its content. Shrinking requires that no work touches the part given up; the caller
        synchronises first. New memory has undefined content.
        """
        ...

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        """A view of this range as an array of the device; no copy. It keeps the addresses reserved.

        Raises `ValueError` where it would leave the reserved range or `offset` is not a multiple of
        the item size, `StateError` after `close`.
        """
        ...

    def close(self) -> None:
        """Gives the memory back. Idempotent. No enqueued work may touch it any more.

        Raises `LeaseInUse`, with nothing changed, while somebody holds it.
        """
        ...


class PageStack(Protocol):
    """Pages of `L` layers and `K` roles of one layer group, with equal geometry, ready for kernels.

    Made by `Device.page_stack`; immutable; on CUDA it holds the L * K addresses in device memory.
    """

    @property
    def geometry(self) -> PageGeometry: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_roles(self) -> int: ...
