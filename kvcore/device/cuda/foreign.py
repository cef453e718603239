"""Arrays of other libraries, taken as CuPy views of the same memory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import cupy
import numpy as np

from kvcore.device.base import Array, Stream
from kvcore.device.checks import check_copy, check_foreign, not_taken
from kvcore.device.cuda.blocks import Block, allocate, graveyard_of
from kvcore.device.cuda.blocks import view as block_view
from kvcore.device.cuda.streams import CudaStream, as_own, check_device
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY
from kvcore.dlpack.importer import from_dlpack, from_interface
from kvcore.dlpack.structs import CUDA, CUDA_MANAGED
from kvcore.dlpack.view import ArrayView, typed
from kvcore.errors import DriverError, KVCoreError, wrong_type

if TYPE_CHECKING:
    from kvcore.device.cuda.driver import Context
    from kvcore.device.cuda.words import WordWork

EXPECTED: Final = "an array in this GPU's memory (CuPy, DLPack or CUDA array interface)"
NO_ORDER: Final = -1
"""What a consumer that orders itself passes as its stream."""
LEGACY: Final = 1
"""The legacy default stream, which is never 0 in DLPack."""


class ForeignArrays:
    """The part of a `CudaDevice` that takes arrays of others, and copies arrays."""

    index: int
    context: Context
    _words: WordWork

    if TYPE_CHECKING:

        def stream(self, stream: object) -> Stream: ...

        def empty(self, shape: Any, dtype: Any, *, stream: Stream | None = None) -> Array: ...

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """Kind and number of the device in DLPack's terms."""
        return CUDA, self.index

    def as_array(
        self,
        values: object,
        *,
        stream: Stream | None = None,
        dtype: str | None = None,
        writable: bool = False,
        name: str = "values",
    ) -> Array:
        """See `kvcore.device.base.Device`."""
        if isinstance(values, cupy.ndarray):
            if values.data.device_id != self.index and values.size:
                raise _elsewhere(name, values, self.index)
            return values
        on = None if stream is None else as_own(stream)
        capturing = on is not None and on.is_capturing()
        after = (None, NO_ORDER) if capturing else (on, None)
        taken = self._taken(name, values, *after)
        check_foreign(name, taken.dtype, dtype, not (writable and taken.readonly))
        return self.view(taken)

    def view(self, view: ArrayView) -> Array:
        """See `kvcore.device.base.Device`."""
        if view.dtype in UNKNOWN_TO_NUMPY:
            view = view.bits()
        dtype, size = np.dtype(view.dtype), CODES[view.dtype].bits // 8
        spans = [(n - 1) * step for n, step in zip(view.shape, view.strides, strict=True)]
        low = sum(span for span in spans if span < 0) * size if view.size else 0
        nbytes = (sum(map(abs, spans)) + 1) * size if view.size else 0
        memory = cupy.cuda.UnownedMemory(view.address + low, nbytes, view.owner, self.index)
        start = cupy.cuda.MemoryPointer(memory, -low)
        strides = tuple(step * size for step in view.strides)
        return cupy.ndarray(view.shape, dtype, start, strides=strides)

    def describe(self, array: Array, dtype: str | None = None) -> ArrayView:
        """See `kvcore.device.base.Device`."""
        if not isinstance(array, cupy.ndarray):
            raise wrong_type("array", "a CuPy array", array)
        view = ArrayView(
            address=array.data.ptr,
            shape=array.shape,
            strides=tuple(step // array.itemsize for step in array.strides),
            dtype=array.dtype.name,
            device=self.dlpack_device,
            owner=array,
        )
        return view if dtype is None else typed(view, dtype)

    def copy(self, source: Array, target: Array, *, stream: Stream) -> None:
        """See `kvcore.device.base.Device`."""
        check_copy(source, target, cupy.ndarray)
        self._words.copy(source, target, as_own(stream))

    def copied_to(
        self, place: tuple[int, int], source: Array, *, stream: Stream, consumer: int
    ) -> ArrayView:
        """See `kvcore.device.base.Device`. On other GPUs only."""
        kind, index = place
        if kind != CUDA:
            own = self.dlpack_device
            raise BufferError(f"memory of device {own} cannot be copied to {place} here")
        graveyard = graveyard_of(index)
        context = graveyard.context
        check_device(consumer, context)
        dense = self.empty(source.shape, source.dtype, stream=stream)
        self.copy(source, dense, stream=stream)
        block = Block(allocate(max(source.nbytes, 1), graveyard), source.nbytes, graveyard)
        array = block_view(block.pointer, source.nbytes, block, index, source.shape, source.dtype)
        if source.nbytes:
            peers = block.pointer, context.handle, dense.data.ptr, self.context.handle
            self.context.call("cuMemcpyPeerAsync", *peers, source.nbytes, as_own(stream).native)
        CudaStream(consumer, context, None, deque(), graveyard).wait(stream.record())
        return replace(self.describe(array), device=place)

    def _taken(
        self,
        name: str,
        values: object,
        stream: CudaStream | None,
        otherwise: int | None,
    ) -> ArrayView:
        """The array in `values`; `stream` waits, on the device, for what its producer enqueued.

        Without one, a producer that speaks DLPack is told `otherwise`.
        """
        shares = _shares_on(values, self.index)
        interface = None
        if shares is not None and not (shares and stream is not None):
            interface = _interface_of(values)
        if not shares and interface is None:
            raise _elsewhere(name, values, self.index)
        try:
            if interface is None:
                handle = otherwise if stream is None else stream.handle or LEGACY
                return from_dlpack(values, handle)
            view, producer = from_interface(interface, values, self.dlpack_device)
        except KVCoreError:  # a lease that is closed, a driver that failed
            raise
        except (BufferError, RuntimeError, ValueError) as error:
            raise not_taken(name, EXPECTED, values, str(error)) from error
        if producer is not None and stream is not None:
            stream.follow(self.stream(producer))
        return view


def _shares_on(values: Any, device_id: int) -> bool | None:
    """Whether a producer speaks DLPack; None if it does so on another device."""
    if not hasattr(values, "__dlpack_device__"):
        return False
    kind, index = values.__dlpack_device__()
    here = int(kind) == CUDA_MANAGED or (int(kind) == CUDA and int(index) == device_id)
    return True if here else None


def _interface_of(values: object) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] | None = getattr(values, "__cuda_array_interface__", None)
    except DriverError:
        raise
    except (AttributeError, RuntimeError, TypeError):  # torch: not for every dtype, not on the CPU
        return None
    return found


def _elsewhere(name: str, values: object, device_id: int) -> TypeError:
    remedy = f"move it to cuda:{device_id}"
    return wrong_type(name, EXPECTED, type(values).__name__, remedy)
