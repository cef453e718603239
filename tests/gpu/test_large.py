"""Pools beyond 2**32 bytes and tables beyond 2**31 cells: every operation, where GPUs are large."""

from __future__ import annotations

import gc

import cupy
import numpy as np
import pytest

import kvcore as k
from kvcore.device.base import (
    BeamArrays,
    PageNumbers,
    PathArrays,
    PoolNumbers,
    RowRanges,
    TailPlace,
)
from tests.device.harness import buffer_bytes
from tests.gpu.sharing import adapter, pointer, raw
from tests.gpu.test_kernels import GIB, D, H, T, model_geometry
from tests.gpu.tools import free_bytes
from tests.helpers import typed_manager

pytestmark = pytest.mark.no_sanitizer
COLUMNS = 1 << 29  # blocks of a row: five rows are more than 2**31 cells


def large(rig, nbytes):
    """A range of so many bytes, if the GPU has them."""
    if free_bytes() < nbytes + GIB:
        pytest.skip(f"needs {nbytes >> 30} GiB of free device memory")
    return rig.reserve(nbytes, nbytes)


def test_slots_beyond_32_bits(rig):
    """Slots of 2 GiB: the third begins beyond 2**32."""
    slot_bytes = 2 * GIB + 4112
    memory = large(rig, 3 * slot_bytes)
    first, last = rig.random((5000,), 1), rig.random((5000,), 1)
    starts = memory.array(np.uint8, (5000,), 0), memory.array(np.uint8, (5000,), slot_bytes - 5000)
    rig.device.from_host(first, starts[0], stream=rig.stream)
    rig.device.from_host(last, starts[1], stream=rig.stream)
    pools, ids = [(memory, slot_bytes)], np.array([0], np.int32)
    rig.device.copy_pages(pools, ids, ids + 2, stream=rig.stream)
    at = 2 * slot_bytes
    np.testing.assert_array_equal(rig.get(memory.array(np.uint8, (5000,), at)), first)
    end = memory.array(np.uint8, (5000,), at + slot_bytes - 5000)
    np.testing.assert_array_equal(rig.get(end), last)
    rig.device.fill_pages(pools, ids + 1, 0x77, stream=rig.stream)
    for start in (slot_bytes, 2 * slot_bytes - 5000):
        assert (rig.get(memory.array(np.uint8, (5000,), start)) == 0x77).all()
    np.testing.assert_array_equal(rig.get(end), last)
    np.testing.assert_array_equal(rig.get(starts[1]), last)


def test_tokens_beyond_32_bits(rig):
    """Slots and buffers whose offsets need more than 32 bits, first and last token."""
    g = model_geometry("NHD")
    slot_bytes = 2 * GIB + 65_536
    memory = large(rig, 3 * slot_bytes)
    offset = slot_bytes - buffer_bytes(g)
    stack = rig.device.page_stack([(memory, slot_bytes, offset)], 1, g)
    mapping = np.array([[2, T - 1], [0, 0], [2, 0], [1, 5]], np.int32)
    source = rig.random((1, 4, H, D), 2)
    placed, target = rig.put(mapping), rig.put(np.zeros_like(source))
    rig.device.append(stack, placed, [rig.put(source)], stream=rig.stream)
    rig.device.gather(stack, placed, [target], stream=rig.stream)
    np.testing.assert_array_equal(rig.get(target), source)
    for n, (slot, token) in enumerate(mapping.tolist()):
        at = slot * slot_bytes + offset + token * g.token_stride
        np.testing.assert_array_equal(rig.get(memory.array(np.uint16, (H, D), at)), source[0, n])


def test_cupy_works_on_views_beyond_32_bits(rig):
    """Elementwise work of the array library on a strided view at the far end of a large pool."""
    memory = large(rig, 5 * GIB)
    view = memory.array(np.int32, (4, 1000), 5 * GIB - 16_000)
    values = rig.rng.integers(-1000, 1000, (4, 1000)).astype(np.int32)
    rig.device.from_host(values, view, stream=rig.stream)
    with cupy.cuda.Stream.from_external(rig.stream):
        view[1::2, ::3] *= 3
        total = view.sum(axis=1)
    values[1::2, ::3] *= 3
    np.testing.assert_array_equal(rig.get(view), values)
    np.testing.assert_array_equal(rig.get(total), values.sum(axis=1))


