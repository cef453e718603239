"""`Exporter`: the producer's side of DLPack, and of the array interface on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Never

import numpy as np

from kvcore.checks import as_int
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY, Version
from kvcore.dlpack.exports import Release, exports
from kvcore.dlpack.patterns import Pattern, pattern
from kvcore.dlpack.structs import CPU, HOST_KINDS, IS_COPIED, READ_ONLY, VERSION
from kvcore.dlpack.view import ArrayView, view_of
from kvcore.errors import wrong, wrong_type

Device = tuple[int, int]

OLD: Final = (0, 8)
"""The version of a consumer that does not say which one it knows."""

ALL_TYPES: Final = object()
"""In place of a device, which it is none of: of old capsules with newer types."""


class Exporter:
    """Gives an array to whoever speaks DLPack.

    On memory of the host. What is different on a device (streams, copies) is in the methods that
    begin with an underscore.

    Parameters
    ----------
    view : ArrayView
        What is given.
    patterns : dict, optional
        Of its capsules: shared by exporters of the same view.

    Examples
    --------
    >>> import numpy as np
    >>> ours = Exporter(view_of(np.arange(6).reshape(2, 3)))
    >>> np.from_dlpack(ours)[1].tolist()
    [3, 4, 5]
    """

    __slots__ = ("__weakref__", "_patterns", "_view")

    def __init__(
        self, view: ArrayView, patterns: dict[tuple[Any, Any], Pattern] | None = None
    ) -> None:
        self._view = view
        self._patterns = {} if patterns is None else patterns

    @property
    def view(self) -> ArrayView:
        """Address, shape, strides and type."""
        return self._view

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, as DLPack counts them."""
        return self._view.strides

    @property
    def dtype(self) -> str:
        """The name of the element type."""
        return self._view.dtype

    def bits(self) -> Exporter:
        """The same memory as unsigned integers, for consumers that lack the element type.

        `float4_e2m1fn` gives uint8 with half as many elements: two per byte, the first one in the
        low half. The consumer casts back by itself, such as `tensor.view(torch.float8_e4m3fn)`.
        """
        return Exporter(self._view.bits())

    def __dlpack_device__(self) -> Device:
        """The kind of memory and the number of the device."""
        return self._view.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: Version | None = None,
        dl_device: Device | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule, as the array API standard has it.

        Parameters
        ----------
        stream : int, optional
            The stream of the consumer, which waits on the device for earlier work on the memory.
            On CUDA None and 1 are the legacy default stream, 2 is the per-thread one, -1 asks for
            no order at all, more is a handle; on the host None is all there is.
        max_version : (int, int), optional
            The newest version the consumer knows. None: a structure from before version 1.
        dl_device : (int, int), optional
            Where the consumer wants it. Pinned memory is the CPU's too; other devices need
            `copy=True`.
        copy : bool, optional
            True: a copy of the consumer's own. Else shared, or an error.

        Raises
        ------
        BufferError
            What is asked for can't be expressed: an element type that the version lacks (take
            `bits()`), a read-only array before version 1, negative strides, or another device
            without a copy.
        ValueError, TypeError
            An argument is none of the above.
        """
        if copy:
            version, asked = _checked_version(max_version), self._asked(dl_device)
            self._check_type(version)
            copied = pattern(self._copied(asked, stream), _stamp(version), IS_COPIED)
            return exports().capsule(copied)
        try:
            known = self._patterns[max_version, dl_device]
        except (KeyError, TypeError):
            version = _checked_version(max_version)
            known = self._shared(version, version, self._asked(dl_device))
            self._patterns[max_version, dl_device] = known
        return exports().capsule(known, self._hold(stream))

    def old_capsule(self, *, stream: int | None = None) -> Any:
        """A capsule from before version 1 with all element types.

        For consumers that take such capsules only, and are known to know newer types: JAX has
        float8 there. Parameters and errors as those of `__dlpack__`.
        """
        known = self._patterns.get((OLD, ALL_TYPES))
        if known is None:
            known = self._shared(OLD, VERSION, self._view.device)
            self._patterns[OLD, ALL_TYPES] = known
        return exports().capsule(known, self._hold(stream))

    def _shared(self, version: Version, codes: Version, asked: Device) -> Pattern:
        """How to share the view with consumers that take structures of `version` on a device.

        They know the element types of the version `codes`.
        """
        view = self._view
        self._check_type(codes)
        if any(step < 0 for step in view.normal_strides):
            raise BufferError(
                "an array that runs backwards: PyTorch would abort the process; ask for copy=True, "
                "or take the array interface"
            )
        if asked != view.device:
            if asked != (CPU, 0) or view.device[0] not in HOST_KINDS:
                text = f"memory of device {view.device} cannot be shared as {asked}"
                raise BufferError(f"{text}; ask for copy=True")
            view = replace(view, device=asked)
        if view.readonly and version < (1, 0):
            raise BufferError(
                "this array is read-only, which consumers before DLPack 1.0 cannot be told; ask "
                "for copy=True"
            )
        return pattern(view, _stamp(version), READ_ONLY if view.readonly else 0)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, of memory of the host and types that NumPy has."""
        if not self._in_numpy:
            raise AttributeError("no array interface: see __array__ for the reason")
        return self._view.interface()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Never:
        """Says why there is no array interface."""
        if self._view.device[0] not in HOST_KINDS:
            raise BufferError(f"NumPy cannot view memory of device {self._view.device}")
        raise BufferError(f"NumPy has no {self.dtype}; give it bits() for its bits")

    def _check_type(self, version: Version) -> None:
        name = self._view.dtype
        if CODES[name].since > version:
            major, minor = CODES[name].since
            raise BufferError(
                f"{name} has a code since DLPack {major}.{minor} and the consumer knows "
                f"{version[0]}.{version[1]}; give it bits() and cast there"
            )

    def _asked(self, dl_device: Device | None) -> Device:
        return self._view.device if dl_device is None else _checked_device(dl_device)

    # -- what a device does in its own way ---------------------------------------------------------

    def _copied(self, asked: Device, stream: object) -> ArrayView:
        """A dense copy that the consumer owns."""
        check_no_stream(stream)
        own = self._view
        if asked[0] != CPU:
            raise BufferError(f"memory of device {own.device} cannot be copied to {asked} here")
        array = np.array(own.numpy(), order="C")
        return view_of(array, own.dtype if own.dtype in UNKNOWN_TO_NUMPY else None)

    def _hold(self, stream: object) -> Release | None:
        """Notes one more consumer, whose stream comes after the memory's earlier work.

        Returns what has to be called when the consumer is done.
        """
        check_no_stream(stream)
        return None

    @property
    def _in_numpy(self) -> bool:
        view = self._view
        return view.device[0] in HOST_KINDS and view.dtype not in UNKNOWN_TO_NUMPY


def check_lease(lease: object) -> None:
    """Raises `TypeError` for what does not export as a lease does."""
    if not isinstance(lease, Exporter):
        raise wrong_type("lease", "a Lease", lease, "KVCacheManager.lease makes one")


def check_no_stream(stream: object) -> None:
    """The host has no streams, as far as DLPack goes."""
    if stream is not None:
        raise wrong("stream", "None for memory of the host, which has no streams", stream)


def _stamp(version: Version) -> Version | None:
    """What a structure for consumers of a version says it is; None before version 1."""
    return None if version < (1, 0) else min(version, VERSION)


def _checked_version(max_version: Version | None) -> Version:
    if max_version is None:
        return OLD
    return _pair("max_version", "None or (major, minor)", max_version)


def _checked_device(dl_device: Device) -> Device:
    return _pair("dl_device", "None or (kind, device number)", dl_device)


def _pair(name: str, expected: str, given: object) -> tuple[int, int]:
    if not isinstance(given, tuple) or len(given) != 2:
        raise wrong_type(name, expected, given)
    return as_int(name, given[0], 0), as_int(name, given[1], 0)
