"""Tables for kernels of others, written on the device: against slow constructions from the host."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.errors import ParentsPending
from tests.helpers import opaque_manager, opened, row, typed_manager
from tests.test_batch_tables import beams_manager, mixed_batch, mixed_config, with_beams
from tests.test_step_beams import Search

# -- block offsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("no_page", [-1, 0])
def test_the_devices_offsets_are_the_hosts(no_page):
    m, context, a, b = mixed_batch()
    tables, step = m.create_batch_tables(), m.create_batch(8, 32)
    for caches, contexts in (([context, a, b], 1), ([b, context], 0), ([a], 0), ([], 0)):
        step.prepare(caches, 1, start=0, num_contexts=contexts)
        got = step.block_offsets(tables, no_page=no_page)
        expected = tables.offsets(caches, contexts, no_page=no_page)
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == np.int32
        assert step.num_table_rows == expected.shape[1]


def test_offsets_of_all_pools_and_of_pages_finer_than_a_block():
    m = k.KVCacheManager(mixed_config(), device="host")
    caches = opened(m, 5, 9)
    step = m.create_batch(2, 2)
    step.prepare(caches, 1, start=0)
    for roles in (("key", "value"), ("value", "value")):
        tables = m.create_batch_tables(roles)
        assert {pool.expansion for pool in tables.pools} == {1, 2}
        np.testing.assert_array_equal(step.block_offsets(tables), tables.offsets(caches))
    m.close_kv_caches(caches)


def test_a_cross_cache_repeats_its_row_on_the_device():
    """One row a cache, whatever the decoder's width: A is a context, B and C are generations."""
    cross = opaque_manager(16)
    b, c, a = opened(cross, 6, 9, 4)
    tables, step = cross.create_batch_tables(), cross.create_batch(3, 3, max_table_rows=9)
    out = np.full((1, 9, 2, 4), 77, np.int32)
    lists = {3: [2, 0, 0, 0, 1, 1, 1], (2, 4): [2, 0, 0, 1, 1, 1, 1], None: [2, 0, 1]}
    for widths, rows in lists.items():
        for _ in range(2):  # the second time the step is recognised
            step.prepare([a, b, c], 1, start=0, num_contexts=1, beam_width=widths)
            assert step._table_rows.tolist() == rows + [-1] * (9 - len(rows))
            assert step.rows.tolist() == [2, 0, 1]
            assert step.block_offsets(tables, out=out) is out
            expected = tables.offsets([a, b, c], 1, widths)
            np.testing.assert_array_equal(out[:, : len(rows)], expected)
            assert (out[:, len(rows) :] == -1).all()
    step.prepare([a, b, c], 1, start=0)  # without a word about widths: every row once
    np.testing.assert_array_equal(step.block_offsets(tables), tables.offsets([a, b, c]))


def test_a_wide_cache_among_the_contexts_has_one_row():
    m, context, a, b = mixed_batch()
    tables, step = m.create_batch_tables(), m.create_batch(8, 8, max_table_rows=8)
    step.prepare([a, b, context], 1, start=0, num_contexts=2)
    assert (step.num_rows, step.num_table_rows) == (6, 3)
    np.testing.assert_array_equal(step.block_offsets(tables), tables.offsets([a, b, context], 2))


def test_what_the_caller_gives_is_filled():
    m, context, a, b = mixed_batch()
    tables, step = m.create_batch_tables(), m.create_batch(8, 8)
    out = np.full((1, 11, 2, 12), 77, np.int32)
    for no_page in (-1, 0):
        step.prepare([context, a], 1, start=0)
        step.block_offsets(tables, no_page=no_page, out=out)
        expected = tables.offsets([context, a], no_page=no_page, out=np.zeros_like(out))
        np.testing.assert_array_equal(out, expected)
        step.prepare([b], 1, start=0)  # a smaller step leaves no trace of the larger one
        step.block_offsets(tables, no_page=no_page, out=out)
        np.testing.assert_array_equal(
            out, tables.offsets([b], no_page=no_page, out=np.zeros_like(out))
        )


