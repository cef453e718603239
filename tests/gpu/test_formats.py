"""Tables for kernels of others on a GPU: behind beam steps, and from captured graphs."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from tests.gpu import tools
from tests.gpu.test_beams import busy, search  # noqa: F401 - a fixture
from tests.helpers import opaque_manager, opened
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
