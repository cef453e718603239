"""Streams of others, events and contexts."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from kvcore_adapters import for_dlpack

from kvcore.device.cuda import CudaDevice, device_count
from kvcore.device.cuda.streams import OwnedStream
from kvcore.device.host import HostDevice
from kvcore.errors import DriverError
from tests.emulated import driver

pytestmark = pytest.mark.usefixtures("held")


class Protocol:
    """What cuda.core, RMM and newer CuPy streams look like."""

    def __init__(self, handle, version=0):
        self._tuple = version, handle

    def __cuda_stream__(self):
        return self._tuple


class Attribute:
    """The protocol's older form."""

    def __init__(self, handle):
        self.__cuda_stream__ = (0, handle)


class TorchLike:
    def __init__(self, handle):
        self.cuda_stream = handle


class CupyLike:
    def __init__(self, handle):
        self.ptr = handle


def test_the_devices_there_are():
    assert device_count() == 2
    for index in (2, -1):
        with pytest.raises(ValueError, match="cuda:0"):
            CudaDevice(index)
    driver.make_current(1)
    device = CudaDevice()
    assert (device.index, device.kind, device.has_memory) == (1, "cuda", True)
    assert device.default_stream is None
    device.close()
    driver.make_current(None)
    assert CudaDevice().index == 0


@pytest.mark.parametrize("kind", [int, Protocol, Attribute, TorchLike, CupyLike])
def test_one_object_per_handle_whatever_names_it(device, kind):
    raw = device.create_stream()
    found = device.stream(kind(raw.handle))
    assert found is raw
    assert device.stream(found) is found
    assert found.__cuda_stream__() == (0, raw.handle)
    assert found.ptr == raw.handle


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_are_taken_by_handle(device, other, handle):
    for its in (device, other):
        stream = its.stream(handle)
        assert its.stream(handle) is stream
        words = its.empty(4, np.int32)
        its.fill_words(words, 9, stream=stream)
        event = stream.record()
        stream.wait(event)
        its.create_stream().wait(event)
        event.synchronize()
        assert event.done()
        assert its.to_host(words, stream=stream).tolist() == [9] * 4
        assert not stream.is_capturing()
    assert driver.current() is None


def test_a_borrowed_stream_keeps_its_owner(device):
    class Owner(Protocol):
        alive = True

        def __del__(self):
            Owner.alive = False

    raw = device.create_stream().handle
    first = device.stream(Owner(raw))
    gc.collect()
    assert Owner.alive
    device.stream(Owner(raw))  # another object with the same handle takes its place
    assert first.owner is not None
    del first
    device.close()
    gc.collect()
    assert not Owner.alive


def test_what_is_no_stream_of_this_device(device, other):
    with pytest.raises(ValueError, match=r"resume\(stream\)"):
        device.stream(None)
    for thing in (True, 1.0, "0", object(), np.zeros(1)):
        with pytest.raises(TypeError, match="stream"):
            device.stream(thing)
    with pytest.raises(ValueError, match="version"):
        device.stream(Protocol(0, version=1))
    with pytest.raises(ValueError, match="handle"):
        device.stream(-1)
    foreign = other.create_stream()
    for stream in (foreign, foreign.handle, Protocol(foreign.handle)):
        with pytest.raises(ValueError, match="cuda:"):
            device.stream(stream)
    words = device.empty(4, np.int32)
    with pytest.raises(ValueError, match="cuda:0"):
        device.fill_words(words, 1, stream=foreign)
    host = HostDevice()
    with pytest.raises(TypeError, match="stream"):
        device.fill_words(words, 1, stream=host.default_stream)
    with pytest.raises(TypeError, match="event"):
        device.create_stream().wait(host.default_stream.record())
    with pytest.raises(TypeError, match="other: expected a stream of a cuda device"):
        device.create_stream().follow(host.default_stream)


def test_events_are_used_again(device):
    stream, second = device.create_stream(), device.create_stream()
    event = stream.record()
    before = driver.counts().events
    for _ in range(100):
        event = stream.record()  # the one before goes back to the pool when this one is there
        second.wait(event)
        assert event.done()
    assert driver.counts().events <= before + 1
    many = [stream.record() for _ in range(10)]
    assert driver.counts().events == before + 10 or driver.counts().events == before + 9
    assert len({event.native for event in many}) == 10


def test_an_event_serves_other_devices(device, other):
    here, there = device.create_stream(), other.create_stream()
    there.wait(here.record())
    here.wait(there.record())


