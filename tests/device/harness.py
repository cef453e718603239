"""What the battery needs around a device: guarded pools, data in and out, and a slow oracle.

The oracle is written from the contract's words, byte by byte and token by token, and shares no code
with the devices or with `kvcore.device.reference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.device.base import Device, PageGeometry

CHUNK = 1 << 16  # bytes: `from_host` is for small arrays
MASK64 = (1 << 64) - 1


def geometry(
    layout: str = "NHD",
    *,
    page_tokens: int = 8,
    expansion: int = 1,
    heads: int = 2,
    dim: int = 8,
    itemsize: int = 2,
) -> PageGeometry:
    """The geometry of a dense page, token-major (NHD) or head-major (HND)."""
    item = dim * itemsize
    strides = (heads * item, item) if layout == "NHD" else (item, page_tokens * item)
    return PageGeometry(
        page_tokens=page_tokens,
        page_bytes=page_tokens * heads * item,
        expansion=expansion,
        heads=heads,
        dim=dim,
        itemsize=itemsize,
        token_stride=strides[0],
        head_stride=strides[1],
    )


def buffer_bytes(g: PageGeometry) -> int:
    """Bytes of one buffer of a slot."""
    return g.expansion * g.page_bytes


@dataclass
class Rig:
    """A device, the stream of the test and its random numbers."""

    device: Device
    stream: Any
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    owned: list[Any] = field(default_factory=list)

    def put(self, values: Any, dtype: Any = None) -> Any:
        """A device array with the given values."""
        values = np.ascontiguousarray(values, dtype)
        array = self.device.empty(values.shape, values.dtype, stream=self.stream)
        self.device.from_host(values, array, stream=self.stream)
        return array

    def get(self, array: Any) -> np.ndarray:
        """The values of a device array, after everything enqueued on the rig's stream."""
        return self.device.to_host(array, stream=self.stream)

    def pinned(self, values: Any, dtype: Any) -> np.ndarray:
        """Pinned host memory with the given values."""
        values = np.asarray(values, dtype)
        lease = self.device.pinned(max(values.nbytes, 1))[: values.nbytes].view(dtype)
        lease[:] = values
        return lease

    def reserve(self, max_bytes: int, nbytes: int) -> Any:
        """Memory that is closed with the rig."""
        grain = self.device.grain(max_bytes)
        memory = self.device.reserve(max_bytes, nbytes, grain)
        self.owned.append(memory)
        return memory

    def pool(self, slot_bytes: int, num_slots: int = 6) -> Pool:
        """A pool of at least `num_slots` slots, full of random bytes."""
        return Pool(self, slot_bytes, num_slots)

    def random(self, shape: tuple[int, ...], itemsize: int) -> np.ndarray:
        """Random bits as unsigned items (or pairs of them, beyond 8 bytes) of any pattern."""
        kind = {16: "c16"}.get(itemsize, f"u{itemsize}")
        raw = self.rng.integers(0, 256, (*shape, itemsize), np.uint8)
        return raw.view(kind)[..., 0]

    def close(self) -> None:
        """Waits for the stream and gives the memory back."""
        self.stream.synchronize()
        for memory in self.owned:
            memory.close()


