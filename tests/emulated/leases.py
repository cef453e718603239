"""Leases on a GPU: streams, devices, copies, lifetimes."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvcore as k
from kvcore.device.cuda import CudaDevice
from kvcore.device.cuda.streams import CudaEvent, CudaStream
from kvcore.dlpack.capsules import api
from kvcore.dlpack.importer import from_capsule
from kvcore.dlpack.structs import CPU, CUDA, CUDA_HOST
from kvcore.errors import DriverError
from tests.emulated import driver
from tests.helpers import opened, typed_manager

pytestmark = pytest.mark.usefixtures("held")


@pytest.fixture(autouse=True)
def few_and_small_pages(monkeypatch):
    monkeypatch.setattr(CudaDevice, "grain", lambda self, quota: 4096)


def planted(*_):
    """In place of a call of the driver."""
    raise DriverError("cuStreamWaitEvent", 1, "planted")


def opened_manager(rig, dtype="float32"):
    """A manager, and a cache of it whose stream is the rig's."""
    m = typed_manager(slots=64, layers=2, dtype=dtype, device=rig.device, stream=rig.stream)
    return m, opened(m, 8)[0]


def end(m, kv):
    """Everything is given back."""
    kv.close()
    gc.collect()
    m.shutdown()


def pages_of(capsule):
    """What a consumer finds: where it is, its shape, its device."""
    managed, _ = api().find(capsule)
    tensor = managed.tensor
    return tensor.data, (tensor.device.kind, tensor.device.index)


def test_pages_are_on_their_device(rig):
    manager, kv = opened_manager(rig)
    lease = manager.lease(1, "value")
    assert lease.__dlpack_device__() == (CUDA, 0)
    capsule = lease.__dlpack__()
    assert pages_of(capsule) == (lease.address, (CUDA, 0))
    del capsule
    for device in ((CUDA, 1), (CPU, 0), (CUDA_HOST, 0)):
        with pytest.raises(BufferError, match="copy=True"):
            lease.__dlpack__(dl_device=device)
    for take in (np.asarray, np.from_dlpack):
        with pytest.raises((BufferError, RuntimeError)):
            take(lease)
    taken = rig.device.as_array(lease)
    assert (taken.data.ptr, taken.shape, taken.strides) == (
        lease.address, lease.shape, tuple(4 * step for step in lease.strides))  # fmt: skip
    assert lease.num_arrays == 0  # by the array interface
    kv.close()
    with pytest.raises(k.LeaseInUse):
        manager.shutdown()
    del taken, lease
    end(manager, kv)


@pytest.mark.parametrize("given", [None, 1, 2, -1, "own", "other"])
def test_the_consumers_stream_waits_for_kvcore(rig, orders, monkeypatch, given):
    manager, kv = opened_manager(rig)
    consumer = rig.device.create_stream()
    handle = {"own": rig.stream.handle, "other": consumer.handle}.get(given, given)
    lease = manager.lease(0, "key")
    orders.clear()
    capsule = lease.__dlpack__(stream=handle, max_version=(1, 0))
    ours, theirs = rig.stream.handle, 1 if given is None else handle
    waits = given not in (-1, "own")
    assert orders == ([(theirs, ours)] if waits else [])
    orders.clear()
    del capsule
    with monkeypatch.context() as late:  # the fake's work is over at once
        late.setattr(CudaStream, "is_idle", lambda self: False)
        manager.get_storage_statistics()
    back = 1 if given == 2 else theirs  # whoever calls has a stream 2 of its own
    assert orders == ([(ours, back)] if waits else [])
    lease.close()
    end(manager, kv)


def test_each_threads_own_stream_is_another_one(rig, orders, monkeypatch):
    """The legacy default stream comes after all of them: it is recorded in their place."""
    manager = typed_manager(slots=64, layers=2, device=rig.device, stream=2)
    (kv,) = opened(manager, 8)
    assert kv.stream.handle == 2
    first, second = manager.lease(0, "key"), manager.lease(0, "key")
    with monkeypatch.context() as late:
        late.setattr(CudaStream, "is_idle", lambda self: False)
        late.setattr(CudaEvent, "done", lambda self: False)
        orders.clear()
        first.acquire(2)
        assert orders == [(2, 1)]
        first.release(2)
        assert first._entry.streams == {}
        orders.clear()
        second.acquire(2)
        assert orders == [(2, 1), (2, 1)]  # the sequence's, and the first consumer's
    first.close(), second.close()
    end(manager, kv)


