"""A `CudaDevice` without a GPU: the fake driver, and kernels that were compiled for the CPU.

The folder named by `KVCORE_EMULATED` holds `libcuda.so.1` and `kernels.so`; the process was started
with it in `LD_LIBRARY_PATH`, so that cuda-python and CuPy load this driver as if it were one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from cuda.bindings import driver as cuda

from kvcore.device.cuda.kernels import Source

OUT_OF_MEMORY = 2
UNKNOWN = 999


class Counts(NamedTuple):
    """What the driver has handed out and not got back."""

    streams: int
    events: int
    ranges: int
    mappings: int
    blocks: int
    pinned: int
    bytes_0: int
    bytes_1: int
    handles: int
    launches: int

    @property
    def held(self) -> tuple[int, ...]:
        """Memory of any kind; streams and events are pooled."""
        return self[2:9]


@cache
def shared_object(name: str) -> ctypes.CDLL:
    """One of the two libraries."""
    return ctypes.CDLL(str(Path(os.environ["KVCORE_EMULATED"]) / name))


def counts() -> Counts:
    """What is alive now."""
    found = (ctypes.c_long * 10)()
    shared_object("libcuda.so.1").fake_counts(found)
    return Counts(*found)


def fail(call: str, countdown: int, code: int = UNKNOWN) -> None:
    """Makes the `countdown`-th call from now on fail."""
    shared_object("libcuda.so.1").fake_fail(call.encode(), countdown, code)


def switch(name: str, on: bool) -> None:
    """`capturing` or `no_virtual_memory`."""
    getattr(shared_object("libcuda.so.1"), f"fake_{name}")(int(on))


def current() -> int | None:
    """The device whose context is current in this thread."""
    error, device = cuda.cuCtxGetDevice()
    return None if error else int(device)


def make_current(index: int | None) -> None:
    """Makes a device's context current in this thread, or none."""
    if index is None:
        cuda.cuCtxSetCurrent(None)
    else:
        cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(index)[1])


def load(device_id: int, source: Source) -> Mapping[str, Any]:
    """In place of `kvcore.device.cuda.launch.load`: entry points on the CPU."""
    kernels = shared_object("kernels.so")
    pointer = ctypes.c_void_p
    return {
        entry: SimpleNamespace(ptr=ctypes.cast(getattr(kernels, f"run_{entry}"), pointer).value)
        for entry in source.entries
    }
