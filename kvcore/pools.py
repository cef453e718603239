"""Where the pages of a manager lie in memory: addresses, strides and page indices for kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from kvcore.checks import as_int, as_items, token_counts
from kvcore.control.sizing import max_seq_len_that_fits
from kvcore.control.statistics import KVCacheIterationStats, KVCacheStats
from kvcore.errors import wrong, wrong_type
from kvcore.ids import LayerGroupId, LayerId, PageIndexMode, PoolGroupId
from kvcore.layer_config import array_type, itemsize_bits
from kvcore.layout import PageIndexConverter, aggregate
from kvcore.page_views import block_shape

if TYPE_CHECKING:
    from kvcore.kv_cache import KVCache
    from kvcore.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroupDesc:
    """One pool group of the hot level."""

    id: PoolGroupId
    num_slots: int
    slot_bytes: tuple[int, ...]
    """Bytes of a slot in each of its pools."""
    pool_addresses: tuple[int, ...]
    """First address of each pool; fixed for the life of the manager."""
    layer_groups: tuple[LayerGroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatistics:
    """Slots of one pool group on one cache level."""

    slot_sizes: tuple[int, ...]
    """Bytes of a slot in each pool."""
    total: int
    free: int
    evictable: int
    """Slots that only the prefix cache holds. 0 until prefix reuse is built."""

    @property
    def available(self) -> int:
        """Slots that can be had: free or evictable."""
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        """Slots in use by sequences."""
        return self.total - self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedPageDesc:
    """Neighbouring buffers as one piece: the data of slot `i` is at `base + stride * i`."""

    base: int
    span: int
    """Bytes."""
    stride: int
    """Bytes from one slot to the next."""
    layer_group: LayerGroupId
    pool_group: PoolGroupId
    buffers: tuple[tuple[LayerId, str], ...]
    """(layer id, role) in memory order."""


class PoolQueries:
    """The questions about layout and memory that a `KVCacheManager` answers.

    Nothing here changes or enqueues anything; each call is O(1) or O(its result).
    """

    _runtime: Runtime

    @property
    def pool_group_descs(self) -> tuple[PoolGroupDesc, ...]:
        """The pool groups. Their order is not a promise: look at `layer_groups`."""
        runtime = self._runtime
        return tuple(
            PoolGroupDesc(
                id=group.id,
                num_slots=slots.capacity,
                slot_bytes=group.slot_bytes,
                pool_addresses=tuple(memory.base for memory in pools),
                layer_groups=group.layer_groups,
            )
            for group, slots, pools in zip(
                runtime.layout.pool_groups, runtime.control.slots, runtime.pools, strict=True
            )
        )

    @property
    def layer_grouping(self) -> tuple[tuple[LayerId, ...], ...]:
        """The layer ids of each layer group."""
        return tuple(group.layer_ids for group in self._runtime.layout.layer_groups)

    def get_layer_group_id(self, layer_id: int) -> LayerGroupId:
        """The layer group of a layer. Raises `ValueError` for an unknown one."""
        return self._runtime.layout.layer_group_of(as_int("layer_id", layer_id))

    def get_storage_statistics(self, level: int = 0) -> tuple[StorageStatistics, ...]:
        """Slots of each pool group on a cache level. Raises `ValueError` for an unknown level."""
        runtime = self._runtime
        self._check_level(level)
        with runtime.lock:
            runtime.enter()
            return tuple(
                StorageStatistics(
                    slot_sizes=group.slot_bytes,
                    total=slots.capacity,
                    free=slots.num_free,
                    evictable=slots.num_evictable,
                )
                for group, slots in zip(
                    runtime.layout.pool_groups, runtime.control.slots, strict=True
                )
            )

    def missing_pages(self, kv_caches: Iterable[KVCache], n: int | ArrayLike = 1) -> int:
        """How many pages `advance` by `n` tokens is short of; 0 if it would find room.

        Over all pool groups, counting as there what is free or evictable. Takes the arguments of
        `KVCacheManager.advance` and raises as it does. What widening and `KVCache.fork` are short
        of is said by their `OutOfPagesError`.
        """
        runtime = self._runtime
        with runtime.lock:
            sequences = runtime.enter_with(kv_caches)
            if not sequences.size:
                return 0
            seqs = runtime.control.seqs
            capacity = seqs.capacity[sequences] + token_counts("n", n, sequences.size)
            over = (capacity > seqs.limit[sequences]).nonzero()[0]
            return runtime.missing_to_grow(sequences[over], capacity[over]) if over.size else 0

    def get_committed_stats(self) -> KVCacheStats:
        """Counters over all reports since the start. A copy."""
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return replace(runtime.control.stats.total)

    def get_and_reset_iteration_stats(self) -> tuple[KVCacheIterationStats, ...]:
        """Counters by layer group since the last call, which begin at 0 again."""
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return runtime.control.stats.take_iteration()

    def get_dirty_stats_ids(self) -> set[object]:
        """The `id` of each open sequence that has something to report."""
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return runtime.control.stats.dirty()

    def get_quota(self, level: int = 0) -> int:
        """Bytes of memory that the pools of a level occupy; 0 after `shutdown`."""
        self._check_level(level)
        return sum(memory.nbytes for pools in self._runtime.pools for memory in pools)

    def clamp_max_seq_len_for_mem(
        self,
        batch_size: int,
        bound: int,
        *,
        system_prompt_length: int = 0,
        beam_width: int = 1,
        prompt_length: int | None = None,
        max_step_tokens: int = 1,
    ) -> int:
        """The longest one sequence can become in the pools beside `batch_size - 1` minimal ones.

        See `kvcore.control.sizing.max_seq_len_that_fits`, which counts with the demand function
        that sizes the pools. At most `bound` tokens; 0 if not even one block fits.
        """
        runtime = self._runtime
        return max_seq_len_that_fits(
            runtime.layout,
            runtime.config,
            [slots.capacity for slots in runtime.control.slots],
            bound=bound,
            batch_size=batch_size,
            system_prompt_length=system_prompt_length,
            beam_width=beam_width,
            prompt_length=prompt_length,
            max_step_tokens=max_step_tokens,
        )

    def get_mem_pool_base_address(
        self, layer_id: int, role: str, mode: PageIndexMode = PageIndexMode.SHARED
    ) -> int:
        """The address that page indices of `mode` count from; never changes.

        SHARED includes the buffer's offset in a slot, PER_LAYER is the bare pool.
        """
        if not isinstance(mode, PageIndexMode):
            raise wrong_type("mode", "a PageIndexMode", mode)
        with self._runtime.lock:
            self._runtime.enter()
        place = self._runtime.layout.place(layer_id, role)
        base = self._runtime.pools[place.pool_group][place.pool].base
        return base + place.offset if mode is PageIndexMode.SHARED else base

    def get_page_stride(self, layer_id: int, role: str) -> int:
        """Bytes from one page index to the next."""
        return self._runtime.layout.place(layer_id, role).page_stride

    def get_page_index_scale(self, layer_id: int, role: str) -> int:
        """Page indices per slot: index = slot * scale."""
        return self._runtime.layout.place(layer_id, role).scale

    def get_page_index_upper_bound(self, layer_id: int, role: str) -> int:
        """One past the largest page index relative to the SHARED base."""
        place = self._runtime.layout.place(layer_id, role)
        return place.upper_bound(self._runtime.control.slots[place.pool_group].capacity)

    def get_page_index_converter(self, layer_id: int, role: str) -> PageIndexConverter:
        """What turns slots into page indices of this buffer."""
        return self._runtime.layout.converter(layer_id, role)

    def get_aggregated_pages(
        self, buffers: Iterable[tuple[int, str]]
    ) -> tuple[AggregatedPageDesc, ...]:
        """Merges buffers that are neighbours in memory, for copies of whole pages.

        Raises `ValueError` for an unknown or repeated buffer, `TypeError` for what names none.
        """
        what = "(layer id, role)"
        pairs = as_items("buffers", buffers, what)
        for number, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise wrong_type(f"buffers[{number}]", what, pair)
        return tuple(
            AggregatedPageDesc(
                base=self._runtime.pools[piece.pool_group][piece.pool].base + piece.offset,
                span=piece.span,
                stride=piece.stride,
                layer_group=piece.layer_group,
                pool_group=piece.pool_group,
                buffers=tuple((place.layer_id, place.role) for place in piece.buffers),
            )
            for piece in aggregate(self._runtime.layout, pairs)
        )

    def get_pages(self, layer_id: int, role: str) -> Any:
        """The pages of a buffer as an array of the device, in place: index it with a slot.

        Returns
        -------
        array
            `[num_slots, T, H, D]` for NHD, `[num_slots, H, T, D]` for HND (with an axis for the
            expansion before H where pages are finer than the block), of the declared type where
            NumPy has it and of its bits as an unsigned integer otherwise. An opaque buffer is uint8
            `[num_slots, bytes]`. Slots lie apart, the rest is contiguous.

        Raises
        ------
        ValueError
            The buffer is unknown, or its items do not lie at multiples of their size.
        StateError
            The device has no memory, or the manager was shut down.

        Notes
        -----
        A view: nothing is copied or enqueued. Whoever uses it orders that by the stream of the
        sequence that owns the page. It must not be used after `shutdown`; `lease` sees to both.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
        runtime.device_tables()
        place = runtime.layout.place(layer_id, role)
        buffer, memory = place.buffer, runtime.pools[place.pool_group][place.pool]
        slot_bytes = runtime.layout.pool_groups[place.pool_group].slot_bytes[place.pool]
        slots = runtime.control.slots[place.pool_group].capacity
        dtype = np.dtype(np.uint8) if buffer.dtype is None else array_type(buffer.dtype)
        shape = block_shape(place, runtime.layout.tokens_per_block)
        if buffer.dtype is not None and itemsize_bits(buffer.dtype) == 4:
            shape = (*shape[:-1], shape[-1] // 2)  # two to a byte
        if slot_bytes % dtype.itemsize or place.offset % dtype.itemsize:
            raise wrong(
                f"layer {layer_id}, buffer {role!r}",
                f"items of {dtype.itemsize} bytes at multiples of their size",
                f"slots of {slot_bytes} bytes with the buffer at {place.offset}",
                "declare buffers of other sizes, or use get_mem_pool_base_address",
            )
        first = place.offset // dtype.itemsize
        end = first + place.stored_bytes // dtype.itemsize
        items = memory.array(dtype, (slots, slot_bytes // dtype.itemsize))[:, first:end]
        return items.reshape(slots, *shape)

    def page_table(self, layer_group: int = 0) -> Any:
        """The device's page table of a layer group, int32 `[max_rows, max_blocks]`, in place.

        A view at fixed addresses, of a row per live beam; `Batch.rows` tells which. Only rows that
        were ever used are backed by memory. Cells are current after `Batch.prepare`, and -1 where
        there is no page. Raises `StateError` on a device without memory.
        """
        with self._runtime.lock:
            self._runtime.enter()
        tables = self._runtime.device_tables()
        as_int("layer_group", layer_group, 0, len(self._runtime.layout.layer_groups) - 1)
        return tables.by_group[layer_group]

    def _check_level(self, level: int) -> None:
        as_int("level", level, 0, 0, "there is one cache level, the GPU's")
