"""Element types by name: their codes in DLPack, and since when it has them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
Version = tuple[int, int]
ALWAYS: Final = (0, 0)


class Code(NamedTuple):
    """How DLPack writes a type."""

    code: int
    bits: int
    since: Version


CODES: Final = MappingProxyType(
    {
        "bool": Code(BOOL, 8, ALWAYS),
        **{f"int{bits}": Code(INT, bits, ALWAYS) for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": Code(UINT, bits, ALWAYS) for bits in (8, 16, 32, 64)},
        **{f"float{bits}": Code(FLOAT, bits, ALWAYS) for bits in (16, 32, 64)},
        "complex64": Code(COMPLEX, 64, ALWAYS),
        "complex128": Code(COMPLEX, 128, ALWAYS),
        "bfloat16": Code(BFLOAT, 16, ALWAYS),
        "float8_e4m3fn": Code(10, 8, (1, 1)),
        "float8_e5m2": Code(12, 8, (1, 1)),
        "float8_e8m0fnu": Code(14, 8, (1, 1)),
        "float4_e2m1fn": Code(17, 4, (1, 1)),
    }
)
"""By name. `float4_e2m1fn` is packed: the element of even index is in the low half of its byte."""

NAMES: Final = MappingProxyType({(code, bits): name for name, (code, bits, _) in CODES.items()})

UNKNOWN_TO_NUMPY: Final = frozenset(
    name for name in CODES if name.startswith(("bfloat16", "float8", "float4"))
)
"""NumPy and CuPy see their bits, as unsigned integers."""


def bits_name(name: str) -> str:
    """The unsigned integer that holds the bits of a type; of two elements for `float4_e2m1fn`.

    >>> bits_name("bfloat16"), bits_name("float4_e2m1fn")
    ('uint16', 'uint8')
    """
    return f"uint{max(CODES[name].bits, 8)}"


def numpy_type(name: str) -> np.dtype[Any]:
    """The NumPy type of the same name. For types that NumPy has."""
    return np.dtype(name)
