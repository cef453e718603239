"""kvcore's pages on a GPU as CuPy arrays.

::

    with stream, manager.lease(0, "key") as lease:
        keys = array(lease)
        kernel(keys)
        del keys  # before the lease is closed

CuPy's current stream comes after what kvcore has enqueued when the array is taken; `release` or the
end of the lease puts kvcore's later work after that stream. Types that CuPy lacks need a cast that
is asked for: `cast="uint8"` for the bits of float8.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.dlpack.exporter import Exporter, check_lease
from kvcore.errors import wrong

__all__ = ["array"]


def array(lease: Exporter, *, cast: Any = None) -> Any:
    """A lease as a CuPy array of the same memory.

    CuPy has no read-only arrays: don't write where the lease is read-only. `cast` and the errors
    are those of `for_numpy.array`.
    """
    check_lease(lease)
    if cast is None:
        if lease.dtype in UNKNOWN_TO_NUMPY:
            raise BufferError(f"CuPy has no {lease.dtype}; ask for a cast, such as cast='uint8'")
        return cupy.from_dlpack(lease)
    bits, wanted = cupy.from_dlpack(lease.bits()), np.dtype(cast)
    if wanted.itemsize != bits.dtype.itemsize:
        raise wrong("cast", f"a type of {bits.dtype.itemsize} bytes", wanted.name)
    return bits.view(wanted)
