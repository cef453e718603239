"""KV events: what an outside index needs to know which prefixes a cache holds.

`KVCacheEventManager` listens to the prefix tree and keeps events until somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvcore.checks import as_float, as_int, as_items, as_optional_int, as_tuple
from kvcore.control.listener import StoredRun
from kvcore.errors import wrong, wrong_type
from kvcore.event_blocks import V2, BlockMaker
from kvcore.event_queue import EventQueue, Gather
from kvcore.event_types import (
    BlockHash,
    EventData,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)

Key: TypeAlias = bytes | BlockHash
"""A block by its key in the tree, or by its hash as events show it."""

_KEYS: Final = (str, int, bytes)
_ABSENT: Final = object()


@dataclass(slots=True)
class _Announced:
    """A block that consumers know."""

    block_hash: BlockHash
    groups: int = 0
    """One bit for each layer group."""


class KVCacheEventManager:
    """Collects the events of one manager, iteration by iteration.

    Give it to the manager, call `flush_iteration_events` once per engine step and read with
    `get_latest_events`, from any thread. Stored blocks of a layer group that follow each other
    share an event; so do removed ones.

    Event ids have no gaps but those of lost events: beyond `max_kv_event_entries` the oldest go.
    A consumer that sees a gap, or starts late, takes a snapshot from the cache manager and goes on
    with the events whose ids are larger than the snapshot's.

    Parameters
    ----------
    max_kv_event_entries : int
        Events kept for the reader. 0 or less: no events at all.
    window_size : int
        Shown for layer groups that are not in `window_size_by_layer_group`.
    attention_dp_rank : int, optional
        Shown in every event.
    attention_dp_gather : callable, optional
        Takes the events of this rank and returns those of all ranks in rank order. Called by every
        flush, on every rank; rank 0 publishes all, the others nothing.
    hash_algo : str
        "v2_sha256": the block's key, 64 hex digits. "v2_sha256_64": its first 8 bytes as a
        big-endian unsigned number. "v1_block_key" or "auto": the 64-bit hash of older caches.
    window_size_by_layer_group : mapping of int to int, optional
        Windows by layer group.
    mm_id_offset : int, optional
        The `id_offset` of all multimodal items; without it events have no `mm_keys`.

    Raises
    ------
    ValueError
        Unknown `hash_algo`, negative `mm_id_offset`, or a gather without a rank.

    Examples
    --------
    >>> events = KVCacheEventManager(16, window_size=128)
    >>> events.add_created_event([2, 3])
    >>> events.flush_iteration_events()
    >>> [event.data for event in events.get_latest_events(0)]
    [KVCacheCreatedData(num_blocks_per_cache_level=(2, 3))]
    """

    def __init__(
        self,
        max_kv_event_entries: int,
        *,
        window_size: int = 0,
        attention_dp_rank: int | None = None,
        attention_dp_gather: Gather | None = None,
        hash_algo: str = V2,
        window_size_by_layer_group: Mapping[int, int] | None = None,
        mm_id_offset: int | None = None,
    ) -> None:
        capacity = as_int("max_kv_event_entries", max_kv_event_entries)
        self._window_size = as_int("window_size", window_size)
        name, windows = "window_size_by_layer_group", window_size_by_layer_group
        self._windows = {} if windows is None else _as_windows(name, windows)
        self._rank = as_optional_int("attention_dp_rank", attention_dp_rank, 0)
        if attention_dp_gather is not None and self._rank is None:
            raise wrong("attention_dp_rank", "this rank's number with a gather", None)
        if attention_dp_gather is not None and not callable(attention_dp_gather):
            raise wrong_type("attention_dp_gather", "a function", attention_dp_gather)
        self._gather = attention_dp_gather
        offset = as_optional_int("mm_id_offset", mm_id_offset, 0)
        self._maker = BlockMaker(hash_algo, offset)
        self._announced: dict[bytes, _Announced] = {}
        self._queue = EventQueue(capacity, self._event)
        self._lock = self._queue.changed

    @property
    def hash_algo(self) -> str:
        """The label of the block hashes; "auto" has become what it stands for."""
        return self._maker.hash_algo

    @property
    def num_dropped_events(self) -> int:
        """How many events were lost because nobody read them in time."""
        return self._queue.num_dropped

    @property
    def last_event_id(self) -> int:
        """The id of the newest event, -1 before the first."""
        return self._queue.next_id - 1

    def set_layer_group_window_sizes(self, window_sizes: Mapping[int, int]) -> None:
        """Sets the windows by layer group that events show."""
        windows = _as_windows("window_sizes", window_sizes)
        with self._lock:
            self._windows = windows

    # -- from the prefix tree ----------------------------------------------------------------------

    def stored(self, run: StoredRun) -> None:
        """Blocks can be reused from now on. Those already announced are not repeated."""
        if self._queue.capacity <= 0:
            return
        with self._lock:
            parent, blocks = self._maker.blocks(run, self._hash_of)
            for group in run.groups:
                self._announce(group, parent, run.keys, blocks)

    def _announce(
        self,
        group: int,
        parent: BlockHash | None,
        keys: list[bytes],
        blocks: list[KVCacheStoredBlockData],
    ) -> None:
        bit = 1 << group
        fresh: list[KVCacheStoredBlockData] = []
        for key, block in zip(keys, blocks, strict=True):
            state = self._announced.get(key)
            if state is None:
                state = self._announced[key] = _Announced(block.block_hash)
            if not state.groups & bit:
                state.groups |= bit
                fresh.append(block)
                continue
            if fresh:
                self._queue.store(group, parent, fresh)
                fresh = []
            parent = block.block_hash
        if fresh:
            self._queue.store(group, parent, fresh)

    def removed(self, keys: Iterable[bytes], group: int | None) -> None:
        """Blocks can't be reused any more, children first; None: in no layer group.

        Keys that were not announced are harmless.
        """
        with self._lock:
            for key in keys:
                state = self._announced.get(key)
                if state is None:
                    continue
                gone = state.groups if group is None else state.groups & 1 << group
                state.groups ^= gone
                while gone:
                    lowest = gone & -gone
                    self._queue.remove(lowest.bit_length() - 1, state.block_hash)
                    gone ^= lowest
                if not state.groups:
                    del self._announced[key]

    def updated(
        self,
        key: bytes,
        group: int,
        level: tuple[int, int] | None = None,
        priority: tuple[int, int] | None = None,
    ) -> None:
        """A page moved between cache levels or changed its priority: (old, new) of each.

        Silent for a page that was not announced, and where nothing differs.
        """
        with self._lock:
            state = self._announced.get(key)
            if state is not None and state.groups >> group & 1:
                self._update(state.block_hash, group, _diff(level), _diff(priority))

    def snapshot(self, runs: Iterable[StoredRun]) -> list[KVCacheEvent]:
        """Stored events that build what the tree holds, for a consumer that starts now.

        All have the id of the newest event. Whoever has them goes on with larger ids.

        Parameters
        ----------
        runs : iterable of StoredRun
            Everything in the tree, parents first.
        """
        with self._lock:
            newest = self._queue.seal()
            events = []
            for run in runs:
                parent, blocks = self._maker.blocks(run, self._hash_of)
                data = KVCacheStoredData(parent, tuple(blocks))
                for group in run.groups:
                    events.append(self._event(newest, data, group))
            return events

    # -- by hand -----------------------------------------------------------------------------------

    def add_created_event(
        self,
        num_blocks_per_cache_level: Sequence[int],
        layer_group_ids: Sequence[int] | None = None,
    ) -> None:
        """Tells how many blocks each cache level has, once for each given layer group.

        >>> events = KVCacheEventManager(16)
        >>> events.add_created_event([16], layer_group_ids=[0, 1])
        >>> events.last_event_id
        1
        """
        blocks = _as_counts("num_blocks_per_cache_level", num_blocks_per_cache_level)
        groups: Sequence[int | None] = (None,)
        if layer_group_ids is not None:
            groups = _as_counts("layer_group_ids", layer_group_ids)
        with self._lock:
            for group in groups:
                self._queue.add(group, KVCacheCreatedData(blocks))

    def add_stored_event(
        self,
        parent_hash: BlockHash | None,
        blocks: Sequence[KVCacheStoredBlockData],
        layer_group_id: int | None = None,
    ) -> None:
        """Adds blocks as they are, each the child of the one before."""
        group = as_optional_int("layer_group_id", layer_group_id, 0)
        if parent_hash is not None:
            _as_key("parent_hash", parent_hash, (str, int))
        what = "a KVCacheStoredBlockData"
        run = as_tuple("blocks", blocks, KVCacheStoredBlockData, what)
        with self._lock:
            self._queue.store(group, parent_hash, list(run))

    def add_removed_event(
        self, block_hashes: Key | Iterable[Key], layer_group_id: int | None = None
    ) -> None:
        """Removes blocks. Keys (bytes) that were not announced are harmless; hashes are taken."""
        group = as_optional_int("layer_group_id", layer_group_id, 0)
        if isinstance(block_hashes, _KEYS):
            block_hashes = (block_hashes,)
        blocks: tuple[Key, ...] = as_tuple("block_hashes", block_hashes, _KEYS, "a key or a hash")
        for place, block in enumerate(blocks):
            _as_key(f"block_hashes[{place}]", block, _KEYS)
        with self._lock:
            for block in blocks:
                if isinstance(block, bytes):
                    self.removed([block], group)
                else:
                    self._queue.remove(group, block)

    def add_updated_event(
        self,
        block_hash: Key,
        *,
        cache_level: KVCacheEventDiff | object | None = _ABSENT,
        priority: KVCacheEventDiff | object | None = _ABSENT,
        layer_group_id: int | None = None,
    ) -> None:
        """Tells of a block's new cache level or priority; nothing where neither differs.

        Raises
        ------
        TypeError
            Neither was given, or not as a `KVCacheEventDiff` or None.
        """
        if cache_level is _ABSENT and priority is _ABSENT:
            raise wrong_type("cache_level or priority", "a KVCacheEventDiff", None)
        level = _as_diff("cache_level", cache_level)
        priority = _as_diff("priority", priority)
        group = as_optional_int("layer_group_id", layer_group_id, 0)
        _as_key("block_hash", block_hash, _KEYS)
        with self._lock:
            known = self._hash_of(block_hash) if isinstance(block_hash, bytes) else block_hash
            if known is not None:
                self._update(known, group, level, priority)

    # -- flushing and reading ----------------------------------------------------------------------

    def flush_iteration_events(self) -> None:
        """Makes the events since the last flush readable; with a gather, on rank 0 those of all.

        Blocks as long as the gather does. An error of the gather leaves the events for the next
        flush.
        """
        self._queue.flush(self._gather, self._rank)

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """Takes all flushed events, oldest first.

        Parameters
        ----------
        timeout_ms : float, optional
            How long to wait for the first one; 0 or less: not at all. None: BLOCKS until there is
            one, or the manager is closed or keeps no events.
        """
        if timeout_ms is None:
            return self._queue.take(None)
        return self._queue.take(max(0.0, as_float("timeout_ms", timeout_ms)) / 1000)

    def close(self) -> None:
        """Wakes all readers; from now on reading waits no more."""
        self._queue.close()

    def _hash_of(self, key: bytes) -> BlockHash | None:
        state = self._announced.get(key)
        return None if state is None else state.block_hash

    def _update(
        self,
        block_hash: BlockHash,
        group: int | None,
        level: KVCacheEventDiff | None,
        priority: KVCacheEventDiff | None,
    ) -> None:
        if level is not None or priority is not None:
            self._queue.add(group, KVCacheUpdatedData(block_hash, level, priority))

    def _event(self, event_id: int, data: EventData, group: int | None) -> KVCacheEvent:
        window = self._window_size if group is None else self._windows.get(group, self._window_size)
        return KVCacheEvent(event_id, data, window, self.hash_algo, self._rank, group)


def _diff(values: tuple[int, int] | None) -> KVCacheEventDiff | None:
    return None if values is None or values[0] == values[1] else KVCacheEventDiff(*values)


def _as_windows(name: str, windows: object) -> dict[int, int]:
    if not isinstance(windows, Mapping):
        raise wrong_type(name, "a mapping of layer group to window", windows)
    for group in windows:
        as_int(f"{name}: layer group", group, 0)
    return {int(group): as_int(f"{name}[{group}]", size) for group, size in windows.items()}


def _as_counts(name: str, values: object) -> tuple[int, ...]:
    some = as_items(name, values, "an int")
    return tuple(as_int(f"{name}[{i}]", value, 0) for i, value in enumerate(some))


def _as_key(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise wrong_type(name, "a key or a hash", value)


def _as_diff(name: str, value: object) -> KVCacheEventDiff | None:
    """A difference that was given by hand; None where it is none."""
    if value is None or value is _ABSENT:
        return None
    if not isinstance(value, KVCacheEventDiff):
        raise wrong_type(name, "a KVCacheEventDiff or None", value)
    return _diff((value.old_value, value.new_value))
