"""The oracle itself: every fault planted here is found, and what is right is not blamed."""

from __future__ import annotations

import gc
import inspect
from unittest import mock

import numpy as np
import pytest

from kvcore.control.slots import SlotTable
from kvcore.device.base import Device
from kvcore.device.host import HostDevice
from kvcore.errors import StateError
from kvcore.manager import KVCacheManager
from kvcore.testing import (
    ContentError,
    FakeEngine,
    FaultError,
    Lockstep,
    OracleError,
    check,
    fail_at,
    faults,
)
from kvcore.testing.launches import Launches
from kvcore.testing.small import small_config


class Scene:
    """Three sequences: of two beams, plain with a bound row, and suspended."""

    def __init__(self):
        config = small_config(tokens_per_block=4, slots=16, max_rows=8)
        self.manager = KVCacheManager(config, device="host")
        self.engine = FakeEngine(self.manager, poison=False)
        self.wide, self.plain, self.hidden = self.manager.create_kv_caches([0, 0, 0])
        for kv in (self.wide, self.plain, self.hidden):
            assert kv.resume()
            assert kv.resize(10)
            self.engine.write([kv], 10)
            assert kv.resize(None, 5)
        assert self.engine.set_beam_width(self.wide, 2)
        self.bound = np.empty(6, np.int32)
        self.plain.set_base_page_index_buf(0, 0, self.bound)
        self.hidden.suspend()
        self.seqs = self.manager._runtime.control.seqs
        self.slots = self.manager._runtime.control.slots[0]

    def row(self, kv, beam=0):
        """The table row of a beam, writable, with its cells."""
        return self.seqs.table[self.seqs.rows[kv._sequence, beam], 0]


@pytest.fixture
def scene():
    return Scene()


def test_what_is_right_passes(scene):
    check(scene.manager)
    check(scene.manager, device=True)
    scene.engine.verify([scene.wide, scene.plain])


# -- structures: one corruption each ---------------------------------------------------------------


def count_a_holder_twice(scene):
    scene.slots.refs[scene.row(scene.plain)[0]] += 1


def make_a_count_negative(scene):
    scene.slots.refs[scene.slots.free_slots()[0]] = -1


def free_a_held_slot(scene):
    scene.slots._stack[0] = scene.row(scene.plain)[0]


def free_a_slot_twice(scene):
    scene.slots._stack[0] = scene.slots._stack[1]


def lose_a_slot(scene):
    scene.slots.num_free -= 1


def leave_a_cell_behind(scene):
    scene.row(scene.plain)[3] = 0


def point_outside(scene):
    scene.row(scene.plain)[0] = 99


def share_a_page_that_is_written(scene):
    scene.slots.refs[scene.row(scene.wide, 1)[2]] -= 1
    scene.slots._give_back(scene.row(scene.wide, 1)[2:3].copy(), 0)
    scene.row(scene.wide, 1)[2] = scene.row(scene.wide, 0)[2]
    scene.slots.refs[scene.row(scene.wide, 0)[2]] += 1


def share_a_page_between_sequences(scene):
    mine, theirs = scene.row(scene.plain), scene.row(scene.wide)
    scene.slots.refs[mine[0]] = 0
    scene.slots._give_back(mine[:1].copy(), 0)
    mine[0] = theirs[0]
    scene.slots.refs[theirs[0]] += 1


def give_two_beams_one_row(scene):
    scene.seqs.rows[scene.wide._sequence, 1] = scene.seqs.rows[scene.wide._sequence, 0]


def forget_a_free_row(scene):
    scene.seqs.used_rows += 1


def grow_without_pages(scene):
    scene.seqs.capacity[scene.plain._sequence] = 13


def forget_the_limit(scene):
    scene.seqs.limit[scene.plain._sequence] -= 1


def pass_the_capacity(scene):
    scene.seqs.history[scene.plain._sequence] = 11


def show_a_suspended_page(scene):
    scene.row(scene.hidden)[0] = scene.seqs.parked[scene.hidden._sequence][0, 0, 0]


def wake_without_pages(scene):
    scene.seqs.active[scene.hidden._sequence] = True


