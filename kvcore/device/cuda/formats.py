"""Page tables in other forms on the CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import cupy
import numpy as np

from kvcore.device.checks import check_block_offsets, check_row_pages, check_token_slots
from kvcore.device.cuda.arguments import MAX_TABLE_POOLS
from kvcore.device.cuda.kernels import divider
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import CudaStream, as_own
from kvcore.device.formats import FormatOperations, PageNumbers, PoolNumbers, RowRanges
from kvcore.device.parts import Array, Stream
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

WORD: Final = 4  # bytes
HEAD: Final = "<QqqQQIIIIIi"  # of the arguments of block_offsets: all but its pools
MOST_ROWS: Final = 1024
"""Blocks of a grid over the rows of a batch. With more rows each block has several: every block
sums up all the rows before its own."""
PER_PROCESSOR: Final = 8
"""Blocks of a grid for each multiprocessor: as many as run at a time."""
MOST_LAUNCHES: Final = 64


class BlockOffsets:
    """`block_offsets` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()
        self._launches: dict[tuple[PoolNumbers, ...], Launch] = {}

    def __call__(
        self,
        tables: Array,
        rows: Array,
        out: Array,
        pools: tuple[PoolNumbers, ...],
        no_page: int,
        stream: CudaStream,
    ) -> None:
        """Enqueues it. The grid depends on shapes only."""
        key = id(tables), id(rows), id(out), pools, no_page
        found = self._seen.get(key, tables, rows, out)
        if found is None:
            check_block_offsets(tables, rows, out, pools, no_page, cupy.ndarray)
            facts = self._facts(tables, rows, out, pools, no_page)
            found = self._seen.keep(key, facts, tables, rows, out)
        for launch, *values in found:
            launch(stream, *values)

    def _facts(
        self,
        tables: Array,
        rows: Array,
        out: Array,
        pools: tuple[PoolNumbers, ...],
        no_page: int,
    ) -> list[Any]:
        """The launches, with their grids and arguments."""
        if not out.size:
            return []
        _, out_rows, _, out_pages = out.shape
        strides = [stride // WORD for stride in tables.strides[:2]]
        counts = *tables.shape[1:], rows.shape[0], out_rows, out_pages, no_page
        found = []
        for first in range(0, len(pools), MAX_TABLE_POOLS):
            some = pools[first : first + MAX_TABLE_POOLS]
            launch, at = self._launch(some), out.data.ptr + first * out.strides[0]
            grid = div_ceil(out_pages, launch.threads), min(out_rows, MOST_ROWS), len(some)
            found.append((launch, *grid, tables.data.ptr, *strides, rows.data.ptr, at, *counts))
        return found

    def _launch(self, pools: tuple[PoolNumbers, ...]) -> Launch:
        launch = self._launches.get(pools)
        if launch is None:
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
                self._seen = Seen()
            source = self._device.source("block_offsets")
            launch = self._device.new_launch(source, "block_offsets", HEAD)
            numbers = [(*pool[:3], divider(pool.expansion)) for pool in pools]
            fields = launch.block["pools"][0, : len(pools)]
            fields[...] = np.array(numbers, fields.dtype)
            self._launches[pools] = launch
        return launch


class RowPages:
    """`csr_pages` and `ragged_pages` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()

    def __call__(
        self,
        entry: str,
        table: Array,
        ranges: RowRanges,
        arrays: dict[str, Array],
        numbers: PageNumbers,
        page_tokens: int,
        no_page: int,
        stream: CudaStream,
    ) -> None:
        """Enqueues it. `arrays` are, by their names, pages, bounds, lengths and perhaps a count."""
        named = table, *ranges, *arrays.values()
        key = entry, numbers, page_tokens, no_page, *map(id, named)
        found = self._seen.get(key, *named)
        if found is None:
            args = table, ranges, arrays, numbers, page_tokens, no_page
            check_row_pages(*args, cupy.ndarray)
            found = self._seen.keep(key, self._facts(entry, *args), *named)
        launch, *values = found
        launch(stream, *values)

    def _facts(
        self,
        entry: str,
        table: Array,
        ranges: RowRanges,
        arrays: dict[str, Array],
        numbers: PageNumbers,
        page_tokens: int,
        no_page: int,
    ) -> Any:
        """The launch, its grid and its arguments."""
        launch = self._device.launch("row_pages", entry)
        pages, *others = arrays.values()
        (table_rows, blocks), rows = table.shape, int(ranges.rows.shape[0])
        block_rows = max(div_ceil(rows, MOST_ROWS), 1)
        y = max(div_ceil(rows, block_rows), 1)
        wide = blocks * numbers.expansion if entry == "csr_pages" else pages.shape[1]
        most = max(PER_PROCESSOR * self._device.num_processors // y, 1)
        grid = max(min(div_ceil(wide, launch.threads), most), 1), y, 1
        pointers = [its.data.ptr for its in (*ranges, pages, *others)]
        if len(others) == 2:
            pointers.append(0)  # without a count
        tokens = min(blocks * numbers.expansion * page_tokens, 2**31 - 1)
        counts = rows, pages.shape[-1], table_rows, tokens
        sums = numbers.scale, numbers.offset, no_page, block_rows
        cuts = *divider(page_tokens), *divider(numbers.expansion)
        stride = table.strides[0] // WORD
        return launch, *grid, table.data.ptr, stride, *pointers, *counts, *sums, *cuts


class CudaFormats(FormatOperations):
    """The contract on one GPU."""

    def _prepare_formats(self, device: CudaDevice) -> None:
        """Launches of the present tunings."""
        self._block_offsets, self._row_pages = BlockOffsets(device), RowPages(device)
        self._token_slots = device.launch("token_slots", "token_slots")

    def block_offsets(
        self,
        tables: Array,
        rows: Array,
        out: Array,
        pools: Sequence[PoolNumbers],
        *,
        no_page: int = -1,
        stream: Stream,
    ) -> None:
        self._block_offsets(tables, rows, out, tuple(pools), no_page, as_own(stream))

    def csr_pages(
        self,
        table: Array,
        ranges: RowRanges,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        *,
        numbers: PageNumbers,
        page_tokens: int,
        stream: Stream,
    ) -> None:
        arrays = {"indices": indices, "indptr": indptr, "last_page_len": last_page_len}
        args = "csr_pages", table, ranges, arrays, numbers, page_tokens, -1
        self._row_pages(*args, as_own(stream))

    def ragged_pages(
        self,
        table: Array,
        ranges: RowRanges,
        page_indices: Array,
        cu_q_lens: Array,
        kv_lens: Array,
        num_seqs: Array,
        *,
        numbers: PageNumbers,
        page_tokens: int,
        no_page: int = 0,
        stream: Stream,
    ) -> None:
        outs = page_indices, cu_q_lens, kv_lens, num_seqs
        names = "page_indices", "cu_q_lens", "kv_lens", "num_seqs"
        arrays = dict(zip(names, outs, strict=True))
        args = "ragged_pages", table, ranges, arrays, numbers, page_tokens, no_page
        self._row_pages(*args, as_own(stream))

    def token_slots(
        self, mapping: Array, out: Array, *, scale: int, offset: int = 0, stream: Stream
    ) -> None:
        check_token_slots(mapping, out, scale, offset, cupy.ndarray)
        count, launch = int(out.size), self._token_slots
        if count:
            values = mapping.data.ptr, out.data.ptr, scale, offset, count
            launch(stream, div_ceil(count, launch.threads), 1, 1, *values)
