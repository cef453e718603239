"""CSR, ragged pages and slot mappings: against a slow construction from the host's rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import kvcore as k
from kvcore import PageIndexMode
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import check
from tests.helpers import typed_manager
from tests.page_formats import (
    BOTH,
    FINER,
    MERGED,
    PLAIN,
    D,
    H,
    Member,
    drawn,
    expect,
    make,
    prepare,
)
from tests.test_step_beams import Search

CASES = [
    (PLAIN, BOTH, None),
    (PLAIN, BOTH, PageIndexMode.SHARED),
    (PLAIN, ("value",), PageIndexMode.PER_LAYER),
    (FINER, BOTH, PageIndexMode.SHARED),
    (FINER, ("key",), PageIndexMode.PER_LAYER),
    (MERGED, ("kv",), None),
    (MERGED, ("kv",), PageIndexMode.SHARED),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("T", [2, 4, 16])
def test_formats_of_random_batches(case, T):
    """Every format of batches of beams of several widths and of any lengths."""
    layer, roles, mode = case
    m, rng = make(T), np.random.default_rng(layer + T)
    batch, block = m.create_batch(40, 256), m.config.tokens_per_block
    order = "NH2D" if layer == MERGED else "NHD"
    how = {"layout": order, "mode": mode}
    for count in (1, 3, 7):
        members = drawn(m, rng, count)
        prepare(batch, members)
        rows, size = expect(m, members, layer, roles[0], mode)
        tokens = [row.tokens for row in rows]
        bounds = np.cumsum([0, *(len(row.pages) for row in rows)]).tolist()
        assert batch.kv_lens.tolist() == tokens
        assert batch.host_indptr(size).tolist() == bounds
        assert batch.host_indptr(rows=40).tolist()[len(rows) :] == [
            sum(-(-n // block) for n in tokens)
        ] * (41 - len(rows))

        check_ragged(batch, members, rows, layer, roles, how)
        if layer != MERGED:
            csr = batch.csr_pages(layer, roles, **how)
            assert csr.kv_indptr.tolist() == csr.host_indptr.tolist() == bounds
            assert csr.kv_indices.tolist() == [page for row in rows for page in row.pages]
            assert csr.kv_last_page_len.tolist() == [
                n - (len(row.pages) - 1) * size if n else 0
                for n, row in zip(tokens, rows, strict=True)
            ]
        m.close_kv_caches([its.kv for its in members])
    check(m)


def check_ragged(batch, members, rows, layer, roles, how):
    """Ragged pages and slots of the step's tokens."""
    new = [place for row in rows for place in row.places]
    slots = batch.slot_mapping(layer, roles, **how)
    assert (slots.tolist(), slots.dtype) == (new, np.int64)
    found = batch.ragged_pages(layer, roles, **how)
    columns = max(len(row.pages) for row in rows)
    assert found.page_indices.tolist() == [
        row.pages + [0] * (columns - len(row.pages)) for row in rows
    ]
    counts = np.repeat([its.count for its in members], [its.kv.beam_width for its in members])
    assert found.cu_q_lens.tolist() == np.cumsum([0, *counts]).tolist()
    assert found.kv_lens.tolist() == [row.tokens for row in rows]
    assert found.num_seqs.tolist() == [len(rows)]


def test_a_step_of_nothing():
    m = make(4)
    batch = m.create_batch(4, 4)
    batch.prepare([], 1)
    csr = batch.csr_pages(PLAIN, layout="NHD")
    assert [its.tolist() for its in csr] == [[0], [], [], [0]]
    ragged = batch.ragged_pages(PLAIN, BOTH, layout="NHD")
    assert [its.tolist() for its in ragged] == [[], [0], [], [0]]
    assert batch.slot_mapping(PLAIN, layout="NHD").tolist() == []


