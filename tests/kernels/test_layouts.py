"""Argument blocks as Python packs them and as the compiler sees them; the arithmetic of units."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device.base import PageGeometry
from kvcore.device.cuda.kernels import SOURCES, divider
from kvcore.device.cuda.layouts import cut_strided, cut_token, page_bits


@pytest.mark.parametrize("name", SOURCES)
def test_argument_layouts_agree_with_the_compiler(kernels, name):
    for struct, fields in SOURCES[name].structs.items():
        expected = [fields.itemsize, *(fields.fields[field][1] for field in fields.names)]
        assert kernels.layout(name, struct) == expected, struct


def test_arguments_fit_the_launch_limit():
    sizes = {entry: f.itemsize for s in SOURCES.values() for entry, f in s.entries.items()}
    assert max(sizes.values()) <= 4096
    assert len(sizes) == sum(len(source.entries) for source in SOURCES.values())


def test_dividers_divide():
    rng = np.random.default_rng(3)
    divs = [*range(1, 70), *(2**k for k in range(31)), 2**31 - 1, 2**31 - 2, 3 * 2**29]
    divs += rng.integers(1, 2**31, 200).tolist()
    for div in divs:
        mul, shift, _ = divider(div)
        last = (2**31 - 1) // div * div
        for n in {0, 1, div - 1, div, min(div + 1, 2**31 - 1), last - 1, last, 2**31 - 1}:
            if n >= 0:
                assert ((n * mul >> 32) + n) >> shift == n // div, (n, div)
        assert mul < 2**32
        assert shift < 32


def test_the_common_case_is_flat_and_wide():
    """Keys and values as engines have them: one run of 16-byte units per token."""
    g = PageGeometry(
        page_tokens=32, page_bytes=65536, expansion=1, heads=8, dim=128, itemsize=2,
        token_stride=2048, head_stride=256,
    )  # fmt: skip
    bits = page_bits(g, [(1 << 40, 131072)])
    cut = cut_token(g, bits, [(2048, 256, 2)] * 2, 1 << 30)
    assert (cut.suffix, cut.token_units) == ("_flat_16", 128)
    fused = cut_token(g, bits, [(6144, 256, 2)] * 2, (1 << 30) + 2048)
    assert fused.suffix == "_flat_16"
    odd = cut_token(g, bits, [(2048, 256, 2)] * 2, (1 << 30) + 8)
    assert (odd.suffix, odd.token_units, odd.flat) == ("_8", 256, True)
    columns = cut_token(g, bits, [(2048, 256, 16)] * 2, 1 << 30)
    assert (columns.unit, columns.item_units, columns.head_units) == (2, 1, 128)


def test_axes_of_length_one_and_too_many_axes():
    unit, fields = cut_strided((1, 3, 1, 4), (7, 8, 9, 2), (1, 8, 1, 2), 2, 64)
    assert (unit, fields["num_dims"]) == (2, 3)
    assert fields["source_strides"][:3] == [8, 2, 2]
    with pytest.raises(ValueError, match="at most 8 axes"):
        cut_strided((2,) * 9, (2,) * 9, (2,) * 9, 2, 64)
