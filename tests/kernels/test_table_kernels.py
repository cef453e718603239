"""The table kernels and copies with strides: their text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference
from kvcore.device.base import staged_parts
from kvcore.device.cuda.kernels import divider, unit_bytes
from kvcore.device.cuda.layouts import cut_strided
from kvcore.ids import div_ceil
from tests.kernels.guarded import Guarded, address, compare, int32


def blocks_of(kernels, source, count):
    return div_ceil(count, kernels.sources[source].threads), 1, 1


@pytest.mark.parametrize("count", [1, 127, 128, 1000])
def test_fill_words(kernels, rng, count):
    target = int32(rng, np.zeros(count))
    expected = target.whole.copy()
    grid = div_ceil(count, kernels.sources["fill"].chunk), 1, 1
    value = int(np.uint32(np.int32(-7)))
    kernels.run("fill", "fill_words", grid, target=target.address, count=count, value=value)
    start = target.address - address(target.whole)
    expected[start : start + 4 * count].view(np.int32)[:] = -7
    np.testing.assert_array_equal(target.whole, expected)


@pytest.mark.parametrize(("cells", "num_words"), [(1, 0), (0, 1), (130, 7), (7, 300)])
def test_scatter_table(kernels, rng, cells, num_words):
    table, target = int32(rng, np.arange(600)), int32(rng, np.arange(400))
    index = rng.permutation(600)[:cells].astype(np.int64)
    value, words = (rng.integers(-9, 9, n).astype(np.int32) for n in (cells, num_words))
    grid = blocks_of(kernels, "scatter_table", max(cells, num_words))
    fields = {
        "table": table.address, "index": address(index), "value": address(value),
        "target": target.address, "words": address(words), "table_cells": 600,
        "num_cells": cells, "num_words": num_words,
    }  # fmt: skip
    compare(
        [table, target],
        partial(kernels.run, "scatter_table", "scatter_table", grid, **fields),
        partial(reference.scatter_table, table.array, index, value, target.array, words),
    )


@pytest.mark.parametrize(("cells", "num_words"), [(1, 3), (0, 1), (130, 7), (7, 300), (0, 300)])
def test_scatter_staged(kernels, rng, cells, num_words):
    """The counts lie in the staging; the grid is larger than both."""
    table, target = int32(rng, np.arange(600)), int32(rng, np.arange(400))
    staged = np.zeros(8 + 12 * cells + 4 * num_words, np.uint8)
    count, index, value, words = staged_parts(staged, cells, num_words)
    count[0], index[:] = cells, rng.permutation(600)[:cells]
    value[:], words[:] = rng.integers(-9, 9, cells), rng.integers(-9, 9, num_words)
    fields = {
        "table": table.address, "staged": address(staged), "target": target.address,
        "table_cells": 600, "num_words": num_words,
    }  # fmt: skip
    grid = blocks_of(kernels, "scatter_table", 1024)
    compare(
        [table, target],
        partial(kernels.run, "scatter_table", "scatter_staged", grid, **fields),
        partial(reference.scatter_table, table.array, index, value, target.array, words),
    )


def test_scatter_table_stays_in_the_table(kernels, rng):
    table, target = int32(rng, np.arange(8)), int32(rng, np.arange(4))
    index, value = np.array([-1, 8, 1 << 40, -(1 << 40)], np.int64), np.zeros(4, np.int32)
    fields = {
        "table": table.address, "index": address(index), "value": address(value),
        "target": target.address, "table_cells": 8, "num_cells": 4,
    }  # fmt: skip
    grid = blocks_of(kernels, "scatter_table", 4)
    run = partial(kernels.run, "scatter_table", "scatter_table", grid, **fields)
    compare([table, target], run, lambda: None)


@pytest.mark.parametrize("tokens_per_block", [1, 3, 32])
@pytest.mark.parametrize("entries", [0, 1, 2, 9, 17, 64, 300])
def test_map_tokens(kernels, rng, tokens_per_block, entries):
    for _ in range(8):
        whole = rng.integers(-2, 50, (9, 4, 6)).astype(np.int32)
        tables = whole.transpose(1, 0, 2)[::2, 1:, :5]  # strides of its own
        rows = rng.integers(-2, 10, entries).astype(np.int32)
        starts = rng.integers(-2, 6 * tokens_per_block + 2, entries).astype(np.int32)
        ends = np.cumsum(rng.integers(0, 2 * tokens_per_block + 2, entries)).astype(np.int32)
        tokens = max(1, (int(ends[-1]) if entries else 0) + int(rng.integers(-3, 4)))
        out = int32(rng, np.full((2, tokens, 2), 99))
        fields = {
            "tables": address(tables), "group_stride": tables.strides[0] // 4,
            "row_stride": tables.strides[1] // 4, "rows": address(rows),
            "starts": address(starts), "ends": address(ends), "out": out.address,
            "num_rows": 8, "num_blocks": 5, "num_entries": entries, "num_tokens": tokens,
            "block_tokens": divider(tokens_per_block),
        }  # fmt: skip
        grid = (*blocks_of(kernels, "map_tokens", tokens)[:1], 2, 1)
        args = tables, rows, starts, ends, out.array, tokens_per_block
        compare(
            [out],
            partial(kernels.run, "map_tokens", "map_tokens", grid, **fields),
            partial(reference.map_tokens, *args),
        )


@pytest.mark.parametrize(("columns", "width"), [(8, 8), (8, 4), (8, 12), (7, 7), (5, 9), (6, 2)])
def test_take_rows(kernels, rng, columns, width):
    for forced in (16, 8, 4):
        table = rng.integers(-2, 99, (7, 16)).astype(np.int32)[::2, :columns]
        rows = np.array([3, -1, 0, 4, 2, 2, -(2**31), 2**31 - 1], np.int32)
        out = int32(rng, np.full((8, width), 77))
        stride, part = table.strides[0], min(columns, width) * 4
        unit = unit_bytes(address(table), out.address, stride, 4 * width, part, forced)
        units = 4 * width // unit
        fields = {
            "table": address(table), "table_stride": stride, "out": out.address,
            "out_stride": 4 * width, "rows": address(rows), "table_rows": 4,
            "num_units": 8 * units, "row_units": divider(units), "table_units": part // unit,
        }  # fmt: skip
        grid = blocks_of(kernels, "take_rows", 8 * units)
        compare(
            [out],
            partial(kernels.run, "take_rows", f"take_rows_{unit}", grid, **fields),
            partial(reference.take_rows, table, rows, out.array),
        )


SAME = [
    lambda a: a,
    lambda a: a.T[::-1],
    lambda a: a[::2, ::-1, 1::3],
    lambda a: a[:, :1, :][:, 0],
    lambda a: a[3:4, 2:3, 1:2],
    lambda a: a[..., None, :, None],
]
OTHER = (lambda a: a[:5, :, :5].T, lambda a: a[:5, :, :5])


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("view", "other"), [*((v, v) for v in SAME), OTHER])
def test_copy_strided(kernels, rng, itemsize, view, other):
    source, target = (Guarded(rng, (6, 5, 8), itemsize) for _ in range(2))
    a, b = view(source.array), other(target.array)
    unit, fields = cut_strided(a.shape, a.strides, b.strides, itemsize, address(a) | address(b))
    units = a.size * itemsize // unit
    fields |= {"source": address(a), "target": address(b), "num_units": units}
    grid = blocks_of(kernels, "strided", units)
    compare(
        [target],
        partial(kernels.run, "strided", f"copy_strided_{unit}", grid, **fields),
        partial(np.copyto, b, a),
    )