def test_arrays_for_the_largest_step_hold_smaller_ones():
    """As a graph needs them: rows beyond are padding without pages or tokens."""
    m, rng = make(4), np.random.default_rng(8)
    batch = m.create_batch(12, 80)
    csr = [np.full(n, 77, np.int32) for n in (13, 200, 12)]
    ragged = [np.full(n, 77, np.int32) for n in ((12, 20), 13, 12, 1)]
    slots = np.full(80, 77, np.int64)
    for count in (3, 1, 2):
        members = drawn(m, rng, count)
        prepare(batch, members)
        rows, _ = expect(m, members, PLAIN, "key", None)
        spare, pages = 12 - len(rows), [page for row in rows for page in row.pages]
        csr[1][:] = 77
        found = batch.csr_pages(PLAIN, layout="NHD", out=csr)
        assert all(its is own for its, own in zip(found, csr, strict=False))
        assert found.host_indptr.tolist() == csr[0].tolist() == [
            *np.cumsum([0, *(len(row.pages) for row in rows)]).tolist(), *[len(pages)] * spare
        ]  # fmt: skip
        assert csr[1].tolist() == pages + [77] * (200 - len(pages))
        assert csr[2][len(rows) :].tolist() == [0] * spare

        for no_page in (-1, 0):
            again = batch.ragged_pages(PLAIN, BOTH, layout="NHD", out=ragged, no_page=no_page)
            assert all(its is own for its, own in zip(again, ragged, strict=True))
            expected = [row.pages + [no_page] * (20 - len(row.pages)) for row in rows]
            assert ragged[0].tolist() == expected + [[no_page] * 20] * spare
            assert ragged[1][len(rows) :].tolist() == [batch.num_tokens] * (spare + 1)
            assert ragged[2].tolist() == [row.tokens for row in rows] + [0] * spare
            assert ragged[3].tolist() == [len(rows)]
        assert batch.slot_mapping(PLAIN, layout="NHD", out=slots) is slots
        new = [place for row in rows for place in row.places]
        assert slots.tolist() == new + [-1] * (80 - len(new))
        m.close_kv_caches([its.kv for its in members])
    prepare(batch, drawn(m, rng, 2))
    found = batch.ragged_pages(PLAIN, BOTH, layout="NHD", num_pages=19)
    assert found.page_indices.shape == (batch.num_rows, 19)


# -- what the indices lead to ----------------------------------------------------------------------


def pages_at(m: k.KVCacheManager, layer: int, role: str, mode: PageIndexMode) -> np.ndarray:
    """The pages that indices of a mode count, `[pages, tokens, heads, dim]`, in place."""
    place = m.layout.place(layer, role)
    heads, dim = place.buffer.shape
    tokens = m.config.tokens_per_block // place.expansion
    stride = m.get_page_stride(layer, role)
    assert stride == tokens * heads * dim * 2
    slots = m.pool_group_descs[place.pool_group].num_slots
    count = place.scale * slots * place.expansion
    if mode is PageIndexMode.SHARED:
        count = m.get_page_index_upper_bound(layer, role)
    base = m.get_mem_pool_base_address(layer, role, mode)
    raw = (ctypes.c_uint8 * (count * stride)).from_address(base)
    return np.frombuffer(raw, np.float16).reshape(count, tokens, heads, dim)


@pytest.mark.parametrize("case", CASES)
def test_the_indices_lead_to_the_tokens(case):
    """Every token of every beam, through each format, is the one that was appended."""
    layer, roles, mode = case
    m, rng = make(4), np.random.default_rng(5)
    members = [its._replace(start=0, count=its.kv.capacity) for its in drawn(m, rng, 5)]
    batch, layout = m.create_batch(40, 800), "NH2D" if layer == MERGED else "NHD"
    for its in members:  # beams share pages, so all of a cache write the same
        prepare(batch, [its])
        shape = its.count, *m.layout.place(layer, roles[0]).buffer.shape
        new = np.tile(rng.standard_normal(shape), (its.kv.beam_width, 1, 1)).astype(np.float16)
        batch.append(layer, {role: new + i for i, role in enumerate(roles)})
    prepare(batch, members)
    dense = batch.gather(layer, roles)
    ragged = batch.ragged_pages(layer, roles, layout=layout, mode=mode)
    slots = batch.slot_mapping(layer, roles, layout=layout, mode=mode)
    for role, expected in zip(roles, dense, strict=True):
        pages = m.get_pages(layer, role) if mode is None else pages_at(m, layer, role, mode)
        lists = zip(ragged.page_indices, ragged.kv_lens, strict=True)
        rows = [pages[its].reshape(-1, *pages.shape[2:])[:n] for its, n in lists]
        np.testing.assert_array_equal(np.concatenate(rows), expected)
        page, token = np.divmod(slots, pages.shape[1])
        np.testing.assert_array_equal(pages[page, token], expected)
        if layer != MERGED:
            csr = batch.csr_pages(layer, roles, layout=layout, mode=mode)
            for i, n in enumerate(batch.kv_lens.tolist()):
                mine = csr.kv_indices[csr.kv_indptr[i] : csr.kv_indptr[i + 1]]
                assert n == (len(mine) - 1) * pages.shape[1] + csr.kv_last_page_len[i]
                np.testing.assert_array_equal(
                    pages[mine].reshape(-1, *pages.shape[2:])[:n], rows[i]
                )


