"""Layout: groups, pools, offsets, page indices, aggregation and token geometry, in numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManagerConfig,
    SsmLayerConfig,
)
from kvcore.ids import PageIndexMode
from kvcore.layout import (
    PageGeometry,
    PageIndexConverter,
    aggregate,
    build_layout,
    page_geometry,
)

KIB = 1024
SHARED, PER_LAYER = PageIndexMode.SHARED, PageIndexMode.PER_LAYER


def attention(layer_id, *buffers, window=None, sinks=None, kind="mha"):
    """A layer of (role, size[, override]) buffers."""
    return AttentionLayerConfig(
        layer_id=layer_id,
        buffers=[
            BufferConfig(role=role, size=size, tokens_per_block_override=(rest or [None])[0])
            for role, size, *rest in buffers
        ],
        sliding_window_size=window,
        num_sink_tokens=sinks,
        kind=kind,
    )


def kv(layer_id, size=64 * KIB, **kw):
    return attention(layer_id, ("key", size), ("value", size), **kw)


def layout(*layers, tokens_per_block=32):
    has_states = any(isinstance(layer, SsmLayerConfig) for layer in layers)
    return build_layout(
        KVCacheManagerConfig(
            tokens_per_block=tokens_per_block,
            cache_tiers=[GpuCacheTierConfig(quota=1 << 30)],
            layers=layers,
            commit_min_snapshot=has_states,
        )
    )


def test_four_equal_buffers_share_a_pool():
    made = layout(kv(0), kv(2))
    assert [group.slot_bytes for group in made.pool_groups] == [(256 * KIB,)]
    assert made.layer_groups[0].layer_ids == (0, 2)
    places = [made.place(layer, role) for layer in (0, 2) for role in ("key", "value")]
    assert [p.offset for p in places] == [0, 64 * KIB, 128 * KIB, 192 * KIB]
    assert [p.layer_offset for p in places] == [0, 1, 2, 3]
    assert {p.scale for p in places} == {4}
    assert {p.page_stride for p in places} == {64 * KIB}
    last = places[-1]
    assert last.upper_bound(1000) == 3997
    convert = made.converter(2, "value")
    assert convert([7], SHARED).tolist() == [28]
    assert convert([7], PER_LAYER).tolist() == [31]


def test_an_override_expands_pages():
    made = layout(attention(0, ("key", 16 * KIB, 8)))
    place = made.place(0, "key")
    assert (place.expansion, place.stored_bytes, place.page_stride) == (4, 64 * KIB, 16 * KIB)
    assert made.pool_groups[0].slot_bytes == (64 * KIB,)
    assert place.upper_bound(10) == 40


def test_expanded_upper_bound_and_indices():
    made = layout(
        attention(0, ("key", 16 * KIB, 8), ("value", 16 * KIB, 8)),
        attention(1, ("key", 16 * KIB, 8), ("value", 64 * KIB)),
    )
    assert {made.place(*key).scale for key in made.places} == {4}
    assert made.place(1, "key").upper_bound(100) == (4 * 100 - 2) * 4
    assert made.place(1, "value").upper_bound(100) == 4 * 100 - 3
    assert made.converter(0, "key")([7], SHARED).tolist() == [112, 113, 114, 115]
    assert made.converter(1, "key")([7], PER_LAYER).tolist() == [120, 121, 122, 123]


def test_different_sizes_make_several_pools_largest_first():
    made = layout(
        attention(0, ("scales", 100), ("key", 1000), ("value", 1000)),
        attention(1, ("key", 1000), ("scales", 100), ("index", 300)),
    )
    assert made.pool_groups[0].slot_bytes == (3000, 300, 200)
    where = {key: (p.pool, p.offset, p.scale, p.layer_offset) for key, p in made.places.items()}
    assert where == {
        (0, "scales"): (2, 0, 2, 0),
        (0, "key"): (0, 0, 3, 0),
        (0, "value"): (0, 1000, 3, 1),
        (1, "key"): (0, 2000, 3, 2),
        (1, "scales"): (2, 100, 2, 1),
        (1, "index"): (1, 0, 1, 0),
    }


def test_pools_of_equal_slot_size_keep_declaration_order():
    made = layout(attention(0, ("a", 50), ("b", 100), ("c", 50)))
    assert made.pool_groups[0].slot_bytes == (100, 100)
    assert [made.place(0, role).pool for role in "abc"] == [0, 1, 0]


def test_equal_slot_sizes_share_a_pool_group_whatever_the_buffers():
    made = layout(kv(0), kv(1), kv(2, 128 * KIB, window=128))
    assert [group.slot_bytes for group in made.pool_groups] == [(256 * KIB,)]
    assert made.pool_groups[0].layer_groups == (0, 1)
    assert made.place(0, "key").scale == 4
    assert made.place(2, "key").scale == 2


def test_pool_groups_are_sorted_and_layer_groups_follow_first_appearance():
    state = SsmLayerConfig(layer_id=9, buffers=[BufferConfig(role="state", size=10)])
    made = layout(
        kv(5, 300), kv(3, 100, window=64, sinks=33), state, kv(4, 300), kv(8, 100, kind="sparse")
    )
    groups = [(g.kind, g.window, g.num_sink_blocks, g.layer_ids) for g in made.layer_groups]
    assert groups == [
        ("attention", None, 0, (5, 4)),
        ("attention", 64, 2, (3,)),
        ("ssm", None, 0, (9,)),
        ("sparse", None, 0, (8,)),
    ]
    assert [g.id for g in made.layer_groups] == [0, 1, 2, 3]
    assert [g.slot_bytes for g in made.pool_groups] == [(10,), (200,), (1200,)]
    assert [g.pool_group for g in made.layer_groups] == [2, 1, 0, 1]
    assert [g.layer_groups for g in made.pool_groups] == [(2,), (1, 3), (0,)]
    assert [made.layer_group_of(layer) for layer in (5, 3, 9, 4, 8)] == [0, 1, 2, 0, 3]
    assert list(made.places)[:3] == [(5, "key"), (5, "value"), (3, "key")]


def test_scratch_fraction_is_the_largest_part_of_a_slot():
    assert layout(kv(0), kv(1)).layer_groups[0].scratch_fraction == Fraction(1, 2)
    mixed = layout(attention(0, ("key", 100), ("value", 100)), attention(1, ("key", 100)))
    assert mixed.layer_groups[0].scratch_fraction == Fraction(2, 3)
    alone = layout(kv(0, 100), attention(1, ("key", 100), ("index", 7)))
    assert alone.layer_groups[0].scratch_fraction == 1


def test_unknown_buffers_are_named():
    made = layout(kv(0), kv(2))
    with pytest.raises(ValueError, match=r"layer: expected one of the layer ids \[0, 2\], got 1"):
        made.place(1, "key")
    with pytest.raises(ValueError, match=r"role: expected one of \['key', 'value'\] for layer 2"):
        made.place(2, "state")
    with pytest.raises(ValueError, match="layer ids"):
        made.layer_group_of(7)
    with pytest.raises(TypeError):
        made.places[0, "key"] = None


@pytest.mark.parametrize(
    ("slots", "shape"),
    [([], (0,)), ([[1, -1], [2, 3]], (2, 4)), (np.int32(5), (2,)), (np.empty((0, 3), int), (0, 6))],
)
def test_converter_shapes_and_type(slots, shape):
    got = PageIndexConverter(scale=3, layer_offset=1, expansion=2)(slots, SHARED)
    assert got.dtype == np.int32
    assert got.shape == shape


def test_converter_leaves_its_input_alone():
    slots = np.array([4, -1, 0], np.int64)
    convert = PageIndexConverter(scale=2, layer_offset=1, expansion=1)
    assert convert(slots, PER_LAYER).tolist() == [9, -1, 1]
    assert slots.tolist() == [4, -1, 0]


@given(
    st.lists(st.integers(-1, 1000), max_size=20),
    st.integers(1, 9),
    st.integers(0, 8),
    st.integers(1, 5),
)
def test_converter_equals_the_definition(slots, scale, offset, expansion):
    convert = PageIndexConverter(scale=scale, layer_offset=offset, expansion=expansion)
    for mode, added in ((SHARED, 0), (PER_LAYER, offset)):
        expected = [
            -1 if slot < 0 else (slot * scale + added) * expansion + i
            for slot in slots
            for i in range(expansion)
        ]
        assert convert(slots, mode).tolist() == expected


def test_converter_refuses_what_it_cannot_convert():
    convert = PageIndexConverter(scale=4, layer_offset=0, expansion=1)
    with pytest.raises(TypeError, match="mode: expected a PageIndexMode, got str"):
        convert([1], "shared")
    with pytest.raises(TypeError, match="slots: expected an array of integers"):
        convert([1.5], SHARED)
    with pytest.raises(TypeError, match="slots"):
        convert([True], SHARED)
    assert convert([2**29 - 1], SHARED).tolist() == [2**31 - 4]
    with pytest.raises(ValueError, match=r"page indices below 2\*\*31, got 2147483648"):
        convert([2**29], SHARED)


def summary(entries):
    return [(e.pool, e.offset, e.span, [(p.layer_id, p.role) for p in e.buffers]) for e in entries]


def test_aggregation_merges_neighbours_in_any_order():
    made = layout(kv(0), kv(1), kv(2))
    wanted = [(2, "key"), (0, "value"), (1, "key")]
    entries = aggregate(made, wanted)
    assert summary(entries) == [
        (0, 64 * KIB, 128 * KIB, [(0, "value"), (1, "key")]),
        (0, 256 * KIB, 64 * KIB, [(2, "key")]),
    ]
    assert {entry.stride for entry in entries} == {384 * KIB}
    everything = aggregate(made, reversed(made.places))
    assert summary(everything) == [(0, 0, 384 * KIB, list(made.places))]
    assert aggregate(made, []) == ()


def test_aggregation_keeps_pools_and_layer_groups_apart():
    made = layout(attention(0, ("key", 100), ("scales", 10)), kv(1, 50, window=8))
    assert [group.slot_bytes for group in made.pool_groups] == [(100,), (100, 10)]
    entries = aggregate(made, made.places)
    assert [(e.layer_group, e.pool_group, e.pool, e.span, e.stride) for e in entries] == [
        (0, 1, 0, 100, 100),
        (0, 1, 1, 10, 10),
        (1, 0, 0, 100, 100),
    ]


def test_aggregation_does_not_merge_layer_groups_that_share_pools():
    made = layout(
        attention(0, ("key", 100)),
        attention(1, ("key", 100)),
        attention(2, ("key", 100), window=8),
        attention(3, ("key", 100), window=8),
    )
    assert len(made.pool_groups) == 1
    entries = aggregate(made, [(0, "key"), (3, "key")])  # bytes [0, 100) and [100, 200)
    assert [(entry.layer_group, entry.offset) for entry in entries] == [(0, 0), (1, 100)]


def test_aggregation_refuses_unknown_and_repeated_buffers():
    made = layout(kv(0))
    with pytest.raises(ValueError, match="each buffer once, got \\(0, 'key'\\)"):
        aggregate(made, [(0, "key"), (0, "value"), (0, "key")])
    with pytest.raises(ValueError, match="role"):
        aggregate(made, [(0, "latent")])


def typed_place(shape, dtype, size, layout_name=None, override=None):
    buffer = BufferConfig(
        role="key",
        size=size,
        dtype=dtype,
        shape=shape,
        layout=layout_name,
        tokens_per_block_override=override,
    )
    made = layout(AttentionLayerConfig(layer_id=0, buffers=[buffer]))
    return made.place(0, "key")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (((8, 128), "bfloat16", 65536), (32, 65536, 1, 8, 128, 2, 2048, 256)),
        (((8, 128), "bfloat16", 65536, "HND"), (32, 65536, 1, 8, 128, 2, 256, 8192)),
        (((8, 128), "bfloat16", 16384, "NHD", 8), (8, 16384, 4, 8, 128, 2, 2048, 256)),
        (((8, 128), "bfloat16", 16384, "HND", 8), (8, 16384, 4, 8, 128, 2, 256, 2048)),
        (((576,), "float32", 73728), (32, 73728, 1, 1, 576, 4, 2304, 2304)),
        (((576,), "float32", 73728, "HND"), (32, 73728, 1, 1, 576, 4, 2304, 73728)),
        (((4, 64), "float4_e2m1fn", 4096), (32, 4096, 1, 4, 32, 1, 128, 32)),
        (((4, 64), "float4_e2m1fn", 4096, "HND"), (32, 4096, 1, 4, 32, 1, 32, 1024)),
        (((2, 3), "bool", 192), (32, 192, 1, 2, 3, 1, 6, 3)),
    ],
)
def test_geometry(place, expected):
    names = (
        "page_tokens",
        "page_bytes",
        "expansion",
        "heads",
        "dim",
        "itemsize",
        "token_stride",
        "head_stride",
    )
    want = PageGeometry(**dict(zip(names, expected, strict=True)))
    assert page_geometry(typed_place(*place), 32) == want


@pytest.mark.parametrize("layout_name", ["NHD", "HND"])
@pytest.mark.parametrize("override", [None, 8, 1])
def test_geometry_addresses_every_byte_once(layout_name, override):
    page_tokens = override or 32
    place = typed_place((3, 5), "int16", page_tokens * 30, layout_name, override)
    g = page_geometry(place, 32)
    token, head = np.arange(32)[:, None], np.arange(g.heads)
    start = token // g.page_tokens * g.page_bytes + token % g.page_tokens * g.token_stride
    every = (start + head * g.head_stride)[..., None] + np.arange(g.dim * g.itemsize)
    assert sorted(every.ravel()) == list(range(place.stored_bytes))
    order = np.arange(32 * 3)  # places of (token, head) in memory order
    if layout_name == "HND":
        order = order.reshape(-1, 3, page_tokens).swapaxes(1, 2)
    assert np.array_equal(every[..., 0], order.reshape(32, 3) * 10)


def test_opaque_buffers_have_no_geometry():
    place = layout(kv(0)).place(0, "key")
    with pytest.raises(ValueError, match=r"layer 0, buffer 'key'.*declare dtype and shape"):
        page_geometry(place, 32)
