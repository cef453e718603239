"""Exceptions by cause: capacity (free something and retry), caller, driver, our bug.

Wrong arguments are plain `ValueError` or `TypeError`, made by `wrong` and `wrong_type` so that each
names the argument, what was expected, what came and what to do.
"""

from __future__ import annotations

from typing import Any, Final

MOST_SHOWN: Final = 400
"""Characters of an argument that a message shows."""


class KVCoreError(Exception):
    """Base of everything kvcore raises that is not a plain `ValueError` or `TypeError`."""


class CacheCapacityError(KVCoreError):
    """A cache level is full. Nothing changed; the call can be retried once pages were freed."""


class OutOfPagesError(CacheCapacityError):
    """No page can be freed for this request now.

    Parameters
    ----------
    message : str
        What could not be done.
    missing : int
        How many pages were short; 0 if that is unknown, or something else was short.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.missing)


class OutOfMemoryError(CacheCapacityError, MemoryError):
    """The driver or the operating system has no memory left for a pool."""


class StateError(KVCoreError, RuntimeError):
    """The call is not allowed in the object's present state (closed, suspended, still in use)."""


class ParentsPending(StateError):  # noqa: N818 - a state, as asyncio names its own
    """The beams of a sequence were reordered on the device and the host does not know how yet.

    `KVCache.settle` waits for it; most calls only need to come a step later.
    """


class LeaseInUse(StateError):  # noqa: N818 - a state, as asyncio names its own
    """Memory can't be given up: somebody still holds an array of it, or a lease is open."""


class DriverError(KVCoreError, RuntimeError):
    """A CUDA call failed.

    Parameters
    ----------
    call : str
        Name of the call.
    code : int
        Its result code.
    text : str
        The driver's name and explanation of that code.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed with {code}: {text}")
        self.call, self.code, self.text = call, code, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.call, self.code, self.text)


class InternalError(KVCoreError):
    """An invariant of kvcore does not hold: our bug, please report it."""


def wrong(name: str, expected: str, got: object, remedy: str = "") -> ValueError:
    """The `ValueError` for an argument with a wrong value.

    >>> str(wrong("beam_width", "at least 1", 0, "close the cache instead"))
    'beam_width: expected at least 1, got 0; close the cache instead'
    """
    text = f"{name}: expected {expected}, got {_shown(got)}"
    return ValueError(text + (f"; {remedy}" if remedy else ""))


def wrong_type(name: str, expected: str, got: object, remedy: str = "") -> TypeError:
    """The `TypeError` for an argument of a wrong type.

    >>> str(wrong_type("role", "a str", 3))
    'role: expected a str, got int (3)'
    """
    text = f"{name}: expected {expected}, got {type(got).__name__} ({_shown(got)})"
    return TypeError(text + (f"; {remedy}" if remedy else ""))


def _shown(got: object) -> str:
    """What a message shows of an argument: the beginning, where it is long."""
    text = repr(got)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