def lose_a_handle(scene):
    scene.manager._runtime.handles.remove(scene.plain._sequence)


def miss_an_update_of_the_callers_row(scene):
    scene.bound[1] = 7


def forget_a_bound(scene):
    scene.seqs.block_bound[scene.plain._sequence] = 99


def promise_a_ticket_of_the_future(scene):
    scene.slots.reusable_after[0] = 10**6


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (count_a_holder_twice, "holders"),
        (make_a_count_negative, "holders"),
        (free_a_held_slot, "free and held"),
        (free_a_slot_twice, "distinct free slots"),
        (lose_a_slot, "free .* held .* evictable = capacity"),
        (leave_a_cell_behind, "cells from 3 on are -1"),
        (point_outside, "name no slot"),
        (share_a_page_that_is_written, "holders of block 2"),
        (share_a_page_between_sequences, "serves one"),
        (give_two_beams_one_row, "rows of distinct beams"),
        (forget_a_free_row, "free rows"),
        (grow_without_pages, "blocks"),
        (forget_the_limit, "limit"),
        (pass_the_capacity, "history 11 <= capacity 10"),
        (show_a_suspended_page, "cells from 0 on are -1"),
        (wake_without_pages, "active and parked"),
        (lose_a_handle, "with a handle"),
        (miss_an_update_of_the_callers_row, "the row bound to beam 0"),
        (forget_a_bound, "bound"),
        (promise_a_ticket_of_the_future, "tickets of the future"),
    ],
)
def test_check_finds_a_corrupted_structure(scene, corrupt, rule):
    corrupt(scene)
    with pytest.raises(OracleError, match=rule) as caught:
        check(scene.manager)
    assert "state:\n  pool group 0: 16 slots" in str(caught.value)  # the dump is there


def test_check_finds_a_device_table_that_missed_an_update(scene):
    check(scene.manager, device=True)
    assert scene.plain.resize(13)
    scene.seqs.dirty.clear()
    check(scene.manager)
    with pytest.raises(OracleError, match="device table"):
        check(scene.manager, device=True)


# -- content ---------------------------------------------------------------------------------------


def test_the_engine_finds_a_wrong_page(scene):
    first, second = scene.row(scene.plain), scene.row(scene.wide)
    first[0], second[0] = second[0], first[0]
    scene.seqs.mark_blocks(scene.seqs.rows[scene.plain._sequence, :1], 3, 0)
    with pytest.raises(ContentError, match=r"^(10|4) tokens"):
        scene.engine.verify([scene.plain])


def test_the_engine_finds_a_wrong_beam(scene):
    scene.engine.write([scene.wide], 5)
    scene.engine.verify([scene.wide])
    rows = scene.engine._lineages[scene.wide]
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(ContentError, match="beam 0 position 5"):
        scene.engine.verify([scene.wide])


def test_the_engine_finds_a_stale_page(scene):
    """One bit of one role of one token is enough."""
    pool, _ = scene.manager._runtime.pool_places[0][0]
    slot = int(scene.row(scene.plain)[1])
    pool.array(np.uint8, (16, 4096))[slot, 2048 + 3 * 512 + 17] ^= 1
    with pytest.raises(ContentError, match=r"position 7, key \d+: differs in 1 words"):
        scene.engine.verify([scene.plain])


def test_the_engine_finds_a_page_that_is_missing(scene):
    scene.engine.verify([scene.plain])
    scene.manager.page_table(0)[scene.seqs.rows[scene.plain._sequence, 0], 1] = -1
    with pytest.raises(ContentError, match="a kernel saw"):
        scene.engine.verify([scene.plain])
    with (
        mock.patch.object(Launches, "read_tables", return_value=([], [])),
        pytest.raises(ContentError, match=r"position 4.* has no page"),
    ):
        scene.engine.verify([scene.plain])


def test_pages_are_poisoned_before_they_are_freed():
    scene = Scene()
    scene.engine.poison = True
    slots = scene.row(scene.plain)[:3].copy()
    scene.engine.close(scene.plain)
    pool, _ = scene.manager._runtime.pool_places[0][0]
    assert (pool.array(np.uint8, (16, 4096))[slots] == 0xFF).all()
    scene.engine.verify([scene.wide])


