"""Operations on int32 tables, and copies between arrays of any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from kvcore.device.base import Array, Int32, Int64
from kvcore.device.checks import ANY, INT32, INT64, check_array
from kvcore.device.cuda.blocks import address
from kvcore.device.cuda.kernels import MAX_UNITS, divider, unit_bytes
from kvcore.device.cuda.layouts import cut_strided
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

WORD = 4  # bytes


class WordWork:
    """The table operations of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._fill = device.launch("fill", "fill_words")
        self._scatter = device.launch("scatter_table", "scatter_table")
        self._map = device.launch("map_tokens", "map_tokens")
        self._fill_chunk = device.source("fill").chunk
        self._scatter_threads = device.source("scatter_table").threads
        self._map_threads = device.source("map_tokens").threads
        self._take_threads = device.source("take_rows").threads
        self._copy_threads = device.source("strided").threads

    def fill(self, target: Array, value: int, stream: CudaStream) -> None:
        """`fill_words`."""
        self._check_words("target", target)
        count = target.size
        if count:
            blocks = div_ceil(count, self._fill_chunk)
            self._fill(stream, blocks, 1, 1, target.data.ptr, count, value & 0xFFFFFFFF, 0)

    def scatter(
        self,
        table: Array,
        index: Int64,
        value: Int32,
        target: Array,
        words: Int32,
        stream: CudaStream,
    ) -> None:
        """`scatter_table`."""
        self._check_words("table", table)
        self._check_words("target", target)
        cells, size = index.size, words.size
        if index.dtype != INT64 or index.ndim != 1 or not index.flags.c_contiguous:
            check_array("index", index, np.ndarray, INT64, (ANY,))
        if value.dtype != INT32 or value.shape != index.shape or not value.flags.c_contiguous:
            check_array("value", value, np.ndarray, INT32, index.shape)
        if words.dtype != INT32 or words.ndim != 1 or not words.flags.c_contiguous:
            check_array("words", words, np.ndarray, INT32, (ANY,))
        if size > target.size:
            raise wrong("words", f"at most the target's {target.size}", size)
        count = max(cells, size)
        if not count:
            return
        self._scatter(
            stream,
            -(-count // self._scatter_threads),
            1,
            1,
            table.data.ptr,
            address(index),
            address(value),
            target.data.ptr,
            address(words),
            table.size,
            cells,
            size,
        )

    def map_tokens(
        self,
        tables: Array,
        rows: Array,
        starts: Array,
        ends: Array,
        out: Array,
        tokens_per_block: int,
        stream: CudaStream,
    ) -> None:
        """`map_tokens`. The grid depends on shapes only, so that a captured launch stays right."""
        if tokens_per_block < 1:
            raise wrong("tokens_per_block", "at least 1", tokens_per_block)
        known = self._device.known
        entries = rows.shape if known("rows", rows) else (ANY,)
        self._check("tables", tables, (ANY, ANY, ANY), strided=True)
        self._check("rows", rows, entries)
        check_starts = starts.shape != rows.shape or not known("starts", starts)
        if check_starts:
            self._check("starts", starts, rows.shape, again=True)
        if ends.shape != rows.shape or not known("ends", ends):
            self._check("ends", ends, rows.shape, again=True)
        groups = tables.shape[0]
        if not known("out", out) or out.shape[0] != groups:
            self._check("out", out, (groups, ANY, 2), again=True)
        tokens = out.shape[1]
        if not tokens or not groups:
            return
        group_stride, row_stride, _ = tables.strides
        self._map(
            stream,
            -(-tokens // self._map_threads),
            groups,
            1,
            tables.data.ptr,
            group_stride // WORD,
            row_stride // WORD,
            rows.data.ptr,
            starts.data.ptr,
            ends.data.ptr,
            out.data.ptr,
            tables.shape[1],
            tables.shape[2],
            rows.shape[0],
            tokens,
            *divider(tokens_per_block),
            0,
        )

    def take_rows(self, table: Array, rows: Array, out: Array, stream: CudaStream) -> None:
        """`take_rows`."""
        check_array("table", table, cupy.ndarray, INT32, (ANY, ANY), strided=True)
        check_array("rows", rows, cupy.ndarray, INT32, (ANY,))
        check_array("out", out, cupy.ndarray, INT32, (len(rows), ANY))
        if not out.size:
            return
        width, stride = out.shape[1] * WORD, table.strides[0]
        table_width = min(table.shape[1] * WORD, width)
        unit = unit_bytes(table.data.ptr, out.data.ptr, stride, width, table_width)
        launch = self._device.launch("take_rows", f"take_rows_{unit}")
        per_row = width // unit
        step = max(MAX_UNITS // per_row, 1)
        for first in range(0, out.shape[0], step):
            units = min(step, out.shape[0] - first) * per_row
            pointers = table.data.ptr, stride, out.data.ptr + first * width, width
            counts = table.shape[0], units, *divider(per_row), table_width // unit
            blocks = div_ceil(units, self._take_threads)
            launch(stream, blocks, 1, 1, *pointers, rows.data.ptr + first * WORD, *counts)

    def copy(self, source: Array, target: Array, stream: CudaStream) -> None:
        """Copies between device arrays of one shape and item size, whatever their strides."""
        itemsize = source.dtype.itemsize
        if source.size == 0:
            return
        pointers = source.data.ptr, target.data.ptr
        unit, fields = cut_strided(
            source.shape, source.strides, target.strides, itemsize, pointers[0] | pointers[1]
        )
        units = source.size * itemsize // unit
        if units > MAX_UNITS:
            text = f"fewer than {MAX_UNITS} units of {unit} bytes in a copy with strides"
            raise wrong("array", text, units, "copy it in parts")
        launch = self._device.launch("strided", f"copy_strided_{unit}")
        strides = *fields["source_strides"], *fields["target_strides"]
        sizes = [part for size in fields["sizes"] for part in size]
        blocks = div_ceil(units, self._copy_threads)
        launch(stream, blocks, 1, 1, *pointers, *strides, *sizes, fields["num_dims"], units, 0)

    def _check(
        self,
        name: str,
        array: Array,
        shape: tuple[int, ...],
        *,
        strided: bool = False,
        again: bool = False,
    ) -> None:
        if again or not self._device.known(name, array):
            check_array(name, array, cupy.ndarray, INT32, shape, strided=strided)
            self._device.remember(name, array)

    def _check_words(self, name: str, array: Array) -> None:
        if not self._device.known(name, array):
            shape = array.shape if isinstance(array, cupy.ndarray) else ()
            check_array(name, array, cupy.ndarray, INT32, shape)
            self._device.remember(name, array)
