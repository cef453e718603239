"""append, gather and the fingerprints: the kernels' text on the CPU against the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvcore.device import reference
from kvcore.device.base import PageGeometry
from kvcore.device.cuda.arguments import PLACE
from kvcore.device.cuda.kernels import UNITS, divider
from kvcore.device.cuda.layouts import cut_token, page_bits
from kvcore.ids import div_ceil
from tests.kernels.guarded import Guarded, address, compare, int32

SHAPES = [  # heads, dim, itemsize
    (2, 8, 2), (3, 5, 1), (1, 1, 8), (2, 3, 4), (4, 2, 16), (1, 33, 1), (5, 7, 2),
]  # fmt: skip
VIEWS = {
    "dense": lambda a: a,
    "sliced": lambda a: a[:, ::2, :, :],
    "backwards": lambda a: a[:, ::-1, ::-1, ::-1],
    "items apart": lambda a: a[..., ::2],
    "broadcast": lambda a: np.broadcast_to(a[:1, :1], a.shape),
}


class Case:
    """A stack of 2 layers and 2 roles in two pools, and tokens for it."""

    def __init__(self, rng, layout, shape, *, expansion=2, page_tokens=4, tokens=37, offset=0):
        heads, dim, itemsize = shape
        item = dim * itemsize
        self.geometry = PageGeometry(
            page_tokens=page_tokens,
            page_bytes=page_tokens * heads * item + 3 * itemsize,
            expansion=expansion,
            heads=heads,
            dim=dim,
            itemsize=itemsize,
            token_stride=heads * item if layout == "NHD" else item,
            head_stride=item if layout == "NHD" else page_tokens * item,
        )
        size = expansion * self.geometry.page_bytes
        slots = [2 * size + offset + itemsize, 2 * size + 32]
        self.pools = [Guarded(rng, (count * n,)) for count, n in zip((9, 7), slots, strict=True)]
        at = [(0, offset), (1, 16), (0, offset + size), (1, 16 + size)]
        self.places = [(self.pools[p].bytes, slots[p], where) for p, where in at]
        cells = rng.integers(-2, 9, tokens), rng.integers(-1, expansion * page_tokens + 1, tokens)
        mapping = np.unique(np.stack(cells, axis=1), axis=0)  # no place twice
        rng.shuffle(mapping)
        mapping[0] = 6, expansion * page_tokens - 1  # the last token of the last slot
        last = (mapping[1:] == mapping[0]).all(axis=1)
        mapping[1:][last] = -(2**31), 2**31 - 1
        self.mapping = mapping.astype(np.int32)
        self.tokens = len(mapping)

    def arrays(self, rng, view):
        g = self.geometry
        shape = 2, 2 * self.tokens, g.heads, 2 * g.dim
        whole = [Guarded(rng, shape, g.itemsize) for _ in range(2)]
        views = [view(w.array)[:, : self.tokens, :, : g.dim] for w in whole]
        return whole, views

    def fields(self, arrays, forced):
        """The arguments of a launch, with units of at most `forced` bytes."""
        g = self.geometry
        num_slots = reference.num_slots([place[:2] for place in self.places])
        bases = [address(data) + where for data, _, where in self.places]
        sizes = [size for _, size, _ in self.places]
        self.table = np.array(
            [(b, s, num_slots, 0) for b, s in zip(bases, sizes, strict=True)], PLACE
        )
        bits = page_bits(g, list(zip(bases, sizes, strict=True)))
        strides = [a.strides[1:] for a in arrays]
        array_bits = forced
        for array in arrays:
            array_bits |= address(array) | array.strides[0]
        cut = cut_token(g, bits, strides, array_bits)
        columns = {
            name: [its[i] for its in strides] + [0, 0]
            for i, name in enumerate(("token", "head", "item"))
        }
        pages = (
            address(self.table), g.page_bytes, g.token_stride, g.head_stride,
            divider(g.page_tokens), g.expansion * g.page_tokens, 2, 0,
        )  # fmt: skip
        return cut, {
            "mapping": address(self.mapping),
            "base": [address(a) for a in arrays] + [0, 0],
            "layer": [a.strides[0] for a in arrays] + [0, 0],
            "num_units": self.tokens * cut.token_units,
            "pages": pages,
            **columns,
            "token_units": divider(cut.token_units),
            "head_units": divider(cut.head_units),
            "item_units": divider(cut.item_units),
        }

    def run(self, kernels, source, arrays, forced):
        cut, fields = self.fields(arrays, forced)
        blocks = div_ceil(fields["num_units"], kernels.sources[source].chunk)
        kernels.run(source, f"{source}{cut.suffix}", (blocks, 2, 2), **fields)
        return cut


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_append(kernels, rng, layout, shape, view):
    for forced in UNITS:
        case = Case(rng, layout, shape)
        _, sources = case.arrays(rng, VIEWS[view])
        args = case.places, 2, case.geometry, case.mapping, sources
        compare(
            case.pools,
            partial(case.run, kernels, "append", sources, forced),
            partial(reference.append, *args),
        )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", [name for name in VIEWS if name != "broadcast"])
def test_gather(kernels, rng, layout, shape, view):
    for forced in UNITS:
        case = Case(rng, layout, shape)
        whole, targets = case.arrays(rng, VIEWS[view])
        args = case.places, 2, case.geometry, case.mapping, targets
        compare(
            whole,
            partial(case.run, kernels, "gather", targets, forced),
            partial(reference.gather, *args),
        )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fingerprints(kernels, rng, layout, shape):
    case = Case(rng, layout, shape, offset=1 if shape[2] == 1 else 0)
    keys = rng.integers(-(2**63), 2**63 - 1, case.tokens)
    keys[:3] = 0, -1, -(2**63)
    size = shape[0] * shape[1] * shape[2]
    words = div_ceil(size, 4)
    _, fields = case.fields(case.arrays(rng, VIEWS["dense"])[1], 16)
    bad = int32(rng, np.zeros(case.tokens))
    common = {
        "pages": fields["pages"], "mapping": fields["mapping"], "keys": address(keys),
        "num_words": case.tokens * words, "token_bytes": size, "token_words": divider(words),
        "head_bytes": divider(shape[1] * shape[2]),
    }  # fmt: skip
    grid = div_ceil(case.tokens * words, kernels.sources["fingerprint"].threads), 2, 2
    compare(
        case.pools,
        partial(kernels.run, "fingerprint", "write_fingerprints", grid, **common),
        partial(reference.write_fingerprints, case.places, 2, case.geometry, case.mapping, keys),
    )
    for hurt in (0, 0.1):
        for pool in case.pools:
            pool.bytes[rng.random(pool.bytes.size) < hurt] ^= 4
        bad.array[...] = 0
        kernels.run("fingerprint", "verify_fingerprints", grid, bad=bad.address, **common)
        expected = np.full(case.tokens, 7, np.int32)
        reference.verify_fingerprints(case.places, 2, case.geometry, case.mapping, keys, expected)
        np.testing.assert_array_equal(bad.array, expected)
        assert bool(expected.any()) is bool(hurt)
