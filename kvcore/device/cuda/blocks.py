"""Small device and pinned memory: who owns it, when it is reused, when it is given back.

Objects that are dropped never call the driver: that may be forbidden in the thread and at the
moment where Python finds them (a graph is being captured, another context is current, the process
was forked). They leave their addresses behind, which are freed when something explicit allocates
or closes, and only while the device is idle.
"""

from __future__ import annotations

import warnings
from collections import deque
from ctypes import c_void_p
from functools import cache
from typing import Any, Final

import cupy
import numpy as np
from numpy.typing import NDArray

from kvcore.device.cuda.driver import Context, context_of
from kvcore.errors import KVCoreError, OutOfMemoryError

SMALLEST: Final = 512  # bytes
STEPPED: Final = 1 << 20  # bytes: from here on eight sizes per octave, powers of two below
PORTABLE_AND_MAPPED: Final = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
HEADER: Final = object.__basicsize__
NEED_IDLE: Final = frozenset({"cuMemFree", "cuMemUnmap", "cuMemFreeHost"})
"""Calls that free what enqueued work may still use."""

Call = tuple[str, tuple[Any, ...]]


class Graveyard:
    """What dropped objects left, freed in their device's context."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._calls: deque[Call] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def bury(self, call: str, *args: Any) -> None:
        """Remembers a driver call that frees something. Any thread, any moment."""
        self._calls.append((call, args))

    def give(self, size: int, pointer: int) -> None:
        """Takes device memory that nobody is to have again."""
        self.bury("cuMemFree", pointer)

    def drain(self) -> None:
        """Frees everything. BLOCKS until the device is idle if memory is among it."""
        if not self._calls:
            return
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        with self.context.current():
            if any(call in NEED_IDLE for call, _ in calls):
                self.context.synchronize()
            for call, args in calls:
                try:
                    self.context.call(call, *args)
                except KVCoreError as error:
                    warnings.warn(f"kvcore could not free memory: {error}", stacklevel=2)


@cache
def graveyard_of(device_id: int) -> Graveyard:
    """The one `Graveyard` of a device: a new `CudaDevice` frees what older ones left."""
    return Graveyard(context_of(device_id))


class Block:
    """Device memory of one array."""

    __slots__ = ("__weakref__", "_home", "pointer", "size")

    def __init__(self, pointer: int, size: int, home: BlockPool | Graveyard) -> None:
        self.pointer, self.size, self._home = pointer, size, home

    def __del__(self) -> None:
        self._home.give(self.size, self.pointer)


class BlockPool:
    """Blocks that one stream's arrays hand on to each other, in the order of that stream."""

    def __init__(self, graveyard: Graveyard) -> None:
        self._graveyard = graveyard
        self._free: dict[int, list[int]] = {}

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes` bytes."""
        size = round_up(nbytes)
        free = self._free.setdefault(size, [])
        try:
            pointer = free.pop()
        except IndexError:
            pointer = allocate(size, self._graveyard)
        return Block(pointer, size, self)

    def give(self, size: int, pointer: int) -> None:
        """Takes a block back; later arrays of the stream may have it."""
        self._free[size].append(pointer)

    def clear(self) -> None:
        """Leaves all free blocks to the graveyard."""
        for free in list(self._free.values()):
            while free:
                self._graveyard.bury("cuMemFree", free.pop())

    def __del__(self) -> None:
        self.clear()


def allocate(nbytes: int, graveyard: Graveyard) -> int:
    """Plain device memory; where there is none left, frees what is buried and tries again."""
    call = graveyard.context.call
    try:
        return int(call("cuMemAlloc", nbytes))
    except OutOfMemoryError:
        if not len(graveyard):
            raise
    graveyard.drain()
    return int(call("cuMemAlloc", nbytes))


def round_up(nbytes: int) -> int:
    """The size of block for an array: few enough sizes that they are found again.

    >>> [round_up(n) for n in (1, 513, 1 << 20, (1 << 20) + 1)]
    [512, 1024, 1048576, 1179648]
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    power = 1 << (nbytes - 1).bit_length()
    step = power if nbytes <= STEPPED else power >> 4
    return -(-nbytes // step) * step


class Pinned:
    """Pinned host memory that kernels of any device read at its host address."""

    def __init__(self, pointer: int, nbytes: int, graveyard: Graveyard) -> None:
        self._pointer, self._graveyard = pointer, graveyard
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        self._graveyard.bury("cuMemFreeHost", self._pointer)


def pinned(nbytes: int, graveyard: Graveyard) -> NDArray[np.uint8]:
    """A byte array in pinned memory, which lives as long as the array or a view of it."""
    pointer = int(graveyard.context.call("cuMemHostAlloc", max(nbytes, 1), PORTABLE_AND_MAPPED))
    return np.asarray(Pinned(pointer, nbytes, graveyard))


def view(
    pointer: int, nbytes: int, owner: object, device_id: int, shape: tuple[int, ...], dtype: Any
) -> Any:
    """A C-contiguous CuPy array over memory that is not CuPy's; keeps `owner` alive."""
    memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner, device_id)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def address(array: NDArray[Any]) -> int:
    """The first byte of a NumPy array.

    NumPy's binary interface keeps it in the field behind the object's header. Read from there: the
    documented ways (`ctypes.data`, `__array_interface__`) build objects around it and take longer
    than a launch. `trusts_header` says whether this holds.
    """
    return c_void_p.from_address(id(array) + HEADER).value or 0


def trusts_header() -> bool:
    """Whether `address` is right in this interpreter."""
    array = np.zeros(8, np.int32)
    return address(array) == array.ctypes.data and address(array[3:]) == array.ctypes.data + 12
