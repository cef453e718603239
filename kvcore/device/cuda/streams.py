"""Streams and events: handles of others, wrapped once, with events that are used again."""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import Any, Final
from weakref import WeakValueDictionary

from cuda.bindings import driver
from cuda.bindings.driver import cuCtxGetCurrent, cuStreamIsCapturing, cuStreamQuery
from cuda.core import Stream as CoreStream

from kvcore.device.base import Event, Stream
from kvcore.device.cuda.blocks import BlockPool, Graveyard
from kvcore.device.cuda.driver import Context, check, failure
from kvcore.errors import DriverError, wrong, wrong_type

LEGACY: Final = 1
PER_THREAD: Final = 2  # the handle of every thread's own default stream
AMBIENT: Final = (0, LEGACY, PER_THREAD)
"""Handles that mean a stream of whichever context is current."""

ACCEPTED: Final = (
    "a stream of this device, an object with __cuda_stream__, a CuPy or torch stream, or a handle"
)

NOT_READY: Final = int(driver.CUresult.CUDA_ERROR_NOT_READY)
UNKNOWN_CODE: Final = -1

EventPool = deque[Any]
MAX_POOLED: Final = 1024
MOST_RECENT: Final = 8


class CudaEvent:
    """A moment in a stream; its driver event goes back to the pool when nobody holds this."""

    __slots__ = ("_native", "_passed", "_stream")

    def __init__(self, native: Any, stream: CudaStream) -> None:
        self._native, self._stream, self._passed = native, stream, False

    @property
    def native(self) -> Any:
        """The `cuda.core.Event`."""
        return self._native

    def done(self) -> bool:
        if not self._passed:
            try:
                self._passed = self._native.is_done
            except Exception as error:
                again = driver.cuEventQuery(self._native.handle)
                raise _told("cuEventQuery", again, error) from error
        return self._passed

    def synchronize(self) -> None:
        if self._passed:
            return
        try:
            self._native.sync()
        except Exception as error:
            again = driver.cuEventSynchronize(self._native.handle)
            raise _told("cuEventSynchronize", again, error) from error
        self._passed = True

    def __del__(self) -> None:
        self._stream.events.append(self._native)


class CudaStream:
    """One stream of a device. Records and waits in one driver call each.

    Parameters
    ----------
    handle : int
        The raw `CUstream`.
    context : Context
        The device's.
    owner : object
        Kept alive for as long as this.
    events : deque
        The device's pool of unused events.
    graveyard : Graveyard
        The device's.
    deputy : CudaStream, optional
        The legacy default stream, of the per-thread one: it comes after them all.
    """

    __slots__ = (
        "__weakref__",
        "_ambient",
        "_core",
        "blocks",
        "context",
        "deputy",
        "events",
        "handle",
        "native",
        "owner",
    )

    def __init__(
        self,
        handle: int,
        context: Context,
        owner: object,
        events: EventPool,
        graveyard: Graveyard,
        deputy: CudaStream | None = None,
    ) -> None:
        self.deputy = deputy
        self.handle, self.context, self.owner, self.events = handle, context, owner, events
        self.native = driver.CUstream(handle)
        self._core = CoreStream.from_handle(handle)
        self._ambient = handle in AMBIENT
        # Every thread's default stream has the same handle, but its own order: nothing to share.
        self.blocks = None if handle == PER_THREAD else BlockPool(graveyard)

    def __repr__(self) -> str:
        return f"CudaStream({self.handle:#x}, cuda:{self.context.device_id})"

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream protocol of cuda-python, so that others take this stream as theirs."""
        return 0, self.handle

    @property
    def ptr(self) -> int:
        """The handle under CuPy's name."""
        return self.handle

    def record(self) -> CudaEvent:
        try:
            native = self.events.pop()
        except IndexError:
            native = None
        if native is None:
            return CudaEvent(self._record_in_context(None), self)
        if self._ambient and not self._is_here():
            return CudaEvent(self._record_in_context(native), self)
        try:
            self._core.record(native)
        except Exception as error:  # a driver that wants the context current, or an error to name
            self._refuse_ambient("cuEventRecord", error)
            native = self._record_in_context(native)
        return CudaEvent(native, self)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise wrong_type("event", "an event recorded on a stream of a cuda device", event)
        if event._passed:
            return
        if not self._ambient or self._is_here():
            try:
                self._core.wait(event._native)
                return
            except Exception as error:  # as in record
                self._refuse_ambient("cuStreamWaitEvent", error)
        self.context.call("cuStreamWaitEvent", self.native, event._native.handle, 0)

    def follow(self, other: Stream) -> None:
        if not isinstance(other, CudaStream):
            raise wrong_type("other", "a stream of a cuda device", other)
        usual = not (self._ambient or other._ambient) or self._is_here()
        if usual and other.context is self.context:
            failed, call = other, "cuEventRecord"
            try:
                native = self.events.pop()
                other._core.record(native)
                failed, call = self, "cuStreamWaitEvent"
                self._core.wait(native)
                self.events.append(native)
                return
            except IndexError:  # the pool is empty
                pass
            except Exception as error:  # as in record
                failed._refuse_ambient(call, error)
        self.wait(other.record())

    def _refuse_ambient(self, call: str, error: Exception) -> None:
        """Passes on what failed on a default stream, whose context was current: no second try."""
        if self._ambient:
            code = getattr(driver.CUresult, str(error).partition(":")[0], UNKNOWN_CODE)
            raise DriverError(call, int(code), str(error)) from error

    def _is_here(self) -> bool:
        """Whether the context is current, in which a default stream is that of the device."""
        return bool(cuCtxGetCurrent()[1] == self.context.handle)

    def synchronize(self) -> None:
        self.context.call("cuStreamSynchronize", self.native)

    def is_idle(self) -> bool:
        # A default stream is several, of which the driver may ask one.
        if self._ambient or any(cuStreamIsCapturing(self.native)):
            return False
        code = cuStreamQuery(self.native)[0]
        if code and code != NOT_READY:
            raise failure("cuStreamQuery", int(code))
        return not code

    def is_capturing(self) -> bool:
        """Whether a graph is being captured from this stream.

        Also while the legacy default stream must not be used, as another one's capture forbids.
        """
        if self._ambient and not self._is_here():
            with self.context.current():
                error, status = cuStreamIsCapturing(self.native)
        else:
            error, status = cuStreamIsCapturing(self.native)
        if error == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        if error:
            raise failure("cuStreamIsCapturing", int(error))
        return bool(status)

    def _record_in_context(self, native: Any) -> Any:
        with self.context.current():
            if native is None:
                try:
                    return self._core.record()
                except Exception as error:
                    raise DriverError("cuEventCreate", UNKNOWN_CODE, str(error)) from error
            check("cuEventRecord", driver.cuEventRecord(native.handle, self.native))
            return native


