"""The NumPy reference of every operation of a device: what the kernels must do, exactly.

Pure functions on NumPy arrays. A *place* is where one buffer of a page stack lies: the backed bytes
of its pool as one uint8 array, the bytes of a slot in that pool, and the buffer's byte offset in a
slot. The host device calls these functions; the CUDA kernels are compared with them bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Int32, Int64, PageGeometry

Bytes = NDArray[np.uint8]
Place = tuple[Bytes, int, int]
Pool = tuple[Bytes, int]

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
WORD: Final = 4  # bytes of a fingerprint's word


def fill_words(target: Int32, value: int) -> None:
    """Sets every element."""
    target[...] = value


def scatter_table(table: Int32, index: Int64, value: Int32, target: Int32, words: Int32) -> None:
    """Writes single cells of a table, and the first words of another array."""
    table.reshape(-1)[index] = value
    target.reshape(-1)[: len(words)] = words


def map_tokens(
    tables: Int32, rows: Int32, starts: Int32, ends: Int32, out: Int32, tokens_per_block: int
) -> None:
    """(slot, token within the block) of each token of a ragged batch, or (-1, 0)."""
    out[:] = -1, 0
    num_rows, num_blocks = tables.shape[1:]
    begins = np.zeros(len(ends), np.int64)
    begins[1:] = ends[:-1]
    batch = np.searchsorted(ends, np.arange(out.shape[1]), side="right")
    n = np.flatnonzero(batch < len(ends))
    batch = batch[n]
    row = rows[batch]
    block, token = np.divmod(starts[batch] + (n - begins[batch]), tokens_per_block)
    inside = (row >= 0) & (row < num_rows) & (block >= 0) & (block < num_blocks)
    n, row, block, token = n[inside], row[inside], block[inside], token[inside]
    slots = tables[:, row, block]
    out[:, n, 0] = np.maximum(slots, -1)
    out[:, n, 1] = np.where(slots >= 0, token, 0)


def take_rows(table: Int32, rows: Int32, out: Int32) -> None:
    """Rows of a table one under the other, -1 for cells outside the table."""
    width = min(table.shape[1], out.shape[1])
    inside = (rows >= 0) & (rows < len(table))
    out[...] = -1
    out[inside, :width] = table[rows[inside], :width]


def append(
    places: Sequence[Place],
    num_roles: int,
    geometry: PageGeometry,
    mapping: Int32,
    sources: Sequence[NDArray[Any]],
) -> None:
    """Writes tokens into their pages, for all places of a stack."""
    at = locate(places, geometry, mapping)
    for cells, layer, role in _cells(places, num_roles, geometry, at):
        source = _items(sources[role], geometry)[layer]
        cells[at.slot, at.page, at.token] = source if at.all_real else source[at.n]


def gather(
    places: Sequence[Place],
    num_roles: int,
    geometry: PageGeometry,
    mapping: Int32,
    targets: Sequence[NDArray[Any]],
) -> None:
    """Reads tokens out of their pages, for all places of a stack; zeros where there is none."""
    at = locate(places, geometry, mapping)
    if not at.all_real:
        for target in targets:
            _items(target, geometry)[...] = np.zeros((), _item(geometry))
    for cells, layer, role in _cells(places, num_roles, geometry, at):
        target = _items(targets[role], geometry)[layer]
        target[slice(None) if at.all_real else at.n] = cells[at.slot, at.page, at.token]


def copy_pages(pools: Sequence[Pool], src: Int32, dst: Int32) -> None:
    """Copies whole slots, in every pool; pairs with a slot outside the pool are skipped."""
    real = inside(pools, src) & inside(pools, dst)
    for slots in map(_slots, pools):
        slots[dst[real]] = slots[src[real]]


def fill_pages(pools: Sequence[Pool], slots: Int32, value: int) -> None:
    """Sets every byte of whole slots, in every pool; slots outside the pool are skipped."""
    real = slots[inside(pools, slots)]
    for pool in map(_slots, pools):
        pool[real] = value


def fingerprint(keys: Int64, layer: int, role: int, num_bytes: int) -> Bytes:
    """The test pattern of tokens: `[N, num_bytes]` for `keys` `[N]`.

    The bytes of a token are counted from 0 over its `[H, D]` items as one dense array, heads first,
    wherever the page keeps them. Byte b is bits `8 * (b % 4)` to `8 * (b % 4) + 7` of the token's
    32-bit word `w = b // 4` (little-endian); where the number of bytes is no multiple of four, the
    last word's high bytes are dropped. A word may span two heads. With `layer` and `role` the
    indices in the stack, in unsigned 64-bit arithmetic that wraps around::

        z = uint64(key) * 0x9E3779B97F4A7C15 + (layer << 40) + (role << 32) + w
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        word = uint32((z ^ (z >> 31)) >> 32)

    `uint64(key)` is the two's complement of a negative key. This is the finaliser of SplitMix64:
    every input bit changes every output bit with probability near one half.

    >>> fingerprint(np.array([1]), layer=2, role=0, num_bytes=6).tolist()
    [[11, 157, 238, 53, 10, 208]]
    """
    words = np.arange(-(-num_bytes // WORD), dtype=np.uint64)
    words += np.uint64((layer << 40) + (role << 32))
    z = np.ascontiguousarray(keys, np.int64).view(np.uint64)[:, None] * np.uint64(GOLDEN) + words
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    pattern = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype("<u4")
    return pattern.view(np.uint8)[:, :num_bytes]


def write_fingerprints(
    places: Sequence[Place], num_roles: int, geometry: PageGeometry, mapping: Int32, keys: Int64
) -> None:
    """Fills tokens with their pattern."""
    geometry = as_bytes(geometry)
    at = locate(places, geometry, mapping)
    for cells, layer, role in _cells(places, num_roles, geometry, at):
        pattern = fingerprint(keys[at.n], layer, role, geometry.heads * geometry.dim)
        shape = len(at.n), geometry.heads, geometry.dim
        cells[at.slot, at.page, at.token] = pattern.reshape(shape)


def verify_fingerprints(
    places: Sequence[Place],
    num_roles: int,
    geometry: PageGeometry,
    mapping: Int32,
    keys: Int64,
    bad: Int32,
) -> None:
    """Counts each token's words that differ from its pattern, over all places."""
    geometry = as_bytes(geometry)
    at = locate(places, geometry, mapping)
    size = geometry.heads * geometry.dim
    firsts = np.arange(0, size, WORD)
    bad[...] = 0
    for cells, layer, role in _cells(places, num_roles, geometry, at):
        found = cells[at.slot, at.page, at.token].reshape(-1, size)
        differ = found != fingerprint(keys[at.n], layer, role, size)
        bad[at.n] += np.logical_or.reduceat(differ, firsts, axis=1).sum(axis=1, dtype=np.int32)