def test_jax_reads_what_ragged_pages_says():
    """JAX's own reference of its ragged paged attention, over mixed prompts and beams."""
    pytest.importorskip("jax", reason="needs jax")
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_kernels

    rng = np.random.default_rng(3)
    m = make(4)
    members = [its._replace(start=0, count=its.kv.capacity) for its in drawn(m, rng, 3)]
    batch = m.create_batch(16, 400)
    for its in members:
        prepare(batch, [its])
        new = rng.standard_normal((its.count, 2 * H, D)).astype(np.float16)
        batch.append(MERGED, {"kv": np.tile(new, (its.kv.beam_width, 1, 1))})
    members = [its._replace(start=its.count - 2, count=2) for its in members]
    prepare(batch, members)
    ragged = batch.ragged_pages(MERGED, ["kv"], layout="NH2D", num_pages=16)
    queries = rng.standard_normal((batch.num_tokens, 2 * H, D)).astype(np.float16)
    found = jax_kernels.ref_ragged_paged_attention(
        queries, np.ascontiguousarray(m.get_pages(MERGED, "kv")), ragged.kv_lens,
        ragged.page_indices, ragged.cu_q_lens, ragged.num_seqs,
    )  # fmt: skip
    batch.prepare([its.kv for its in members], [its.start + 2 for its in members],
                  start=[0] * len(members))  # fmt: skip
    (dense,) = batch.gather(MERGED, ["kv"])
    histories = np.split(dense.astype(np.float32), np.cumsum(batch.kv_lens)[:-1])
    for row, history in enumerate(histories):
        for i in range(2):
            seen = history[: len(history) - 1 + i]
            for head in range(2 * H):
                key, value = seen[:, head // 2 * 2], seen[:, head // 2 * 2 + 1]
                score = key @ queries[2 * row + i, head].astype(np.float32)
                weight = np.exp(score - score.max())
                expected = weight @ value / weight.sum()
                np.testing.assert_allclose(found[2 * row + i, head], expected, atol=2e-2)


# -- beams whose parents are on the device ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("again", [False, True])
def test_pages_of_beams_the_host_does_not_know(seed, again):
    s = Search(seed, (6, 3), (3, 2), slots=64)
    other = s.device.create_stream()
    for _ in range(4):
        s.step(s.random())
    gate = Gate()
    s.stream.wait(gate)
    s.step(s.random())
    if again:
        assert s.m.advance(s.kvs, 1)
        s.batch.prepare(s.kvs, 1)
    lens = s.batch.kv_lens.tolist()
    csr = s.batch.csr_pages(0, layout="NHD", stream=other)
    ragged = s.batch.ragged_pages(0, BOTH, layout="NHD", stream=other)
    table = s.batch.page_table(0, stream=other)
    gate.open()
    for kv in s.kvs:
        kv.settle()
    members = [Member(kv, 0, lens[i]) for kv, i in zip(s.kvs, (0, 3), strict=True)]
    rows, _ = expect(s.m, members, 0, "key", None)
    found = s.device.to_host(csr.kv_indices, stream=other).tolist()
    assert found == [page for row in rows for page in row.pages]
    dense = s.device.to_host(ragged.page_indices, stream=other).tolist()
    columns = max(len(row.pages) for row in rows)
    assert dense == [row.pages + [0] * (columns - len(row.pages)) for row in rows]
    cells = s.device.to_host(table, stream=other).tolist()
    beams = [kv.get_base_page_indices(0, i) for kv in s.kvs for i in range(kv.beam_width)]
    assert [its[: len(own)] for its, own in zip(cells, beams, strict=True)] == [
        own.tolist() for own in beams
    ]
    if not again:
        with pytest.raises(k.StateError, match="prepare"):
            s.batch.slot_mapping(0, layout="NHD")  # its tokens are in other rows now


@pytest.mark.parametrize("seed", range(8))
def test_lists_are_made_before_pages_change_hands(seed):
    """On a stream of their own, while another cache takes pages and rows over."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=8, device=device)
    main, side, third = (device.create_stream() for _ in range(3))
    batch, later = m.create_batch(2, 12), m.create_batch(2, 8)
    first = m.create_kv_cache()
    assert first.resume(main)
    assert first.resize(12)
    batch.prepare([first], 12)
    rows, _ = expect(m, [Member(first, 0, 12)], 0, "key", None)
    csr = batch.csr_pages(0, layout="NHD", stream=side)
    slots = batch.slot_mapping(0, layout="NHD", stream=side)
    first.close()
    second = m.create_kv_cache()
    assert second.resume(third)
    assert second.resize(20)
    later.prepare([second], 4)
    assert device.to_host(csr.kv_indices, stream=side).tolist() == rows[0].pages
    assert device.to_host(slots, stream=side).tolist() == rows[0].places
    device.drain()
