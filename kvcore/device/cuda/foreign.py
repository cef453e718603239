"""Arrays of other libraries, taken as CuPy views of the same memory."""

from __future__ import annotations

from typing import Any, Final

import cupy
import numpy as np

from kvcore.device.base import Array
from kvcore.device.checks import described
from kvcore.device.cuda.blocks import view
from kvcore.errors import wrong_type

CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged
EXPECTED: Final = "an array in this GPU's memory (CuPy, CUDA array interface or DLPack)"


def as_array(values: object, device_id: int) -> Array:
    """A view of `values` on the device, without a copy and without waiting for anything.

    Whoever wrote the values has to have ordered that work before the stream they are used on.
    """
    if isinstance(values, cupy.ndarray):
        if values.data.device_id != device_id and values.size:
            raise _elsewhere(values, device_id)
        return values
    try:
        interface = getattr(values, "__cuda_array_interface__", None)
    except (AttributeError, RuntimeError, TypeError):  # torch: not for every dtype, not on the CPU
        interface = None
    if interface is not None:
        return _from_interface(values, interface, device_id)
    if hasattr(values, "__dlpack__") and hasattr(values, "__dlpack_device__"):
        kind, its_device = values.__dlpack_device__()
        if int(kind) in CUDA and int(its_device) == device_id:
            return _from_dlpack(values)
    raise _elsewhere(values, device_id)


def _from_interface(values: object, interface: dict[str, Any], device_id: int) -> Array:
    """By hand: CuPy's own conversion may wait for the producer's stream on the host."""
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    pointer, _ = interface["data"]
    strides = interface.get("strides")
    if strides is None:
        return view(pointer, int(np.prod(shape)) * dtype.itemsize, values, device_id, shape, dtype)
    spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = sum(span for span in spans if span < 0)
    nbytes = sum(abs(span) for span in spans) + dtype.itemsize if 0 not in shape else 0
    memory = cupy.cuda.UnownedMemory(pointer + low, nbytes, values, device_id)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides=strides)


def _from_dlpack(values: object) -> Array:
    try:
        return cupy.from_dlpack(values)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise wrong_type("values", EXPECTED, described(values), str(error)) from error


def _elsewhere(values: object, device_id: int) -> TypeError:
    remedy = f"move it to cuda:{device_id}"
    return wrong_type("values", EXPECTED, type(values).__name__, remedy)
