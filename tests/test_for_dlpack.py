"""The small adapters: NumPy, and whatever speaks DLPack."""

from __future__ import annotations

import numpy as np
import pytest
from kvcore_adapters import for_dlpack, for_numpy

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.helpers import typed_manager

LACKING = [name for name in DTYPE_BITS if array_type(name).name != name]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_numpy_has_the_pages_or_asks_for_a_cast(dtype):
    m = typed_manager(dtype=dtype)
    lease = m.lease(1, "value")
    if dtype in LACKING:
        with pytest.raises(BufferError, match=f"NumPy has no {dtype}; ask for a cast"):
            for_numpy.array(lease)
        its = for_numpy.array(lease, cast=lease.bits().dtype)
        with pytest.raises(ValueError, match="cast: expected a type of"):
            for_numpy.array(lease, cast="float64")
    else:
        its = for_numpy.array(lease)
        assert its.dtype == dtype
    mine = m.get_pages(1, "value")
    assert (its.ctypes.data, its.shape, its.strides) == (
        mine.ctypes.data, mine.shape, mine.strides)  # fmt: skip
    assert its.flags.writeable
    with pytest.raises(k.LeaseInUse):
        lease.close()


def test_numpy_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    m = typed_manager(dtype="bfloat16")
    its = for_numpy.array(m.lease(0, "key"), cast=ml_dtypes.bfloat16)
    its[2] = 1.5
    assert m.get_pages(0, "key")[2].max() == 0x3FC0
    readonly = for_numpy.array(m.lease(0, "key", readonly=True), cast=ml_dtypes.bfloat16)
    assert not readonly.flags.writeable


@pytest.mark.parametrize("capsule", [False, True])
def test_any_library_shares_pages(capsule):
    torch = pytest.importorskip("torch")
    m = typed_manager(dtype="float16")
    lease = m.lease(0, "key")
    take = torch.utils.dlpack.from_dlpack if capsule else torch.from_dlpack
    its = for_dlpack.share(lease, take, capsule=capsule)
    assert (its.data_ptr(), its.dtype) == (lease.address, torch.float16)
    assert lease.num_arrays == 1


def test_a_cast_is_made_of_the_bits():
    torch = pytest.importorskip("torch")
    m = typed_manager(dtype="float8_e5m2")
    lease = m.lease(0, "key")
    with pytest.raises(BufferError, match=r"float8_e5m2 has a code since DLPack 1\.1"):
        for_dlpack.share(lease, torch.from_dlpack)  # which says that it knows 1.0
    its = for_dlpack.share(lease, torch.from_dlpack, cast=lambda b: b.view(torch.float8_e5m2))
    assert (its.data_ptr(), its.dtype) == (lease.address, torch.float8_e5m2)


def test_a_stream_is_for_libraries_that_do_not_name_theirs():
    with typed_manager().lease(0, "key") as lease:
        with pytest.raises(ValueError, match="stream: expected None without capsule=True"):
            for_dlpack.share(lease, np.from_dlpack, stream=1)
        assert lease.num_arrays == 0


def test_what_kvcore_made_is_given_under_its_type():
    torch = pytest.importorskip("torch")
    device = HostDevice()
    made = np.arange(12, dtype=np.uint16).reshape(3, 4)
    its = for_dlpack.produced(device, made, dtype="bfloat16")
    taken = torch.from_dlpack(its)
    assert (taken.dtype, taken.data_ptr()) == (torch.bfloat16, made.ctypes.data)
    bits = np.from_dlpack(its.bits())
    assert (bits.dtype, bits.ctypes.data) == (np.uint16, made.ctypes.data)
    with pytest.raises(ValueError, match="stream"):
        its.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="not the bits"):
        for_dlpack.produced(device, made, dtype="float8_e5m2")


@pytest.mark.parametrize(("dtype", "bits"), [("float32", "uint32"), ("bool", "uint8")])
def test_bits_of_what_kvcore_made_are_unsigned_integers(dtype, bits):
    made = np.ones((2, 3), dtype)
    its = for_dlpack.produced(HostDevice(), made).bits()
    assert its.dtype == bits
    taken = for_dlpack.share(its, np.from_dlpack, cast=lambda array: array.view(dtype))
    assert (taken.dtype, taken.ctypes.data) == (made.dtype, made.ctypes.data)


def test_what_is_no_lease_is_named():
    calls = [for_numpy.array, lambda its: for_dlpack.share(its, np.from_dlpack)]
    for call in calls:
        with pytest.raises(TypeError, match=r"lease: expected a Lease, .*KVCacheManager\.lease"):
            call(None)
    with pytest.raises(TypeError, match=r"device: expected an open Device.*manager\.device"):
        for_dlpack.produced("host", np.zeros(1))
    with pytest.raises(TypeError, match="array: expected a NumPy array, got list"):
        for_dlpack.produced(HostDevice(), [1, 2])
    with pytest.raises(ValueError, match=r"dtype: expected one of .*, got 'float9'"):
        for_dlpack.produced(HostDevice(), np.zeros(1, np.uint8), dtype="float9")
    lease = typed_manager().lease(0, "key")
    with pytest.raises(TypeError, match="cast: expected a type of NumPy, got str"):
        for_numpy.array(lease, cast="float9")


def test_adapters_import_no_framework_but_their_own():
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).parents[1]
    code = """
import sys
import kvcore_adapters, kvcore_adapters.for_dlpack, kvcore_adapters.for_numpy
print([name for name in ("torch", "jax", "cupy") if name in sys.modules])
"""
    path = f"{root}:{root / 'adapters'}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
