"""`ArrayView`: where an array lies and what it is, for any kind of memory and any element type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY, bits_name
from kvcore.dlpack.structs import CPU, HOST_KINDS

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ArrayView:
    """A strided array in memory that somebody keeps alive. A description: it owns no bytes.

    Attributes
    ----------
    address : int
        Of the first element.
    shape, strides : tuple of int
        Both count elements; strides may be 0 or negative.
    dtype : str
        The name of the element type, one of `kvcore.dlpack.codes.CODES`.
    device : (int, int)
        DLPack's kind of memory and the number of the device.
    readonly : bool
        Whether nobody may write through it.
    owner : object
        Keeps the memory for as long as it lives.
    """

    address: int
    shape: Shape
    strides: Shape
    dtype: str
    device: tuple[int, int] = (CPU, 0)
    readonly: bool = False
    owner: object = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last byte of any element, where no stride is negative."""
        spans = ((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.address + -(-(sum(spans) + 1) * CODES[self.dtype].bits // 8) * bool(self.size)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row after row without gaps."""
        dense = zip(self.shape, self.strides, contiguous(self.shape), strict=True)
        return not self.size or all(n == 1 or given == want for n, given, want in dense)

    @property
    def normal_strides(self) -> Shape:
        """The strides, with what axes of less than two elements should have in this order.

        Such a stride is never used, but consumers read the order of axes from it.
        """
        found, step = [], 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            found.append(stride if size > 1 else step)
            step = found[-1] * max(size, 1)
        return tuple(reversed(found))

    def read_only(self) -> ArrayView:
        """The same for reading."""
        return replace(self, readonly=True)

    def bits(self) -> ArrayView:
        """The same bytes as unsigned integers of the same size; pairs of `float4_e2m1fn` as uint8.

        Raises `BufferError` where elements of half a byte don't lie in pairs along the last axis.
        """
        name = bits_name(self.dtype)
        if CODES[self.dtype].bits >= 8:
            return replace(self, dtype=name)
        *outer, inner = zip(self.shape, self.strides, strict=True) if self.shape else [(1, 1)]
        if inner[0] % 2 or (inner[0] and inner[1] != 1) or any(step % 2 for _, step in outer):
            raise BufferError(
                f"{self.dtype}: pairs that share a byte must be neighbours along the last axis, "
                f"but the shape is {self.shape} with strides {self.strides}"
            )
        shape = (*(size for size, _ in outer), inner[0] // 2)
        strides = (*(step // 2 for _, step in outer), 1)
        return replace(self, dtype=name, shape=shape, strides=strides)

    def interface(self, version: int = 3) -> dict[str, Any]:
        """The dictionary of the array interface, NumPy's or CUDA's.

        Raises `BufferError` for a type that NumPy does not have: take `bits()`.
        """
        if self.dtype in UNKNOWN_TO_NUMPY:
            text = f"{self.dtype} has no name in the array interface; take bits() for its bits"
            raise BufferError(text)
        dtype = np.dtype(self.dtype)
        return {
            "version": version,
            "shape": self.shape,
            "typestr": dtype.str,
            "strides": tuple(step * dtype.itemsize for step in self.normal_strides),
            "data": (self.address, self.readonly),
        }

    def numpy(self) -> NDArray[Any]:
        """A NumPy array of the same memory, which keeps the owner. For memory of the host.

        Types that NumPy does not have come as their bits.
        """
        if self.device[0] not in HOST_KINDS:
            raise BufferError(f"NumPy cannot view memory of kind {self.device[0]}")
        view = self.bits() if self.dtype in UNKNOWN_TO_NUMPY else self
        return np.asarray(Window(view))


class Window:
    """The base of a NumPy array at an address: keeps the owner for as long as the array lives."""

    __slots__ = ("__array_interface__", "__weakref__", "view")

    def __init__(self, view: ArrayView, interface: dict[str, Any] | None = None) -> None:
        self.view = view
        self.__array_interface__ = interface or view.interface()


def contiguous(shape: Shape) -> Shape:
    """The strides of a dense array.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def view_of(array: NDArray[Any], dtype: str | None = None) -> ArrayView:
    """The view of a NumPy array, which it keeps.

    Parameters
    ----------
    array : ndarray
        Of a type that DLPack has, in the byte order of this machine.
    dtype : str, optional
        What its bits are, for types that NumPy does not have: `"bfloat16"` of a uint16 array. Two
        elements of `"float4_e2m1fn"` are one of a uint8 array, so the last axis doubles.

    Raises
    ------
    BufferError
        DLPack has no such type, byte order or strides.
    """
    name = array.dtype.name
    if name not in CODES or not array.dtype.isnative:
        raise BufferError(f"DLPack has no type for {array.dtype!r} arrays")
    steps = [divmod(step, array.itemsize) for step in array.strides]
    if any(rest for size, (_, rest) in zip(array.shape, steps, strict=True) if size > 1):
        text = f"strides of {array.strides} bytes are no multiples of items of {array.itemsize}"
        raise BufferError(text)
    view = ArrayView(
        address=array.ctypes.data,
        shape=array.shape,
        strides=tuple(step for step, _ in steps),
        dtype=name,
        readonly=not array.flags.writeable,
        owner=array,
    )
    return view if dtype is None else typed(view, dtype)


def typed(view: ArrayView, dtype: str) -> ArrayView:
    """The inverse of `bits`: integers as the elements whose bits they are.

    Raises `BufferError` where the sizes differ, or halves of bytes would not lie side by side.
    """
    if bits_name(dtype) != view.dtype:
        text = f"{view.dtype} are not the bits of {dtype}, which are {bits_name(dtype)}"
        raise BufferError(text)
    if CODES[dtype].bits >= 8:
        return replace(view, dtype=dtype)
    if not view.shape or (view.shape[-1] > 1 and view.strides[-1] != 1):
        raise BufferError(f"{dtype}: the bytes must be neighbours along the last axis")
    shape = (*view.shape[:-1], 2 * view.shape[-1])
    strides = (*(2 * step for step in view.strides[:-1]), 1)
    return replace(view, dtype=dtype, shape=shape, strides=strides)
