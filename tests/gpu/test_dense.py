"""Dense rows permuted in place on a GPU: large rows, wild parents, captured graphs."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import permute_dense
from tests.device.battery_dense import Dense, random_parents
from tests.gpu import tools


@pytest.mark.parametrize("width", [2, 3, 4, 7, 8, 16, 17, 32, 100])
def test_random_dense_steps(rig, width):
    """Rows of several blocks of the grid each; every byte, guards included."""
    rows = 3 * width
    dense = Dense(rig)
    for _ in range(4):
        dense.add((rows, 2, 24, 64), gap=64)
    dense.add((rows, 3, 24, 5), 1)
    starts = [0, width, 2 * width, rows]
    for step in range(4):
        parents = random_parents(rig, [width] * 3)
        counts = rig.rng.integers(-1, 26, 3).tolist()
        dense.permute(parents, width, **{"tokens": counts} if step % 2 else {})
        dense.expect(parents, starts, counts if step % 2 else None)
    dense.check()


@pytest.mark.parametrize("widths", [[4, 2, 3], [30, 9, 17]])
def test_a_captured_permutation_replays_with_other_parents(rig, widths):
    """Also with other widths and other numbers of tokens: all of it is on the device."""
    rows, width = sum(widths), max(widths)
    dense = Dense(rig).add((rows, 2, 6, 16)).add((rows, 2, 6, 16)).add((rows, 1, 6, 5), 4)
    parents, tokens = rig.put(np.zeros(rows, np.int32)), rig.put(np.zeros(3, np.int32))
    starts = rig.put(np.zeros(4, np.int32))

    def work(stream):
        rig.device.permute_rows(
            dense.views, parents, width=width, starts=starts, tokens=tokens, stream=stream
        )

    rig.stream.synchronize()
    on = tools.capturable(rig.device)
    graph, stream = tools.Graph(rig.device, work, on), rig.device.stream(on)
    for _ in range(6):
        now = rig.rng.permutation(widths).tolist()
        given, counts = random_parents(rig, now), rig.rng.integers(0, 8, 3).tolist()
        begins = np.cumsum([0, *now]).tolist()
        for values, array in ((given, parents), (counts, tokens), (begins, starts)):
            rig.device.from_host(np.array(values, np.int32), array, stream=stream)
        graph.launch()
        stream.synchronize()
        dense.expect(given, begins, counts)
        dense.check()


def test_permute_dense_takes_an_engines_arrays(rig):
    dense = Dense(rig).add((8, 2, 5, 8)).add((8, 2, 5, 8))
    parents = rig.put([1, 0, 3, 3, 2, 2, 0, 1], np.int32)
    permute_dense(rig.device, dense.views, parents, width=4, stream=rig.stream.handle)
    dense.expect([1, 0, 3, 3, 2, 2, 0, 1], [0, 4, 8])
    dense.check()
    with pytest.raises(ValueError, match="stream"):
        permute_dense(rig.device, dense.views, parents, width=4)
