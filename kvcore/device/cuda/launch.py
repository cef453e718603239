"""Compiled kernels, loaded once per device, and launches with their argument block prepared."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from kvcore.device.cuda.driver import Context, context_of, failure
from kvcore.device.cuda.kernels import Fields, Source
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong, wrong_type


@cache
def load(device_id: int, source: Source) -> Mapping[str, Any]:
    """The entry points of a source on one device: objects with the function's handle as `ptr`.

    CuPy compiles them for the device and keeps the binary on disk, keyed by text and options.
    """
    with context_of(device_id).current():
        module = cupy.RawModule(code=source.text(), options=source.options())
        return MappingProxyType({name: module.get_function(name).kernel for name in source.entries})


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
    """

    __slots__ = (
        "_context",
        "_function",
        "_keep",
        "_lock",
        "_pack",
        "_params",
        "_threads",
        "block",
        "name",
    )

    def __init__(
        self,
        context: Context,
        name: str,
        function: Any,
        fields: Fields,
        threads: int,
        head: str,
    ) -> None:
        self.name, self.block = name, np.zeros(1, fields)
        params = np.array([self.block.ctypes.data], np.uint64)  # void* kernelParams[1]
        self._params = int(params.ctypes.data)
        self._keep = params, function
        self._function = driver.CUfunction(function.ptr)
        self._context, self._threads, self._lock = context, threads, threading.Lock()
        self._pack = struct.Struct(head).pack_into

    def __call__(self, stream: CudaStream, x: int, y: int, z: int, *values: Any) -> None:
        """Enqueues the kernel over a grid of `x * y * z` blocks, none of them 0."""
        context = self._context
        if stream.__class__ is not CudaStream or stream.context is not context:
            raise _wrong_stream(stream, context)
        with self._lock:
            self._pack(self.block, 0, *values)
            if driver.cuCtxGetCurrent()[1] == context.handle:
                error = self._enqueue(stream.native, x, y, z)
            else:
                with context.current():
                    error = self._enqueue(stream.native, x, y, z)
        if error:
            raise failure(f"cuLaunchKernel of {self.name}", int(error))

    def _enqueue(self, stream: Any, x: int, y: int, z: int) -> Any:
        return driver.cuLaunchKernel(
            self._function, x, y, z, self._threads, 1, 1, 0, stream, self._params, 0
        )[0]


def _wrong_stream(stream: object, context: Context) -> Exception:
    expected = f"a stream of cuda:{context.device_id}"
    if isinstance(stream, CudaStream):
        return wrong("stream", expected, stream)
    return wrong_type("stream", f"{expected}, as CudaDevice.stream returns it", stream)
