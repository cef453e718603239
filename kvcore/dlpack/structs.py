"""The C structures of DLPack, the numbers in them, and the names of its capsules."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from typing import Final

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
CUDA_MANAGED: Final = 13
HOST_KINDS: Final = (CPU, CUDA_HOST)
"""Kinds of memory that the CPU reads at its address."""

VERSION: Final = (1, 3)
"""The newest version whose rules this package follows."""

READ_ONLY: Final = 1
IS_COPIED: Final = 2
PADDED: Final = 4  # elements of less than a byte fill one each

LEGACY: Final = b"dltensor"
LEGACY_USED: Final = b"used_dltensor"
VERSIONED: Final = b"dltensor_versioned"
VERSIONED_USED: Final = b"used_dltensor_versioned"


class DLDevice(Structure):
    """Where memory lies."""

    _fields_ = (("kind", c_int32), ("index", c_int32))


class DLDataType(Structure):
    """What an element is."""

    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class DLTensor(Structure):
    """An array: strides count elements, the data begin `byte_offset` bytes behind `data`."""

    _fields_ = (
        ("data", pointer),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", pointer),
        ("strides", pointer),
        ("byte_offset", c_uint64),
    )


class ManagedTensor(Structure):
    """An array somebody else owns, as before version 1: cannot say that it is read-only."""

    _fields_ = (("tensor", DLTensor), ("context", pointer), ("deleter", pointer))


class VersionedTensor(Structure):
    """An array somebody else owns, since version 1."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", pointer),
        ("deleter", pointer),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    )
