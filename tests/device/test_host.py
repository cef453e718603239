"""The host device through the battery, immediate and deferred, and what it alone promises."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest

from kvcore.device.base import BeamArrays, TailPlace
from kvcore.device.host import HostDevice, MetaDevice
from kvcore.device.hostmemory import POISON_LIMIT
from kvcore.errors import OutOfMemoryError, StateError
from tests.device.battery import Battery
from tests.device.harness import Rig, Stack, geometry

POISON_WORD = int.from_bytes(b"\xa5" * 4, "little", signed=True)


class TestHost(Battery):
    """Work runs at once."""

    @pytest.fixture
    def device(self):
        device = HostDevice()
        yield device
        device.close()


@pytest.mark.parametrize("seed", [0, 1])
class TestDeferredHost(Battery):
    """Work runs in any order that the battery's own events allow."""

    @pytest.fixture
    def device(self, seed):
        device = HostDevice(deferred=True, seed=seed)
        yield device
        device.close()


# -- memory ----------------------------------------------------------------------------------------


def test_views_outlive_their_memory():
    memory = HostDevice().reserve(8192, 8192, 4096)
    view = memory.array(np.int32, (2048,))
    view[:] = 7
    memory.close()
    assert memory.nbytes == 0
    view += 1  # the addresses are still there
    assert view.max() in (1, 8)  # zeroed where the system takes pages back


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep the pages")
def test_shrinking_and_closing_give_the_pages_back():
    memory = HostDevice().reserve(4 * 4096, 4 * 4096, 4096)
    view = memory.array(np.uint8, (4 * 4096,))
    view[:] = 1
    memory.resize(4096)
    assert (int(view[:4096].min()), int(view[4096:].max())) == (1, 0)
    memory.close()
    assert int(view.max()) == 0


def test_reserved_addresses_cost_no_memory():
    memory = HostDevice().reserve(1 << 36, 1 << 35, 4096)
    last = memory.array(np.int64, (1,), (1 << 35) - 8)
    last[0] = -3
    assert last.ctypes.data == memory.base + (1 << 35) - 8
    memory.close()


def test_more_addresses_than_the_system_has():
    with pytest.raises(OutOfMemoryError, match="host addresses"):
        HostDevice().reserve(1 << 62, 0, 4096)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((4096, 8192, 4096), "nbytes"), ((-1, 0, 4096), "max_bytes"), ((4096, 0, 0), "grain")],
)
@pytest.mark.parametrize("device", [HostDevice(), MetaDevice()], ids=["host", "meta"])
def test_wrong_reservations_are_refused(device, arguments, name):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        device.reserve(*arguments)


# -- deferred work ---------------------------------------------------------------------------------


def test_new_memory_of_a_deferred_device_is_poisoned():
    device = HostDevice(deferred=True)
    memory = device.reserve(4 * 4096, 4096, 4096)
    view = memory.array(np.int32, (4096,))
    assert set(view[:1024].tolist()) == {POISON_WORD}
    view[:1024] = 1
    memory.resize(8192)
    assert (set(view[:1024].tolist()), set(view[1024:2048].tolist())) == ({1}, {POISON_WORD})
    memory.resize(0)
    memory.resize(4096)
    assert set(view[:1024].tolist()) == {POISON_WORD}
    assert set(device.empty((3, 5), np.int32).ravel().tolist()) == {POISON_WORD}
    assert set(device.pinned(9).tolist()) == {0xA5}


def test_very_large_memory_is_not_touched_for_poison():
    memory = HostDevice(deferred=True).reserve(POISON_LIMIT + 4096, POISON_LIMIT + 4096, 4096)
    assert memory.array(np.int32, (1,)).tolist() == [0]


def test_deferred_work_reads_its_arguments_when_it_runs():
    rig = Rig(HostDevice(deferred=True), None)
    rig.stream = rig.device.create_stream()
    stack = Stack.one_pool(rig, geometry())
    mapping, sources = np.array([[1, 2]], np.int32), stack.randoms(1)
    rig.device.drain()
    rig.device.append(stack.stack, mapping, sources, stream=rig.stream)
    stack.check_before = stack.pools[0].view.copy()
    mapping[:] = 2, 3
    for source in sources:
        source[:] = 5
    np.testing.assert_array_equal(stack.pools[0].view, stack.check_before)
    stack.expect_append(mapping, sources)
    stack.check()
    rig.close()


def test_to_host_waits_for_its_stream_alone():
    device = HostDevice(deferred=True)
    first, second = device.create_stream(), device.create_stream()
    array = device.empty((4,), np.int32)
    device.fill_words(array, 4, stream=first)
    assert device.to_host(array, stream=first).tolist() == [4] * 4
    device.fill_words(array, 5, stream=second)
    device.to_host(array, stream=first)
    device.drain()
    assert array.tolist() == [5] * 4
    assert device.simulator.history[0] == (first.handle, "fill_words")


def test_closing_runs_what_is_left():
    device = HostDevice(deferred=True)
    array = device.empty((4,), np.int32)
    device.fill_words(array, 4, stream=device.default_stream)
    device.close()
    device.close()
    assert array.tolist() == [4] * 4


# -- arguments -------------------------------------------------------------------------------------


class CudaStream:
    """A stream of some framework."""

    def __cuda_stream__(self):
        return 0, 1234


