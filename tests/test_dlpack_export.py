"""The producer's side of DLPack on host memory: capsules, versions, types, lifetimes."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from kvcore.dlpack.capsules import api
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY, bits_name
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.exports import exports
from kvcore.dlpack.importer import from_capsule
from kvcore.dlpack.structs import CPU, CUDA, CUDA_HOST, IS_COPIED, READ_ONLY
from kvcore.dlpack.view import ArrayView, view_of

VERSIONS = [None, (0, 8), (1, 0), (1, 1), (1, 3), (2, 0)]


def numbers(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


class Found:
    """What a consumer finds in a capsule, which this keeps."""

    def __init__(self, capsule):
        self.capsule = capsule
        self.managed, self.name = api().find(capsule)
        self.tensor = self.managed.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple((ctypes.c_int64 * self.tensor.ndim).from_address(self.tensor.shape))

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple((ctypes.c_int64 * self.tensor.ndim).from_address(self.tensor.strides))


@pytest.fixture(autouse=True)
def nothing_stays_out():
    gc.collect()
    before = len(exports())
    yield
    gc.collect()
    assert len(exports()) == before


# -- what is in a capsule --------------------------------------------------------------------------


def test_old_capsules_of_all_types_are_given_to_nobody_else():
    its = Exporter(view_of(numbers(2)))
    assert Found(its.old_capsule()).name == b"dltensor"
    for device in ((1, 3), (CUDA, 0)):  # (1, 3) is also a version
        with pytest.raises(BufferError, match="cannot be shared"):
            its.__dlpack__(max_version=(0, 8), dl_device=device)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_is_of_the_version_that_is_asked_for(version):
    found = Found(Exporter(view_of(numbers(2, 3))).__dlpack__(max_version=version))
    if version is None or version < (1, 0):
        assert found.name == b"dltensor"
    else:
        assert found.name == b"dltensor_versioned"
        assert (found.managed.major, found.managed.minor) == min(version, (1, 3))
        assert found.managed.flags == 0


@pytest.mark.parametrize("version", [None, (1, 3)])
def test_strides_are_always_there_and_the_offset_is_none(version):
    """Also of axes that hold one element or none, where nobody uses them."""
    whole = numbers(4, 5, 6)
    cases = {
        (4, 5, 6): (whole, (30, 6, 1)),
        (4, 3, 2): (whole[:, ::2, 1:3], (30, 12, 1)),
        (6, 5, 4): (whole.T, (1, 6, 30)),
        (4, 5, 1): (whole[:, :, 3:4], (30, 6, 1)),
        (1, 5, 6): (whole[2:3], (30, 6, 1)),
        (0, 5, 6): (whole[:0], (30, 6, 1)),
        (4, 0, 6): (whole[:, :0], (30, 6, 1)),
        (5, 6): (np.broadcast_to(whole[0, 0], (5, 6)), (0, 1)),
        (1, 5): (whole[3:2:-1, :, 0], (30, 6)),
    }
    for shape, (array, strides) in cases.items():
        copy = None if array.flags.writeable or version else True
        ours = Exporter(view_of(array))
        found = None  # the one before
        before = len(exports())
        found = Found(ours.__dlpack__(max_version=version, copy=copy))
        assert found.shape == shape
        assert len(exports()) == before + 1  # also where there is nothing to hold
        if copy is None:
            assert found.strides == strides
            assert found.tensor.data == (array.ctypes.data if array.size else None)
        assert found.tensor.byte_offset == 0


def test_arrays_that_run_backwards_are_not_given():
    """A library would abort the whole process (pytorch/pytorch#188023)."""
    ours = Exporter(view_of(numbers(3, 4)[:, ::-1]))
    for version in VERSIONS:
        with pytest.raises(BufferError, match="runs backwards"):
            ours.__dlpack__(max_version=version)
    np.testing.assert_array_equal(np.from_dlpack(ours, copy=True), numbers(3, 4)[:, ::-1])
    assert np.asarray(ours).strides == (16, -4)


def test_an_array_without_axes_has_no_shape():
    array = np.array(2.5)
    found = Found(Exporter(view_of(array)).__dlpack__())
    tensor = found.tensor
    assert (tensor.ndim, tensor.shape, tensor.strides) == (0, None, None)
    assert ctypes.c_double.from_address(tensor.data).value == 2.5


@pytest.mark.parametrize("name", CODES)
def test_types_have_their_codes_where_the_consumer_knows_them(name):
    code, bits, since = CODES[name]
    dtype = bits_name(name) if name in UNKNOWN_TO_NUMPY else name
    array = np.arange(8).astype(dtype).reshape(2, 4)
    ours = Exporter(view_of(array, name if name in UNKNOWN_TO_NUMPY else None))
    for version in VERSIONS:
        if (version or (0, 8)) < since:
            text = rf"{name} has a code since DLPack 1.1 .*bits"
            for copy in (None, True):
                with pytest.raises(BufferError, match=text):
                    ours.__dlpack__(max_version=version, copy=copy)
            found = Found(ours.bits().__dlpack__(max_version=version))
            expected = (1, max(bits, 8), 1)
        else:
            found = Found(ours.__dlpack__(max_version=version))
            expected = (code, bits, 1)
        dtype = found.tensor.dtype
        assert (dtype.code, dtype.bits, dtype.lanes) == expected
        assert found.tensor.data == array.ctypes.data


def test_float4_is_packed_two_to_a_byte():
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, :2]
    ours = Exporter(view_of(array, "float4_e2m1fn"))
    assert (ours.shape, ours.strides) == ((2, 2, 8), (24, 8, 1))
    found = Found(ours.__dlpack__(max_version=(1, 1)))
    assert (found.shape, found.strides) == ((2, 2, 8), (24, 8, 1))
    assert found.managed.flags == 0  # packed
    halves = ours.bits()
    assert (halves.dtype, halves.shape, halves.strides) == ("uint8", (2, 2, 4), (12, 4, 1))
    np.testing.assert_array_equal(np.from_dlpack(halves), array)


