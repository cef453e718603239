"""A sequence in pages, and one query that attends to it: what the examples beside this one read.

A layer's pages are `[slots, T, K, D]` with gaps between slots. Where a framework takes no gaps, the
whole pool is one array without any: `[pages, T, K, D]`, with the page of slot `j` at number
`j * scale + offset` (`PageIndexMode.PER_LAYER`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import kvcore as k

LAYERS, T, HEADS, D, LENGTH = 2, 16, 2, 32, 40
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PagedSequence:
    """Keys and values of `LENGTH` tokens in the pages of a manager on the host."""

    manager: k.KVCacheManager
    caches: list[k.KVCache]  # a cache that nobody holds gives its pages back
    batch: k.Batch
    tokens: dict[str, Float32]  # [LAYERS, LENGTH, HEADS, D], as they were appended
    slots: Int32  # [blocks]

    def pages(self, layer: int, role: str) -> Float32:
        """A layer's pages, in place: `[slots, T, HEADS, D]` with gaps."""
        pages: Float32 = self.manager.get_pages(layer, role)
        return pages

    def pool(self) -> Float32:
        """All pages, in place and without gaps: `[pages, T, HEADS, D]`."""
        first, scale = self.pages(0, "key"), self.manager.get_page_index_scale(0, "key")
        strides = self.manager.get_page_stride(0, "key"), *first.strides[1:]
        return as_strided(first, (len(first) * scale, *first.shape[1:]), strides)

    def numbers(self, layer: int, role: str) -> Int32:
        """Where in `pool` the sequence's pages are: `[blocks]`."""
        convert = self.manager.get_page_index_converter(layer, role)
        return convert(self.slots, k.PageIndexMode.PER_LAYER)


def sequence(seed: int = 0) -> PagedSequence:
    """One with random keys and values, in pages that are not in a row."""
    page = {"size": T * HEADS * D * 4, "dtype": "float32", "shape": (HEADS, D)}
    buffers = [k.BufferConfig(role=role, **page) for role in ("key", "value")]
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=1 << 20)],
        layers=[k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(LAYERS)],
    )
    manager = k.KVCacheManager(config, device="host")
    caches = manager.create_kv_caches([LENGTH, LENGTH])
    for kv in caches:
        kv.resume()
    for end in (T, 2 * T, LENGTH):  # in turns, so that a page of another sequence is in between
        manager.advance(caches, end - caches[0].capacity)
    batch = manager.create_batch(max_rows=1, max_tokens=LENGTH)
    batch.prepare(caches[:1], LENGTH)
    numbers = np.random.default_rng(seed)
    shape = (LAYERS, LENGTH, HEADS, D)
    tokens = {role: numbers.standard_normal(shape, np.float32) for role in ("key", "value")}
    batch.append(range(LAYERS), tokens)
    return PagedSequence(manager, caches, batch, tokens, batch.page_table()[0])


def query(seed: int = 1) -> Float32:
    """One for every head, `[HEADS, D]`."""
    return np.random.default_rng(seed).standard_normal((HEADS, D), np.float32)


def expected(q: Float32, its: PagedSequence, layer: int) -> Float32:
    """Attention of `q` to all tokens, from the dense arrays: `[HEADS, D]`."""
    keys, values = its.tokens["key"][layer], its.tokens["value"][layer]
    scores = np.exp(np.einsum("hd,lhd->hl", q, keys) * np.float32(D**-0.5))
    mixed: Float32 = np.einsum("hl,lhd->hd", scores / scores.sum(axis=1, keepdims=True), values)
    return mixed


def report(name: str, got: Float32, its: PagedSequence, layer: int) -> None:
    """Prints how far a result is from the dense one."""
    distance = float(np.abs(got - expected(query(), its, layer)).max())
    print(f"{name}: attention over pages {its.slots.tolist()}, {distance:.1e} from the dense one")
