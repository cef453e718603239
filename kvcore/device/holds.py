"""Who relies on memory staying where it is."""

from __future__ import annotations

from typing import Protocol

from kvcore.errors import LeaseInUse


class Holder(Protocol):
    """Somebody who uses memory, by the name that errors give him."""

    @property
    def name(self) -> str: ...


class Holds:
    """The holders of one memory, and how many of its first bytes each of them uses.

    May be called in any thread: `remove` happens where a consumer drops its last array.
    """

    def __init__(self) -> None:
        self._ends: dict[Holder, int] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, holder: Holder, end: int) -> None:
        """`holder` uses the first `end` bytes until it is removed."""
        self._ends[holder] = end

    def remove(self, holder: Holder) -> None:
        """`holder` is done. Idempotent."""
        self._ends.pop(holder, None)

    def refuse(self, call: str, nbytes: int = -1) -> None:
        """Raises `LeaseInUse` where somebody uses more than the first `nbytes` bytes."""
        found = [holder.name for holder, end in self._ends.copy().items() if end > nbytes]
        if found:
            raise LeaseInUse(
                f"{call}: {found[0]} is still in use"
                + (f", and {len(found) - 1} more" if len(found) > 1 else "")
                + "; drop the arrays that were taken from it and close it first"
            )
