"""A prefix cache as plain as it gets, page by page, behind the calls that a replay makes.

Blocks are looked up by their tokens among the children of the block before. Of every rule there is
one literal line: what a match holds, when a page is copied, which page leaves first. One layer
group, no beams, no scopes; sequences are never suspended again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import kvcore as k
from kvcore.retention import Retention

ITEM = 4  # bytes of a token
DEFAULT = 35


class Block:
    """A block in the tree, with its page. The root is one without tokens."""

    def __init__(self, above: Block | None, tokens: bytes, priority: int) -> None:
        self.above, self.tokens, self.priority = above, tokens, priority
        self.depth = 0 if above is None else above.depth + 1
        self.below: dict[bytes, Block] = {}
        self.holders = self.stamp = 0
        self.in_tree = True

    @property
    def order(self) -> tuple[int, int, int]:
        """Of two pages that may leave, the one with the lower order does."""
        return self.priority, self.stamp, -self.depth


class ModelManager:
    """The pages: so many of them free, the others in the tree or private to a sequence."""

    def __init__(self, config: k.KVCacheManagerConfig, device: object = "meta") -> None:
        page = sum(b.size for layer in config.layers for b in layer.buffers)
        self.block, self.util = config.tokens_per_block, config.max_util_for_resume
        self.total = self.free = config.cache_tiers[0].quota // page
        self.root = Block(None, b"", DEFAULT)
        self.blocks: set[Block] = set()
        self.stamps = self.evicted = 0

    def __enter__(self) -> ModelManager:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def evictable(self) -> int:
        return sum(not block.holders for block in self.blocks)

    def get_storage_statistics(self, level: int = 0) -> list[k.StorageStatistics]:
        size = self.total, self.free, self.evictable
        return [
            k.StorageStatistics(slot_sizes=(1,), total=size[0], free=size[1], evictable=size[2])
        ]

    def get_and_reset_iteration_stats(self) -> list[k.KVCacheIterationStats]:
        return [k.KVCacheIterationStats(host_dropped_blocks=self.evicted)]

    def create_kv_cache(self, input_tokens: Any = None, **hints: Any) -> ModelSequence:
        return ModelSequence(self, input_tokens, hints.get("retention") or ())

    def advance(self, sequences: Iterable[ModelSequence], n: int) -> bool:
        sequences = list(sequences)
        return self._grow([(sequence, sequence.capacity + n) for sequence in sequences])

    def _grow(self, wanted: list[tuple[ModelSequence, int]]) -> bool:
        new = [max(0, -(-capacity // self.block) - s.num_blocks) for s, capacity in wanted]
        if not self.take(sum(new)):
            return False
        for (sequence, capacity), count in zip(wanted, new, strict=True):
            sequence.private += count
            sequence.capacity = capacity
        return True

    def take(self, count: int) -> bool:
        """Makes `count` pages private, evicting one page after the other; False if too few are."""
        if count > self.free + self.evictable:
            return False
        if count > self.free:
            leaves = [(b.order, id(b), b) for b in self.blocks if not b.holders and not b.below]
            heapq.heapify(leaves)
            while count > self.free:
                gone = heapq.heappop(leaves)[2]
                self.cut(gone)
                self.evicted += 1
                above = gone.above
                if above is not self.root and not above.holders and not above.below:
                    heapq.heappush(leaves, (above.order, id(above), above))
        self.free -= count
        return True

    def cut(self, block: Block) -> None:
        """Takes a block without others below it out of the tree."""
        del block.above.below[block.tokens]
        self.blocks.remove(block)
        block.in_tree = False
        self.free += not block.holders

    def insert(self, above: Block, tokens: bytes, priority: int | None) -> Block:
        """A new block, held once. It replaces a shorter one that it begins with."""
        for shorter in [b for t, b in above.below.items() if tokens.startswith(t)]:
            self.cut(shorter)
        block = Block(above, tokens, DEFAULT if priority is None else priority)
        block.holders = 1
        above.below[tokens] = block
        self.blocks.add(block)
        return block

    def let_go(self, path: Sequence[Block], held: Sequence[Block]) -> None:
        """One new stamp for the path; those of it that are `held` lose a holder."""
        self.stamps += 1
        for block in path:
            block.stamp = self.stamps
        for block in held:
            block.holders -= 1
            self.free += not block.holders and not block.in_tree


class ModelSequence:
    """Blocks in the tree, then private ones; `tail` are committed tokens of a private one."""

    def __init__(self, manager: ModelManager, tokens: Any, retention: Sequence[Retention]) -> None:
        self.manager, self.retention = manager, retention
        self.path: list[Block] = []
        self.lent: Block | None = None  # partly matched, to be copied by the first resume
        self.tail = b""
        self.private = 0
        self._match(_image(() if tokens is None else tokens))
        size = manager.block * ITEM
        self.num_committed_tokens = len(self.path) * manager.block + len(self.tail) // ITEM
        self.capacity = self.num_committed_tokens
        for ordinal, block in enumerate(self._held):
            assert len(block.tokens) <= size
            block.holders += 1
            self._retain(block, ordinal)

    @property
    def num_blocks(self) -> int:
        return len(self.path) + self.private

    @property
    def _held(self) -> list[Block]:
        return self.path if self.lent is None else [*self.path, self.lent]

    def _match(self, image: bytes) -> None:
        size, place, at = self.manager.block * ITEM, self.manager.root, 0
        while at + size <= len(image) and image[at : at + size] in place.below:
            place = place.below[image[at : at + size]]
            self.path.append(place)
            at += size
        rest = image[at : at + size]
        best = 0
        for tokens, block in place.below.items():
            common = _common(tokens, rest)
            if common > best:
                best, self.lent = common, block
        self.tail = rest[:best]

    def _priority(self, ordinal: int) -> int | None:
        """What the last range says that covers the block's first token."""
        first = ordinal * self.manager.block
        said = None
        for entry in self.retention:
            if entry.start <= first and (entry.end is None or first < entry.end):
                said = entry.priority
        return said

    def _retain(self, block: Block, ordinal: int) -> None:
        priority = self._priority(ordinal)
        if priority is not None:
            block.priority = priority

    def resume(self) -> bool:
        manager, lent = self.manager, self.lent
        mine = sum(block.holders == 1 for block in self._held)
        others = manager.total - manager.free - manager.evictable - mine
        if others > manager.util * manager.total:
            return False
        if lent is not None:
            if not manager.take(1):
                return False
            self.private, self.lent = 1, None
            manager.let_go([*self.path, lent], [lent])
        return True

    def resize(self, capacity: int) -> bool:
        return self.manager._grow([(self, capacity)])

    def commit(self, tokens: Any, is_end: bool = False) -> None:
        image, size = _image(tokens), self.manager.block * ITEM
        self.num_committed_tokens += len(image) // ITEM
        assert self.num_committed_tokens <= self.capacity
        image = self.tail + image
        full = len(image) // size * size
        for at in range(0, full, size):
            self._publish(image[at : at + size])
        self.tail = image[full:]
        if is_end:
            self._publish_tail()

    def _publish(self, tokens: bytes) -> None:
        manager, above, ordinal = self.manager, self._above, len(self.path)
        block = above.below.get(tokens)
        if block is None:
            block = manager.insert(above, tokens, self._priority(ordinal))
        else:
            block.holders += 1
            self._retain(block, ordinal)
            manager.free += 1
        self.path.append(block)
        self.private -= 1

    def _publish_tail(self) -> None:
        """Unless there is a block that begins with it."""
        above = self._above
        if self.tail and not any(tokens.startswith(self.tail) for tokens in above.below):
            priority = self._priority(len(self.path))
            self.path.append(self.manager.insert(above, self.tail, priority))
            self.private -= 1
        self.tail = b""

    @property
    def _above(self) -> Block:
        return self.path[-1] if self.path else self.manager.root

    def close(self) -> None:
        if self.lent is None:
            self._publish_tail()
        held = list(self._held)
        self.manager.let_go(held, held)
        self.manager.free += self.private
        self.path, self.lent, self.private = [], None, 0


def _image(tokens: Any) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Bytes of the tokens that both begin with."""
    if a[:ITEM] != b[:ITEM]:
        return 0
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    pairs = zip(range(0, n, ITEM), range(ITEM, n + ITEM, ITEM), strict=True)
    return next(i for i, j in pairs if a[i:j] != b[i:j])