def test_growth_shows_with_the_next_prepare():
    m = beams_manager()
    kv = with_beams(m, 3, 2, 4)
    tables, step = m.create_batch_tables(), m.create_batch(2, 2)
    step.prepare([kv], 1)
    assert m.advance([kv], 1)
    grown = step.block_offsets(tables)
    assert (grown[0, :, :, 1] == -1).all()
    step.prepare([kv], 1)
    np.testing.assert_array_equal(step.block_offsets(tables), tables.offsets([kv]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("again", [False, True])
def test_rows_the_host_does_not_know_are_on_the_device(seed, again):
    """At once after the beam step, or with the next step prepared; equal to the host's later."""
    s = Search(seed, (6, 3), (3, 2), slots=64)
    tables, other = s.m.create_batch_tables(), s.device.create_stream()
    for _ in range(4):
        s.step(s.random())
    for kv in s.kvs:
        kv.settle()
    gate = Gate()
    s.stream.wait(gate)
    s.step(s.random())
    with pytest.raises(ParentsPending, match="settle"):
        tables.offsets(s.kvs)
    if again:
        assert s.m.advance(s.kvs, 1)
        s.batch.prepare(s.kvs, 1)
    got = s.batch.block_offsets(tables, stream=other)
    with pytest.raises(ParentsPending, match="settle"):
        tables.offsets(s.kvs)
    gate.open()
    for kv in s.kvs:
        kv.settle()
    expected = tables.offsets(s.kvs)
    np.testing.assert_array_equal(s.device.to_host(got, stream=other), expected)


def test_offsets_after_a_beam_step_are_void_once_rows_change():
    s = Search(1, (6,), (3,), deferred=False)
    tables = s.m.create_batch_tables()
    s.step([2, 0, 0])
    s.batch.block_offsets(tables)
    s.kvs[0].reorder_beams([1, 0, 2])
    with pytest.raises(k.StateError, match="prepare"):
        s.batch.block_offsets(tables)


@pytest.mark.parametrize("seed", range(10))
def test_a_table_is_written_before_its_rows_change_hands(seed):
    """On a stream of its own, while others take the pages and rows over."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=8, device=device)
    main, side, third = (device.create_stream() for _ in range(3))
    tables, step, later = m.create_batch_tables(), m.create_batch(2, 8), m.create_batch(2, 8)
    first = m.create_kv_cache()
    assert first.resume(main)
    assert first.resize(12)
    step.prepare([first], 4)
    got = step.block_offsets(tables, stream=side)
    expected = tables.offsets([first])
    first.close()
    second = m.create_kv_cache()
    assert second.resume(third)
    assert second.resize(20)
    later.prepare([second], 4)
    np.testing.assert_array_equal(device.to_host(got, stream=side), expected)
    device.drain()


@pytest.mark.parametrize("seed", range(10))
def test_a_table_is_read_before_a_row_in_it_is_cleared(seed):
    """By a batch on another stream, which takes neither the row nor the pages."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=16, device=device)
    step, later = m.create_batch(2, 8), m.create_batch(2, 8)
    first, second = (opened_on(m, device.create_stream(), 12) for _ in range(2))
    later.prepare([second], 4)
    step.prepare([first], 4)
    expected, main = [row(first)], first.stream
    table = step.page_table()
    first.close()
    later.prepare([second], 4)
    assert device.to_host(table, stream=main).tolist() == expected
    device.drain()


def opened_on(m, stream, capacity):
    """A cache that is bound to a stream."""
    kv = m.create_kv_cache()
    assert kv.resume(stream)
    assert kv.resize(capacity)
    return kv


def test_what_block_offsets_refuses():
    m, context, a, b = mixed_batch()
    other = typed_manager()
    tables, step = m.create_batch_tables(), m.create_batch(8, 8)
    listed = m.create_batch(4, 4, max_table_rows=5)
    with pytest.raises(k.StateError, match="holds no step"):
        step.block_offsets(tables)
    step.prepare([context, a, b], 1, start=0)
    small = np.full((1, 6, 2, 4), 5, np.int32)
    calls = [
        (lambda: step.block_offsets(other.create_batch_tables()), TypeError, "of this manager"),
        (lambda: step.block_offsets(None), TypeError, "tables"),
        (lambda: step.block_offsets(tables, no_page=3), ValueError, "no_page"),
        (lambda: step.block_offsets(tables, out=small), ValueError, "at least 6, 2, at least 5"),
        (lambda: step.block_offsets(tables, out=small[0]), ValueError, "out"),
        (lambda: step.block_offsets(tables, out=np.zeros((1, 6, 2, 8))), ValueError, "dtype"),
        (lambda: step.block_offsets(tables, out=[1]), TypeError, "NumPy"),
        (lambda: step.prepare([a], 1, num_contexts=2), ValueError, "num_contexts"),
        (lambda: step.prepare([a], 1, num_contexts=1), ValueError, "max_table_rows"),
        (lambda: step.prepare([a], 1, beam_width=2), ValueError, r"the width of kv_caches\[0\]"),
        (lambda: step.prepare([context], 1, beam_width=2), ValueError, "max_table_rows"),
        (lambda: listed.prepare([context], 1, beam_width=6), ValueError, "max_table_rows=5"),
        (lambda: m.create_batch(4, 4, max_table_rows=3), ValueError, "max_table_rows"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert (small == 5).all()
    np.testing.assert_array_equal(step.block_offsets(tables), tables.offsets([context, a, b]))
