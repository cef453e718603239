"""Planned drops: pages that a caller takes out of the tree when it knows nobody will need them."""

from __future__ import annotations

from kvcore.errors import StateError


class PlannedDrop:
    """A one-shot plan, from `KVCache.plan_committed_block_drop`. Keeps no page alive.

    Full attention is never part of a plan: without windowed or recurrent groups there is nothing to
    drop.
    """

    __slots__ = ("_dropped",)

    def __init__(self) -> None:
        self._dropped = False

    def drop(self) -> int:
        """Drops the planned pages; how many they were. Raises `StateError` the second time."""
        if self._dropped:
            raise StateError("the planned pages have already been dropped")
        self._dropped = True
        return 0
