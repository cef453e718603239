"""KV events in the words of vLLM's KV event consumers, for one layer group."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from kvcore.checks import as_int
from kvcore.config import ReuseScope
from kvcore.control.listener import StoredRun
from kvcore.errors import wrong
from kvcore.tokens import IMAGE

_log = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks can be reused from now on, each the child of the one before.

    The order of the fields is that of the wire.
    """

    block_hashes: tuple[int, ...]
    """The first 8 bytes of each key, big-endian, signed."""

    parent_block_hash: int | None
    """The block before the first; None under a root."""

    token_ids: tuple[int, ...]
    """Of all blocks in a row, `block_size` each."""

    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None

    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    """What else the hashes cover, one entry a block: the salt, at the first block of a prompt."""

    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks can't be reused any more, children first."""

    block_hashes: tuple[int, ...]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Forget everything that this publisher told."""


StreamEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def wire_hash(key: bytes) -> int:
    """A key as it travels: its first 8 bytes, big-endian, signed.

    >>> wire_hash(bytes([255] * 32))
    -1
    """
    return int.from_bytes(key[:8], "big", signed=True)


@dataclass(slots=True)
class _Stored:
    """A stored event that may still grow."""

    scope: ReuseScope
    parent: int | None
    hashes: list[int]
    image: bytearray


class StreamingEventSink:
    """Listens to the prefix tree and collects what a stream of KV events shows.

    Only full text blocks of one layer group travel, and no block before its parent. What is left
    out is counted. Thread safe.

    Parameters
    ----------
    tokens_per_block : int
        Tokens of a block, as in the manager's configuration.
    layer_group : int
        The layer group to follow; take one with full attention.
    max_blocks_per_iteration : int
        Stored blocks kept between two calls of `drain`; more are left out. Removed blocks always
        travel.
    lora_names : mapping of int to str, optional
        The adapters' names by LoRA id; an id without one is its own name.

    Examples
    --------
    >>> sink = StreamingEventSink(16)
    >>> sink.drain()
    []
    """

    MEDIUM: Final = "GPU"

    def __init__(
        self,
        tokens_per_block: int,
        *,
        layer_group: int = 0,
        max_blocks_per_iteration: int = 100_000,
        lora_names: Mapping[int, str] | None = None,
    ) -> None:
        self.tokens_per_block = as_int("tokens_per_block", tokens_per_block, 1)
        self.layer_group = as_int("layer_group", layer_group, 0)
        self._cap = as_int("max_blocks_per_iteration", max_blocks_per_iteration, 1)
        self._lora_names = dict(lora_names or {})
        self.num_other_groups = 0
        """Blocks of other layer groups."""
        self.num_partial = 0
        """Blocks that are not full."""
        self.num_multimodal = 0
        """Blocks with a digest."""
        self.num_orphans = 0
        """Blocks whose parent was left out, so that no consumer could place them."""
        self.num_dropped = 0
        """Blocks beyond the cap."""
        self._lock = threading.Lock()
        self._published: dict[bytes, int] = {}
        self._pending: list[_Stored | list[int]] = []
        self._num_stored = 0

    def check_fits(self, tokens_per_block: int, num_layer_groups: int) -> None:
        """Raises `ValueError` if a manager's blocks are not what this sink takes them for."""
        name = "event_manager: tokens_per_block"
        if self.tokens_per_block != tokens_per_block:
            raise wrong(name, f"the manager's {tokens_per_block}", self.tokens_per_block)
        as_int("event_manager: layer_group", self.layer_group, 0, num_layer_groups - 1)

    def stored(self, run: StoredRun) -> None:
        """Blocks can be reused from now on. Those already published are not repeated."""
        with self._lock:
            others = len(run.groups) - (self.layer_group in run.groups)
            self.num_other_groups += others * len(run.keys)
            if self.layer_group not in run.groups:
                return
            step = self.tokens_per_block * IMAGE.itemsize
            parent = None if run.parent is None else self._published.get(run.parent)
            placed = run.parent is None or parent is not None
            for index, key in enumerate(run.keys):
                image = run.tokens[index * step : (index + 1) * step]
                block = self._published.get(key)
                placed = block is not None or self._passes(image, step, placed)
                if placed and block is None:
                    block = self._published[key] = wire_hash(key)
                    self._append(run.scope, parent, block, image)
                parent = block

    def _passes(self, image: bytes, step: int, placed: bool) -> bool:
        """Whether a block may travel; counts it if not."""
        if len(image) < step:
            self.num_partial += 1
        elif not image[IMAGE.itemsize - 1 :: IMAGE.itemsize].isascii():  # some sign bit
            self.num_multimodal += 1
        elif self._num_stored >= self._cap:
            self.num_dropped += 1
            if self.num_dropped & (self.num_dropped - 1) == 0:
                _log.warning("%d stored blocks beyond the cap left out", self.num_dropped)
        elif not placed:
            self.num_orphans += 1
        else:
            return True
        return False

    def _append(self, scope: ReuseScope, parent: int | None, block: int, image: bytes) -> None:
        self._num_stored += 1
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Stored) and parent is not None and last.hashes[-1] == parent:
            last.hashes.append(block)
            last.image += image
        else:
            self._pending.append(_Stored(scope, parent, [block], bytearray(image)))

    def removed(self, keys: Iterable[bytes], group: int | None) -> None:
        """Blocks can't be reused any more, children first; None: in no layer group."""
        with self._lock:
            if group is not None and group != self.layer_group:
                self.num_other_groups += len(list(keys))
                return
            hashes = [self._published.pop(key) for key in keys if key in self._published]
            last = self._pending[-1] if self._pending else None
            if hashes and isinstance(last, list):
                last += hashes
            elif hashes:
                self._pending.append(hashes)

    def updated(
        self,
        key: bytes,
        group: int,
        level: tuple[int, int] | None = None,
        priority: tuple[int, int] | None = None,
    ) -> None:
        """Moves between cache levels do not travel."""

    def drain(self) -> list[StreamEvent]:
        """Takes the events since the last call; ends the iteration that the cap counts."""
        with self._lock:
            pending, self._pending, self._num_stored = self._pending, [], 0
        return [self._finished(each) for each in pending]

    def _finished(self, pending: _Stored | list[int]) -> StreamEvent:
        if isinstance(pending, list):
            return BlockRemoved(tuple(pending), self.MEDIUM, self.layer_group)
        lora, salt = pending.scope.lora_id, pending.scope.salt
        extra: list[tuple[str, ...] | None] = [None] * len(pending.hashes)
        if salt is not None and pending.parent is None:
            extra[0] = (str(salt),)
        return BlockStored(
            tuple(pending.hashes),
            pending.parent,
            tuple(np.frombuffer(pending.image, IMAGE).tolist()),
            self.tokens_per_block,
            lora,
            self.MEDIUM,
            None if lora is None else self._lora_names.get(lora, str(lora)),
            tuple(extra) if any(extra) else None,
            self.layer_group,
        )

    def snapshot(self, runs: Iterable[StoredRun]) -> list[StreamEvent]:
        """`AllBlocksCleared`, then what the tree holds, for consumers that lost track.

        Takes the place of what was not drained yet: publish it as the next batch.

        Parameters
        ----------
        runs : iterable of StoredRun
            Everything in the tree, parents first.
        """
        fresh = StreamingEventSink(
            self.tokens_per_block, layer_group=self.layer_group, lora_names=self._lora_names
        )
        fresh._cap = sys.maxsize
        for run in runs:
            fresh.stored(run)
        with self._lock:
            self._published, self._pending, self._num_stored = fresh._published, [], 0
        return [AllBlocksCleared(), *fresh.drain()]
