"""Battery: beams that find their history through paths, and tokens that move from page to page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore.device.base import PathArrays
from tests.device.battery_base import BatteryBase
from tests.device.battery_beams import PARENTS
from tests.device.harness import Rig, Stack, geometry

NAMES = ("rows", "first", "width", "base", "own", "valid")


class Request:
    """One request of a batch, as the contract describes it."""

    def __init__(self, rows, parents, base, own, valid):
        self.rows, self.parents = list(rows), list(parents)
        self.base, self.own, self.valid = base, own, valid

    def at(self, cells: np.ndarray, i: int, position: int) -> int:
        """Which beam has a position of beam i."""
        if len(self.rows) < 2 or position < self.base:
            return 0
        if position >= self.own or position >= cells.shape[1]:
            return i
        found = int(cells[self.rows[i], position])
        return found if 0 <= found < len(self.rows) else i


def batch_of(requests: list[Request], padding: int = 2) -> dict[str, np.ndarray]:
    """The arrays of a batch, and `parents`."""
    count = sum(len(r.rows) for r in requests) + padding
    batch = {name: np.full(count, -1, np.int32) for name in (*NAMES, "parents")}
    start = 0
    for r in requests:
        end = start + len(r.rows)
        values = r.rows, start, len(r.rows), r.base, r.own, r.valid, r.parents
        for array, value in zip(batch.values(), values, strict=True):
            array[start:end] = value
        start = end
    return batch


def put_paths(rig: Rig, batch: dict[str, np.ndarray], max_width: int = 0) -> PathArrays:
    """On the device."""
    return PathArrays(*(rig.put(batch[name]) for name in NAMES), max_width)


def expect_step(cells: np.ndarray, requests: list[Request]) -> np.ndarray:
    """The new cells."""
    new = cells.copy()
    for r in requests:
        width = len(r.rows)
        for i, parent in enumerate(r.parents) if width > 1 else ():
            goes_on = parent if 0 <= parent < width else i
            for position in range(max(r.base, 0), min(r.valid, cells.shape[1])):
                new[r.rows[i], position] = r.at(cells, goes_on, position)
    return new


def random_requests(rig: Rig, widths: list[int], num_rows: int, cells: int) -> list[Request]:
    """Requests with distinct rows, random parents (some invalid) and random positions."""
    rows, start, found = rig.rng.permutation(num_rows), 0, []
    for width in widths:
        parents = rig.rng.integers(0, width, width)
        wild = rig.rng.random(width) < 0.1
        parents[wild] = rig.rng.choice([-1, width, 2**31 - 1, -(2**31)], int(wild.sum()))
        base, own, valid = rig.rng.integers(-1, cells + 3, 3).tolist()
        found.append(Request(rows[start : start + width].tolist(), parents, base, own, valid))
        start += width
    return found


def random_cells(rig: Rig, num_rows: int, columns: int) -> np.ndarray:
    """Cells that name beams, and some that name none."""
    return rig.rng.integers(-1, 6, (num_rows, columns)).astype(np.int32)


def check_step(rig: Rig, cells: np.ndarray, requests: list[Request], max_width: int = 0) -> None:
    """`step_paths` against the oracle, on a view between cells that nobody may touch."""
    whole = rig.rng.integers(0, 99, (len(cells), cells.shape[1] + 3)).astype(np.int32)
    whole[:, 1:-2] = cells
    on_device, batch = rig.put(whole), batch_of(requests)
    parents = rig.put(batch["parents"])
    beams = put_paths(rig, batch, max_width)
    rig.device.step_paths(on_device[:, 1:-2], beams, parents, stream=rig.stream)
    whole[:, 1:-2] = expect_step(cells, requests)
    np.testing.assert_array_equal(rig.get(on_device), whole)


class PathTests(BatteryBase):
    """`step_paths`, `take_paths`, `map_paths` and `move_tokens`."""

    @pytest.mark.parametrize("kind", PARENTS)
    @pytest.mark.parametrize("width", [1, 2, 4, 33])
    def test_paths_go_on_from_their_parents(self, rig, kind, width):
        rows = rig.rng.permutation(width + 2)[:width].tolist()
        request = Request(rows, PARENTS[kind](width), base=3, own=11, valid=13)
        check_step(rig, random_cells(rig, width + 2, 20), [request])

    @pytest.mark.parametrize("columns", [1, 70, 600])
    def test_a_whole_batch_of_paths_in_one_launch(self, rig, columns):
        for widths in ([1, 4, 1, 2, 7], [5], [1, 1], [150, 3, 31, 1, 4, 4]):
            num_rows = sum(widths) + 3
            requests = random_requests(rig, widths, num_rows, columns)
            check_step(rig, random_cells(rig, num_rows, columns), requests)

    def test_requests_that_are_too_wide_or_lack_a_row_keep_their_paths(self, rig):
        requests = random_requests(rig, [6, 3, 4], 20, 40)
        cells = random_cells(rig, 20, 40)
        requests[2].rows[1] = 20
        on_device, batch = rig.put(cells), batch_of(requests)
        parents = rig.put(batch["parents"])
        beams = put_paths(rig, batch, max_width=5)
        rig.device.step_paths(on_device, beams, parents, stream=rig.stream)
        np.testing.assert_array_equal(rig.get(on_device), expect_step(cells, [requests[1]]))

    def test_a_step_after_the_other_gives_the_histories(self, rig):
        """Reading through the paths finds, for each position, the beam that wrote it."""
        cells = rig.put(np.full((9, 40), 77, np.int32))
        first, second = Request([8, 1, 4, 2], [0] * 4, 5, 5, 5), Request([3, 0], [0] * 2, 9, 9, 9)
        histories = [[[0] * r.base for _ in r.rows] for r in (first, second)]
        for _ in range(15):
            for r, mine in zip((first, second), histories, strict=True):
                r.own, r.valid = r.valid, r.valid + 1
                r.parents = rig.rng.integers(0, len(r.rows), len(r.rows)).tolist()
                grown = [[*old, i] for i, old in enumerate(mine)]
                mine[:] = [list(grown[p]) for p in r.parents]
            batch = batch_of([first, second])
            parents = rig.put(batch["parents"])
            rig.device.step_paths(cells, put_paths(rig, batch), parents, stream=rig.stream)
        for r in (first, second):
            r.own = r.valid
        found = take(rig, cells, batch_of([first, second]), 24)
        assert found[:4, :20].tolist() == histories[0]
        assert found[4:6, :24].tolist() == histories[1]
        assert found[:4, 20:].tolist() == [[i] * 4 for i in range(4)]
        assert not found[6:].any()

    @pytest.mark.parametrize("columns", [1, 33, 80])
    def test_dense_paths(self, rig, columns):
        requests = random_requests(rig, [4, 1, 33, 2], 60, 50)
        cells = random_cells(rig, 60, 50)
        found = take(rig, rig.put(cells), batch_of(requests), columns)
        expected = [
            [r.at(cells, i, position) for position in range(columns)]
            for r in requests
            for i in range(len(r.rows))
        ]
        np.testing.assert_array_equal(found[:-2], expected)
        assert not found[-2:].any()

    @pytest.mark.parametrize("block", [1, 4, 7])
    def test_tokens_are_mapped_through_paths(self, rig, block):
        requests = random_requests(rig, [4, 1, 9, 2], 30, 50)
        cells, tables = random_cells(rig, 30, 50), rig.rng.integers(-1, 99, (2, 30, 12))
        batch = batch_of(requests)
        starts = rig.rng.integers(0, 40, len(batch["rows"])).astype(np.int32)
        counts = rig.rng.integers(0, 9, len(starts))
        ends = np.cumsum(counts).astype(np.int32)
        out = rig.put(np.full((2, int(ends[-1]) + 5, 2), 9, np.int32))
        on_device = [rig.put(a, np.int32) for a in (tables, cells)]
        beams, lists = put_paths(rig, batch), [rig.put(starts), rig.put(ends)]
        rig.device.map_paths(
            *on_device, beams, *lists, out, tokens_per_block=block, stream=rig.stream
        )
        expected = expect_mapping(tables, cells, requests, starts, counts, block, out.shape)
        np.testing.assert_array_equal(rig.get(out), expected)

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("expansion", [1, 2])
    @pytest.mark.parametrize("shape", [(2, 8, 2), (1, 3, 1), (5, 16, 4)])
    def test_tokens_move_within_pages(self, rig, layout, expansion, shape):
        heads, dim, itemsize = shape
        sizes = {"heads": heads, "dim": dim, "itemsize": itemsize, "expansion": expansion}
        stack = Stack.one_pool(rig, geometry(layout, **sizes), num_roles=1)
        tokens = stack.geometry.expansion * stack.geometry.page_tokens
        places = rig.rng.permutation(stack.num_slots * tokens)
        pairs = np.stack(np.divmod(places, tokens), axis=1).astype(np.int32)
        half = len(pairs) // 2
        src, dst = pairs[:half].copy(), pairs[half : 2 * half].copy()
        src[0], dst[1], src[2] = (-1, 0), (stack.num_slots, 0), (1, tokens)
        held = stack.expect_gather(src)
        rig.device.move_tokens(stack.stack, rig.put(src), rig.put(dst), stream=rig.stream)
        real = np.arange(half) > 2
        stack.expect_append(dst[real], [array[:, real] for array in held])
        stack.check()

    def test_paths_of_nothing(self, rig):
        empty = {name: np.zeros(0, np.int32) for name in (*NAMES, "parents")}
        for cells, batch in (((0, 3), empty), ((3, 0), batch_of([])), ((3, 3), empty)):
            on_device, beams = rig.put(np.zeros(cells, np.int32)), put_paths(rig, batch)
            parents = rig.put(batch["parents"])
            rig.device.step_paths(on_device, beams, parents, stream=rig.stream)
            assert not take(rig, on_device, batch, 2).any()

    def test_wrong_paths_are_refused(self, rig):
        batch = batch_of([Request([0, 1], [0, 0], 0, 2, 3)])
        cells, beams = rig.put(np.zeros((3, 4), np.int32)), put_paths(rig, batch)
        parents, wide = rig.put(batch["parents"]), rig.put(batch["own"], np.int64)
        usual: dict[str, Any] = {"cells": cells, "beams": beams, "parents": parents}
        for wrong in (
            {"cells": cells[0]},
            {"cells": cells[:, ::2]},
            {"parents": wide},
            {"beams": beams._replace(own=wide)},
            {"beams": beams._replace(first=parents[:1])},
            {"beams": beams._replace(max_width=-1)},
        ):
            with pytest.raises(ValueError, match=r".*: expected"):
                rig.device.step_paths(**usual | wrong, stream=rig.stream)
        with pytest.raises(TypeError):
            rig.device.step_paths(**usual | {"cells": None}, stream=rig.stream)
        for out in (rig.put(np.zeros((5, 2), np.int32)), parents):
            with pytest.raises(ValueError, match="out"):
                rig.device.take_paths(cells, beams, out, stream=rig.stream)


def take(rig: Rig, cells: Any, batch: dict[str, np.ndarray], columns: int) -> np.ndarray:
    """`take_paths` of a whole batch."""
    out = rig.put(np.full((len(batch["rows"]), columns), -5, np.int32))
    rig.device.take_paths(cells, put_paths(rig, batch), out, stream=rig.stream)
    return rig.get(out)


def expect_mapping(tables, cells, requests, starts, counts, block, shape):
    """Token by token."""
    out = np.zeros(shape, np.int32)
    out[..., 0] = -1
    entry = n = 0
    for r in requests:
        for i in range(len(r.rows)):
            for position in range(int(starts[entry]), int(starts[entry] + counts[entry])):
                row = r.rows[r.at(cells, i, position)]
                ordinal, within = divmod(position, block)
                if ordinal < tables.shape[2]:
                    for group in np.flatnonzero(tables[:, row, ordinal] >= 0).tolist():
                        out[group, n] = tables[group, row, ordinal], within
                n += 1
            entry += 1
    return out