def _told(call: str, again: tuple[Any, ...], error: Exception) -> Exception:
    """The exception for a call of cuda.core that failed: its errors have no code, so ask again."""
    code = int(again[0])
    if code in (0, NOT_READY):
        return DriverError(call, UNKNOWN_CODE, str(error))
    return failure(call, code)


class OwnedStream:
    """Destroys a stream of ours when nobody holds it."""

    def __init__(self, context: Context, graveyard: Graveyard) -> None:
        self._graveyard = graveyard
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = int(context.call("cuStreamCreate", flags))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._graveyard.bury("cuStreamDestroy", self.handle)


class KnownStreams:
    """The streams of one device, each wrapped once."""

    def __init__(self, context: Context, graveyard: Graveyard) -> None:
        self._context, self._graveyard = context, graveyard
        self._events: EventPool = deque(maxlen=MAX_POOLED)
        self._known: WeakValueDictionary[int, CudaStream] = WeakValueDictionary()
        self._lock = RLock()
        self.recent: dict[int, CudaStream] = {}
        """A few that are kept, by handle."""

    def find(self, stream: object) -> CudaStream:
        """The one of a foreign stream or handle. Keeps the foreign stream."""
        if isinstance(stream, CudaStream):
            if stream.context is not self._context:
                raise wrong("stream", f"a stream of cuda:{self._context.device_id}", stream)
            return stream
        handle = handle_of(stream)
        owner = None if isinstance(stream, int) else stream
        with self._lock:
            found = self._known.get(handle)
            if found is None:
                check_device(handle, self._context)
                found = self._new(handle, owner)
            elif owner is not None and not isinstance(found.owner, OwnedStream):
                found.owner = owner  # a new stream may have got the handle of one that is gone
            if handle not in self.recent:
                if len(self.recent) == MOST_RECENT:
                    del self.recent[next(iter(self.recent))]
                self.recent[handle] = found
            return found

    def create(self) -> CudaStream:
        """A new one."""
        owned = OwnedStream(self._context, self._graveyard)
        with self._lock:
            self.recent.pop(owned.handle, None)  # of one that is gone
            return self._new(owned.handle, owned)

    def _new(self, handle: int, owner: object) -> CudaStream:
        deputy = self.find(LEGACY) if handle == PER_THREAD else None
        shared = self._context, owner, self._events, self._graveyard
        stream = self._known[handle] = CudaStream(handle, *shared, deputy)
        return stream

    def clear(self) -> None:
        """Gives up events, and the memory that lies ready for arrays of streams."""
        with self._lock:
            for stream in [*self._known.values()]:
                if stream.blocks is not None:
                    stream.blocks.clear()
            self.recent.clear()
            self._events.clear()


def as_own(stream: object) -> CudaStream:
    """A stream of a cuda device; `TypeError` for anything else."""
    if not isinstance(stream, CudaStream):
        raise wrong_type("stream", "a stream of a cuda device, as CudaDevice.stream gives", stream)
    return stream


def handle_of(stream: object) -> int:
    """The raw handle of a foreign stream object or of a handle itself.

    Raises
    ------
    ValueError
        For None: a CUDA device has no default stream.
    TypeError
        For anything that is no stream.
    """
    if stream is None:
        remedy = "pass stream= to the call or bind one with resume(stream)"
        raise wrong("stream", ACCEPTED, None, remedy)
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise wrong("stream", "a handle, at least 0", stream)
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise wrong("stream", "version 0 of the __cuda_stream__ protocol", version)
        return int(handle)
    for name in ("cuda_stream", "ptr"):  # torch, older CuPy
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise wrong_type("stream", ACCEPTED, stream)


def check_device(handle: int, context: Context) -> None:
    """Raises `ValueError` where a stream belongs to another device."""
    if handle in AMBIENT:
        return
    with context.current():
        its = check("cuStreamGetCtx", driver.cuStreamGetCtx(handle))
        if its == context.handle:
            return
        check("cuCtxPushCurrent", driver.cuCtxPushCurrent(its))
        try:
            device = int(check("cuCtxGetDevice", driver.cuCtxGetDevice()))
        finally:
            driver.cuCtxPopCurrent()
    if device != context.device_id:
        name = f"cuda:{context.device_id}"
        raise wrong("stream", f"a stream of {name}", f"a stream of cuda:{device}")
