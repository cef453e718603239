"""Pinned buffers are reused only once nothing reads them, and their number stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device.host import HostDevice
from kvcore.device.staging import StagingRing
from kvcore.errors import StateError

SEEDS = range(12)


class Moment:
    """An event that the test lets pass."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class CountingDevice(HostDevice):
    """Counts how often memory is pinned."""

    pins = 0

    def pinned(self, nbytes):
        self.pins += 1
        return super().pinned(nbytes)


class BrokenRing(StagingRing):
    """Recycles a buffer without looking at its event."""

    def retire(self, buffer, event):
        super().retire(buffer, None)


def retire_all(ring, buffers, moments):
    """Retires buffers in order."""
    for buffer, moment in zip(buffers, moments, strict=True):
        ring.retire(buffer, moment)


def uploads(seed: int, kind: type[StagingRing], steps: int = 12) -> bool:
    """Whether every step of a loop that uploads a table through a ring has the right table."""
    device = HostDevice(deferred=True, seed=seed)
    ring, stream = kind(device, 256), device.create_stream()
    table, target = np.full(64, -1, np.int32), np.zeros(4, np.int32)
    results = []
    rng = np.random.default_rng(5)
    expected = table.copy()
    right = True
    for step in range(steps):
        buffer = ring.lease(112)
        index, value = buffer[:64].view(np.int64), buffer[64:96].view(np.int32)
        words = buffer[96:112].view(np.int32)
        index[:], value[:], words[:] = rng.permutation(64)[:8], step * 8 + np.arange(8), step
        expected[index] = value
        device.scatter_table(table, index, value, target, words, stream=stream)
        seen = np.zeros((1, 64), np.int32)
        device.take_rows(table.reshape(1, 64), np.zeros(1, np.int32), seen, stream=stream)
        results.append((seen, expected.copy()))
        ring.retire(buffer, stream.record())
    stream.synchronize()
    right = all(np.array_equal(seen[0], wanted) for seen, wanted in results)
    return right and target.tolist() == [steps - 1] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_is_not_written_before_it_was_read(seed):
    assert uploads(seed, StagingRing)


def test_a_ring_that_ignores_events_is_found():
    assert [seed for seed in SEEDS if not uploads(seed, BrokenRing)] != []


def test_the_oldest_finished_buffer_is_reused():
    ring = StagingRing(HostDevice(), 64, buffers=0)
    buffers, moments = [ring.lease(64) for _ in range(3)], [Moment() for _ in range(3)]
    retire_all(ring, buffers, moments)
    moments[1].passed = moments[2].passed = True
    assert ring.lease(64) is buffers[1]
    moments[0].passed = True
    assert ring.lease(64) is buffers[0]
    assert ring.lease(64) is buffers[2]
    assert len(ring) == 3


def test_a_new_buffer_is_pinned_rather_than_waiting():
    device = CountingDevice()
    ring = StagingRing(device, 64, buffers=1)
    first, moment = ring.lease(10), Moment()
    ring.retire(first, moment)
    second = ring.lease(10)
    assert not np.shares_memory(first, second)
    assert (device.pins, len(ring), ring.nbytes) == (2, 2, 128)
    ring.retire(second, moment)
    moment.passed = True
    for _ in range(20):
        ring.retire(ring.lease(64), moment)
    assert (device.pins, len(ring)) == (2, 2)


def test_the_number_of_buffers_is_how_far_the_host_ran_ahead():
    ring, moments = StagingRing(HostDevice(), 64), [Moment() for _ in range(100)]
    for step, moment in enumerate(moments):
        ring.retire(ring.lease(64), moment)
        if step >= 4:
            moments[step - 4].passed = True
    assert len(ring) <= 6


def test_buffers_grow_and_small_ones_go():
    ring, moment = StagingRing(HostDevice(), 64, buffers=0), Moment()
    moment.passed = True
    for nbytes, expected in ((65, 128), (1000, 1024), (3, 1024), (1024, 1024), (1025, 2048)):
        buffer = ring.lease(nbytes)
        assert (buffer.nbytes, buffer.dtype) == (expected, np.uint8)
        ring.retire(buffer, moment)
        assert (len(ring), ring.nbytes) == (1, expected)


def test_a_small_unfinished_buffer_stays():
    ring, moment = StagingRing(HostDevice(), 64, buffers=0), Moment()
    small = ring.lease(64)
    ring.retire(small, moment)
    large = ring.lease(200)
    assert len(ring) == 2
    ring.retire(large, moment)
    moment.passed = True
    assert ring.lease(8) is small


def test_a_lease_of_nothing():
    ring = StagingRing(HostDevice(), 64, buffers=0)
    assert ring.lease(0).nbytes == 64


def test_what_was_not_leased_cannot_be_retired():
    ring = StagingRing(HostDevice(), 64)
    buffer = ring.lease(64)
    for thing in (buffer[:8], np.zeros(64, np.uint8)):
        with pytest.raises(StateError, match="buffer: expected an array that lease"):
            ring.retire(thing, None)
    ring.retire(buffer, None)
    with pytest.raises(StateError, match="buffer: expected an array that lease"):
        ring.retire(buffer, None)
    assert len(ring) == 2


def test_close_waits_for_the_readers():
    device = HostDevice(deferred=True)
    ring, stream = StagingRing(device, 64), device.create_stream()
    buffer, table = ring.lease(64), np.zeros(4, np.int32)
    index, value = buffer[:8].view(np.int64), buffer[8:12].view(np.int32)
    index[:], value[:] = 2, 9
    device.scatter_table(table, index, value, table, value[:0], stream=stream)
    ring.retire(buffer, stream.record())
    ring.close()
    ring.close()
    assert table.tolist() == [0, 0, 9, 0]
    assert (len(ring), ring.nbytes) == (0, 0)


def test_a_ring_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nbytes: expected at least 1, got 0"):
        StagingRing(HostDevice(), 0)
