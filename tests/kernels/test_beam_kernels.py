"""step_rows and copy_tails: the kernels' text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference_beams as reference
from kvcore.device.base import BeamArrays
from kvcore.device.cuda.arguments import MAX_INLINE, MAX_KINDS, PAIR_ARGS
from kvcore.device.cuda.kernels import UNITS, unit_bytes
from tests.kernels.guarded import Guarded, address, compare, int32

T = 8


def random_batch(rng, widths, num_rows, num_blocks):
    """Batch arrays with two positions of padding, and parents, some of them invalid."""
    count = sum(widths) + 2
    rows = np.full(count, -1, np.int32)
    rows[:-2] = rng.permutation(num_rows)[: count - 2]
    columns = [np.full(count, count - 1, np.int32) for _ in range(5)]
    parents, start = rng.integers(-2, 5, count).astype(np.int32), 0
    for width in widths:
        blocks = int(rng.integers(0, num_blocks + 1))
        shared = int(rng.integers(0, blocks + 1))
        values = start, width, shared, blocks, int(rng.integers(0, blocks * T + 1))
        for column, value in zip(columns, values, strict=True):
            column[start : start + width] = value
        parents[start : start + width] = rng.integers(-1, width + 1, width)
        start += width
    return BeamArrays(rows, *columns), parents


def beam_fields(beams, names):
    return {name: address(getattr(beams, name)) for name in names.split()}


@pytest.mark.parametrize("widths", [[4, 4, 1, 2], [33, 3], [130], [1]])
@pytest.mark.parametrize("spare", [2, 9, 65])
@pytest.mark.parametrize("slices", [1, 3])
def test_step_rows(kernels, rng, widths, spare, slices):
    """`spare`: shared memory for one, some or all of the columns that a tile can have."""
    for num_blocks in (3, 70, 200):
        num_rows = sum(widths) + 1
        beams, parents = random_batch(rng, widths, num_rows, num_blocks)
        whole = int32(rng, rng.permutation(num_rows * 3 * (num_blocks + 1)))
        table = whole.array.reshape(num_rows, 3, num_blocks + 1)[:, 1:, :-1]
        sources = int32(rng, np.full(len(parents), 5))
        cells = max(widths) * spare
        fields = beam_fields(beams, "rows first width shared blocks") | {
            "table": address(table), "row_stride": table.strides[0] // 4,
            "group_stride": table.strides[1] // 4, "parents": address(parents),
            "sources": sources.address, "num_rows": num_rows, "num_blocks": num_blocks,
            "num_positions": len(parents), "num_parents": len(parents),
            "max_width": max(widths), "cells": cells,
        }  # fmt: skip
        grid = len(parents), 2, slices
        compare(
            [whole, sources],
            partial(kernels.run, "step_rows", "step_rows", grid, 4 * cells, **fields),
            partial(reference.step_rows, table, beams, parents, sources.array),
        )


class Buffers:
    """Three pools with buffers of some token sizes, and the kernel's description of them."""

    def __init__(self, rng, token_bytes, num_slots, forced):
        self.pools = [
            Guarded(rng, (num_slots + i, 5 * size * T + 16 * i))
            for i, size in enumerate(token_bytes)
        ]
        self.places, addresses = [], []
        for pool, size in zip(self.pools, token_bytes, strict=True):
            slot_bytes = pool.array.shape[1]
            for k in range(3):
                offset, token = k * size * T, 0 if k == 2 else size
                self.places.append((pool.bytes, slot_bytes, offset, size * T, token))
                addresses.append(pool.address + offset)
        order = sorted(range(len(self.places)), key=lambda i: self.places[i][3:])
        parts = [part for place in self.places for part in place[1:]]
        self.unit = unit_bytes(*addresses, *parts, forced)
        rows = [(addresses[i], self.places[i][1], num_slots, 0) for i in order]
        self.table, kinds = np.array(rows, np.int64), []
        for index, i in enumerate(order):
            sizes = [size // self.unit for size in self.places[i][3:]]
            if kinds and kinds[-1][2:] == sizes:
                kinds[-1][1] += 1
            else:
                kinds.append([index, 1, *sizes])
        none = [(0, 0, 0, 0)] * (MAX_KINDS - len(kinds))
        self.fields = address(self.table), len(kinds), 0, [tuple(k) for k in kinds] + none


@pytest.mark.parametrize("token_bytes", [[48], [6, 16, 6], [1024, 3]])
@pytest.mark.parametrize("widths", [[4, 1, 3], [40], [300]])
def test_copy_tails(kernels, rng, token_bytes, widths):
    for forced, blocks_of_grid in zip(UNITS, (1, 2, 7, 64, 3), strict=True):
        num_rows, num_blocks = sum(widths) + 1, 4
        buffers = Buffers(rng, token_bytes, num_rows * num_blocks - 2, forced)
        beams, parents = random_batch(rng, widths, num_rows, num_blocks)
        cells = rng.permutation(num_rows * num_blocks).astype(np.int32)
        table = np.full((num_rows, num_blocks + 3), -1, np.int32)[:, 1:-2]
        table[...] = cells.reshape(num_rows, num_blocks)
        sources = np.zeros_like(parents)
        reference.step_rows(table[:, None], beams, parents, sources)
        sources[-1] = 0
        fields = beam_fields(beams, "rows shared blocks valid") | {
            "table": address(table), "row_stride": table.strides[0] // 4,
            "sources": address(sources), "num_rows": num_rows, "num_blocks": num_blocks,
            "num_positions": len(parents), "block_tokens": T, "buffers": buffers.fields,
        }  # fmt: skip
        entry, grid = f"copy_tails_{buffers.unit}", (blocks_of_grid, 1, 1)
        compare(
            buffers.pools,
            partial(kernels.run, "copy_tails", entry, grid, **fields),
            partial(reference.copy_tails, buffers.places, table, beams, sources, T),
        )


@pytest.mark.parametrize("token_bytes", [[48], [6, 16, 6], [1024, 3]])
@pytest.mark.parametrize("pairs", [1, 40, MAX_INLINE])
@pytest.mark.parametrize("inline", [False, True])
def test_copy_tokens(kernels, rng, token_bytes, pairs, inline):
    for forced, blocks_of_grid in zip(UNITS, (1, 2, 7, 64, 3), strict=True):
        buffers = Buffers(rng, token_bytes, 2 * pairs, forced)
        lists = np.zeros((3, pairs), np.int32)
        lists[:2] = rng.permutation(2 * pairs).reshape(2, pairs)
        lists[:2][rng.random((2, pairs)) < 0.1] = rng.choice([-1, 2 * pairs, -(2**31)])
        lists[2] = rng.choice([-3, 0, 1, 3, 7, 8, 9, 2**31 - 1], pairs)
        grid = blocks_of_grid, 1, 1
        if inline:
            args, carried = np.zeros((), PAIR_ARGS), np.zeros((3, MAX_INLINE), np.int32)
            args["num_pairs"], args["buffers"] = pairs, buffers.fields
            carried[:, :pairs] = lists
            entry = f"copy_tokens_inline_{buffers.unit}"
            fields = {"args": args, "lists": carried.reshape(-1)}
        else:
            entry = f"copy_tokens_{buffers.unit}"
            fields = {"lists": address(lists), "num_pairs": pairs, "buffers": buffers.fields}
        compare(
            buffers.pools,
            partial(kernels.run, "copy_tails", entry, grid, **fields),
            partial(reference.copy_tokens, buffers.places, *lists),
        )
