"""Arguments at the door: each function returns the plain value or raises a `kvcore.errors` error.

A `bool` is not an integer, a NumPy integer is one. Every message names the argument, what was
expected, what came and, where it helps, what to do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.errors import wrong, wrong_type

T = TypeVar("T")

LONGEST = (1 << 30) - 1  # tokens; a capacity plus a count stays within int32


def as_int(
    name: str, value: object, low: int | None = None, high: int | None = None, remedy: str = ""
) -> int:
    """`value` as an `int` in `[low, high]`.

    >>> as_int("capacity", np.int32(7), low=0)
    7
    >>> as_int("capacity", True)
    Traceback (most recent call last):
    TypeError: capacity: expected an int, got bool (True)
    >>> as_int("capacity", -1, low=0)
    Traceback (most recent call last):
    ValueError: capacity: expected at least 0, got -1
    """
    if type(value) is not int:
        value = _index(name, value, remedy)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"a value in [{low}, {high}]"
        raise wrong(name, bounds, value, remedy)
    return value


def _index(name: str, value: object, remedy: str) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise wrong_type(name, "an int", value, remedy)
    try:
        return operator.index(value)
    except TypeError:  # an array that is not a scalar
        raise wrong_type(name, "an int", value, remedy) from None


def as_optional_int(
    name: str, value: object, low: int | None = None, high: int | None = None, remedy: str = ""
) -> int | None:
    """`None`, or `as_int`."""
    return None if value is None else as_int(name, value, low, high, remedy)


def as_float(name: str, value: object, remedy: str = "") -> float:
    """`value` as a finite `float`; integers and NumPy floats are accepted, booleans are not.

    >>> as_float("max_util_for_resume", 1)
    1.0
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise wrong_type(name, "a number", value, remedy)
    if isinstance(value, np.complexfloating):
        raise wrong_type(name, "a real number", value, remedy)
    if not math.isfinite(value):
        raise wrong(name, "a finite number", value, remedy)
    return float(value)


def as_bool(name: str, value: object) -> bool:
    """`value` as a `bool`; nothing but `bool` and `numpy.bool_` is one.

    >>> as_bool("text_only", 1)
    Traceback (most recent call last):
    TypeError: text_only: expected a bool, got int (1)
    """
    if not isinstance(value, bool | np.bool_):
        raise wrong_type(name, "a bool", value)
    return bool(value)


def as_text(name: str, value: object) -> str:
    """`value` as a `str` that is not empty."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    if not value:
        raise wrong(name, "a name", value)
    return value


def as_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value` if it is one of `choices`.

    >>> as_choice("beam_mode", "tree", ("fork", "indirection"))
    Traceback (most recent call last):
    ValueError: beam_mode: expected one of 'fork', 'indirection', got 'tree'
    """
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    if value not in choices:
        raise wrong(name, "one of " + ", ".join(map(repr, choices)), value)
    return value


def as_items(name: str, value: object, what: str) -> list[Any]:
    """The items of an iterable; text and arrays without an axis are none. `what` is an item.

    >>> as_items("parents", 3, "an int")
    Traceback (most recent call last):
    TypeError: parents: expected a sequence, each item an int, got int (3)
    """
    none = isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0
    if none or not isinstance(value, Iterable):
        raise wrong_type(name, f"a sequence, each item {what}", value)
    return list(value)


def as_tuple(
    name: str, value: object, kind: type[T] | tuple[type[T], ...], what: str
) -> tuple[T, ...]:
    """The items of an iterable as a tuple; each must be a `kind`, described by `what`.

    >>> as_tuple("layers", 3, int, "a layer")
    Traceback (most recent call last):
    TypeError: layers: expected a sequence, each item a layer, got int (3)
    """
    items = tuple(as_items(name, value, what))
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            raise wrong_type(f"{name}[{index}]", what, item)
    return items


def token_counts(name: str, values: int | ArrayLike, size: int) -> int | NDArray[np.int32]:
    """A number of tokens for all sequences, or one each, as what adds to an int32 array.

    >>> token_counts("n", 1, 3), token_counts("n", (1, 2, 0), 3)
    (1, array([1, 2, 0], dtype=int32))
    """
    if type(values) is int:
        return as_int(name, values, 0, LONGEST)
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise wrong_type(name, "an int or an array of ints", values)
    if array.ndim > 1 or (array.ndim == 1 and array.size != size):
        raise wrong(name, f"{size} entries, one per cache", array.shape)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= LONGEST:
        raise wrong(name, f"values in [0, {LONGEST}]", values)
    return array.astype(np.int32)
