"""Two homes for the decoder's keys and values: dense arrays, and kvcore pages.

Both hold float32 and hand the decoder equal, contiguous arrays, so their logits must agree; they
differ in what following the beams costs, which each counts in `Moved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore as k
from kvcore.demo.weights import Shape
from kvcore.device.base import Array, Device
from kvcore.ids import align_up, div_ceil

TOKENS_PER_BLOCK = 16
GRAIN = 32 << 20  # bytes; quotas are rounded down to the device's grain, which is at most this
CELL = 4  # bytes of a page-table cell


@dataclass(slots=True)
class Moved:
    """What following the beams moved so far. A byte copied counts once."""

    bytes: int = 0
    """All of it, in bytes."""
    changed_bytes: int = 0
    """Dense only: what would do if rows that continue themselves stayed where they are."""
    pages: int = 0
    """Paged only: pages copied, as far as they were written."""
    cells: int = 0
    """Paged only: page-table cells written."""


class DenseStore:
    """Contiguous [rows, capacity, kv_heads, head_dim] arrays per layer: the oracle.

    Beams are followed as frameworks do it, by indexing the whole cache with the parents.

    Parameters
    ----------
    shape : Shape
        The decoder's.
    capacity : int
        Tokens per row.
    xp : module
        `numpy` or `cupy`.
    """

    def __init__(self, shape: Shape, capacity: int, xp: Any) -> None:
        self._xp, self._token_bytes = xp, shape.token_bytes
        size = (1, capacity, shape.kv_heads, shape.head_dim)
        self._caches = [[xp.zeros(size, "float32") for _ in "kv"] for _ in range(shape.layers)]
        self._new = 0
        self.length = 0
        self.moved = Moved()

    def begin(self, n: int) -> None:
        self._new = n

    def append(self, layer: int, keys: Array, values: Array) -> None:
        end = self.length + self._new
        for cache, new in zip(self._caches[layer], (keys, values), strict=True):
            cache[:, self.length : end] = new

    def read(self, layer: int) -> tuple[Array, Array]:
        end = self.length + self._new
        keys, values = (self._xp.ascontiguousarray(c[:, :end]) for c in self._caches[layer])
        return keys, values

    def end(self) -> None:
        self.length += self._new
        self._new = 0

    def follow(self, parents: NDArray[np.int64]) -> None:
        """Row i becomes a copy of row `parents[i]`; the number of rows may change."""
        if parents.size == len(self._caches[0][0]) == 1:
            return  # greedy search follows nobody
        index = self._xp.asarray(parents)
        self._caches = [[cache[index] for cache in layer] for layer in self._caches]
        row_bytes = self.length * self._token_bytes
        self.moved.bytes += parents.size * row_bytes
        self.moved.changed_bytes += int((parents != np.arange(parents.size)).sum()) * row_bytes

    def close(self) -> None:
        self._caches = []


class PagedStore:
    """The same keys and values in kvcore pages: one sequence, one page-table row per beam.

    Writing goes through the page table (`Batch.append`), reading as well (`Batch.gather`), and
    beams are followed by `set_beam_width` and `reorder_beams`, which pass full pages on by
    reference.

    Parameters
    ----------
    shape : Shape
        The decoder's.
    prompt_length, capacity, width : int
        Tokens of the prompt; tokens per row at the end; beams. The pool is as large as they need at
        most.
    device : Device
        Where the pages lie.
    stream : object
        What all work is enqueued on; None for the host's own.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        prompt_length: int,
        capacity: int,
        width: int,
        device: Device,
        stream: object,
    ) -> None:
        config = cache_config(shape, capacity, width)
        self._manager = k.KVCacheManager(config, device=device)
        self._kv = self._manager.create_kv_cache(expected_prompt_length=prompt_length)
        self._kv.resume(stream)
        # One batch maps the new tokens, for writing; the other maps every token, for reading.
        self._writes = self._manager.create_batch(width, max(prompt_length, width))
        self._reads = self._manager.create_batch(width, width * capacity)
        self._rows: tuple[NDArray[np.int32], ...] = ()
        self.page_bytes = sum(self._manager.get_storage_statistics(0)[0].slot_sizes)
        self.peak_pages = 0
        self.moved = Moved()

    @property
    def length(self) -> int:
        return self._kv.history_length

    def begin(self, n: int) -> None:
        if not self._manager.advance([self._kv], n):
            raise k.OutOfPagesError(f"demo: no pages for {n} more tokens per beam")
        self._writes.prepare([self._kv], n)
        self._reads.prepare([self._kv], self._kv.capacity, start=0)
        self._count_pages()

    def append(self, layer: int, keys: Array, values: Array) -> None:
        new = {"key": keys, "value": values}
        self._writes.append(layer, {r: a.reshape(-1, *a.shape[2:]) for r, a in new.items()})

    def read(self, layer: int) -> tuple[Array, Array]:
        width = self._kv.beam_width
        keys, values = (a.reshape(width, -1, *a.shape[1:]) for a in self._reads.gather(layer))
        return keys, values

    def end(self) -> None:
        self._kv.resize(None, self._kv.capacity)

    def follow(self, parents: NDArray[np.int64]) -> None:
        """Row i becomes what row `parents[i]` was; the number of rows may change."""
        before, chosen = self.rows(), parents.tolist()
        if len(chosen) == len(before):
            self._kv.reorder_beams(chosen)
        elif not self._kv.set_beam_width(len(chosen), chosen):
            raise k.OutOfPagesError(f"demo: no pages to widen to {len(chosen)} beams")
        token_bytes = self.page_bytes // TOKENS_PER_BLOCK
        written = self._kv.capacity % TOKENS_PER_BLOCK  # of the last block, which alone is copied
        for beam, row in enumerate(self.rows()):
            # A page that the parent did not have holds a copy of the parent's tokens.
            pages = int((row != before[chosen[beam]]).sum())
            here = before[beam] if beam < len(before) else np.full_like(row, -1)
            cells = int((row != here).sum())
            self.moved.pages += pages
            self.moved.cells += cells
            self.moved.bytes += pages * written * token_bytes + cells * CELL
        self._count_pages()

    def rows(self) -> list[NDArray[np.int32]]:
        """The page table: for every beam the slots of its blocks, int32 [blocks]."""
        return [self._kv.get_base_page_indices(0, beam) for beam in range(self._kv.beam_width)]

    def _count_pages(self) -> None:
        used = self._manager.get_storage_statistics(0)[0].unavailable
        self.peak_pages = max(self.peak_pages, used)

    def close(self) -> None:
        self._kv.close()
        self._manager.shutdown()


def cache_config(shape: Shape, capacity: int, width: int) -> k.KVCacheManagerConfig:
    """Pools for one sequence of `width` beams of `capacity` tokens, nothing shared at worst."""
    buffers = tuple(
        k.BufferConfig(
            role=role,
            size=TOKENS_PER_BLOCK * shape.kv_heads * shape.head_dim * 4,
            dtype="float32",
            shape=(shape.kv_heads, shape.head_dim),
        )
        for role in ("key", "value")
    )
    pages = (width + 1) * div_ceil(capacity, TOKENS_PER_BLOCK)
    return k.KVCacheManagerConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        cache_tiers=(
            k.GpuCacheTierConfig(
                quota=align_up(pages * TOKENS_PER_BLOCK * shape.token_bytes, GRAIN)
            ),
        ),
        layers=tuple(
            k.AttentionLayerConfig(layer_id=layer, buffers=buffers) for layer in range(shape.layers)
        ),
        max_beam_width=width,
        max_sequences=1,
        enable_partial_commit=False,  # beams write to their last block
    )