@pytest.mark.parametrize("handles", [(None, None), (1, None), (None, 1), (2, None), (0, 2)])
@pytest.mark.parametrize("current", [None, 0])
def test_a_stream_follows_another_without_an_event_of_its_own(device, handles, current):
    first, second = (
        device.create_stream() if handle is None else device.stream(handle) for handle in handles
    )
    driver.make_current(current)
    first.follow(second)  # perhaps with the first event of all
    before = driver.counts().events
    for _ in range(100):
        first.follow(second)
    assert driver.counts().events == before
    for call, handle in (("cuStreamWaitEvent", handles[0]), ("cuEventRecord", handles[1])):
        again = handle is None  # in the context: a driver may want that
        failure = nullcontext() if again else pytest.raises(DriverError, match=f"{call} failed")
        second.record()  # puts an event into the pool
        driver.fail(call, 1)
        with failure:
            first.follow(second)


def test_failed_records_are_told(device):
    stream = device.create_stream()
    driver.fail("cuEventCreate", 1)
    with pytest.raises(DriverError, match="cuEventCreate"):
        stream.record()
    stream.record()
    driver.fail("cuEventRecord", 1)
    assert stream.record().done()  # tried once more, in the context: a driver may want that
    driver.fail("cuStreamWaitEvent", 1)
    stream.wait(device.stream(0).record())
    for current in (None, 0):
        driver.make_current(current)
        driver.fail("cuEventRecord", 1)
        with pytest.raises(DriverError, match="cuEventRecord failed"):
            device.stream(0).record()
        driver.fail("cuStreamWaitEvent", 1)
        with pytest.raises(DriverError, match="cuStreamWaitEvent failed"):
            device.stream(0).wait(stream.record())


class Told:
    """In place of the stream of cuda.core: notes who is told what."""

    def __init__(self, log, name):
        self.record, self.wait = (
            lambda event, call=call: log.append((name, call, event)) for call in ("record", "wait")
        )


def test_a_stream_follows_with_one_event_that_is_recorded_first(device):
    first, second = device.create_stream(), device.create_stream()
    second.follow(first)  # makes an event
    (event,), log = first.events, []
    first._core, second._core = Told(log, "first"), Told(log, "second")
    for _ in range(3):
        first.follow(second)
    assert log == 3 * [("second", "record", event), ("first", "wait", event)]
    assert [*first.events] == [event]


def test_a_stream_follows_one_of_another_device_with_an_event_of_that(device, other):
    here, there = device.create_stream(), other.create_stream()
    for stream in (here, there):
        stream.record()
    mine, its = [*here.events], [*there.events]
    here.follow(there)
    assert ([*here.events], [*there.events]) == (mine, its)


@pytest.mark.parametrize("current", [None, 0])
def test_a_default_stream_takes_part_in_the_captures_of_others(device, current):
    """The driver does not answer then, since asking would be work on it."""
    driver.make_current(current)
    for handle in (1, 2):
        stream = device.stream(handle)
        driver.fail("cuStreamIsCapturing", 1, 906)
        assert stream.is_capturing()
        assert not stream.is_capturing()
        driver.fail("cuStreamIsCapturing", 1)
        with pytest.raises(DriverError, match="cuStreamIsCapturing failed with 999"):
            stream.is_capturing()
    driver.make_current(None)


def test_failed_queries_are_told(device):
    event = device.create_stream().record()
    driver.fail("cuEventQuery", 1)
    with pytest.raises(DriverError, match="cuEventQuery"):
        event.done()
    driver.fail("cuEventQuery", 1)  # which the fake's cuEventSynchronize asks
    with pytest.raises(DriverError, match="cuEventSynchronize"):
        event.synchronize()
    assert event.done()


def test_idle_streams(device):
    """A default stream is several: each thread's own, and those it is ordered with."""
    stream = device.create_stream()
    assert stream.is_idle()
    driver.fail("cuStreamQuery", 1, 600)  # not ready
    assert not stream.is_idle()
    driver.fail("cuStreamQuery", 1)
    with pytest.raises(DriverError, match="cuStreamQuery failed with 999"):
        stream.is_idle()
    assert [device.stream(handle).is_idle() for handle in (0, 1, 2)] == [False] * 3
    driver.switch("capturing", True)
    assert not stream.is_idle()
    driver.switch("capturing", False)
    assert stream.is_idle()


