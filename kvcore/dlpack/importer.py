"""Arrays of other libraries as views: from DLPack capsules and from array interfaces."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.dlpack.capsules import Managed, api
from kvcore.dlpack.codes import CODES, NAMES
from kvcore.dlpack.structs import (
    IS_COPIED,
    PADDED,
    READ_ONLY,
    VERSION,
    DLTensor,
    VersionedTensor,
)
from kvcore.dlpack.view import ArrayView, contiguous, typed

MOST_AXES: Final = 64
DELETER: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""Called without the interpreter's lock: a deleter may wait for a thread that needs it."""


class Foreign:
    """A structure that was taken over. Its deleter is called when nobody holds this any more."""

    __slots__ = ("_delete", "_managed")

    def __init__(self, managed: Managed) -> None:
        self._managed = managed
        self._delete = DELETER(managed.deleter) if managed.deleter else None

    def __del__(self, address_of: Any = ctypes.addressof) -> None:
        if self._delete is not None:
            self._delete(address_of(self._managed))


def from_dlpack(values: Any, stream: int | None = None) -> ArrayView:
    """The array of an object with `__dlpack__`, shared.

    Parameters
    ----------
    values : object
        A producer.
    stream : int, optional
        What it gets as `stream`: it makes this stream wait for what it has enqueued.

    Returns
    -------
    ArrayView
        Its owner calls the producer's deleter in the end. Read-only where the producer made a copy:
        nobody would see what is written there.

    Raises
    ------
    BufferError
        A version, a type or a layout that cannot be viewed; whatever the producer raises.
    """
    try:
        capsule = values.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # a producer from before version 1
        capsule = values.__dlpack__(stream=stream)
    view, copied = _opened(capsule)
    return view.read_only() if copied else view


def from_capsule(capsule: object) -> ArrayView:
    """The array in a capsule that nobody has used yet. Raises `BufferError` as `from_dlpack`."""
    return _opened(capsule)[0]


def _opened(capsule: object) -> tuple[ArrayView, bool]:
    """The array in a capsule, and whether it is a copy."""
    managed = api().take_over(capsule)
    if managed is None:
        raise BufferError(f"a DLPack capsule can be used once, and this is none or used: {capsule}")
    foreign = Foreign(managed)  # from here on the deleter is called, whatever happens
    copied, readonly = (
        False,
        True,
    )  # before version 1 nobody could say, and JAX's arrays must not change
    if isinstance(managed, VersionedTensor):
        if managed.major != VERSION[0]:
            raise BufferError(f"DLPack {managed.major}.{managed.minor} is not understood here")
        if managed.flags & PADDED:
            raise BufferError("elements of less than a byte that fill a byte each")
        copied, readonly = bool(managed.flags & IS_COPIED), bool(managed.flags & READ_ONLY)
    tensor: DLTensor = managed.tensor
    shape, strides = _axes(tensor)
    view = ArrayView(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_name(tensor),
        device=(tensor.device.kind, tensor.device.index),
        readonly=readonly,
        owner=foreign,
    )
    if view.size and not tensor.data:
        raise BufferError(f"{view.size} elements at no address")
    return (typed(view, "float4_e2m1fn") if tensor.dtype.lanes == 2 else view), copied


def _axes(tensor: DLTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ndim = tensor.ndim
    if not 0 <= ndim <= MOST_AXES:
        raise BufferError(f"an array of {ndim} axes; 0 to {MOST_AXES} are allowed")
    if not ndim:
        return (), ()
    if not tensor.shape:
        raise BufferError(f"an array of {ndim} axes without a shape")
    axes = ctypes.c_int64 * ndim
    shape = tuple(axes.from_address(tensor.shape))
    if min(shape) < 0:
        raise BufferError(f"an array of shape {shape}")
    if not tensor.strides:  # allowed before 1.2, for dense arrays
        return shape, contiguous(shape)
    return shape, tuple(axes.from_address(tensor.strides))


def _name(tensor: DLTensor) -> str:
    """The type; uint8 for pairs of `float4_e2m1fn`, which some libraries make one element."""
    kind = tensor.dtype
    name = NAMES.get((kind.code, kind.bits))
    if name == "float4_e2m1fn" and kind.lanes == 2:
        return "uint8"
    if name is None or kind.lanes != 1:
        text = f"type code {kind.code} with {kind.bits} bits and {kind.lanes} lanes"
        raise BufferError(f"{text} is not understood here")
    return name


def from_interface(
    interface: Mapping[str, Any], owner: object, device: tuple[int, int]
) -> tuple[ArrayView, int | None]:
    """The array of a CUDA array interface, and the producer's stream where it names one.

    Version 3 names the stream after whose present work the data may be read: the caller makes its
    own wait for it. Raises `BufferError` for a mask, or a type or strides that cannot be viewed.
    """
    if interface.get("mask") is not None:
        raise BufferError("a masked array")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    if dtype.kind == "V" and dtype.itemsize in (1, 2, 4, 8) and dtype.names is None:
        dtype = np.dtype(f"u{dtype.itemsize}")  # a type that NumPy lacks: the bits
    if dtype.name not in CODES or not dtype.isnative:
        raise BufferError(f"elements of type {interface['typestr']!r}")
    steps = interface.get("strides")
    strides = contiguous(shape)
    if steps is not None:
        parts = [divmod(step, dtype.itemsize) for step in steps]
        if any(rest for size, (_, rest) in zip(shape, parts, strict=True) if size > 1):
            raise BufferError(f"strides of {tuple(steps)} bytes with items of {dtype.itemsize}")
        strides = tuple(step for step, _ in parts)
    address, readonly = interface["data"]
    view = ArrayView(
        address=int(address or 0),
        shape=shape,
        strides=strides,
        dtype=dtype.name,
        device=device,
        readonly=bool(readonly),
        owner=owner,
    )
    stream = interface.get("stream")
    if stream == 0:
        raise BufferError("stream 0 in a CUDA array interface: 1 or 2 say which default stream")
    return view, stream


def from_buffer(values: Any) -> NDArray[Any] | None:
    """The NumPy array of an object with a buffer; None without one.

    Never a copy. What NumPy cannot view raises whatever NumPy raises.
    """
    try:
        buffer = memoryview(values)
    except TypeError:
        return None
    return np.asarray(buffer)