def test_lockstep_finds_a_wrong_answer(scene):
    pair = Lockstep(KVCacheManager(small_config(), device="host"))
    kv = pair.create([None])[0]
    pair.resume(kv)
    kv.model.capacity = 3
    with pytest.raises(OracleError, match="cache 0: capacity: expected 3, got 0"):
        pair.compare()
    kv.model.capacity = 0
    with pytest.raises(OracleError, match="the call: expected"):
        pair.both(lambda: True, lambda: False)


# -- faults on demand ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["take", "copy", "launch", "memory", "record", "wait"])
def test_a_fault_fires_once_and_leaves_no_trace(what):
    device = HostDevice(deferred=True)
    streams = [device.create_stream() for _ in range(2)]
    manager = KVCacheManager(small_config(slots=8), device=device)
    a, b = manager.create_kv_caches([0, 0])
    assert a.resume(streams[0])
    assert b.resume(streams[1])

    def use():
        assert b.resize(8)
        batch = manager.create_batch(4, 4)
        batch.prepare([b], 1)
        assert b.set_beam_width(2)
        assert b.resize(0)
        assert a.resize(32)
        assert a.resize(0)
        assert b.set_beam_width(1)

    with fail_at(manager, what, 10**6) as counted:
        use()
    assert counted.calls > 0
    assert not counted.fired
    with fail_at(manager, what) as fault, pytest.raises(FaultError, match=what):
        use()
    assert fault.fired
    assert vars(device).keys() == vars(HostDevice()).keys()
    assert type(manager._runtime.control.slots[0]) is SlotTable


def test_a_fault_of_no_kind_is_refused():
    device = HostDevice()
    with pytest.raises(ValueError, match="one of"), fail_at(device, "luck"):
        pass
    with pytest.raises(ValueError, match="KVCacheManager"), fail_at(device, "take"):
        pass
    for k in (0, -1, 1.0, True):
        with (
            pytest.raises((ValueError, TypeError), match=r"^k: expected"),
            fail_at(device, "copy", k),
        ):
            pass
    with pytest.raises(TypeError, match=r"^target: expected"), fail_at(None, "copy"):
        pass


def test_every_operation_that_is_enqueued_can_fail():
    takes = {
        name
        for name, method in inspect.getmembers(Device, inspect.isfunction)
        if "stream" in inspect.signature(method).parameters
    }
    others = {"stream", "empty", "to_host", "as_array", "copied_to"}
    assert takes - others == set(faults.LAUNCH)


@pytest.mark.parametrize("k", range(1, 6))
def test_a_write_that_fails_promises_nothing(scene, k):
    """The engine goes on expecting what was there."""
    before = [list(scene.engine.lineage(scene.wide, beam)) for beam in (0, 1)]
    with fail_at(scene.manager, "launch", k) as fault:
        try:
            scene.engine.write([scene.wide], 5)
        except FaultError:
            assert [scene.engine.lineage(scene.wide, beam) for beam in (0, 1)] == before
            scene.engine.verify([scene.wide])
    assert fault.fired or k > 3


def test_a_write_past_the_capacity_is_refused_as_by_a_batch(scene):
    before = scene.engine.lineage(scene.plain, 0)
    with pytest.raises(ValueError, match="at most the capacity of 10 tokens"):
        scene.engine.write([scene.plain], 8)
    assert scene.engine.lineage(scene.plain, 0) == before
    scene.engine.verify([scene.plain])


def test_a_check_begins_as_every_call_does(scene):
    """It closes what was dropped, and looks at what is left."""
    scene.hidden = None
    gc.collect()
    with pytest.warns(ResourceWarning, match="dropped without close"):
        check(scene.manager)
    assert len(scene.manager._runtime.handles) == 2
    for kv in (scene.wide, scene.plain):
        scene.engine.close(kv)
    scene.manager.shutdown()
    with pytest.raises(StateError, match="shut down"):
        check(scene.manager)