def test_patterns_and_moves_beyond_32_bits(rig):
    g = model_geometry("HND")
    slot_bytes = 2 * GIB + 65_536
    memory = large(rig, 3 * slot_bytes)
    stack = rig.device.page_stack([(memory, slot_bytes, slot_bytes - buffer_bytes(g))], 1, g)
    there = rig.put(np.array([[2, T - 1], [2, 0]], np.int32))
    here = rig.put(np.array([[0, 3], [1, 7]], np.int32))
    keys, bad = rig.put(np.array([5, 6])), rig.put(np.full(2, 7, np.int32))
    rig.device.write_fingerprints(stack, here, keys, stream=rig.stream)
    rig.device.move_tokens(stack, here, there, stream=rig.stream)
    rig.device.verify_fingerprints(stack, there, keys, bad, stream=rig.stream)
    assert rig.get(bad).tolist() == [0, 0]
    rig.device.verify_fingerprints(stack, there, keys[::-1].copy(), bad, stream=rig.stream)
    assert (rig.get(bad) > 0).all()


def test_tails_beyond_32_bits(rig):
    slot_bytes, token = 2 * GIB + 4096, 64
    memory = large(rig, 3 * slot_bytes)
    offset = slot_bytes - 4 * token
    buffers = rig.device.tail_buffers([TailPlace(memory, slot_bytes, offset, 4 * token, token)])

    def slot(index):
        return memory.array(np.uint8, (4 * token,), index * slot_bytes + offset)

    values = [rig.random((4 * token,), 1) for _ in range(3)]
    for index in range(3):
        rig.device.from_host(values[index], slot(index), stream=rig.stream)
    pairs = np.array([[0], [2], [3]], np.int32)
    rig.device.copy_tokens(buffers, pairs, stream=rig.stream)
    values[2][: 3 * token] = values[0][: 3 * token]
    np.testing.assert_array_equal(rig.get(slot(2)), values[2])
    table, lists = rig.put([[2], [1]], np.int32), ([0, 1], [0, 0], [2, 2], [0, 0], [1, 1], [2, 2])
    beams = BeamArrays(*(rig.put(values, np.int32) for values in lists))
    sources = rig.put([-1, 0], np.int32)
    rig.device.copy_tails(buffers, table, beams, sources, tokens_per_block=4, stream=rig.stream)
    values[1][: 2 * token] = values[2][: 2 * token]
    np.testing.assert_array_equal(rig.get(slot(1)), values[1])


def test_dense_rows_beyond_32_bits(rig):
    memory = large(rig, 4 * GIB + 8192)
    rows = memory.array(np.uint8, (2, 2 * GIB + 4096))
    ends = [rig.random((4096,), 1) for _ in range(2)]
    for row, end in zip(rows, ends, strict=True):
        rig.device.from_host(end, row[-4096:], stream=rig.stream)
    parents = rig.put([1, 0], np.int32)
    rig.device.permute_rows([rows], parents, width=2, stream=rig.stream)
    for row, end in zip(rows, ends[::-1], strict=True):
        np.testing.assert_array_equal(rig.get(row[-4096:]), end)


@pytest.fixture
def table(rig):
    """Five rows of 2**29 blocks, -1 but for the last three of the last two rows."""
    memory = large(rig, 5 * 4 * COLUMNS)
    found = memory.array(np.int32, (5, 1, COLUMNS))
    rig.device.fill_words(found, -1, stream=rig.stream)
    cells = 5 * COLUMNS - np.array([3, 2, 1]), 4 * COLUMNS - np.array([3, 2, 1])
    index = rig.device.pinned(48).view(np.int64)
    index[:] = np.concatenate(cells)
    value = rig.device.pinned(24).view(np.int32)
    value[:] = 10, 11, 12, 20, 21, 22
    none = np.empty(0, np.int32)
    rig.device.scatter_table(found, index, value, found, none, stream=rig.stream)
    rig.stream.synchronize()
    return found


def test_tables_beyond_31_bits(rig, table):
    """Cells are written, mapped and taken where their number needs more than 31 bits."""
    rows, start = rig.put([4], np.int32), 4 * (COLUMNS - 2)
    lists = [rig.put([value], np.int32) for value in (start, 5)]
    mapping = rig.put(np.zeros((1, 5, 2), np.int32))
    by_group = table.transpose(1, 0, 2)
    rig.device.map_tokens(by_group, rows, *lists, mapping, tokens_per_block=4, stream=rig.stream)
    places = [[11, 0], [11, 1], [11, 2], [11, 3], [12, 0]]
    assert rig.get(mapping)[0].tolist() == places
    out = rig.put(np.zeros(5, np.int64))
    rig.device.token_slots(mapping[0], out, scale=1 << 30, offset=1, stream=rig.stream)
    assert rig.get(out).tolist() == [(slot << 30) + 1 + token for slot, token in places]
    whole = rig.device.empty((1, COLUMNS), np.int32)
    rig.device.take_rows(by_group[0], rows, whole, stream=rig.stream)
    assert rig.get(whole[0, -4:]).tolist() == [-1, 10, 11, 12]


