"""The structures that are out, each in the hands of a consumer until it calls the deleter.

Consumers call deleters from any thread, with or without the interpreter's lock, while an exception
is on its way, and some of them after the interpreter is gone. No callback written in Python
survives all of that: one made by ctypes loses the exception. So the structures, their deleters and
the capsules are NumPy's, which are compiled and made for it. NumPy exports an array of integers
that lies where ours lies; what it wrote into the structure is then corrected in place: element
type, device, flags, version. Its deleter drops that array, which is how the end of a use is
noticed.

When the interpreter ends, the deleter of every structure that is still out becomes a C function
that does nothing: no consumer calls into an interpreter that is going or gone, and what it holds
stays in place until the process is gone. A null pointer, which the protocol allows, would not do:
JAX looks at it when it takes an array and calls it when the array goes. Handlers of `atexit` that
were registered since kvcore was imported come before, and may close leases and managers.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from ctypes import c_void_p, cast, pythonapi
from functools import cache
from typing import Any, Final

from numpy.typing import NDArray

from kvcore.dlpack.capsules import api
from kvcore.dlpack.patterns import Pattern

GRACE: Final = 1e-3
"""Seconds that consumers have, as the interpreter ends, to leave a deleter they just called."""

Release = Callable[[], None]


class Exports:
    """All structures of the process that consumers may still use."""

    ending = False
    """Whether the interpreter is about to be gone."""

    def __init__(self) -> None:
        self._out: dict[int, tuple[weakref.ref[NDArray[Any]], int, Release | None]] = {}
        # Takes no argument and may be called at any time, also without an interpreter.
        self._nothing = cast(pythonapi.Py_IsInitialized, c_void_p).value
        self._pointer = api().pointer

    def __len__(self) -> int:
        return len(self._out)

    def capsule(self, pattern: Pattern, release: Release | None = None) -> Any:
        """A new capsule.

        Parameters
        ----------
        pattern : Pattern
            Its array is kept alive until the consumer calls the deleter, or the capsule is dropped
            unused.
        release : callable, optional
            Called when the consumer is done, in whatever thread that happens: it must neither block
            nor raise, and a second call must do nothing. Also called where there is an error.
        """
        try:
            array = pattern.array[...]
            capsule = array.__dlpack__(max_version=pattern.version)
            start = self._pointer(capsule, pattern.name)
            for place, kind, content in pattern.corrections:
                kind.from_address(start + place).raw = content
            for place, kind, content in pattern.axes:
                pointer = c_void_p.from_address(start + place).value or 0
                kind.from_address(pointer).raw = content
            seen = weakref.ref(array, self._gone)
            self._out[id(seen)] = seen, start + pattern.deleter, release
            if self.ending:
                c_void_p.from_address(start + pattern.deleter).value = self._nothing
        except BaseException:
            if release is not None:
                release()
            raise
        return capsule

    def _gone(self, seen: weakref.ref[NDArray[Any]]) -> None:
        """A consumer dropped its array, in any thread."""
        _, _, release = self._out.pop(id(seen))
        if release is not None:
            release()

    def silence(self) -> None:
        """No consumer calls back any more; what they hold stays where it is."""
        out = list(self._out.values())
        for seen, deleter, _ in out:
            # NumPy's deleter frees the structure and drops the array without letting go of the
            # interpreter's lock in between: where the array is alive, so is the structure.
            array = seen()
            if array is not None:
                c_void_p.from_address(deleter).value = self._nothing
        if out:
            time.sleep(GRACE)


@cache
def exports() -> Exports:
    """The one `Exports` of the process."""
    return Exports()


@atexit.register
def _end() -> None:
    Exports.ending = True
    if exports.cache_info().currsize:
        exports().silence()
