"""Leases at awkward moments: an array is dropped, or the driver fails, in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvcore as k
from kvcore.device.holds import Holds
from kvcore.device.simulated import DeferredStream
from kvcore.dlpack.exporter import Exporter
from kvcore.errors import DriverError
from kvcore.runtime import Runtime
from kvcore.streams import Streams
from tests.helpers import opened, row, typed_manager
from tests.lease_scenes import Scene

FEW = range(30)


class Watched(dict):
    """A dictionary that lets something else happen right after somebody has looked at its size.

    It stands for another thread, at a moment that no test could hit with one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] | None = None
        self.looks = 0

    def watch(self, looks: int, then: Callable[[], None]) -> None:
        self.looks, self.then = looks, then

    def __len__(self) -> int:
        count = super().__len__()
        self.looks -= 1
        if self.looks < 0 and self.then is not None:
            then, self.then = self.then, None
            then()
        return count


def watched(lease: k.Lease) -> Watched:
    """The arrays of a lease that has none yet."""
    lease._entry._users = Watched()
    return lease._entry._users


def busy(stream: DeferredStream) -> bool:
    """In place of `is_idle`: a stream with work that is not over."""
    return False


class Failing:
    """`Streams.hand_back`, whose driver fails in one call."""

    def __init__(self, monkeypatch, call: int) -> None:
        monkeypatch.setattr(DeferredStream, "is_idle", busy)
        self.call, self.real = call, Streams.hand_back
        monkeypatch.setattr(Streams, "hand_back", lambda streams, one: self(streams, one))

    def __call__(self, streams, stream) -> None:
        self.call -= 1
        if self.call == -1:
            raise DriverError("cuEventRecord", 1, "planted")
        self.real(streams, stream)


def dropping(scene: Scene, held: list[np.ndarray]) -> Callable[[], None]:
    """What a consumer does in the end: it writes, and drops all its arrays."""

    def drop() -> None:
        scene.write(*row(scene.a), 5)
        held.clear()

    return drop


def meanwhile(monkeypatch, then: Callable[[], None]) -> None:
    """Lets something happen, once, as pages are handed back."""
    real, left = Streams.hand_back, [then]

    def hand_back(streams, stream):
        if left:
            left.pop()()
        real(streams, stream)

    monkeypatch.setattr(Streams, "hand_back", hand_back)
    monkeypatch.setattr(DeferredStream, "is_idle", busy)


# -- the driver fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 1])
def test_a_failure_while_pages_are_handed_back_loses_none_of_them(monkeypatch, call):
    for seed in FEW:
        s = Scene(seed)
        streams = [s.other, s.consumer] if call else [s.consumer, s.other]
        held = [np.from_dlpack(s.m.lease(0, "key", stream=stream)) for stream in streams]
        s.write(*row(s.a), 5)
        while held:
            del held[0]
        with monkeypatch.context() as patch:
            Failing(patch, call)
            with pytest.raises(DriverError, match="planted"):
                s.m.get_storage_statistics()
        s.seen.append(s.gather())
        assert s.saw(5)
        assert not s.m._runtime.leases
        assert not s.m._runtime.leases.owed


def test_a_lease_whose_end_fails_is_still_open(monkeypatch):
    for seed in FEW:
        s = Scene(seed)
        lease = s.m.lease(0, "key", stream=s.consumer)
        np.from_dlpack(lease)
        s.write(*row(s.a), 5)
        with monkeypatch.context() as patch:
            Failing(patch, 0)
            with pytest.raises(DriverError, match="planted"):
                lease.close()
        assert lease.is_open
        assert s.m._runtime.leases
        lease.close()
        s.seen.append(s.gather())
        assert s.saw(5)
        assert not s.m._runtime.leases


def test_a_lease_that_could_not_be_handed_over_is_none(monkeypatch):
    """Also while the error is kept, and so the frame that it comes from."""
    s = Scene(1)
    s.append(1)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s1)
        with pytest.raises(k.StateError, match="a graph is being captured") as told:
            s.m.lease(0, "value", stream=s.consumer)
    assert told.tb is not None
    assert not s.m._runtime.leases


# -- arrays are dropped ----------------------------------------------------------------------------


