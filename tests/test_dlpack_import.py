"""Arrays of other libraries on the host device: every protocol, any layout, exact or refused."""

from __future__ import annotations

import array as arrays
import ctypes
import gc
import mmap

import numpy as np
import pytest

from kvcore.device.host import HostDevice
from kvcore.dlpack.capsules import api
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.exports import exports
from kvcore.dlpack.importer import from_capsule, from_dlpack, from_interface
from kvcore.dlpack.structs import CUDA, IS_COPIED, PADDED
from kvcore.dlpack.view import view_of

DEVICE = HostDevice()


def numbers(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


LAYOUTS = {
    "dense": lambda a: a,
    "transposed": lambda a: a.T,
    "every other": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1, :, ::-1],
    "repeated": lambda a: np.broadcast_to(a[0, 0], (3, 2, 6)),
    "one element": lambda a: a[1:2, 2:3, 3:4],
    "none": lambda a: a[:, :0],
    "no axes": lambda a: a[1, 2, 3],
    "six axes": lambda a: a.reshape(2, 2, 1, 5, 3, 2)[:, :, :, ::2],
}


class Producer:
    """A library that speaks DLPack only, of a version of its own."""

    def __init__(self, array, version=(1, 0), **changes):
        self.array, self.version, self.changes = array, version, changes
        self.asked = []

    def __dlpack_device__(self):
        return self.changes.get("device", (1, 0))

    def __dlpack__(self, *, stream=None, **asked):
        self.asked.append((stream, asked))
        if self.version is None and asked:
            raise TypeError("unexpected keyword argument")
        exporter = Exporter(view_of(self.array, self.changes.get("dtype")))
        capsule = exporter.__dlpack__(max_version=self.version)
        managed, _ = api().find(capsule)
        for name, value in self.changes.get("tensor", {}).items():
            setattr(managed.tensor, name, value)
        for name, value in self.changes.get("managed", {}).items():
            setattr(managed, name, value)
        return capsule


