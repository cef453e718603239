"""Scenes of leased pages on several streams, each right in every order that events allow.

The consumer is a library with a stream of its own: it reads and writes leased pages in work that it
enqueues there, which runs when the simulator says so.
"""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from tests.helpers import row, typed_manager

H, D = 2, 256
SEEDS = range(80)


class Scene:
    """One deferred device with two pages: a sequence `a` on one stream, a consumer on another."""

    def __init__(self, seed: int, slots: int = 2) -> None:
        self.device = HostDevice(deferred=True, seed=seed)
        self.m = typed_manager(slots=slots, layers=1, heads=H, dim=D, device=self.device)
        self.s1, self.s2, self.consumer, self.other = (
            self.device.create_stream() for _ in range(4)
        )
        self.a = self.begin(self.s1)
        self.step = self.m.create_batch(1, 4)
        self.seen: list[np.ndarray] = []

    def begin(self, stream) -> k.KVCache:
        kv = self.m.create_kv_cache()
        assert kv.resume(stream)
        assert kv.resize(4)
        return kv

    def append(self, value: float, stream=None) -> None:
        """All four tokens of `a` are written by kvcore."""
        page = np.full((4, H, D), value, np.float32)
        self.step.prepare([self.a], 4, stream=stream)
        self.step.append(0, {"key": page, "value": page})

    def gather(self) -> np.ndarray:
        self.step.prepare([self.a], 4)
        return self.step.gather(0)[0]

    def read(self, slot: int, stream=None) -> None:
        """The consumer reads a page of keys in its stream.

        A queue would keep the leased array, which a GPU does not: this reads the same memory.
        """
        page = self.m.get_pages(0, "key")[slot]
        seen = np.empty_like(page)
        self.seen.append(seen)
        (stream or self.consumer).submit("read", np.copyto, seen, page)

    def write(self, slot: int, value: float) -> None:
        """The consumer fills a page of keys in its stream."""
        self.consumer.submit("write", self.m.get_pages(0, "key")[slot].fill, value)

    def take_over(self, stream) -> None:
        """Another sequence gets the page of `a`, which is closed, and overwrites it."""
        (slot,) = row(self.a)
        self.a.close()
        b = self.begin(stream)
        assert row(b) == [slot]
        self.device.fill_pages(
            self.m._runtime.pool_places[0], np.array([slot], np.int32), 9, stream=stream
        )

    def saw(self, *values: float) -> bool:
        self.device.drain()
        return len(values) == len(self.seen) and all(
            bool((seen == value).all()) for seen, value in zip(self.seen, values, strict=True)
        )


def a_lease_is_handed_over_at_the_start(seed: int) -> bool:
    s = Scene(seed)
    s.append(1)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.read(*row(s.a))
    assert lease.is_open
    return s.saw(1)


def a_lease_is_acquired_again(seed: int) -> bool:
    s = Scene(seed)
    lease = s.m.lease(0, "key")
    for value in (1, 2, 3):
        s.append(value)
        lease.acquire(s.consumer)
        s.read(*row(s.a))
        lease.release()
    return s.saw(1, 2, 3)


def work_on_a_lent_stream_is_handed_over_too(seed: int) -> bool:
    s = Scene(seed)
    s.append(1, stream=s.s2)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.read(*row(s.a))
    assert lease.is_open
    return s.saw(1)


def work_of_a_sequence_that_is_gone_is_handed_over_too(seed: int) -> bool:
    """Its stream is nobody's any more, and its number another one's."""
    s = Scene(seed)
    (slot,) = row(s.a)
    s.append(1)
    s.a.close()
    later = [s.m.create_kv_cache() for _ in range(2)]
    for kv, stream in zip(later, (s.s2, s.other), strict=True):
        assert kv.resume(stream)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.read(slot)
    return s.saw(1) and lease.is_open


def what_the_consumer_writes_is_read_after_release(seed: int) -> bool:
    s = Scene(seed)
    with s.m.lease(0, "key", stream=s.consumer) as lease:
        for value in (1, 2):
            s.write(*row(s.a), value)
            lease.release(s.consumer)
            s.seen.append(s.gather())
            lease.acquire(s.consumer)
    return s.saw(1, 2)


def what_the_consumer_writes_is_read_after_the_end(seed: int) -> bool:
    s = Scene(seed)
    with s.m.lease(0, "key", stream=s.consumer) as lease:
        s.write(*row(s.a), 5)
        assert lease.is_open
    s.seen.append(s.gather())
    return s.saw(5)