@pytest.mark.parametrize("looks", range(6))
def test_an_array_is_dropped_while_its_lease_ends(looks):
    for seed in FEW:
        s = Scene(seed)
        lease = s.m.lease(0, "key", stream=s.consumer)
        uses, held = watched(lease), []

        drop = dropping(s, held)
        held.append(np.from_dlpack(lease))
        uses.watch(looks, drop)
        try:
            lease.close()
        except k.LeaseInUse:
            assert not lease.is_open
        if held:
            drop()
        s.seen.append(s.gather())
        assert s.saw(5)
        assert not s.m._runtime.leases


def test_an_array_is_dropped_while_one_more_stream_is_handed_back(monkeypatch):
    for seed in FEW:
        s = Scene(seed)
        lease = s.m.lease(0, "key", stream=s.consumer)
        held = [np.from_dlpack(lease)]

        drop = dropping(s, held)
        with monkeypatch.context() as patch:
            meanwhile(patch, drop)
            lease.close(s.other)
        s.seen.append(s.gather())
        assert s.saw(5)
        assert not s.m._runtime.leases


@pytest.mark.parametrize("looks", range(2))
def test_a_second_array_is_dropped_while_the_first_ones_end_is_handed_back(looks):
    for seed in FEW:
        s = Scene(seed)
        lease = s.m.lease(0, "key", stream=s.consumer)
        uses, held = watched(lease), []

        drop = dropping(s, held)
        np.from_dlpack(lease)
        held.append(np.from_dlpack(lease))
        uses.watch(looks, drop)
        s.m.get_storage_statistics()
        if held:
            drop()
        s.seen.append(s.gather())
        assert s.saw(5)


def test_whoever_comes_while_pages_are_handed_back_waits_as_well(monkeypatch):
    """A batch looks for pages to hand back without the lock: they are there until that is done."""
    for seed in FEW:
        s = Scene(seed)
        s.step.prepare([s.a], 4)
        pages = np.from_dlpack(s.m.lease(0, "key", stream=s.consumer))
        s.write(*row(s.a), 5)
        del pages
        with monkeypatch.context() as patch:
            meanwhile(patch, lambda s=s: s.seen.append(s.step.gather(0)[0]))
            s.m.get_storage_statistics()
        assert s.saw(5)


@pytest.mark.parametrize("looks", range(2))
def test_an_array_that_is_taken_while_the_last_one_is_dropped_keeps_the_memory(looks):
    m = typed_manager()
    lease = m.lease(0, "key")
    uses, held = watched(lease), []

    def take():
        held.append(np.from_dlpack(lease))
        with pytest.raises(k.LeaseInUse):
            lease.close()

    first = np.from_dlpack(lease)
    uses.watch(looks, take)
    del first
    if not held:
        take()
    with pytest.raises(k.LeaseInUse, match="shutdown: lease 1"):
        m.shutdown()
    held[0][...] = 3
    held.clear()
    m.shutdown()


def test_who_views_a_lease_that_is_closed_meanwhile_keeps_the_memory():
    """As by the CUDA array interface, whose consumers hold the viewer: it counts once."""
    m = typed_manager()
    lease = m.lease(0, "key")
    entry, viewer = lease._entry, lease.bits()
    entry.view(viewer)
    entry.view(viewer)
    lease.close()
    with pytest.raises(k.StateError, match=r"lease 1 .* is closed"):
        entry.view(viewer)
    with pytest.raises(k.LeaseInUse, match="shutdown: lease 1"):
        m.shutdown()
    del viewer
    m.shutdown()


def test_a_lease_that_is_closed_meanwhile_is_not_acquired(monkeypatch):
    m = typed_manager()
    lease, real = m.lease(0, "key"), Runtime.enter

    def enter(runtime, **more):
        lease._entry.close()
        real(runtime, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "enter", enter)
        with pytest.raises(k.StateError, match=r"lease 1 .* is closed"):
            lease.acquire(None)
    m.shutdown()


def test_a_lease_is_closed_while_it_is_copied(monkeypatch):
    """The memory stays until the copy is made."""
    m = typed_manager()
    lease, real = m.lease(0, "key"), Exporter._copied

    def copied(its, asked, stream):
        with pytest.raises(k.LeaseInUse, match="close"):
            lease.close()
        with pytest.raises(k.LeaseInUse, match="shutdown"):
            m.shutdown()
        return real(its, asked, stream)

    monkeypatch.setattr(Exporter, "_copied", copied)
    assert np.from_dlpack(lease, copy=True).shape == lease.shape
    m.shutdown()