class Pool:
    """Pool memory with random content and, in `expected`, what it should hold."""

    def __init__(self, rig: Rig, slot_bytes: int, num_slots: int) -> None:
        self.rig, self.slot_bytes = rig, slot_bytes
        self.memory = rig.reserve(slot_bytes * num_slots, slot_bytes * num_slots)
        self.num_slots = self.memory.nbytes // slot_bytes
        self.view = self.memory.array(np.uint8, (self.memory.nbytes,))
        self.expected = rig.rng.integers(0, 256, self.memory.nbytes, np.uint8)
        for start in range(0, self.memory.nbytes, CHUNK):
            part = self.expected[start : start + CHUNK]
            rig.device.from_host(part, self.view[start : start + CHUNK], stream=rig.stream)

    def slot(self, slot: int) -> np.ndarray:
        """The expected bytes of one slot."""
        return self.expected[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def check(self) -> None:
        """Every byte of the pool is as expected, guard pages included."""
        np.testing.assert_array_equal(self.rig.get(self.view), self.expected)


@dataclass
class Stack:
    """A device's page stack together with what the oracle needs to know about it."""

    rig: Rig
    pools: Sequence[Pool]  # one per place, layer-major
    offsets: Sequence[int]
    num_roles: int
    geometry: PageGeometry

    def __post_init__(self) -> None:
        places = [
            (pool.memory, pool.slot_bytes, offset)
            for pool, offset in zip(self.pools, self.offsets, strict=True)
        ]
        self.stack = self.rig.device.page_stack(places, self.num_roles, self.geometry)
        self.num_layers = len(places) // self.num_roles
        self.num_slots = min(pool.num_slots for pool in self.pools)

    @classmethod
    def one_pool(
        cls, rig: Rig, g: PageGeometry, num_layers: int = 2, num_roles: int = 2, guard: int = 32
    ) -> Stack:
        """All buffers in one pool, each behind a guard of `guard` bytes."""
        count, step = num_layers * num_roles, buffer_bytes(g) + guard
        pool = rig.pool(count * step + guard)
        return cls(rig, [pool] * count, [guard + i * step for i in range(count)], num_roles, g)

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """The shape of a source or target."""
        return self.num_layers, num_tokens, self.geometry.heads, self.geometry.dim

    def randoms(self, num_tokens: int) -> list[np.ndarray]:
        """Random sources on the host, one per role."""
        shape = self.shape(num_tokens)
        return [self.rig.random(shape, self.geometry.itemsize) for _ in range(self.num_roles)]

    def cells(self, mapping: Any) -> Iterable[tuple[int, int, int, list[np.ndarray]]]:
        """(layer, token n, role, per head the expected bytes in the pool) of each real token."""
        g = self.geometry
        for n, (slot, token) in enumerate(np.asarray(mapping).tolist()):
            if not (0 <= slot < self.num_slots and 0 <= token < g.expansion * g.page_tokens):
                continue
            start = token // g.page_tokens * g.page_bytes + token % g.page_tokens * g.token_stride
            for place, (pool, offset) in enumerate(zip(self.pools, self.offsets, strict=True)):
                layer, role = divmod(place, self.num_roles)
                at = [offset + start + h * g.head_stride for h in range(g.heads)]
                page = pool.slot(slot)
                yield layer, n, role, [page[a : a + g.dim * g.itemsize] for a in at]

    def expect_append(self, mapping: Any, sources: Sequence[np.ndarray]) -> None:
        """Puts the sources into the expected pools."""
        for layer, n, role, heads in self.cells(mapping):
            for h, cell in enumerate(heads):
                cell[:] = np.ascontiguousarray(sources[role][layer, n, h]).view(np.uint8)

    def expect_gather(self, mapping: Any) -> list[np.ndarray]:
        """The bytes `[L, N, H, D * itemsize]` of each role that a gather should give."""
        shape = *self.shape(len(mapping))[:3], self.geometry.dim * self.geometry.itemsize
        out = [np.zeros(shape, np.uint8) for _ in range(self.num_roles)]
        for layer, n, role, heads in self.cells(mapping):
            out[role][layer, n] = heads
        return out

    def expect_fingerprints(self, mapping: Any, keys: Any) -> None:
        """Puts the patterns of the keys into the expected pools."""
        for layer, n, role, heads in self.cells(mapping):
            pattern = token_pattern(self.geometry, int(keys[n]), layer, role)
            for cell, part in zip(heads, np.split(pattern, self.geometry.heads), strict=True):
                cell[:] = part

    def expect_bad(self, mapping: Any, keys: Any) -> list[int]:
        """How many words of each token differ from its pattern."""
        bad = [0] * len(mapping)
        for layer, n, role, heads in self.cells(mapping):
            found = np.concatenate(heads)
            differ = found != token_pattern(self.geometry, int(keys[n]), layer, role)
            bad[n] += sum(bool(differ[i : i + 4].any()) for i in range(0, len(found), 4))
        return bad

    def check(self) -> None:
        """Every byte of every pool is as expected."""
        for pool in {id(pool): pool for pool in self.pools}.values():
            pool.check()


def token_pattern(g: PageGeometry, key: int, layer: int, role: int) -> np.ndarray:
    """The fingerprint of one token, `[H * D * itemsize]` bytes, in plain Python integers."""
    size = g.heads * g.dim * g.itemsize
    words = b"".join(
        fingerprint_word(key, layer, role, w).to_bytes(4, "little") for w in range(-(-size // 4))
    )
    return np.frombuffer(words[:size], np.uint8)


def fingerprint_word(key: int, layer: int, role: int, word: int) -> int:
    """One word of the pattern, as `kvcore.device.reference.fingerprint` defines it."""
    z = (key * 0x9E3779B97F4A7C15 + (layer << 40) + (role << 32) + word) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return (z ^ (z >> 31)) >> 32


def naive_map(tables: Any, rows: Any, starts: Any, ends: Any, num_tokens: int, t: int) -> Any:
    """`map_tokens` with loops."""
    tables = np.asarray(tables)
    out = np.tile(np.array([-1, 0], np.int32), (len(tables), num_tokens, 1))
    begin = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        for n in range(begin, min(end, num_tokens)):
            block, token = divmod(start + n - begin, t)
            if not (0 <= row < tables.shape[1] and 0 <= block < tables.shape[2]):
                continue
            for group, table in enumerate(tables):
                if table[row, block] >= 0:
                    out[group, n] = table[row, block], token
        begin = end
    return out
