"""Battery: beams reordered in the page table. The oracle goes beam by beam and cell by cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvcore.device.base import BeamArrays
from kvcore.device.beams import MAX_BEAMS
from tests.device.battery_base import BatteryBase
from tests.device.harness import Rig

NAMES = ("rows", "first", "width", "shared", "blocks", "valid")


@dataclass
class Request:
    """The beams of one request; `rows` may be any rows."""

    rows: list[int]
    parents: list[int]
    shared: int = 0
    blocks: int = 0
    valid: int = 0


def batch_of(requests: list[Request], padding: int = 0) -> dict[str, np.ndarray]:
    """The batch arrays of some requests and their parents; padding is full of nonsense."""
    columns: dict[str, list[int]] = {name: [] for name in (*NAMES, "parents")}
    for request in requests:
        width, first = len(request.rows), len(columns["rows"])
        columns["rows"] += request.rows
        columns["parents"] += request.parents
        for name, value in (("first", first), ("width", width), ("shared", request.shared),
                            ("blocks", request.blocks), ("valid", request.valid)):  # fmt: skip
            columns[name] += [value] * width
    for name, values in columns.items():
        values += [-1 if name == "rows" else len(columns["rows"]) - 1] * padding
    return {name: np.array(values, np.int32) for name, values in columns.items()}


def put_beams(rig: Rig, batch: dict[str, np.ndarray], max_width: int = 0) -> BeamArrays:
    """The batch arrays on the device."""
    return BeamArrays(*(rig.put(batch[name]) for name in NAMES), max_width=max_width)


def expect_step(
    table: np.ndarray, requests: list[Request], count: int
) -> tuple[np.ndarray, list[int]]:
    """The new table and the sources of `count` positions."""
    new, sources = table.copy(), [-1] * count
    position = 0
    for request in requests:
        rows, width = request.rows, len(request.rows)
        chosen = [p if 0 <= p < width else i for i, p in enumerate(request.parents)]
        spare = [beam for beam in range(width) if beam not in set(chosen)]
        first_child: dict[int, int] = {}
        for i, parent in enumerate(chosen):
            taken = parent
            if first_child.setdefault(parent, i) != i:
                taken = spare.pop(0)
                sources[position + i] = rows[first_child[parent]]
            for group in range(table.shape[1]):
                for ordinal in range(min(request.blocks, table.shape[2])):
                    source = parent if ordinal < request.shared else taken
                    new[rows[i], group, ordinal] = table[rows[source], group, ordinal]
        position += width
    return new, sources


def check_step(
    rig: Rig, table: np.ndarray, requests: list[Request], padding: int = 3, max_width: int = 0
) -> None:
    """`step_rows` against the oracle, from a table with strides of its own."""
    batch = batch_of(requests, padding)
    whole = np.full((table.shape[0], table.shape[1] + 1, table.shape[2] + 3), -7, np.int32)
    whole[:, 1:, 2:-1] = table
    on_device, sources = rig.put(whole), rig.put(np.full_like(batch["rows"], 77))
    view, beams = on_device[:, 1:, 2:-1], put_beams(rig, batch, max_width)
    parents = rig.put(batch["parents"])
    rig.device.step_rows(view, beams, parents, sources, stream=rig.stream)
    expected, copied = expect_step(table, requests, len(batch["rows"]))
    whole[:, 1:, 2:-1] = expected
    np.testing.assert_array_equal(rig.get(on_device), whole)
    assert rig.get(sources).tolist() == copied
    for name, array in zip(NAMES, beams, strict=False):
        np.testing.assert_array_equal(rig.get(array), batch[name])


def random_requests(
    rig: Rig, widths: list[int], num_rows: int, most_blocks: int, tokens_per_block: int = 4
) -> list[Request]:
    """Requests with distinct rows, random parents (some of them invalid) and random lengths."""
    rows = rig.rng.permutation(num_rows)
    requests, start = [], 0
    for width in widths:
        blocks = int(rig.rng.integers(0, most_blocks + 1))
        shared = int(rig.rng.integers(0, blocks + 1))
        parents = rig.rng.integers(0, width, width)
        wild = rig.rng.random(width) < 0.1
        parents[wild] = rig.rng.choice([-1, width, 2**31 - 1, -(2**31)], int(wild.sum()))
        valid = int(rig.rng.integers(0, blocks * tokens_per_block + 1))
        mine = rows[start : start + width].tolist()
        requests.append(Request(mine, parents.tolist(), shared, blocks, valid))
        start += width
    return requests


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """A table with every slot number different."""
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


PARENTS = {
    "identity": lambda w: list(range(w)),
    "all equal": lambda w: [w // 2] * w,
    "one cycle": lambda w: [(i + 1) % w for i in range(w)],
    "swapped pairs": lambda w: [i ^ 1 if i ^ 1 < w else i for i in range(w)],
    "reversed": lambda w: list(range(w))[::-1],
    "two of each": lambda w: [i // 2 for i in range(w)],
    "upper half": lambda w: [w - 1 - i // 2 for i in range(w)],
    "nobody": lambda w: [-1 if i % 2 else w + i for i in range(w)],
}


class RowTests(BatteryBase):
    """`step_rows`."""

    @pytest.mark.parametrize("kind", PARENTS)
    @pytest.mark.parametrize("width", [1, 2, 3, 8, 33])
    def test_rows_continue_their_parents(self, rig, kind, width):
        rows = rig.rng.permutation(width + 5)[:width].tolist()
        request = Request(rows, PARENTS[kind](width), shared=3, blocks=5)
        check_step(rig, numbered((width + 5, 2, 7)), [request])

    @pytest.mark.parametrize("most_blocks", [1, 9, 130])
    def test_a_whole_batch_in_one_launch(self, rig, most_blocks):
        for widths in ([1, 4, 1, 2, 7], [5], [1, 1], [16, 3, 31, 1, 4, 4]):
            num_rows = sum(widths) + 3
            requests = random_requests(rig, widths, num_rows, most_blocks)
            check_step(rig, numbered((num_rows, 3, most_blocks)), requests)

    @pytest.mark.parametrize("width", [64, 100, 257, 700])
    def test_wide_requests(self, rig, width):
        for requests in (
            random_requests(rig, [width, 2], width + 4, 6),
            [Request(list(range(width)), [width - 1] * width, 2, 5)],
            [Request(list(range(width))[::-1], [i // 3 for i in range(width)], 5, 5)],
        ):
            check_step(rig, numbered((width + 4, 1, 6)), requests, padding=1)

    @pytest.mark.parametrize(
        ("shared", "blocks"), [(0, 0), (0, 6), (6, 6), (-3, 4), (9, 4), (2, 90)]
    )
    def test_counts_are_cut_to_the_table(self, rig, shared, blocks):
        request = Request([4, 1, 0], [2, 2, 2], shared, blocks)
        check_step(rig, numbered((5, 2, 6)), [request])

    def test_empty_cells_move_like_others(self, rig):
        table = numbered((6, 2, 8))
        table[rig.rng.random(table.shape) < 0.4] = -1
        check_step(rig, table, [Request([5, 0, 2, 3], [3, 3, 0, 0], 4, 8)])

    def test_requests_beyond_the_greatest_width_are_left_alone(self, rig):
        table = numbered((12, 1, 4))
        batch = batch_of([Request([1, 2, 3], [2, 2, 0], 1, 3), Request([4, 5], [1, 1], 1, 3)])
        sources, on_device = rig.put(np.zeros(5, np.int32)), rig.put(table)
        beams, parents = put_beams(rig, batch, max_width=2), rig.put(batch["parents"])
        rig.device.step_rows(on_device, beams, parents, sources, stream=rig.stream)
        expected, copied = expect_step(table, [Request([4, 5], [1, 1], 1, 3)], 2)
        np.testing.assert_array_equal(rig.get(on_device), expected)
        assert rig.get(sources).tolist() == [-1] * 3 + copied

    def test_parents_may_end_before_the_padding(self, rig):
        table, request = numbered((3, 1, 4)), Request([0, 2], [1, 0], 2, 4)
        batch = batch_of([request], padding=4)
        sources, on_device = rig.put(batch["rows"]), rig.put(table)
        beams = put_beams(rig, batch)
        for given, parents in (([1, 0], [1, 0]), ([1], [1, 1]), ([], [0, 1])):
            request.parents = parents
            table, copied = expect_step(table, [request], 6)
            given = rig.put(given, np.int32)
            rig.device.step_rows(on_device, beams, given, sources, stream=rig.stream)
            np.testing.assert_array_equal(rig.get(on_device), table)
            assert rig.get(sources).tolist() == copied

    def test_rows_beyond_the_table_are_padding(self, rig):
        table = numbered((3, 1, 4))
        batch = batch_of([Request([3, 2**31 - 1], [1, 0], 1, 4)], padding=1)
        sources, on_device = rig.put(np.zeros(3, np.int32)), rig.put(table)
        beams, parents = put_beams(rig, batch), rig.put(batch["parents"])
        rig.device.step_rows(on_device, beams, parents, sources, stream=rig.stream)
        np.testing.assert_array_equal(rig.get(on_device), table)
        assert rig.get(sources).tolist() == [-1] * 3

    def test_steps_of_nothing(self, rig):
        check_step(rig, numbered((2, 1, 3)), [], padding=0)
        check_step(rig, numbered((2, 1, 3)), [], padding=2)
        check_step(rig, np.zeros((2, 0, 3), np.int32), [Request([1, 0], [0, 0], 0, 3)])
        check_step(rig, np.zeros((2, 1, 0), np.int32), [Request([1, 0], [0, 0], 0, 3)])

    def test_wrong_steps_are_refused(self, rig):
        table, batch = rig.put(numbered((4, 1, 3))), batch_of([Request([0, 1], [1, 1], 0, 3)])
        beams, ids = put_beams(rig, batch), rig.put(batch["parents"])
        wide, long = rig.put(np.zeros(2, np.int64)), rig.put(np.zeros(3, np.int32))
        for wrong in (
            {"table": table[0]},
            {"table": rig.put(np.zeros((4, 1, 3), np.int64))},
            {"beams": beams._replace(valid=long)},
            {"beams": beams._replace(rows=wide)},
            {"beams": beams._replace(max_width=MAX_BEAMS + 1)},
            {"parents": wide},
            {"sources": long},
        ):
            args = {"table": table, "beams": beams, "parents": ids, "sources": ids} | wrong
            with pytest.raises(ValueError, match=r".*: expected"):
                rig.device.step_rows(*args.values(), stream=rig.stream)
        with pytest.raises(TypeError):
            rig.device.step_rows([[[0]]], beams, ids, ids, stream=rig.stream)
        np.testing.assert_array_equal(rig.get(table), numbered((4, 1, 3)))
