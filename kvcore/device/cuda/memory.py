"""Pool memory: address ranges of CUDA virtual memory that grow and shrink at their end.

A `Range` owns the addresses and what is mapped there. `CudaMemory` is the handle that callers
close, and arrays are views that keep the range, so a view that outlives its memory faults instead
of reading what somebody else put at the same addresses.
"""

from __future__ import annotations

import threading
import warnings
from functools import cached_property
from math import prod
from typing import Any, Final, Protocol
from weakref import WeakSet

import numpy as np
from cuda.bindings import driver

from kvcore.device.base import Array
from kvcore.device.cuda.blocks import Graveyard, allocate, view
from kvcore.device.cuda.driver import Context, check
from kvcore.device.holds import Holds
from kvcore.errors import OutOfMemoryError, StateError, wrong, wrong_type
from kvcore.ids import align_up

WHOLE_AT_ONCE: Final = 256 << 20
"""Bytes up to which a device without virtual memory backs a whole range from the start."""


class Follower(Protocol):
    """Something that has to know how much of a range is backed."""

    def pool_resized(self, memory: CudaMemory, nbytes: int) -> None:
        """`memory` has grown to `nbytes`, or will shrink to them when this returns."""
        ...


class Mapper:
    """Creates and maps physical memory of one device."""

    def __init__(self, context: Context, graveyard: Graveyard) -> None:
        self.context, self.graveyard = context, graveyard

    @cached_property
    def supported(self) -> bool:
        """Whether the device has virtual memory management."""
        return bool(self.context.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))

    @cached_property
    def granularity(self) -> int:
        """Bytes that physical memory comes in."""
        if not self.supported:
            return 1 << 21
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        result = driver.cuMemGetAllocationGranularity(self.properties, flag)
        return int(check("cuMemGetAllocationGranularity", result))

    @cached_property
    def properties(self) -> Any:
        """What physical memory is: the device's, exportable as a file descriptor if that works."""
        types = driver.CUmemAllocationHandleType
        shared = self._properties(types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        if not self.context.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            return self._properties(types.CU_MEM_HANDLE_TYPE_NONE)
        # Containers may forbid what the device can do: try it once.
        with self.context.current():
            error, handle = driver.cuMemCreate(self._smallest(shared), shared, 0)
            if error and int(error) != int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
                return self._properties(types.CU_MEM_HANDLE_TYPE_NONE)
            if not error:
                check("cuMemRelease", driver.cuMemRelease(handle))
        return shared

    @cached_property
    def access(self) -> Any:
        """Reading and writing from the device itself."""
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.context.device_id
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def map(self, address: int, nbytes: int) -> None:
        """Backs `nbytes` at `address` with new physical memory, freed when it is unmapped."""
        handle = check("cuMemCreate", driver.cuMemCreate(nbytes, self.properties, 0))
        try:
            check("cuMemMap", driver.cuMemMap(address, nbytes, 0, handle, 0))
        finally:
            # The mapping holds the memory from now on; without one this frees it.
            check("cuMemRelease", driver.cuMemRelease(handle))

    def open(self, address: int, nbytes: int) -> None:
        """Lets the device read and write mapped memory."""
        result = driver.cuMemSetAccess(address, nbytes, [self.access], 1)
        check("cuMemSetAccess", result)

    def unmap(self, address: int, nbytes: int) -> None:
        """Gives back whole mappings."""
        check("cuMemUnmap", driver.cuMemUnmap(address, nbytes))

    def _properties(self, handle_type: Any) -> Any:
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.context.device_id
        properties.requestedHandleTypes = handle_type
        return properties

    def _smallest(self, properties: Any) -> int:
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        result = driver.cuMemGetAllocationGranularity(properties, flag)
        return int(check("cuMemGetAllocationGranularity", result))


class Range:
    """Addresses, backed from their start by chunks of one grain each."""

    def __init__(self, mapper: Mapper, reserved: int, grain: int) -> None:
        self.mapper, self.reserved, self.grain, self.nbytes = mapper, reserved, grain, 0
        with mapper.context.current():
            result = driver.cuMemAddressReserve(reserved, 0, 0, 0)
            self.base = int(check("cuMemAddressReserve", result))

    @property
    def capacity(self) -> int:
        """Bytes that can be backed."""
        return self.reserved

    def grow(self, nbytes: int) -> None:
        """Backs the first `nbytes`, all or nothing."""
        mapper, old = self.mapper, self.nbytes
        mapped = old
        with mapper.context.current():
            try:
                while mapped < nbytes:
                    mapper.map(self.base + mapped, self.grain)
                    mapped += self.grain
                mapper.open(self.base + old, nbytes - old)
            except BaseException:
                if mapped > old:
                    mapper.unmap(self.base + old, mapped - old)
                raise
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back what lies behind the first `nbytes`."""
        with self.mapper.context.current():
            self.mapper.unmap(self.base + nbytes, self.nbytes - nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        """Gives everything back but the addresses, which live as long as this object."""
        if self.nbytes:
            self.shrink(0)

    def __del__(self) -> None:
        base = getattr(self, "base", 0)
        if not base:
            return
        if self.nbytes:
            text = f"{self.nbytes} bytes of pool memory were not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2)
            self.mapper.graveyard.bury("cuMemUnmap", base, self.nbytes)
        self.mapper.graveyard.bury("cuMemAddressFree", base, self.reserved)


class PlainRange:
    """The same without virtual memory: one allocation, backed as a whole from the start."""

    def __init__(self, mapper: Mapper, reserved: int, nbytes: int) -> None:
        self.mapper, self.reserved, self.nbytes = mapper, reserved, 0
        small = reserved <= WHOLE_AT_ONCE or not nbytes
        self.capacity = min(reserved, WHOLE_AT_ONCE) if small else nbytes
        with mapper.context.current():
            self.base = allocate(self.capacity, mapper.graveyard)

    def grow(self, nbytes: int) -> None:
        """Counts `nbytes` as backed."""
        if nbytes > self.capacity:
            raise OutOfMemoryError(
                f"{nbytes} bytes of pool memory: this device has no virtual memory management, so "
                f"a pool cannot grow beyond the {self.capacity} bytes it was made with"
            )
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Counts `nbytes` as backed; the allocation stays until the end."""
        self.nbytes = nbytes

    def release(self) -> None:
        """Gives the allocation back."""
        with self.mapper.context.current():
            check("cuMemFree", driver.cuMemFree(self.base))
        self.base = self.nbytes = self.capacity = 0

    def __del__(self) -> None:
        if getattr(self, "base", 0):
            self.mapper.graveyard.bury("cuMemFree", self.base)


class CudaMemory:
    """Memory of a pool: the first `nbytes` bytes of a range."""

    def __init__(self, mapper: Mapper, max_bytes: int, nbytes: int, grain: int) -> None:
        grain = align_up(grain, mapper.granularity)
        reserved = max(align_up(max_bytes, grain), grain)
        self._grain, self._lock = grain, threading.RLock()
        self._followers: WeakSet[Any] = WeakSet()
        self.holds = Holds()
        mapper.graveyard.drain()
        self._range: Range | PlainRange | None = (
            Range(mapper, reserved, grain)
            if mapper.supported
            else PlainRange(mapper, reserved, align_up(nbytes, grain))
        )
        self._base, self._reserved, self._mapper = self._range.base, reserved, mapper
        self.resize(nbytes)

    @property
    def context(self) -> Context:
        """The context of the device it lies on."""
        return self._mapper.context

    @property
    def base(self) -> int:
        return self._base

    @property
    def nbytes(self) -> int:
        return 0 if self._range is None else self._range.nbytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._range is None

    def follow(self, follower: Follower) -> None:
        """Tells `follower` of every change of `nbytes`, for as long as it lives."""
        self._followers.add(follower)

    def resize(self, nbytes: int) -> None:
        with self._lock:
            pages = self._open()
            if not 0 <= nbytes <= self._reserved:
                remedy = "reserve more at the start"
                raise wrong("nbytes", f"0 to the {self._reserved} reserved", nbytes, remedy)
            nbytes, old = align_up(nbytes, self._grain), pages.nbytes
            if nbytes > old:
                self._grow(pages, nbytes)
                try:
                    self._tell(nbytes)
                except BaseException:
                    self._tell(old)
                    pages.shrink(old)
                    raise
            elif nbytes < old:
                self.holds.refuse("resize", nbytes)
                # Followers first, so that no later kernel goes where nothing will be.
                self._tell(nbytes)
                pages.shrink(nbytes)

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        pages, dtype = self._open(), np.dtype(dtype)
        if offset < 0 or offset % dtype.itemsize:
            raise wrong("offset", f"a multiple of the item size {dtype.itemsize}", offset)
        nbytes = prod(shape) * dtype.itemsize
        if offset + nbytes > self._reserved:
            text = f"a view inside the reserved range of {self._reserved}"
            raise wrong("shape", text, offset + nbytes)
        device_id = self._mapper.context.device_id
        return view(self._base + offset, nbytes, pages, device_id, tuple(shape), dtype)

    def close(self) -> None:
        with self._lock:
            pages = self._range
            if pages is None:
                return
            self.holds.refuse("close")
            self._tell(0)
            pages.release()
            self._range = None
        del pages
        # Where no view keeps it, the range was left in the graveyard just now.
        self._mapper.graveyard.drain()

    def _grow(self, pages: Range | PlainRange, nbytes: int) -> None:
        """Where there is no memory left, frees what is buried and tries again."""
        graveyard = self._mapper.graveyard
        try:
            pages.grow(nbytes)
        except OutOfMemoryError:
            if not len(graveyard):
                raise
            graveyard.drain()
            pages.grow(nbytes)

    def _open(self) -> Range | PlainRange:
        if self._range is None:
            raise StateError("memory: this range was closed")
        return self._range

    def _tell(self, nbytes: int) -> None:
        for follower in list(self._followers):
            follower.pool_resized(self, nbytes)


def own_memory(memory: object, context: Context) -> CudaMemory:
    """The memory, checked to be an open one of the context's device."""
    text = f"memory reserved on cuda:{context.device_id}"
    if not isinstance(memory, CudaMemory):
        raise wrong_type("memory", text, memory)
    if memory.context is not context:
        raise wrong("memory", text, memory)
    if memory.closed:
        raise StateError("memory: this range was closed")
    return memory
