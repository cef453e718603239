"""How the pages of some buffers are numbered, for tables that kernels of others read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.device.base import PageNumbers
from kvcore.errors import wrong
from kvcore.ids import PageIndexMode
from kvcore.layout import BufferPlace, Layout


class Pages(NamedTuple):
    """The pages of some buffers, which have the same numbers."""

    layer_group: int
    numbers: PageNumbers
    tokens: int
    """Of a page."""


def find_pages(
    layout: Layout,
    layers: Sequence[int],
    roles: Sequence[str],
    declared: str,
    mode: PageIndexMode | None,
) -> Pages:
    """The pages of some buffers.

    Raises `ValueError` where one is unknown, or not declared in the order `declared`, or they
    differ in their numbers.
    """
    if not layers or not roles:
        raise wrong("layers, roles", "at least one of each", (layers, roles))
    places = [layout.place(layer, role) for layer in layers for role in roles]
    for place in places:
        _check_layout(place, declared)
    found = {_pages_of(place, layout.tokens_per_block, mode) for place in places}
    if len(found) > 1:
        text = "buffers of one layer group with the same page numbers"
        raise wrong("layers, roles", text, (layers, roles), "use one call for each")
    return found.pop()


def _check_layout(place: BufferPlace, layout: str) -> None:
    declared = place.buffer.layout
    if declared == layout:
        return
    remedy = f"declare it so, or pass layout={declared!r} if the kernel can read that"
    if declared is None:
        remedy = "declare its dtype, shape and layout"
    elif layout == "NH2D":
        remedy = (
            "declare one buffer of shape (2 * heads, dim) in which keys and values alternate, or "
            f"pass layout={declared!r} for a kernel that reads them apart"
        )
    name = f"layer {place.layer_id}, buffer {place.role!r}: layout"
    raise wrong(name, f"{layout!r}, which the kernel reads", declared, remedy)


def _pages_of(place: BufferPlace, block: int, mode: PageIndexMode | None) -> Pages:
    if mode is None:
        if place.expansion > 1:
            name = f"layer {place.layer_id}, buffer {place.role!r}"
            text = "one page a block where a page's number is its slot"
            raise wrong(name, text, place.expansion, "pass mode=PageIndexMode.SHARED")
        return Pages(place.layer_group, PageNumbers(), block)
    offset = place.layer_offset if mode is PageIndexMode.PER_LAYER else 0
    scale, expansion = place.scale * place.expansion, place.expansion
    numbers = PageNumbers(scale, offset * expansion, expansion)
    return Pages(place.layer_group, numbers, block // expansion)
