"""Whole slots: copies and poison, in all pools of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.device.cuda.kernels import MAX_INLINE, MAX_POOLS, divider, packing, unit_bytes
from kvcore.device.cuda.kernels import INLINE_SLOT_ARGS as INLINE
from kvcore.device.cuda.kernels import SLOT_ARGS as STAGED
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.memory import CudaMemory
from kvcore.device.cuda.streams import CudaStream
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

Pool = tuple[CudaMemory, int]
NO_POOL = (0, 0, 0, 0, *divider(1))


class SlotWork:
    """`copy_pages` or `fill_pages` of one device.

    Up to `MAX_INLINE` slot ids travel in the launch arguments, which the driver copies: no upload,
    nothing to keep alive, and a captured launch replays with the ids it was captured with. More of
    them go through pinned staging into device memory first, because thousands of blocks of the grid
    would each fetch their ids over the bus; under capture they take several launches instead.

    Parameters
    ----------
    device : CudaDevice
        Whose.
    source, entry : str
        The file and the kernel's name, without its ending.
    lists : int
        How many ids a piece of work has: 2 for copies (source, target), 1 for fills.
    """

    def __init__(self, device: CudaDevice, source: str, entry: str, lists: int) -> None:
        self._device, self._source, self._entry = device, device.source(source), entry
        self._lists = lists
        self._launches: dict[str, Launch] = {}

    def __call__(
        self, pools: Sequence[Pool], ids: NDArray[np.int32], pattern: int, stream: CudaStream
    ) -> None:
        """Enqueues the work on `ids` `[lists, N]` in every pool."""
        if not ids.size or not pools:
            return
        limit = min(memory.nbytes // slot_bytes for memory, slot_bytes in pools)
        for first in range(0, len(pools), MAX_POOLS):
            some = pools[first : first + MAX_POOLS]
            if ids.shape[1] <= MAX_INLINE or stream.is_capturing():
                for start in range(0, ids.shape[1], MAX_INLINE):
                    part = ids[:, start : start + MAX_INLINE]
                    self._inline(some, limit, part, pattern, stream)
            else:
                self._staged(some, limit, ids, pattern, stream)

    def _inline(
        self, pools: Sequence[Pool], limit: int, ids: NDArray[np.int32], pattern: int, on: CudaStream
    ) -> None:
        count = ids.shape[1]
        unit, blocks, fields = self._describe(pools, limit, count)
        carried = np.zeros((2, MAX_INLINE), np.int32)
        carried[: self._lists, :count] = ids
        launch = self._launch("_inline", unit, INLINE)
        launch(on, blocks, 1, 1, 0, count, len(pools), pattern, 0, *fields, carried.tobytes())

    def _staged(
        self, pools: Sequence[Pool], limit: int, ids: NDArray[np.int32], pattern: int, on: CudaStream
    ) -> None:
        count = ids.shape[1]
        unit, blocks, fields = self._describe(pools, limit, count)
        listed = self._device.empty(ids.shape, np.int32, stream=on)
        self._device.from_host(ids, listed, stream=on)
        launch = self._launch("", unit, STAGED)
        pointer = listed.data.ptr
        launch(on, blocks, 1, 1, pointer, count, len(pools), pattern, 0, *fields)

    def _describe(
        self, pools: Sequence[Pool], limit: int, count: int
    ) -> tuple[int, int, list[int]]:
        """Unit, blocks of the grid, and the `Pool` fields of a launch on `count` slots."""
        bits = 0
        for memory, slot_bytes in pools:
            bits |= memory.base | slot_bytes
        unit, fields, blocks = unit_bytes(bits), [], 0
        for memory, slot_bytes in pools:
            chunks = div_ceil(slot_bytes, unit * self._source.chunk)
            fields += [memory.base, slot_bytes, limit, blocks, *divider(chunks)]
            blocks += chunks * count
        for _ in range(MAX_POOLS - len(pools)):
            fields += NO_POOL
        return unit, blocks, fields

    def _launch(self, kind: str, unit: int, fields: Any) -> Launch:
        name = f"{self._entry}{kind}_{unit}"
        launch = self._launches.get(name)
        if launch is None:
            head = packing(STAGED)
            if fields is INLINE:  # the ids as one run of bytes
                head += f"{INLINE.itemsize - STAGED.itemsize}s"
            launch = self._device.new_launch(self._source, name, head)
            self._launches[name] = launch
        return launch