def test_memory_is_let_go_while_its_holders_are_listed():
    """The list is made in one go: to collect garbage in between could drop an array of a lease."""
    holds, holder = Holds(), typed_manager().lease(0, "key")

    class Ends(dict):
        def items(self):
            for one in super().items():
                holds.remove(holder)
                yield one

    holds._ends = Ends()
    holds.add(holder, 8)
    with pytest.raises(k.LeaseInUse, match="resize: lease 1"):
        holds.refuse("resize", 0)


def test_a_closed_lease_is_named_where_an_array_is_taken():
    m = typed_manager(slots=64)
    (kv,), new = opened(m, 7), np.zeros((7, 2, 8), np.float32)
    for dtype in ("float32", "bfloat16"):  # by the array interface, and by DLPack
        lease = typed_manager(slots=16, T=7, layers=1, dtype=dtype).lease(0, "key")
        lease.close()
        step = m.create_batch(1, 8)
        step.prepare([kv], 7, start=0)
        with pytest.raises(k.StateError, match=r"lease 1 .* is closed"):
            step.append(0, {"key": lease, "value": new})


def test_calls_hand_back_under_the_lock(monkeypatch):
    m, owned = typed_manager(), []
    real = Runtime.enter

    def enter(runtime, **more):
        owned.append(runtime.lock._is_owned())
        real(runtime, **more)

    monkeypatch.setattr(Runtime, "enter", enter)
    m.get_pages(0, "key"), m.page_table(), m.get_mem_pool_base_address(0, "key")
    assert owned == [True] * 3


# -- captured graphs -------------------------------------------------------------------------------


def test_a_lease_of_the_only_stream_is_not_closed_while_that_is_captured(monkeypatch):
    """There is nobody who would wait, but the moment has to be known to whoever comes later."""
    s = Scene(2)
    lease = s.m.lease(0, "key", stream=s.s1)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s1)
        for call in (lease.close, lease.release):
            with pytest.raises(k.StateError, match="a graph is being captured"):
                call()
    assert lease.is_open
    lease.close()
    assert not s.m._runtime.leases


def test_a_table_that_was_sent_elsewhere_is_not_waited_for_in_a_captured_graph(monkeypatch):
    """Although all pages are back home, with the stream that is captured."""
    s = Scene(4)
    s.step.prepare([s.a], stream=s.s2)
    s.step.finish()
    before = len(s.s1.queue)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "is_capturing", lambda self: self is s.s1)
        with pytest.raises(k.StateError, match="a graph is being captured"):
            s.m.lease(0, "key", stream=s.s1)
    assert len(s.s1.queue) == before
    assert not s.m._runtime.leases


@pytest.mark.parametrize("viewed", [False, True])
def test_an_error_in_the_block_is_not_hidden_by_a_captured_graph(monkeypatch, viewed):
    """The lease ends nevertheless, and its pages are handed back when the capture is over."""
    for seed in FEW:
        s = Scene(seed)
        lease = s.m.lease(0, "key", stream=s.consumer)
        if viewed:
            lease._entry.view(lease)
        with monkeypatch.context() as patch:
            patch.setattr(DeferredStream, "is_capturing", lambda self, s=s: self is s.consumer)
            s.write(*row(s.a), 5)
            with pytest.raises(KeyError), lease:
                {}["nothing"]
        assert not lease.is_open
        s.seen.append(s.gather())
        assert s.saw(5)
        del lease
        assert not s.m._runtime.leases


def test_pages_of_a_captured_stream_are_handed_to_nobody(monkeypatch):
    """Their consumer's work before the capture can't be waited for until the capture is over."""
    s = Scene(3)
    s.a.close()
    pages = np.from_dlpack(s.m.lease(0, "key", stream=s.consumer))
    lease = s.m.lease(0, "key")
    del pages
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "is_capturing", lambda self: self is s.consumer)
        patch.setattr(DeferredStream, "is_idle", busy)  # which it never is then
        with pytest.raises(k.StateError, match=r"a graph is being captured from .*DeferredStream"):
            lease.acquire(s.other)
        assert s.other not in lease._entry.streams
    lease.acquire(s.other)
    assert not s.m._runtime.leases.owed
