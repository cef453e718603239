"""Events on their way to the reader: runs that still grow, removals that wait, ids, capacity."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvcore.errors import wrong_type
from kvcore.event_types import (
    BlockHash,
    EventData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)

Gather: TypeAlias = Callable[[list[KVCacheEvent]], Sequence[Sequence[KVCacheEvent]] | None]
"""Exchanges the events of all attention-DP ranks; the result counts on rank 0."""

Finish: TypeAlias = Callable[[int, EventData, int | None], KVCacheEvent]
"""Makes an event from its id, its data and its layer group."""


@dataclass(slots=True)
class _Pending:
    """An event that is not flushed yet; `blocks` of a stored one may still grow."""

    event_id: int
    group: int | None
    data: EventData
    blocks: list[KVCacheStoredBlockData] | None = None


class EventQueue:
    """Pending events until a flush, readable ones until they are read; thread safe.

    * Stored blocks join the group's latest pending stored event if that ends with their parent and
      no removal waits anywhere. A removal in the group ends its run.
    * Removals wait, by group. They become events before the next stored event of their group,
      before any other event, and at a flush.
    * Beyond `capacity` the oldest events go, and are counted. 0 or less: there are no events.

    Group None, for events that name no group, stands in every group's way.
    """

    def __init__(self, capacity: int, finish: Finish) -> None:
        self.capacity, self.finish = capacity, finish
        self.changed = threading.Condition()
        """Guards everything, and what its user wants to change together with it; reentrant."""
        self.next_id = 0
        self.num_dropped = 0
        self._flushing = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._open: dict[int | None, _Pending] = {}
        """By group: the stored event that may still grow."""
        self._removals: dict[int | None, list[BlockHash]] = {}
        """By group: removed blocks that have no event yet. No empty lists."""
        self._visible: deque[KVCacheEvent] = deque()
        self._closed = False

    def store(
        self, group: int | None, parent: BlockHash | None, blocks: list[KVCacheStoredBlockData]
    ) -> None:
        """Adds blocks, each the child of the one before."""
        if not blocks:
            return
        with self.changed:
            self._release(*(() if group is None else (group, None)))
            last = self._open.get(group)
            run = None if last is None else last.blocks
            if run and not self._removals and parent is not None and run[-1].block_hash == parent:
                run += blocks
                return
            pending = self._append(group, KVCacheStoredData(parent, ()), blocks)
            if pending is not None:
                self._open[group] = pending

    def remove(self, group: int | None, block_hash: BlockHash) -> None:
        """Adds a removed block."""
        with self.changed:
            if self.capacity > 0:
                self._removals.setdefault(group, []).append(block_hash)
                self._open.pop(group, None)

    def add(self, group: int | None, data: EventData) -> None:
        """Adds any other event."""
        with self.changed:
            self._release()
            self._append(group, data)

    def seal(self) -> int:
        """Ends all runs and releases all removals. The newest id: what comes later has another."""
        with self.changed:
            self._release()
            self._open.clear()
            return self.next_id - 1

    def flush(self, gather: Gather | None, rank: int | None) -> None:
        """Makes pending events readable, or those that a gather returns, on rank 0."""
        with self._flushing:
            with self.changed:
                self.seal()
                pending = list(self._pending)
                self._pending.clear()
                events = [self._finished(each) for each in pending]
                if gather is None:
                    return self._publish(events, self.capacity)
            try:
                gathered = gather(events)
                if rank != 0 or self.capacity <= 0:
                    return
                found = _of_ranks(gathered)
            except BaseException:
                with self.changed:
                    self._pending.extendleft(reversed(pending))
                    self._trim()
                raise
            kept = [events[-self.capacity :] for events in found]
            with self.changed:
                self.num_dropped += sum(map(len, found)) - sum(map(len, kept))
                everything = [event for events in kept for event in events]
                self._publish(everything, self.capacity * len(kept))

    def take(self, timeout: float | None) -> list[KVCacheEvent]:
        """All readable events; waits for the first one, at most `timeout` seconds."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self.changed:
            self.changed.wait_for(
                lambda: self._visible or self._closed or self.capacity <= 0, timeout
            )
            events = list(self._visible)
            self._visible.clear()
            return events

    def close(self) -> None:
        """Wakes all readers; from now on `take` waits no more."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    # -- with the lock held ------------------------------------------------------------------------

    def _release(self, *groups: int | None) -> None:
        """Makes events of waiting removals; of all groups where none is named."""
        for group in groups or tuple(self._removals):
            hashes = self._removals.pop(group, None)
            if hashes:
                self._append(group, KVCacheRemovedData(tuple(hashes)))

    def _append(
        self,
        group: int | None,
        data: EventData,
        blocks: list[KVCacheStoredBlockData] | None = None,
    ) -> _Pending | None:
        if self.capacity <= 0:
            return None
        pending = _Pending(self.next_id, group, data, blocks)
        self.next_id += 1
        self._pending.append(pending)
        self._trim()
        return pending

    def _trim(self) -> None:
        """Lets the oldest pending events go that no flush could keep."""
        while len(self._pending) > self.capacity:
            lost = self._pending.popleft()
            self.num_dropped += 1
            if self._open.get(lost.group) is lost:
                del self._open[lost.group]

    def _finished(self, pending: _Pending) -> KVCacheEvent:
        data = pending.data
        if pending.blocks is not None and isinstance(data, KVCacheStoredData):
            data = KVCacheStoredData(data.parent_hash, tuple(pending.blocks))
        return self.finish(pending.event_id, data, pending.group)

    def _publish(self, events: Iterable[KVCacheEvent], limit: int) -> None:
        self._visible.extend(events)
        while len(self._visible) > max(limit, 0):
            self._visible.popleft()
            self.num_dropped += 1
        self.changed.notify_all()


def _of_ranks(gathered: object) -> list[list[KVCacheEvent]]:
    """What a gather returned on rank 0."""
    ranks = list(gathered) if isinstance(gathered, Iterable) else []
    if not ranks or not all(isinstance(events, Iterable) for events in ranks):
        expected = "the events of each rank, on rank 0"
        raise wrong_type("attention_dp_gather", expected, gathered)
    return [list(events) for events in ranks]