@pytest.mark.parametrize(
    "view",
    [
        ArrayView(address=64, shape=(4, 3), strides=(4, 1), dtype="float4_e2m1fn"),
        ArrayView(address=64, shape=(4, 4), strides=(1, 4), dtype="float4_e2m1fn"),
        ArrayView(address=64, shape=(4, 4), strides=(5, 1), dtype="float4_e2m1fn"),
        ArrayView(address=64, shape=(), strides=(), dtype="float4_e2m1fn"),
    ],
)
def test_halves_of_bytes_that_are_no_pairs_have_no_bits(view):
    with pytest.raises(BufferError, match="pairs"):
        view.bits()


def test_bits_are_taken_back_only_by_types_of_the_same_size():
    for wrong in ("float8_e5m2", "float4_e2m1fn"):
        with pytest.raises(BufferError, match=f"uint16 are not the bits of {wrong}"):
            view_of(np.zeros((2, 2), np.uint16), wrong)
    with pytest.raises(BufferError, match="neighbours"):
        view_of(np.zeros((2, 4), np.uint8)[:, ::2], "float4_e2m1fn")


def test_what_has_no_type_or_strides_is_refused():
    pairs = np.zeros(4, [("a", "i4"), ("b", "i2")])
    for array in (np.zeros(2, "U3"), np.zeros(2, ">f4"), np.zeros(2, object), pairs):
        with pytest.raises(BufferError, match="no type"):
            view_of(array)
    with pytest.raises(BufferError, match="strides of"):
        view_of(pairs["a"])


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [0, 1, 2, -1, 94_000_000_000, "s"])
def test_the_host_has_no_streams(stream):
    ours = Exporter(view_of(numbers(3)))
    for copy in (None, True):
        with pytest.raises(ValueError, match="stream: expected None for memory of the host"):
            ours.__dlpack__(stream=stream, copy=copy)


