"""Pool memory when the driver fails, when owners are dropped, and what is left afterwards."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref

import numpy as np
import pytest

from kvcore.device.cuda import CudaDevice
from kvcore.errors import DriverError, OutOfMemoryError, StateError
from tests.device.harness import buffer_bytes, geometry
from tests.emulated import driver

pytestmark = pytest.mark.usefixtures("held")

MIB = 1 << 20
GRAIN = 2 * MIB


def test_grains_grow_with_the_quota(device):
    gib = 1 << 30
    quotas = [0, 1, gib - 1, gib, 2 * gib - 1, 2 * gib, 4 * gib, 15 * gib, 16 * gib, 900 * gib]
    expected = [2, 2, 2, 2, 2, 4, 8, 16, 32, 32]
    assert [device.grain(quota) // MIB for quota in quotas] == expected


def test_grains_are_rounded_up_to_what_the_driver_can(device):
    memory = device.reserve(5 * MIB, 1, 3 * MIB)
    assert memory.nbytes == 4 * MIB
    memory.resize(5 * MIB)
    assert memory.nbytes == 8 * MIB
    memory.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("countdown", [1, 2, 3])
@pytest.mark.parametrize("code", [driver.OUT_OF_MEMORY, driver.UNKNOWN])
def test_a_failed_growth_changes_nothing(device, call, countdown, code):
    memory = device.reserve(8 * GRAIN, 2 * GRAIN, GRAIN)
    words = memory.array(np.int32, (2 * GRAIN // 4,))
    stream = device.create_stream()
    device.fill_words(words, 7, stream=stream)
    device.collect()  # with something to free it would try again
    before = driver.counts().held
    if call == "cuMemSetAccess" and countdown > 1:
        countdown = 1  # one call opens everything that was mapped
    driver.fail(call, countdown, code)
    expected = OutOfMemoryError if code == driver.OUT_OF_MEMORY else DriverError
    with pytest.raises(expected, match=call):
        memory.resize(6 * GRAIN)
    assert (memory.nbytes, driver.counts().held) == (2 * GRAIN, before)
    memory.resize(6 * GRAIN)
    assert memory.nbytes == 6 * GRAIN
    assert set(device.to_host(words, stream=stream).tolist()) == {7}
    memory.close()


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap"])
def test_a_failed_reservation_leaves_nothing(device, call):
    device.reserve(GRAIN, GRAIN, GRAIN).close()  # the first one finds out what the driver can
    driver.fail(call, 1, driver.OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError, match=call):
        device.reserve(4 * GRAIN, 4 * GRAIN, GRAIN)


def test_driver_errors_tell_call_code_and_text(device):
    driver.fail("cuMemMap", 1)
    with pytest.raises(DriverError) as found:
        device.reserve(GRAIN, GRAIN, GRAIN)
    assert (found.value.call, found.value.code) == ("cuMemMap", driver.UNKNOWN)
    assert "CUDA_ERROR_OF_THE_FAKE: as the test wanted" in found.value.text
    device.collect()


def test_handles_are_released_at_once(device):
    before = driver.counts()
    memory = device.reserve(8 * GRAIN, 8 * GRAIN, GRAIN)
    found = driver.counts()
    assert (found.handles, found.mappings - before.mappings) == (0, 8)
    assert found.bytes_0 - before.bytes_0 == 8 * GRAIN
    memory.resize(3 * GRAIN)
    assert driver.counts().mappings - before.mappings == 3
    memory.close()


def test_many_cycles_leave_nothing(device):
    for cycle in range(50):
        memory = device.reserve(6 * GRAIN, cycle % 3 * GRAIN, GRAIN)
        for size in (2, 3, 4, 1):
            memory.resize(size * GRAIN)
        memory.close()


def test_close_works_from_any_thread_and_leaves_its_context(device, other):
    memories = [device.reserve(GRAIN, GRAIN, GRAIN), other.reserve(GRAIN, GRAIN, GRAIN)]
    seen = []

    def close_all():
        seen.append(driver.current())
        for memory in memories:
            memory.close()
            memory.close()
        seen.append(driver.current())

    thread = threading.Thread(target=close_all)
    thread.start()
    thread.join()
    assert seen == [None, None]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropped_memory_is_told_and_freed_by_the_next_allocation(device, in_a_cycle):
    class Owner:
        pass

    owner = Owner()
    owner.memory = device.reserve(4 * GRAIN, 2 * GRAIN, GRAIN)
    if in_a_cycle:
        owner.itself = owner
    mapped = driver.counts().mappings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def drop():
            nonlocal owner
            owner = None
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
    assert [w.category for w in caught] == [ResourceWarning]
    assert f"{2 * GRAIN} bytes" in str(caught[0].message)
    assert driver.counts().mappings == mapped  # dropping calls no driver
    device.reserve(GRAIN, 0, GRAIN).close()
    assert driver.counts().mappings == mapped - 2


def test_views_keep_the_addresses_but_not_the_memory(device):
    memory = device.reserve(GRAIN, GRAIN, GRAIN)
    base, view = memory.base, memory.array(np.uint8, (16,))
    memory.close()
    ranges = driver.counts().ranges
    assert (driver.counts().mappings, memory.nbytes) == (0, 0)
    again = device.reserve(GRAIN, GRAIN, GRAIN)
    assert again.base != base
    again.close()
    del view
    device.collect()
    assert driver.counts().ranges == ranges - 1


def test_views_may_lie_beyond_what_is_backed(device):
    memory = device.reserve(2 * GRAIN, 0, GRAIN)
    view = memory.array(np.int32, (2, GRAIN // 4))
    assert (view.data.ptr, view.shape) == (memory.base, (2, GRAIN // 4))
    memory.resize(2 * GRAIN)
    stream = device.create_stream()
    device.fill_words(view[1], 3, stream=stream)
    assert device.to_host(view[1, -1:], stream=stream).tolist() == [3]
    del view
    memory.close()


def test_without_virtual_memory_large_pools_cannot_grow():
    driver.switch("no_virtual_memory", True)
    device = CudaDevice(0)
    memory = device.reserve(1 << 30, 8 * GRAIN, GRAIN)
    with pytest.raises(OutOfMemoryError, match="no virtual memory management"):
        memory.resize(9 * GRAIN)
    assert memory.nbytes == 8 * GRAIN
    memory.resize(0)
    memory.resize(8 * GRAIN)
    memory.close()
    small = device.reserve(64 * GRAIN, 0, GRAIN)
    small.resize(64 * GRAIN)
    small.close()
    device.close()


def test_arrays_of_a_stream_hand_on_their_memory(device):
    one, two = device.create_stream(), device.create_stream()
    first = device.empty((100, 3), np.int32, stream=one)
    place = first.data.ptr
    del first
    assert device.empty(290, np.float32, stream=two).data.ptr != place
    same = device.empty(290, np.float32, stream=one)
    assert same.data.ptr == place
    assert device.empty(290, np.float32, stream=one).data.ptr != place
    assert device.empty(290, np.float32).data.ptr != place
    # Every thread's own default stream has one handle: nothing is handed on there.
    own = device.stream(2)
    place = device.empty(8, np.int32, stream=own).data.ptr
    assert own.blocks is None
    del same, one, two, own
    gc.collect()
    device.collect()


def test_blocks_outlive_their_stream_and_are_freed(device):
    stream = device.create_stream()
    array = device.empty(1000, np.int32, stream=stream)
    del stream
    gc.collect()
    before = driver.counts().blocks
    device.collect()
    assert driver.counts().blocks == before
    del array
    device.collect()
    assert driver.counts().blocks == before - 1


def test_allocation_frees_what_is_buried_before_it_gives_up(device):
    stream = device.create_stream()
    device.empty(4, np.int32)  # dropped
    driver.fail("cuMemAlloc_v2", 1, driver.OUT_OF_MEMORY)
    array = device.empty(1 << 20, np.int32, stream=stream)
    assert array.size == 1 << 20
    driver.fail("cuMemAlloc_v2", 1, driver.OUT_OF_MEMORY)
    device.collect()
    with pytest.raises(OutOfMemoryError):
        device.empty(1 << 22, np.int32, stream=stream)
    del array, stream
    device.collect()


def test_pinned_memory_lives_as_long_as_its_views(device):
    part = device.pinned(4096)[8:16]
    before = driver.counts().pinned
    device.collect()
    assert driver.counts().pinned == before
    del part
    device.collect()
    assert driver.counts().pinned == before - 1


def test_closing_a_device_gives_everything_back():
    device = CudaDevice(0)
    stream = device.create_stream()
    array = device.empty(300, np.int32, stream=stream)
    device.from_host(np.arange(300, dtype=np.int32), array, stream=stream)
    assert device.to_host(array, stream=stream).tolist() == list(range(300))
    del array
    assert driver.counts().pinned > 0
    device.close()
    device.close()
    del stream


def test_stacks_do_not_keep_their_device_or_memory():
    from kvcore.device.base import PageGeometry

    device = CudaDevice(0)
    memory = device.reserve(GRAIN, GRAIN, GRAIN)
    g = PageGeometry(page_tokens=4, page_bytes=64, expansion=1, heads=1, dim=8, itemsize=2,
                     token_stride=16, head_stride=16)  # fmt: skip
    stack = device.page_stack([(memory, 64, 0)], 1, g)
    stream = device.create_stream()
    mapping = device.empty((3, 2), np.int32)
    source = device.empty((1, 3, 1, 8), np.uint16)
    memory.close()
    with pytest.raises(StateError, match="closed"):
        device.append(stack, mapping, [source], stream=stream)
    gone = weakref.ref(stack)
    del stack, mapping, source, stream
    device.close()
    gc.collect()
    assert gone() is None


def test_a_forked_child_is_told_and_frees_nothing(device):
    memory = device.reserve(GRAIN, GRAIN, GRAIN)
    stream = device.create_stream()
    words = memory.array(np.int32, (4,))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork in a process with threads
        child = os.fork()
    if not child:
        texts = []
        for call in (
            lambda: device.fill_words(words, 1, stream=stream),
            lambda: device.empty(4, np.int32),
            memory.close,
            stream.synchronize,
        ):
            try:
                call()
                texts.append("no error")
            except StateError as error:
                texts.append(str(error)[:31])
        os.write(writer, "\n".join(texts).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reader, 4096).decode().split("\n")
    os.close(reader), os.close(writer)
    assert found == ["CUDA does not survive fork(): o"] * 4
    device.fill_words(words, 5, stream=stream)
    assert device.to_host(words, stream=stream).tolist() == [5] * 4
    words = None
    memory.close()


def test_growth_frees_what_is_buried_before_it_gives_up(device):
    memory = device.reserve(4 * GRAIN, GRAIN, GRAIN)
    device.empty(4, np.int32)  # dropped
    blocks = driver.counts().blocks
    driver.fail("cuMemCreate", 2, driver.OUT_OF_MEMORY)
    memory.resize(4 * GRAIN)
    assert (memory.nbytes, driver.counts().blocks) == (4 * GRAIN, blocks - 1)
    memory.close()


def test_many_dropped_arrays_are_freed_in_between(device):
    before = driver.counts().blocks
    for _ in range(200):
        device.empty(4, np.int32)
    assert driver.counts().blocks - before < 100


def test_growth_that_kernels_cannot_be_told_of_is_undone(device):
    memory = device.reserve(4 * GRAIN, GRAIN, GRAIN)
    g = geometry()
    stack = device.page_stack([(memory, buffer_bytes(g), 0)], 1, g)
    device.collect()
    before = driver.counts().held
    driver.fail("cuMemcpyHtoDAsync_v2", 1)
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"):
        memory.resize(4 * GRAIN)
    assert (memory.nbytes, driver.counts().held) == (GRAIN, before)
    memory.resize(4 * GRAIN)
    stream = device.create_stream()
    last = 4 * GRAIN // buffer_bytes(g) - 1
    source = device.empty((1, 1, 2, 8), np.uint16, stream=stream)
    mapping = device.empty((1, 2), np.int32, stream=stream)
    device.from_host(np.full((1, 1, 2, 8), 7, np.uint16), source, stream=stream)
    device.from_host(np.array([[last, 7]], np.int32), mapping, stream=stream)
    device.append(stack, mapping, [source], stream=stream)
    end = memory.array(np.uint16, (16,), 4 * GRAIN - 32)
    assert set(device.to_host(end, stream=stream).tolist()) == {7}
    end = None
    memory.close()
