"""Indirections that say which beam has each position, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cupy

from kvcore.device.base import Array
from kvcore.device.checks import check_step_indirection
from kvcore.device.cuda.kernels import packing
from kvcore.device.cuda.launch import USUAL_SHARED, Launch, most_shared
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

WORD: Final = 4  # bytes
MOST_SHIFT: Final = 8  # 1 KiB of a beam in a tile
PER_PROCESSOR: Final = 16  # blocks of a grid
MAX_Y: Final = 65_535


class Indirections:
    """`step_indirection` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()
        self._launches: dict[int, Launch] = {}  # by shared memory
        self._limit = most_shared(device.context)

    def __call__(
        self,
        indirection: Array,
        parents: Array,
        starts: Array,
        ends: Array,
        widths: Array | None,
        stream: CudaStream,
    ) -> None:
        """Enqueues it. The grid depends on shapes only."""
        arrays = indirection, parents, starts, ends
        named = arrays if widths is None else (*arrays, widths)
        key = tuple(map(id, named))
        found = self._seen.get(key, *named)
        if found is None:
            check_step_indirection(*arrays, widths, cupy.ndarray)
            found = self._seen.keep(key, self._facts(*arrays, widths), *named)
        launch, *values = found
        if launch is not None:
            launch(stream, *values)

    def _facts(
        self, indirection: Array, parents: Array, starts: Array, ends: Array, widths: Array | None
    ) -> Any:
        """The launch, its grid and its arguments."""
        requests, beams, positions = indirection.shape
        if not indirection.size:
            return (None,)
        shift, shared = MOST_SHIFT, _shared(beams, MOST_SHIFT)
        while shift and shared > USUAL_SHARED:
            shift -= 1
            shared = _shared(beams, shift)
        if shared > self._limit:
            raise wrong("indirection", f"at most {self._limit // _shared(1, 0)} beams", beams)
        y = min(requests, MAX_Y)
        most = div_ceil(PER_PROCESSOR * self._device.num_processors, y)
        grid = min(div_ceil(positions, 1 << shift), most), y, 1
        strides = [stride // WORD for stride in indirection.strides[:2]]
        pointers = [its.data.ptr for its in (parents, starts, ends)]
        pointers.append(0 if widths is None else widths.data.ptr)
        counts = requests, beams, positions, shift
        return self._launch(shared), *grid, indirection.data.ptr, *strides, *pointers, *counts

    def _launch(self, shared: int) -> Launch:
        launch = self._launches.get(shared)
        if launch is None:
            source = self._device.source("step_indirection")
            head = packing(source.entries["step_indirection"])
            launch = self._device.new_launch(source, "step_indirection", head, shared)
            self._launches[shared] = launch
        return launch


def _shared(beams: int, shift: int) -> int:
    """Bytes of a tile and the parents."""
    return WORD * (beams << shift) + 2 * beams
