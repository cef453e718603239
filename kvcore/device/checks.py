"""Argument checks that every device makes, before anything is enqueued.

They read `dtype`, `shape` and `strides` only and so serve NumPy and CuPy arrays alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.device.base import (
    Array,
    BeamArrays,
    Memory,
    PageGeometry,
    PageStack,
    PathArrays,
    TailPlace,
)
from kvcore.device.beams import MAX_BEAMS
from kvcore.device.formats import PageNumbers, PoolNumbers, RowRanges
from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
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


def check_foreign(name: str, kind: str | None, dtype: str | None, may_write: bool) -> None:
    """Checks what came to `as_array`: its type (None: one that NumPy has), the right to write."""
    if dtype is not None and kind in UNKNOWN_TO_NUMPY and kind != dtype:
        text = f"{dtype}, as declared, or its bits as unsigned integers"
        raise TypeError(f"{name}: expected {text}, got {kind}; cast them first")
    if not may_write:
        raise TypeError(f"{name}: expected a writable array, got a read-only one")


def check_copy(source: Any, target: Any, kind: type[Any]) -> None:
    """Checks the arguments of `copy`."""
    for name, array in (("source", source), ("target", target)):
        if not isinstance(array, kind):
            raise wrong_type(name, f"a {kind.__name__} of this device", array)
    if target.shape != source.shape or target.dtype != source.dtype:
        text = f"{source.dtype} {source.shape}, as the source"
        raise wrong("target", text, f"{target.dtype} {target.shape}")


def check_fetch(array: Array, target: Any, kind: type[Any]) -> None:
    """Checks the arguments of `fetch`."""
    check_array("array", array, kind, array.dtype, array.shape)
    if not isinstance(target, np.ndarray):
        raise wrong_type("target", "a host array (numpy.ndarray)", target)
    if target.shape != array.shape or target.dtype != array.dtype:
        text = f"{array.dtype} {array.shape}, as the array"
        raise wrong("target", text, f"{target.dtype} {target.shape}")
    if not target.flags.c_contiguous:
        raise wrong("target", "a C-contiguous array", target.strides)


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


def check_beams(beams: BeamArrays, sources: Array, kind: type[Any]) -> int:
    """Checks the arrays of a batch with beams, and `sources`; gives how many positions it has."""
    check_array("beams.rows", beams.rows, kind, INT32, (ANY,))
    shape = beams.rows.shape
    for name in ("first", "width", "shared", "blocks", "valid"):
        check_array(f"beams.{name}", getattr(beams, name), kind, INT32, shape)
    check_array("sources", sources, kind, INT32, shape)
    if not 0 <= beams.max_width <= MAX_BEAMS:
        raise wrong("beams.max_width", f"0 to {MAX_BEAMS}", beams.max_width)
    return int(shape[0])


def check_step_rows(
    table: Array, beams: BeamArrays, parents: Array, sources: Array, kind: type[Any]
) -> None:
    """Checks the arguments of `step_rows`."""
    check_array("table", table, kind, INT32, (ANY, ANY, ANY), strided=True)
    check_beams(beams, sources, kind)
    check_array("parents", parents, kind, INT32, (ANY,))


def check_copy_tails(
    table: Array, beams: BeamArrays, sources: Array, tokens_per_block: int, kind: type[Any]
) -> None:
    """Checks the arguments of `copy_tails`."""
    if tokens_per_block < 1:
        raise wrong("tokens_per_block", "at least 1", tokens_per_block)
    check_array("table", table, kind, INT32, (ANY, ANY), strided=True)
    check_beams(beams, sources, kind)


def check_permute_rows(
    arrays: Sequence[Array],
    parents: Array,
    width: int,
    starts: Array | None,
    tokens: Array | None,
    token_axis: int,
    kind: type[Any],
) -> int:
    """Checks the arguments of `permute_rows`; gives the number of requests."""
    if not 1 <= width <= MAX_BEAMS:
        raise wrong("width", f"1 to {MAX_BEAMS}", width)
    check_array("parents", parents, kind, INT32, (ANY,))
    count = int(parents.shape[0])
    if starts is not None:
        check_array("starts", starts, kind, INT32, (ANY,))
        if not starts.shape[0]:
            raise wrong("starts", "one entry more than requests", 0)
    elif count % width:
        raise wrong("width", f"a divisor of the {count} rows", width, "or give starts")
    requests = count // width if starts is None else int(starts.shape[0]) - 1
    if tokens is not None:
        check_array("tokens", tokens, kind, INT32, (requests,))
        if token_axis < 1:
            raise wrong("token_axis", "at least 1, behind the axis of rows", token_axis)
    for array in arrays:
        _check_dense(array, count, token_axis if tokens is not None else 0, kind)
    return requests


def _check_dense(array: Array, count: int, token_axis: int, kind: type[Any]) -> None:
    """Checks an array of contiguous rows."""
    if not isinstance(array, kind):
        raise wrong_type("arrays", f"{kind.__name__} arrays of this device", array)
    if array.dtype.hasobject:
        raise wrong("arrays", "items of plain bytes", str(array.dtype))
    if not array.ndim or array.shape[0] != count:
        raise wrong("arrays", f"{count} rows, one per entry of parents", array.shape)
    if array.ndim <= token_axis:
        raise wrong("arrays", f"an axis {token_axis} (token_axis)", array.shape)
    nbytes = array.dtype.itemsize
    for size, stride in zip(array.shape[:0:-1], array.strides[:0:-1], strict=True):
        if size > 1 and stride != nbytes and array.size:
            raise wrong("arrays", "contiguous rows", array.strides, f"shape {array.shape}")
        nbytes *= size
    if count > 1 and array.strides[0] < nbytes:
        raise wrong("arrays", "rows that do not overlap, in ascending order", array.strides)


def check_distinct(addresses: Sequence[int]) -> None:
    """No array may come twice: on a GPU nobody knows what it would hold then."""
    if len(set(addresses)) < len(addresses):
        raise wrong("arrays", "each array once", addresses)


def check_paths(cells: Array, beams: PathArrays, kind: type[Any]) -> int:
    """Checks cells and the arrays of a batch with paths; gives how many positions it has."""
    check_array("cells", cells, kind, INT32, (ANY, ANY), strided=True)
    check_array("beams.rows", beams.rows, kind, INT32, (ANY,))
    shape = beams.rows.shape
    for name in ("first", "width", "base", "own", "valid"):
        check_array(f"beams.{name}", getattr(beams, name), kind, INT32, shape)
    if not 0 <= beams.max_width <= MAX_BEAMS:
        raise wrong("beams.max_width", f"0 to {MAX_BEAMS}", beams.max_width)
    return int(shape[0])


def check_take_paths(cells: Array, beams: PathArrays, out: Array, kind: type[Any]) -> None:
    """Checks the arguments of `take_paths`."""
    count = check_paths(cells, beams, kind)
    check_array("out", out, kind, INT32, (ANY, ANY))
    if len(out) > count:
        raise wrong("out", f"at most {count} rows, one per position of the batch", len(out))


def check_map_paths(
    tables: Array,
    cells: Array,
    beams: PathArrays,
    starts: Array,
    ends: Array,
    out: Array,
    tokens_per_block: int,
    kind: type[Any],
) -> None:
    """Checks the arguments of `map_paths`."""
    if tokens_per_block < 1:
        raise wrong("tokens_per_block", "at least 1", tokens_per_block)
    check_array("tables", tables, kind, INT32, (ANY, ANY, ANY), strided=True)
    check_paths(cells, beams, kind)
    check_array("starts", starts, kind, INT32, beams.rows.shape)
    check_array("ends", ends, kind, INT32, beams.rows.shape)
    check_array("out", out, kind, INT32, (len(tables), ANY, 2))


def check_tails(places: Sequence[TailPlace]) -> None:
    """Checks that the buffers of tails lie in their slots and are whole numbers of tokens."""
    for place in places:
        if place.nbytes < 1 or not 0 <= place.offset <= place.slot_bytes - place.nbytes:
            text = f"a buffer of at least 1 byte inside its slot of {place.slot_bytes}"
            raise wrong("places", text, f"offset {place.offset}, nbytes {place.nbytes}")
        if place.token_bytes < 0 or (place.token_bytes and place.nbytes % place.token_bytes):
            text = f"token_bytes 0 or a divisor of nbytes={place.nbytes}"
            raise wrong("places", text, place.token_bytes)


def check_pairs(pairs: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A private copy of the argument of `copy_tokens`."""
    if not isinstance(pairs, np.ndarray):
        raise wrong_type("pairs", "a host array (numpy.ndarray)", pairs)
    if pairs.ndim != 2 or len(pairs) != 3 or pairs.dtype != INT32:
        raise wrong("pairs", "int32 [3, n]: sources, targets, tokens", described(pairs))
    copy: np.ndarray[Any, np.dtype[np.int32]] = pairs.copy()
    return copy


