"""A sorted map in pieces: insertion, deletion and neighbours in O(sqrt n), cheaply."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

LOAD = 512  # a piece is split at twice as many

Key = TypeVar("Key", int, bytes)
Value = TypeVar("Value")


class SortedPieces(Generic[Key, Value]):
    """Values by distinct keys, in ascending order of the keys.

    >>> names = SortedPieces([(5, "five"), (1, "one"), (3, "three")])
    >>> names.put(2, "two"); names.remove(3); list(names), names.first()
    (['one', 'two', 'five'], 'one')
    >>> names.neighbours(3)
    ['two', 'five']
    """

    __slots__ = ("_keys", "_last", "_next", "_values")

    def __init__(self, items: Iterable[tuple[Key, Value]] = ()) -> None:
        ordered = sorted(items, key=lambda item: item[0])
        starts = range(0, len(ordered), LOAD)
        self._keys: list[list[Key]] = [[k for k, _ in ordered[at : at + LOAD]] for at in starts]
        self._values: list[list[Value]] = [[v for _, v in ordered[at : at + LOAD]] for at in starts]
        self._last: list[Key] = [piece[-1] for piece in self._keys]
        self._next = 0  # the piece to sift next

    def __bool__(self) -> bool:
        return bool(self._last)

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __iter__(self) -> Iterator[Value]:
        for piece in self._values:
            yield from piece

    def first(self) -> Value | None:
        """The value of the smallest key; None if there is no key."""
        return self._values[0][0] if self._values else None

    def put(self, key: Key, value: Value) -> None:
        """Adds a key, or gives one that is there another value."""
        last = self._last
        if not last:
            self._keys.append([key])
            self._values.append([value])
            last.append(key)
            return
        where = bisect_left(last, key)
        if where == len(last):  # beyond all: the usual case of keys that rise
            where -= 1
            last[where] = key
            at = len(self._keys[where])
        else:
            at = bisect_left(self._keys[where], key)
            if self._keys[where][at] == key:
                self._values[where][at] = value
                return
        keys = self._keys[where]
        keys.insert(at, key)
        self._values[where].insert(at, value)
        if len(keys) > 2 * LOAD:
            self._split(where)

    def _split(self, where: int) -> None:
        keys, values = self._keys[where], self._values[where]
        self._keys.insert(where + 1, keys[LOAD:])
        self._values.insert(where + 1, values[LOAD:])
        del keys[LOAD:], values[LOAD:]
        self._last.insert(where, keys[-1])

    def remove(self, key: Key) -> None:
        """Removes a key that is there."""
        where = bisect_left(self._last, key)
        keys = self._keys[where]
        at = bisect_left(keys, key)
        del keys[at], self._values[where][at]
        if not keys:
            del self._keys[where], self._values[where], self._last[where]
        elif at == len(keys):
            self._last[where] = keys[-1]

    def pop_first(self) -> Value:
        """Removes the smallest key and returns its value. There is one."""
        keys, values = self._keys[0], self._values[0]
        value = values.pop(0)
        del keys[0]
        if not keys:
            del self._keys[0], self._values[0], self._last[0]
        return value

    def neighbours(self, key: Key) -> list[Value]:
        """The values of the largest key below `key` and the smallest not below it, if any."""
        where = bisect_left(self._last, key)
        if where == len(self._last):
            return self._values[-1][-1:] if self._last else []
        at = bisect_left(self._keys[where], key)
        if at:
            return self._values[where][at - 1 : at + 1]
        first = self._values[where][0]
        return [self._values[where - 1][-1], first] if where else [first]

    def sift_next(self, keep: Callable[[Value], bool]) -> None:
        """Drops what need not be kept from one piece, another one at each call. O(LOAD)."""
        if self._last:
            self._next = self._next % len(self._last)
            self._next += self._sift(self._next, keep)

    def sift_at(self, key: Key, keep: Callable[[Value], bool]) -> None:
        """`sift_next` of the pieces on both sides of `key`."""
        where = bisect_left(self._last, key)
        for piece in (where, where - 1):
            if 0 <= piece < len(self._last):
                self._sift(piece, keep)

    def _sift(self, where: int, keep: Callable[[Value], bool]) -> int:
        """Pieces that are left of one: 1, or 0 if nothing of it was kept."""
        pairs = zip(self._keys[where], self._values[where], strict=True)
        kept = [(key, value) for key, value in pairs if keep(value)]
        if not kept:
            del self._keys[where], self._values[where], self._last[where]
            return 0
        self._keys[where] = [key for key, _ in kept]
        self._values[where] = [value for _, value in kept]
        self._last[where] = kept[-1][0]
        return 1
