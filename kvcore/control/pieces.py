"""A sorted list in pieces: insertion, deletion and neighbours in O(sqrt n), cheaply."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

LOAD = 512  # a piece is split at twice as many

Key = TypeVar("Key", int, bytes)


class SortedPieces(Generic[Key]):
    """Distinct keys in ascending order.

    >>> keys = SortedPieces([5, 1, 3])
    >>> keys.add(2); keys.remove(3); list(keys), keys.first(), keys.neighbours(3)
    ([1, 2, 5], 1, (2, 5))
    """

    __slots__ = ("_last", "_pieces")

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        ordered = sorted(keys)
        self._pieces: list[list[Key]] = [
            ordered[start : start + LOAD] for start in range(0, len(ordered), LOAD)
        ]
        self._last: list[Key] = [piece[-1] for piece in self._pieces]

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Key]:
        for piece in self._pieces:
            yield from piece

    def first(self) -> Key:
        """The smallest key. There is one."""
        return self._pieces[0][0]

    def add(self, key: Key) -> None:
        """Adds a key that is not there."""
        last, pieces = self._last, self._pieces
        if not last:
            pieces.append([key])
            last.append(key)
            return
        where = bisect_left(last, key)
        if where == len(last):
            where -= 1
            pieces[where].append(key)
            last[where] = key
        else:
            insort(pieces[where], key)
        piece = pieces[where]
        if len(piece) > 2 * LOAD:
            pieces.insert(where + 1, piece[LOAD:])
            del piece[LOAD:]
            last.insert(where, piece[-1])

    def remove(self, key: Key) -> None:
        """Removes a key that is there; the first one at no cost."""
        first = self._pieces[0]
        if first[0] == key and len(first) > 1:
            del first[0]
            return
        where = bisect_left(self._last, key)
        piece = self._pieces[where]
        del piece[bisect_left(piece, key)]
        if piece:
            self._last[where] = piece[-1]
        else:
            del self._pieces[where], self._last[where]

    def neighbours(self, key: Key) -> tuple[Key | None, Key | None]:
        """The largest key below `key`, and the smallest that is not below it."""
        where = bisect_left(self._last, key)
        if where == len(self._last):
            return (self._last[-1] if self._last else None), None
        piece = self._pieces[where]
        index = bisect_left(piece, key)
        if index:
            return piece[index - 1], piece[index]
        return (self._last[where - 1] if where else None), piece[0]
