"""Capsules as patterns: what NumPy exports, and what is corrected in the structure it made."""

from __future__ import annotations

from ctypes import Array, c_char, c_int64
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.dlpack.capsules import api
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY, Version
from kvcore.dlpack.structs import LEGACY, VERSIONED, DLTensor, ManagedTensor, VersionedTensor
from kvcore.dlpack.view import ArrayView, Window

NUMPYS: Final = (1, 0)
"""The version that NumPy is asked for; what says otherwise is corrected."""


class Bytes(NamedTuple):
    """What is written into a structure, and where."""

    place: int
    """In bytes from the start of the structure."""
    kind: type[Array[c_char]]
    """An array of so many bytes: to assign to its `raw` is the shortest way to an address."""
    content: bytes

    @classmethod
    def at(cls, place: int, content: bytes) -> Bytes:
        """With the kind that fits."""
        return cls(place, c_char * len(content), content)

    def is_in(self, structure: bytes) -> bool:
        """Whether it stands there already."""
        return structure[self.place : self.place + len(self.content)] == self.content


class Pattern(NamedTuple):
    """What all capsules of a view for consumers of one version have in common."""

    array: NDArray[Any]
    """What NumPy exports views of: integers at the address, which keep the owner."""
    version: Version | None
    """Which structure NumPy makes."""
    name: bytes
    deleter: int
    """Where the deleter is in the structure, in bytes."""
    corrections: tuple[Bytes, ...]
    axes: tuple[Bytes, ...]
    """Shape and strides where they are not the array's: behind the pointers that lie there."""


def pattern(view: ArrayView, version: Version | None, flags: int) -> Pattern:
    """How to make capsules that share a view.

    Parameters
    ----------
    view : ArrayView
        What is shared.
    version : (int, int), optional
        What the structure says it is. None: the structure from before version 1.
    flags : int
        Of the structure.
    """
    kind = ManagedTensor if version is None else VersionedTensor
    wanted, within = kind(), kind.tensor.offset
    tensor: DLTensor = wanted.tensor
    tensor.device.kind, tensor.device.index = view.device
    tensor.dtype.code, tensor.dtype.bits, _ = CODES[view.dtype]
    tensor.dtype.lanes, tensor.ndim = 1, len(view.shape)
    tensor.data = view.address if view.size else None  # as NumPy has it, where there is anything
    fields = [DLTensor.data, DLTensor.device, DLTensor.ndim, DLTensor.dtype]
    spans = [(within + field.offset, field.size) for field in fields]
    if isinstance(wanted, VersionedTensor) and version is not None:
        wanted.major, wanted.minor = version
        wanted.flags = flags
        fields = [VersionedTensor.major, VersionedTensor.minor, VersionedTensor.flags]
        spans += [(field.offset, field.size) for field in fields]
    source = view.bits() if view.dtype in UNKNOWN_TO_NUMPY else view
    array = np.asarray(Window(source))
    asked, name = (None, LEGACY) if version is None else (NUMPYS, VERSIONED)
    capsule = array.__dlpack__(max_version=asked)
    written = bytes(kind.from_address(api().pointer(capsule, name)))
    return Pattern(
        array,
        asked,
        name,
        kind.deleter.offset,
        tuple(one for one in _merged(bytes(wanted), spans) if not one.is_in(written)),
        () if source.shape == view.shape else _axes(view, within),
    )


def _axes(view: ArrayView, within: int) -> tuple[Bytes, ...]:
    numbers = c_int64 * len(view.shape)
    return (
        Bytes.at(within + DLTensor.shape.offset, bytes(numbers(*view.shape))),
        Bytes.at(within + DLTensor.strides.offset, bytes(numbers(*view.normal_strides))),
    )


def _merged(content: bytes, spans: list[tuple[int, int]]) -> tuple[Bytes, ...]:
    """The content of spans (start, size), neighbours joined."""
    starts: list[list[int]] = []
    for start, size in sorted(spans):
        if starts and starts[-1][1] == start:
            starts[-1][1] = start + size
        else:
            starts.append([start, start + size])
    return tuple(Bytes.at(start, content[start:end]) for start, end in starts)
