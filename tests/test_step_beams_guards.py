"""Beam steps that fail, or are asked for wrongly, or are waited for."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.simulated import Gate
from kvcore.testing import FaultError, check, fail_at
from tests.helpers import row, used
from tests.test_step_beams import Search, T


@pytest.mark.parametrize("what", ["launch", "copy", "record", "wait", "memory"])
def test_whatever_fails_in_a_step_leaves_host_and_device_together(what):
    """Or nothing was enqueued and it can be repeated, or the next prepare sends the host's rows."""
    for number in range(1, 9):
        s = Search(10, (6, 5), (3, 2), deferred=False)
        s.step(s.random())
        assert s.m.advance(s.kvs, 1)
        s.batch.prepare(s.kvs, 1)
        parents = np.array([1, 1, 0, 1, 1], np.int32)
        with fail_at(s.m, what, number):
            try:
                s.m.step_beams(s.batch, parents)
            except FaultError:
                failed = True
            else:
                failed = False
        s.m.advance(s.kvs, 0, history=[kv.capacity for kv in s.kvs])
        s.batch.prepare(s.kvs, 1, start=[0, 0])
        for kv in s.kvs:
            kv.settle()
        check(s.m)
        twin = s.device.to_host(s.m._runtime.tables.array, stream=s.stream)
        for kv in s.kvs:
            rows = s.m._runtime.control.seqs.rows[kv._sequence, : kv.beam_width]
            for beam, at in enumerate(rows.tolist()):
                assert twin[at, 0, : kv.num_blocks].tolist() == row(kv, beam)
        for kv in s.kvs:
            kv.close()
        assert used(s.m) == 0
        if not failed:
            return


@pytest.mark.parametrize("beam_mode", ["fork", "indirection"])
@pytest.mark.parametrize("number", range(1, 5))
def test_a_step_that_fails_while_earlier_parents_are_on_their_way(beam_mode, number):
    """The rows that the next prepare sends are those after the earlier steps."""
    s = Search(17, (6, 5), (3, 2), beam_mode=beam_mode)
    s.step([2, 0, 0, 1, 0])
    assert s.m.advance(s.kvs, 1)
    s.batch.prepare(s.kvs, 1)
    parents = s.put(np.array([1, 1, 0, 1, 1], np.int32))
    assert s.kvs[0]._sequence in s.m._runtime.parents
    with fail_at(s.m, "launch", number) as fault:
        try:
            s.m.step_beams(s.batch, parents)
        except FaultError:
            assert fault.fired
    s.m.advance(s.kvs, 0, history=[kv.capacity for kv in s.kvs])
    s.batch.prepare(s.kvs, 1, start=[0, 0])
    for kv in s.kvs:
        kv.settle()
    check(s.m, device=True)


def test_a_row_that_becomes_read_only_does_not_stop_the_follower():
    s = Search(11, (6, 5), (2, 3))
    mine = np.zeros(8, np.int32)
    s.kvs[0].set_base_page_index_buf(0, 0, mine)
    gate = Gate()
    s.stream.wait(gate)
    s.step([1, 0, 2, 2, 0])
    mine.flags.writeable = False
    s.step([1, 1, 0, 0, 0]) if s.kvs[0].capacity % T else None
    gate.open()
    for kv in s.kvs:
        kv.settle()
    s.right()
    check(s.m)


def test_finish_and_step_beams_take_parents_of_the_batch_alone():
    s, other = Search(12, (6,), (3,)), Search(13, (6,), (3,))
    assert s.m.advance(s.kvs, 1)
    s.batch.prepare(s.kvs, 1)
    for wrong in (np.zeros(1, np.int32), np.zeros(300, np.int32), np.zeros(3, np.int64)):
        with pytest.raises((ValueError, TypeError), match="parents"):
            s.batch.finish(wrong)
    with pytest.raises(TypeError, match="batch"):
        other.m.step_beams(s.batch, np.zeros(3, np.int32))
    s.m.step_beams(s.batch, np.zeros(3, np.int32))


def test_a_step_of_one_beam_each_is_over_and_others_go_on():
    s = Search(14, (6, 5), (1, 3), deferred=False)
    alone = s.m.create_batch(1, 4)
    assert s.m.advance(s.kvs, 1)
    alone.prepare(s.kvs[:1], 1)
    s.batch.prepare(s.kvs, 1)
    s.m.step_beams(s.batch, np.array([0, 2, 2, 0], np.int32))
    alone.gather(0)  # its member has one beam: nothing of it changed
    s.m.step_beams(alone, np.zeros(1, np.int32))
    with pytest.raises(k.StateError, match="prepare"):
        alone.gather(0)


def test_copies_of_a_step_are_counted_once_they_are_known():
    s = Search(15, (6,), (3,), deferred=False)
    s.m.get_and_reset_iteration_stats()
    s.step([1, 1, 1])
    s.kvs[0].settle()
    (seen,) = s.m.get_and_reset_iteration_stats()
    assert seen.intra_device_copy_blocks == 2


def test_a_fork_waits_for_pages_if_asked():
    s = Search(16, (4,), (4,), slots=17)
    (kv,) = s.kvs
    for _ in range(8):
        s.step([0, 1, 2, 3])
    kv.settle()
    other = s.m.create_kv_cache()
    assert other.resume(s.device.create_stream())
    gate = Gate()
    s.stream.wait(gate)
    s.step([1, 1, 1, 1])
    free = s.m.get_storage_statistics()[0].free
    assert other.resize(free * T, 1)
    with pytest.raises(k.OutOfPagesError):
        other.fork(1)
    gate.open()
    other.resize(T * 2)
    filler = s.m.create_kv_cache()
    assert filler.resume(s.stream)
    assert filler.resize((free - 2) * T)
    (fork,) = other.fork(1, block=True)
    assert fork.num_blocks == 2
    check(s.m)
