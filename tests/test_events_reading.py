"""Reading events: capacity, waiting, closing, threads."""

from __future__ import annotations

import random
import threading

import pytest

from kvcore.event_types import KVCacheEvent, KVCacheStoredBlockData
from kvcore.events import KVCacheEventManager
from tests.event_runs import Consumer, flushed, keys_of, run_of, shown

IDS = list(range(1, 13))
H0, H1, H2 = (key.hex() for key in keys_of(IDS))


def created(event: KVCacheEvent) -> list[int]:
    """The payload of a created event."""
    return list(event.data.num_blocks_per_cache_level)


@pytest.mark.parametrize("capacity", [0, -3])
def test_no_capacity_no_events(capacity):  # E-05
    m = KVCacheEventManager(capacity)
    m.add_created_event([1])
    m.add_stored_event(None, [KVCacheStoredBlockData("a", (), 0, 0)])
    m.add_removed_event("a")
    m.stored(run_of(IDS))
    m.removed(keys_of(IDS), None)
    m.flush_iteration_events()
    assert m.get_latest_events() == []  # nothing will ever come: no waiting
    assert (m.last_event_id, m.num_dropped_events) == (-1, 0)


def test_the_oldest_go_and_leave_a_gap():
    m = KVCacheEventManager(3)
    for n in range(5):
        m.add_created_event([n])
    assert [(e.event_id, created(e)) for e in flushed(m)] == [(2, [2]), (3, [3]), (4, [4])]
    for n in range(5, 9):
        m.add_created_event([n])
        m.flush_iteration_events()
    assert [event.event_id for event in m.get_latest_events(0)] == [6, 7, 8]
    assert m.num_dropped_events == 3
    assert m.last_event_id == 8


def test_a_run_whose_event_was_lost_begins_anew():
    m = KVCacheEventManager(1)
    m.stored(run_of(IDS, 0, 1))
    m.add_created_event([1])
    m.stored(run_of(IDS, 1, 2))
    m.stored(run_of(IDS, 2, 3))
    events = flushed(m)
    assert (shown(events), events[0].event_id) == ([("stored", 0, [H1, H2])], 2)


def test_reading_waits_for_a_flush():  # E-05
    m, got = KVCacheEventManager(1), []
    waiting, wait = threading.Event(), m._lock.wait
    m._lock.wait = lambda timeout: (waiting.set(), wait(timeout))[1]
    reader = threading.Thread(target=lambda: got.append(m.get_latest_events()))
    reader.start()
    assert waiting.wait(60)
    m.add_created_event([1])
    assert got == []  # an event that is not flushed wakes nobody
    m.flush_iteration_events()
    reader.join(60)
    assert [created(event) for event in got[0]] == [[1]]


def test_reading_waits_as_long_as_it_says():
    m, waited = KVCacheEventManager(1), []
    m._lock.wait = lambda timeout: waited.append(timeout)
    assert m.get_latest_events(0.25) == []
    assert waited
    assert 0 < waited[0] <= 0.25e-3
    for wrong in ("1", True, float("nan")):
        with pytest.raises((TypeError, ValueError), match="timeout_ms"):
            m.get_latest_events(wrong)


def test_close_wakes_readers():
    m, got = KVCacheEventManager(1), []
    reader = threading.Thread(target=lambda: got.append(m.get_latest_events()))
    reader.start()
    m.close()
    reader.join(60)
    assert got == [[]]
    assert m.get_latest_events() == []


def test_threads():
    """Four threads tell and flush, one reads: ids without a gap, nothing lost, nothing twice."""
    m, c = KVCacheEventManager(100_000), Consumer()
    done = threading.Event()

    def tell(number: int) -> None:
        rng = random.Random(number)
        for n in range(100):
            ids = [number * 1000 + n, 2, 3, 4]
            m.stored(run_of(ids, groups=(0, 1)))
            m.removed(keys_of(ids), rng.choice((0, 1, None)))
            m.flush_iteration_events()

    def read() -> None:
        while not done.is_set():
            assert c.follow(m.get_latest_events(1))

    threads = [threading.Thread(target=tell, args=(n,)) for n in range(4)]
    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert c.follow(m.get_latest_events(0))
    assert c.last == m.last_event_id
    assert m.num_dropped_events == 0
    expected: dict[int, set[str]] = {0: set(), 1: set()}
    for number in range(4):
        rng = random.Random(number)
        for n in range(100):
            gone = rng.choice((0, 1, None))
            if gone is not None:
                expected[1 - gone].add(keys_of([number * 1000 + n, 2, 3, 4])[0].hex())
    assert c.held == expected
