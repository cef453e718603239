"""Tables for kernels of others on a GPU: behind beam steps, and from captured graphs."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.base import PageNumbers, RowRanges
from tests.gpu import tools
from tests.gpu.test_beams import busy, search  # noqa: F401 - a fixture
from tests.helpers import opaque_manager, opened
from tests.page_formats import BOTH, FINER, PLAIN, Member, drawn, expect, make, prepare
from tests.test_batch_tables import mixed_config
from tests.test_step_beams import Search


def settled_offsets(s: Search, tables: k.BatchTables, chosen: list[k.KVCache]) -> np.ndarray:
    """What the host says when it knows the rows."""
    for kv in chosen:
        kv.settle()
    return tables.offsets(chosen)


def check_rows(found: np.ndarray, expected: np.ndarray) -> None:
    """The first rows and pages are as expected, and all others are none."""
    _, rows, _, pages = expected.shape
    np.testing.assert_array_equal(found[:, :rows, :, :pages], expected)
    assert (found[:, rows:] == -1).all()
    assert (found[:, :, :, pages:] == -1).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("again", [False, True])
def test_offsets_follow_beam_steps_on_changing_streams(search, seed, again):  # noqa: F811
    """Read at once after the step, or with the next one prepared."""
    s = search(seed, (6, 9, 2), (4, 3, 1))
    tables, streams = s.m.create_batch_tables(), [s.device.create_stream() for _ in range(3)]
    for step in range(18):
        for stream in (s.stream, *streams):
            busy(s, stream)
        s.step(s.random(), stream=streams[step % 3])
        if again:
            assert s.m.advance(s.kvs, 1, block=True)
            s.batch.prepare(s.kvs, 1)
        reader = streams[(step + 1) % 3]
        got = s.batch.block_offsets(tables, stream=reader)
        expected = settled_offsets(s, tables, s.kvs)
        np.testing.assert_array_equal(s.device.to_host(got, stream=reader), expected)
    s.right()


def test_captured_offsets_replay_with_other_rows_and_parents(search):  # noqa: F811
    """A beam step and the table of its outcome in one graph, for any requests and lengths."""
    s = search(3, (6, 9, 1, 13), (4, 3, 1, 5))
    on = tools.capturable(s.device)
    stream, rows = s.device.stream(on), sum(s.widths) + 3
    batch, tables = s.m.create_batch(rows, rows), s.m.create_batch_tables()
    out = s.device.empty(tables.shape(rows, 40), np.int32)
    parents, graph = s.device.empty((rows,), np.int32), None

    def work(stream):
        s.m.step_beams(batch, parents)
        batch.block_offsets(tables, out=out)

    for _ in range(24):
        count = 1 + int(s.rng.integers(0, 4))
        chosen = [s.kvs[int(i)] for i in s.rng.permutation(4)[:count]]
        assert s.m.advance(chosen, 1, block=True)
        batch.prepare(chosen, 1, stream=stream)
        drawn = s.rng.integers(-1, 5, rows).astype(np.int32)
        s.device.from_host(drawn, parents, stream=stream)
        if graph is None:
            graph = tools.Graph(s.device, work, on)
        graph.launch()
        batch.finish(parents, stream=stream)
        found = s.device.to_host(out, stream=stream)
        check_rows(found, settled_offsets(s, tables, chosen))
        s.end_step(chosen)


def test_captured_offsets_replay_with_other_widths_of_the_decoder(device, monkeypatch):
    """A cross cache's rows are repeated as the last `prepare` says."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    on = tools.capturable(device)
    stream = device.stream(on)
    cross = opaque_manager(32, device=device)
    caches = cross.create_kv_caches([None] * 4)
    for kv, capacity in zip(caches, (6, 9, 4, 30), strict=True):
        assert kv.resume(stream)
        assert kv.resize(capacity)
    tables, batch = cross.create_batch_tables(), cross.create_batch(4, 4, max_table_rows=20)
    out = device.empty(tables.shape(20, 8), np.int32)
    graph, rng = None, np.random.default_rng(2)
    for step in range(12):
        chosen = [caches[int(i)] for i in rng.permutation(4)[: 1 + step % 4]]
        contexts = int(rng.integers(0, len(chosen) + 1))
        widths = rng.integers(1, 6, len(chosen) - contexts).tolist()
        batch.prepare(chosen, 1, start=[0] * len(chosen), num_contexts=contexts, beam_width=widths)
        if graph is None:
            graph = tools.Graph(device, lambda _: batch.block_offsets(tables, out=out), on)
        graph.launch()
        expected = tables.offsets(chosen, contexts, widths)
        check_rows(device.to_host(out, stream=stream), expected)
    cross.close_kv_caches(caches)
    cross.shutdown()


