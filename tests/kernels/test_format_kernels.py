"""block_offsets, row_pages and token_slots: the kernels' text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference_formats as reference
from kvcore.device.cuda.arguments import MAX_TABLE_POOLS, TABLE_POOL
from kvcore.device.cuda.kernels import divider
from kvcore.device.formats import PageNumbers, PoolNumbers, RowRanges
from kvcore.ids import div_ceil
from tests.kernels.guarded import address, compare, int32

POOLS = {
    "one": [PoolNumbers(1, 4, 1, 1)],
    "finer pages": [PoolNumbers(0, 2, 1, 1), PoolNumbers(1, 12, 3, 3), PoolNumbers(2, 4, -2, 2)],
    "many": [PoolNumbers(i % 3, i + 1, i, 1 + i % 4) for i in range(MAX_TABLE_POOLS)],
}


def table_of(rng, rows, blocks, groups=1):
    """A table with holes, as a view with strides of its own."""
    whole = rng.integers(-2, 90, (rows, groups, blocks + 3)).astype(np.int32)
    return whole.transpose(1, 0, 2)[:, :, 2:-1]


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize(("rows", "spare"), [(1, 0), (5, 2), (0, 3), (70, 1)])
@pytest.mark.parametrize("no_page", [-1, 0])
def test_block_offsets(kernels, rng, pools, rows, spare, no_page):
    pools, tables = POOLS[pools], table_of(rng, 9, 5, 3)
    listed = rng.integers(-2, 11, rows).astype(np.int32)
    for pages, y in ((4, 1), (12, 3), (135, 64)):
        out = int32(rng, np.full((len(pools), rows + spare, 2, pages), 77))
        blocks = np.zeros(MAX_TABLE_POOLS, TABLE_POOL)
        blocks[: len(pools)] = [(*pool[:3], divider(pool.expansion)) for pool in pools]
        fields = {
            "tables": address(tables), "group_stride": tables.strides[0] // 4,
            "row_stride": tables.strides[1] // 4, "rows": address(listed), "out": out.address,
            "table_rows": 9, "table_blocks": 5, "num_rows": rows, "out_rows": rows + spare,
            "out_pages": pages, "no_page": no_page, "pools": blocks,
        }  # fmt: skip
        grid = div_ceil(pages, kernels.sources["block_offsets"].threads), y, len(pools)
        compare(
            [out],
            partial(kernels.run, "block_offsets", "block_offsets", grid, **fields),
            partial(reference.block_offsets, tables, listed, out.array, pools, no_page),
        )


def ranges_of(rng, rows, most):
    """Batch rows of up to `most` tokens, some of them padding or out of any bounds."""
    starts = rng.integers(-3, most + 1, rows).astype(np.int32)
    starts[rng.random(rows) < 0.1] = rng.choice([-(2**31), 2**31 - 1])
    ends = np.cumsum(rng.integers(0, 4, rows)).astype(np.int32)
    return RowRanges(rng.integers(-2, 11, rows).astype(np.int32), starts, ends)


def row_fields(table, ranges, numbers, page_tokens, block_rows, no_page):
    rows, blocks = table.shape
    return {
        "table": address(table), "row_stride": table.strides[0] // 4, "rows": address(ranges.rows),
        "starts": address(ranges.starts), "ends": address(ranges.ends),
        "num_rows": len(ranges.rows), "table_rows": rows,
        "max_tokens": blocks * numbers.expansion * page_tokens, "scale": numbers.scale,
        "offset": numbers.offset, "no_page": no_page, "block_rows": block_rows,
        "page_tokens": divider(page_tokens), "expansion": divider(numbers.expansion),
    }  # fmt: skip


NUMBERS = [PageNumbers(), PageNumbers(6, 4, 2), PageNumbers(3, -1, 3)]


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("x", "block_rows"), [(1, 1), (3, 4), (2, 1000)])
def test_csr_pages(kernels, rng, rows, numbers, x, block_rows):
    for page_tokens, room in ((1, 1.0), (4, 0.6), (16, 2.0)):
        table = table_of(rng, 9, 50)[0]
        ranges = ranges_of(rng, rows, 50 * numbers.expansion * page_tokens + 3)
        tokens = reference.row_tokens(table, ranges, numbers.expansion * page_tokens)
        total = int((-(-tokens // page_tokens)).sum())
        indices = int32(rng, np.full(int(total * room), 77))
        indptr, last = int32(rng, np.full(rows + 1, 77)), int32(rng, np.full(rows, 77))
        fields = row_fields(table, ranges, numbers, page_tokens, block_rows, -1) | {
            "pages": indices.address, "bounds": indptr.address, "lens": last.address,
            "num_pages": indices.array.size,
        }  # fmt: skip
        grid = x, max(div_ceil(rows, block_rows), 1), 1
        arrays = indptr.array, indices.array, last.array
        compare(
            [indices, indptr, last],
            partial(kernels.run, "row_pages", "csr_pages", grid, **fields),
            partial(reference.csr_pages, table, ranges, *arrays, numbers, page_tokens),
        )


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("x", "block_rows"), [(1, 1), (3, 4), (2, 1000)])
@pytest.mark.parametrize("no_page", [0, -1])
def test_ragged_pages(kernels, rng, rows, numbers, x, block_rows, no_page):
    for page_tokens, columns in ((1, 0), (4, 33), (16, 160)):
        table = table_of(rng, 9, 50)[0]
        ranges = ranges_of(rng, rows, 50 * numbers.expansion * page_tokens + 3)
        pages = int32(rng, np.full((rows, columns), 77))
        bounds, lens = int32(rng, np.full(rows + 1, 77)), int32(rng, np.full(rows, 77))
        count = int32(rng, [77])
        fields = row_fields(table, ranges, numbers, page_tokens, block_rows, no_page) | {
            "pages": pages.address, "bounds": bounds.address, "lens": lens.address,
            "count": count.address, "num_pages": columns,
        }  # fmt: skip
        grid = x, max(div_ceil(rows, block_rows), 1), 1
        arrays = pages.array, bounds.array, lens.array, count.array
        compare(
            [pages, bounds, lens, count],
            partial(kernels.run, "row_pages", "ragged_pages", grid, **fields),
            partial(reference.ragged_pages, table, ranges, *arrays, numbers, page_tokens, no_page),
        )


@pytest.mark.parametrize("tokens", [1, 127, 1000])
@pytest.mark.parametrize(("scale", "offset"), [(16, 0), (2**31 - 1, -5)])
def test_token_slots(kernels, rng, tokens, scale, offset):
    mapping = rng.integers(-2, 2**31 - 1, (tokens, 2)).astype(np.int32)
    mapping[rng.random(tokens) < 0.2, 0] = -1
    out = int32(rng, np.full(2 * tokens, 77))
    fields = {
        "mapping": address(mapping), "out": out.address, "scale": scale, "offset": offset,
        "num_tokens": tokens,
    }  # fmt: skip
    grid = div_ceil(tokens, kernels.sources["token_slots"].threads), 1, 1
    compare(
        [out],
        partial(kernels.run, "token_slots", "token_slots", grid, **fields),
        partial(reference.token_slots, mapping, out.array.view(np.int64), scale, offset),
    )
