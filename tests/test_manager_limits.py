"""Arguments and limits of the public objects: what is refused, and what it leaves as it was."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

import kvcore as k
from tests.helpers import opaque_manager, opened, row, used


def test_more_handles_than_sequences_are_duplicates():
    m = opaque_manager(max_sequences=2)
    a, b = opened(m, 1, 1)
    for members in ([a, b, a], [a, a, a]):
        with pytest.raises(ValueError, match="more than once"):
            m.advance(members, 3)
    assert (a.capacity, used(m)) == (1, 2)


def test_any_wish_is_answered():
    m = opaque_manager(max_beam_width=4, enable_partial_commit=False)
    a, b = opened(m, 4, 4)
    a.resize(None, 4)
    assert a.set_beam_width(4)
    for wish in (2**31 - 1, 2**40):
        assert a.resize(wish) is False
    assert m.advance([a, b], 2**30 - 3) is False
    assert (a.capacity, b.capacity) == (4, 4)


def test_dropped_members_of_the_last_batch_are_closed_too():
    m = opaque_manager(slots=8)
    a, b, c = opened(m, 1, 1, 1)
    assert m.advance([a, b], 8)
    del a, b
    gc.collect()
    with pytest.warns(ResourceWarning, match="dropped"):
        assert c.resize(32)
    assert used(m) == 8


def test_any_iterable_of_handles_will_do_and_others_are_named():
    m, other = opaque_manager(), opaque_manager()
    a, b = opened(m, 1, 1)
    (foreign,) = opened(other, 1)
    assert m.advance((a, b), 1)
    assert m.advance((kv for kv in (a, b)), 1)
    assert m.advance((a,), 1)
    assert [kv.capacity for kv in (a, b)] == [4, 3]
    for call in (lambda x: m.advance(x, 1), m.close_kv_caches, lambda x: m.truncate(x, 0)):
        for members in (None, a, 5, [None], [[]]):
            with pytest.raises(TypeError, match="kv_caches"):
                call(members)
        with pytest.raises(ValueError, match="of this manager"):
            call([foreign])
        with pytest.raises(ValueError, match="of this manager"):
            call([a, foreign])
    assert (a.capacity, foreign.capacity) == (4, 1)


def test_a_handle_can_be_neither_copied_nor_pickled():
    (kv,) = opened(opaque_manager(), 1)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="KVCache"):
            attempt(kv)


def test_the_identity_is_no_change_of_width():
    (kv,) = opened(opaque_manager(), 4)  # partial commit is on: real changes are refused
    assert kv.set_beam_width(1, parents=[0])
    for parents in (5, "0", [True]):
        with pytest.raises((TypeError, ValueError), match="parents"):
            kv.set_beam_width(1, parents=parents)


@pytest.mark.parametrize("tokens", [5, "text", [1.5], [[1]], [None]])
def test_wrong_prompts_are_refused(tokens):
    with pytest.raises(TypeError, match="input_tokens"):
        opaque_manager().create_kv_cache(input_tokens=tokens)


def test_prompts_set_the_expected_length():
    m = opaque_manager()
    made = [m.create_kv_cache(input_tokens=t) for t in ([], (7, 8), np.arange(3))]
    assert [kv.expected_prompt_length for kv in made] == [0, 2, 3]
    kv = m.create_kv_cache(input_tokens=[1], expected_prompt_length=9)
    assert kv.expected_prompt_length == 9


def test_nothing_is_told_of_memory_that_is_gone():
    m = opaque_manager()
    m.shutdown()
    with pytest.raises(k.StateError, match="shut down"):
        m.get_mem_pool_base_address(0, "key")
    with pytest.raises(k.StateError, match="shut down"):
        m.page_table(0)
    assert m.get_quota() == 0


def test_tables_larger_than_any_memory_are_only_addresses():
    """A million rows of a million blocks: 4 TiB of table, of which one row is used."""
    m = opaque_manager(slots=1 << 20, device="meta", max_sequences=1 << 10, max_rows=1 << 20)
    (kv,) = opened(m, 4)
    assert row(kv) == [0]
    with pytest.raises(k.OutOfMemoryError, match="max_rows"):
        opaque_manager(slots=1 << 20, device="meta", max_rows=1 << 50)


def test_the_remembered_batch_does_not_open_a_closed_manager():
    m = opaque_manager()
    step = m.create_batch(1, 1)
    m.shutdown()
    for call in (
        lambda: m.advance([], 1),
        lambda: m.slot_mapping([]),
        lambda: m.truncate([], []),
        lambda: step.prepare([]),
    ):
        with pytest.raises(k.StateError, match="shut down"):
            call()


def test_changes_of_the_same_batch_do_not_pile_up():
    """Speculation grows and cuts the same caches; an engine with its own table never prepares."""
    m = opaque_manager(slots=64)
    caches = opened(m, 1, 1)
    for _ in range(3_000):
        assert m.advance(caches, 8)
        m.truncate(caches, [1, 1])
    assert len(m._runtime.control.seqs.dirty) <= 1_100


def test_arrays_among_the_handles_are_named():
    m = opaque_manager()
    a, b = opened(m, 1, 1)
    assert m.advance([a, b], 1)
    assert m.advance(np.array([a, b], object), 1)
    with pytest.raises(TypeError, match="kv_caches"):
        m.advance([np.array([1, 2]), b], 1)
    assert (a.capacity, b.capacity) == (3, 3)


def test_a_bound_row_that_was_made_read_only_refuses_changes_and_is_let_go():
    m = opaque_manager()
    (kv,) = opened(m, 16)
    mine = np.zeros(8, np.int32)
    kv.set_base_page_index_buf(0, 0, mine)
    mine.flags.writeable = False
    for change in (lambda: kv.resize(4), lambda: kv.resize(20), lambda: m.truncate([kv], [4])):
        with pytest.raises(ValueError, match="read-only"):
            change()
        assert (kv.capacity, kv.num_blocks, used(m)) == (16, 4, 4)
    before = mine.tolist()
    kv.suspend()
    assert mine.tolist() == before
    assert kv.resume()
    assert kv.resize(40)  # nothing is bound any more


def test_a_shutdown_that_fails_gives_everything_back_all_the_same(monkeypatch):
    m = opaque_manager()
    closed = []
    monkeypatch.setattr(m.device, "synchronize", lambda: (_ for _ in ()).throw(OSError("made up")))
    monkeypatch.setattr(m.device, "close", lambda: closed.append(m.device))
    with pytest.raises(OSError, match="made up"):
        m.shutdown()
    assert closed == [m.device]
    assert m.get_quota() == 0


def test_beams_do_not_move_under_a_bound_row_that_cannot_follow():
    m = opaque_manager(max_beam_width=2, enable_partial_commit=False)
    (kv,) = opened(m, 6)
    kv.resize(None, 6)
    kv.set_beam_width(2)
    mine = np.zeros(4, np.int32)
    kv.set_base_page_index_buf(0, 0, mine)
    mine.flags.writeable = False
    before = row(kv, 0), row(kv, 1), used(m)
    for change in (lambda: kv.reorder_beams([1, 0]), lambda: kv.set_beam_width(1)):
        with pytest.raises(ValueError, match="read-only"):
            change()
        assert (row(kv, 0), row(kv, 1), used(m), kv.beam_width) == (*before, 2)
