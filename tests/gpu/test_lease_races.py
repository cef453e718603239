"""Leases under delays: whoever is slow, nobody reads what is not written yet. A thousand runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
import pytest

import kvcore as k
from tests.gpu import tools
from tests.helpers import typed_manager

pytestmark = pytest.mark.no_sanitizer
RUNS, SLOTS, T, H, D = 1_000, 8_192, 4, 2, 8
STREAMS = {
    "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    "blocking": cupy.cuda.Stream,
    "legacy default": lambda: cupy.cuda.Stream.null,
    "per-thread default": lambda: cupy.cuda.Stream.ptds,
}


def slow(device, stream, run):
    """A delay of 0 to about 100 µs, of another length in each run."""
    device.launch("latch", "delay")(stream, 1, 1, 1, (run * 7919) % 150_000)


@pytest.fixture(params=STREAMS)
def consumer(request):
    """A stream of CuPy that is none of kvcore's."""
    return STREAMS[request.param]()


@pytest.fixture
def pages(device):
    """A manager, and one open cache of eight tokens on a stream of its own."""
    stream = device.create_stream()
    m = typed_manager(slots=SLOTS, device=device, stream=stream, dtype="int32")
    kv = m.create_kv_cache()
    assert kv.resume()
    assert kv.resize(8)
    batch = m.create_batch(1, 8)
    values = device.empty((2, 8, H, D), np.int32)
    yield m, kv, batch, values
    device.synchronize()
    kv.close()
    m.shutdown()


def written(device, batch, values, number, stream):
    """Puts a number into all tokens of all layers, on kvcore's stream."""
    device.fill_words(values, number, stream=stream)
    batch.append([0, 1], {"key": values, "value": values})


def test_consumers_read_what_kvcore_has_written_before(device, pages, consumer):
    """Kvcore's stream is slow. Every run takes a lease, imports it and reads at once."""
    m, kv, batch, values = pages
    slots = kv.get_base_page_indices(0).tolist()
    found = cupy.zeros((RUNS, 2), np.int32)
    for run in range(RUNS):
        batch.prepare([kv], 8, start=0)
        slow(device, kv.stream, run)
        written(device, batch, values, run + 1, kv.stream)
        with m.lease(1, "value") as lease, consumer:
            array = cupy.from_dlpack(lease)
            found[run, 0] = array[slots[0]].min()
            found[run, 1] = array[slots[1]].max()
            del array
    device.synchronize()
    expected = np.repeat(np.arange(1, RUNS + 1)[:, None], 2, axis=1)
    np.testing.assert_array_equal(cupy.asnumpy(found), expected)


def test_kvcore_reads_what_consumers_have_written_before(device, pages, consumer):
    """The consumer's stream is slow, and kvcore gathers right after the lease has ended."""
    m, kv, batch, _ = pages
    slots = kv.get_base_page_indices(0).tolist()
    found = [device.empty((8, H, D), np.int32) for _ in range(RUNS)]
    on = device.stream(consumer)
    for run in range(RUNS):
        with m.lease(0, "key") as lease, consumer:
            array = cupy.from_dlpack(lease)
            slow(device, on, run)
            array[slots[0]] = run + 1
            array[slots[1]] = run + 1
            del array
        batch.prepare([kv], 8, start=0)
        batch.gather(0, ("key",), out=(found[run],))
    device.synchronize()
    for run, array in enumerate(found):
        assert (cupy.asnumpy(array) == run + 1).all(), run


def test_kvcore_reads_what_another_threads_own_stream_has_written_before(device, pages):
    """The consumer's per-thread default stream is another one where kvcore is called next."""
    m, kv, batch, _ = pages
    slots = kv.get_base_page_indices(0).tolist()
    found = [device.empty((8, H, D), np.int32) for _ in range(RUNS)]
    on = device.stream(cupy.cuda.Stream.ptds)

    def consume(run):
        with cupy.cuda.Stream.ptds:
            array = cupy.from_dlpack(m.lease(0, "key"))
            slow(device, on, run)
            array[slots[0]] = run + 1
            array[slots[1]] = run + 1

    with ThreadPoolExecutor(1) as other:
        for run in range(RUNS):
            other.submit(consume, run).result()
            batch.prepare([kv], 8, start=0)
            batch.gather(0, ("key",), out=(found[run],))
    device.synchronize()
    for run, array in enumerate(found):
        assert (cupy.asnumpy(array) == run + 1).all(), run