def test_only_own_streams_are_taken():
    device, other = HostDevice(), HostDevice()
    with pytest.raises(ValueError, match="stream: expected a stream of this device"):
        device.stream(other.create_stream())
    with pytest.raises(ValueError, match=r"stream of the host device.*open a cuda device"):
        device.stream(CudaStream())
    with pytest.raises(ValueError, match="handle of a stream of this device, got 99"):
        device.stream(99)
    with pytest.raises(TypeError, match="stream: expected a stream of this device"):
        device.stream(True)
    for stream in (other.default_stream, None, 1):
        with pytest.raises(TypeError, match="stream: expected a stream of this device"):
            device.fill_words(device.empty(4, np.int32), 1, stream=stream)


@pytest.mark.parametrize(
    ("src", "dst"), [([0, 1], [2, 2]), ([0, 1], [1, 2]), ([3], [3]), ([0, 2, 1], [3, 4, 0])]
)
def test_copies_without_a_right_order_are_refused(src, dst):
    device = HostDevice()
    memory = device.reserve(4096, 4096, 4096)
    ids = np.array(src, np.int32), np.array(dst, np.int32)
    with pytest.raises(ValueError, match="dst: expected distinct slots that are no source"):
        device.copy_pages([(memory, 512)], *ids, stream=device.default_stream)
    buffers = device.tail_buffers([TailPlace(memory, 512, 0, 64, 16)])
    with pytest.raises(ValueError, match="dst: expected distinct slots that are no source"):
        device.copy_tokens(buffers, np.stack([*ids, ids[0]]), stream=device.default_stream)


def test_closed_and_foreign_things_are_refused():
    device = HostDevice()
    rig = Rig(device, device.default_stream)
    stack = Stack.one_pool(rig, geometry())
    none = np.zeros((0, 2), np.int32)
    with pytest.raises(TypeError, match="stack: expected a page stack"):
        device.append(None, none, [], stream=rig.stream)
    with pytest.raises(TypeError, match="memory: expected memory"):
        device.fill_pages([(None, 16)], none[:, 0], 0, stream=rig.stream)
    with pytest.raises(TypeError, match="memory: expected memory"):
        device.page_stack([(None, 1024, 0)], 1, geometry())
    stack.pools[0].memory.close()
    with pytest.raises(StateError, match="closed"):
        device.append(stack.stack, none, stack.randoms(0), stream=rig.stream)


class Interface:
    """An array that NumPy can view."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Capsule:
    """An array of another library."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("wrap", [Interface, Capsule, np.asarray])
def test_foreign_arrays_are_viewed_without_a_copy(wrap):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = HostDevice().as_array(wrap(array))
    array[1, 2] = 50
    assert (found[1, 2], found.shape, found.dtype) == (50, (2, 3), np.float32)


def test_arrays_elsewhere_are_refused():
    array = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=r"values: expected .* in host memory"):
        HostDevice().as_array(Capsule(array, (2, 0)))


# -- pages without memory --------------------------------------------------------------------------


def test_meta_memory_has_addresses_only():
    device = MetaDevice()
    assert (device.kind, device.has_memory) == ("meta", False)
    memories = [device.reserve(1 << 45, 1 << 44, 1 << 21) for _ in range(3)]
    for low, high in pairwise(memories):
        assert 0 < low.base + (1 << 45) <= high.base
        assert low.base % (1 << 12) == 0
    memory = memories[0]
    memory.resize((1 << 21) + 1)
    assert memory.nbytes == 2 << 21
    with pytest.raises(ValueError, match="nbytes: expected 0 to the"):
        memory.resize((1 << 45) + 1)
    with pytest.raises(StateError, match="pages without memory"):
        memory.array(np.int32, (1,))
    memory.close()
    memory.close()
    with pytest.raises(StateError, match="closed"):
        memory.resize(0)


def test_meta_operations_raise():
    device = MetaDevice()
    memory, stream = device.reserve(4096, 4096, 4096), device.create_stream()
    words, ids = device.empty(4, np.int32), np.zeros(1, np.int32)
    beams = BeamArrays(*[ids] * 6)
    calls = (
        lambda: device.fill_words(words, 1, stream=stream),
        lambda: device.take_rows(words.reshape(2, 2), ids, words[:1].reshape(1, 1), stream=stream),
        lambda: device.fill_pages([(memory, 16)], ids, 1, stream=stream),
        lambda: device.copy_pages([(memory, 16)], ids, ids + 1, stream=stream),
        lambda: device.page_stack([(memory, 1024, 0)], 1, geometry()),
        lambda: device.tail_buffers([TailPlace(memory, 64, 0, 64, 16)]),
        lambda: device.step_rows(words.reshape(1, 2, 2), beams, ids, ids, stream=stream),
        lambda: device.fetch(words, words, stream=stream),
        lambda: device.to_host(words, stream=stream),
        lambda: device.from_host(words, words, stream=stream),
    )
    for call in calls:
        with pytest.raises(StateError, match="a meta device stores nothing"):
            call()


def test_meta_streams_and_staging_work():
    device = MetaDevice()
    stream = device.create_stream()
    stream.wait(device.default_stream.record())
    stream.record().synchronize()
    assert device.stream(None) is device.default_stream
    assert device.pinned(100).shape == device.empty(100, np.uint8).shape == (100,)
