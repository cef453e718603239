"""Where every buffer lies: layer groups, pools cut into slots, and page indices for kernels.

A *coalesced buffer* is all buffers of one layer group with the same stored size, in declaration
order; it is one pool, and one slot holds one block of all of them. Nothing is padded, so alignment
is what the buffer sizes give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.config import (
    BufferConfig,
    KVCacheManagerConfig,
    SsmLayerConfig,
    itemsize_bits,
    life_cycle_key,
)
from kvcore.errors import wrong, wrong_type
from kvcore.ids import LayerGroupId, LayerId, PageIndexMode, PoolGroupId

_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """How one token lies inside a page, the same for all layers and roles of a stack.

    A slot's buffer of `expansion` sub-pages holds `expansion * page_tokens` tokens. Token `t` and
    head `h` start `(t // page_tokens) * page_bytes + (t % page_tokens) * token_stride + h *
    head_stride` bytes into the buffer and take `dim * itemsize` bytes.
    """

    page_tokens: int
    page_bytes: int
    expansion: int
    heads: int
    dim: int
    itemsize: int
    token_stride: int  # bytes
    head_stride: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose blocks become useless at the same time (the reference's life cycle)."""

    id: LayerGroupId
    kind: str  # "attention", "sparse" or "ssm"
    window: int | None  # tokens, the newest included; None attends to all
    num_sink_blocks: int
    layer_ids: tuple[LayerId, ...]
    pool_group: PoolGroupId
    scratch_fraction: Fraction  # the largest part of a slot that one layer uses


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """Pools that allocate in lock-step: one slot id addresses the same cell in each."""

    id: PoolGroupId
    slot_bytes: tuple[int, ...]  # per pool, descending
    layer_groups: tuple[LayerGroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlace:
    """Where one buffer of one layer lies in a slot, and what turns slots into its page indices."""

    buffer: BufferConfig
    layer_id: LayerId
    role: str
    layer_group: LayerGroupId
    pool_group: PoolGroupId
    pool: int  # index in the pool group
    offset: int  # bytes from the start of the slot
    stored_bytes: int  # bytes of the buffer in a slot: declared size times expansion
    expansion: int  # pages per slot, for a buffer paged finer than the block
    scale: int  # buffers in a slot of this pool
    layer_offset: int  # this buffer's number among them

    @property
    def page_stride(self) -> int:
        """Bytes from one page index to the next."""
        return self.stored_bytes // self.expansion

    def upper_bound(self, num_slots: int) -> int:
        """One past the largest page index relative to the SHARED base.

        Four equal buffers in a slot, the last of them, 1000 slots: `4 * 1000 - 3`.
        """
        return (self.scale * num_slots - self.layer_offset) * self.expansion


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedPages:
    """Adjacent buffers of one pool, for copies that don't care whose bytes they are.

    The data of slot `i` are the `span` bytes at pool base + `offset` + `stride * i`.
    """

    layer_group: LayerGroupId
    pool_group: PoolGroupId
    pool: int
    offset: int  # bytes
    span: int  # bytes
    stride: int  # bytes, the size of a slot
    buffers: tuple[BufferPlace, ...]  # in memory order


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIndexConverter:
    """Slot ids to the page indices of one buffer.

    >>> convert = PageIndexConverter(scale=4, layer_offset=3, expansion=1)
    >>> convert([7, -1], PageIndexMode.SHARED), convert([7, -1], PageIndexMode.PER_LAYER)
    (array([28, -1], dtype=int32), array([31, -1], dtype=int32))
    >>> PageIndexConverter(scale=4, layer_offset=0, expansion=4)([7, -1], PageIndexMode.SHARED)
    array([112, 113, 114, 115,  -1,  -1,  -1,  -1], dtype=int32)
    """

    scale: int
    layer_offset: int
    expansion: int

    def __call__(self, slots: ArrayLike, mode: PageIndexMode) -> NDArray[np.int32]:
        """The page indices of `slots`.

        Parameters
        ----------
        slots : array_like of int, shape [..., n]
            Slot ids; negative ones stand for no page.
        mode : PageIndexMode
            Which base address the indices are relative to.

        Returns
        -------
        ndarray of int32, shape [..., n * expansion]
            -1, `expansion` times, where there is no page. A new array; O(its size).

        Raises
        ------
        TypeError
            `mode` is no `PageIndexMode`, or `slots` holds no integers.
        ValueError
            An index does not fit int32.
        """
        if not isinstance(mode, PageIndexMode):
            raise wrong_type("mode", "a PageIndexMode", mode)
        given = np.asarray(slots)
        if given.size and given.dtype.kind not in "iu":
            raise wrong_type("slots", "an array of integers", slots)
        pages = np.atleast_1d(given).astype(np.int64)
        absent = pages < 0
        pages *= self.scale
        if mode is PageIndexMode.PER_LAYER:
            pages += self.layer_offset
        if self.expansion > 1:
            absent = np.repeat(absent, self.expansion, axis=-1)
            pages = (pages[..., None] * self.expansion + np.arange(self.expansion)).reshape(
                absent.shape
            )
        if pages.size and pages.max() > _INT32_MAX:
            raise wrong("slots", "page indices below 2**31", int(pages.max()))
        pages[absent] = -1
        return pages.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The whole layout of a cache level. Immutable; made by `build_layout`."""

    tokens_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PoolGroup, ...]
    places: Mapping[tuple[LayerId, str], BufferPlace]

    def place(self, layer: int, role: str) -> BufferPlace:
        """The place of a buffer. O(1). Raises `ValueError` for an unknown layer or role."""
        try:
            found = self.places.get((LayerId(layer), role))
        except TypeError:  # not hashable
            raise wrong_type("layer, role", "an int and a str", (layer, role)) from None
        if found is not None:
            return found
        roles = [name for layer_id, name in self.places if layer_id == layer]
        if not roles:
            raise self._unknown_layer(layer)
        raise wrong("role", f"one of {roles} for layer {layer}", role)

    def layer_group_of(self, layer_id: int) -> LayerGroupId:
        """The layer group of a layer. Raises `ValueError` for an unknown layer."""
        for group in self.layer_groups:
            if layer_id in group.layer_ids:
                return group.id
        raise self._unknown_layer(layer_id)

    def converter(self, layer: int, role: str) -> PageIndexConverter:
        """The converter of a buffer. Raises `ValueError` for an unknown layer or role."""
        place = self.place(layer, role)
        return PageIndexConverter(
            scale=place.scale, layer_offset=place.layer_offset, expansion=place.expansion
        )

    def _unknown_layer(self, layer: object) -> ValueError:
        known = sorted({layer_id for layer_id, _ in self.places})
        return wrong("layer", f"one of the layer ids {known}", layer)


@dataclass(slots=True)
class _Cycle:
    """A layer group under construction: buckets of buffers by stored size."""

    key: tuple[str, int | None, int]
    layer_ids: list[LayerId]
    buckets: dict[int, list[tuple[LayerId, BufferConfig, int]]]  # size: (layer, buffer, expansion)

    def pools(self) -> list[tuple[int, int]]:
        """(slot bytes, stored size), slot bytes descending, ties in declaration order."""
        sizes = [(size * len(members), size) for size, members in self.buckets.items()]
        return sorted(sizes, key=lambda pool: -pool[0])

    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(slot for slot, _ in self.pools())

    def scratch_fraction(self) -> Fraction:
        """Over pools and layers, the largest (buffers of the layer) / (buffers of the pool)."""
        parts = []
        for members in self.buckets.values():
            owners = [layer for layer, _, _ in members]
            parts.append(Fraction(max(map(owners.count, set(owners))), len(owners)))
        return max(parts)


def build_layout(config: KVCacheManagerConfig) -> Layout:
    """Derives the layout of the hot level from the layers. O(buffers log buffers), deterministic.

    Layer groups are numbered by first appearance. Within one, buffers of equal stored size share a
    pool; pools are ordered by slot size, largest first. Layer groups with equal lists of slot sizes
    share a pool group; pool groups are numbered in sorted order of those lists.
    """
    cycles = _cycles(config)
    shapes = sorted({cycle.slot_bytes() for cycle in cycles})
    pool_group = [PoolGroupId(shapes.index(cycle.slot_bytes())) for cycle in cycles]
    layer_groups = tuple(
        LayerGroup(
            id=LayerGroupId(index),
            kind=cycle.key[0],
            window=cycle.key[1],
            num_sink_blocks=cycle.key[2],
            layer_ids=tuple(cycle.layer_ids),
            pool_group=pool_group[index],
            scratch_fraction=cycle.scratch_fraction(),
        )
        for index, cycle in enumerate(cycles)
    )
    pool_groups = tuple(
        PoolGroup(
            id=PoolGroupId(index),
            slot_bytes=sizes,
            layer_groups=tuple(group.id for group in layer_groups if group.pool_group == index),
        )
        for index, sizes in enumerate(shapes)
    )
    placed = {
        (place.layer_id, place.role): place
        for cycle, group in zip(cycles, layer_groups, strict=True)
        for place in _places(cycle, group)
    }
    declared = [
        (LayerId(layer.layer_id), buffer.role)
        for layer in config.layers
        for buffer in layer.buffers
    ]
    return Layout(
        tokens_per_block=config.tokens_per_block,
        layer_groups=layer_groups,
        pool_groups=pool_groups,
        places=MappingProxyType({key: placed[key] for key in declared}),
    )


def _cycles(config: KVCacheManagerConfig) -> list[_Cycle]:
    cycles: dict[tuple[str, int | None, int], _Cycle] = {}
    tokens_per_block = config.tokens_per_block
    for layer in config.layers:
        key = life_cycle_key(layer, tokens_per_block)
        cycle = cycles.setdefault(key, _Cycle(key, [], {}))
        cycle.layer_ids.append(LayerId(layer.layer_id))
        for buffer in layer.buffers:
            is_state = isinstance(layer, SsmLayerConfig)
            expansion = 1 if is_state else tokens_per_block // buffer.tokens(tokens_per_block)
            members = cycle.buckets.setdefault(buffer.size * expansion, [])
            members.append((LayerId(layer.layer_id), buffer, expansion))
    return list(cycles.values())


def _places(cycle: _Cycle, group: LayerGroup) -> Iterable[BufferPlace]:
    for pool, (_, size) in enumerate(cycle.pools()):
        members = cycle.buckets[size]
        for index, (layer_id, buffer, expansion) in enumerate(members):
            yield BufferPlace(
                buffer=buffer,
                layer_id=layer_id,
                role=buffer.role,
                layer_group=group.id,
                pool_group=group.pool_group,
                pool=pool,
                offset=index * size,
                stored_bytes=size,
                expansion=expansion,
                scale=len(members),
                layer_offset=index,
            )


def aggregate(layout: Layout, buffers: Iterable[tuple[int, str]]) -> tuple[AggregatedPages, ...]:
    """Merges buffers that are neighbours in memory, for copies of whole pages.

    Parameters
    ----------
    layout : Layout
        Where the buffers lie.
    buffers : iterable of (layer id, role)
        Any order, each at most once.

    Returns
    -------
    tuple of AggregatedPages
        Ordered by layer group, pool and offset; as few as possible. O(n log n).

    Raises
    ------
    ValueError
        A buffer is unknown or given twice.
    """
    places = [layout.place(layer, role) for layer, role in buffers]
    places.sort(key=lambda place: (place.layer_group, place.pool, place.offset))
    runs: list[list[BufferPlace]] = []
    for place in places:
        last = runs[-1][-1] if runs else None
        if last is place:
            raise wrong("buffers", "each buffer once", (place.layer_id, place.role))
        same_pool = last and (last.layer_group, last.pool) == (place.layer_group, place.pool)
        if last and same_pool and last.offset + last.stored_bytes == place.offset:
            runs[-1].append(place)
        else:
            runs.append([place])
    return tuple(_aggregated(layout, run) for run in runs)


def _aggregated(layout: Layout, run: list[BufferPlace]) -> AggregatedPages:
    first = run[0]
    return AggregatedPages(
        layer_group=first.layer_group,
        pool_group=first.pool_group,
        pool=first.pool,
        offset=first.offset,
        span=sum(place.stored_bytes for place in run),
        stride=layout.pool_groups[first.pool_group].slot_bytes[first.pool],
        buffers=tuple(run),
    )


def page_geometry(place: BufferPlace, tokens_per_block: int) -> PageGeometry:
    """How tokens lie in the pages of a typed buffer.

    A packed type counts bytes: `float4_e2m1fn` with a head dimension of 64 is 32 items of one byte.
    Raises `ValueError` for a buffer without dtype and shape.
    """
    buffer = place.buffer
    if buffer.dtype is None or buffer.shape is None:
        name = f"layer {place.layer_id}, buffer {place.role!r}"
        raise wrong(name, "a typed buffer", "an opaque one", "declare dtype and shape")
    page_tokens = tokens_per_block // place.expansion
    heads, dim = buffer.shape if len(buffer.shape) == 2 else (1, *buffer.shape)
    bits = itemsize_bits(buffer.dtype)
    head_bytes = dim * bits // 8
    itemsize = max(bits // 8, 1)
    by_head = buffer.layout == "HND"
    return PageGeometry(
        page_tokens=page_tokens,
        page_bytes=place.page_stride,
        expansion=place.expansion,
        heads=heads,
        dim=head_bytes // itemsize,
        itemsize=itemsize,
        token_stride=head_bytes if by_head else heads * head_bytes,
        head_stride=page_tokens * head_bytes if by_head else head_bytes,
    )
