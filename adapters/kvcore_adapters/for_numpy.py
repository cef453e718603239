"""kvcore's pages on the host as NumPy arrays.

::

    with manager.lease(0, "key") as lease:
        keys = array(lease)
        ...
        del keys  # before the lease is closed

Types that NumPy lacks need a cast that is asked for: `array(lease, cast=ml_dtypes.bfloat16)`, or
`cast="uint16"` for the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.dlpack.exporter import Exporter, check_lease
from kvcore.errors import wrong, wrong_type

__all__ = ["array"]


def array(lease: Exporter, *, cast: Any = None) -> NDArray[Any]:
    """A lease as a NumPy array of the same memory, read-only where the lease is.

    Parameters
    ----------
    lease : Lease
        Of a host device.
    cast : dtype, optional
        The type of the elements, for leases whose own NumPy lacks: one of as many bytes as the
        bits (`lease.bits().dtype`; two elements of float4 are one byte).

    Raises
    ------
    BufferError
        NumPy has no such type and no cast was asked for, or it is not the host's memory.
    ValueError, TypeError
        A cast of another size, or that is no type.
    """
    check_lease(lease)
    if cast is None:
        if lease.dtype in UNKNOWN_TO_NUMPY:
            raise BufferError(f"NumPy has no {lease.dtype}; ask for a cast, such as cast='uint8'")
        return np.from_dlpack(lease)
    try:
        wanted = np.dtype(cast)
    except TypeError as error:
        raise wrong_type("cast", "a type of NumPy", cast) from error
    bits = np.from_dlpack(lease.bits())
    if wanted.itemsize != bits.itemsize:
        raise wrong("cast", f"a type of {bits.itemsize} bytes", wanted.name)
    return bits.view(wanted)
