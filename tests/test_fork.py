"""`KVCache.fork`: independent sequences that share what is final."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import FaultError, check, fail_at
from tests.helpers import opaque_manager, row, typed_manager, used

A = list(range(700, 716))


def begun(m, capacity, history, **settings):
    kv = m.create_kv_cache(**settings)
    assert kv.resume()
    assert kv.resize(capacity, history)
    return kv


@pytest.mark.parametrize(
    ("capacity", "history", "shared", "private"),
    [(10, 10, 2, 1), (8, 8, 2, 0), (12, 5, 1, 2), (0, 0, 0, 0)],
)
def test_full_blocks_are_shared_and_the_rest_is_copied(capacity, history, shared, private):
    m = opaque_manager()
    kv = begun(m, capacity, history, id="a", expected_prompt_length=history)
    before = used(m)
    forks = kv.fork(3)
    assert used(m) == before + 3 * private
    for fork in forks:
        assert (fork.capacity, fork.history_length, fork.status) == (capacity, history, kv.status)
        assert (fork.id, fork.expected_prompt_length) == ("a", history)
        assert row(fork)[:shared] == row(kv)[:shared]
    tails = [slot for each in (kv, *forks) for slot in row(each)[shared:]]
    assert len(set(tails)) == 4 * private
    check(m)
    m.close_kv_caches([kv, *forks])
    assert used(m) == 0
    check(m)


def test_forks_carry_the_data_and_go_their_own_ways():
    device = HostDevice(deferred=True, seed=5)
    m = typed_manager(slots=32, layers=1, device=device)
    stream, other = device.create_stream(), device.create_stream()
    kv = m.create_kv_cache()
    assert kv.resume(stream)
    assert kv.resize(6, 6)
    step = m.create_batch(4, 32)
    values = np.arange(6 * 16, dtype=np.float32).reshape(6, 2, 8)
    step.prepare([kv], 6, start=[0], stream=other)  # written on a stream that has it on loan
    step.append(0, {"key": values, "value": -values})
    forks = kv.fork(2)
    group = [kv, *forks]
    assert m.advance(group, 1)
    step.prepare(group, 1)
    news = np.array([100, 200, 300], np.float32)[:, None, None] + np.zeros((3, 2, 8), np.float32)
    step.append(0, {"key": news, "value": news})
    step.prepare(group, 7, start=[0, 0, 0])
    keys = step.gather(0)[0]
    device.drain()
    for number, seen in enumerate(keys.reshape(3, 7, 2, 8)):
        np.testing.assert_array_equal(seen[:6], values)
        assert (seen[6] == 100 * (number + 1)).all()
    check(m)


def test_forks_share_what_is_committed_and_commit_for_themselves():
    m = opaque_manager()
    kv = begun(m, 6, 6)
    kv.commit(A[:6])
    fork, twin = kv.fork(2)
    assert fork.num_committed_tokens == 6
    for each, more in ((fork, A[6:10]), (twin, A[6:8])):
        assert each.resize(6 + len(more))
        each.commit(more)
    assert row(fork)[1] == row(twin)[1]  # the same block was computed twice and is stored once
    assert m.probe_reuse(input_tokens=A) == 8
    kv.close()
    fork.close()
    assert m.probe_reuse(input_tokens=A) == 10
    twin.close()
    assert m.get_storage_statistics()[0].evictable == 3
    check(m)


def test_a_fork_of_a_published_partial_block_writes_its_own_page():
    m = opaque_manager()
    kv = begun(m, 6, 6)
    kv.commit(A[:6], is_end=True)
    (fork,) = kv.fork(1)
    assert row(fork)[1] != row(kv)[1]
    m.close_kv_caches([kv, fork])
    assert m.probe_reuse(input_tokens=A[:6]) == 6
    check(m)


def test_without_room_nothing_changes():
    m = opaque_manager(slots=4)
    kv = begun(m, 6, 6)
    before = (row(kv), used(m))
    with pytest.raises(k.OutOfPagesError, match=r"3 forks take 3 more .* 2 are free .* 1 missing"):
        kv.fork(3)
    assert (row(kv), used(m)) == before
    m = opaque_manager(max_sequences=2)
    kv = begun(m, 6, 6)
    with pytest.raises(k.CacheCapacityError):
        kv.fork(2)
    assert used(m) == 2
    check(m)


def test_a_failing_copy_gives_everything_back(monkeypatch):
    m = typed_manager(slots=8, layers=1)
    kv = begun(m, 6, 6)

    def fail(*args, **settings):
        raise k.DriverError("copy", 1, "planted")

    monkeypatch.setattr(m.device, "copy_tokens", fail)
    before = used(m)
    with pytest.raises(k.DriverError):
        kv.fork(2)
    assert used(m) == before
    check(m)


def test_what_can_not_be_forked():
    m = opaque_manager(max_beam_width=4, enable_partial_commit=False)
    kv = begun(m, 6, 6)
    assert kv.set_beam_width(2)
    with pytest.raises(k.StateError, match="several beams"):
        kv.fork(1)
    kv.set_beam_width(1)
    with pytest.raises(ValueError, match="n:"):
        kv.fork(0)
    kv.suspend()
    with pytest.raises(k.StateError, match="suspended"):
        kv.fork(1)


@pytest.mark.parametrize("last", ["fork", "publisher"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_pages_that_a_fork_holds_and_another_published_can_be_evicted(last, trimmed):
    """The fork's claim does not reach them: its kin tell it of the path that it holds."""
    m = opaque_manager(slots=6)
    kv = begun(m, 8, 8)
    (fork,) = kv.fork(1)
    kv.commit(A[:8])
    if trimmed:
        assert kv.resize(16)
        kv.commit(A[8:16])
    for each in (kv, fork) if last == "fork" else (fork, kv):
        each.close()
        check(m)
    other = m.create_kv_cache()
    assert other.resume()
    assert other.resize(24)
    assert m.probe_reuse(input_tokens=A) == 0
    check(m)