def test_rows_and_paths_beyond_31_bits(rig, table):
    """Two beams in the last rows change places, and find each other's positions."""
    lists = [4, 3], [0, 0], [2, 2], [0, 0], [COLUMNS] * 2, [0, 0]
    beams = BeamArrays(*(rig.put(values, np.int32) for values in lists))
    parents, sources = rig.put([1, 0], np.int32), rig.put([0, 0], np.int32)
    rig.device.step_rows(table, beams, parents, sources, stream=rig.stream)
    assert rig.get(table[3:, 0, -3:]).tolist() == [[10, 11, 12], [20, 21, 22]]
    cells = large(rig, 5 * 4 * COLUMNS).array(np.int32, (5, COLUMNS))
    rig.device.fill_words(cells, 0, stream=rig.stream)
    lists = [4, 3], [0, 0], [2, 2], [COLUMNS - 4] * 2, [COLUMNS - 2] * 2, [COLUMNS] * 2
    paths = PathArrays(*(rig.put(values, np.int32) for values in lists))
    rig.device.step_paths(cells, paths, parents, stream=rig.stream)
    assert rig.get(cells[3:, -5:]).tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    starts, ends = rig.put([COLUMNS - 2] * 2, np.int32), rig.put([2, 4], np.int32)
    paths = paths._replace(own=paths.valid)
    mapping = rig.put(np.zeros((1, 4, 2), np.int32))
    rig.device.map_paths(table.transpose(1, 0, 2), cells, paths, starts, ends, mapping,
                         tokens_per_block=1, stream=rig.stream)  # fmt: skip
    assert rig.get(mapping)[0, :, 0].tolist() == [11, 12, 21, 22]


def test_page_tables_for_others_beyond_31_bits(rig, table):
    rows, starts, ends = (rig.put([value], np.int32) for value in (4, 4 * COLUMNS - 10, 9))
    ranges, lists = RowRanges(rows, starts, ends), [(2,), (COLUMNS,), (1,)]
    arrays = [rig.device.empty(shape, np.int32) for shape in lists]
    rig.device.csr_pages(
        table[:, 0], ranges, *arrays, numbers=PageNumbers(3), page_tokens=4, stream=rig.stream
    )
    assert rig.get(arrays[0]).tolist() == [0, COLUMNS]
    assert rig.get(arrays[1][-4:]).tolist() == [-1, 30, 33, 36]
    out = rig.device.empty((1, 1, 2, COLUMNS), np.int32)
    pools = [PoolNumbers(0, 2, 1, 1)]
    rig.device.block_offsets(table.transpose(1, 0, 2), rows, out, pools, stream=rig.stream)
    assert rig.get(out[0, 0, :, -2:]).tolist() == [[22, 24], [23, 25]]


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
def test_leases_beyond_2_to_the_32_elements(rig, name):
    """The last page of a pool: of all buffers by its page index, of one buffer by its slot."""
    take = adapter(name)
    if free_bytes() < 10 * GIB:
        pytest.skip("needs 10 GiB of free device memory")
    m = typed_manager(slots=(1 << 14) + 8, T=256, layers=1, heads=8, dim=128, dtype="float16",
                      device=rig.device, stream=rig.stream)  # fmt: skip
    ids = np.array([m.pool_group_descs[0].num_slots - 1], np.int32)
    for slots, value in ((ids - 1, 0x11), (ids, 0x3C)):
        rig.device.fill_pages(m._runtime.pool_places[0], slots, value, stream=rig.stream)
    convert = m.get_page_index_converter(0, "value")
    index = int(convert(ids, k.PageIndexMode.PER_LAYER).reshape(-1)[0])
    pool = take(m.lease(layer_group=0))
    assert pool.shape[0] * 256 * 8 * 128 > 1 << 32
    assert set(raw(pool[index]).tolist()) == {0x3C}
    assert set(raw(pool[index - 2]).tolist()) == {0x11}
    if name != "jax":  # which takes no gaps
        pages = take(m.lease(0, "value"))
        assert pointer(pages[-1]) == pointer(pool[index])
        pages[-1, -1, -1, -1] = 0
        assert raw(pool[index, -1, -1, -2:]).tolist() == [0x3C, 0x3C, 0, 0]
        del pages
    del pool
    gc.collect()
    m.shutdown()
