"""Short lists of ids from the host, for kernels that work through them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array, Event, Stream

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice


class SentLists:
    """Lists in device memory, which is used again once nothing reads it any more."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._read: deque[tuple[Array, Event]] = deque()  # rooms, and when they were read

    def send(self, ids: NDArray[np.int32], stream: Stream) -> tuple[Array, Array]:
        """The ids on the device, and the room they lie in, which `retire` must get.

        They travel on a stream of the device's own, while this one may still be busy.
        """
        own = self._device.own_stream()
        room = self._unread(ids.size)
        if room is None:
            size = 1 << (ids.size - 1).bit_length()
            room = self._device.empty(size, np.int32, stream=own)
        listed = room[: ids.size].reshape(ids.shape)
        self._device.from_host(ids, listed, stream=own)
        stream.follow(own)
        return listed, room

    def retire(self, room: Array, stream: Stream) -> None:
        """Work that was just enqueued on `stream` is the last to read the room."""
        self._read.append((room, stream.record()))

    def clear(self) -> None:
        """Forgets all rooms."""
        self._read.clear()

    def _unread(self, size: int) -> Array | None:
        """The room used longest ago, if nothing reads it any more and it is large enough."""
        try:
            room, read = self._read.popleft()
        except IndexError:
            return None
        if not read.done():
            self._read.appendleft((room, read))
            return None
        return room if room.size >= size else None
