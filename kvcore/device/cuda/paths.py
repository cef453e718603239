"""Beams that find their history through paths: step by step, and read through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cupy

from kvcore.device.base import Array, PathArrays
from kvcore.device.beams import MAX_BEAMS
from kvcore.device.checks import (
    ANY,
    INT32,
    check_array,
    check_map_paths,
    check_paths,
    check_take_paths,
)
from kvcore.device.cuda.arguments import MAX_UNITS
from kvcore.device.cuda.kernels import divider, packing
from kvcore.device.cuda.launch import USUAL_SHARED, Launch, most_shared
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice
    from kvcore.device.cuda.words import WordWork

WORD: Final = 4  # bytes
MOST_SHIFT: Final = 8  # log2 of the positions of a tile: 1 KiB of a beam
PER_PROCESSOR: Final = 16  # blocks of a grid
MAX_Y: Final = 65_535


class PathWork:
    """The path operations of one device. Grids depend on shapes only."""

    def __init__(self, device: CudaDevice, words: WordWork) -> None:
        self._device, self._words, self._seen = device, words, Seen()
        self._steps: dict[int, Launch] = {}  # by shared memory
        self._take = device.launch("paths", "take_paths")
        self._map = device.launch("map_tokens", "map_paths")
        self._limit = most_shared(device.context)

    def step(self, cells: Array, beams: PathArrays, parents: Array, stream: CudaStream) -> None:
        """`step_paths`."""
        arrays = cells, *beams[:6], parents
        key = "step", beams.max_width, *map(id, arrays)
        found = self._seen.get(key, *arrays)
        if found is None:
            check_paths(cells, beams, cupy.ndarray)
            check_array("parents", parents, cupy.ndarray, INT32, (ANY,))
            found = self._seen.keep(key, self._step_facts(cells, beams, parents), *arrays)
        launch, *values = found
        if values[0] and values[1]:
            launch(stream, *values)

    def take(self, cells: Array, beams: PathArrays, out: Array, stream: CudaStream) -> None:
        """`take_paths`."""
        check_take_paths(cells, beams, out, cupy.ndarray)
        if out.size > MAX_UNITS:
            raise wrong("out", f"at most {MAX_UNITS} cells", out.size)
        if out.size:
            columns = divider(out.shape[1])
            grid = div_ceil(out.size, self._take.threads), 1, 1
            facts = _paths(cells, beams)
            self._take(stream, *grid, *facts, out.data.ptr, out.size, *columns)

    def map(
        self,
        tables: Array,
        cells: Array,
        beams: PathArrays,
        starts: Array,
        ends: Array,
        out: Array,
        tokens_per_block: int,
        stream: CudaStream,
    ) -> None:
        """`map_paths`."""
        arrays = tables, cells, *beams[:6], starts, ends, out
        key = "map", tokens_per_block, *map(id, arrays)
        found = self._seen.get(key, *arrays)
        if found is None:
            args = tables, cells, beams, starts, ends, out, tokens_per_block
            check_map_paths(*args, cupy.ndarray)
            found = self._seen.keep(key, self._map_facts(*args), *arrays)
        if found[0] and found[1]:
            self._map(stream, *found)

    def _map_facts(
        self,
        tables: Array,
        cells: Array,
        beams: PathArrays,
        starts: Array,
        ends: Array,
        out: Array,
        tokens_per_block: int,
    ) -> tuple[int, ...]:
        """Grid and arguments."""
        args = tables, beams.rows, starts, ends, out, tokens_per_block
        x, y, z, *mapping = self._words.map_facts(*args)
        ids = [array.data.ptr for array in (beams.first, beams.width, beams.base, beams.own)]
        place = cells.data.ptr, cells.strides[0] // WORD
        return x, y, z, *mapping, *place, *ids, *cells.shape

    def _step_facts(self, cells: Array, beams: PathArrays, parents: Array) -> Any:
        """The launch, its grid and its arguments."""
        count, positions = beams.rows.size, cells.shape[1]
        width = min(beams.max_width or MAX_BEAMS, max(count, 1))
        shift, shared = MOST_SHIFT, _shared(width, MOST_SHIFT)
        while shift and shared > USUAL_SHARED:
            shift -= 1
            shared = _shared(width, shift)
        if shared > self._limit:
            most = self._limit // _shared(1, 0)
            raise wrong("beams.max_width", f"at most {most} on this GPU", width, "set max_width")
        y = min(count, MAX_Y)
        most = div_ceil(PER_PROCESSOR * self._device.num_processors, max(y, 1))
        grid = min(div_ceil(positions, 1 << shift), most), y, 1
        pointers = beams.valid.data.ptr, parents.data.ptr
        counts = parents.size, width, shift, 0
        return self._launch(shared), *grid, *_paths(cells, beams), *pointers, *counts

    def _launch(self, shared: int) -> Launch:
        launch = self._steps.get(shared)
        if launch is None:
            source = self._device.source("paths")
            head = packing(source.entries["step_paths"])
            launch = self._device.new_launch(source, "step_paths", head, shared)
            self._steps[shared] = launch
        return launch


def _paths(cells: Array, beams: PathArrays) -> tuple[int, ...]:
    """The fields of `Paths`."""
    ids = [array.data.ptr for array in beams[:5]]
    return cells.data.ptr, cells.strides[0] // WORD, *ids, *cells.shape, beams.rows.size, 0


def _shared(beams: int, shift: int) -> int:
    """Bytes of a tile and the parents."""
    return WORD * (beams << shift) + 2 * beams
