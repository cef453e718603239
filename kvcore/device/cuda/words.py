"""Operations on int32 tables, and copies between arrays of any strides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import cupy
import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array, Int32, Int64, StepArrays, StepLaunch, Stream
from kvcore.device.checks import ANY, INT32, INT64, check_array
from kvcore.device.cuda.arguments import MAX_UNITS
from kvcore.device.cuda.blocks import address
from kvcore.device.cuda.graphs import Graph
from kvcore.device.cuda.kernels import divider, packing, unit_bytes
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.layouts import cut_strided
from kvcore.device.cuda.seen import Seen
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

WORD = 4  # bytes
MOST_CELLS = 1024  # of a step that goes by graph
MOST_GRAPHS = 64


class WordWork:
    """The table operations of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()
        self._fill = device.launch("fill", "fill_words")
        self._scatter = device.launch("scatter_table", "scatter_table")
        self._map = device.launch("map_tokens", "map_tokens")
        self._fill_chunk = device.source("fill").chunk

    def fill(self, target: Array, value: int, stream: Stream) -> None:
        """`fill_words`."""
        _check_words("target", target)
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
        stream: Stream,
    ) -> None:
        """`scatter_table`."""
        key = id(table), id(target)
        found = self._seen.get(key, table, target)
        if found is None:
            _check_words("table", table)
            _check_words("target", target)
            facts = table.data.ptr, target.data.ptr, table.size, target.size
            found = self._seen.keep(key, facts, table, target)
        table_at, target_at, table_cells, target_cells = found
        cells, size = index.size, words.size
        if index.dtype != INT64 or index.ndim != 1 or not index.flags.c_contiguous:
            check_array("index", index, np.ndarray, INT64, (ANY,))
        if value.dtype != INT32 or value.shape != index.shape or not value.flags.c_contiguous:
            check_array("value", value, np.ndarray, INT32, index.shape)
        if words.dtype != INT32 or words.ndim != 1 or not words.flags.c_contiguous:
            check_array("words", words, np.ndarray, INT32, (ANY,))
        if size > target_cells:
            raise wrong("words", f"at most the target's {target_cells}", size)
        count = cells if cells > size else size
        if count:
            blocks = -(-count // self._scatter.threads)
            staged = address(index), address(value), target_at, address(words)
            self._scatter(stream, blocks, 1, 1, table_at, *staged, table_cells, cells, size)

    def map_tokens(
        self,
        tables: Array,
        rows: Array,
        starts: Array,
        ends: Array,
        out: Array,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        """`map_tokens`. The grid depends on shapes only, so that a captured launch stays right."""
        key = id(tables), id(rows), id(starts), id(ends), id(out), tokens_per_block
        found = self._seen.get(key, tables, rows, starts, ends, out)
        if found is None:
            facts = self.map_facts(tables, rows, starts, ends, out, tokens_per_block)
            found = self._seen.keep(key, facts, tables, rows, starts, ends, out)
        if found[0] and found[1]:
            self._map(stream, *found)

    def map_facts(
        self, tables: Array, rows: Array, starts: Array, ends: Array, out: Array, block: int
    ) -> tuple[int, ...]:
        """Grid and arguments of a `map_tokens`, after a look at the arrays."""
        if block < 1:
            raise wrong("tokens_per_block", "at least 1", block)
        check_array("tables", tables, cupy.ndarray, INT32, (ANY, ANY, ANY), strided=True)
        check_array("rows", rows, cupy.ndarray, INT32, (ANY,))
        check_array("starts", starts, cupy.ndarray, INT32, rows.shape)
        check_array("ends", ends, cupy.ndarray, INT32, rows.shape)
        check_array("out", out, cupy.ndarray, INT32, (len(tables), ANY, 2))
        (groups, num_rows, num_blocks), tokens = tables.shape, out.shape[1]
        strides = [stride // WORD for stride in tables.strides[:2]]
        pointers = [array.data.ptr for array in (rows, starts, ends, out)]
        counts = num_rows, num_blocks, rows.shape[0], tokens, *divider(block), 0
        grid = div_ceil(tokens, self._map.threads), groups, 1
        return (*grid, tables.data.ptr, *strides, *pointers, *counts)

    def take_rows(self, table: Array, rows: Array, out: Array, stream: Stream) -> None:
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
            blocks = div_ceil(units, launch.threads)
            launch(stream, blocks, 1, 1, *pointers, rows.data.ptr + first * WORD, *counts)

    def copy(self, source: Array, target: Array, stream: Stream) -> None:
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
        blocks = div_ceil(units, launch.threads)
        launch(stream, blocks, 1, 1, *pointers, *strides, *sizes, fields["num_dims"], units, 0)


class CudaStepLaunch(StepLaunch):
    """Both kernels in a graph per staging buffer, so that a step is one driver call.

    Steps with unusually many changed cells launch them one by one.
    """

    def __init__(self, device: CudaDevice, arrays: StepArrays, work: WordWork) -> None:
        super().__init__(device, arrays)
        _check_words("table", arrays.table)
        _check_words("target", arrays.target)
        self._cuda, self._num_words = device, arrays.target.size
        self._graphs: dict[int, Graph] = {}  # by the address of the staging
        facts = work.map_facts(
            arrays.tables,
            arrays.rows,
            arrays.starts,
            arrays.ends,
            arrays.out,
            arrays.tokens_per_block,
        )
        empty = not (facts[0] and facts[1])
        self._map = None if empty else new_launch(device, "map_tokens").bound(*facts)

    def __call__(self, staged: NDArray[np.uint8], cells: int, words: int, stream: Stream) -> None:
        if cells > MOST_CELLS or words != self._num_words:
            super().__call__(staged, cells, words, stream)
            return
        at = address(staged)
        graph = self._graphs.get(at)
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            graph = self._graphs[at] = Graph(self._cuda, partial(self._enqueue, at))
        graph(stream)

    def _enqueue(self, staged: int, stream: Stream) -> None:
        table, target = self._arrays.table, self._arrays.target
        launch = new_launch(self._cuda, "scatter_table", "scatter_staged")
        blocks = div_ceil(max(MOST_CELLS, self._num_words), launch.threads)
        pointers = table.data.ptr, staged, target.data.ptr
        launch(stream, blocks, 1, 1, *pointers, table.size, self._num_words, 0)
        if self._map is not None:
            self._map(stream)


def new_launch(device: CudaDevice, name: str, entry: str | None = None) -> Launch:
    """A launch with a block of its own; the entry point is named after its source by default."""
    source, entry = device.source(name), entry or name
    return device.new_launch(source, entry, packing(source.entries[entry]))


def _check_words(name: str, array: Array) -> None:
    shape = array.shape if isinstance(array, cupy.ndarray) else ()
    check_array(name, array, cupy.ndarray, INT32, shape)