class Located(NamedTuple):
    """The real tokens of a mapping: their index `n` and where they lie."""

    n: NDArray[np.intp]
    slot: Int32
    page: Int32
    token: Int32
    all_real: bool


def locate(places: Sequence[Place], geometry: PageGeometry, mapping: Int32) -> Located:
    """Splits a mapping into slot, page of the slot's buffer and token, without what is nowhere."""
    slot, token = mapping[:, 0], mapping[:, 1]
    end = num_slots([place[:2] for place in places])
    tokens = geometry.expansion * geometry.page_tokens
    real = (slot >= 0) & (slot < end) & (token >= 0) & (token < tokens)
    n = np.flatnonzero(real)
    page, token = np.divmod(token[n], np.int32(geometry.page_tokens))
    return Located(n, slot[n], page, token, len(n) == len(mapping))


def num_slots(pools: Sequence[Pool]) -> int:
    """How many slots all the pools have."""
    return min((len(data) // slot_bytes for data, slot_bytes in pools), default=0)


def as_bytes(geometry: PageGeometry) -> PageGeometry:
    """The same tokens, as items of one byte."""
    return replace(geometry, dim=geometry.dim * geometry.itemsize, itemsize=1)


def _cells(
    places: Sequence[Place], num_roles: int, geometry: PageGeometry, at: Located
) -> Iterator[tuple[NDArray[Any], int, int]]:
    """(view `[slots, pages, page_tokens, H, D]` of the pool, layer, role) of each place."""
    if not len(at.n):
        return
    end = num_slots([place[:2] for place in places])
    g = geometry
    shape = end, g.expansion, g.page_tokens, g.heads, g.dim
    for index, (data, slot_bytes, offset) in enumerate(places):
        strides = slot_bytes, g.page_bytes, g.token_stride, g.head_stride, g.itemsize
        yield np.ndarray(shape, _item(g), data, offset, strides), *divmod(index, num_roles)


def _item(geometry: PageGeometry) -> np.dtype[Any]:
    """An item as bits: an unsigned integer where there is one of that size."""
    size = geometry.itemsize
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _items(array: NDArray[Any], geometry: PageGeometry) -> NDArray[Any]:
    return array.view(_item(geometry))


def _slots(pool: Pool) -> Bytes:
    """A pool as `[slots, bytes of a slot]`."""
    data, slot_bytes = pool
    count = len(data) // slot_bytes
    return data[: count * slot_bytes].reshape(count, slot_bytes)


def inside(pools: Sequence[Pool], slots: Int32) -> NDArray[np.bool_]:
    """Which of the slots all the pools have."""
    return (slots >= 0) & (slots < num_slots(pools))