def test_a_fork_of_a_fork_and_a_suspended_one_hold_what_is_published():
    m = opaque_manager(slots=8)
    kv = begun(m, 12, 12)
    (child,) = kv.fork(1)
    (grandchild,) = child.fork(1)
    grandchild.suspend()
    child.commit(A[:12])
    for each in (child, kv, grandchild):
        each.close()
        check(m)
    assert m.probe_reuse(input_tokens=A) == 12
    assert m.get_storage_statistics()[0].evictable == 3
    m.clear_reusable_blocks()
    assert used(m) == 0


def test_a_fork_that_went_its_own_way_holds_nothing_that_another_publishes():
    m = opaque_manager()
    kv = begun(m, 8, 8)
    (fork,) = kv.fork(1)
    for cache in (kv, fork):
        assert cache.resize(20, 20)
    fork.commit([*A[:8], 1, 1, 1, 1])
    kv.commit([*A[:8], 2, 2, 2, 2])
    kv.commit([3, 3, 3, 3])
    kv.commit([4, 4, 4, 4])
    for cache in (fork, kv):
        cache.close()
        check(m)
    other = begun(m, 0, 0)
    assert other.resize(16 * 4)  # every page can be had


def begin_to_fork(kv, found):
    kv.fork(1)


def begin_to_resume(kv, found):
    found.resume(kv.stream)


@pytest.mark.parametrize("begin", [begin_to_fork, begin_to_resume])
def test_slots_that_nobody_waited_for_keep_their_last_use(begin):
    """Who gets them after a failure has to wait for it as well."""
    device = HostDevice(deferred=True, seed=3)
    m = typed_manager(slots=8, layers=1, device=device)
    kv = m.create_kv_cache()
    assert kv.resume(device.create_stream())
    assert kv.resize(6, 6)
    kv.commit(A[:4])
    found = m.create_kv_cache(input_tokens=[*A[:3], 1])
    assert found.num_committed_tokens == 3
    other, stream = m.create_kv_cache(), device.create_stream()
    assert other.resume(stream)
    assert other.resize(4 * m.get_storage_statistics()[0].free)
    stream.wait(Gate())
    other.close()
    slots = m._runtime.control.slots[0]
    before = slots.next_tickets(1).tolist()
    with pytest.raises(FaultError), fail_at(m, "wait"):
        begin(kv, found)
    assert slots.next_tickets(1).tolist() == before
    check(m)


def test_forks_must_agree_on_the_tokens_of_the_pages_they_share():
    m = opaque_manager()
    kv = begun(m, 8, 8)
    (fork,) = kv.fork(1)
    kv.commit(A[:8])
    before = (row(fork), used(m))
    with pytest.raises(k.StateError, match="published already"):
        fork.commit(A[8:16])
    assert (row(fork), used(m), fork.num_committed_tokens) == (*before, 0)
    fork.commit(A[:8])
    m.close_kv_caches([fork, kv])
    check(m)


@pytest.mark.parametrize("what", ["take", "copy", "record", "wait"])
def test_whatever_fails_in_a_fork_changes_nothing(what):
    m = typed_manager(slots=12, layers=1)
    kv = begun(m, 6, 6)
    before = used(m)
    number = 1
    while True:
        with fail_at(m, what, number) as fault:
            try:
                forks = kv.fork(2)
            except FaultError:
                pass
            else:
                break
        assert used(m) == before
        check(m)
        number += 1
        assert number < 20, fault
    m.close_kv_caches([kv, *forks])
    check(m)
