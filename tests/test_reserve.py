"""`reserve_all`: growth across managers, all or nobody."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import check
from kvcore.testing.faults import FaultError, fail_at
from tests.helpers import opaque_manager, opened, row, used
from tests.test_step_beams import Search


def two_managers(slots=(16, 8), device="host", **settings):
    own = opaque_manager(slots[0], device=device, max_beam_width=4, enable_partial_commit=False)
    return own, opaque_manager(slots[1], layers=2, device=device, **settings)


def state(*managers):
    """All that a failed call must leave as it was."""
    return [
        (
            [
                (kv.capacity, kv.history_length, kv.num_blocks, kv.beam_width)
                for kv in handles_of(m)
            ],
            [seqs.table[: seqs.used_rows].tolist(), seqs.limit.tolist(), seqs.version.tolist()],
            [
                (s.free_slots().tolist(), s.refs.tolist(), s.reusable_after.tolist())
                for s in m._runtime.control.slots
            ],
            m.get_committed_stats(),
            m.get_dirty_stats_ids(),
        )
        for m in managers
        for seqs in (m._runtime.control.seqs,)
    ]


def handles_of(manager):
    handles = manager._runtime.handles
    return [handles._open[sequence]() for sequence in handles]


def beams_of(manager, history, width):
    kv = manager.create_kv_cache(expected_prompt_length=history)
    assert kv.resume()
    assert kv.resize(history, history)
    assert kv.set_beam_width(width)
    return kv


def test_caches_of_two_managers_grow_together():
    own, cross = two_managers()
    kv, other = beams_of(own, 6, 3), *opened(own, 2)
    (encoder,) = opened(cross, 0)
    assert k.reserve_all([(kv, 9), (encoder, 30), (other, 5)])
    assert (kv.capacity, kv.history_length, encoder.capacity, other.capacity) == (9, 6, 30, 5)
    assert [len(row(kv, beam)) for beam in range(3)] == [3, 3, 3]
    assert (used(own), used(cross)) == (1 + 3 + 3 + 2, 8)
    for manager in (own, cross):
        check(manager, device=True)


@pytest.mark.parametrize("wanted", [(41, 32), (40, 33), (41, 33), (1 << 40, 1), (1, 1 << 40)])
def test_one_manager_without_room_stops_all(wanted):
    own, cross = two_managers((10, 8))
    (kv,), (encoder,) = opened(own, 0), opened(cross, 0)
    before = state(own, cross)
    assert not k.reserve_all([(kv, wanted[0]), (encoder, wanted[1])])
    assert state(own, cross) == before
    assert k.reserve_all([(encoder, 32), (kv, 40)])
    for manager in (own, cross):
        check(manager)


def test_caches_of_one_manager_count_together():
    m = opaque_manager(4)
    a, b = opened(m, 3, 0)
    assert not k.reserve_all([(a, 12), (b, 8)])
    assert (a.capacity, b.capacity) == (3, 0)
    assert k.reserve_all([(a, 8), (b, 8)])
    assert used(m) == 4
    check(m)


def test_what_is_enough_already_takes_nothing():
    own, cross = two_managers()
    (kv,), (encoder,) = opened(own, 5), opened(cross, 8)
    assert k.reserve_all([(kv, 7), (encoder, 8)])
    assert (kv.capacity, encoder.capacity, used(own), used(cross)) == (7, 8, 2, 2)
    assert k.reserve_all([])
    check(own)


def test_prefixes_nobody_holds_are_evicted_if_all_fits_and_only_then():
    own, cross = two_managers((4, 4))
    (old,) = opened(cross, 16)
    old.commit(list(range(16)))
    old.close()
    (kv,), (encoder,) = opened(own, 0), opened(cross, 0)
    assert not k.reserve_all([(kv, 17), (encoder, 16)])
    assert cross.probe_reuse(None, list(range(16))) == 16
    assert k.reserve_all([(kv, 16), (encoder, 12)])
    assert cross.probe_reuse(None, list(range(16))) == 4
    for manager in (own, cross):
        check(manager)


@pytest.mark.parametrize("fault", ["take", "wait"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_gives_back_what_others_took(fault, failing):
    device = HostDevice(deferred=True, seed=3)
    managers = two_managers((16, 8), device=device)
    gate, streams = Gate(), (device.create_stream(), device.create_stream())
    streams[0].wait(gate)
    for manager, length in zip(managers, (64, 32), strict=True):  # every slot was somebody's
        old = manager.create_kv_cache()
        assert old.resume(streams[0])
        assert old.resize(length)
        old.close()
    kvs = [manager.create_kv_cache() for manager in managers]
    buffers = [np.full(16, 7, np.int32) for _ in kvs]
    for kv, buffer in zip(kvs, buffers, strict=True):
        assert kv.resume(streams[1])
        assert kv.resize(3, 3)
        kv.set_base_page_index_buf(0, 0, buffer)
    if not failing:
        assert kvs[0].set_beam_width(2)
    steps = [manager.create_batch(4, 16) for manager in managers]
    for step, kv in zip(steps, kvs, strict=True):
        step.prepare([kv], 1, start=[0])
    before = state(*managers), [buffer.tolist() for buffer in buffers]
    with fail_at(managers[failing], fault) as injected, pytest.raises(FaultError):
        k.reserve_all([(kvs[0], 30), (kvs[1], 20)])
    assert injected.fired
    gate.open()
    assert (state(*managers), [buffer.tolist() for buffer in buffers]) == before
    for step, manager in zip(steps, managers, strict=True):
        step.page_table()  # a step prepared before goes on
        check(manager, device=True)
    assert k.reserve_all([(kvs[0], 20), (kvs[1], 20)])
    for manager, buffer, kv in zip(managers, buffers, kvs, strict=True):
        assert buffer[: kv.num_blocks].tolist() == row(kv)
        check(manager, device=True)
    device.drain()


def test_given_back_pages_still_wait_for_their_former_owners():
    """The tickets of slots that were taken and given back are those of before."""
    device = HostDevice(deferred=True, seed=4)
    managers = two_managers((4, 4), device=device)
    gate, first, second = Gate(), device.create_stream(), device.create_stream()
    first.wait(gate)
    for manager in managers:
        old = manager.create_kv_cache()
        assert old.resume(first)
        assert old.resize(16)
        old.close()
    kvs = [manager.create_kv_cache() for manager in managers]
    assert all(kv.resume(second) for kv in kvs)
    tickets = [m._runtime.control.slots[0].reusable_after.tolist() for m in managers]
    assert min(map(min, tickets)) > 0
    for failing in managers:
        with fail_at(failing, "take"), pytest.raises(FaultError):
            k.reserve_all([(kv, 16) for kv in kvs])
    assert [m._runtime.control.slots[0].reusable_after.tolist() for m in managers] == tickets
    gate.open()
    device.drain()


def test_parents_on_their_way_are_waited_for_if_asked():
    s = Search(4, (4,), (4,), slots=17)
    for _ in range(8):
        s.step([0, 1, 2, 3])
    s.kvs[0].settle()
    gate = Gate()
    s.stream.wait(gate)
    s.step([1, 1, 1, 1])
    total = s.m.get_storage_statistics()[0].total
    cross = opaque_manager(4, device=s.device)
    caches = s.m.create_kv_cache(), cross.create_kv_cache()
    assert all(kv.resume(s.device.create_stream()) for kv in caches)
    wanted = [(caches[1], 16), (caches[0], (total - 8) * 4)]
    assert not k.reserve_all(wanted)
    assert not k.reserve_all([(caches[1], 17)], block=True)  # nothing of that manager's is pending
    gate.open()
    assert k.reserve_all(wanted, block=True)
    check(s.m)
    check(cross)


def test_locks_are_taken_in_one_order_whatever_the_order_of_the_caches(monkeypatch):
    own, cross = two_managers()
    (kv,), (encoder,) = opened(own, 0), opened(cross, 0)
    taken = []

    class Recorder:
        def __init__(self, runtime):
            self.lock, self.runtime = runtime.lock, runtime

        def __enter__(self):
            taken.append(self.runtime)
            return self.lock.__enter__()

        def __exit__(self, *error):
            return self.lock.__exit__(*error)

    for manager in (own, cross):
        monkeypatch.setattr(manager._runtime, "lock", Recorder(manager._runtime))
    orders = []
    for pairs in ([(kv, 1), (encoder, 1)], [(encoder, 1), (kv, 1)]):
        taken.clear()
        assert k.reserve_all(pairs)
        orders.append(taken[:2])
    assert orders[0] == orders[1]
    assert set(orders[0]) == {own._runtime, cross._runtime}


def test_threads_in_opposite_orders_never_lock_each_other_out():
    own, cross = two_managers((64, 64))
    errors = []

    def work(backwards):
        try:
            (kv,), (encoder,) = opened(own, 0), opened(cross, 0)
            for capacity in range(1, 120):
                pairs = [(kv, capacity), (encoder, capacity)]
                assert k.reserve_all(pairs[::-1] if backwards else pairs)
            kv.close()
            encoder.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_wrong_reservations_change_nothing():
    own, cross = two_managers()
    kv, idle = opened(own, 5)[0], own.create_kv_cache()
    closed = cross.create_kv_cache()
    closed.close()
    limited = opaque_manager(16, max_seq_len=12)
    (short,) = opened(limited, 0)
    bound = opened(cross, 1)[0]
    bound.set_base_page_index_buf(0, 0, np.zeros(2, np.int32))
    cases = [
        (7, TypeError, "reservations: expected a sequence"),
        ([(kv, 9), bound], TypeError, r"reservations\[1\]: expected a pair"),
        ([(kv, 9), (3, 4)], TypeError, r"reservations\[1\]\[0\]: expected a KVCache"),
        ([(kv, 9), (bound, 2.5)], TypeError, r"reservations\[1\]\[1\]: expected an int"),
        ([(kv, 9), (bound, True)], TypeError, r"reservations\[1\]\[1\]"),
        ([(bound, -1)], ValueError, r"reservations\[0\]\[1\]: expected at least 0"),
        ([(kv, 9), (kv, 10)], ValueError, r"reservations\[1\]\[0\]: expected distinct caches"),
        ([(kv, 9), (idle, 10)], ValueError, r"reservations\[1\]\[0\].*resume"),
        ([(kv, 9), (closed, 10)], ValueError, r"reservations\[1\]\[0\]: expected an active"),
        ([(bound, 4), (kv, 4)], ValueError, r"reservations\[1\]\[1\]: expected at least .* 5"),
        ([(kv, 9), (short, 13)], ValueError, r"reservations\[1\]\[1\]: .*max_seq_len=12"),
        ([(kv, 9), (bound, 9)], ValueError, "bound page-index buffer"),
    ]
    before = state(own, cross, limited)
    for reservations, error, message in cases:
        with pytest.raises(error, match=message):
            k.reserve_all(reservations)
        assert state(own, cross, limited) == before
    for manager in (own, cross, limited):
        check(manager)


def test_a_manager_that_was_shut_down_says_so():
    own, cross = two_managers()
    (kv,) = opened(own, 0)
    gone = cross.create_kv_cache()
    gone.close()
    cross.shutdown()
    with pytest.raises(k.StateError, match="shut down"):
        k.reserve_all([(kv, 8), (gone, 8)])
    assert kv.capacity == 0


def test_all_locks_are_free_afterwards():
    own, cross = two_managers()
    (kv,), (encoder,) = opened(own, 0), opened(cross, 0)
    assert k.reserve_all([(kv, 1), (encoder, 1)])
    assert not k.reserve_all([(kv, 1), (encoder, 999)])
    with pytest.raises(ValueError, match="at least the present 1"):
        k.reserve_all([(kv, 0), (encoder, 9)])
    free = []

    def try_them():
        with ExitStack() as stack:
            for manager in (own, cross):
                lock = manager._runtime.lock
                free.append(lock.acquire(blocking=False))
                stack.callback(lock.release)

    thread = threading.Thread(target=try_them)
    thread.start()
    thread.join()
    assert free == [True, True]
