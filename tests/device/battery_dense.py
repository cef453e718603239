"""Battery: rows of dense arrays in the order of their parents. The oracle goes row by row."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvcore.device.beams import MAX_BEAMS
from tests.device.battery_base import BatteryBase
from tests.device.battery_beams import PARENTS
from tests.device.harness import Rig


@dataclass
class Dense:
    """Arrays between rows that nobody may touch, and what they should hold."""

    rig: Rig
    wholes: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    expected: list[np.ndarray] = field(default_factory=list)

    def add(self, shape: tuple[int, ...], itemsize: int = 2, gap: int = 0) -> Dense:
        """An array `shape`, in one with a row more on both sides and `gap` items between rows."""
        width = int(np.prod(shape[1:])) + gap
        whole = self.rig.random((shape[0] + 2, width), itemsize)
        on_device = self.rig.put(whole)
        cut = on_device[1:-1, gap:]
        self.wholes.append(on_device)
        self.views.append(cut.reshape(shape) if not gap else _split(cut, shape))
        self.expected.append(whole)
        return self

    def expect(
        self, parents: list[int], starts: list[int], counts: list[int] | None = None, axis: int = 2
    ) -> None:
        """Moves what should move."""
        for whole, view in zip(self.expected, self.views, strict=True):
            rows = whole[1:-1, whole.shape[1] - int(np.prod(view.shape[1:])) :]
            old = rows.reshape(view.shape).copy()
            new = old.copy()
            for request, (first, end) in enumerate(pairwise(starts)):
                for i in range(first, end):
                    parent = first + parents[i] if 0 <= parents[i] < end - first else i
                    cut = [slice(None)] * (view.ndim - 1)
                    if counts is not None:
                        cut[axis - 1] = slice(0, max(counts[request], 0))
                    new[(i, *cut)] = old[(parent, *cut)]
            rows[...] = new.reshape(rows.shape)

    def check(self) -> None:
        """Every byte is as expected."""
        for whole, expected in zip(self.wholes, self.expected, strict=True):
            np.testing.assert_array_equal(self.rig.get(whole), expected)

    def permute(self, parents: Any, width: int, **options: Any) -> None:
        """`permute_rows` of all arrays; lists become int32 arrays of the device."""
        options = {
            name: self.rig.put(its, np.int32) if isinstance(its, list) else its
            for name, its in options.items()
        }
        self.rig.device.permute_rows(
            self.views,
            self.rig.put(parents, np.int32),
            width=width,
            stream=self.rig.stream,
            **options,
        )


def _split(rows: Any, shape: tuple[int, ...]) -> Any:
    """A view `shape` of `[rows, items]` where rows lie apart, which `reshape` would copy."""
    strides, step = [], rows.strides[1]
    for size in shape[:0:-1]:
        strides.append(step)
        step *= size
    as_strided = np.lib.stride_tricks.as_strided
    if not isinstance(rows, np.ndarray):
        import cupy

        as_strided = cupy.lib.stride_tricks.as_strided
    return as_strided(rows, shape, (rows.strides[0], *strides[::-1]))


def random_parents(rig: Rig, widths: list[int]) -> list[int]:
    """Of each row within its request, some of them invalid."""
    found = np.concatenate([rig.rng.integers(0, width, width) for width in widths])
    wild = rig.rng.random(len(found)) < 0.1
    found[wild] = rig.rng.choice([-1, max(widths), 2**31 - 1, -(2**31)], int(wild.sum()))
    return found.tolist()


class DenseTests(BatteryBase):
    """`permute_rows`."""

    @pytest.mark.parametrize("kind", PARENTS)
    @pytest.mark.parametrize("width", [1, 2, 4, 5, 16, 17, 40])
    def test_dense_rows_continue_their_parents(self, rig, kind, width):
        parents = PARENTS[kind](width) * 2
        dense = Dense(rig).add((2 * width, 2, 5, 8)).add((2 * width, 2, 5, 8))
        dense.permute(parents, width)
        dense.expect(parents, [0, width, 2 * width])
        dense.check()

    @pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("gap", [0, 3])
    def test_dense_rows_of_any_items_and_shapes(self, rig, itemsize, gap):
        """Rows of several layouts, aligned to all kinds of units, in one call."""
        for widths in ([3, 1, 4, 2], [20, 3, 7]):
            starts = np.cumsum([0, *widths]).tolist()
            dense = Dense(rig)
            for shape in ((2, 3, 8), (2, 3, 5), (2, 3, 8), (31,), ()):
                dense.add((starts[-1], *shape), itemsize, gap)
            for _ in range(3):
                parents = random_parents(rig, widths)
                dense.permute(parents, max(widths), starts=starts)
                dense.expect(parents, starts)
                dense.check()

    @pytest.mark.parametrize("axis", [1, 2, 3])
    @pytest.mark.parametrize("widths", [[2, 4, 1, 3, 4], [9, 16, 2, 1, 1], [30, 4, 21, 2, 2]])
    def test_only_the_first_tokens_move(self, rig, widths, axis):
        starts, counts = np.cumsum([0, *widths]).tolist(), [3, 0, 5, 99, -2]
        dense = Dense(rig).add((starts[-1], 4, 5, 6, 8), gap=8).add((starts[-1], 5, 7, 4), 1)
        for _ in range(2):
            parents = random_parents(rig, widths)
            counts = counts[1:] + counts[:1]
            dense.permute(parents, max(widths), starts=starts, tokens=counts, token_axis=axis)
            dense.expect(parents, starts, counts, axis)
            dense.check()

    def test_more_dense_arrays_than_one_launch_takes(self, rig):
        dense = Dense(rig)
        for _ in range(300):
            dense.add((4, 3), 4)
        dense.permute([1, 2, 3, 0], 4)
        dense.expect([1, 2, 3, 0], [0, 4])
        dense.check()

    @pytest.mark.parametrize("width", [300, 3_000])
    def test_wide_dense_requests(self, rig, width):
        dense = Dense(rig).add((width + 1, 9), 8).add((width + 1, 3), 1)
        parents = random_parents(rig, [width, 1])
        dense.permute(parents, width, starts=[0, width, width + 1])
        dense.expect(parents, [0, width, width + 1])
        dense.check()

    def test_requests_that_leave_the_rows_are_left_alone(self, rig):
        dense = Dense(rig).add((6, 16))
        parents = [1, 0, 1, 0, 1, 0]
        for starts in ([-1, 2, 9], [0, 5, 4], [4, 7, 6], [3, 3, 2**31 - 1], [2]):
            dense.permute(parents, 4, starts=starts)
            dense.check()
        dense.permute(parents, 4, starts=[0, 2, 9])
        dense.expect(parents, [0, 2])
        dense.check()

    def test_dense_permutations_of_nothing(self, rig):
        Dense(rig).permute([1, 0], 2)
        Dense(rig).add((0, 4, 4)).permute([], 3)
        Dense(rig).add((2, 0, 4)).permute([1, 0], 2)
        dense = Dense(rig).add((2, 3, 4, 1))
        dense.permute([1, 0], 2, starts=[0])
        dense.permute([1, 0], 2, tokens=[0])
        dense.check()

    def test_wrong_dense_permutations_are_refused(self, rig):
        dense = Dense(rig).add((4, 2, 3, 8))
        (array,) = dense.views
        ids, wide = rig.put([1, 0, 1, 0], np.int32), rig.put([1, 0, 1, 0], np.int64)
        usual = {"arrays": [array], "parents": ids, "width": 2, "stream": rig.stream}
        for wrong in (
            {"arrays": [array, array]},
            {"arrays": [array[:2]]},
            {"arrays": [array[:, :, 1:]]},
            {"arrays": [array[::-1]]},
            {"parents": wide},
            {"width": 0},
            {"width": 3},
            {"width": MAX_BEAMS + 1},
            {"starts": wide},
            {"starts": ids[:0]},
            {"tokens": ids},
            {"tokens": ids[:2], "token_axis": 0},
            {"tokens": ids[:2], "token_axis": 4},
        ):
            with pytest.raises(ValueError, match=r".*: expected"):
                rig.device.permute_rows(**usual | wrong)
        for wrong in ({"arrays": [[1, 2, 3, 4]]}, {"parents": [1, 0, 1, 0]}):
            with pytest.raises(TypeError):
                rig.device.permute_rows(**usual | wrong)
        dense.check()
