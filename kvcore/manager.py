"""`KVCacheManager`: sequences on one device, from configuration to shutdown."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.batch import Batch
from kvcore.batch_tables import BatchTables
from kvcore.checks import LONGEST, as_int, as_optional_int, token_counts
from kvcore.config import KVCacheManagerConfig
from kvcore.control.indirection import map_through_paths
from kvcore.device import open_device
from kvcore.errors import wrong, wrong_type
from kvcore.event_stream import StreamingEventSink
from kvcore.kv_cache import KVCache
from kvcore.leases import LeaseCalls
from kvcore.lifecycle import Lifecycle
from kvcore.pools import PoolQueries
from kvcore.prefix import PrefixCalls, end_pins, refuse_while_open
from kvcore.startup import open_runtime, refuse_unbuilt

if TYPE_CHECKING:
    from kvcore.control.listener import TreeListener
    from kvcore.device.base import Device
    from kvcore.layout import Layout

Int32 = NDArray[np.int32]


class KVCacheManager(Lifecycle, PrefixCalls, LeaseCalls, PoolQueries):
    """Paged KV-cache memory on one device, and the sequences that use it.

    Parameters
    ----------
    config : KVCacheManagerConfig
        Layers, memory and limits.
    device : str or Device
        "auto" (a GPU if there is one, else the host), "host", "meta" (pages without memory, for
        sizing and replay), "cuda", "cuda:1", or an open `Device`.
    stream : optional
        What `KVCache.resume` binds where no stream is given.
    event_manager : KVCacheEventManager or StreamingEventSink, optional
        Is told which blocks can be reused and which no longer.

    Raises
    ------
    ValueError
        The quota is below the minimum, which the message names; an event sink for other blocks.
    NotImplementedError
        The configuration asks for something that is not built yet.
    OutOfMemoryError
        The device has less memory than the quota.

    Notes
    -----
    Calls may come from several threads. Blocks while memory is mapped.

    Examples
    --------
    >>> import kvcore as k
    >>> buffers = [k.BufferConfig(role=r, size=4096) for r in ("key", "value")]
    >>> config = k.KVCacheManagerConfig(
    ...     tokens_per_block=4,
    ...     cache_tiers=[k.GpuCacheTierConfig(quota=16 * 8192)],
    ...     layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    ... )
    >>> with k.KVCacheManager(config, device="host") as manager, manager.create_kv_cache() as kv:
    ...     kv.resume(), kv.resize(9), kv.get_base_page_indices(0)
    (True, True, array([0, 1, 2], dtype=int32))
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        *,
        device: str | Device = "auto",
        stream: object = None,
        event_manager: TreeListener | None = None,
    ) -> None:
        if not isinstance(config, KVCacheManagerConfig):
            raise wrong_type("config", "a KVCacheManagerConfig", config)
        refuse_unbuilt(config)
        listens = ("stored", "removed", "snapshot")
        if event_manager is not None and not all(hasattr(event_manager, n) for n in listens):
            raise wrong_type("event_manager", "a KVCacheEventManager", event_manager)
        if isinstance(event_manager, StreamingEventSink):
            event_manager.check_fits(config.tokens_per_block, config.num_layer_groups)
        self.config = config
        self._owns_device = isinstance(device, str)
        self.device: Device = open_device(device)
        try:
            self._runtime = open_runtime(config, self.device, stream)
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self.layout: Layout = self._runtime.layout
        self.event_manager = event_manager
        self._runtime.control.reuse.tree.listener = event_manager

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or not (self._runtime.handles or self._runtime.leases):
            self.shutdown()

    # -- batches -----------------------------------------------------------------------------------

    def advance(
        self,
        kv_caches: Iterable[KVCache],
        n: int | ArrayLike,
        *,
        history: ArrayLike | None = None,
        block: bool = False,
    ) -> bool:
        """Grows many sequences, all or nobody.

        Parameters
        ----------
        kv_caches : iterable of KVCache
            Distinct and active. A list is looked up fastest.
        n : int or array_like of int [len(kv_caches)]
            Tokens to add to each capacity, at least 0.
        history : array_like of int [len(kv_caches)], optional
            New history lengths. Default: unchanged.
        block : bool
            Where pages are short and parents of beam steps are on their way, BLOCK until these
            have arrived and freed what they free.

        Returns
        -------
        bool
            False, with nothing changed, if the pages for all of them are not there.

        Raises
        ------
        ValueError
            A member occurs twice or is not active; `n` or `history` is out of range.

        Notes
        -----
        A handful of vector operations for any number of sequences, plus O(new pages) where blocks
        are crossed. Pass the same handles again and they need not be looked up. Enqueues nothing
        but waits for the previous owners of the new slots; the device table follows with
        `Batch.prepare`.
        """
        runtime = self._runtime
        with runtime.lock:
            plain = history is None and type(n) is int
            if plain and isinstance(kv_caches, list) and len(kv_caches) == 1:
                return self._advance_one(kv_caches, int(n), block)  # type: ignore[arg-type]
            sequences = runtime.enter_with(kv_caches)
            if not sequences.size:
                return True
            seqs = runtime.control.seqs
            capacity = seqs.capacity[sequences]
            capacity = capacity + token_counts("n", n, sequences.size)
            if history is not None:
                new_history = token_counts("history", history, sequences.size)
                _check_history(new_history, seqs.history[sequences], capacity)
            over = (capacity > seqs.limit[sequences]).nonzero()[0]
            if over.size:
                some, wanted = sequences[over], capacity[over]
                if not runtime.retry(lambda: runtime.grow(some, wanted), block):
                    return False
            seqs.capacity[sequences] = capacity
            if history is not None:
                seqs.set_history(sequences, np.broadcast_to(new_history, sequences.shape))
            return True

    def _advance_one(self, kv_caches: list[KVCache], n: int, block: bool) -> bool:
        runtime = self._runtime
        sequence = runtime.enter_with(kv_caches).item()
        if not 0 <= n <= LONGEST:
            raise wrong("n", f"a value in [0, {LONGEST}]", n)
        seqs = runtime.control.seqs
        capacity = seqs.capacity.item(sequence) + n
        if capacity > seqs.limit.item(sequence) and not runtime.retry(
            lambda: runtime.grow_one(sequence, capacity), block
        ):
            return False
        seqs.capacity[sequence] = capacity
        return True

    def truncate(self, kv_caches: Iterable[KVCache], capacities: ArrayLike) -> None:
        """Cuts many active sequences down to `capacities` tokens each and frees the blocks beyond.

        Raises `ValueError`, with nothing changed, if one is below its history or above its
        capacity. O(freed pages).
        """
        runtime = self._runtime
        with runtime.lock:
            sequences = runtime.enter_with(kv_caches)
            if not sequences.size:
                return
            seqs = runtime.control.seqs
            wanted = np.broadcast_to(
                token_counts("capacities", capacities, sequences.size), sequences.shape
            )
            low, high = seqs.history[sequences], seqs.capacity[sequences]
            bad = np.flatnonzero((wanted < low) | (wanted > high))
            if bad.size:
                i = int(bad[0])
                raise wrong(f"capacities[{i}]", f"a value in [{low[i]}, {high[i]}]", int(wanted[i]))
            runtime.refuse_pending(sequences.tolist(), "truncate")
            runtime.shrink(sequences, -(-wanted // seqs.shape.tokens_per_block))
            seqs.capacity[sequences] = wanted

    def slot_mapping(
        self,
        kv_caches: Iterable[KVCache],
        num_tokens: int | ArrayLike = 1,
        *,
        start: ArrayLike | None = None,
        layer_group: int = 0,
    ) -> tuple[Int32, Int32]:
        """Where each position of a ragged batch lies, from the host's table.

        Parameters
        ----------
        kv_caches : sequence of KVCache
            Distinct and active. Each contributes its beams, one after the other.
        num_tokens : int or array_like of int [len(kv_caches)]
            Positions per row.
        start : array_like of int [len(kv_caches)], optional
            First position. Default: the history length.
        layer_group : int
            Whose pages.

        Returns
        -------
        slots, offsets : int32 arrays [N]
            The slot, and the token within the block. `Batch.mapping` is the same on the device. As
            there, a range from the history length on is for writing in indirection mode.

        Raises
        ------
        ValueError
            A range reaches past its capacity.
        """
        runtime = self._runtime
        with runtime.lock:
            sequences = runtime.enter_with(kv_caches)
            runtime.refuse_pending(sequences.tolist(), "slot_mapping")
            as_int("layer_group", layer_group, 0, len(self.layout.layer_groups) - 1)
            starts, counts = runtime.ranges(sequences, num_tokens, start)
            if runtime.control.paths is not None:
                each = np.broadcast_to(np.asarray(counts, np.int32), sequences.shape)
                return map_through_paths(runtime.control, sequences, starts, each, layer_group)
            rows, owner = runtime.control.batch_rows(sequences)
            first = starts.astype(np.int64)[owner]
            per_row = np.broadcast_to(np.asarray(counts, np.int64), sequences.shape)[owner]
            return runtime.control.map_tokens(rows, first, per_row, layer_group)

    def step_beams(self, batch: Batch, parents: Any, *, stream: object = None) -> None:
        """Lets every beam of a batch's step go on from the parent that a device array names.

        Parameters
        ----------
        batch : Batch
            Prepared, and its tokens appended.
        parents : int32 array [num_rows]
            On the device, one entry per row of the batch: the beam of the same cache, counted from
            0, that the row goes on from. May repeat. An entry out of range means the row itself.
        stream : optional
            Default: `prepare`'s.

        Raises
        ------
        StateError
            The batch holds no step, or the manager was made for one beam.
        ValueError, TypeError
            Wrong parents; a batch of another manager.

        Notes
        -----
        Rows of the device's page table are permuted, and tails copied where a parent has several
        children: one launch, and one per layer group. The tokens of the step, up to its last one,
        belong to what is copied. Takes no page. May be captured in a graph: then call
        `Batch.finish(parents)` after each replay. The host follows when the parents have arrived,
        one or more steps later, and frees pages then; until then it refuses questions about these
        caches' rows (`ParentsPending`). Never blocks, but pins memory once in a while. A driver
        error after the first launch leaves the last blocks of these beams undefined, and BLOCKS
        until the parents of earlier steps have arrived. The step is over: only tables of its rows
        can still be made (`Batch.page_table`, `block_offsets`, `csr_pages`, `ragged_pages`), then
        prepare the next one.
        """
        runtime = self._runtime
        with runtime.lock:
            if not isinstance(batch, Batch) or batch._runtime is not runtime:
                raise wrong_type("batch", "a Batch of this manager", batch)
            runtime.refuse_reentry()
            batch.step_beams(parents, stream)

    def create_batch(
        self, max_rows: int, max_tokens: int, *, max_table_rows: int | None = None
    ) -> Batch:
        """A fixed place on the device for what a step needs to know of its sequences.

        Parameters
        ----------
        max_rows : int
            Most rows (beams of all sequences) in a step.
        max_tokens : int
            Most tokens in a step.
        max_table_rows : int, optional
            Most rows of `Batch.block_offsets`, at least `max_rows`, where those are not every
            cache's own: the row of a cross cache is repeated for every beam of the decoder.

        Raises
        ------
        StateError
            The device is `meta`, which has no memory.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            rows = as_int("max_rows", max_rows, 1, LONGEST)
            table_rows = as_optional_int("max_table_rows", max_table_rows, rows, LONGEST)
            tokens = as_int("max_tokens", max_tokens, 1, LONGEST)
            return Batch(runtime, rows, tokens, table_rows or 0)

    def create_batch_tables(self, roles: tuple[str, str] = ("key", "value")) -> BatchTables:
        """What makes `[pools, rows, 2, blocks]` tables of page indices, K and V, for a batch.

        Raises `ValueError` unless every layer with the first of `roles` has the second one behind
        it in the same pool, that is of the same size. Give a role twice where K and V are one.
        """
        with self._runtime.lock:
            self._runtime.enter()
            return BatchTables(self._runtime, roles)

    # -- end ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Gives all memory back. Idempotent. BLOCKS until the device is idle.

        Raises `StateError`, with nothing changed, while caches are open, and `LeaseInUse` while
        memory is leased.
        """
        runtime = self._runtime
        with runtime.lock:
            if runtime.closed:
                return
            runtime.enter()
            refuse_while_open(runtime, "shutdown")
            runtime.leases.refuse("shutdown")
            end_pins(runtime)
            try:
                runtime.close()
            finally:
                if self._owns_device:
                    self.device.close()


def _check_history(new: int | Int32, old: Int32, capacity: Int32) -> None:
    bad = np.flatnonzero((new < old) | (new > capacity))
    if bad.size:
        i = int(bad[0])
        got = int(np.broadcast_to(new, old.shape)[i])
        raise wrong(f"history[{i}]", f"a value in [{old[i]}, {capacity[i]}]", got)