def test_the_legacy_default_stream_stands_for_each_threads_own(device, other):
    for its in (device, other):
        own, legacy, ours = its.stream(2), its.stream(1), its.create_stream()
        assert own.deputy is legacy
        assert [stream.deputy for stream in (legacy, its.stream(0), ours)] == [None] * 3
        assert legacy.context is its.context
    gone = weakref.ref(device.stream(2)), weakref.ref(device.stream(1))
    del own, legacy, its
    gc.disable()
    try:
        device.close()
        assert [stream() for stream in gone] == [None, None]  # without the collector
    finally:
        gc.enable()


def test_a_new_stream_may_get_the_handle_of_one_that_is_gone(device, monkeypatch):
    """Which was somebody else's, and is still among those that are found at once."""
    handle = int(device.context.call("cuStreamCreate", 0))
    gone = device.stream(handle)

    def same(its, context, graveyard):
        its._graveyard, its.handle = graveyard, handle

    monkeypatch.setattr(OwnedStream, "__init__", same)
    new = device.create_stream()
    assert new is not gone
    assert new.blocks is not gone.blocks
    assert device.stream(handle) is device.stream(Protocol(handle)) is new


def test_failed_launches_are_told(device):
    stream, words = device.create_stream(), device.empty(4, np.int32)
    driver.fail("cuLaunchKernel", 1)
    with pytest.raises(DriverError, match="cuLaunchKernel of fill_words failed with 999"):
        device.fill_words(words, 1, stream=stream)
    device.fill_words(words, 2, stream=stream)
    assert device.to_host(words, stream=stream).tolist() == [2] * 4


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"])
def test_failed_copies_are_told_and_keep_the_staging(device, call):
    stream, words = device.create_stream(), device.empty(4, np.int32)
    values = np.arange(4, dtype=np.int32)

    def both():
        device.from_host(values, words, stream=stream)
        return device.to_host(words, stream=stream).tolist()

    driver.fail(call, 1)
    with pytest.raises(DriverError, match=call.removesuffix("_v2")):
        both()
    assert both() == [0, 1, 2, 3]


def test_threads_without_a_context_work(device, other):
    found = []

    def work(its, value):
        stream = its.create_stream()
        words = its.empty(1000, np.int32, stream=stream)
        for _ in range(50):
            its.fill_words(words, value, stream=stream)
            found.append(set(its.to_host(words, stream=stream).tolist()) == {value})
            stream.record().synchronize()
        found.append(driver.current() is None)

    threads = [
        threading.Thread(target=work, args=(its, value))
        for value, its in enumerate([device, other, device, other])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * (4 * 51)


def test_streams_of_ours_are_destroyed(device):
    stream = device.create_stream()
    handle = stream.handle
    before = driver.counts().streams
    del stream
    gc.collect()
    device.collect()
    assert driver.counts().streams == before - 1
    assert device.stream(0).handle == 0
    assert handle


def test_what_kvcore_made_is_not_used_again_before_its_consumer(rig, orders):
    """The consumer's stream comes after kvcore's, and the next owner of the memory after it."""
    consumer, other = rig.device.create_stream(), rig.device.create_stream()
    made = rig.device.empty(40, np.float32, stream=rig.stream)
    place, ours, theirs = made.data.ptr, rig.stream.handle, consumer.handle
    its = for_dlpack.produced(rig.device, made, stream=rig.stream)
    orders.clear()
    capsules = [its.__dlpack__(stream=handle) for handle in (theirs, ours, -1, theirs)]
    assert orders == [(theirs, ours)] * 2
    del made, its
    capsules.clear()
    rig.device.empty(40, np.float32, stream=rig.stream)
    driver.switch("capturing", True)
    for_dlpack.produced(rig.device, rig.device.empty(1, np.int32), stream=other)
    driver.switch("capturing", False)
    assert rig.device.empty(40, np.float32, stream=rig.stream).data.ptr != place
    orders.clear()
    for_dlpack.produced(rig.device, rig.device.empty(1, np.int32), stream=other)
    assert orders == [(ours, theirs)] * 2
    found = [rig.device.empty(40, np.float32, stream=rig.stream) for _ in range(2)]
    assert place in [array.data.ptr for array in found]


@pytest.mark.parametrize(("made_on", "given", "waits"), [(2, 2, True), (2, 1, False), (1, 2, True)])
def test_what_kvcore_made_on_each_threads_own_stream(rig, orders, made_on, given, waits):
    made = rig.device.empty(4, np.float32)
    its = for_dlpack.produced(rig.device, made, stream=made_on)
    its.__dlpack__(stream=given)
    assert orders == ([(given, 1)] if waits else [])
    for_dlpack.produced(rig.device, made, stream=made_on)
