"""Paths and token moves: the kernels' text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference_paths as reference
from kvcore.device.base import PathArrays
from kvcore.device.cuda.kernels import UNITS, divider
from kvcore.device.cuda.layouts import cut_page, page_bits
from kvcore.ids import div_ceil
from tests.kernels.guarded import address, compare, int32
from tests.kernels.test_token_kernels import SHAPES, Case

CELLS = 41


def random_paths(rng, widths, num_rows):
    """Batch arrays with two positions of padding and one of nonsense, and parents."""
    count = sum(widths) + 3
    rows = np.full(count, -1, np.int32)
    rows[: count - 3] = rng.permutation(num_rows)[: count - 3]
    columns = [np.full(count, count - 1, np.int32) for _ in range(5)]
    parents, start = rng.integers(-2, 5, count).astype(np.int32), 0
    for width in widths:
        base = int(rng.integers(-1, CELLS))
        own, valid = rng.integers(0, CELLS + 9, 2).tolist()
        for column, value in zip(columns, (start, width, base, own, valid), strict=True):
            column[start : start + width] = value
        parents[start : start + width] = rng.integers(-1, width + 1, width)
        start += width
    rows[start] = num_rows - 1  # a row whose request reaches past the batch
    columns[0][start], columns[1][start] = start, 9
    return PathArrays(rows, *columns), parents


def fields_of(beams, cells, num_rows):
    ids = [address(array) for array in beams[:5]]
    return (
        address(cells), cells.strides[0] // 4, *ids, num_rows, CELLS, len(beams.rows), 0
    )  # fmt: skip


def random_cells(rng, num_rows):
    """Cells between others, some of them no beam of any request."""
    whole = int32(rng, rng.integers(-1, 5, num_rows * (CELLS + 2)))
    return whole, whole.array.reshape(num_rows, CELLS + 2)[:, :-2]


WIDTHS = [[4, 4, 1, 2], [33, 3], [130], [1]]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("grid", "shift"), [((1, 1, 1), 0), ((3, 2, 1), 2), ((2, 99, 1), 8)])
def test_step_paths(kernels, rng, widths, grid, shift):
    for lost in (False, True):
        num_rows = sum(widths) + 1
        beams, parents = random_paths(rng, widths, num_rows)
        if lost:  # a beam without a row: its request is left alone
            beams.rows[widths[0] - 1] = num_rows
        whole, cells = random_cells(rng, num_rows)
        most = max(widths)
        fields = {
            "paths": fields_of(beams, cells, num_rows), "valid": address(beams.valid),
            "parents": address(parents), "num_parents": len(parents), "max_width": most,
            "shift": shift,
        }  # fmt: skip
        shared = 4 * (most << shift) + 2 * most
        compare(
            [whole],
            partial(kernels.run, "paths", "step_paths", grid, shared, **fields),
            partial(reference.step_paths, cells, beams._replace(max_width=most), parents),
        )


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("columns", [1, 40, 60])
def test_take_paths(kernels, rng, widths, columns):
    num_rows = sum(widths) + 1
    beams, _ = random_paths(rng, widths, num_rows)
    _, cells = random_cells(rng, num_rows)
    out = int32(rng, np.zeros((len(beams.rows), columns)))
    fields = {
        "paths": fields_of(beams, cells, num_rows), "out": out.address,
        "num_units": out.array.size, "columns": divider(columns),
    }  # fmt: skip
    grid = div_ceil(out.array.size, kernels.sources["paths"].threads), 1, 1
    compare(
        [out],
        partial(kernels.run, "paths", "take_paths", grid, **fields),
        partial(reference.take_paths, cells, beams, out.array),
    )


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 60, 300])
def test_map_paths(kernels, rng, widths, tokens):
    num_rows, size = sum(widths) + 1, 4
    beams, _ = random_paths(rng, widths, num_rows)
    _, cells = random_cells(rng, num_rows)
    tables = rng.integers(-1, 99, (2, num_rows, 9)).astype(np.int32)
    starts = rng.integers(-3, 40, len(beams.rows)).astype(np.int32)
    ends = np.cumsum(rng.integers(0, 4, len(beams.rows))).astype(np.int32)
    out = int32(rng, np.zeros((2, tokens, 2)))
    mapping = (
        address(tables), num_rows * 9, 9, address(beams.rows), address(starts), address(ends),
        out.address, num_rows, 9, len(beams.rows), tokens, divider(size), 0,
    )  # fmt: skip
    names = ("first", "width", "base", "own")
    fields = {
        "map": mapping, "cells": address(cells), "cell_stride": cells.strides[0] // 4,
        "num_cell_rows": num_rows, "num_cells": CELLS,
    } | {name: address(getattr(beams, name)) for name in names}  # fmt: skip
    grid = div_ceil(tokens, kernels.sources["map_tokens"].threads), 2, 1
    args = tables, cells, beams, starts, ends, out.array, size
    compare(
        [out],
        partial(kernels.run, "map_tokens", "map_paths", grid, **fields),
        partial(reference.map_paths, *args),
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_move_tokens(kernels, rng, layout, shape):
    for forced in UNITS:
        case = Case(rng, layout, shape)
        half = case.tokens // 2
        src, dst = np.ascontiguousarray(case.mapping[:half]), case.mapping[half : 2 * half].copy()
        _, usual = case.fields(case.arrays(rng, lambda a: a)[1], forced)
        bases = [(address(data) + at, size) for data, size, at in case.places]
        cut = cut_page(case.geometry, page_bits(case.geometry, bases) | forced)
        fields = {
            "src": address(src), "dst": address(dst), "num_units": half * cut.token_units,
            "token_units": divider(cut.token_units), "head_units": divider(cut.head_units),
            "pages": usual["pages"],
        }  # fmt: skip
        blocks = div_ceil(fields["num_units"], kernels.sources["move_tokens"].chunk)
        entry = f"move_tokens_{cut.unit}"
        compare(
            case.pools,
            partial(kernels.run, "move_tokens", entry, (blocks, 2, 2), **fields),
            partial(reference.move_tokens, case.places, 2, case.geometry, src, dst),
        )
