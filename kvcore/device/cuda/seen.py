"""What is known about arrays that were looked at before."""

from __future__ import annotations

from typing import Any
from weakref import ref

from kvcore.device.base import Array

LIMIT = 1024


class Seen:
    """Values worked out from arrays, by the identity of those, without keeping them alive.

    Steady work passes the same arrays again and again: it checks and describes them once.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[Any, tuple[ref[Any], ...]]] = {}

    def get(self, key: Any, *arrays: Array) -> Any:
        """What was kept under a key for exactly these objects, else None."""
        found = self._entries.get(key)
        if found is None:
            return None
        value, refs = found
        for its, array in zip(refs, arrays, strict=True):
            if its() is not array:
                return None
        return value

    def keep(self, key: Any, value: Any, *arrays: Array) -> Any:
        """Keeps a value, and gives it back."""
        if len(self._entries) >= LIMIT:
            self._entries.clear()
        self._entries[key] = value, tuple(map(ref, arrays))
        return value
