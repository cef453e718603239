"""copy_pages and fill_pages: the kernels' text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference
from kvcore.device.cuda.arguments import MAX_INLINE, MAX_POOLS, SLOT_ARGS
from kvcore.device.cuda.kernels import UNITS, divider, unit_bytes
from kvcore.ids import div_ceil
from tests.kernels.guarded import Guarded, address, compare


def slot_fields(kernels, source, pools, count, forced):
    """(unit, blocks, fields) of a launch over `pools`, (guarded array, bytes of a slot) each."""
    bits = forced
    for pool, slot_bytes in pools:
        bits |= pool.address | slot_bytes
    unit, before, rows = unit_bytes(bits), 0, []
    limit = min(pool.array.size // slot_bytes for pool, slot_bytes in pools)
    for pool, slot_bytes in pools:
        chunks = div_ceil(slot_bytes, unit * kernels.sources[source].chunk)
        rows.append((pool.address, slot_bytes, before, divider(chunks)))
        before += chunks
    rows += [(0, 0, 0, divider(1))] * (MAX_POOLS - len(rows))
    fields = {"num_slots": count, "limit": limit, "num_pools": len(pools), "pools": rows}
    return unit, before * count, fields


def run_slots(kernels, source, entry, pools, ids, forced, pattern=0):
    """The staged launch where the number of ids is even, the inline one where it is odd."""
    count = ids.shape[-1]
    unit, blocks, fields = slot_fields(kernels, source, pools, count, forced)
    fields["pattern"] = pattern
    if count % 2:
        args = np.zeros((), SLOT_ARGS)
        for name, value in fields.items():
            args[name] = value
        carried = np.zeros((2, MAX_INLINE), np.int32)
        carried[: len(ids), :count] = ids
        inline = f"{entry}_inline_{unit}"
        kernels.run(source, inline, (blocks, 1, 1), args=args, slots=carried.reshape(-1))
    else:
        kernels.run(source, f"{entry}_{unit}", (blocks, 1, 1), slots=address(ids), **fields)


SLOT_BYTES = [1, 24, 33, 40, 1024, 4112, 20_000]


@pytest.mark.parametrize("slot_bytes", SLOT_BYTES)
@pytest.mark.parametrize("count", [1, 6, 9])
def test_copy_pages(kernels, rng, slot_bytes, count):
    for forced in UNITS:
        shapes = (24, slot_bytes), (20, slot_bytes + 16), (31, slot_bytes + 4)
        pools = [(Guarded(rng, (slots * size,)), size) for slots, size in shapes]
        ids = rng.permutation(22)[: 2 * count].reshape(2, count).astype(np.int32)
        ids[rng.random(ids.shape) < 0.1] = -1
        named = [(pool.bytes, size) for pool, size in pools]
        compare(
            [pool for pool, _ in pools],
            partial(run_slots, kernels, "copy_pages", "copy_pages", pools, ids, forced),
            partial(reference.copy_pages, named, *ids),
        )


@pytest.mark.parametrize("slot_bytes", SLOT_BYTES)
@pytest.mark.parametrize("count", [1, 6])
def test_fill_pages(kernels, rng, slot_bytes, count):
    for forced in UNITS:
        shapes = (14, slot_bytes), (9, 3 * slot_bytes)
        pools = [(Guarded(rng, (slots * size,)), size) for slots, size in shapes]
        ids = rng.integers(-2, 12, (1, count)).astype(np.int32)
        named = [(pool.bytes, size) for pool, size in pools]
        run = partial(run_slots, kernels, "fill", "fill_pages", pools, ids, forced, 0xA5A5A5A5)
        compare(
            [pool for pool, _ in pools], run, partial(reference.fill_pages, named, ids[0], 0xA5)
        )
