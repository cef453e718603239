"""The device's twin of the page table, brought up to date by one small launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array, Device, Event, Stream, staged_parts
from kvcore.device.fences import Fences
from kvcore.device.staging import StagingRing
from kvcore.ids import NO_SLOT
from kvcore.plan import DirtyCells

Int32 = NDArray[np.int32]

MOST_VIEWS = 8  # buffers whose views are kept

Launch = Callable[[NDArray[np.uint8], int, int, Stream], None]
"""Does a step's work with staged cells and words; see `kvcore.device.base.StepLaunch`."""


class DeviceTables:
    """Page table `[row, layer group, ordinal]` in reserved addresses that never move.

    Memory is mapped row by row as the host table begins to use rows. Cells travel together with the
    few words that describe a batch, from a pinned buffer that the kernel reads directly.

    Parameters
    ----------
    device : Device
        Where the twin lives.
    host : int32 array [max_rows, layer groups, max_blocks]
        The table to follow.
    fences : Fences
        Resolves the tickets of dirty cells.
    """

    def __init__(self, device: Device, host: Int32, fences: Fences) -> None:
        self._device, self._host, self._fences = device, host, fences
        self._cells = host.reshape(-1)
        self._row_bytes = host[0].nbytes
        grain = device.grain(0)
        self._ring = StagingRing(device)  # first: it has nothing to give back if the next fails
        self.memory = device.reserve(max(host.nbytes, 1), 0, grain)
        self._ready_rows = 0
        self.last: tuple[Stream, Event] | None = None  # who used the table, and until when
        self._leased: list[NDArray[np.uint8]] = []  # sent, not yet sealed
        self._views: dict[int, tuple[NDArray[np.uint8], NDArray[np.int64], Int32]] = {}
        self.array: Array = self.memory.array(np.int32, host.shape)
        self.by_group: Array = self.array.transpose(1, 0, 2)

    def send(
        self,
        dirty: list[DirtyCells],
        used_rows: int,
        words: Int32,
        stream: Stream,
        launch: Launch | None = None,
    ) -> None:
        """Enqueues the dirty cells, and whatever `launch` does with them and `words`.

        Waits on the device for earlier work on the table from other streams and for the tickets of
        the cells. `dirty` is emptied. Does not block. `seal` must follow on the same stream.
        """
        self.order_behind_last(stream)
        self._back_rows(used_rows, stream)
        for entry in dirty:
            self._fences.wait_one(stream, entry.after)
        index = dirty[0].cells if len(dirty) == 1 else _join(dirty)
        count, size = index.size, words.size
        buffer = self._ring.lease(8 + 12 * count + 4 * size)
        wide, narrow = self._views_of(buffer)
        middle, end = 2 + 2 * count, 2 + 3 * count  # as `staged_parts` says
        wide[0], wide[1 : count + 1] = count, index
        narrow[end : end + size] = words
        self._cells.take(index, out=narrow[middle:end], mode="clip")  # clip: no bounce buffer
        self._leased.append(buffer)
        (launch or self._cells_only)(buffer, count, size, stream)
        dirty.clear()

    def _views_of(self, buffer: NDArray[np.uint8]) -> tuple[NDArray[np.int64], Int32]:
        """A buffer's whole quadwords and words; making views anew costs more than filling them."""
        known = self._views.get(id(buffer))
        if known is None or known[0] is not buffer:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            whole = buffer[: buffer.nbytes & -8]
            known = self._views[id(buffer)] = buffer, whole.view(np.int64), whole.view(np.int32)
        return known[1], known[2]

    def _cells_only(
        self, staged: NDArray[np.uint8], cells: int, words: int, stream: Stream
    ) -> None:
        _, index, value, none = staged_parts(staged, cells, 0)
        self._device.scatter_table(self.array, index, value, self.array, none, stream=stream)

    def compact(self, dirty: list[DirtyCells]) -> None:
        """Merges the dirty cells of many changes, for callers who never send them.

        Afterwards there is one entry of distinct cells, and one per stream to wait for. O(cells).
        """
        after = self._fences.newest_of_each_stream({entry.after for entry in dirty})
        waits = [DirtyCells(np.empty(0, np.int64), ticket) for ticket in after]
        dirty[:] = [DirtyCells(_join(dirty)), *waits]

    def seal(self, stream: Stream) -> None:
        """Records that the work just enqueued on `stream` uses the table and the sent buffers.

        Work on the table from other streams, and the next use of the buffers, come after it.
        """
        event = stream.record()
        for buffer in self._leased:
            self._ring.retire(buffer, event)
        self._leased.clear()
        self.last = (stream, event)

    def order_behind_last(self, stream: Stream) -> None:
        """Later work of `stream` on the table comes after all earlier work on it."""
        if self.last is not None and self.last[0] is not stream:
            stream.wait(self.last[1])

    def _back_rows(self, used_rows: int, stream: Stream) -> None:
        if used_rows <= self._ready_rows:
            return
        self.memory.resize(used_rows * self._row_bytes)
        rows = min(self.memory.nbytes // self._row_bytes, len(self._host))
        self._device.fill_words(self.array[self._ready_rows : rows], NO_SLOT, stream=stream)
        self._ready_rows = rows

    def close(self) -> None:
        """Unmaps the table and drops the buffers. The caller has synchronised."""
        self._views.clear()
        self._ring.close()
        self.memory.close()


def _join(dirty: list[DirtyCells]) -> NDArray[np.int64]:
    if not dirty:
        return np.empty(0, np.int64)
    return np.unique(np.concatenate([entry.cells for entry in dirty]))
