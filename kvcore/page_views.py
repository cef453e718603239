"""Pool memory as typed arrays: address, shape and true strides of what can be leased."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.checks import as_int
from kvcore.dlpack.view import ArrayView, contiguous
from kvcore.errors import wrong, wrong_type
from kvcore.layer_config import itemsize_bits
from kvcore.layout import BufferPlace, page_geometry

if TYPE_CHECKING:
    from kvcore.device.base import Memory
    from kvcore.dlpack.patterns import Pattern
    from kvcore.runtime import Runtime


class Leasable(NamedTuple):
    """A part of memory, and what errors call it."""

    view: ArrayView
    memory: Memory
    end: int
    """Bytes from the base of the memory to the end of the view."""
    name: str
    patterns: dict[tuple[Any, Any], Pattern]
    """Of its capsules, made when they are first needed."""

    def read_only(self) -> Leasable:
        """The same for reading."""
        return self._replace(view=self.view.read_only(), patterns={})


def buffer_view(runtime: Runtime, layer: int, role: str, pages: range | None) -> Leasable:
    """The pages of one buffer: `[pages, ...]`, each as the layout declares it.

    The slots lie as far apart as all buffers of the pool need; a page is contiguous.
    """
    place = runtime.layout.place(layer, role)
    memory = runtime.pools[place.pool_group][place.pool]
    slot_bytes = runtime.layout.pool_groups[place.pool_group].slot_bytes[place.pool]
    slots = _checked_pages(pages, runtime.control.slots[place.pool_group].capacity)
    dtype, bits = _type(place)
    name = f"layer {layer}, buffer {role!r}"
    step = 8 * slot_bytes // bits  # exact: all buffers of a pool have the same size
    inner = block_shape(place, runtime.layout.tokens_per_block)
    return _leasable(
        runtime,
        memory,
        memory.base + place.offset + slots.start * slot_bytes,
        (len(slots), *inner),
        (slots.step * step, *contiguous(inner)),
        dtype,
        name,
    )


def pool_view(runtime: Runtime, layer_group: int, pool: int) -> Leasable:
    """A whole pool without gaps: `[page indices, ...]`, one page of one buffer after the other.

    PER_LAYER page indices count its first axis. Buffers of several types or shapes have no array in
    common: then it is uint8 `[slots, bytes]`.
    """
    groups = runtime.layout.layer_groups
    group = groups[as_int("layer_group", layer_group, 0, len(groups) - 1)]
    sizes = runtime.layout.pool_groups[group.pool_group].slot_bytes
    slot_bytes = sizes[as_int("pool", pool, 0, len(sizes) - 1)]
    memory = runtime.pools[group.pool_group][pool]
    slots = runtime.control.slots[group.pool_group].capacity
    places = [
        place
        for place in runtime.layout.places.values()
        if place.layer_group == group.id and place.pool == pool
    ]
    tokens = runtime.layout.tokens_per_block
    kinds = {(_type(place)[0], place.expansion, page_shape(place, tokens)) for place in places}
    name = f"pool {pool} of layer group {layer_group}"
    shape: tuple[int, ...] = slots, slot_bytes
    dtype = "uint8"
    if len(kinds) == 1:
        dtype, expansion, inner = kinds.pop()
        shape = slots * places[0].scale * expansion, *inner
    return _leasable(runtime, memory, memory.base, shape, contiguous(shape), dtype, name)


def table_view(runtime: Runtime, layer_group: int) -> Leasable:
    """The device's page table of a layer group, int32 `[rows, blocks]`, to be read only."""
    groups = len(runtime.layout.layer_groups)
    as_int("layer_group", layer_group, 0, groups - 1)
    memory = runtime.device_tables().memory
    rows, _, blocks = runtime.control.seqs.table.shape
    address = memory.base + 4 * layer_group * blocks
    strides = groups * blocks, 1
    name = f"page table of layer group {layer_group}"
    found = _leasable(runtime, memory, address, (rows, blocks), strides, "int32", name)
    return found.read_only()


def block_shape(place: BufferPlace, tokens_per_block: int) -> tuple[int, ...]:
    """The shape of one slot's pages of a buffer, in memory order.

    NHD `[tokens, heads, dim]`; HND `[heads, tokens, dim]`, with an axis for the pages of a slot in
    front where they are finer than the block. Opaque buffers have bytes.
    """
    shape = page_shape(place, tokens_per_block)
    if place.buffer.dtype is None or place.expansion == 1:
        return (shape[0] * place.expansion, *shape[1:])
    if place.buffer.layout == "HND":
        return place.expansion, *shape
    return shape[0] * place.expansion, *shape[1:]  # they follow each other: the block is contiguous


def page_shape(place: BufferPlace, tokens_per_block: int) -> tuple[int, ...]:
    """The shape of one page of a buffer, in memory order."""
    buffer = place.buffer
    if buffer.dtype is None or buffer.shape is None:
        return (place.page_stride,)
    geometry = page_geometry(place, tokens_per_block)
    tokens, dim = geometry.page_tokens, buffer.shape[-1]
    if buffer.layout == "HND":
        return geometry.heads, tokens, dim
    return tokens, geometry.heads, dim


def _type(place: BufferPlace) -> tuple[str, int]:
    dtype = place.buffer.dtype or "uint8"
    return dtype, itemsize_bits(dtype)


def _checked_pages(pages: range | None, slots: int) -> range:
    if pages is None:
        return range(slots)
    if not isinstance(pages, range):
        raise wrong_type("pages", "None or a range of slots", pages)
    inside = not pages or (0 <= pages[0] <= pages[-1] < slots)
    if pages.step < 1 or not inside:
        raise wrong("pages", f"a rising range in [0, {slots})", pages)
    return pages if pages else range(0)


def _leasable(
    runtime: Runtime,
    memory: Memory,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    name: str,
) -> Leasable:
    runtime.device_tables()  # refuses a device without memory
    view = ArrayView(
        address=address,
        shape=shape,
        strides=strides,
        dtype=dtype,
        device=runtime.device.dlpack_device,
        owner=memory,
    )
    return Leasable(view, memory, view.end - memory.base, name, {})
