"""Order: every wait is proved with a stream that stands still until the test lets it go."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from tests.device.harness import Stack, geometry
from tests.gpu.tools import device_count, held


@pytest.fixture(autouse=True)
def loaded(rig):
    """Kernels and buffers are there before a stream is held: loading may wait for the device."""
    words = rig.put(np.zeros(8, np.int32))
    with held(rig.device, rig.stream):
        pass
    rig.device.fill_words(words, 1, stream=rig.stream)
    rig.get(words)


def placed(rig, stack, tokens=8):
    return rig.put(np.array([[stack.num_slots - 1, t] for t in range(tokens)], np.int32))


def test_nothing_blocks_the_host(rig):
    """Every operation returns while its stream stands still, and runs afterwards."""
    stack = Stack.one_pool(rig, geometry())
    mapping, keys = placed(rig, stack), rig.put(np.arange(8))
    sources = [rig.put(s) for s in stack.randoms(8)]
    targets = [rig.put(s) for s in stack.randoms(8)]
    bad, words = rig.put(np.full(8, 9, np.int32)), rig.put(np.zeros(64, np.int32))
    tables = rig.put(np.zeros((1, 4, 4), np.int32))
    ids, out = rig.put(np.zeros(2, np.int32)), rig.put(np.zeros((1, 8, 2), np.int32))
    rows = rig.put(np.zeros((2, 4), np.int32))
    index, value = rig.pinned([1, 2], np.int64), rig.pinned([5, 6], np.int32)
    pool = stack.pools[0]
    pools, one = [(pool.memory, pool.slot_bytes)], np.array([0], np.int32)
    device, on = rig.device, rig.stream
    device.write_fingerprints(stack.stack, mapping, keys, stream=on)
    device.verify_fingerprints(stack.stack, mapping, keys, bad, stream=on)
    host = np.arange(64, dtype=np.int32)
    device.from_host(host, words, stream=on)
    on.synchronize()
    with held(device, on):
        device.fill_words(words, 3, stream=on)
        device.scatter_table(tables, index, value, words, value, stream=on)
        device.map_tokens(tables, ids, ids, ids, out, tokens_per_block=4, stream=on)
        device.take_rows(tables[0], ids, rows, stream=on)
        device.append(stack.stack, mapping, sources, stream=on)
        device.gather(stack.stack, mapping, targets, stream=on)
        device.copy_pages(pools, one, one + 1, stream=on)
        device.fill_pages(pools, one + 2, 7, stream=on)
        device.write_fingerprints(stack.stack, mapping, keys, stream=on)
        device.verify_fingerprints(stack.stack, mapping, keys, bad, stream=on)
        device.from_host(host, words, stream=on)
        end = on.record()
        assert not end.done()
        assert not on.is_idle()
    assert end.done()
    on.synchronize()
    assert on.is_idle()
    assert rig.get(bad).tolist() == [0] * 8
    assert rig.get(words).tolist() == host.tolist()


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_holds_the_other_stream_back(rig, waits):
    """The same program with and without its wait: only one of them reads what was written."""
    other = rig.device.create_stream()
    words, copy = rig.put(np.full(1024, 1, np.int32)), rig.put(np.zeros((1, 1024), np.int32))
    row = rig.put(np.zeros(1, np.int32))
    rig.device.take_rows(words.reshape(1, -1), row, copy, stream=rig.stream)
    rig.stream.synchronize()
    with held(rig.device, rig.stream):
        rig.device.fill_words(words, 2, stream=rig.stream)
        event = rig.stream.record()
        if waits:
            other.wait(event)
        rig.device.take_rows(words.reshape(1, -1), row, copy, stream=other)
        end = other.record()
        if waits:
            assert not end.done()
        else:
            end.synchronize()
    end.synchronize()
    assert set(rig.get(copy)[0].tolist()) == {2 if waits else 1}


@pytest.mark.parametrize(
    ("follower", "followed"), [(None, None), (0, None), (1, None), (2, None), (None, 1), (None, 2)]
)
def test_a_stream_follows_another(rig, follower, followed):
    first, second = (
        rig.device.create_stream() if handle is None else rig.device.stream(handle)
        for handle in (follower, followed)
    )
    words, copy = (rig.put(np.zeros(1 << 20, np.int32)) for _ in range(2))
    for stream in (rig.stream, second, first):  # kernels are loaded before anything stands still
        rig.device.fill_words(words, 0, stream=stream)
        rig.device.copy(words, copy, stream=stream)
        stream.synchronize()
    second.record()
    assert first.events  # it follows with one of these
    with held(rig.device, second):
        rig.device.fill_words(words, 1, stream=second)
        first.follow(second)
        rig.device.copy(words, copy, stream=first)
        assert not first.record().done()
    first.synchronize()
    assert set(rig.get(copy).tolist()) == {1}


def test_a_freed_slot_goes_on_behind_its_event(rig):
    """The old owner's write is still to come when the new owner's is enqueued; the new one wins."""
    stack = Stack.one_pool(rig, geometry())
    mapping, second = placed(rig, stack), rig.device.create_stream()
    old, new = stack.randoms(8), stack.randoms(8)
    sources = [[rig.put(a) for a in arrays] for arrays in (old, new)]
    rig.device.append(stack.stack, mapping, sources[0], stream=rig.stream)
    rig.stream.synchronize()
    with held(rig.device, rig.stream):
        rig.device.append(stack.stack, mapping, sources[0], stream=rig.stream)
        second.wait(rig.stream.record())
        rig.device.append(stack.stack, mapping, sources[1], stream=second)
        assert not second.record().done()
    second.synchronize()
    host = np.array([[stack.num_slots - 1, t] for t in range(8)], np.int32)
    stack.expect_append(host, new)
    stack.check()


def test_values_may_change_before_the_work_has_run(rig):
    """Host arrays are read when a call is made; pinned staging when the work runs."""
    words, table = rig.put(np.zeros(4, np.int32)), rig.put(np.zeros(16, np.int32))
    pool = rig.pool(64, 1600)
    pools = [(pool.memory, pool.slot_bytes)]
    values = np.array([1, 2, 3, 4], np.int32)
    few, many = np.array([[0], [1]], np.int32), np.arange(600, dtype=np.int32)
    many_to = many + 700
    index, value = rig.pinned([3], np.int64), rig.pinned([10], np.int32)
    pairs = list(zip(many.tolist(), many_to.tolist(), strict=True))
    # Once before: with so many ids they need device memory, and allocating may wait.
    rig.device.copy_pages(pools, many, many_to, stream=rig.stream)
    rig.stream.synchronize()
    with held(rig.device, rig.stream):
        rig.device.from_host(values, words, stream=rig.stream)
        rig.device.copy_pages(pools, few[0], few[1], stream=rig.stream)
        rig.device.copy_pages(pools, many, many_to, stream=rig.stream)
        rig.device.fill_pages(pools, few[1] + 4, 0x11, stream=rig.stream)
        rig.device.scatter_table(table, index, value, words, value[:0], stream=rig.stream)
        values[:], few[:], many[:], many_to[:] = 0, 5, 6, 7
        value[0] = 11
    assert rig.get(words).tolist() == [1, 2, 3, 4]
    assert rig.get(table).tolist() == [0, 0, 0, 11] + [0] * 12
    pool.slot(1)[:] = pool.slot(0)
    for source, target in pairs:
        pool.slot(target)[:] = pool.slot(source)
    pool.slot(5)[:] = 0x11
    pool.check()


def test_staging_is_not_reused_too_early(rig):
    """Many uploads, all behind one latch."""
    arrays = [rig.put(np.full(100, -1, np.int32)) for _ in range(12)]
    ring = rig.device._uploads._ring
    for buffer in [ring.lease(400) for _ in arrays]:  # pins what will be needed: that may wait
        ring.retire(buffer, None)
    with held(rig.device, rig.stream):
        for number, array in enumerate(arrays):
            rig.device.from_host(np.full(100, number, np.int32), array, stream=rig.stream)
    assert [set(rig.get(a).tolist()) for a in arrays] == [{n} for n in range(12)]


def foreign_streams():
    """Streams of others: (what is handed over, what keeps it)."""
    own = cupy.cuda.Stream(non_blocking=True)
    yield "cupy", own
    yield "handle", int(own.ptr)
    yield "null", cupy.cuda.Stream.null
    yield "legacy handle", 0
    yield "per thread", 2
    from cuda.core import Device

    core = Device(0)
    core.set_current()
    yield "cuda.core", core.create_stream()
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        yield "torch", torch.cuda.Stream()
        yield "torch current", torch.cuda.current_stream()


def test_streams_of_others_are_used_as_they_are(rig):
    words = rig.put(np.zeros(100, np.int32))
    rig.stream.synchronize()
    for number, (name, foreign) in enumerate(foreign_streams()):
        stream = rig.device.stream(foreign)
        assert rig.device.stream(foreign) is stream, name
        rig.device.fill_words(words, number, stream=stream)
        event = stream.record()
        rig.stream.wait(event)
        assert set(rig.get(words).tolist()) == {number}, name
        stream.wait(rig.stream.record())
        stream.synchronize()
        assert event.done()


def test_our_streams_are_taken_by_others(rig):
    taken = cupy.cuda.Stream.from_external(rig.stream)
    assert taken.ptr == rig.stream.handle
    words = rig.put(np.full(100, 3, np.int32))
    with taken:
        doubled = words * 2
    assert set(rig.get(doubled).tolist()) == {6}


def test_the_second_gpus_streams_are_refused_and_its_events_are_not():
    if device_count() < 2:
        pytest.skip("needs a second GPU")
    from kvcore.device.cuda import CudaDevice

    first, second = CudaDevice(0), CudaDevice(1)
    here, there = first.create_stream(), second.create_stream()
    for stream in (there, there.handle):
        with pytest.raises(ValueError, match="cuda:0"):
            first.stream(stream)
    words = second.empty(1 << 20, np.int32)
    second.fill_words(words, 1, stream=there)
    with held(second, there):
        second.fill_words(words, 4, stream=there)
        here.wait(there.record())
        assert not here.record().done()
    here.synchronize()
    assert set(second.to_host(words, stream=there).tolist()) == {4}
    assert cupy.cuda.runtime.getDevice() == 0
    del words
    first.close()
    second.close()


def test_launch_failures_surface(rig):
    from kvcore.errors import DriverError

    launch = rig.device.launch("latch", "delay")
    with pytest.raises(DriverError, match="cuLaunchKernel of delay failed with 1"):
        launch(rig.stream, 1, 1 << 20, 1, 1)  # a grid that no GPU takes
    words = rig.put(np.zeros(4, np.int32))
    rig.device.fill_words(words, 2, stream=rig.stream)
    assert rig.get(words).tolist() == [2] * 4
