"""What the prefix tree tells whoever listens: which blocks can be reused, and which no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvcore.config import ReuseScope


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Blocks that entered the tree together, each the child of the one before."""

    scope: ReuseScope

    parent: bytes | None
    """The key of the block before the first; None if that is the scope's root."""

    keys: list[bytes]

    tokens: bytes
    """The little-endian image of all blocks; only the last may be shorter than the others."""

    groups: tuple[int, ...]
    """Layer groups that have a page for every token of each block."""

    level: int
    """The cache level of those pages."""

    priorities: list[int]
    """Of each block, for eviction."""

    before: Callable[[], bytes]
    """The image of everything before the run, made when asked for."""

    tokens_per_block: int
    """Tokens of a full block: without it nobody could tell 4 + 2 tokens from 3 + 3."""


class TreeListener(Protocol):
    """Called under the manager's lock, in the order of the changes; must not call the manager."""

    def stored(self, run: StoredRun) -> None:
        """Blocks can be reused from now on."""

    def removed(self, keys: list[bytes], group: int | None) -> None:
        """Blocks can't be reused any more, children first; None: in no layer group."""

    def snapshot(self, runs: Iterable[StoredRun]) -> list[Any]:
        """Events of blocks that can be reused now, parents first."""
