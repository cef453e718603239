"""Where buffers lie, as kernels read it: in device memory, so that pools can grow under a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.device.cuda.memory import CudaMemory
from kvcore.errors import StateError

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice


class PlaceTable:
    """The kernels' `Place` of each buffer, kept right when a pool is resized.

    Parameters
    ----------
    device : CudaDevice
        Whose.
    places : sequence of (memory, bytes of a slot, offset of the buffer)
        At least one.
    """

    def __init__(self, device: CudaDevice, places: Sequence[tuple[CudaMemory, int, int]]) -> None:
        self._device, self._places = device, tuple(places)
        self._table = device.empty((len(places), 4), np.int64)
        self.address = int(self._table.data.ptr)
        self.num_slots = -1
        self.pool_resized(places[0][0], places[0][0].nbytes)
        self._memories = tuple({id(memory): memory for memory, _, _ in places}.values())
        for memory in self._memories:
            memory.follow(self)

    def pool_resized(self, memory: CudaMemory, nbytes: int) -> None:
        """Tells the kernels how many slots there are now. Blocks for one small upload."""
        num_slots = min(
            (nbytes if its is memory else its.nbytes) // slot_bytes
            for its, slot_bytes, _ in self._places
        )
        num_slots = min(num_slots, 2**31 - 1)  # ids are int32
        if num_slots == self.num_slots:
            return
        rows = [(its.base + offset, size, num_slots, 0) for its, size, offset in self._places]
        self._device.upload(self._table, np.array(rows, np.uint64).view(np.int64))
        self.num_slots = num_slots

    def check_open(self, name: str) -> None:
        """Raises `StateError`, in the name of whoever uses the table, if a pool was closed."""
        if not self.num_slots and any(memory.closed for memory in self._memories):
            raise StateError(f"{name}: a memory that its pages lie in was closed")
