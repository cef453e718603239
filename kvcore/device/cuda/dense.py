"""Rows of dense arrays in a new order, in place."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import cupy
import numpy as np

from kvcore.device.base import Array
from kvcore.device.checks import check_distinct, check_permute_rows
from kvcore.device.cuda.arguments import MAX_ARRAYS, MAX_UNITS
from kvcore.device.cuda.kernels import unit_bytes
from kvcore.device.cuda.launch import USUAL_SHARED, Launch, most_shared
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong
from kvcore.ids import align_up, div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

HEAD: Final = "<QQQqIIIIIIII"
MOST_SHIFT: Final = 8  # 4 KiB of a row in a tile
PER_PROCESSOR: Final = 1024
"""Blocks of a grid for each multiprocessor: the last ones to end are a small part of the work."""
MAX_Y: Final = 65_535
TILE_ROOM: Final = 1 << 10  # bytes of shared memory beside tile and parents

Layout = tuple[int, int, int, int, int]
"""Row stride, segments of a row, bytes of a segment, bytes of a token, unit."""


class DenseRows:
    """`permute_rows` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()
        self._launches: dict[tuple[str, int], Launch] = {}  # by entry and shared memory
        self._limit = most_shared(device.context) - TILE_ROOM

    def __call__(
        self,
        arrays: tuple[Array, ...],
        parents: Array,
        width: int,
        starts: Array | None,
        tokens: Array | None,
        token_axis: int,
        stream: CudaStream,
    ) -> None:
        """Enqueues it. The grid depends on shapes only."""
        args = arrays, parents, width, starts, tokens, token_axis
        named = [its for its in (*arrays, parents, starts, tokens) if its is not None]
        key = width, starts is None, tokens is None, token_axis, *map(id, named)
        found = self._seen.get(key, *named)
        if found is None:
            found = self._seen.keep(key, self._facts(*args), *named)
        for launch, ids, grid, values in found:
            launch.with_ids(stream, *grid, ids, launch.block["arrays"][0, : len(ids)], *values)

    def _facts(
        self,
        arrays: tuple[Array, ...],
        parents: Array,
        width: int,
        starts: Array | None,
        tokens: Array | None,
        token_axis: int,
    ) -> list[Any]:
        """The launches, with their addresses, grids and arguments."""
        more = starts, tokens, token_axis
        requests = check_permute_rows(arrays, parents, width, *more, cupy.ndarray)
        some = [array for array in arrays if array.size]
        check_distinct([array.data.ptr for array in some])
        alike: dict[Layout, list[int]] = {}
        for array in some:
            layout = _layout(array, token_axis if tokens is not None else 0)
            alike.setdefault(layout, []).append(array.data.ptr)
        if not requests or width == 1:
            return []
        lists = [0 if its is None else its.data.ptr for its in (parents, *more[:2])]
        counts = int(parents.size), requests, width
        return [
            self._part(layout, pointers[i : i + MAX_ARRAYS], lists, counts)
            for layout, pointers in alike.items()
            for i in range(0, len(pointers), MAX_ARRAYS)
        ]

    def _part(
        self,
        layout: Layout,
        pointers: Sequence[int],
        lists: Sequence[int],
        counts: tuple[int, int, int],
    ) -> Any:
        """One launch, for rows that are laid out alike."""
        stride, segments, segment, token, unit = layout
        _, requests, width = counts
        units = segments * segment // unit
        if units > MAX_UNITS:
            raise wrong("arrays", f"rows of at most {MAX_UNITS} units of {unit} bytes", units)
        launch, columns, shift = self._launch(width, unit)
        y = min(requests, MAX_Y)
        most = PER_PROCESSOR * self._device.num_processors
        x = max(1, min(div_ceil(units, columns), div_ceil(most, y * len(pointers))))
        sizes = segments, segment // unit, token // unit, shift, 0
        ids = np.array(pointers, np.uint64)
        return launch, ids, (x, y, len(pointers)), (*lists, stride, *counts, *sizes)

    def _launch(self, width: int, unit: int) -> tuple[Launch, int, int]:
        """The launch for requests up to a width; the columns of a block, and their logarithm."""
        shift, shared = MOST_SHIFT, self._shared(width, unit, MOST_SHIFT)
        while shift and shared > USUAL_SHARED:
            shift -= 1
            shared = self._shared(width, unit, shift)
        if shared > self._limit:
            most = self._limit // self._shared(1, unit, 0)
            raise wrong("width", f"at most {most} on this GPU", width)
        return self._made(f"permute_rows_{unit}", shared), 1 << shift, shift

    def _shared(self, width: int, unit: int, shift: int) -> int:
        """Bytes of a tile and its parents."""
        return align_up((width << shift) * unit, 2) + 2 * width

    def _made(self, entry: str, shared: int) -> Launch:
        launch = self._launches.get((entry, shared))
        if launch is None:
            source = self._device.source("permute_rows")
            launch = self._device.new_launch(source, entry, HEAD, shared)
            self._launches[entry, shared] = launch
        return launch


def _layout(array: Array, token_axis: int) -> Layout:
    """How the rows of an array lie. Without tokens (axis 0) a row is one segment."""
    shape, item = array.shape, array.dtype.itemsize
    stride = array.strides[0] if shape[0] > 1 else 0
    token = prod(shape[token_axis + 1 :]) * item if token_axis else 0
    segment = prod(shape[max(token_axis, 1) :]) * item
    unit = unit_bytes(array.data.ptr, stride, segment, token)
    return stride, prod(shape[1 : max(token_axis, 1)]), segment, token, unit