def test_what_each_threads_own_stream_leaves_behind_is_the_legacy_ones(rig):
    """A copy forgets nobody who came before on any such stream; a lease for one keeps it."""
    m, kv = opened_manager(rig)
    legacy = rig.device.stream(1)
    lease, given = m.lease(0, "key"), m.lease(0, "key", stream=2)
    capsules = [its.__dlpack__(stream=2) for its in (lease, given)]
    lease.__dlpack__(stream=2, copy=True)
    assert lease._entry.streams == {legacy: False}
    capsules.clear()
    m.get_storage_statistics()
    assert lease._entry.streams == {}
    given.release()
    assert list(given._entry.streams) == [legacy]
    lease.close(), given.close()
    end(m, kv)


def test_errors_of_a_lease_are_told_where_an_array_is_taken(rig, monkeypatch):
    manager, kv = opened_manager(rig)
    lease, other = manager.lease(0, "key"), rig.device.create_stream()
    with monkeypatch.context() as patch:
        patch.setattr(CudaStream, "follow", planted)
        for stream in (None, other):
            with pytest.raises(DriverError, match="planted"):
                rig.device.as_array(lease, stream=stream)
    lease.close()
    for stream in (None, rig.stream):
        with pytest.raises(k.StateError, match=r"lease 1 .* is closed"):
            rig.device.as_array(lease, stream=stream)
    end(manager, kv)


