"""Written tails of blocks: from row to row of a page table, or from slot to slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import cupy
import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array, BeamArrays, Int32
from kvcore.device.checks import check_copy_tails
from kvcore.device.cuda.arguments import MAX_INLINE, MAX_KINDS, MAX_UNITS
from kvcore.device.cuda.kernels import unit_bytes
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.memory import CudaMemory
from kvcore.device.cuda.places import PlaceTable
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

ROW_HEAD: Final = "<QqQQQQQIIII"
PAIR_HEAD: Final = "<QII"
WORD: Final = 4  # bytes
LANES: Final = 32
PER_PROCESSOR: Final = 4
"""Blocks of a grid for each multiprocessor: enough for all its loads to overlap."""

Place = tuple[CudaMemory, int, int, int, int]
Part = tuple[int, Launch]


class CudaTailBuffers:
    """The buffers of a block of one layer group, with their addresses in device memory."""

    def __init__(self, device: CudaDevice, places: Sequence[Place]) -> None:
        self._device, self.num_places = device, len(places)
        places = sorted(places, key=lambda place: place[3:])  # equal sizes side by side
        self._unit = unit_bytes(*(part for m, *rest in places for part in (m.base, *rest)))
        self._kinds = self._find_kinds(places)
        self._table = PlaceTable(device, [place[:3] for place in places]) if places else None
        self._plans: dict[str, list[Part]] = {}
        self._lists: dict[int, NDArray[np.int32]] = {}  # in the blocks of inline launches
        self._seen = Seen()

    @property
    def device(self) -> CudaDevice:
        """Who made it."""
        return self._device

    def forget_plans(self) -> None:
        """Makes the next launches anew, with the tunings of then."""
        self._plans.clear()
        self._lists.clear()

    def copy_tails(
        self,
        table: Array,
        beams: BeamArrays,
        sources: Array,
        tokens_per_block: int,
        stream: CudaStream,
    ) -> None:
        """`Device.copy_tails`. The grid depends on shapes only."""
        self._check_open()
        arrays = table, *beams[:6], sources
        key = tokens_per_block, *map(id, arrays)
        found = self._seen.get(key, *arrays)
        if found is None:
            check_copy_tails(table, beams, sources, tokens_per_block, cupy.ndarray)
            ids = (beams.rows, beams.shared, beams.blocks, beams.valid, sources)
            pointers = [array.data.ptr for array in ids]
            counts = *table.shape, sources.size, tokens_per_block
            facts = table.data.ptr, table.strides[0] // WORD, *pointers, *counts
            found = self._seen.keep(key, (sources.size, facts), *arrays)
        count, values = found
        if count:
            for pieces, launch in self._parts("copy_tails", ROW_HEAD):
                launch(stream, self._grid(count * pieces, launch), 1, 1, *values)

    def copy_tokens(self, ids: Int32, stream: CudaStream) -> None:
        """`Device.copy_tokens` of sources, targets and tokens, `[3, pairs]`."""
        self._check_open()
        count = ids.shape[1]
        if not count or not self.num_places:
            return
        if count <= MAX_INLINE or stream.is_capturing():
            for start in range(0, count, MAX_INLINE):
                self._inline(ids[:, start : start + MAX_INLINE], stream)
            return
        listed, room = self._device.lists.send(ids, stream)
        try:
            for pieces, launch in self._parts("copy_tokens", PAIR_HEAD):
                grid = self._grid(count * pieces, launch)
                launch(stream, grid, 1, 1, listed.data.ptr, count, 0)
        finally:
            self._device.lists.retire(room, stream)

    def _inline(self, ids: NDArray[np.int32], stream: CudaStream) -> None:
        """Pairs that travel in the launch arguments."""
        count = ids.shape[1]
        for pieces, launch in self._parts("copy_tokens_inline", PAIR_HEAD):
            grid = self._grid(count * pieces, launch)
            at = self._lists[id(launch)][:, :count]
            launch.with_ids(stream, grid, 1, 1, ids, at, 0, count, 0)

    def _grid(self, pieces: int, launch: Launch) -> int:
        """Blocks for at most so many pieces, one per warp; a position may have several of it."""
        most = PER_PROCESSOR * self._device.num_processors
        return min(most, div_ceil(pieces, launch.threads // LANES))

    def _check_open(self) -> None:
        if self._table is not None:
            self._table.check_open("buffers")

    def _find_kinds(self, places: Sequence[Place]) -> list[list[int]]:
        """(first place, places, units of a buffer, units of a token) of equal buffers in a row."""
        kinds: list[list[int]] = []
        for index, (_, _, _, nbytes, token_bytes) in enumerate(places):
            sizes = [nbytes // self._unit, token_bytes // self._unit]
            if sizes[0] > MAX_UNITS:
                raise wrong("places", f"buffers of at most {MAX_UNITS} units", sizes[0])
            if kinds and kinds[-1][2:] == sizes:
                kinds[-1][1] += 1
            else:
                kinds.append([index, 1, *sizes])
        return kinds

    def _parts(self, entry: str, head: str) -> list[Part]:
        """(pieces of a whole block, launch) for each `MAX_KINDS` kinds of buffers."""
        parts = self._plans.get(entry)
        if parts is None:
            kinds = [self._kinds[i : i + MAX_KINDS] for i in range(0, len(self._kinds), MAX_KINDS)]
            parts = self._plans[entry] = [self._part(entry, head, some) for some in kinds]
        return parts

    def _part(self, entry: str, head: str, kinds: Sequence[list[int]]) -> Part:
        source = self._device.source("copy_tails")
        launch = self._device.new_launch(source, f"{entry}_{self._unit}", head)
        fields: Any = launch.block
        if entry == "copy_tokens_inline":
            fields = launch.block["args"]
            self._lists[id(launch)] = launch.block["lists"].reshape(3, MAX_INLINE)
        none = [(0, 0, 0, 0)] * (MAX_KINDS - len(kinds))
        address = self._table.address if self._table is not None else 0
        fields["buffers"] = address, len(kinds), 0, [tuple(kind) for kind in kinds] + none
        chunk = LANES * source.vectors
        return sum(count * div_ceil(units, chunk) for _, count, units, _ in kinds), launch
