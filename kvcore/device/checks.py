"""Argument checks that every device makes, before anything is enqueued.

They read `dtype`, `shape` and `strides` only and so serve NumPy and CuPy arrays alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.device.base import Array, Memory, PageGeometry, PageStack
from kvcore.errors import wrong, wrong_type

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
ANY = -1
"""An axis of any length."""


def check_array(
    name: str,
    array: Array,
    kind: type[Any],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    strided: bool = False,
) -> None:
    """Checks an array's type, dtype and shape, and its strides.

    Parameters
    ----------
    name : str
        The argument, for the message.
    array : Array
        What came.
    kind : type
        The device's class of arrays.
    dtype : numpy.dtype
        The dtype it must have.
    shape : tuple of int
        The shape it must have; `ANY` stands for any length.
    strided : bool, default False
        Whether only the last axis must be contiguous, instead of the whole array.
    """
    if not isinstance(array, kind):
        raise wrong_type(name, f"a {kind.__name__} of this device", array)
    found: tuple[int, ...] = array.shape
    if array.dtype != dtype:
        raise wrong(name, f"dtype {dtype}", str(array.dtype))
    if len(found) != len(shape):
        raise wrong(name, f"shape {_text(shape)}", found)
    for want, got in zip(shape, found, strict=True):
        if want not in (got, ANY):
            raise wrong(name, f"shape {_text(shape)}", found)
    if array.flags.c_contiguous:
        return
    if not strided:
        raise wrong(name, "a C-contiguous array", array.strides, "the strides cannot be read")
    if found[-1] > 1 and array.strides[-1] != dtype.itemsize:
        raise wrong(name, "a contiguous last axis", array.strides)


def _text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join("any" if axis == ANY else str(axis) for axis in shape) + ")"


def check_tokens(
    name: str, arrays: Sequence[Array], kind: type[Any], stack: PageStack, num_tokens: int
) -> None:
    """Checks the sources of an append or the targets of a gather: `[L, N, H, D]` per role."""
    g = stack.geometry
    shape = stack.num_layers, num_tokens, g.heads, g.dim
    if len(arrays) != stack.num_roles:
        raise wrong(name, f"{stack.num_roles} arrays, one per role", len(arrays))
    for array in arrays:
        if not isinstance(array, kind):
            raise wrong_type(name, f"{kind.__name__} arrays of this device", array)
        if array.shape != shape:
            raise wrong(name, f"shape {shape} (layers, tokens, heads, dim)", array.shape)
        if array.dtype.itemsize != g.itemsize or array.dtype.hasobject:
            raise wrong(name, f"items of {g.itemsize} bytes", str(array.dtype))


def check_ids(name: str, ids: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A private int32 copy of slot ids that came in a host array `[N]`."""
    if not isinstance(ids, np.ndarray):
        raise wrong_type(name, "a host array (numpy.ndarray)", ids)
    if ids.ndim != 1 or ids.dtype != INT32:
        raise wrong(name, "a one-dimensional int32 array", f"{ids.dtype} {ids.shape}")
    return ids.copy()


def check_places(
    places: Sequence[tuple[Memory, int, int]], num_roles: int, geometry: PageGeometry
) -> None:
    """Checks that the buffers of a page stack lie in their slots, and tokens in their page."""
    check_geometry(geometry)
    if num_roles < 1:
        raise wrong("num_roles", "at least 1", num_roles)
    if not places or len(places) % num_roles:
        raise wrong("places", f"a positive multiple of num_roles={num_roles}", len(places))
    size = geometry.expansion * geometry.page_bytes
    for _, slot_bytes, offset in places:
        if not 0 <= offset <= slot_bytes - size:
            text = f"a buffer of {size} bytes inside its slot of {slot_bytes}"
            raise wrong("places", text, offset)


def check_geometry(geometry: PageGeometry) -> None:
    """Checks that every token of a page ends inside the page."""
    g = geometry
    if min(g.page_tokens, g.expansion, g.heads, g.dim, g.itemsize) < 1:
        raise wrong("geometry", "positive sizes", g)
    if min(g.token_stride, g.head_stride) < 0:
        raise wrong("geometry", "strides that are not negative", g)
    last = (g.page_tokens - 1) * g.token_stride + (g.heads - 1) * g.head_stride
    if last + g.dim * g.itemsize > g.page_bytes:
        raise wrong("geometry", f"tokens that end within page_bytes={g.page_bytes}", g)


class _Described:
    """Stands in a message for a value whose own text would be too long."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def described(values: object) -> object:
    """An array by its type, dtype and shape, for messages; anything else as it is."""
    dtype, shape = getattr(values, "dtype", None), getattr(values, "shape", None)
    if dtype is None or shape is None:
        return values
    return _Described(f"{type(values).__qualname__} of {dtype} {tuple(shape)}")
