"""Pinned buffers that the host writes and kernels read, recycled only behind events."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Device, Event
from kvcore.errors import StateError, wrong

SMALLEST: Final = 1 << 14

Bytes = NDArray[np.uint8]


class StagingRing:
    """Pinned buffers of one device, each in the host's hands or behind an event, never both.

    A buffer is leased, written, read by enqueued work, and retired with an event recorded after
    that work. `lease` never waits: it takes the oldest retired buffer that is large enough and
    whose event has passed, and pins a new one if there is none. So there are never more buffers
    than were leased or unfinished at one moment: one per step that the host runs ahead of the
    device. A finished buffer that is too small is dropped when a larger one takes its place. Calls
    are not thread-safe.

    Parameters
    ----------
    device : Device
        Pins the memory.
    nbytes : int, default 16384
        Smallest size of a buffer. Larger leases get a power of two.
    buffers : int, default 2
        How many to pin at the start, so that the first steps need not.

    Examples
    --------
    >>> from kvcore.device.host import HostDevice
    >>> device = HostDevice()
    >>> ring = StagingRing(device, 4096)
    >>> buffer = ring.lease(100)
    >>> buffer[:24].view(np.int64)[:] = 7
    >>> ring.retire(buffer, device.default_stream.record())
    """

    def __init__(self, device: Device, nbytes: int = SMALLEST, *, buffers: int = 2) -> None:
        if nbytes < 1:
            raise wrong("nbytes", "at least 1", nbytes)
        self._device, self._smallest = device, nbytes
        self._leased: dict[int, Bytes] = {}
        self._retired: deque[tuple[Bytes, Event | None]] = deque()
        for _ in range(buffers):
            self._retired.append((device.pinned(nbytes), None))

    def __len__(self) -> int:
        return len(self._leased) + len(self._retired)

    @property
    def nbytes(self) -> int:
        """Pinned bytes of all buffers."""
        retired = sum(buffer.nbytes for buffer, _ in self._retired)
        return retired + sum(buffer.nbytes for buffer in self._leased.values())

    def lease(self, nbytes: int) -> Bytes:
        """A buffer of at least `nbytes` bytes that no enqueued work reads.

        Its content is undefined. About 1 µs if the oldest retired buffer will do; pinning a new one
        may block. Retire the array that this returns, not a view of it.
        """
        retired = self._retired
        if retired:
            buffer, event = retired[0]
            if buffer.nbytes >= nbytes and (event is None or event.done()):
                retired.popleft()
                self._leased[id(buffer)] = buffer
                return buffer
        return self._lease_other(nbytes)

    def retire(self, buffer: Bytes, event: Event | None) -> None:
        """Gives a leased buffer back; it is free once `event` has passed (None: now).

        Raises `StateError` where the buffer is not leased from this ring.
        """
        if self._leased.pop(id(buffer), None) is None:
            raise StateError(
                "buffer: expected an array that lease() of this ring returned and that was not "
                "retired since; a view of it is not enough"
            )
        self._retired.append((buffer, event))

    def close(self) -> None:
        """Drops all buffers. BLOCKS until no enqueued work reads them. Idempotent."""
        for _, event in self._retired:
            if event is not None:
                event.synchronize()
        self._retired.clear()
        self._leased.clear()

    def _lease_other(self, nbytes: int) -> Bytes:
        too_small = None
        for place, (buffer, event) in enumerate(self._retired):
            if event is not None and not event.done():
                continue
            if buffer.nbytes >= nbytes:
                del self._retired[place]
                break
            too_small = place if too_small is None else too_small
        else:
            buffer = self._device.pinned(max(self._smallest, 1 << (nbytes - 1).bit_length()))
            if too_small is not None:
                del self._retired[too_small]
        self._leased[id(buffer)] = buffer
        return buffer
