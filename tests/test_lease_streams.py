"""Leased pages on several streams: right in every order that events allow, and each wait needed."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.fences import Fences
from kvcore.device.host import HostDevice
from kvcore.device.simulated import DeferredEvent, DeferredStream, Gate, Simulator
from kvcore.device.tables import DeviceTables
from kvcore.lease_book import LeaseBook
from kvcore.streams import Streams
from tests.helpers import row, typed_manager
from tests.lease_scenes import (
    SCENES,
    SEEDS,
    Scene,
    a_consumer_comes_again_while_others_wait_for_its_first_work,
    a_failed_close_hands_back_when_the_last_array_is_dropped,
    a_lease_is_acquired_again,
    a_lease_is_handed_over_at_the_start,
    a_page_is_not_overwritten_while_it_is_read,
    a_page_that_was_freed_before_is_not_overwritten_either,
    a_second_consumer_sees_what_the_first_wrote,
    a_table_is_not_sent_while_it_is_read,
    a_table_is_read_after_it_was_sent,
    an_array_taken_after_another_was_dropped_hands_back,
    an_open_lease_is_taken_after_another_consumers_array_was_dropped,
    close_takes_one_more_stream,
    the_last_array_hands_back,
    the_last_array_hands_back_inside_a_step,
    what_the_consumer_writes_is_read_after_release,
    what_the_consumer_writes_is_read_after_the_end,
    work_of_a_sequence_that_is_gone_is_handed_over_too,
    work_on_a_lent_stream_is_handed_over_too,
)


@pytest.mark.parametrize("scene", SCENES)
def test_right_in_every_order(scene):
    wrong = [seed for seed in SEEDS if not scene(seed)]
    assert not wrong


def nothing(*_, **__):
    """In place of what waits."""


def forget_all(book):
    """In place of what hands back."""
    book.idle.clear()
    book.owed.clear()


BROKEN = {
    "hand_over": (Streams, "hand_over", nothing),
    "hand_back": (Streams, "hand_back", nothing),
    "fences": (Fences, "wait_all", nothing),
    "new streams": (Streams, "_wait_behind", nothing),
    "take_back": (LeaseBook, "take_back", forget_all),
    "earlier consumers": (LeaseBook, "_put_behind_owed", nothing),
    "table": (DeviceTables, "order_behind_last", nothing),
}


@pytest.mark.parametrize(
    ("scene", "without"),
    [
        (a_lease_is_handed_over_at_the_start, "hand_over"),
        (a_lease_is_acquired_again, "hand_over"),
        (a_lease_is_acquired_again, "hand_back"),
        (work_on_a_lent_stream_is_handed_over_too, "hand_over"),
        (work_of_a_sequence_that_is_gone_is_handed_over_too, "fences"),
        (what_the_consumer_writes_is_read_after_release, "hand_back"),
        (what_the_consumer_writes_is_read_after_release, "hand_over"),
        (what_the_consumer_writes_is_read_after_the_end, "hand_back"),
        (close_takes_one_more_stream, "hand_back"),
        (the_last_array_hands_back, "take_back"),
        (the_last_array_hands_back_inside_a_step, "take_back"),
        (a_failed_close_hands_back_when_the_last_array_is_dropped, "take_back"),
        (an_array_taken_after_another_was_dropped_hands_back, "take_back"),
        (a_page_is_not_overwritten_while_it_is_read, "hand_back"),
        (a_page_that_was_freed_before_is_not_overwritten_either, "new streams"),
        (a_second_consumer_sees_what_the_first_wrote, "hand_back"),
        (an_open_lease_is_taken_after_another_consumers_array_was_dropped, "earlier consumers"),
        (a_consumer_comes_again_while_others_wait_for_its_first_work, "earlier consumers"),
        (a_consumer_comes_again_while_others_wait_for_its_first_work, "take_back"),
        (a_table_is_read_after_it_was_sent, "table"),
        (a_table_is_not_sent_while_it_is_read, "hand_back"),
        (a_table_is_not_sent_while_it_is_read, "new streams"),
    ],
)
def test_each_wait_is_needed(scene, without, monkeypatch):
    monkeypatch.setattr(*BROKEN[without])
    assert not all(scene(seed) for seed in SEEDS)


def test_nothing_waits_on_the_host():
    """Leases are taken, handed over, handed back and closed while kvcore's stream stands still."""
    s = Scene(3)
    gate = Gate()
    s.s1.wait(gate)
    s.append(1)
    with s.m.lease(0, "key", stream=s.consumer) as lease:
        pages = np.from_dlpack(lease)
        lease.acquire(s.other)
        lease.release(s.other)
        assert pages.min() < 0  # what nobody has written
        del pages
    assert not s.s1.record().done()
    gate.open()
    s.device.drain()
    assert s.m.get_pages(0, "key")[row(s.a)[0]].min() == 1