class Interface:
    """A library that speaks NumPy's array interface only."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


@pytest.fixture(autouse=True)
def nothing_stays_out():
    gc.collect()
    before = len(exports())
    yield
    gc.collect()
    assert len(exports()) == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrap", [Interface, Producer, lambda a: Producer(a, None), Exporter])
def test_any_layout_is_taken_as_it_is(layout, wrap):
    if layout == "backwards" and wrap is not Interface:
        return  # no producer of ours gives these; the next test does
    mine = np.asarray(LAYOUTS[layout](numbers(4, 5, 6)))
    if not mine.flags.writeable and wrap is not Interface:
        mine = np.ndarray(mine.shape, mine.dtype, mine.base, 0, mine.strides)
    found = DEVICE.as_array(wrap(view_of(mine)) if wrap is Exporter else wrap(mine))
    assert (found.shape, found.dtype) == (mine.shape, mine.dtype)
    np.testing.assert_array_equal(found, mine)
    if mine.size:
        assert found.ctypes.data == mine.ctypes.data
    used = [i for i, size in enumerate(mine.shape) if size > 1] if mine.size else []
    assert [found.strides[i] for i in used] == [mine.strides[i] for i in used]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_any_layout_of_a_framework_is_taken_as_it_is(library):
    module = pytest.importorskip(library)
    whole = numbers(4, 5, 6)
    if library == "torch":
        t = module.from_numpy(whole)
        cases = [t, t.permute(2, 0, 1), t[:, ::2], t[0, 0].expand(3, 2, 6), t[1:2, 2:3], t[:, :0],
                 t[1, 2, 3]]  # fmt: skip
        for its in cases:
            found = DEVICE.as_array(its)
            assert not its.numel() or found.ctypes.data == its.data_ptr()
            np.testing.assert_array_equal(found, its.numpy())
        return
    mine = module.device_put(whole, module.devices("cpu")[0])
    for its in (mine, mine.T, mine.sum()):
        np.testing.assert_array_equal(DEVICE.as_array(its), np.asarray(its))


def test_numpys_own_capsules_may_run_backwards():
    mine = LAYOUTS["backwards"](numbers(4, 5, 6))
    for version in (None, (1, 0)):
        taken = from_capsule(mine.__dlpack__(max_version=version))
        assert taken.strides == (-30, 6, -1)
        np.testing.assert_array_equal(taken.numpy(), mine)


def test_buffers_are_taken():
    grid = memoryview(bytearray(range(24))).cast("B", (4, 6))
    for thing, expected in (
        (bytearray(b"abc"), [97, 98, 99]),
        (arrays.array("d", [1.5, 2.5]), [1.5, 2.5]),
        ((ctypes.c_int32 * 3)(4, 5, 6), [4, 5, 6]),
        (grid, [list(range(i, i + 6)) for i in range(0, 24, 6)]),
        (memoryview(bytearray(range(6)))[::2], [0, 2, 4]),
    ):
        found = DEVICE.as_array(thing, writable=True)
        assert found.tolist() == expected
    with mmap.mmap(-1, 8) as pages:
        found = DEVICE.as_array(pages)
        pages[3] = 7
        assert found.tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
        del found
    assert DEVICE.as_array(b"xy").tolist() == [120, 121]
    with pytest.raises(TypeError, match="writable"):
        DEVICE.as_array(b"xy", writable=True)


def test_what_is_no_array_is_refused():
    for thing in (object(), [1, 2], None, 3, "text", {}):
        with pytest.raises(TypeError, match="values: expected a NumPy array, or one with DLPack"):
            DEVICE.as_array(thing)
    with pytest.raises(TypeError, match="in host memory"):
        DEVICE.as_array(Producer(numbers(3), device=(CUDA, 0)))


# -- types -----------------------------------------------------------------------------------------

BITS = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e8m0fnu": np.uint8,
    "float4_e2m1fn": np.uint8,
}


@pytest.mark.parametrize("name", BITS)
def test_types_that_numpy_lacks_come_as_bits_and_only_as_what_was_declared(name):
    bits = np.arange(24).reshape(4, 6).astype(BITS[name])
    its = Producer(bits, (1, 1), dtype=name)
    for dtype in (None, name):
        found = DEVICE.as_array(its, dtype=dtype)
        assert (found.dtype, found.ctypes.data) == (bits.dtype, bits.ctypes.data)
        np.testing.assert_array_equal(found, bits)
    for dtype in {*BITS, "float16", "uint8"} - {name}:
        with pytest.raises(TypeError, match=f"values: expected {dtype}, as declared.*got {name}"):
            DEVICE.as_array(its, dtype=dtype)


@pytest.mark.parametrize("name", BITS)
def test_torch_has_all_of_these_types(name):
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(np.arange(24).reshape(4, 6).astype(BITS[name]))
    its = bits.view(getattr(torch, name + "_x2" * (name == "float4_e2m1fn")))
    found = DEVICE.as_array(its, dtype=name)
    assert (found.ctypes.data, found.tolist()) == (bits.data_ptr(), bits.tolist())
    with pytest.raises(TypeError, match=f"got {name}"):
        DEVICE.as_array(its, dtype="float32")


def test_arrays_of_ml_dtypes_are_checked_by_name():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    its = np.zeros(4, ml_dtypes.bfloat16)
    assert DEVICE.as_array(its, dtype="bfloat16") is its
    with pytest.raises(TypeError, match="got bfloat16"):
        DEVICE.as_array(its, dtype="float16")
    assert Exporter(view_of(its)).dtype == "bfloat16"


def test_read_only_arrays_are_for_reading():
    mine = numbers(3)
    mine.flags.writeable = False
    for its in (mine, Interface(mine), Producer(mine)):
        assert not DEVICE.as_array(its).flags.writeable
        with pytest.raises(TypeError, match="values: expected a writable array"):
            DEVICE.as_array(its, writable=True)
    mine = numbers(3)
    for its in (mine, Interface(mine), Producer(mine)):
        DEVICE.as_array(its, writable=True)[1] = 9
        assert mine.tolist() == [0, 9, 2]
    old = Producer(mine, None)  # cannot say whether it may be written
    assert DEVICE.as_array(old).tolist() == [0, 9, 2]
    with pytest.raises(TypeError, match="values: expected a writable array"):
        DEVICE.as_array(old, writable=True)


@pytest.mark.parametrize("version", [(1, 0), (1, 3)])
def test_copies_are_for_reading(version):
    """What is written into a copy of the producer's is seen by nobody."""
    its = Producer(numbers(3), version, managed={"flags": IS_COPIED})
    assert DEVICE.as_array(its).tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="writable"):
        DEVICE.as_array(its, writable=True)


@pytest.mark.parametrize("writable", [False, True])
def test_arrays_that_are_more_than_their_memory_says_are_refused(writable):
    """Masks would be ignored, and bytes in another order be other numbers."""
    masked = np.ma.masked_array(numbers(3), [0, 1, 0])
    for its, text in ((masked, "masked"), (numbers(3).astype(">f4"), "byte order")):
        with pytest.raises(TypeError, match=f"values: expected .*{text}"):
            DEVICE.as_array(its, writable=writable)


def test_a_matrix_is_an_array_like_any_other():
    its = numbers(2, 3).view(np.matrix)
    taken = DEVICE.as_array(its, writable=True)
    assert (type(taken), taken[None].shape) == (np.ndarray, (1, 2, 3))
    assert taken.ctypes.data == its.ctypes.data


def test_immutable_arrays_of_jax_are_not_written():
    jax = pytest.importorskip("jax")
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16):
        its = jax.device_put(jax.numpy.zeros(3, dtype), jax.devices("cpu")[0])
        assert DEVICE.as_array(its).ctypes.data == its.unsafe_buffer_pointer()
        with pytest.raises(TypeError, match="values: expected a writable array"):
            DEVICE.as_array(its, writable=True)


