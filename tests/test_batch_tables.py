"""Block-offset tables of mixed batches: whose row, which page, and what must not be there."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import kvcore as k
from kvcore.device.simulated import Gate
from kvcore.errors import ParentsPending
from tests.helpers import opaque_manager, opened, row, typed_manager
from tests.test_step_beams import Search

# -- rows by index ---------------------------------------------------------------------------------


def mapper(max_beam_width, max_copy_width=None):
    """A has index 2, B 0, C 1."""
    m = k.IndexMapper(4, max_beam_width, max_copy_width)
    assert [m.add(name) for name in "BCA"] == [0, 1, 2]
    return m


@pytest.mark.parametrize(
    ("widths", "replicate", "rows"),
    [
        ((4, None), False, [8, 0, 1, 2, 4, 5, 6]),
        ((4, None), True, [8, 0, 0, 0, 4, 4, 4]),
        ((1, 3), True, [2, 0, 0, 0, 1, 1, 1]),  # a cross cache
        ((1, 8), True, [2, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_a_context_has_one_row_and_a_generation_one_for_each_beam(widths, replicate, rows):
    got = mapper(*widths).rows("ABC", 1, 3, replicate_beam_zero=replicate)
    assert (got.tolist(), got.dtype) == (rows, np.int32)


def test_widths_may_differ_and_every_call_makes_an_array_of_its_own():
    m = mapper(4)
    first = m.rows("ABC", 0, [2, 1, 4])
    assert first.tolist() == [8, 9, 0, 4, 5, 6, 7]
    second = m.rows("CB", 2, 3)
    assert second.tolist() == [4, 0]
    assert not np.shares_memory(first, second)
    assert first.tolist() == [8, 9, 0, 4, 5, 6, 7]
    assert m.rows([], 0, 3).tolist() == []


def test_an_index_is_kept_for_life_and_handed_out_again():
    m = mapper(2)
    m.remove("C")
    assert (len(m), m.index("A"), m.index("B")) == (2, 2, 0)
    assert (m.add("D"), m.add("E")) == (1, 3)
    assert m.rows("EDAB", 1, 2).tolist() == [6, 2, 3, 4, 5, 0, 1]
    with pytest.raises(k.CacheCapacityError, match="all 4 indices"):
        m.add("F")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: k.IndexMapper(4, 4, 3), ValueError, "max_copy_width: expected at least 4"),
        (lambda: k.IndexMapper(0, 4), ValueError, "max_batch"),
        (lambda: k.IndexMapper(4, True), TypeError, "max_beam_width"),
        (lambda: mapper(2).add("A"), ValueError, "a new request"),
        (lambda: mapper(2).index("Z"), ValueError, "that was added"),
        (lambda: mapper(2).remove("Z"), ValueError, "that was added"),
        (lambda: mapper(2).rows("AZ", 0, 1), ValueError, "that was added"),
        (lambda: mapper(2).rows("AB", 3, 1), ValueError, "num_contexts"),
        (lambda: mapper(2, 4).rows("AB", 0, 3), ValueError, r"beam_width: .*\[1, 2\]"),
        (lambda: mapper(1, 3).rows("AB", 0, 4, replicate_beam_zero=True), ValueError, r"\[1, 3\]"),
        (lambda: mapper(2).rows("AB", 0, [2, 3]), ValueError, r"beam_width\[1\]"),
        (lambda: mapper(2).rows("AB", 1, [2, 2]), ValueError, "1 entries, one per generation"),
        (lambda: mapper(2).rows("AB", 0, 0), ValueError, "beam_width"),
    ],
)
def test_what_an_index_mapper_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -- tables ----------------------------------------------------------------------------------------


def beams_manager(**settings):
    settings = {"slots": 64, "enable_partial_commit": False, "max_beam_width": 4} | settings
    return typed_manager(**settings)


def with_beams(manager, prompt, width, capacity):
    kv = manager.create_kv_cache(expected_prompt_length=prompt)
    assert kv.resume()
    assert kv.resize(prompt, prompt)
    assert kv.set_beam_width(width)
    assert kv.resize(capacity)
    return kv


def bytes_at(address, count):
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def check_addresses(manager, tables, kv, offsets):
    """Every index leads to the bytes of the page that the cache has there."""
    for layer, (number, offset) in tables.layer_pools.items():
        pool, index = tables.pools[number], offsets[number]
        for plane, role in enumerate(tables.roles):
            size, e = pool.page_stride, pool.expansion
            pages = manager.get_pages(layer, role).view(np.uint8)
            pages[:] = np.random.default_rng(layer).integers(0, 256, pages.shape, np.uint8)
            slots = row(kv)
            for at in range(len(slots) * e):
                whole = pages[slots[at // e]].reshape(e, -1)
                address = pool.address + (int(index[0, plane, at]) + offset) * pool.page_stride
                assert bytes_at(address, size).tolist() == whole[at % e].tolist()
            assert (index[0, plane, len(slots) * e :] == -1).all()


def test_indices_lead_to_the_pages_of_every_layer_and_role():
    m = beams_manager(layers=3)
    before = opened(m, 7)
    kv = with_beams(m, 9, 1, 14)
    tables = m.create_batch_tables()
    (pool,) = tables.pools
    assert (pool.scale, pool.kv_offset, pool.expansion, pool.layer_offsets) == (6, 1, 1, (0, 2, 4))
    assert tables.layer_pools == {0: (0, 0), 1: (0, 2), 2: (0, 4)}
    offsets = tables.offsets([kv])
    assert row(kv) == [2, 3, 4, 5]
    assert offsets.tolist() == [[[[12, 18, 24, 30], [13, 19, 25, 31]]]]
    check_addresses(m, tables, kv, offsets)
    assert before[0].is_open


def mixed_config(T=4):
    """Layer 1 has smaller pages than layer 0; layers 2 and 3 have two pages a block."""
    kinds = ((0, 4, None), (1, 2, None), (2, 4, T // 2), (3, 4, T // 2))
    layers = []
    for layer, heads, tokens in kinds:
        size = (tokens or T) * heads * 16 * 4
        buffers = [
            k.BufferConfig(
                role=role,
                size=size,
                dtype="float32",
                shape=(heads, 16),
                tokens_per_block_override=tokens,
            )
            for role in ("key", "value")
        ]
        layers.append(k.AttentionLayerConfig(layer_id=layer, buffers=buffers))
    return k.KVCacheManagerConfig(
        tokens_per_block=T, cache_tiers=[k.GpuCacheTierConfig(quota=1 << 17)], layers=layers
    )


def test_pools_of_other_sizes_and_pages_finer_than_a_block():
    m = k.KVCacheManager(mixed_config(), device="host")
    _, kv = caches = opened(m, 5, 9)
    twice = m.create_batch_tables(("value", "value"))
    check_addresses(m, twice, kv, twice.offsets([kv]))
    tables = m.create_batch_tables()
    offsets = tables.offsets([kv])
    assert sorted(pool.layers for pool in tables.pools) == [(0,), (1,), (2, 3)]
    assert sorted(pool.expansion for pool in tables.pools) == [1, 1, 2]
    assert offsets.shape == (3, 1, 2, 8)  # 3 blocks, 6 pages, whole vectors
    check_addresses(m, tables, kv, offsets)
    m.close_kv_caches(caches)


def test_one_role_twice_where_keys_and_values_are_one():
    m = opaque_manager(8)
    (kv,) = opened(m, 6)
    offsets = m.create_batch_tables(("value", "value")).offsets([kv])
    assert offsets.tolist() == [[[[0, 2, -1, -1], [0, 2, -1, -1]]]]


def test_values_before_their_keys_are_refused():
    """The value of slot 0 would have the index -1, which is no page."""
    m = beams_manager(layers=2)
    with pytest.raises(ValueError, match="K before that of V in layer 0"):
        m.create_batch_tables(("value", "key"))


def mixed_batch():
    m = beams_manager(slots=128, layers=1)
    (context,) = opened(m, 18)
    a, b = with_beams(m, 6, 3, 11), with_beams(m, 4, 2, 9)
    a.reorder_beams([2, 0, 0])
    return m, context, a, b


def slots_of(offsets, plane=0):
    return [[cell // 2 if cell >= 0 else -1 for cell in cells] for cells in offsets[0, :, plane]]


def padded(cells, blocks=8):
    return cells + [-1] * (blocks - len(cells))


def test_contexts_have_one_row_and_generations_one_for_each_beam():
    m, context, a, b = mixed_batch()
    offsets = m.create_batch_tables().offsets([context, a, b], 1)
    assert offsets.shape == (1, 6, 2, 8)
    expected = [row(context), *(row(a, i) for i in range(3)), *(row(b, i) for i in range(2))]
    for plane in range(2):
        assert slots_of(offsets, plane) == [padded(cells) for cells in expected]
    absent = offsets[:, :, 0] < 0
    assert (offsets[:, :, 1] == np.where(absent, -1, offsets[:, :, 0] + 1)).all()


def test_the_mapping_is_by_identity_whatever_comes_goes_and_changes_its_place():
    m, context, a, b = mixed_batch()
    tables = m.create_batch_tables()
    tables.offsets([context, a, b], 1)
    context.close()
    (new,) = opened(m, 7)  # takes over the sequence and the pages of `context`
    assert slots_of(tables.offsets([b, new, a], 0)) == [
        padded(cells, 4) for cells in (row(b), row(b, 1), row(new), row(a), row(a, 1), row(a, 2))
    ]
    assert slots_of(tables.offsets([a, b], 2)) == [padded(row(a), 4), padded(row(b), 4)]
    with pytest.raises(ValueError, match="open"):
        tables.offsets([context])


def test_a_cross_cache_repeats_its_row_for_every_beam_of_the_decoder():
    cross = opaque_manager(16)
    a, b, c = opened(cross, 6, 9, 4)
    tables = cross.create_batch_tables()
    for widths, repeats in ((3, [1, 3, 3]), ([2, 4], [1, 2, 4])):
        offsets = tables.offsets([c, a, b], 1, widths)
        rows = [row(kv) for kv, n in zip((c, a, b), repeats, strict=True) for _ in range(n)]
        assert slots_of(offsets) == [padded(cells, 4) for cells in rows]


def test_what_is_no_page_and_what_lies_beyond():
    m, context, a, b = mixed_batch()
    tables = m.create_batch_tables()
    assert (tables.offsets([b], no_page=0)[0, :, :, 3:] == 0).all()
    first = tables.offsets([b])
    assert not np.shares_memory(first, tables.offsets([b]))
    out = np.full((1, 5, 2, 10), 77, np.int32)
    assert tables.offsets([b], out=out) is out
    assert out[:, :2, :, :4].tolist() == first.tolist()
    assert (out[:, 2:] == -1).all()
    assert (out[..., 4:] == -1).all()
    assert tables.offsets([]).shape == (1, 0, 2, 0)
    tables.offsets([context, a], out=out)
    assert slots_of(out)[4] == [-1] * 10


def test_rows_the_host_does_not_know_are_not_shown():
    s = Search(3, (6,), (3,), slots=24)
    tables = s.m.create_batch_tables()
    gate = Gate()
    s.stream.wait(gate)
    s.step([2, 0, 0])
    with pytest.raises(ParentsPending, match="settle"):
        tables.offsets(s.kvs)
    gate.open()
    s.kvs[0].settle()
    expected = [[4 * slot for slot in row(s.kvs[0], beam)] for beam in range(3)]
    assert tables.offsets(s.kvs)[0, :, 0, :2].tolist() == expected


def test_wrong_calls():
    m, context, a, b = mixed_batch()
    tables = m.create_batch_tables()
    idle = m.create_kv_cache()
    small = np.zeros((1, 2, 2, 8), np.int32)
    calls = [
        (lambda: tables.offsets([a, b], 0, 3), ValueError, r"beam_width: .*kv_caches\[1\], 2"),
        (lambda: tables.offsets([a, b], 0, [3, 1]), ValueError, "beam_width"),
        (lambda: tables.offsets([a, b], 0, [3]), ValueError, "2 entries"),
        (lambda: tables.offsets([a, b], 3), ValueError, "num_contexts"),
        (lambda: tables.offsets([a, a]), ValueError, "distinct"),
        (lambda: tables.offsets([idle]), ValueError, "active"),
        (lambda: tables.offsets([a], no_page=5), ValueError, "no_page"),
        (lambda: tables.offsets([a], out=small), ValueError, "out: expected .*at least 3, 2"),
        (lambda: tables.offsets([a], out=small[0]), TypeError, "four dimensions"),
        (lambda: tables.offsets([a], out=small.astype(np.int64)), TypeError, "int32"),
        (lambda: m.create_batch_tables(("key", "scale")), ValueError, "in one pool"),
        (lambda: m.create_batch_tables(("scale", "key")), ValueError, "that a layer has"),
        (lambda: m.create_batch_tables(("key",)), ValueError, "two roles"),
        (lambda: m.create_batch_tables((1, 2)), TypeError, "roles"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert small.sum() == 0
    assert context.is_open
