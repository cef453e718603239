"""From a run of the prefix tree to the blocks of an event: hashes, tokens, multimodal keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_choice
from kvcore.config import ReuseScope
from kvcore.control.listener import StoredRun
from kvcore.event_types import BlockHash, EventTokens, KVCacheStoredBlockData, MmKey
from kvcore.tokens import IMAGE, digest_of, uuid_of

V1: Final = "v1_block_key"
V2: Final = "v2_sha256"
V2_64: Final = "v2_sha256_64"
HASH_ALGOS: Final = ("auto", V1, V2, V2_64)

Ids: TypeAlias = Sequence[int] | NDArray[np.int32]

Known: TypeAlias = Callable[[bytes], BlockHash | None]
"""The hash under which a key was announced, or None."""

_log = logging.getLogger("kvcore")
_U64: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B9
_TOO_OLD: Final = (
    "the v1 hash knows no multimodal digests: such blocks get the first 64 bits of SHA-256"
)


def truncated(key: bytes) -> int:
    """The first 64 bits of a key, big-endian and unsigned.

    >>> truncated(bytes(7) + bytes([5]) + bytes(24))
    5
    """
    return int.from_bytes(key[:8], "big")


# -- the hash of older caches ----------------------------------------------------------------------


def v1_hash(ids: Ids, parent: int = 0, lora_id: int | None = None, salt: int | None = None) -> int:
    """The 64-bit block hash of TensorRT-LLM's first KV cache manager; about 0.3 us a token.

    It is no cryptographic hash: take it only for consumers that compute it themselves.

    >>> v1_hash([5, 6], parent=v1_hash([1, 2, 3, 4]))
    6875034662206558884
    """
    seed = len(ids) ^ (parent * 0xBF58476D1CE4E5B9 & _U64)
    if parent == 0 and salt is not None:
        seed = _mix(seed, _scramble64(salt))
    for word in _scramble32(ids):
        seed ^= (word + (seed << 6) + (seed >> 2)) & _U64
    return seed if lora_id is None else _mix(seed, _scramble64(lora_id))


def _mix(seed: int, word: int) -> int:
    return seed ^ ((word + (seed << 6) + (seed >> 2)) & _U64)


def _scramble32(ids: Ids) -> list[int]:
    words: NDArray[np.uint32] = np.asarray(ids, np.uint32)
    for _ in range(2):
        words = (words ^ (words >> np.uint32(16))) * np.uint32(0x045D9F3B)
    words = (words ^ (words >> np.uint32(16))) + np.uint32(_GOLDEN)
    return words.tolist()  # type: ignore[no-any-return]


def _scramble64(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _U64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _U64
    return ((word ^ word >> 31) + _GOLDEN) & _U64


# -- blocks of a run -------------------------------------------------------------------------------


class BlockMaker:
    """Makes the blocks of events in one hash algorithm.

    Parameters
    ----------
    hash_algo : str
        One of `HASH_ALGOS`.
    mm_id_offset : int, optional
        The id of position 0 of every multimodal item; without it blocks have no `mm_keys`.
    """

    def __init__(self, hash_algo: str, mm_id_offset: int | None) -> None:
        algo = as_choice("hash_algo", hash_algo, HASH_ALGOS)
        self.hash_algo = V1 if algo == "auto" else algo
        self._offset = mm_id_offset
        self._warned = False

    def blocks(
        self, run: StoredRun, known: Known
    ) -> tuple[BlockHash | None, list[KVCacheStoredBlockData]]:
        """The hash of the block before a run, and the run's blocks."""
        images = list(_cut(run.tokens, run.tokens_per_block))
        parent, hashes = self._hashes(run, images, known)
        mm_keys = self._mm_keys(run, images)
        salt = None if run.scope.salt is None else str(run.scope.salt)
        blocks = [
            KVCacheStoredBlockData(
                block_hash, EventTokens(image), run.level, priority, keys, salt, run.scope.lora_id
            )
            for block_hash, image, priority, keys in zip(
                hashes, images, run.priorities, mm_keys, strict=True
            )
        ]
        return parent, blocks

    def _hashes(
        self, run: StoredRun, images: list[bytes], known: Known
    ) -> tuple[BlockHash | None, list[BlockHash]]:
        if self.hash_algo == V1:
            return self._v1_hashes(run, images, known)
        label: Callable[[bytes], BlockHash] = bytes.hex if self.hash_algo == V2 else truncated
        parent = None if run.parent is None else label(run.parent)
        return parent, [label(key) for key in run.keys]

    def _v1_hashes(
        self, run: StoredRun, images: list[bytes], known: Known
    ) -> tuple[BlockHash | None, list[BlockHash]]:
        parent = None if run.parent is None else known(run.parent)
        if run.parent is not None and parent is None:  # removed, or never announced
            above = list(_cut(run.before(), run.tokens_per_block))
            parent = self._v1_chain(run.scope, None, above, [run.parent] * len(above))[-1]
        fallback = run.parent is not None and parent == truncated(run.parent)
        if fallback:
            return parent, [truncated(key) for key in run.keys]
        return parent, self._v1_chain(run.scope, parent, images, run.keys)

    def _v1_chain(
        self, scope: ReuseScope, parent: BlockHash | None, images: list[bytes], keys: list[bytes]
    ) -> list[BlockHash]:
        """The v1 hashes of blocks; from the first digest on their keys' first 64 bits."""
        last = 0 if parent is None else int(parent)
        hashes: list[BlockHash] = []
        for index, image in enumerate(images):
            ids = np.frombuffer(image, IMAGE)
            if ids.min() < 0:
                self._warn()
                return hashes + [truncated(key) for key in keys[index:]]
            last = v1_hash(ids, last, scope.lora_id, scope.salt)
            hashes.append(last)
        return hashes

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(_TOO_OLD)

    def _mm_keys(self, run: StoredRun, images: list[bytes]) -> list[tuple[MmKey, ...]]:
        """Which items' stretches begin in each block."""
        offset = self._offset
        ids = np.frombuffer(run.tokens, IMAGE)
        if offset is None or not ((ids < 0) | (ids > offset)).any():
            return [()] * len(images)
        item: int | None = None
        first = int(((ids < 0) | (ids > offset)).argmax())
        if ids[first] > 0:  # the item began before this run, if there is one
            above = np.frombuffer(b"" if run.parent is None else run.before(), IMAGE)
            digests = above[above < 0]
            item = int(digests[-1]) if digests.size else None
        keys = []
        for image in images:
            found, item = _stretches(np.frombuffer(image, IMAGE).tolist(), offset, item)
            keys.append(found)
        return keys


def _stretches(
    ids: list[int], offset: int, item: int | None
) -> tuple[tuple[MmKey, ...], int | None]:
    """Where items begin or go on in one block, and the item that a later block may go on with."""
    keys = []
    inside = False
    for token in ids:
        if token < 0:
            item = token
            keys.append(_mm_key(item, 0))
        elif token > offset and item is not None and not inside:
            keys.append(_mm_key(item, token - offset))
        inside = item is not None and (token < 0 or token > offset)
    return tuple(keys), item


def _mm_key(item: int, start: int) -> MmKey:
    return MmKey(digest_of(item).hex(), start, uuid_of(item))


def _cut(image: bytes, tokens_per_block: int) -> Iterator[bytes]:
    step = tokens_per_block * IMAGE.itemsize
    return (image[begin : begin + step] for begin in range(0, len(image), step))
