"""Whole slots: copies and poison, in all pools of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.device.cuda.arguments import MAX_INLINE, MAX_POOLS
from kvcore.device.cuda.kernels import divider, unit_bytes
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.memory import CudaMemory
from kvcore.device.cuda.streams import CudaStream
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

Ids = NDArray[np.int32]
Pool = tuple[CudaMemory, int]

HEAD: Final = "<QIII"
"""What every launch packs: slots, how many, limit, pattern."""

MAX_PLANS: Final = 64


class SlotPlan:
    """Launches for certain pools."""

    __slots__ = ("chunks", "ids", "inline", "staged")

    def __init__(self, chunks: int, inline: Launch, staged: Launch) -> None:
        self.chunks, self.inline, self.staged = chunks, inline, staged
        self.ids = inline.block["slots"].reshape(2, MAX_INLINE)


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
    """

    def __init__(self, device: CudaDevice, source: str, entry: str) -> None:
        self._device, self._source, self._entry = device, device.source(source), entry
        self._plans: dict[tuple[int, ...], SlotPlan] = {}

    def __call__(self, pools: Sequence[Pool], ids: Ids, pattern: int, stream: CudaStream) -> None:
        """Enqueues the work on `ids` `[lists, N]` in every pool: sources and targets, or slots."""
        count = ids.shape[1]
        if not count or not pools:
            return
        limit = min(memory.nbytes // slot_bytes for memory, slot_bytes in pools)
        limit = min(limit, 2**31 - 1)  # ids are int32
        inline = count <= MAX_INLINE or stream.is_capturing()
        if not inline:
            listed, room = self._device.lists.send(ids, stream)
        try:
            for first in range(0, len(pools), MAX_POOLS):
                plan = self._plan(pools[first : first + MAX_POOLS])
                if inline:
                    self._inline(plan, ids, limit, pattern, stream)
                else:
                    grid = plan.chunks * count, 1, 1
                    plan.staged(stream, *grid, listed.data.ptr, count, limit, pattern)
        finally:
            if not inline:
                self._device.lists.retire(room, stream)

    @staticmethod
    def _inline(plan: SlotPlan, ids: Ids, limit: int, pattern: int, stream: CudaStream) -> None:
        """Ids in the launch arguments, so many at a time as fit."""
        for start in range(0, ids.shape[1], MAX_INLINE):
            part = ids[:, start : start + MAX_INLINE]
            size = part.shape[1]
            at = plan.ids[: len(part), :size]
            grid = plan.chunks * size, 1, 1
            plan.inline.with_ids(stream, *grid, part, at, 0, size, limit, pattern)

    def _plan(self, pools: Sequence[Pool]) -> SlotPlan:
        """The launches for these pools, made once."""
        key = tuple([part for memory, slot_bytes in pools for part in (memory.base, slot_bytes)])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make(pools, unit_bytes(*key))
        return plan

    def _make(self, pools: Sequence[Pool], unit: int) -> SlotPlan:
        source, rows, before = self._source, [], 0
        for memory, slot_bytes in pools:
            chunks = div_ceil(slot_bytes, unit * source.chunk)
            rows.append((memory.base, slot_bytes, before, divider(chunks)))
            before += chunks
        rows += [(0, 0, 0, divider(1))] * (MAX_POOLS - len(pools))
        launches = []
        whole = f"{self._entry}_whole_{unit}"
        chunk_bytes = unit * source.chunk
        aligned = all(slot_bytes % chunk_bytes == 0 for _, slot_bytes in pools)
        plain = whole if aligned and whole in source.entries else f"{self._entry}_{unit}"
        for entry in (f"{self._entry}_inline_{unit}", plain):
            launch = self._device.new_launch(source, entry, HEAD)
            fields = launch.block if entry == plain else launch.block["args"]
            fields["num_pools"], fields["pools"] = len(pools), rows
            launches.append(launch)
        return SlotPlan(before, *launches)
