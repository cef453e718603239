"""Pages and arrays on a GPU in CuPy, torch and JAX: the same memory under the same type.

Each framework that is missing, or sees no GPU, is skipped by itself.
"""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import kvcore as k
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.gpu.sharing import adapter, pointer, raw
from tests.interop_matrix import LAYOUTS, dense_bits

TYPES = [name for name in CODES if not name.startswith("complex")]


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_pages_are_shared_under_their_type(scene, name, dtype):
    take = adapter(name)
    s = scene(dtype=dtype)
    s.fill(1)
    lease = s.m.lease(layer_group=0) if name == "jax" else s.m.lease(1, "value")
    if name == "jax" and dtype.endswith("64"):
        with pytest.raises(BufferError, match="jax_enable_x64"):
            take(lease)
        return
    if name == "jax" and dtype.startswith("float4"):
        its = take(lease.bits())
    elif name == "cupy" and array_type(dtype).name != dtype:
        with pytest.raises(BufferError, match=f"CuPy has no {dtype}"):
            take(lease)
        its = take(lease, cast=lease.bits().dtype)
    else:
        its = take(lease)
    assert pointer(its) == lease.address
    place = 4 * s.slot if name == "jax" else s.slot  # of the four buffers' pages in a slot, one
    found = raw(its).reshape(its.shape[0], -1)[place]
    assert set(found.tolist()) == {1}
    del its


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_matrix(rig, name, layout):
    """As `tests/test_interop_matrix.py`, with arrays on the GPU."""
    from kvcore_adapters.for_dlpack import produced

    take, cut = adapter(name), LAYOUTS[layout].cut
    refused = {"backwards"} | (
        {"gaps between pages", "every other element", "repeated (stride 0)"}
        if name == "jax"
        else set()
    )
    for dtype in TYPES:
        bits = dense_bits(dtype, LAYOUTS[layout].shape)
        its = cupy.asarray(bits)
        if layout == "repeated (stride 0)":
            its = cupy.lib.stride_tricks.as_strided(its, (3, its.shape[1]), (0, its.strides[1]))
        else:
            its = cut(its)
        cupy.cuda.runtime.deviceSynchronize()
        lacking = dtype in UNKNOWN_TO_NUMPY
        try:
            ours = produced(rig.device, its, stream=rig.stream, dtype=dtype if lacking else None)
        except BufferError:
            assert dtype == "float4_e2m1fn"
            continue
        if (name == "cupy" and lacking) or (name == "jax" and dtype.startswith("float4")):
            ours = ours.bits()
        if layout in refused or (name == "jax" and dtype.endswith("64")):
            with pytest.raises(BufferError):
                take(ours)
            continue
        taken = take(ours)
        assert not its.size or pointer(taken) == its.data.ptr, dtype
        np.testing.assert_array_equal(raw(taken), raw(its), err_msg=dtype)
        if name != "jax" or cut is LAYOUTS["1 axis"].cut:
            back = rig.device.as_array(taken, dtype=dtype, stream=rig.stream)
            assert not its.size or back.data.ptr == its.data.ptr, dtype
            np.testing.assert_array_equal(raw(back), raw(its), err_msg=dtype)


def test_cupy_takes_pages_by_the_array_interface(scene):
    s = scene()
    s.fill(3)
    lease = s.m.lease(0, "key", stream=s.rig.stream)
    its = cupy.asarray(lease)
    assert its.data.ptr == lease.address
    assert set(raw(its[s.slot]).tolist()) == {3}
    with pytest.raises(k.LeaseInUse):
        s.m._runtime.leases.refuse("test")
    lease.close()
    del lease
    with pytest.raises(k.LeaseInUse):  # CuPy's array holds the lease object
        s.m._runtime.leases.refuse("test")
    del its
    s.m._runtime.leases.refuse("test")