def test_dropping_many_arrays_leaves_one_thing_to_do():
    s = Scene(7)
    lease = s.m.lease(0, "key", stream=s.consumer)
    book = s.m._runtime.leases
    for _ in range(100):
        np.from_dlpack(lease)
    assert len(book.idle) == 1
    s.m.get_storage_statistics()
    assert not book.idle
    assert not book.owed
    lease.acquire(s.consumer)
    np.from_dlpack(lease)
    assert len(book.idle) == 1


def test_leases_that_one_consumer_takes_and_drops_enqueue_nothing_until_others_come(monkeypatch):
    monkeypatch.setattr(Simulator, "run_some", nothing)  # nothing passes when somebody looks
    s = Scene(8)
    s.append(1)
    before = len(s.consumer.queue)
    for _ in range(10):
        s.m.lease(0, "key", stream=s.consumer)
        s.m.lease_page_table(stream=s.consumer)
    s.consumer.submit("work", nothing)
    waits_of_ours = len(s.consumer.queue) - before  # for the append: at every hand-over
    book = s.m._runtime.leases
    assert len(book.idle) == 1  # which the next consumer looks at
    assert list(book.owed) == [s.consumer]
    s.m.lease(0, "key", stream=s.other)
    assert len(s.consumer.queue) - before == waits_of_ours + 1  # one event for all twenty
    assert list(book.owed) == [s.consumer]
    for _ in range(40):
        s.m.lease(0, "key", stream=s.other)
    s.m.get_storage_statistics()
    assert not book.idle
    assert not book.owed


@pytest.mark.parametrize("over", [True, False])
def test_consumers_that_take_turns_wait_for_what_is_not_over(monkeypatch, over):
    """As the streams of JAX do."""
    device, orders = HostDevice(deferred=True), []
    m, turns = typed_manager(device=device), [device.create_stream() for _ in range(3)]
    real = DeferredStream.wait
    monkeypatch.setattr(Simulator, "run_some", nothing)
    monkeypatch.setattr(
        DeferredStream, "wait", lambda self, event: orders.append(self) or real(self, event)
    )
    for turn in [*turns, turns[0]]:
        lease = m.lease(0, "key", stream=turn)
        turn.submit("work", nothing)
        if over:
            device.drain()
        del lease
    first, second, third = turns
    assert orders == ([] if over else [second, third, third, first, first])
    assert set(m._runtime.leases.owed) == (set() if over else {first, second, third})
    m.shutdown()


@pytest.mark.parametrize(("dropped", "taken_again"), [(False, False), (True, False), (True, True)])
def test_nothing_is_asked_of_a_consumers_stream_after_close(dropped, taken_again, monkeypatch):
    """Which may be destroyed then."""
    s, asked = Scene(9), []
    lease = s.m.lease(0, "key", stream=s.consumer)
    if dropped:
        np.from_dlpack(lease)
    if taken_again:
        s.m.lease(0, "value", stream=s.consumer).close()
    lease.close(s.other)
    for name in ("is_idle", "record"):
        monkeypatch.setattr(DeferredStream, name, lambda self: asked.append(self))
    s.m.get_storage_statistics()
    s.m.lease(0, "key", stream=s.s1)
    assert asked == []
    assert not lease._entry.streams


