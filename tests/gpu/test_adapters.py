"""Pages of a GPU as arrays of CuPy."""

from __future__ import annotations

import cupy
import pytest
from kvcore_adapters import for_cupy

import kvcore as k
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.helpers import typed_manager


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_cupy_has_the_pages_or_asks_for_a_cast(device, dtype):
    m = typed_manager(slots=65_536, device=device, stream=device.create_stream(), dtype=dtype)
    lease, lacking = m.lease(1, "value"), array_type(dtype).name != dtype
    consumer = cupy.cuda.Stream(non_blocking=True)
    with consumer:
        if lacking:
            with pytest.raises(BufferError, match=f"CuPy has no {dtype}; ask for a cast"):
                for_cupy.array(lease)
            with pytest.raises(ValueError, match="cast: expected a type of"):
                for_cupy.array(lease, cast="complex128")
        its = for_cupy.array(lease, cast=array_type(dtype) if lacking else None)
    mine = m.get_pages(1, "value")
    assert (its.data.ptr, its.shape, its.strides, its.dtype) == (
        mine.data.ptr, mine.shape, mine.strides, mine.dtype)  # fmt: skip
    with pytest.raises(k.LeaseInUse):
        lease.close()
    del its, mine
    m.shutdown()  # hands the pages back from the consumer's stream, which is still there