@pytest.mark.parametrize("stream", [0, -2, "a", 1.5, True])
def test_what_is_no_stream_is_an_error(rig, stream):
    manager, kv = opened_manager(rig)
    lease = manager.lease(0, "key")
    with pytest.raises((TypeError, ValueError), match="stream: expected None, -1, 1, 2"):
        lease.__dlpack__(stream=stream)
    assert lease.num_arrays == 0
    assert driver.current() is None
    lease.close()
    end(manager, kv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("place", [None, (CUDA, 0), (CPU, 0)])
def test_copies_go_to_the_device_or_the_host(rig, dtype, place):
    m, kv = opened_manager(rig, dtype)
    mine = m.get_pages(1, "key")
    new = rig.random(mine.shape, mine.dtype.itemsize).view(mine.dtype)
    rig.device.from_host(new, mine, stream=rig.stream)
    lease = m.lease(1, "key")
    copy = from_capsule(lease.__dlpack__(copy=True, dl_device=place, max_version=(1, 1)))
    assert (copy.dtype, copy.shape, copy.is_contiguous) == (dtype, mine.shape, True)
    assert copy.device == (place or (CUDA, 0))
    assert lease.num_arrays == 0
    found = copy.numpy() if place == (CPU, 0) else rig.get(rig.device.view(copy))
    np.testing.assert_array_equal(found.view(mine.dtype), new)
    with pytest.raises(BufferError, match="cannot be copied"):
        lease.__dlpack__(copy=True, dl_device=(CUDA_HOST, 0), max_version=(1, 1))
    lease.close()
    del mine, copy
    end(m, kv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("given", [None, -1, 2, "theirs"])
def test_copies_go_to_another_gpu(rig, other, orders, dtype, given):
    """Made on the legacy default stream here, for which the consumer's stream there waits.

    Also the legacy one of a consumer that orders itself: or the memory could go before it is done.
    """
    m, kv = opened_manager(rig, dtype)
    mine = m.get_pages(1, "key")
    new = rig.random(mine.shape, mine.dtype.itemsize).view(mine.dtype)
    rig.device.from_host(new, mine, stream=rig.stream)
    lease, theirs = m.lease(1, "key"), other.create_stream()
    stream, asked = theirs.handle if given == "theirs" else given, {"dl_device": (CUDA, 1)}
    with pytest.raises(BufferError, match="copy=True"):
        lease.__dlpack__(stream=stream, max_version=(1, 1), **asked)
    orders.clear()
    capsule = lease.__dlpack__(stream=stream, copy=True, max_version=(1, 1), **asked)
    waits = 1 if stream in (None, -1) else stream
    ours = rig.stream.handle
    assert orders == [(1, ours), (waits, 1), (ours, 1)]
    copy = from_capsule(capsule)
    assert (copy.dtype, copy.shape, copy.is_contiguous) == (dtype, mine.shape, True)
    assert copy.device == (CUDA, 1)
    assert not lease._entry.streams
    found = other.to_host(other.view(copy), stream=theirs)
    np.testing.assert_array_equal(found.view(mine.dtype), new)
    lease.close()
    del mine, copy, capsule
    end(m, kv)


def test_copies_that_no_other_gpu_can_have(rig, other):
    m, kv = opened_manager(rig)
    lease, ours = m.lease(1, "key"), rig.stream.handle
    for stream, place, error, text in (
        (ours, (CUDA, 1), ValueError, "a stream of cuda:1"),
        (0, (CUDA, 1), ValueError, "stream: expected None, -1, 1, 2"),
        (None, (CUDA, 2), ValueError, '"cuda:0" to "cuda:1"'),
    ):
        with pytest.raises(error, match=text):
            lease.__dlpack__(stream=stream, copy=True, dl_device=place)
    driver.fail("cuMemAlloc_v2", 2, driver.OUT_OF_MEMORY)
    with pytest.raises(k.OutOfMemoryError):
        lease.__dlpack__(copy=True, dl_device=(CUDA, 1))
    lease.close()
    end(m, kv)


def test_a_copy_leaves_the_streams_of_those_who_share(rig):
    """Who holds an array may go on working on the stream that the copy was made on."""
    m, kv = opened_manager(rig)
    lease, consumer = m.lease(0, "key"), rig.device.create_stream()
    for place in ((CUDA, 0), (CPU, 0)):
        capsule = lease.__dlpack__(stream=consumer.handle)
        lease.__dlpack__(stream=consumer.handle, copy=True, dl_device=place)
        assert list(lease._entry.streams) == [consumer]
        del capsule
        m.get_storage_statistics()
        assert not lease._entry.streams
        lease.__dlpack__(stream=consumer.handle, copy=True, dl_device=place)
        assert not lease._entry.streams
    lease.close()
    end(m, kv)


@pytest.mark.parametrize("call", ["__dlpack__", "acquire"])
def test_a_copy_leaves_the_streams_of_those_who_come_meanwhile(rig, monkeypatch, call):
    """In another thread, while the copy is being made."""
    m, kv = opened_manager(rig)
    lease, consumer, capsules = m.lease(0, "key"), rig.device.create_stream(), []
    real = CudaDevice.to_host

    def to_host(*args, **more):
        if call == "acquire":
            lease.acquire(consumer)
        else:
            capsules.append(lease.__dlpack__(stream=consumer.handle))
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "to_host", to_host)
        lease.__dlpack__(stream=consumer.handle, copy=True, dl_device=(CPU, 0))
    assert lease._entry.streams == {consumer: call == "acquire"}
    capsules.clear()
    lease.close()
    end(m, kv)


def test_an_open_lease_that_is_taken_by_turns_knows_the_last_stream(rig):
    """As JAX takes it anew for every step; whoever still holds an array is not forgotten."""
    m, kv = opened_manager(rig)
    lease, turns = m.lease(0, "key"), [rig.device.create_stream() for _ in range(3)]
    for stream in turns:
        lease.__dlpack__(stream=stream.handle)
    assert list(lease._entry.streams) == turns[2:]
    capsule = lease.__dlpack__(stream=turns[0].handle)
    lease.__dlpack__(stream=turns[1].handle)
    lease.acquire(turns[2])
    assert list(lease._entry.streams) == turns
    lease.acquire(turns[2])
    del capsule
    lease.acquire(rig.stream)
    assert set(lease._entry.streams) == {turns[2], rig.stream}
    lease.close()
    end(m, kv)


def test_the_array_interface_names_a_stream_or_none(rig, orders):
    manager, kv = opened_manager(rig)
    lease, consumer = manager.lease(0, "key"), rig.device.create_stream()
    capsule = lease.__dlpack__(stream=consumer.handle)  # one consumer's stream is not another's
    for _ in range(2):
        orders.clear()
        interface = lease.__cuda_array_interface__
        assert (interface["stream"], interface["data"]) == (1, (lease.address, False))
        assert orders == [(1, rig.stream.handle)]
    del capsule
    lease.acquire(consumer)
    lease.__dlpack__(stream=consumer.handle)  # the library's word takes nothing back
    orders.clear()
    assert lease.__cuda_array_interface__["stream"] is None
    assert orders == []
    ordered = manager.lease(0, "value", stream=rig.stream, readonly=True)
    interface = ordered.__cuda_array_interface__
    assert (interface["stream"], interface["data"][1]) == (None, True)
    empty = manager.lease(0, "key", pages=range(3, 3))
    assert empty.__cuda_array_interface__["data"] == (0, False)
    lease.close(), ordered.close(), empty.close()
    del empty
    with pytest.raises(k.StateError, match="is closed"):
        _ = lease.__cuda_array_interface__
    kv.close()
    del lease
    with pytest.raises(k.LeaseInUse, match="buffer 'value'"):
        manager.shutdown()
    del ordered
    end(manager, kv)


def test_types_without_a_name_have_no_array_interface(rig):
    m, kv = opened_manager(rig, "bfloat16")
    lease = m.lease(0, "key")
    assert not hasattr(lease, "__cuda_array_interface__")
    assert not hasattr(lease, "__array_interface__")
    assert lease.bits().__cuda_array_interface__["typestr"] == "<u2"
    with pytest.raises(BufferError, match="NumPy cannot view memory of device"):
        np.asarray(lease)
    del lease
    end(m, kv)


def test_leases_of_a_device_that_is_not_current(rig, other):
    """The current device stays what it was."""
    driver.make_current(0)
    m = typed_manager(slots=64, device=other, stream=other.create_stream())
    with m.lease(0, "key", stream=2) as lease:
        capsule = lease.__dlpack__(stream=1, max_version=(1, 0))
        assert pages_of(capsule) == (lease.address, (CUDA, 1))
        foreign = rig.device.create_stream()
        with pytest.raises(ValueError, match="cuda:1"):
            lease.__dlpack__(stream=foreign.handle)
        with pytest.raises(TypeError, match="cuda:0"):
            rig.device.as_array(lease)
        del capsule
    m.shutdown()
    assert driver.current() == 0
    driver.make_current(None)


def test_memory_stays_mapped_until_the_last_array_is_gone(rig):
    m, kv = opened_manager(rig)
    kv.close()
    before = driver.counts().mappings
    lease = m.lease(0, "key")
    taken = from_capsule(lease.__dlpack__(max_version=(1, 0)))
    with pytest.raises(k.LeaseInUse, match="close"):
        lease.close()
    for _ in range(2):
        with pytest.raises(k.LeaseInUse, match="shutdown: lease 1"):
            m.shutdown()
    memory = m._runtime.pools[0][0]
    with pytest.raises(k.LeaseInUse, match="resize"):
        memory.resize(0)
    with pytest.raises(k.LeaseInUse, match="close"):
        memory.close()
    assert driver.counts().mappings == before
    del taken
    end(m, kv)
    assert driver.counts().mappings < before
    del memory, lease


def test_under_capture_leases_are_not_handed_over(rig):
    manager, kv = opened_manager(rig)
    lease = manager.lease(0, "key")
    consumer = rig.device.create_stream()
    driver.switch("capturing", True)
    for call in (
        lambda: lease.__dlpack__(stream=consumer.handle),
        lambda: lease.acquire(consumer),
        lambda: lease.__cuda_array_interface__,
    ):
        with pytest.raises(k.StateError, match="captured"):
            call()
    driver.switch("capturing", False)
    lease.close()
    end(manager, kv)
