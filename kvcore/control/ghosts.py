"""What is remembered of evicted blocks, so that a miss can be explained. Bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcore.control.node import TOKEN_BYTES, Node

MOST: Final = 1 << 16  # runs remembered, about 350 bytes each
KEPT: Final = 64  # bytes of a run's first block


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
    """How each evicted run began, by where it hung: the latest `MOST` at least.

    A run is named by the serial of the node that it hung on, its ordinal and its first token; the
    halves of a node that was split have one serial, since the ordinal tells them apart.
    """

    def __init__(self) -> None:
        self._new: dict[tuple[int, int, bytes], tuple[int, bytes, Pressure]] = {}
        self._old: dict[tuple[int, int, bytes], tuple[int, bytes, Pressure]] = {}
        self._count = 0
        self._serial = 0

    def remember(self, node: Node, ordinal: int, block: bytes, pressure: Pressure) -> None:
        """A run that began with `block`, its block `ordinal`, was evicted from below `node`."""
        if not node.serial:
            self._serial += 1
            node.serial = self._serial
        self._count += 1
        began = block[:KEPT]
        self._new[node.serial, ordinal, began[:TOKEN_BYTES]] = self._count, began, pressure
        if len(self._new) >= MOST:
            self._old, self._new = self._new, {}

    def ask(
        self, node: Node, ordinal: int, block: bytes, partial: bool
    ) -> tuple[int, Pressure] | None:
        """How many evictions ago what would match `block` went, and why; None if it never did.

        With `partial` a common start is a match, else all of the shorter one.
        """
        key = node.serial, ordinal, block[:TOKEN_BYTES]
        found = self._new.get(key) or self._old.get(key)
        if found is None:
            return None
        when, began, pressure = found
        size = min(len(began), len(block))
        if not partial and began[:size] != block[:size]:
            return None
        return self._count - when, pressure