# -- capsules that are wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor": {"ndim": 65}}, "an array of 65 axes"),
        ({"tensor": {"ndim": -1}}, "an array of -1 axes"),
        ({"tensor": {"shape": None}}, "2 axes without a shape"),
        ({"tensor": {"data": None}}, "6 elements at no address"),
        ({"managed": {"flags": PADDED}}, "less than a byte"),
        ({"managed": {"major": 2}}, r"DLPack 2\.0 is not understood"),
    ],
)
def test_wrong_structures_are_refused_and_given_back(changes, text):
    its = Producer(numbers(2, 3), **changes)
    with pytest.raises(BufferError, match=text):
        from_dlpack(its)
    with pytest.raises(TypeError, match=text):
        DEVICE.as_array(its)


@pytest.mark.parametrize(("code", "bits", "lanes"), [(3, 64, 1), (2, 32, 4), (1, 4, 1), (15, 6, 1)])
def test_types_that_are_unknown_are_named(code, bits, lanes):
    capsule = Exporter(view_of(numbers(2, 3))).__dlpack__()
    dtype = api().find(capsule)[0].tensor.dtype
    dtype.code, dtype.bits, dtype.lanes = code, bits, lanes
    with pytest.raises(BufferError, match=f"code {code} with {bits} bits and {lanes} lanes"):
        from_capsule(capsule)


def test_negative_lengths_are_refused():
    capsule = Exporter(view_of(numbers(2, 3))).__dlpack__()
    ctypes.c_int64.from_address(api().find(capsule)[0].tensor.shape).value = -2
    with pytest.raises(BufferError, match=r"shape \(-2, 3\)"):
        from_capsule(capsule)


def test_missing_strides_mean_dense_and_offsets_count():
    mine = numbers(2, 3, 4)
    capsule = Exporter(view_of(mine)).__dlpack__()
    tensor = api().find(capsule)[0].tensor
    tensor.strides, tensor.data, tensor.byte_offset = None, tensor.data - 40, 40
    taken = from_capsule(capsule)
    assert (taken.strides, taken.address) == ((12, 4, 1), mine.ctypes.data)
    np.testing.assert_array_equal(taken.numpy(), mine)


def test_null_deleters_are_not_called():
    capsule = Exporter(view_of(numbers(3))).__dlpack__(max_version=(1, 0))
    managed, _ = api().find(capsule)
    deleter, managed.deleter = managed.deleter, None
    taken = from_capsule(capsule)
    assert taken.numpy().tolist() == [0, 1, 2]
    del taken
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(ctypes.addressof(managed))


def test_producers_are_asked_for_the_newest_version_they_know():
    new, old = Producer(numbers(3)), Producer(numbers(3), None)
    from_dlpack(new, 77)
    from_dlpack(old, 77)
    assert new.asked == [(77, {"max_version": (1, 3)})]
    assert old.asked == [(77, {"max_version": (1, 3)}), (77, {})]


def test_an_error_of_the_producer_is_passed_on():
    class Refusing(Producer):
        def __dlpack__(self, **asked):
            raise BufferError("not today")

    with pytest.raises(BufferError, match="not today"):
        from_dlpack(Refusing(numbers(3)))
    with pytest.raises(TypeError, match="not today"):
        DEVICE.as_array(Refusing(numbers(3)))


def test_a_hundred_thousand_imports_leave_nothing():
    mine = numbers(2, 3)
    its = Exporter(view_of(mine).bits())
    import sys

    before = sys.getrefcount(mine), len(exports())
    for _ in range(100_000):
        from_dlpack(its)
    assert (sys.getrefcount(mine), len(exports())) == before


# -- CUDA's array interface: no GPU is touched -----------------------------------------------------


def interface(**changes):
    return {"shape": (4, 6), "typestr": "<f4", "version": 3, "data": (4096, False), **changes}


def test_the_interface_of_cuda_arrays_is_read():
    owner = object()
    view, stream = from_interface(interface(), owner, (CUDA, 1))
    assert (view.address, view.shape, view.strides) == (4096, (4, 6), (6, 1))
    assert (view.dtype, view.device, view.readonly) == ("float32", (CUDA, 1), False)
    assert view.owner is owner
    assert stream is None
    for given in (1, 2, 94_000):
        assert from_interface(interface(stream=given), owner, (CUDA, 0))[1] == given
    steps = interface(strides=(-48, 8), data=(4096, True))
    view, _ = from_interface(steps, owner, (CUDA, 0))
    assert (view.strides, view.readonly) == ((-12, 2), True)
    assert from_interface(interface(typestr="<V2"), owner, (CUDA, 0))[0].dtype == "uint16"
    empty, _ = from_interface(interface(shape=(0, 6), data=(0, False)), owner, (CUDA, 0))
    assert (empty.address, empty.size) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stream": 0}, "stream 0"),
        ({"mask": object()}, "masked"),
        ({"typestr": ">f4"}, "elements of type '>f4'"),
        ({"typestr": "<U3"}, "elements of type '<U3'"),
        ({"strides": (6, 1)}, r"strides of \(6, 1\) bytes with items of 4"),
    ],
)
def test_what_cannot_be_viewed_is_refused(changes, text):
    with pytest.raises(BufferError, match=text):
        from_interface(interface(**changes), object(), (CUDA, 0))
