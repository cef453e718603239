"""CSR, ragged pages and slot mappings: what cannot be expressed, and what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore import PageIndexMode
from kvcore.device.simulated import SimulatedStream
from tests.helpers import opaque_manager, opened, typed_manager
from tests.page_formats import BOTH, FINER, MERGED, PLAIN, drawn, make, prepare


def test_layouts_are_declared_and_checked():
    m, hnd = make(4), make(4, layout="HND")
    opaque = opaque_manager(8)
    for manager in (m, hnd, opaque):
        batch = manager.create_batch(4, 4)
        batch.prepare(opened(manager, 4), 1, start=[0])
        csr, ragged = batch.csr_pages, batch.ragged_pages
        slots = batch.slot_mapping
        if manager is hnd:
            assert csr(PLAIN, layout="HND").kv_indices.size == 1
            calls = [(csr, (PLAIN,), "NHD", "'NHD', which the kernel reads, got 'HND'; declare"),
                     (ragged, (PLAIN, BOTH), "NH2D", "one buffer of shape .* layout='HND' for")
            ]  # fmt: skip
        elif manager is opaque:
            calls = [(csr, (0,), "NHD", "got None; declare its dtype"),
                     (slots, (0,), "HND", "layer 0, buffer 'key': layout")]  # fmt: skip
        else:
            calls = [
                (csr, (PLAIN,), "NH2D", "'NHD' or 'HND', since .*; use ragged_pages"),
                (csr, (PLAIN,), "DHN", "layout: expected one of 'NHD', 'HND', 'NH2D'"),
                (csr, (FINER,), "HND", "which the kernel reads, got 'NHD'"),
                (ragged, (MERGED, ("kv",)), "NHD", "which the kernel reads, got 'NH2D'"),
                (
                    csr,
                    (FINER,),
                    "NHD",
                    "one page a block .*, got 2; pass mode=PageIndexMode.SHARED",
                ),
            ]
        for call, args, layout, message in calls:
            with pytest.raises(ValueError, match=message):
                call(*args, layout=layout)


@pytest.mark.parametrize("shape", [(3, 8), (8,)])
def test_heads_of_keys_and_values_come_in_pairs(shape):
    size = 4 * int(np.prod(shape)) * 2
    with pytest.raises(ValueError, match=r"\(2 \* heads, dim\)"):
        k.BufferConfig(role="kv", size=size, dtype="float16", shape=shape, layout="NH2D")


def test_rows_of_an_indirection_are_refused_where_they_must_be_complete(monkeypatch):
    m, rng = make(4, beam_mode="indirection"), np.random.default_rng(2)
    everybody = drawn(m, rng, 9)
    members = [its for its in everybody if its.kv.beam_width > 1][:2]
    batch, tables = m.create_batch(12, 80), m.create_batch_tables(("kv", "kv"))
    prepare(batch, members)
    for call in (
        lambda: batch.csr_pages(PLAIN, layout="NHD"),
        lambda: batch.ragged_pages(PLAIN, BOTH, layout="NHD"),
    ):
        with pytest.raises(k.StateError, match=r"indirection.*use block_offsets\(\).*'fork'"):
            call()
    offsets = batch.block_offsets(tables)
    np.testing.assert_array_equal(offsets, tables.offsets([its.kv for its in members]))
    assert (offsets[:, :, :, 0] < 0).any()  # a beam's row lacks what it finds in beam 0's
    batch.slot_mapping(PLAIN, layout="NHD")
    assert members[0].kv.set_beam_width(1)
    prepare(batch, members[:1])
    assert batch.csr_pages(PLAIN, layout="NHD").kv_indptr.size == 2
    monkeypatch.setattr(SimulatedStream, "is_capturing", lambda self: True)
    with pytest.raises(k.StateError, match="indirection"):  # a replay may have wider rows
        batch.csr_pages(PLAIN, layout="NHD")


NHD = {"layout": "NHD"}
PER_LAYER = {"layout": "NHD", "mode": PageIndexMode.PER_LAYER}

NAMED = [
    ((9,), NHD, ValueError, "layer"),
    ((PLAIN, ["kv"]), NHD, ValueError, "role"),
    ((PLAIN, "key"), NHD, TypeError, "roles"),
    ((True,), NHD, TypeError, "layers"),
    (([],), NHD, ValueError, "at least one"),
    ((PLAIN,), {**NHD, "mode": "SHARED"}, TypeError, "PageIndexMode"),
    ((PLAIN,), PER_LAYER, ValueError, "same page numbers"),
    (([0, 3], ["key"]), PER_LAYER, ValueError, "one call for each"),
]


@pytest.mark.parametrize("call", ["csr_pages", "slot_mapping"])
@pytest.mark.parametrize(("args", "more", "error", "message"), NAMED)
def test_buffers_that_are_not_there_or_differ(call, args, more, error, message):
    m = make(4)
    batch = m.create_batch(4, 4)
    batch.prepare(opened(m, 4), 1)
    with pytest.raises(error, match=message):
        getattr(batch, call)(*args, **more)


def i32(*shape):
    return np.full(shape, 5, np.int32)


def test_wrong_arrays():
    m = make(4)
    batch, members = m.create_batch(12, 80), drawn(m, np.random.default_rng(6), 2)
    with pytest.raises(k.StateError, match="holds no step"):
        batch.csr_pages(PLAIN, **NHD)
    prepare(batch, members)
    rows, total = batch.num_rows, int(batch.host_indptr()[-1])
    columns = -(-int(batch.kv_lens.max()) // 4)
    a, b, c = good = [i32(rows + 1), i32(total), i32(rows)]
    dense = [i32(rows, columns), i32(rows + 1), i32(rows), i32(1)]
    for out, error, message in (
        (a, TypeError, "sequence of 3 arrays"),
        ([a, b], TypeError, "sequence of 3 arrays"),
        ([a, i32(total - 1), c], ValueError, "at least"),
        ([i32(rows), b, c], ValueError, "out"),
        ([a, b, i32(rows - 1)], ValueError, r"out\[2\]"),
        ([i32(14), b, i32(13)], ValueError, r"to 12\]"),
        ([a, b, c * 1.0], ValueError, "dtype"),
    ):
        with pytest.raises(error, match=message):
            batch.csr_pages(PLAIN, out=out, **NHD)
    for more, error, message in (
        ({"num_pages": columns - 1}, ValueError, "num_pages"),
        ({"no_page": 7}, ValueError, "no_page"),
        ({"out": dense[:3]}, TypeError, "4 arrays"),
        ({"out": [i32(rows, 1), *dense[1:]]}, ValueError, "out"),
        ({"out": [*dense[:3], i32(2)]}, ValueError, r"\[1\]"),
    ):
        with pytest.raises(error, match=message):
            batch.ragged_pages(PLAIN, BOTH, **NHD, **more)
    for array, message in ((np.zeros(81, np.int64), r"to 80\]"), (i32(80), "int64")):
        with pytest.raises(ValueError, match=message):
            batch.slot_mapping(PLAIN, out=array, **NHD)
    for more, message in (({"page_tokens": 0}, "page_tokens"), ({"rows": rows - 1}, "rows")):
        with pytest.raises(ValueError, match=message):
            batch.host_indptr(**more)
    assert all((its == 5).all() for its in (*good, *dense))


def test_arrays_that_must_not_be_written():
    m = make(4)
    batch, tables = m.create_batch(4, 4), m.create_batch_tables(("kv", "kv"))
    batch.prepare(opened(m, 4), 1, start=[0])

    def given(array):
        array.flags.writeable = False
        return array

    sizes = (2,), (1,), (1,), (1,)
    csr, ragged = ([given(np.zeros(s, np.int32)) for s in sizes[:n]] for n in (3, 4))
    ragged[:2] = given(np.zeros((1, 1), np.int32)), given(np.zeros(2, np.int32))
    table = given(np.zeros(tables.shape(1, 1), np.int32))
    for call in (
        lambda: batch.csr_pages(PLAIN, layout="NHD", out=csr),
        lambda: batch.ragged_pages(PLAIN, BOTH, layout="NHD", out=ragged),
        lambda: batch.slot_mapping(PLAIN, layout="NHD", out=given(np.zeros(1, np.int64))),
        lambda: batch.block_offsets(tables, out=table),
    ):
        with pytest.raises(TypeError, match="a writable array"):
            call()


def test_layers_of_one_group_have_the_same_slots():
    m = make(4)
    batch = m.create_batch(12, 80)
    prepare(batch, drawn(m, np.random.default_rng(6), 2))
    both, one = batch.csr_pages([0, 3], **NHD), batch.csr_pages(0, ["value"], **NHD)
    assert both.kv_indices.tolist() == one.kv_indices.tolist()


def test_formats_need_memory():
    m = typed_manager(device="meta")
    with pytest.raises(k.StateError, match="without memory"):
        m.create_batch(1, 1)
