"""step_indirection: the kernel's text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import pytest

from kvcore.device import reference_beams as reference
from tests.kernels.guarded import address, compare, int32


@pytest.mark.parametrize("beams", [1, 4, 33, 70])
@pytest.mark.parametrize("some_widths", [False, True])
@pytest.mark.parametrize(("grid", "shift"), [((1, 1, 1), 0), ((3, 2, 1), 2), ((2, 9, 1), 8)])
def test_step_indirection(kernels, rng, beams, some_widths, grid, shift):
    requests, positions = 5, 37
    whole = int32(rng, rng.integers(0, 99, requests * (beams + 1) * (positions + 2)))
    cells = whole.array.reshape(requests, beams + 1, positions + 2)[:, 1:, :-2]
    parents = int32(rng, rng.integers(-2, beams + 2, (requests, beams)))
    starts = int32(rng, [3, -5, 30, 0, 2**31 - 1])
    ends = int32(rng, [20, 36, 2**31 - 1, -1, 7])
    widths = int32(rng, [beams, 2, -1, beams, 2**31 - 1])
    fields = {
        "cells": address(cells), "request_stride": cells.strides[0] // 4,
        "beam_stride": cells.strides[1] // 4, "parents": parents.address,
        "starts": starts.address, "ends": ends.address,
        "widths": widths.address if some_widths else 0, "num_requests": requests,
        "num_beams": beams, "num_positions": positions, "shift": shift,
    }  # fmt: skip
    shared = 4 * (beams << shift) + 2 * beams
    lists = [its.array for its in (parents, starts, ends)]
    name = "step_indirection"
    compare(
        [whole, parents, starts, ends, widths],
        partial(kernels.run, name, name, grid, shared, **fields),
        partial(reference.step_indirection, cells, *lists, widths.array if some_widths else None),
    )
