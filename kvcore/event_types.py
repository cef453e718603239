"""KV cache events as values: frozen, picklable, equal by content.

Names and fields are those that routers and indexers of TensorRT-LLM's KV events know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np

from kvcore.tokens import IMAGE, digest_of

BlockHash: TypeAlias = str | int
"""64 hex digits or an unsigned 64-bit number, by the manager's `hash_algo`."""


class UniqueToken(NamedTuple):
    """One token of a block."""

    token_id: int | str
    """The id; for a multimodal item the 64 hex digits of its digest."""

    token_extra_id: int = 0
    """Always 0 here."""


class EventTokens(Sequence[UniqueToken]):
    """The tokens of a block, kept as bytes until somebody looks.

    >>> tokens = EventTokens(bytes((5, 0, 0, 0, 6, 0, 0, 0)))
    >>> tokens.ids, tokens[1], tokens == [(5, 0), (6, 0)]
    ([5, 6], UniqueToken(token_id=6, token_extra_id=0), True)
    """

    __slots__ = ("_digests", "_image")

    def __init__(self, image: bytes) -> None:
        self._image = image
        """Little-endian int32, like the argument. Negative ones are not read."""
        self._digests: tuple[tuple[int, str], ...] = ()
        """Positions and hex digits: a digest's number means nothing in another process."""
        if not image[IMAGE.itemsize - 1 :: IMAGE.itemsize].isascii():  # some sign bit
            ids = np.frombuffer(image, IMAGE)
            at = np.flatnonzero(ids < 0).tolist()
            self._digests = tuple((i, digest_of(int(ids[i])).hex()) for i in at)

    @property
    def ids(self) -> list[int | str]:
        """Ids, and the hex digits of digests."""
        ids: list[int | str] = np.frombuffer(self._image, IMAGE).tolist()
        for position, digest in self._digests:
            ids[position] = digest
        return ids

    def __len__(self) -> int:
        return len(self._image) // IMAGE.itemsize

    def __iter__(self) -> Iterator[UniqueToken]:
        return map(UniqueToken, self.ids)

    @overload
    def __getitem__(self, index: int) -> UniqueToken: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[UniqueToken, ...]: ...
    def __getitem__(self, index: int | slice) -> UniqueToken | tuple[UniqueToken, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"EventTokens({self.ids})"


@dataclass(frozen=True, slots=True)
class MmKey:
    """A stretch of a multimodal item in a block."""

    hash: str
    """The item's digest in hex."""

    start_offset: int
    """The position in the item of the stretch's first token."""

    uuid: str | None = None
    """The caller's name of the item."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; no uuid without one."""
        shown = {"type": "mm_key", "hash": self.hash, "start_offset": self.start_offset}
        return shown if self.uuid is None else {**shown, "uuid": self.uuid}


@dataclass(frozen=True, slots=True)
class KVCacheCreatedData:
    """A cache was made."""

    num_blocks_per_cache_level: Sequence[int]

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        levels = list(self.num_blocks_per_cache_level)
        return {"type": "created", "num_blocks_per_cache_level": levels}


@dataclass(frozen=True, slots=True)
class KVCacheStoredBlockData:
    """One block that can be reused from now on."""

    block_hash: BlockHash

    tokens: Sequence[UniqueToken]

    cache_level: int
    """Where the page lies; 0 is the GPU."""

    priority: int
    """For eviction; low ones go first."""

    mm_keys: Sequence[MmKey] = ()

    cache_salt: str | None = None
    """The scope's salt in decimal."""

    lora_id: int | None = None
    """The scope's LoRA id."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; no LoRA id without one."""
        shown = {
            "type": "stored_block",
            "block_hash": self.block_hash,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": extra}
                for token, extra in self.tokens
            ],
            "cache_level": self.cache_level,
            "priority": self.priority,
            "mm_keys": [key.to_dict() for key in self.mm_keys],
            "cache_salt": self.cache_salt,
        }
        return shown if self.lora_id is None else {**shown, "lora_id": self.lora_id}


@dataclass(frozen=True, slots=True)
class KVCacheStoredData:
    """A run of blocks was stored, each the child of the one before."""

    parent_hash: BlockHash | None
    """The block before the first; None under a root."""

    blocks: Sequence[KVCacheStoredBlockData]

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        blocks = [block.to_dict() for block in self.blocks]
        return {"type": "stored", "parent_hash": self.parent_hash, "blocks": blocks}


@dataclass(frozen=True, slots=True)
class KVCacheRemovedData:
    """Blocks can't be reused any more, children first."""

    block_hashes: Sequence[BlockHash]

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {"type": "removed", "block_hashes": list(self.block_hashes)}


@dataclass(frozen=True, slots=True)
class KVCacheEventDiff:
    """A value before and after."""

    old_value: int
    new_value: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {"type": "event_diff", "new_value": self.new_value, "old_value": self.old_value}


@dataclass(frozen=True, slots=True)
class KVCacheUpdatedData:
    """A block moved to another cache level, or got another priority, or both."""

    block_hash: BlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; what did not change is None."""
        level, priority = self.cache_level, self.priority
        return {
            "type": "updated",
            "block_hash": self.block_hash,
            "cache_level": None if level is None else level.to_dict(),
            "priority": None if priority is None else priority.to_dict(),
        }


EventData: TypeAlias = (
    KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData
)


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """What happened to blocks of one layer group.

    >>> event = KVCacheEvent(0, KVCacheRemovedData(("ab",)), 128)
    >>> event.to_dict()["data"]
    {'type': 'removed', 'block_hashes': ['ab']}
    """

    event_id: int
    """From 0, one more for each event of this rank: a gap says that events were lost."""

    data: EventData

    window_size: int
    """Of the layer group; the manager's default for the others."""

    hash_algo: str | None = None
    """How the block hashes were made."""

    attention_dp_rank: int | None = None

    layer_group_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; no rank or layer group without one."""
        shown = {
            "event_id": self.event_id,
            "data": self.data.to_dict(),
            "window_size": self.window_size,
            "hash_algo": self.hash_algo,
            "attention_dp_rank": self.attention_dp_rank,
            "layer_group_id": self.layer_group_id,
        }
        optional = ("attention_dp_rank", "layer_group_id")
        return {
            name: shown[name] for name in shown if name not in optional or shown[name] is not None
        }
