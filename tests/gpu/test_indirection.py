"""Indirections on a GPU: long ones, and steps from a captured graph."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.battery_indirection import check_indirection, expect_indirection, wild
from tests.gpu import tools


@pytest.mark.parametrize("beams", [2, 4, 8, 31, 128])
def test_long_indirections(rig, beams):
    for _ in range(3):
        starts, ends = rig.rng.integers(0, 4_000, (2, 6)).tolist()
        widths = rig.rng.integers(0, beams + 2, 6).tolist()
        check_indirection(rig, (6, beams, 4_000), wild(rig, 6, beams), starts, ends, widths)


def test_captured_indirections_replay_with_other_parents_and_positions(rig):
    shape = requests, beams, positions = 5, 4, 90
    expected = rig.rng.integers(0, beams, shape).astype(np.int32)
    cells, parents = rig.put(expected), rig.put(np.zeros((requests, beams), np.int32))
    lists = [rig.put(np.zeros(requests, np.int32)) for _ in range(3)]

    def work(stream):
        starts, ends, widths = lists
        rig.device.step_indirection(cells, parents, starts, ends, widths=widths, stream=stream)

    rig.stream.synchronize()
    on = tools.capturable(rig.device)
    graph, stream = tools.Graph(rig.device, work, on), rig.device.stream(on)
    for step in range(8):
        given = wild(rig, requests, beams)
        values = [[3, 0, 50, 7, 9], [20 + step, 1, 60 + 5 * step, -1, positions], [4, 3, 2, 4, 1]]
        for those, array in zip(values, lists, strict=True):
            rig.device.from_host(np.array(those, np.int32), array, stream=stream)
        rig.device.from_host(given, parents, stream=stream)
        graph.launch()
        stream.synchronize()
        expected = expect_indirection(expected, given, *values)
        np.testing.assert_array_equal(rig.get(cells), expected)
