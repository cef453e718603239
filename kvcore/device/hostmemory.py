"""Pool memory of the devices without a GPU: pages of the operating system, or addresses only."""

from __future__ import annotations

import mmap
import sys
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array
from kvcore.device.holds import Holds
from kvcore.errors import OutOfMemoryError, StateError, wrong, wrong_type
from kvcore.ids import align_up

POISON: Final = 0xA5
"""Byte of memory that nobody has written, on a deferred device."""

POISON_LIMIT: Final = 256 << 20
"""Growth beyond so many bytes stays unpoisoned: poison makes the system back it at once."""

MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13; the value is Linux's


class HostMemory:
    """Anonymous pages of the operating system, backed when they are first touched.

    Views stay valid for as long as they live, also after `close`: the addresses are unmapped when
    the last view is gone, and until then read as zeros.
    """

    def __init__(self, max_bytes: int, nbytes: int, grain: int, *, poison: bool) -> None:
        self._grain, self._poison, self._nbytes = grain, poison, 0
        self.holds = Holds()
        self._map: mmap.mmap | None = _map_pages(max(align_up(max_bytes, grain), grain))
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = int(self._bytes.ctypes.data)
        self.resize(nbytes)

    @property
    def base(self) -> int:
        return self._base

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def backed(self) -> NDArray[np.uint8]:
        """The backed bytes."""
        return self._bytes[: self._nbytes]

    def resize(self, nbytes: int) -> None:
        nbytes = _checked_size(self.closed, nbytes, len(self._bytes), self._grain)
        if nbytes < self._nbytes:
            self.holds.refuse("resize", nbytes)
        old, self._nbytes = self._nbytes, nbytes
        if nbytes < old:
            self._release(nbytes, old)
        elif self._poison and nbytes - old <= POISON_LIMIT:
            self._bytes[old:nbytes] = POISON

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        if self._map is None:
            raise StateError("memory: this range was closed")
        dtype, reserved = np.dtype(dtype), len(self._bytes)
        if offset < 0 or offset % dtype.itemsize:
            raise wrong("offset", f"a multiple of the item size {dtype.itemsize}", offset)
        end = offset + prod(shape) * dtype.itemsize
        if end > reserved:
            raise wrong("shape", f"a view inside the reserved range of {reserved}", end)
        return np.ndarray(shape, dtype, self._bytes, offset)

    def close(self) -> None:
        self.holds.refuse("close")
        if self._map is not None:
            self._release(0, self._nbytes)
        self._map, self._bytes, self._nbytes = None, np.zeros(0, np.uint8), 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    def _release(self, start: int, end: int) -> None:
        start = align_up(start, mmap.PAGESIZE)
        if self._map is not None and start < end and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class MetaMemory:
    """Addresses without memory."""

    def __init__(self, base: int, max_bytes: int, nbytes: int, grain: int) -> None:
        self._base, self._max_bytes, self._grain, self._nbytes = base, max_bytes, grain, 0
        self.closed, self.holds = False, Holds()
        self.resize(nbytes)

    @property
    def base(self) -> int:
        return self._base

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def resize(self, nbytes: int) -> None:
        self._nbytes = _checked_size(self.closed, nbytes, self._max_bytes, self._grain)

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        raise StateError("a meta device has pages without memory; there is nothing to view")

    def close(self) -> None:
        self._nbytes, self.closed = 0, True


def check_reserve(max_bytes: int, nbytes: int, grain: int) -> None:
    """Checks the arguments of `Device.reserve`."""
    if grain < 1:
        raise wrong("grain", "at least 1", grain)
    if max_bytes < 0:
        raise wrong("max_bytes", "at least 0", max_bytes)
    if not 0 <= nbytes <= max_bytes:
        raise wrong("nbytes", f"0 to max_bytes={max_bytes}", nbytes)


def no_memory() -> StateError:
    """What operations of a meta device raise."""
    return StateError("a meta device stores nothing; open a host or cuda device to move bytes")


def own_memory(memory: object) -> HostMemory:
    """The memory, checked to be an open one of a host device."""
    if isinstance(memory, MetaMemory):
        raise no_memory()
    if not isinstance(memory, HostMemory):
        raise wrong_type("memory", "memory reserved on a host device", memory)
    if memory.closed:
        raise StateError("memory: this range was closed")
    return memory


def _checked_size(closed: bool, nbytes: int, reserved: int, grain: int) -> int:
    """`nbytes` rounded up to the grain, if it may be backed."""
    if closed:
        raise StateError("memory: this range was closed")
    if not 0 <= nbytes <= reserved:
        raise wrong("nbytes", f"0 to the {reserved} reserved", nbytes, "reserve more at the start")
    return align_up(nbytes, grain)


def _map_pages(nbytes: int) -> mmap.mmap:
    """Private anonymous pages; nothing is backed before it is touched."""
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(-1, nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if sys.platform == "linux":
            flags |= MAP_NORESERVE
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemoryError(f"{nbytes} bytes of host addresses: {error}") from error
