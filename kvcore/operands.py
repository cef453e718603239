"""The arrays that a step's operations read and write, checked against the pages they go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.errors import wrong, wrong_type
from kvcore.layer_config import array_type

if TYPE_CHECKING:
    from kvcore.device.base import Array, PageStack, Stream
    from kvcore.runtime import Runtime


def as_operand(
    runtime: Runtime,
    role: str,
    values: Any,
    stack: PageStack,
    layers: int | Sequence[int],
    sizes: tuple[int, int],
    stream: Stream,
    writable: bool = False,
) -> Array:
    """`values` as `[L, N, H, D]` on the device; the array of one layer has no L.

    N is one of `sizes`: the tokens of the step, or the most a batch takes. What a foreign array's
    producer has enqueued comes before later work of `stream`.
    """
    one = layers.__class__ is int or not isinstance(layers, Sequence)
    first: Any = layers if one else layers[0]  # type: ignore[index]
    declared = runtime.layout.place(first, role).buffer.dtype
    name = f"out: {role!r}" if writable else f"buffers[{role!r}]"
    array = runtime.device.as_array(
        values, stream=stream, dtype=declared, writable=writable, name=name
    )
    geometry, given = stack.geometry, array.shape
    tokens = array.shape[0 if one else 1] if array.ndim > (not one) else -1
    if array.ndim == (2 if one else 3) and geometry.heads == 1:
        array = array[..., None, :]
    if one:
        array = array[None]
    expected = (stack.num_layers, tokens, geometry.heads, geometry.dim)
    if array.shape != expected or tokens not in sizes:
        shape = f"[{stack.num_layers}, {sizes[0]}, {geometry.heads}, {geometry.dim}]"
        if one:
            shape = f"[{sizes[0]}, {geometry.heads}, {geometry.dim}]"
        raise wrong(name, f"shape {shape}", list(given))
    _check_type(name, array, geometry.itemsize, str(declared))
    steps = zip(array.shape, array.strides, strict=True)
    if writable and any(size > 1 and not step for size, step in steps):
        text = "elements with a place each"
        raise wrong(name, text, array.strides, "a repeated axis keeps the last one")
    return array


def _check_type(name: str, array: Array, itemsize: int, declared: str) -> None:
    """Raises `TypeError` for what is neither of the declared type nor its bits.

    Bits are unsigned integers; where NumPy lacks the type, signed ones as well.
    """
    if array.dtype == array_type(declared):
        return
    if array.dtype.itemsize != itemsize:
        raise wrong_type(name, f"items of {itemsize} bytes ({declared})", array.dtype)
    bits = "ui" if declared in UNKNOWN_TO_NUMPY else "u"
    if array.dtype.kind not in bits and array.dtype.name != declared:
        text = f"{declared}, as declared, or its bits as unsigned integers"
        raise wrong_type(name, text, array.dtype, "cast them first")


def new_operand(
    runtime: Runtime,
    stack: PageStack,
    layers: int | Sequence[int],
    role: str,
    tokens: int,
    stream: Stream,
) -> Array:
    """A new array for `tokens` tokens of some layers, recycled in the order of `stream`."""
    geometry = stack.geometry
    first = layers[0] if isinstance(layers, Sequence) else layers
    dtype = array_type(str(runtime.layout.place(first, role).buffer.dtype))
    shape: tuple[int, ...] = (tokens, geometry.heads, geometry.dim)
    if isinstance(layers, Sequence):
        shape = (stack.num_layers, *shape)
    return runtime.device.empty(shape, dtype, stream=stream)
