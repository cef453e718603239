"""Compiled kernels, loaded once per device, and launches with their argument block prepared."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from cuda.bindings.driver import cuCtxGetCurrent, cuLaunchKernel

from kvcore.device.base import Stream
from kvcore.device.cuda.arguments import Fields
from kvcore.device.cuda.driver import Context, context_of, failure
from kvcore.device.cuda.kernels import Source
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong, wrong_type

USUAL_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a launch may have without asking."""

STATIC_SHARED = 1 << 10
"""Bytes that kernels with dynamic shared memory have beside it, at most."""


def most_shared(context: Context) -> int:
    """Bytes of dynamic shared memory that a launch can ask for."""
    return context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - STATIC_SHARED


@cache
def load(device_id: int, source: Source) -> Mapping[str, Any]:
    """The entry points of a source on one device: objects with the function's handle as `ptr`.

    CuPy compiles them for the device and keeps the binary on disk, keyed by text and options. It
    calls the CUDA runtime, which remembers the device as the thread's current one, for good where
    no context was current before: so a thread that ends does it.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_load, context_of(device_id), source).result()


def _load(context: Context, source: Source) -> Mapping[str, Any]:
    with context.current():
        module = cupy.RawModule(code=source.text(), options=source.options())
        found = {name: module.get_function(name).kernel for name in source.entries}
        for function in found.values():
            _load_now(function.ptr)
        return MappingProxyType(found)


def _load_now(function: int) -> None:
    """Keeps the driver from loading a kernel at its first launch, which may wait for others."""
    # Drivers before CUDA 12.4 do not have the call: there the first launch loads.
    with suppress(AttributeError, RuntimeError):
        driver.cuFuncLoad(driver.CUfunction(function))


class Launch:
    """One kernel with an argument block of its own.

    The block is filled with constants once. A call packs the rest into its start and enqueues the
    kernel through one driver call, which copies the block: it can be packed again at once. Calls
    may come from several threads.

    Parameters
    ----------
    context : Context
        The device's.
    name : str
        The entry point, for messages.
    function : object
        What `load` has for it.
    fields : numpy.dtype
        Layout of the block.
    threads : int
        Threads of a block of the grid.
    head : str
        `struct` format of what each call packs.
    shared : int, default 0
        Bytes of dynamic shared memory.
    """

    __slots__ = (
        "_bytes",
        "_context",
        "_function",
        "_keep",
        "_lock",
        "_made_of",
        "_pack",
        "_params",
        "_shared",
        "block",
        "name",
        "threads",
    )

    def __init__(
        self,
        context: Context,
        name: str,
        function: Any,
        fields: Fields,
        threads: int,
        head: str,
        shared: int = 0,
    ) -> None:
        self.name, self.threads, self._shared = name, threads, shared
        self._made_of = context, name, function, fields, threads, head, shared
        self._bytes = bytearray(fields.itemsize)
        self.block: Any = np.frombuffer(self._bytes, fields)
        params = np.array([self.block.ctypes.data], np.uint64)  # void* kernelParams[1]
        self._params = int(params.ctypes.data)
        self._keep = params, function
        self._function = driver.CUfunction(function.ptr)
        if shared > USUAL_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            most = most_shared(context)  # for all launches of the function
            context.call("cuFuncSetAttribute", self._function, attribute, most)
        self._context, self._lock = context, threading.RLock()
        self._pack = struct.Struct(head).pack_into

    def __call__(self, stream: Any, x: int, y: int, z: int, *values: int) -> None:
        """Enqueues the kernel over a grid of `x * y * z` blocks, none of them 0.

        `values` are packed into the start of the block.
        """
        context = self._context
        if stream.__class__ is not CudaStream or stream.context is not context:
            raise _wrong_stream(stream, context)
        with self._lock:
            self._pack(self._bytes, 0, *values)
            if cuCtxGetCurrent()[1] == context.handle:
                error = cuLaunchKernel(
                    self._function,
                    x,
                    y,
                    z,
                    self.threads,
                    1,
                    1,
                    self._shared,
                    stream.native,
                    self._params,
                    0,
                )[0]
            else:
                error = self._elsewhere(stream, x, y, z)
        if error:
            raise failure(f"cuLaunchKernel of {self.name}", int(error))

    def with_ids(
        self, stream: Any, x: int, y: int, z: int, ids: Any, at: Any, *values: int
    ) -> None:
        """The same, after writing `ids` to `at`, a view of the block."""
        with self._lock:
            at[...] = ids
            self(stream, x, y, z, *values)

    def fixed(self, x: int, y: int, z: int, *values: int) -> Callable[[Stream], None]:
        """`bound`, on a copy of the block: this launch can go on with other values."""
        twin = Launch(*self._made_of)
        twin._bytes[:] = self._bytes
        return twin.bound(x, y, z, *values)

    def bound(self, x: int, y: int, z: int, *values: int) -> Callable[[Stream], None]:
        """The launch with everything fixed but the stream: the block is packed for good."""
        self._pack(self._bytes, 0, *values)
        function, params, context = self._function, self._params, self._context
        threads, shared = self.threads, self._shared

        def launch(stream: Any) -> None:
            if stream.__class__ is not CudaStream or stream.context is not context:
                raise _wrong_stream(stream, context)
            if cuCtxGetCurrent()[1] == context.handle:
                error = cuLaunchKernel(
                    function, x, y, z, threads, 1, 1, shared, stream.native, params, 0
                )[0]
            else:
                error = self._elsewhere(stream, x, y, z)
            if error:
                raise failure(f"cuLaunchKernel of {self.name}", int(error))

        return launch

    def _elsewhere(self, stream: CudaStream, x: int, y: int, z: int) -> Any:
        """Launches while another device's context is current, which then is so again."""
        with self._context.current():
            return cuLaunchKernel(
                self._function,
                x,
                y,
                z,
                self.threads,
                1,
                1,
                self._shared,
                stream.native,
                self._params,
                0,
            )[0]


def _wrong_stream(stream: object, context: Context) -> Exception:
    expected = f"a stream of cuda:{context.device_id}"
    if isinstance(stream, CudaStream):
        return wrong("stream", expected, stream)
    return wrong_type("stream", f"{expected}, as CudaDevice.stream returns it", stream)