def work_goes_on_after_an_array_was_dropped(seed: int) -> bool:
    """On the stream that the lease was taken for, which the manager has handed back once."""
    s = Scene(seed)
    with s.m.lease(0, "key", stream=s.consumer) as lease:
        np.from_dlpack(lease)
        s.m.get_storage_statistics()
        s.write(*row(s.a), 5)
    s.seen.append(s.gather())
    return s.saw(5)


def work_goes_on_after_acquire_and_a_dropped_array(seed: int) -> bool:
    """What the caller has acquired is his until he releases it, whatever a library drops."""
    s = Scene(seed)
    with s.m.lease(0, "key") as lease:
        lease.acquire(s.consumer)
        np.from_dlpack(lease)
        s.m.get_storage_statistics()
        s.write(*row(s.a), 5)
    s.seen.append(s.gather())
    return s.saw(5)


def close_takes_one_more_stream(seed: int) -> bool:
    s = Scene(seed)
    lease = s.m.lease(0, "key")
    s.write(*row(s.a), 5)
    lease.close(s.consumer)
    s.seen.append(s.gather())
    return s.saw(5)


def the_last_array_hands_back(seed: int) -> bool:
    """Nothing is said: the array is dropped, and kvcore's next call puts things in order."""
    s = Scene(seed)
    pages = np.from_dlpack(s.m.lease(0, "key", stream=s.consumer))
    s.write(*row(s.a), 5)
    del pages
    s.seen.append(s.gather())
    return s.saw(5)


def the_last_array_hands_back_inside_a_step(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4)
    pages = np.from_dlpack(s.m.lease(0, "key", stream=s.consumer))
    s.write(*row(s.a), 5)
    del pages
    s.seen.append(s.step.gather(0)[0])
    return s.saw(5)


def a_failed_close_hands_back_when_the_last_array_is_dropped(seed: int) -> bool:
    s = Scene(seed)
    lease = s.m.lease(0, "key", stream=s.consumer)
    pages = np.from_dlpack(lease)
    with pytest.raises(k.LeaseInUse):
        lease.close()
    s.write(*row(s.a), 5)
    del pages
    s.seen.append(s.gather())
    return s.saw(5)


def an_array_taken_after_another_was_dropped_hands_back(seed: int) -> bool:
    """The manager's call between the two has put things in order for the first one only."""
    s = Scene(seed)
    lease = s.m.lease(0, "key", stream=s.consumer)
    first = np.from_dlpack(lease)
    del first
    second = np.from_dlpack(lease)
    s.m.get_storage_statistics()
    s.write(*row(s.a), 5)
    del second
    s.seen.append(s.gather())
    return s.saw(5) and lease.is_open


def a_page_is_not_overwritten_while_it_is_read(seed: int) -> bool:
    """By a sequence on a stream that kvcore sees for the first time."""
    s = Scene(seed, slots=1)
    s.append(1)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.read(*row(s.a))
    lease.release()
    s.take_over(s.other)
    return s.saw(1)


def a_page_that_was_freed_before_is_not_overwritten_either(seed: int) -> bool:
    """It is free again with a ticket that knows nothing of the consumer."""
    s = Scene(seed, slots=1)
    s.append(1)
    (slot,) = row(s.a)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.read(slot)
    s.a.close()
    lease.close()
    b = s.begin(s.other)
    places, slots = s.m._runtime.pool_places[0], np.array(row(b), np.int32)
    s.device.fill_pages(places, slots, 9, stream=s.other)
    return s.saw(1)


def a_second_consumer_sees_what_the_first_wrote(seed: int) -> bool:
    """Also before any sequence works on a stream."""
    s = Scene(seed)
    s.a.close()
    first = s.m.lease(0, "key", stream=s.consumer)
    s.write(0, 7)
    first.close()
    s.m.lease(0, "key", stream=s.other)
    s.read(0, s.other)
    return s.saw(7)


def an_open_lease_is_taken_after_another_consumers_array_was_dropped(seed: int) -> bool:
    """As by DLPack on a GPU: the library names its stream, and no call of the manager helps."""
    s = Scene(seed)
    first, second = (s.m.lease(0, "key") for _ in range(2))
    array = np.from_dlpack(first)
    first.acquire(s.consumer)
    s.write(*row(s.a), 7)
    del array
    book, entry = s.m._runtime.leases, second._entry
    book.hand_over(entry, s.other)
    s.read(*row(s.a), s.other)
    return s.saw(7)


def a_consumer_comes_again_while_others_wait_for_its_first_work(seed: int) -> bool:
    """Where it ended the first time says nothing about the second: neither to others nor to us."""
    s = Scene(seed)
    page = s.m.get_pages(0, "key")[row(s.a)[0]]  # here: each call of the manager takes back
    for value in (5, 7):
        first = s.m.lease(0, "key", stream=s.consumer)
        s.consumer.submit("write", page.fill, value)
        del first
        second, seen = s.m.lease(0, "key", stream=s.other), np.empty_like(page)
        s.other.submit("read", np.copyto, seen, page)
        s.seen.append(seen)
        del second
    s.seen.append(s.gather())
    return s.saw(5, 7, 7)


