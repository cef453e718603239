"""What is remembered of evicted blocks, so that a miss can be explained. Bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcore.control.node import Node

MOST: Final = 1 << 16  # runs remembered, about 200 bytes each


@dataclass(frozen=True, slots=True)
class Pressure:
    """Why pages were evicted."""

    call: str
    """What needed room."""

    needed: int
    """Pages it was short of, per layer group."""

    pinned: int
    """Pages that pins kept from being evicted then."""


class Ghosts:
    """The first block of each evicted run, by the node it hung on: the latest `MOST` at least."""

    def __init__(self) -> None:
        self._new: dict[tuple[int, int], tuple[int, Pressure]] = {}
        self._old: dict[tuple[int, int], tuple[int, Pressure]] = {}
        self._count = 0
        self._serial = 0

    def remember(self, node: Node, block: bytes, pressure: Pressure) -> None:
        """A run that began with `block` was evicted from below `node`'s last block."""
        if not node.serial:
            self._serial += 1
            node.serial = self._serial
        self._count += 1
        self._new[node.serial, hash(block)] = self._count, pressure
        if len(self._new) >= MOST:
            self._old, self._new = self._new, {}

    def ask(self, node: Node, block: bytes) -> tuple[int, Pressure] | None:
        """How many evictions ago `block` went from below `node`, and why; None if it never did."""
        key = node.serial, hash(block)
        found = self._new.get(key) or self._old.get(key)
        return None if found is None else (self._count - found[0], found[1])
