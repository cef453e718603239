"""Paths on a GPU: long ones, steps from a captured graph, and whole searches through them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.battery_paths import (
    batch_of,
    check_step,
    expect_step,
    put_paths,
    random_cells,
    random_requests,
    take,
)
from tests.gpu import tools
from tests.test_indirection import Indirect, check_all


@pytest.mark.parametrize("width", [2, 4, 8, 31, 128, 3_000])
def test_long_paths(rig, width):
    for _ in range(2):
        widths = [width] * (6 if width < 1_000 else 1)
        requests = random_requests(rig, widths, sum(widths) + 5, 4_000 if width < 1_000 else 130)
        check_step(rig, random_cells(rig, sum(widths) + 5, 4_000 if width < 1_000 else 130),
                   requests)  # fmt: skip


def test_captured_paths_replay_with_other_parents_and_positions(rig):
    requests = random_requests(rig, [4, 3, 1, 2], 15, 90)
    expected = random_cells(rig, 15, 90)
    cells, batch = rig.put(expected), batch_of(requests)
    beams, parents = put_paths(rig, batch), rig.put(batch["parents"])

    def work(stream):
        rig.device.step_paths(cells, beams, parents, stream=stream)

    rig.stream.synchronize()
    on = tools.capturable(rig.device)
    graph, stream = tools.Graph(rig.device, work, on), rig.device.stream(on)
    for _ in range(8):
        for request in requests:
            request.parents = rig.rng.integers(-1, len(request.rows) + 1, len(request.rows))
            request.base, request.own, request.valid = sorted(rig.rng.integers(0, 95, 3).tolist())
        batch = batch_of(requests)
        for name, array in zip(batch, (*beams[:6], parents), strict=True):
            rig.device.from_host(batch[name], array, stream=stream)
        graph.launch()
        stream.synchronize()
        expected = expect_step(expected, requests)
        np.testing.assert_array_equal(rig.get(cells), expected)
    assert take(rig, cells, batch, 5).shape == (12, 5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_whole_searches_through_paths(rig, seed, layout):
    s = Indirect(seed, (8, 5, 7), (4, 1, 3), layout, device=rig.device, slots=8192)
    for step in range(40):
        s.step(s.random())
        if step % 13 == 12:
            s.right()
            check_all(s)
    for kv in s.kvs:
        kv.settle()
    s.kvs[0].collapse(2)
    s.seen[0], s.widths = [s.seen[0][2]], (1, 1, 3)
    s.right()
    check_all(s)
    for kv in s.kvs:
        kv.close()
    s.m.shutdown()
