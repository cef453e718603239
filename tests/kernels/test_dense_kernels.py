"""permute_rows: the kernel's text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference_beams as reference
from kvcore.device.cuda.kernels import UNITS, unit_bytes
from tests.kernels.guarded import Guarded, address, compare, int32

SEGMENTS, TOKENS = 3, 5


class Dense:
    """Two guarded arrays [rows, segments, tokens, bytes] whose rows lie apart."""

    def __init__(self, rng, num_rows, token_bytes, forced):
        gap = token_bytes * 2
        segment = TOKENS * token_bytes
        row = SEGMENTS * segment + gap
        self.guarded = [Guarded(rng, (num_rows, row)) for _ in range(2)]
        self.arrays = [
            its.array[:, :-gap].reshape(num_rows, SEGMENTS, TOKENS, token_bytes)
            for its in self.guarded
        ]
        for its, array in zip(self.guarded, self.arrays, strict=True):
            assert np.shares_memory(its.array, array)
        self.unit = unit_bytes(*map(address, self.arrays), row, token_bytes, forced)
        self.fields = {
            "row_stride": row, "segments": SEGMENTS, "segment_units": segment // self.unit,
            "num_rows": num_rows,
        }  # fmt: skip

    def pointers(self, fields):
        fields["arrays"] = [*map(address, self.arrays)] + [0] * 254
        return fields


def wild_parents(rng, widths):
    """Of each row within its request, some of them invalid."""
    found = np.concatenate([rng.integers(0, width, width) for width in widths])
    wild = rng.random(len(found)) < 0.15
    found[wild] = rng.choice([-1, max(widths), 2**31 - 1, -(2**31)], int(wild.sum()))
    return found.astype(np.int32)


def run(kernels, dense, grid, shared, **fields):
    fields = dense.pointers(dense.fields | fields)
    kernels.run("permute_rows", f"permute_rows_{dense.unit}", grid, shared, **fields)


def room(width, unit, shift):
    """Bytes of shared memory."""
    return ((width << shift) * unit + 1) // 2 * 2 + 2 * width


@pytest.mark.parametrize("widths", [[2, 4, 1, 3], [16, 7], [33, 20]])
@pytest.mark.parametrize("token_bytes", [48, 6, 3])
@pytest.mark.parametrize("some_tokens", [False, True])
def test_permute_rows(kernels, rng, widths, token_bytes, some_tokens):
    most = max(widths)
    for forced, x, y, shift in zip(UNITS, (1, 3, 9, 2, 5), (1, 2, 3, 4, 1), (7, 2, 0, 4, 5),
                                   strict=True):  # fmt: skip
        dense = Dense(rng, sum(widths) + 2, token_bytes, forced)
        parents = int32(rng, wild_parents(rng, [*widths, 1, 1]))
        starts = int32(rng, np.cumsum([0, *widths]))
        tokens = int32(rng, rng.choice([-4, 0, 2, TOKENS, 2**31 - 1], len(widths)))
        fields = {
            "parents": parents.address, "starts": starts.address, "width": most,
            "num_requests": len(widths),
        }  # fmt: skip
        if some_tokens:
            fields |= {"tokens": tokens.address, "token_units": token_bytes // dense.unit}
        given = starts.array, tokens.array if some_tokens else None, 2
        shared = room(most, dense.unit, shift)
        compare(
            [*dense.guarded, parents, starts, tokens],
            partial(run, kernels, dense, (x, y, 2), shared, shift=shift, **fields),
            partial(reference.permute_rows, dense.arrays, parents.array, most, *given),
        )


@pytest.mark.parametrize("width", [2, 4, 12, 35])
def test_requests_of_one_width(kernels, rng, width):
    shift = 3
    dense = Dense(rng, 3 * width, 16, 16)
    parents = int32(rng, wild_parents(rng, [width] * 3))
    fields = {"parents": parents.address, "width": width, "num_requests": 3, "shift": shift}
    shared = room(width, dense.unit, shift)
    compare(
        [*dense.guarded, parents],
        partial(run, kernels, dense, (2, 3, 2), shared, **fields),
        partial(reference.permute_rows, dense.arrays, parents.array, width, None, None, 2),
    )


@pytest.mark.parametrize(
    "starts", [(-1, 3, 6), (0, 3, 11), (0, 7, 7), (4, 2, 5), (0, 2**31 - 1, -9)]
)
def test_wild_starts_never_leave_the_arrays(kernels, rng, starts):
    dense = Dense(rng, 10, 16, 16)
    parents = int32(rng, wild_parents(rng, [4, 4, 2]))
    starts = int32(rng, starts)
    fields = {
        "parents": parents.address, "starts": starts.address, "width": 4, "num_requests": 2,
    }  # fmt: skip
    shared = room(4, dense.unit, 0)
    compare(
        [*dense.guarded, parents, starts],
        partial(run, kernels, dense, (2, 2, 2), shared, **fields),
        partial(reference.permute_rows, dense.arrays, parents.array, 4, starts.array, None, 2),
    )
