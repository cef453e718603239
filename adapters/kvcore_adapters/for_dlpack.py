"""kvcore's memory in any library that speaks DLPack, and arrays of kvcore's under their own type.

`share(lease, from_dlpack)` is a lease as an array of the library whose `from_dlpack` it is::

    with manager.lease(0, "key") as lease:
        keys = share(lease, xp.from_dlpack)

Libraries that lack an element type get its bits and cast them: that is always said, by `cast=`.
`produced(device, array, ...)` is the other way for what kvcore made, such as the result of
`Batch.gather`: an array of NumPy or CuPy as a producer that knows the declared type and makes the
consumer's stream wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvcore.device.base import Array, Device, Stream
from kvcore.dlpack.codes import CODES
from kvcore.dlpack.exporter import Exporter, check_lease, check_no_stream
from kvcore.dlpack.exports import Release
from kvcore.dlpack.structs import HOST_KINDS
from kvcore.dlpack.view import ArrayView
from kvcore.errors import wrong, wrong_type

__all__ = ["produced", "share"]

LEGACY = 1
NO_ORDER = -1


def share(
    lease: Exporter,
    from_dlpack: Callable[[Any], Any],
    *,
    cast: Callable[[Any], Any] | None = None,
    capsule: bool = False,
    stream: int | None = None,
) -> Any:
    """A lease as an array of another library, of the same memory.

    Parameters
    ----------
    lease : Lease
        Or any producer of kvcore's.
    from_dlpack : callable
        The library's: of the array API standard, or with `capsule` an older one that takes what
        `__dlpack__` returns, such as `tf.experimental.dlpack.from_dlpack`.
    cast : callable, optional
        Gives the library the bits, as unsigned integers, and is called with that array to make
        the element type of it. For types that the library lacks in DLPack.
    capsule : bool
        Whether `from_dlpack` takes a capsule. Then it is one from before version 1.
    stream : int, optional
        With `capsule`, the stream that such a library works on, in the words of DLPack: these
        libraries don't say it themselves.

    Returns
    -------
    array
        Of the library. Drop it before the lease is closed.

    Raises
    ------
    BufferError
        The library's DLPack has no such type; or whatever `from_dlpack` raises.
    ValueError
        `stream` without `capsule`: such a library says its stream itself.
    """
    if stream is not None and not capsule:
        raise wrong("stream", "None without capsule=True", stream, "the library names its own")
    check_lease(lease)
    given = lease if cast is None else lease.bits()
    found = from_dlpack(given.__dlpack__(stream=stream) if capsule else given)
    return found if cast is None else cast(found)


class Produced(Exporter):
    """An array of a device's own library, with the stream of the work that makes it."""

    def __init__(self, device: Device, view: ArrayView, stream: Stream) -> None:
        super().__init__(view)
        self._device, self._stream = device, stream

    def bits(self) -> Produced:
        """The same memory as unsigned integers."""
        return Produced(self._device, self.view.bits(), self._stream)

    def _hold(self, stream: object) -> Release | None:
        on, its = self._stream_of(stream), self._stream.deputy or self._stream
        if on is None or on is its:  # which comes after itself in both directions
            return None
        on.follow(its)
        loan = _Loan(self.view.owner, self._stream, on.deputy or on)
        return partial(_ended(self._device).append, loan)

    def _stream_of(self, stream: object) -> Stream | None:
        """The consumer's; None where there is none, or it asks for no order."""
        if self.view.device[0] in HOST_KINDS:
            check_no_stream(stream)
            return None
        if stream == 0:
            raise wrong("stream", "None, -1, 1, 2 or the handle of a stream", stream)
        if stream == NO_ORDER:
            return None
        return self._device.stream(LEGACY if stream is None else stream)


class _Loan(NamedTuple):
    """An array that a consumer is done with, but for the work it has enqueued."""

    array: object
    stream: Stream  # in whose order the array's memory is used again
    consumer: Stream


@cache
def _all_ended() -> WeakKeyDictionary[Device, deque[_Loan]]:
    return WeakKeyDictionary()


def _ended(device: Device) -> deque[_Loan]:
    """The loans of a device that ended, in whatever thread, and whose arrays are still kept."""
    return _all_ended().setdefault(device, deque())


def _take_back(device: Device) -> None:
    """Lets go of arrays that consumers have dropped, behind their work.

    Later, where a graph is being captured.
    """
    ended = _ended(device)
    kept: list[_Loan] = []
    try:
        while (loan := _first(ended)) is not None:
            kept.append(loan)
            if not (loan.stream.is_capturing() or loan.consumer.is_capturing()):
                loan.stream.follow(loan.consumer)
                kept.pop()
    finally:
        ended.extend(kept)


def _first(ended: deque[_Loan]) -> _Loan | None:
    """Takes the first one, for this thread alone."""
    try:
        return ended.popleft()
    except IndexError:
        return None


def produced(
    device: Device, array: Array, *, stream: object = None, dtype: str | None = None
) -> Exporter:
    """An array that kvcore made, as a producer for any library.

    Consumers' streams wait for the work that makes it. An array that was dropped is kept until the
    next call for this device: then `stream`, in whose order its memory is used again, waits for
    what the consumer has enqueued until then.

    Parameters
    ----------
    device : Device
        `manager.device`.
    array : array
        A NumPy or CuPy array on it.
    stream : optional
        Where the work that makes it was enqueued: the stream of the call that returned it.
    dtype : str, optional
        What its bits are, where NumPy lacks the type: "bfloat16" of a uint16 array.

    Raises
    ------
    TypeError, ValueError
        No open device, no array of its library, an unknown `dtype`.
    BufferError
        The bits are not of that type, or DLPack has no such array.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.device import open_device
    >>> gathered = np.arange(4, dtype=np.uint16)
    >>> produced(open_device("host"), gathered, dtype="bfloat16").dtype
    'bfloat16'
    """
    if not isinstance(device, Device):
        raise wrong_type("device", "an open Device", device, "manager.device is one")
    if dtype is not None and dtype not in CODES:
        raise wrong("dtype", f"one of {', '.join(CODES)}", dtype)
    view, on = device.describe(array, dtype), device.stream(stream)
    _take_back(device)
    return Produced(device, view, on)
