"""How work is cut into units for a launch: the widest access that every address allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.device.base import PageGeometry
from kvcore.device.cuda.arguments import MAX_DIMS
from kvcore.device.cuda.kernels import divider, unit_bytes
from kvcore.errors import wrong

Strides = tuple[int, int, int]
"""Bytes from token to token, from head to head and from item to item."""


@dataclass(frozen=True, slots=True)
class TokenCut:
    """How the units of a token follow each other."""

    unit: int  # bytes
    flat: bool  # the whole token is one run on both sides
    token_units: int
    head_units: int
    item_units: int

    @property
    def suffix(self) -> str:
        """The end of the kernel's name."""
        return "_flat_16" if self.flat and self.unit == 16 else f"_{self.unit}"


def page_bits(geometry: PageGeometry, places: Sequence[tuple[int, int]]) -> int:
    """The low bits of everything that a token's address in a page is made of, heads left out.

    `places` are (address of the buffer in slot 0, bytes of a slot).
    """
    g, bits = geometry, 0
    for base, slot_bytes in places:
        bits |= base | slot_bytes
    if g.expansion > 1:
        bits |= g.page_bytes
    if g.page_tokens > 1:
        bits |= g.token_stride
    return bits


def cut_token(
    geometry: PageGeometry, bits: int, strides: Sequence[Strides], array_bits: int
) -> TokenCut:
    """The cut for arrays of these strides.

    Parameters
    ----------
    geometry : PageGeometry
        The stack's.
    bits : int
        From `page_bits`.
    strides : sequence of (token, head, item)
        One per array, in bytes; strides of axes of length 1 do not matter.
    array_bits : int
        The arrays' addresses and layer strides, or-ed together.
    """
    g = geometry
    row = g.dim * g.itemsize
    dense = all(item == g.itemsize for _, _, item in strides) or g.dim == 1
    adjoin = dense and (
        g.heads == 1 or (g.head_stride == row and all(head == row for _, head, _ in strides))
    )
    run = g.heads * row if adjoin else row if dense else g.itemsize
    bits |= array_bits | run
    for token, head, item in strides:
        bits |= token
        if not adjoin:
            bits |= head if g.heads > 1 else 0
        if not dense:
            bits |= item
    if not adjoin and g.heads > 1:
        bits |= g.head_stride
    unit = unit_bytes(bits)
    token_units = g.heads * row // unit
    head_units = token_units if adjoin else row // unit
    return TokenCut(unit, adjoin, token_units, head_units, run // unit)


def cut_page(geometry: PageGeometry, bits: int) -> TokenCut:
    """The cut for tokens that go from page to page; `bits` from `page_bits`."""
    row = geometry.dim * geometry.itemsize
    return cut_token(geometry, bits, [(0, row, geometry.itemsize)], 0)


def cut_strided(
    shape: tuple[int, ...],
    source: tuple[int, ...],
    target: tuple[int, ...],
    itemsize: int,
    bits: int,
) -> tuple[int, dict[str, Any]]:
    """Unit and argument fields for a copy between two arrays of one shape.

    `source` and `target` are strides in bytes, `bits` the two addresses or-ed. Axes of length 1
    fall away. Raises `ValueError` for more axes than the kernel has.
    """
    axes = [axis for axis in zip(shape, source, target, strict=True) if axis[0] != 1]
    for _, a, b in axes:
        bits |= a | b
    unit = unit_bytes(bits, itemsize)
    axes.append((itemsize // unit, unit, unit))
    if len(axes) > MAX_DIMS:
        raise wrong("array", f"at most {MAX_DIMS - 1} axes", len(shape))
    fill = MAX_DIMS - len(axes)
    return unit, {
        "sizes": [divider(size) for size, _, _ in axes] + [divider(1)] * fill,
        "source_strides": [stride for _, stride, _ in axes] + [0] * fill,
        "target_strides": [stride for _, _, stride in axes] + [0] * fill,
        "num_dims": len(axes),
    }