def check_block_offsets(
    tables: Array,
    rows: Array,
    out: Array,
    pools: tuple[PoolNumbers, ...],
    no_page: int,
    kind: type[Any],
) -> None:
    """Checks the arguments of `block_offsets`."""
    check_array("tables", tables, kind, INT32, (ANY, ANY, ANY), strided=True)
    check_array("rows", rows, kind, INT32, (ANY,))
    check_array("out", out, kind, INT32, (len(pools), ANY, 2, ANY))
    if out.shape[1] < rows.shape[0]:
        raise wrong("out", f"at least {rows.shape[0]} rows, one per entry of rows", out.shape)
    if max(out.shape) >= 2**31:
        raise wrong("out", "axes below 2**31", out.shape)
    for number, pool in enumerate(pools):
        if not 0 <= pool.layer_group < tables.shape[0]:
            text = f"one of {tables.shape[0]} layer groups"
            raise wrong(f"pools[{number}].layer_group", text, pool.layer_group)
        _check_numbers(f"pools[{number}]", pool.expansion, pool.scale, pool.kv_offset)
    _check_numbers("no_page", 1, no_page)


def check_row_pages(
    table: Array,
    ranges: RowRanges,
    arrays: dict[str, Array],
    numbers: PageNumbers,
    page_tokens: int,
    no_page: int,
    kind: type[Any],
) -> None:
    """Checks the arguments of `csr_pages` and `ragged_pages`; `arrays` are those to write."""
    check_array("table", table, kind, INT32, (ANY, ANY), strided=True)
    check_array("ranges.rows", ranges.rows, kind, INT32, (ANY,))
    rows = int(ranges.rows.shape[0])
    for name in ("starts", "ends"):
        check_array(f"ranges.{name}", getattr(ranges, name), kind, INT32, (rows,))
    shapes = {"indices": (ANY,), "page_indices": (rows, ANY), "num_seqs": (1,)}
    shapes |= dict.fromkeys(("indptr", "cu_q_lens"), (rows + 1,))
    shapes |= dict.fromkeys(("last_page_len", "kv_lens"), (rows,))
    for name, array in arrays.items():
        check_array(name, array, kind, INT32, shapes[name])
        if array.shape[-1] >= 2**31:
            raise wrong(name, "fewer than 2**31 entries", array.shape)
    _check_numbers("numbers", numbers.expansion, numbers.scale, numbers.offset)
    _check_numbers("page_tokens", page_tokens)
    _check_numbers("no_page", 1, no_page)


def check_token_slots(mapping: Array, out: Array, scale: int, offset: int, kind: type[Any]) -> None:
    """Checks the arguments of `token_slots`."""
    check_array("mapping", mapping, kind, INT32, (ANY, 2))
    check_array("out", out, kind, INT64, (mapping.shape[0],))
    _check_numbers("scale, offset", 1, scale, offset)


def _check_numbers(name: str, size: int, *numbers: int) -> None:
    """`size` counts pages or tokens; the others are what a kernel reckons with."""
    if not 1 <= size < 2**31:
        raise wrong(name, "at least 1 and below 2**31", size)
    if any(not -(2**31) <= number < 2**31 for number in numbers):
        raise wrong(name, "numbers that fit int32", numbers)


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


def not_taken(name: str, expected: str, values: object, remedy: str = "") -> TypeError:
    """The error for what `as_array` cannot take."""
    return TypeError(str(wrong(name, expected, described(values), remedy)))


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