def test_wrong_arguments_are_named():
    ours = Exporter(view_of(numbers(3)))
    for wrong in (1, "one", "11", (1,), [1, 0], (1, 2, 3), ("a", 0), (1.5, 0), (True, 0)):
        with pytest.raises(TypeError, match="max_version"):
            ours.__dlpack__(max_version=wrong)
        with pytest.raises(TypeError, match="dl_device"):
            ours.__dlpack__(dl_device=wrong)
        with pytest.raises(TypeError, match="max_version"):
            ours.__dlpack__(max_version=wrong, copy=True)
    with pytest.raises(ValueError, match="max_version: expected at least 0, got -1"):
        ours.__dlpack__(max_version=(-1, 0))


@pytest.mark.parametrize("copy", [None, False])
def test_another_device_needs_a_copy(copy):
    ours = Exporter(view_of(numbers(3)))
    for device in ((CUDA, 0), (CPU, 1), (CUDA_HOST, 0)):
        with pytest.raises(BufferError, match="copy=True"):
            ours.__dlpack__(dl_device=device, copy=copy)
    with pytest.raises(BufferError, match="cannot be copied to"):
        ours.__dlpack__(dl_device=(CUDA, 0), copy=True)


def test_pinned_memory_is_the_cpus_too():
    array = numbers(2, 3)
    view = view_of(array)
    ours = Exporter(ArrayView(**{n: getattr(view, n) for n in ("address", "shape", "strides")},
                              dtype="float32", device=(CUDA_HOST, 0), owner=array))  # fmt: skip
    assert ours.__dlpack_device__() == (CUDA_HOST, 0)
    for asked, kind in ((None, CUDA_HOST), ((CUDA_HOST, 0), CUDA_HOST), ((CPU, 0), CPU)):
        tensor = (found := Found(ours.__dlpack__(max_version=(1, 0), dl_device=asked))).tensor
        assert (tensor.device.kind, tensor.data, found.shape) == (kind, view.address, (2, 3))
    taken = np.from_dlpack(ours)
    assert taken.ctypes.data == view.address


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_copy_is_the_consumers_own(version):
    array = numbers(3, 4)[:, ::2]
    array.flags.writeable = False
    ours = Exporter(view_of(array))
    for device in (None, (CPU, 0)):
        capsule = ours.__dlpack__(max_version=version, copy=True, dl_device=device)
        assert not version or Found(capsule).managed.flags == IS_COPIED
        taken = from_capsule(capsule)
        assert (taken.strides, taken.readonly) == ((2, 1), version is None)  # cannot say so
        assert taken.address != array.ctypes.data
        np.testing.assert_array_equal(taken.numpy(), array)
    bits = np.arange(6, dtype=np.uint16)
    ours = Exporter(view_of(bits, "bfloat16"))
    taken = from_capsule(ours.__dlpack__(max_version=version, copy=True))
    assert (taken.dtype, taken.numpy().tolist()) == ("bfloat16", bits.tolist())


def test_read_only_arrays_say_so_or_are_not_given():
    array = numbers(2, 3)
    array.flags.writeable = False
    ours = Exporter(view_of(array))
    found = Found(ours.__dlpack__(max_version=(1, 0)))
    assert found.managed.flags == READ_ONLY
    assert not np.from_dlpack(ours).flags.writeable
    for version in (None, (0, 5)):
        with pytest.raises(BufferError, match="read-only"):
            ours.__dlpack__(max_version=version)


def test_numpy_sees_it_by_the_array_interface_too():
    array = numbers(4, 6)[::2, ::-1]
    taken = np.asarray(Exporter(view_of(array)))
    assert (taken.ctypes.data, taken.strides) == (array.ctypes.data, array.strides)
    taken[0, 0] = 99
    assert array[0, 0] == 99
    bits = Exporter(view_of(np.zeros(4, np.uint16), "bfloat16"))
    with pytest.raises(BufferError, match=r"NumPy has no bfloat16; give it bits\(\)"):
        np.asarray(bits)
    assert np.asarray(bits.bits()).dtype == np.uint16