def a_table_is_not_sent_while_it_is_read(seed: int) -> bool:
    """By a batch without members, which sends what others have changed."""
    s = Scene(seed)
    s.step.prepare([s.a])
    number = int(s.m._runtime.control.seqs.rows[s.a._sequence, 0])
    before, seen = row(s.a), np.empty(1, np.int32)
    s.a.suspend()
    with s.m.lease_page_table(stream=s.consumer):
        s.consumer.submit("read", np.copyto, seen, s.m.page_table()[number, :1])
    s.step = s.m.create_batch(1, 4)
    s.step.prepare([], stream=s.s2)
    s.device.drain()
    return seen.tolist() == before and bool(s.m.page_table()[number, 0] == -1)


def the_stream_a_lease_was_taken_for_stays_its_own(seed: int) -> bool:
    """Also after it was handed back once."""
    s = Scene(seed)
    lease = s.m.lease(0, "key", stream=s.consumer)
    lease.release()
    s.write(*row(s.a), 5)
    lease.close()
    s.seen.append(s.gather())
    return s.saw(5)


def a_second_consumer_comes_before_any_sequence(seed: int) -> bool:
    """No stream of kvcore's stands between the two."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=2, layers=1, heads=H, dim=D, device=device)
    first, second = device.create_stream(), device.create_stream()
    page = m.get_pages(0, "key")[0]
    seen = np.empty_like(page)
    with m.lease(0, "key", stream=first) as lease:
        first.submit("write", page.fill, 5)
        lease.release()
        lease.acquire(second)
        second.submit("read", np.copyto, seen, page)
    device.drain()
    return bool((seen == 5).all())


def a_table_is_not_sent_by_the_same_batch_while_it_is_read(seed: int) -> bool:
    """Its sequences are known from the step before, and grew together."""
    s = Scene(seed)
    before, seen, table = row(s.a), np.empty(2, np.int32), s.m.page_table()
    number = int(s.m._runtime.control.seqs.rows[s.a._sequence, 0])
    s.step.prepare([s.a])
    with s.m.lease_page_table(stream=s.consumer) as lease:
        np.from_dlpack(lease)
        s.consumer.submit("read", np.copyto, seen, table[number, :2])
        assert s.m.advance([s.a], 4)
        s.step.prepare([s.a])
    s.device.drain()
    return seen.tolist() == [*before, -1] and table[number, :2].tolist() == row(s.a)


def a_table_is_read_after_it_was_sent(seed: int) -> bool:
    """By a batch without members, on a stream that no sequence has anything to do with."""
    s = Scene(seed)
    s.step.prepare([], stream=s.s2)
    lease, seen = s.m.lease_page_table(stream=s.consumer), np.empty(1, np.int32)
    number = int(s.m._runtime.control.seqs.rows[s.a._sequence, 0])
    s.consumer.submit("read", np.copyto, seen, s.m.page_table()[number, :1])
    s.device.drain()
    return lease.is_open and seen.tolist() == row(s.a)


SCENES = [
    a_lease_is_handed_over_at_the_start,
    a_lease_is_acquired_again,
    work_on_a_lent_stream_is_handed_over_too,
    work_of_a_sequence_that_is_gone_is_handed_over_too,
    what_the_consumer_writes_is_read_after_release,
    what_the_consumer_writes_is_read_after_the_end,
    work_goes_on_after_an_array_was_dropped,
    work_goes_on_after_acquire_and_a_dropped_array,
    close_takes_one_more_stream,
    the_last_array_hands_back,
    the_last_array_hands_back_inside_a_step,
    a_failed_close_hands_back_when_the_last_array_is_dropped,
    an_array_taken_after_another_was_dropped_hands_back,
    a_page_is_not_overwritten_while_it_is_read,
    a_page_that_was_freed_before_is_not_overwritten_either,
    a_second_consumer_sees_what_the_first_wrote,
    an_open_lease_is_taken_after_another_consumers_array_was_dropped,
    a_consumer_comes_again_while_others_wait_for_its_first_work,
    the_stream_a_lease_was_taken_for_stays_its_own,
    a_second_consumer_comes_before_any_sequence,
    a_table_is_not_sent_by_the_same_batch_while_it_is_read,
    a_table_is_not_sent_while_it_is_read,
    a_table_is_read_after_it_was_sent,
]