def test_pages_are_not_overwritten_under_a_slow_reader(device, pages, consumer):
    """The consumer reads late; kvcore writes the next numbers right after the lease has ended."""
    m, kv, batch, values = pages
    slots = kv.get_base_page_indices(0).tolist()
    found = cupy.zeros((RUNS, T, H, D), np.int32)
    on = device.stream(consumer)
    for run in range(RUNS):
        batch.prepare([kv], 8, start=0)
        written(device, batch, values, run + 1, kv.stream)
        with m.lease(0, "key") as lease, consumer:
            array = cupy.from_dlpack(lease)
            slow(device, on, run)
            found[run] = array[slots[1]]
            del array
    device.synchronize()
    expected = np.broadcast_to(np.arange(1, RUNS + 1)[:, None, None, None], found.shape)
    np.testing.assert_array_equal(cupy.asnumpy(found), expected)


def test_without_a_lease_the_reader_is_too_early(device, pages):
    """What the tests above would see if nobody waited: a stale number."""
    m, kv, batch, values = pages
    consumer = cupy.cuda.Stream(non_blocking=True)
    array = m.get_pages(0, "key")
    slot = int(kv.get_base_page_indices(0)[0])
    batch.prepare([kv], 8, start=0)
    written(device, batch, values, 1, kv.stream)
    device.synchronize()
    with tools.held(device, kv.stream):
        written(device, batch, values, 2, kv.stream)
        with consumer:
            early = array[slot].max()
        consumer.synchronize()
    assert int(early) == 1


def test_torch_and_kvcore_pass_pages_to_and_fro(device, pages):
    """Torch adds one to every page, on its own slow stream; kvcore adds a token's number before."""
    torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
    m, kv, batch, values = pages
    slots = kv.get_base_page_indices(0).tolist()
    side = torch.cuda.Stream()
    on, found = device.stream(side), []
    for run in range(RUNS):
        batch.prepare([kv], 8, start=0)
        slow(device, kv.stream, run)
        written(device, batch, values, run, kv.stream)
        with m.lease(0, "key") as lease, torch.cuda.stream(side):
            pages_of_torch = torch.from_dlpack(lease)
            slow(device, on, run + 3)
            pages_of_torch[slots[0]] += 1
            del pages_of_torch
        found.append(batch.gather(0, ("key",))[0])
    device.synchronize()
    for run, array in enumerate(found):
        numbers = cupy.asnumpy(array).reshape(2, -1)
        assert (numbers[0] == run + 1).all(), run
        assert (numbers[1] == run).all(), run


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_captures_outlive_leases_that_are_refused(device, mode):
    """A question to any stream or event would end most captures: none is asked."""
    captured, (other, consumer) = tools.capturable(device), (device.create_stream() for _ in "ab")
    m = typed_manager(slots=SLOTS, device=device, stream=device.stream(captured))
    kv = m.create_kv_cache()
    assert kv.resume()
    lease, words = m.lease(0, "key"), device.empty(4, np.int32)

    def capture(*streams):
        """How the calls end in which these are handed pages; the graph must be whole."""
        captured.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        ends = []
        for stream in streams:
            try:
                m.lease(0, "value", stream=stream)
            except k.StateError:
                ends.append("refused")
            else:
                ends.append("given")
        device.fill_words(words, 7, stream=device.stream(captured))
        captured.end_capture().launch(captured)
        return ends

    assert capture(captured, other) == ["given", "refused"]
    capsule = lease.__dlpack__(stream=consumer.handle)
    tools.delay(device, consumer, 20)
    del capsule  # the consumer is gone, and still at work
    assert capture(captured, other) == ["refused", "refused"]
    device.synchronize()
    assert device.to_host(words, stream=other).tolist() == [7] * 4
    assert capture(captured, other) == ["refused", "refused"]  # nobody has asked
    m.get_storage_statistics()
    assert capture(captured, other) == ["given", "refused"]
    kv.close(), lease.close()
    m.shutdown()
