"""Arrays of other libraries on a GPU: streams, devices, types, strides."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.structs import CPU, CUDA, CUDA_HOST, CUDA_MANAGED
from kvcore.dlpack.view import ArrayView, contiguous
from tests.emulated import driver

pytestmark = pytest.mark.usefixtures("held")


class Producer(Exporter):
    """A library on a GPU, which notes the streams it is asked for."""

    def __init__(self, array, device=(CUDA, 0), dtype=None):
        shape = array.shape
        super().__init__(
            ArrayView(
                address=array.data.ptr, shape=shape, strides=contiguous(shape), device=device,
                dtype=dtype or array.dtype.name, owner=array,
            )
        )  # fmt: skip
        self.streams = []

    def _hold(self, stream):
        self.streams.append(stream)


def test_producers_are_told_the_stream_that_waits(rig):
    its = Producer(rig.put(np.arange(6, dtype=np.int32).reshape(2, 3)))
    taken = rig.device.as_array(its)
    assert isinstance(taken, cupy.ndarray)
    assert rig.get(taken).tolist() == [[0, 1, 2], [3, 4, 5]]
    rig.device.as_array(its, stream=rig.stream)
    for handle in (0, 1, 2):
        rig.device.as_array(its, stream=rig.device.stream(handle))
    driver.switch("capturing", True)
    rig.device.as_array(its, stream=rig.stream)
    driver.switch("capturing", False)
    assert its.streams == [None, rig.stream.handle, 1, 1, 2, -1]


def test_managed_memory_is_every_devices(rig):
    array = rig.put(np.arange(4, dtype=np.int32))
    assert rig.device.as_array(Producer(array, (CUDA_MANAGED, 1))).data.ptr == array.data.ptr
    for device in ((CUDA, 1), (CPU, 0), (CUDA_HOST, 0)):
        with pytest.raises(TypeError, match="cuda:0"):
            rig.device.as_array(Producer(array, device))


def test_types_that_cupy_lacks_come_as_bits(rig):
    array = rig.put(np.arange(12, dtype=np.uint16).reshape(3, 4))
    its = Producer(array, dtype="bfloat16")
    taken = rig.device.as_array(its, dtype="bfloat16", stream=rig.stream)
    assert (taken.dtype, taken.data.ptr) == (np.uint16, array.data.ptr)
    with pytest.raises(TypeError, match="got bfloat16"):
        rig.device.as_array(its, dtype="float16")


class Interface:
    """An array of another library, by the CUDA array interface."""

    def __init__(self, array, **changes):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.data.ptr, False), "strides": None, **changes,
        }  # fmt: skip


def test_streams_of_the_array_interface_are_waited_for(rig, orders):
    array = rig.put(np.zeros(4, np.int32))
    producer = rig.device.create_stream()
    orders.clear()
    rig.device.as_array(Interface(array, stream=producer.handle), stream=rig.stream)
    rig.device.as_array(Interface(array, stream=1), stream=rig.stream)
    rig.device.as_array(Interface(array, stream=None), stream=rig.stream)
    rig.device.as_array(Interface(array, stream=producer.handle))
    assert orders == [(rig.stream.handle, producer.handle), (rig.stream.handle, 1)]
    with pytest.raises(TypeError, match="writable"):
        rig.device.as_array(Interface(array, data=(array.data.ptr, True)), writable=True)
    for changes in ({"stream": 0}, {"mask": 1}, {"typestr": "<U2"}):
        with pytest.raises(TypeError, match="values"):
            rig.device.as_array(Interface(array, **changes))


def test_dlpack_comes_first_where_a_stream_has_to_wait(rig):
    """It can order any two streams; the interface may name none."""

    class Both(Producer, Interface):
        def __init__(self, array):
            Producer.__init__(self, array)
            Interface.__init__(self, array)

    its = Both(rig.put(np.zeros(4, np.int32)))
    rig.device.as_array(its)
    assert its.streams == []
    rig.device.as_array(its, stream=rig.stream)
    assert its.streams == [rig.stream.handle]


def test_arrays_are_copied_with_any_strides(rig):
    source = rig.put(np.arange(24, dtype=np.int32).reshape(4, 6)).T[::2]
    target = rig.put(np.zeros((3, 8), np.int32))[:, ::2]
    rig.device.copy(source, target, stream=rig.stream)
    np.testing.assert_array_equal(rig.get(target), np.arange(24).reshape(4, 6).T[::2])
    with pytest.raises(ValueError, match="target"):
        rig.device.copy(source, source[:1], stream=rig.stream)
    with pytest.raises(TypeError, match="source"):
        rig.device.copy(np.zeros(3), source, stream=rig.stream)
