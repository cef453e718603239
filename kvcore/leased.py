"""`LeasedArray`: what a lease gives to other libraries, ordered by events and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Never

import numpy as np

from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.dlpack.exporter import Exporter, check_no_stream
from kvcore.dlpack.exports import Release
from kvcore.dlpack.structs import CPU, CUDA, HOST_KINDS
from kvcore.dlpack.view import ArrayView, Window, typed, view_of
from kvcore.errors import wrong, wrong_type

if TYPE_CHECKING:
    from kvcore.dlpack.patterns import Pattern
    from kvcore.lease_book import LeaseEntry
    from kvcore.runtime import Runtime

Place = tuple[int, int]

LEGACY: Final = 1
NO_ORDER: Final = -1


class LeasedArray(Exporter):
    """Memory of a lease under one element type, for whoever speaks DLPack or an array interface.

    What DLPack and NumPy's array interface give out is counted until the consumer drops it. A
    consumer that takes it by the CUDA array interface holds this object, which then has to be
    dropped, too, before the memory can go.
    """

    __slots__ = ("_entry", "_runtime")

    def __init__(
        self,
        runtime: Runtime,
        entry: LeaseEntry,
        view: ArrayView,
        patterns: dict[tuple[Any, Any], Pattern] | None = None,
    ) -> None:
        self._view, self._patterns = view, {} if patterns is None else patterns
        self._runtime, self._entry = runtime, entry

    def __reduce__(self) -> Never:
        """Neither copied nor pickled: what a copy holds, nobody would count."""
        raise TypeError(f"{self._entry.name} cannot be copied or pickled; take another one")

    def bits(self) -> LeasedArray:
        """The same memory as unsigned integers, for consumers that lack the element type.

        `float4_e2m1fn` gives uint8 with half as many elements: two per byte, the first one in the
        low half. The consumer casts back by itself, such as `tensor.view(torch.float8_e4m3fn)`.
        Keeps the lease.
        """
        return LeasedBits(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, of memory of the host and types that NumPy has."""
        interface = super().__array_interface__
        view = self._view
        span = (view.end - view.address,)
        window = Window(replace(view, shape=span, strides=(1,), dtype="uint8"))
        self._entry.use_while(window)
        return interface | {"data": np.asarray(window)}  # an array keeps it, and so the window

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface, of memory of a GPU and types that NumPy has.

        Its stream is the legacy default one, which comes after kvcore's work, for the consumer to
        wait for; none, while the lease is handed over to a stream by `stream=` or `acquire`.
        """
        if self._view.device[0] != CUDA or self._view.dtype in UNKNOWN_TO_NUMPY:
            raise AttributeError("no CUDA array interface; DLPack has it, or that of bits()")
        ordered = self._entry.ordered
        release = self._entry.use() if ordered else self._hold(None)  # until it is counted
        try:
            self._entry.view(self)
        finally:
            release()
        found = self._view.interface() | {"stream": None if ordered else LEGACY}
        if not self._view.size:
            found["data"] = 0, self._view.readonly  # as the interface wants it
        return found

    def _hold(self, stream: object) -> Release:
        release = self._entry.use()
        try:
            if self._view.device[0] in HOST_KINDS:
                check_no_stream(stream)
                return release
            handle = stream if type(stream) is int and stream > 0 else checked_handle(stream)
            if handle is not None:
                runtime = self._runtime
                on = runtime.device.stream(handle)
                with runtime.lock:
                    runtime.leases.hand_over(self._entry, on)
        except BaseException:
            release()
            raise
        return release

    def _copied(self, asked: Place, stream: object) -> ArrayView:
        """A dense copy for the consumer. BLOCKS where it goes from a GPU to the host."""
        release = self._entry.use()  # meanwhile the memory stays
        try:
            return self._copied_now(asked, stream)
        finally:
            release()

    def _copied_now(self, asked: Place, stream: object) -> ArrayView:
        own, device = self._view, self._runtime.device
        if own.device[0] in HOST_KINDS:
            return super()._copied(asked, stream)
        elsewhere = asked not in (own.device, (CPU, 0))
        handle = checked_handle(stream)
        on = device.stream(LEGACY if elsewhere or handle is None else handle)
        source = device.view(own)
        lacking = own.dtype if own.dtype in UNKNOWN_TO_NUMPY else None
        book, lock = self._runtime.leases, self._runtime.lock
        with lock:
            book.hand_over(self._entry, on, named=None)
        if asked == (CPU, 0):
            copied = view_of(device.to_host(source, stream=on), lacking)
        elif elsewhere:
            copied = device.copied_to(asked, source, stream=on, consumer=handle or LEGACY)
            copied = typed(copied, lacking) if lacking else copied
        else:
            array = device.empty(source.shape, source.dtype)
            device.copy(source, array, stream=on)
            copied = device.describe(array, lacking)
        with lock:
            # Other consumers may be at work there, also since just now.
            alone = self._entry.streams.get(on.deputy or on) is None
            book.hand_back(self._entry, [on], forget=alone)
        return copied


def checked_handle(stream: object) -> int | None:
    """The handle of the stream that DLPack names on CUDA; None where it asks for no order."""
    if stream is None:
        return LEGACY
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise wrong_type("stream", "None, -1, 1, 2 or the handle of a stream", stream)
    if stream < NO_ORDER or not stream:
        remedy = "1 is the legacy default stream, 2 the per-thread one"
        raise wrong("stream", "None, -1, 1, 2 or the handle of a stream", stream, remedy)
    return None if stream == NO_ORDER else stream


class LeasedBits(LeasedArray):
    """The memory of a lease as unsigned integers."""

    __slots__ = ("_lease",)

    def __init__(self, lease: LeasedArray) -> None:
        super().__init__(lease._runtime, lease._entry, lease.view.bits())
        self._lease = lease  # which would end if nobody held it
