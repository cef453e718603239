"""Small values from the host to the device, through pinned staging."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.device.cuda.blocks import address
from kvcore.device.cuda.streams import CudaStream
from kvcore.device.staging import StagingRing

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice


class Uploads:
    """Copies values before it returns, and sends them in the order of a stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ring: StagingRing | None = None  # pinned when it is first needed

    def send(self, values: NDArray[Any], target: int, stream: CudaStream) -> None:
        """Enqueues the copy of `values`, of any strides, to a dense place at `target`."""
        with self._lock:
            if self._ring is None:
                self._ring = StagingRing(self._device)
            buffer, event = self._ring.lease(values.nbytes), None
            try:
                staged = buffer[: values.nbytes].view(values.dtype).reshape(values.shape)
                np.copyto(staged, values)
                copy = target, address(buffer), values.nbytes, stream.native
                self._device.context.call("cuMemcpyHtoDAsync", *copy)
                event = stream.record()
            finally:
                self._ring.retire(buffer, event)

    def close(self) -> None:
        """Gives the staging back. BLOCKS until nothing is read from it any more."""
        with self._lock:
            if self._ring is not None:
                self._ring.close()
            self._ring = None
