"""Runs of a prefix tree for tests of its listeners, and the set a consumer of events keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import kvcore as k
from kvcore.control.listener import StoredRun
from kvcore.event_types import BlockHash, KVCacheEvent, KVCacheRemovedData, KVCacheStoredData
from kvcore.events import KVCacheEventManager
from kvcore.keys import chain_keys, root_key
from kvcore.tokens import token_view

A_DIGEST, B_DIGEST = b"\xaa" * 32, b"\xbb" * 32


def keys_of(tokens: Sequence[int], T: int = 4, scope: k.ReuseScope | None = None) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return chain_keys(root_key(scope or k.ReuseScope()), token_view("tokens", tokens), T)


def run_of(
    tokens: Sequence[int],
    first: int = 0,
    end: int | None = None,
    *,
    T: int = 4,
    groups: tuple[int, ...] = (0,),
    scope: k.ReuseScope | None = None,
    level: int = 0,
    priority: int = 35,
) -> StoredRun:
    """Blocks `first` to `end` of a prompt, as the tree tells of them."""
    keys, image = keys_of(tokens, T, scope), bytes(token_view("tokens", tokens))
    end = len(keys) if end is None else end
    return StoredRun(
        scope=scope or k.ReuseScope(),
        parent=keys[first - 1] if first else None,
        keys=keys[first:end],
        tokens=image[4 * T * first : 4 * T * end],
        groups=groups,
        level=level,
        priorities=[priority] * (end - first),
        before=lambda: image[: 4 * T * first],
        tokens_per_block=T,
    )


def flushed(events: KVCacheEventManager) -> list[KVCacheEvent]:
    """What a flush makes readable."""
    events.flush_iteration_events()
    return events.get_latest_events(0)


def shown(events: Iterable[KVCacheEvent]) -> list[tuple[str, int | None, list[BlockHash]]]:
    """Events in short: their type, their layer group and the blocks they name."""
    found = []
    for event in events:
        data = event.to_dict()["data"]
        named = data.get("block_hashes") or [b["block_hash"] for b in data.get("blocks", ())]
        named = named or ([data["block_hash"]] if "block_hash" in data else [])
        found.append((data["type"], event.layer_group_id, named))
    return found


class Consumer:
    """Follows events as an index does: by id, with a snapshot if it lost some."""

    def __init__(self) -> None:
        self.held: dict[int | None, set[BlockHash]] = {}
        self.last = -1
        self.orphans: list[BlockHash] = []
        """Parents that nobody had reported."""

    def follow(self, events: Iterable[KVCacheEvent]) -> bool:
        """Takes what is new; False at the first gap, from which on nothing was taken."""
        for event in events:
            if event.event_id > self.last:
                if event.event_id > self.last + 1:
                    return False
                self.apply(event)
                self.last = event.event_id
        return True

    def restart(self, snapshot: Sequence[KVCacheEvent], last: int) -> None:
        """Takes a snapshot in the place of everything."""
        self.held, self.last = {}, last
        for event in snapshot:
            self.apply(event)

    def apply(self, event: KVCacheEvent) -> None:
        held = self.held.setdefault(event.layer_group_id, set())
        if isinstance(event.data, KVCacheStoredData):
            if event.data.parent_hash is not None and event.data.parent_hash not in held:
                self.orphans.append(event.data.parent_hash)
            held.update(block.block_hash for block in event.data.blocks)
        elif isinstance(event.data, KVCacheRemovedData):
            held.difference_update(event.data.block_hashes)
