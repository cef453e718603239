"""How paged caches failed elsewhere: allocation, rollback, rewinding, pages and tables.

Each test says what it guards and, where the failure is public, whose it was.
"""

from __future__ import annotations

import gc
from threading import Thread

import numpy as np
import pytest

import kvcore as k
from kvcore.control.plane import ControlPlane
from kvcore.control.sequences import TableShape
from kvcore.control.slots import SlotTable
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import FakeEngine, FaultError, Lockstep, check, fail_at
from kvcore.testing.small import RandomDraw, small_config
from tests.helpers import opaque_manager, opened, row, used


def test_short_lives_leave_no_object_behind():
    """Unbounded chains of freed blocks ended in a crash (NVIDIA/TensorRT-LLM#16037)."""
    m = opaque_manager(slots=64)

    def live(times):
        for _ in range(times):
            with m.create_kv_cache() as kv:
                kv.resume()
                kv.resize(20)

    live(100)
    gc.collect()
    before = len(gc.get_objects())
    live(20_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert used(m) == 0
    check(m)


def test_full_pools_are_an_answer_and_the_call_can_be_repeated():
    """No victim in the free list was an assertion (NVIDIA/TensorRT-LLM#1687)."""
    m = opaque_manager(slots=4, max_beam_width=2, enable_partial_commit=False)
    a, b = opened(m, 12, 4)
    b.resize(None, 1)
    assert b.resize(5) is False
    assert m.advance([a, b], 1) is False
    assert b.set_beam_width(2) is False
    with pytest.raises(k.OutOfPagesError):
        b.beam_width = 2
    check(m)
    assert (a.capacity, b.capacity, b.beam_width) == (12, 4, 1)
    a.close()
    assert m.advance([b], 1)
    b.beam_width = 2
    assert used(m) == 4


# -- pages are freed once --------------------------------------------------------------------------


def test_a_slot_is_freed_once():
    """Block lists held a page twice, and two paths released it (vllm-project/vllm#1584)."""
    slots = SlotTable(4)
    p, q = slots.take(2)
    before = slots.refs.copy()
    for wrong in ([p, p], [q, p, q], [3]):
        with pytest.raises(k.InternalError, match="released once too often"):
            slots.release(np.array(wrong, np.int32), 0, distinct=False)
        assert (slots.refs == before).all()
        assert slots.num_free == 2
    slots.release(np.array([], np.int32), 0, distinct=False)
    slots.release(np.array([p]), 0, distinct=True)
    assert slots.num_free == 3
    with pytest.raises(k.InternalError):
        slots.release(np.array([p]), 0, distinct=True)
    slots.release(np.array([q]), 0, distinct=True)
    assert sorted(slots.take(4).tolist()) == [0, 1, 2, 3]
    with pytest.raises(k.InternalError):
        slots.take_one()


def test_closing_by_every_path_frees_once():
    m = opaque_manager(slots=4)
    a, b = opened(m, 8, 8)
    a.suspend()
    m.close_kv_caches([a, b, a])
    m.close_kv_caches([a])
    a.close()
    b.close()
    check(m)
    (c,) = opened(m, 16)
    assert sorted(row(c)) == [0, 1, 2, 3]
    assert c.resize(17) is False


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("steps", [199, 200])
def test_room_taken_a_step_ahead_is_freed_once(T, steps):
    """The look-ahead slot was freed by two paths, or none (sgl-project/sglang#12224)."""
    m = opaque_manager(slots=256, T=T)
    (kv,) = opened(m, 5)
    kv.resize(None, 5)
    for _ in range(steps):
        assert m.advance([kv], 1)
        kv.resize(None, kv.history_length + 1)
    assert m.advance([kv], 1)
    assert used(m) == -(-(6 + steps) // T)
    kv.close()
    check(m)
    assert sorted(m._runtime.control.slots[0].free_slots().tolist()) == list(range(256))


# -- a failure on the way is undone ----------------------------------------------------------------


@pytest.mark.parametrize("free", range(5))
def test_five_pages_or_none(free):
    """The first k - 1 pages of a failing allocation vanished (ovg-project/kvcached#364)."""
    pair = Lockstep(k.KVCacheManager(small_config(slots=8), device="host"))
    holder, kv = pair.create([None, None])
    pair.resume(holder)
    pair.resume(kv)
    assert pair.resize(kv, 3)
    pair.write([kv], [0], [3])
    assert pair.resize(holder, 4 * (7 - free))
    assert pair.resize(kv, 3 + 20) is False
    assert pair.advance([kv, holder], [20, 0]) is False
    pair.look([kv])
    pair.settle()
    pair.close(holder)
    assert pair.resize(kv, 3 + 20)


def nobody_waits(sequences, tickets):
    """No slot was ever freed, so there is nothing to wait for."""
    raise AssertionError


def test_all_layer_groups_or_none():
    """Two pool groups, and the second is the short one."""
    shape = TableShape(
        max_sequences=2,
        max_rows=2,
        max_beam_width=1,
        num_groups=2,
        max_blocks=8,
        max_seq_len=32,
        tokens_per_block=4,
        twin=True,
    )
    control = ControlPlane(shape, (8, 4), (0, 1))
    (sequence,) = control.seqs.create(1)
    assert control.grow(np.array([sequence]), np.array([2], np.int32), nobody_waits)
    before = control.seqs.table[:1].copy()
    assert not control.grow(np.array([sequence]), np.array([7], np.int32), nobody_waits)
    assert [slots.num_free for slots in control.slots] == [6, 2]
    assert (control.seqs.table[:1] == before).all()
    assert control.grow(np.array([sequence]), np.array([4], np.int32), nobody_waits)
    assert [slots.num_free for slots in control.slots] == [4, 0]


CALLS = {
    "resize": lambda m, a, b: a.resize(30),
    "advance one": lambda m, a, b: m.advance([a], 9),
    "advance many": lambda m, a, b: m.advance([a, b], 9),
    "widen": lambda m, a, b: b.set_beam_width(3),
    "reorder": lambda m, a, b: a.reorder_beams([1, 1]),
    "suspend": lambda m, a, b: a.suspend(),
    "truncate": lambda m, a, b: m.truncate([a, b], [5, 5]),
    "shrink": lambda m, a, b: a.resize(5),
    "narrow": lambda m, a, b: a.set_beam_width(1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", ["take", "copy", "launch", "memory", "record", "wait"])
def test_a_fault_at_every_operation_changes_nothing(what, call):
    """The k-th operation of a call fails, k = 1, 2, ...; then the same call succeeds."""
    for k_th in range(1, 20):
        m, engine, a, b = two_on_two_streams()
        before = shown(m, a, b)
        with fail_at(m, what, k_th) as fault:
            try:
                CALLS[call](m, a, b)
            except FaultError:
                assert shown(m, a, b) == before
        check(m)
        if not fault.fired:
            break
        engine.verify([a, b])
        CALLS[call](m, a, b)
        check(m, device=True)
    assert not fault.fired


def two_on_two_streams():
    """A cache of two beams, a plain one, and freed slots that a third stream still uses."""
    device = HostDevice(deferred=True, seed=3)
    m = k.KVCacheManager(small_config(slots=24), device=device)
    engine = FakeEngine(m)
    a, b, gone = m.create_kv_caches([0, 0, 0])
    for kv in (gone, a, b):
        assert kv.resume(device.create_stream())
        assert kv.resize(9)
        engine.write([kv], 9)
        kv.resize(None, 5)
    assert engine.set_beam_width(a, 2)
    gone.stream.wait(gate := Gate())
    engine.close(gone)
    gate.open()
    return m, engine, a, b


def shown(m, *caches):
    """What callers can see."""
    sizes = [(kv.status, kv.capacity, kv.history_length, kv.beam_width) for kv in caches]
    rows = [[row(kv, beam) for beam in range(kv.beam_width)] for kv in caches]
    return sizes, rows, used(m)


def test_a_fault_while_a_batch_is_prepared_can_be_repeated():
    m, engine, a, b = two_on_two_streams()
    batch = m.create_batch(4, 64)
    for what in ("launch", "memory"):
        for k_th in range(1, 20):
            assert b.resize(b.capacity + 1)
            with fail_at(m, what, k_th) as fault:
                try:
                    batch.prepare([a, b], 1)
                except FaultError:
                    assert fault.fired
            batch.prepare([a, b], 1)
            check(m, device=True)
            if not fault.fired:
                break
    engine.verify([a, b])


def test_a_manager_that_could_not_be_built_holds_no_memory():
    for k_th in range(1, 20):
        device = HostDevice()
        reserved = []
        reserve = device.reserve
        device.reserve = lambda *args, r=reserve, seen=reserved: seen.append(r(*args)) or seen[-1]
        with fail_at(device, "memory", k_th) as fault:
            try:
                k.KVCacheManager(small_config(scales=True), device=device).shutdown()
            except FaultError:
                assert fault.fired
        assert [memory.nbytes for memory in reserved] == [0] * len(reserved)
        if not fault.fired:
            return
    pytest.fail("every run was cut short")


# -- lengths and rows of the table -----------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_rejected_drafts_are_rewound_exactly(accepted):
    """Off-by-one in trimming; growth over two edges took one page (ml-explore/mlx-lm#1528)."""
    m = opaque_manager(slots=16)
    (kv,) = opened(m, 7)
    kv.resize(None, 7)
    assert kv.resize(7 + 6)
    assert used(m) == 4
    kv.resize(7)
    assert used(m) == 2
    assert m.advance([kv], 4)
    m.truncate([kv], [7 + accepted])
    assert kv.resize(None, 7 + accepted)
    assert (kv.capacity, kv.history_length, used(m)) == (
        7 + accepted,
        7 + accepted,
        2 + (accepted > 1),
    )
    before = shown(m, kv)
    for wrong in (-1, kv.capacity + 1, kv.history_length - 1):
        with pytest.raises(ValueError, match="capacities"):
            m.truncate([kv], [wrong])
    with pytest.raises(ValueError, match="capacity"):
        kv.resize(kv.history_length - 1)
    assert shown(m, kv) == before


def test_a_table_row_has_room_for_drafts_and_refuses_more():
    """Rows were sized before the extra tokens (NVIDIA/TensorRT-LLM#12306, #13104)."""
    m = opaque_manager(slots=16, max_seq_len=10 + 3 + 1)
    assert m.page_table(0).shape[1] == 4
    (kv,) = opened(m, 14)
    with pytest.raises(ValueError, match="max_seq_len=14"):
        kv.resize(15)
    assert kv.resize(8)
    guarded = np.full(5, 77, np.int32)
    kv.set_base_page_index_buf(0, 0, guarded[1:4])
    assert kv.resize(12)
    with pytest.raises(ValueError, match="bind a longer buffer"):
        kv.resize(13)
    assert guarded.tolist() == [77, *row(kv), 77]


@pytest.mark.parametrize("size", [2**31, 2**40, 2**63])
def test_absurd_sizes_are_refused(size):
    m = opaque_manager(slots=4)
    (kv,) = opened(m, 5)
    before = shown(m, kv)
    assert kv.resize(size) is False
    for call in (lambda: m.advance([kv], size), lambda: m.advance([kv], [size])):
        with pytest.raises(ValueError, match="n: expected"):
            call()
    assert shown(m, kv) == before


def test_nobody_is_an_empty_batch_whoever_was_the_last():
    """The handles of the last batch are remembered; forgetting them must leave none."""
    m = opaque_manager()
    a, b = opened(m, 4, 4)
    for forget in (b.suspend, b.close):
        m.advance([a], 1)
        assert m.advance([a], [1])
        forget()
        before = shown(m, a)
        assert m.advance([], 1)
        assert m.advance([], [])
        m.truncate([], [])
        assert m.slot_mapping([], [])[0].size == 0
        m.create_batch(1, 1).prepare([])
        m.close_kv_caches([])
        assert shown(m, a) == before


def test_threads_share_a_manager():
    """One thread drives one cache; the manager serves them all."""
    m = opaque_manager(slots=64, max_beam_width=2, enable_partial_commit=False)
    failures = []

    def drive(seed):
        draw = RandomDraw(seed)
        try:
            for _ in range(100):
                with m.create_kv_cache(expected_prompt_length=0) as kv:
                    kv.resume()
                    kv.resize(draw.number(0, 20))
                    kv.resize(None, draw.number(0, kv.capacity))
                    kv.set_beam_width(2)
                    m.advance([kv], draw.number(0, 9))
                    rows = [row(kv, beam) for beam in range(kv.beam_width)]
                    assert min(map(min, rows), default=0) >= 0 if kv.capacity else True
        except BaseException as error:
            failures.append(error)
            raise

    threads = [Thread(target=drive, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check(m)
    assert used(m) == 0
