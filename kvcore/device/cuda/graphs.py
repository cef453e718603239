"""Launches that are always the same, captured once and enqueued together by one driver call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver
from cuda.bindings.driver import cuCtxGetCurrent, cuGraphLaunch

from kvcore.device.base import Stream
from kvcore.device.cuda.driver import check, failure
from kvcore.device.cuda.streams import CudaStream
from kvcore.errors import wrong

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

THREAD_LOCAL: Final = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Graph:
    """What `work` enqueues on the stream it is given, for any stream and as often as wanted.

    One replay costs less host time than one launch, however many there are in it. A graph must not
    be enqueued again while it still runs on another stream.
    """

    __slots__ = ("_context", "_graveyard", "_native")

    def __init__(self, device: CudaDevice, work: Callable[[Stream], None]) -> None:
        self._context, self._graveyard, self._native = device.context, device.graveyard, None
        stream: Any = device.create_stream()
        with device.context.current():
            check("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream.native, THREAD_LOCAL))
            try:
                work(stream)
            except BaseException:  # also a capture that failed must be ended
                error, graph = driver.cuStreamEndCapture(stream.native)
                if not error:
                    driver.cuGraphDestroy(graph)
                raise
            graph = check("cuStreamEndCapture", driver.cuStreamEndCapture(stream.native))
            try:
                self._native = check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
            finally:
                driver.cuGraphDestroy(graph)

    def __call__(self, stream: Any) -> None:
        """Enqueues the captured work."""
        context = self._context
        if stream.__class__ is not CudaStream or stream.context is not context:
            raise wrong("stream", f"a stream of cuda:{context.device_id}", stream)
        if cuCtxGetCurrent()[1] == context.handle:
            error = cuGraphLaunch(self._native, stream.native)[0]
        else:
            with context.current():
                error = cuGraphLaunch(self._native, stream.native)[0]
        if error:
            raise failure("cuGraphLaunch", int(error))

    def __del__(self) -> None:
        if self._native is not None:
            self._graveyard.bury("cuGraphExecDestroy", self._native)
