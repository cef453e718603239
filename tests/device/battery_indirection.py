"""Battery: which beam has each position, step by step. The oracle goes cell by cell."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.battery_base import BatteryBase
from tests.device.battery_beams import PARENTS
from tests.device.harness import Rig


def expect_indirection(
    old: np.ndarray,
    parents: np.ndarray,
    starts: list[int],
    ends: list[int],
    widths: list[int] | None = None,
) -> np.ndarray:
    """The new indirection."""
    new = old.copy()
    requests, beams, positions = old.shape
    for r in range(requests):
        width = beams if widths is None else min(max(widths[r], 0), beams)
        for i in range(width) if ends[r] >= 0 else ():
            parent = parents[r, i] if 0 <= parents[r, i] < width else i
            for t in range(max(starts[r], 0), min(ends[r], positions)):
                new[r, i, t] = old[r, parent, t]
            if ends[r] < positions:
                new[r, i, ends[r]] = parent
    return new


def check_indirection(
    rig: Rig,
    shape: tuple[int, int, int],
    parents: np.ndarray,
    starts: list[int],
    ends: list[int],
    widths: list[int] | None = None,
) -> None:
    """`step_indirection` against the oracle, on a view between cells that nobody may touch."""
    requests, beams, positions = shape
    whole = rig.rng.integers(0, 99, (requests + 1, beams + 2, positions + 5)).astype(np.int32)
    on_device = rig.put(whole)
    part = np.s_[1:, 1:-1, 2:-3]
    ids = [rig.put(its, np.int32) for its in (parents, starts, ends)]
    given = None if widths is None else rig.put(widths, np.int32)
    rig.device.step_indirection(on_device[part], *ids, widths=given, stream=rig.stream)
    whole[part] = expect_indirection(whole[part], np.asarray(parents), starts, ends, widths)
    np.testing.assert_array_equal(rig.get(on_device), whole)


def wild(rig: Rig, requests: int, beams: int) -> np.ndarray:
    """Parents, some of them invalid."""
    found = rig.rng.integers(0, beams, (requests, beams))
    odd = rig.rng.random(found.shape) < 0.1
    found[odd] = rig.rng.choice([-1, beams, 2**31 - 1, -(2**31)], int(odd.sum()))
    return found.astype(np.int32)


class IndirectionTests(BatteryBase):
    """`step_indirection`."""

    @pytest.mark.parametrize("kind", PARENTS)
    @pytest.mark.parametrize("beams", [1, 2, 4, 33])
    def test_indirections_follow_their_parents(self, rig, kind, beams):
        parents = np.array([PARENTS[kind](beams)] * 2)
        check_indirection(rig, (2, beams, 20), parents, [3, 7], [11, 12])

    @pytest.mark.parametrize("positions", [1, 70, 600])
    @pytest.mark.parametrize("beams", [3, 8, 150])
    def test_positions_are_cut_to_those_there_are(self, rig, positions, beams):
        n = positions
        starts = [0, -5, n // 2, n, 2, 0, 5, 0, -(2**31)]
        ends = [n // 2, n - 1, n, n + 9, -1, 0, 1, 2**31 - 1, -(2**31)]
        check_indirection(rig, (9, beams, n), wild(rig, 9, beams), starts, ends)

    def test_requests_of_fewer_beams(self, rig):
        parents = wild(rig, 5, 6)
        widths = [6, 2, 0, 99, -3]
        check_indirection(rig, (5, 6, 40), parents, [1] * 5, [30] * 5, widths)

    def test_a_step_after_the_other_gives_the_histories(self, rig):
        """Reading through it finds, for each position, the beam that wrote it."""
        requests, beams, positions = 3, 4, 30
        shape = requests, beams, positions
        found = rig.put(np.zeros(shape, np.int32))
        histories = np.zeros(shape, np.int32)
        starts = np.array([5, 0, 9], np.int32)
        for step in range(15):
            parents, ends = wild(rig, requests, beams), starts + step
            ids = [rig.put(its, np.int32) for its in (parents, starts, ends)]
            rig.device.step_indirection(found, *ids, stream=rig.stream)
            own = np.broadcast_to(np.arange(beams), (requests, beams))
            chosen = np.where((parents >= 0) & (parents < beams), parents, own)
            for r in range(requests):
                histories[r, :, ends[r]] = own[r]
                histories[r] = histories[r][chosen[r]]
        for r, start in enumerate(starts):
            part = np.s_[r, :, start : start + 15]
            np.testing.assert_array_equal(rig.get(found)[part], histories[part])

    def test_indirections_of_nothing(self, rig):
        for shape in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
            parents = np.zeros(shape[:2], np.int32)
            check_indirection(rig, shape, parents, [0] * shape[0], [2] * shape[0])

    def test_wrong_indirections_are_refused(self, rig):
        cells, parents = rig.put(np.zeros((2, 3, 4), np.int32)), rig.put(np.zeros((2, 3), np.int32))
        ids, wide = rig.put([0, 0], np.int32), rig.put([0, 0], np.int64)
        usual = {"indirection": cells, "parents": parents, "starts": ids, "ends": ids}
        for wrong in (
            {"indirection": cells[0]},
            {"indirection": cells[:, :, ::2]},
            {"parents": parents[:1]},
            {"parents": ids},
            {"starts": wide},
            {"ends": ids[:1]},
            {"widths": wide},
        ):
            with pytest.raises(ValueError, match=r".*: expected"):
                rig.device.step_indirection(**usual | wrong, stream=rig.stream)
        for name in usual:
            with pytest.raises(TypeError):
                rig.device.step_indirection(**usual | {name: None}, stream=rig.stream)