def test_synchronize_is_for_the_host():
    s = Scene(4)
    s.append(6)
    lease = s.m.lease(0, "key")
    lease.synchronize()
    assert np.from_dlpack(lease)[row(s.a)[0]].min() == 6
    lease.close()
    with pytest.raises(k.StateError, match="is closed"):
        lease.synchronize()


def test_one_stream_for_everything_enqueues_nothing(monkeypatch):
    s = Scene(5)
    s.append(1)
    before = len(s.s1.queue)
    lease = s.m.lease(0, "key", stream=s.s1)
    lease.acquire(s.s1)
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s1)
    lease.acquire(s.s1)  # nor has a captured graph to wait for anybody
    assert len(s.s1.queue) == before


def test_a_consumer_whose_work_is_over_is_waited_for_no_more():
    s = Scene(5)
    lease = s.m.lease(0, "key", stream=s.consumer)
    s.write(*row(s.a), 5)
    lease.close()
    s.device.drain()
    before = len(s.s1.queue)
    s.m.lease(0, "key", stream=s.s1)
    assert len(s.s1.queue) == before


def test_work_under_capture_is_refused_and_ends_are_put_off(monkeypatch):
    """A graph cannot hold events of other streams."""
    s = Scene(6)
    s.append(1)
    lease = s.m.lease(0, "key", stream=s.consumer)
    held = [np.from_dlpack(lease)]
    captured = [s.s1]
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self in captured)
    for call in (
        lambda: lease.acquire(s.consumer),
        lambda: lease.release(),
        lambda: lease.close(s.other),
        lambda: s.m.lease(0, "value", stream=s.consumer),
    ):
        with pytest.raises(k.StateError, match="a graph is being captured"):
            call()
    assert lease.is_open
    held.clear()
    s.m.get_storage_statistics()
    assert list(s.m._runtime.leases.owed) == [s.consumer]
    captured.clear()
    s.m.get_storage_statistics()
    assert not s.m._runtime.leases.owed
    lease.close()
    assert not s.m._runtime.leases


@pytest.mark.parametrize("own", [True, False])
def test_a_refusal_under_capture_asks_nobody(own, monkeypatch):
    """Whether a stream or an event is done: the capture would end by that."""
    s = Scene(10)
    s.append(1)
    first = s.m.lease(0, "key", stream=s.consumer)
    s.write(*row(s.a), 5)
    if own:
        first.release()
    del first
    second = s.m.lease(0, "key")
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s1)
    for owner, name in ((DeferredStream, "is_idle"), (DeferredEvent, "done")):
        monkeypatch.setattr(owner, name, lambda self: pytest.fail("asked under capture"))
    for stream in (s.s1, s.other):
        with pytest.raises(k.StateError, match="a graph is being captured"):
            s.m.lease(0, "key", stream=stream)
        with pytest.raises(k.StateError, match="a graph is being captured"):
            s.m._runtime.leases.hand_over(second._entry, stream)
    monkeypatch.undo()
    assert s.saw()


def test_a_refused_hand_over_waits_for_none_of_several(monkeypatch):
    s = Scene(11)
    for stream in (s.consumer, s.s2):
        s.m.lease(0, "key", stream=stream)
        stream.wait(Gate())
    before = len(s.other.queue)
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s2)
    with pytest.raises(k.StateError, match="a graph is being captured"):
        s.m.lease(0, "key", stream=s.other)
    assert len(s.other.queue) == before


@pytest.mark.parametrize("captured", ["taker", "owed"])
def test_a_hand_over_before_any_sequence_is_refused_as_a_whole(captured, monkeypatch):
    device = HostDevice(deferred=True, seed=3)
    m, first, second, taker = typed_manager(device=device), *(device.create_stream() for _ in "abc")
    for stream in (first,) if captured == "taker" else (first, second):
        m.lease(0, "key", stream=stream)
        stream.wait(Gate())
    its = taker if captured == "taker" else second
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self is its)
    with pytest.raises(k.StateError, match="a graph is being captured"):
        m.lease(0, "key", stream=taker)
    assert not taker.queue