def test_offsets_of_pools_of_several_sizes(device, monkeypatch):
    """Pages finer than a block among them; all pools in one launch."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    stream = device.create_stream()
    m = k.KVCacheManager(mixed_config(), device=device, stream=stream)
    caches = opened(m, 5, 9)
    batch, tables = m.create_batch(2, 2), m.create_batch_tables()
    batch.prepare(caches, 1, start=[0, 0])
    found = device.to_host(batch.block_offsets(tables), stream=stream)
    np.testing.assert_array_equal(found, tables.offsets(caches))
    m.close_kv_caches(caches)
    m.shutdown()


# -- pages up to the tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_pages_follow_beam_steps_on_changing_streams(search, seed):  # noqa: F811
    s = search(seed, (6, 9), (4, 3))
    streams = [s.device.create_stream() for _ in range(3)]
    for step in range(12):
        for stream in (s.stream, *streams):
            busy(s, stream)
        s.step(s.random(), stream=streams[step % 3])
        reader, lens = streams[(step + 1) % 3], s.batch.kv_lens.tolist()
        csr = s.batch.csr_pages(0, layout="NHD", stream=reader)
        found = s.device.to_host(csr.kv_indices, stream=reader).tolist()
        for kv in s.kvs:
            kv.settle()
        members = [Member(kv, 0, lens[i]) for kv, i in zip(s.kvs, (0, 4), strict=True)]
        rows, _ = expect(s.m, members, 0, "key", None)
        assert found == [page for row in rows for page in row.pages]
    s.right()


SHARED = k.PageIndexMode.SHARED


class Captured:
    """Every format up to the tokens, for up to 20 rows and 120 tokens, in one graph."""

    def __init__(self, device):
        self.device, self._on, self._graph = device, tools.capturable(device), None
        self.stream, self.m = device.stream(self._on), make(4, device)
        self.batch = self.m.create_batch(20, 120)
        shapes = (20, 32), (21,), (20,), (1,)
        self.csr = [device.empty((n,), np.int32) for n in (21, 400, 20)]
        self.ragged = [device.empty(shape, np.int32) for shape in shapes]
        self.slots = device.empty((120,), np.int64)

    def work(self, stream):
        batch, finer = self.batch, {"layout": "NHD", "mode": SHARED}
        batch.csr_pages(PLAIN, layout="NHD", out=self.csr)
        batch.ragged_pages(FINER, BOTH, no_page=-1, out=self.ragged, **finer)
        batch.slot_mapping(FINER, out=self.slots, **finer)

    def replay(self, members):
        prepare(self.batch, members, stream=self.stream)
        self.device.fill_words(self.csr[1], 77, stream=self.stream)
        if self._graph is None:
            self._graph = tools.Graph(self.device, self.work, self._on)
        self._graph.launch()

    def host(self, array):
        return self.device.to_host(array, stream=self.stream).tolist()

    def check(self, members):
        """Rows beyond the present ones are padding."""
        rows, _ = expect(self.m, members, PLAIN, "key", None)
        spare, pages = [0] * (20 - len(rows)), [page for row in rows for page in row.pages]
        assert self.host(self.csr[0]) == self.batch.host_indptr(rows=20).tolist()
        assert self.host(self.csr[1]) == pages + [77] * (400 - len(pages))
        last = [row.tokens - 4 * (len(row.pages) - 1) if row.tokens else 0 for row in rows]
        assert self.host(self.csr[2]) == last + spare
        rows, _ = expect(self.m, members, FINER, "key", SHARED)
        filled = [row.pages + [-1] * (32 - len(row.pages)) for row in rows]
        dense, bounds, lens, count = map(self.host, self.ragged)
        assert dense == filled + [[-1] * 32 for _ in spare]
        assert bounds == np.cumsum([0, *(len(row.places) for row in rows), *spare]).tolist()
        assert (lens, count) == ([row.tokens for row in rows] + spare, [len(rows)])
        places = [place for row in rows for place in row.places]
        assert self.host(self.slots) == places + [-1] * (120 - len(places))


def test_captured_formats_replay_with_other_rows_and_lengths(device, monkeypatch):
    """For batches of any beams."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    captured, rng = Captured(device), np.random.default_rng(4)
    for count in (3, 1, 5, 2, 4):
        members = drawn(captured.m, rng, count, captured.stream)
        captured.replay(members)
        captured.check(members)
        captured.m.close_kv_caches([its.kv for its in members])
    captured.m.shutdown()


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("longest", [1, 0])
def test_a_hundred_thousand_indices(rig, longest):
    """256 sequences of 8,192 tokens in blocks of 16, or of any number of tokens up to that."""
    rng, rows, blocks = rig.rng, 256, 600
    table = rng.permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
    order = rng.permutation(rows).astype(np.int32)
    tokens = np.full(rows, 8_192) if longest else rng.integers(0, 8_193, rows)
    counts = np.minimum(tokens, rng.integers(1, 4, rows))
    ids = order, tokens - counts, np.cumsum(counts)
    ranges = RowRanges(*(rig.put(its, np.int32) for its in ids))
    pages = -(-tokens // 16)
    csr = [rig.put(np.full(n, 77, np.int32)) for n in (rows + 1, int(pages.sum()) + 9, rows)]
    how = {"numbers": PageNumbers(), "page_tokens": 16, "stream": rig.stream}
    rig.device.csr_pages(rig.put(table), ranges, *csr, **how)
    indptr, indices, last = map(rig.get, csr)
    np.testing.assert_array_equal(indptr, np.cumsum([0, *pages]))
    lists = [table[row, :n] for row, n in zip(order, pages, strict=True)]
    np.testing.assert_array_equal(indices, np.concatenate([*lists, np.full(9, 77)]))
    np.testing.assert_array_equal(last, tokens - 16 * (pages - (tokens > 0)))
