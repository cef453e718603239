"""Operations on beams of the CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakSet

import cupy

from kvcore.device.base import (
    Array,
    BeamArrays,
    Int32,
    PathArrays,
    Stream,
    TailBuffers,
    TailPlace,
)
from kvcore.device.beams import MAX_BEAMS, BeamOperations
from kvcore.device.checks import check_pairs, check_step_rows, check_tails
from kvcore.device.cuda.dense import DenseRows
from kvcore.device.cuda.driver import Context
from kvcore.device.cuda.kernels import packing
from kvcore.device.cuda.launch import USUAL_SHARED, Launch, most_shared
from kvcore.device.cuda.memory import own_memory
from kvcore.device.cuda.paths import PathWork
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import as_own
from kvcore.device.cuda.tails import CudaTailBuffers
from kvcore.device.paths import PathOperations
from kvcore.errors import wrong, wrong_type

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice
    from kvcore.device.cuda.words import WordWork

WORD: Final = 4  # bytes
MOST_COLUMNS: Final = 64  # of a tile; the kernel's 2 ** MAX_SHIFT
MOST_SLICES: Final = 8
MAX_Y: Final = 65_535  # blocks of a grid in its second dimension


class BeamRows:
    """`step_rows` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._seen = device, Seen()
        self._launches: dict[int, Launch] = {}  # by words of shared memory
        self._limit = most_shared(device.context) // WORD

    def __call__(
        self, table: Array, beams: BeamArrays, parents: Array, sources: Array, stream: Stream
    ) -> None:
        """Enqueues it. The grid depends on shapes only."""
        arrays = table, *beams[:6], parents, sources
        key = beams.max_width, *map(id, arrays)
        found = self._seen.get(key, *arrays)
        if found is None:
            check_step_rows(table, beams, parents, sources, cupy.ndarray)
            facts = self._facts(table, beams, parents, sources)
            found = self._seen.keep(key, facts, *arrays)
        launch, *values = found
        if values[0]:
            launch(stream, *values)

    def _facts(self, table: Array, beams: BeamArrays, parents: Array, sources: Array) -> Any:
        """The launch, its grid and its arguments."""
        (num_rows, groups, blocks), count = table.shape, int(sources.size)
        if groups > MAX_Y:
            raise wrong("table", f"at most {MAX_Y} layer groups", groups)
        width = min(beams.max_width or MAX_BEAMS, max(count, 1))
        cells = self._cells(width)
        strides = [stride // WORD for stride in table.strides[:2]]
        ids = (*beams[:5], parents, sources)
        pointers = [array.data.ptr for array in ids]
        counts = num_rows, blocks if groups else 0, count, parents.size, width, cells
        busy = max(count * groups, 1)
        slices = max(1, min(MOST_SLICES, 4 * self._device.num_processors // busy))
        grid = count, max(groups, 1), slices
        return self._launch(cells), *grid, table.data.ptr, *strides, *pointers, *counts

    def _cells(self, width: int) -> int:
        """Words of shared memory for requests up to `width` beams."""
        if 2 * width > self._limit:
            most = self._limit // 2
            raise wrong("beams.max_width", f"at most {most} on this GPU", width, "set max_width")
        columns = MOST_COLUMNS
        while columns > 1 and WORD * width * (1 + columns) > USUAL_SHARED:
            columns //= 2
        return width * (1 + columns)

    def _launch(self, cells: int) -> Launch:
        launch = self._launches.get(cells)
        if launch is None:
            source = self._device.source("step_rows")
            head = packing(source.entries["step_rows"])
            launch = self._device.new_launch(source, "step_rows", head, WORD * cells)
            self._launches[cells] = launch
        return launch


class CudaBeams(BeamOperations, PathOperations):
    """The contract on one GPU."""

    context: Context
    _stacks: WeakSet[Any]

    def _prepare_beams(self, device: CudaDevice, words: WordWork) -> None:
        """Launches of the present tunings."""
        self._beam_rows = BeamRows(device)
        self._dense_rows = DenseRows(device)
        self._paths = PathWork(device, words)

    @cached_property
    def num_processors(self) -> int:
        """Multiprocessors of the GPU."""
        return self.context.attribute("MULTIPROCESSOR_COUNT")

    def step_rows(
        self,
        table: Array,
        beams: BeamArrays,
        parents: Array,
        sources: Array,
        *,
        stream: Stream,
    ) -> None:
        self._beam_rows(table, beams, parents, sources, as_own(stream))

    def tail_buffers(self, places: Sequence[TailPlace]) -> TailBuffers:
        check_tails(places)
        mine = [(own_memory(place[0], self.context), *place[1:]) for place in places]
        buffers = CudaTailBuffers(cast("CudaDevice", self), mine)
        self._stacks.add(buffers)
        return buffers

    def copy_tails(
        self,
        buffers: TailBuffers,
        table: Array,
        beams: BeamArrays,
        sources: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        mine = self._tails(buffers)
        mine.copy_tails(table, beams, sources, tokens_per_block, as_own(stream))

    def copy_tokens(self, buffers: TailBuffers, pairs: Int32, *, stream: Stream) -> None:
        self._tails(buffers).copy_tokens(check_pairs(pairs), as_own(stream))

    def permute_rows(
        self,
        arrays: Sequence[Array],
        parents: Array,
        *,
        width: int,
        starts: Array | None = None,
        tokens: Array | None = None,
        token_axis: int = 2,
        stream: Stream,
    ) -> None:
        on = as_own(stream)
        self._dense_rows(tuple(arrays), parents, width, starts, tokens, token_axis, on)

    def step_paths(
        self, cells: Array, beams: PathArrays, parents: Array, *, stream: Stream
    ) -> None:
        self._paths.step(cells, beams, parents, as_own(stream))

    def take_paths(self, cells: Array, beams: PathArrays, out: Array, *, stream: Stream) -> None:
        self._paths.take(cells, beams, out, as_own(stream))

    def map_paths(
        self,
        tables: Array,
        cells: Array,
        beams: PathArrays,
        starts: Array,
        ends: Array,
        out: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        args = tables, cells, beams, starts, ends, out, tokens_per_block
        self._paths.map(*args, as_own(stream))

    def _tails(self, buffers: TailBuffers) -> CudaTailBuffers:
        if isinstance(buffers, CudaTailBuffers) and buffers.device is self:
            return buffers
        if isinstance(buffers, CudaTailBuffers):
            raise wrong("buffers", f"tail buffers of cuda:{self.context.device_id}", buffers)
        raise wrong_type("buffers", "tail buffers of a cuda device", buffers)