@pytest.mark.parametrize("owed", [False, True])
def test_a_hand_over_asks_each_stream_once_for_captures(owed, monkeypatch):
    """Though it may come after a consumer that is gone, sequences and the page table's sender."""
    s, asked = Scene(12), []
    s.append(1)
    if owed:
        s.m.lease(0, "key", stream=s.consumer)
        s.consumer.wait(Gate())
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: asked.append(self))
    s.m.lease(0, "key", stream=s.other)
    assert asked == [s.other, s.s1, *[s.consumer] * owed]


def test_the_stream_of_the_last_sequence_waits_for_that_of_the_first():
    for seed in SEEDS:
        s = Scene(seed)
        last = s.begin(s.s2)
        s.append(3)
        s.m.lease(0, "key", stream=s.s2)
        s.read(*row(s.a), s.s2)
        assert s.saw(3), seed
        last.close()


def test_close_hands_back_from_earlier_consumers_too(monkeypatch):
    """Taken by turns: the lease itself knows the last stream only, and all may be destroyed."""
    s, asked = Scene(12), []
    lease = s.m.lease(0, "key")
    for stream in (s.consumer, s.other):
        drop = lease._entry.use()
        s.m._runtime.leases.hand_over(lease._entry, stream)
        stream.wait(Gate())
        drop()
    assert list(lease._entry.streams) == [s.other]
    lease.close()
    for name in ("is_idle", "record"):
        real = getattr(DeferredStream, name)
        monkeypatch.setattr(
            DeferredStream, name, lambda self, real=real: asked.append(self) or real(self)
        )
    s.m.lease(0, "key", stream=s.s2)
    assert asked == [s.s1]
    assert not s.m._runtime.leases.owed


@pytest.mark.parametrize("working", [True, False])
def test_close_leaves_earlier_consumers_of_a_captured_stream_for_later(working, monkeypatch):
    s = Scene(13)
    s.m.lease(0, "key", stream=s.consumer)
    s.consumer.wait(Gate())
    lease = s.m.lease(0, "key")
    captured = [s.s1 if working else s.consumer]
    monkeypatch.setattr(DeferredStream, "is_capturing", lambda self: self in captured)
    s.m.get_storage_statistics()
    lease.close()
    assert list(s.m._runtime.leases.owed) == [s.consumer]
    captured.clear()
    s.m.get_storage_statistics()
    assert not s.m._runtime.leases.owed


def test_what_is_handed_back_while_passed_work_is_forgotten_counts(monkeypatch):
    """By a finalizer, which may run at any moment."""
    s, real = Scene(2), DeferredEvent.done
    for stream in (s.consumer, s.other):
        stream.wait(Gate())
    s.m.lease(0, "key", stream=s.consumer).close()
    left = [s.m.lease(0, "key", stream=s.other)]

    def done(event):
        if left:
            left.pop().close()
        return real(event)

    monkeypatch.setattr(DeferredEvent, "done", done)
    s.m.lease(0, "key", stream=s.s2)
    behind = [stream for stream, _ in s.m._runtime.streams._behind]
    assert behind == [s.consumer, s.other]


def test_pages_of_a_captured_stream_are_handed_to_nobody_before_any_sequence(monkeypatch):
    """There is no stream of kvcore's then: the only one to be asked is the consumer's."""
    device = HostDevice(deferred=True, seed=3)
    m, consumer, other = typed_manager(device=device), *(device.create_stream() for _ in "ab")
    m.lease(0, "key", stream=consumer)
    lease = m.lease(0, "key")
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "is_capturing", lambda self: self is consumer)
        patch.setattr(DeferredStream, "is_idle", lambda self: False)
        with pytest.raises(k.StateError, match="a graph is being captured"):
            lease.acquire(other)
    assert not other.queue
    assert not lease._entry.streams
    lease.acquire(other)
    assert not m._runtime.leases.owed
