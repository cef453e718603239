"""Random batches of beams, and their tables built slowly from the host's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import kvcore as k
from kvcore import PageIndexMode

H, D = 2, 8
BOTH = ("key", "value")
PLAIN, FINER, MERGED = 0, 1, 2
"""Layers: pages of a whole block, two pages a block, keys and values in one buffer."""


def make(
    T: int, device: Any = "host", layout: str = "NHD", slots: int = 600, **settings: Any
) -> k.KVCacheManager:
    """Pages of a block, pages finer than a block, and pages of keys and values together."""

    def buffers(roles, heads, order, override=None):
        size = (override or T) * heads * D * 2
        like = {"dtype": "float16", "shape": (heads, D), "layout": order}
        return [
            k.BufferConfig(role=role, size=size, tokens_per_block_override=override, **like)
            for role in roles
        ]

    kinds = [
        (0, buffers(BOTH, H, layout)),
        (3, buffers(BOTH, H, layout)),
        (1, buffers(BOTH, 2 * H, layout, max(T // 2, 1))),
        (2, buffers(["kv"], 2 * H, "NH2D")),
    ]
    slot_bytes = sum(its.size * (T // its.tokens(T)) for _, some in kinds for its in some)
    return k.KVCacheManager(
        k.KVCacheManagerConfig(
            tokens_per_block=T,
            cache_tiers=[k.GpuCacheTierConfig(quota=-(-slots * slot_bytes // 4096) * 4096 + 65536)],
            layers=[k.AttentionLayerConfig(layer_id=i, buffers=some) for i, some in kinds],
            max_beam_width=4,
            enable_partial_commit=False,
            **settings,
        ),
        device=device,
    )


class Member(NamedTuple):
    """A cache in a batch, and its tokens in the step."""

    kv: k.KVCache
    start: int
    count: int


def drawn(m: k.KVCacheManager, rng: np.random.Generator, count: int, stream: Any = None) -> list:
    """Caches of random lengths and widths, whose beams went on from random parents."""
    members = []
    for _ in range(count):
        prompt, width = int(rng.integers(1, 30)), int(rng.integers(1, 5))
        kv = m.create_kv_cache(expected_prompt_length=prompt)
        assert kv.resume(stream)
        assert kv.resize(prompt, prompt)
        assert kv.set_beam_width(width)
        assert kv.resize(prompt + int(rng.integers(0, 20)))
        if width > 1:
            kv.reorder_beams(rng.integers(0, width, width).tolist())
        tokens = int(rng.integers(0, min(kv.capacity, 6) + 1))
        members.append(Member(kv, int(rng.integers(0, kv.capacity - tokens + 1)), tokens))
    return members


def prepare(batch: k.Batch, members: list[Member], **more: Any) -> None:
    kvs, starts, counts = (list(its) for its in zip(*members, strict=True))
    batch.prepare(kvs, counts, start=starts, **more)


class Row(NamedTuple):
    """A row of a batch, as the host knows it."""

    pages: list[int]  # up to the end of its tokens
    tokens: int
    places: list[int]  # of the step's tokens, counted in tokens


def expect(
    m: k.KVCacheManager, members: list[Member], layer: int, role: str, mode: PageIndexMode | None
) -> tuple[list[Row], int]:
    """The rows of a batch, beam by beam and page by page, and the tokens of a page."""
    place, block = m.layout.place(layer, role), m.config.tokens_per_block
    size, convert = block // place.expansion, m.get_page_index_converter(layer, role)
    rows = []
    for kv, start, count in members:
        for beam in range(kv.beam_width):
            slots = kv.get_base_page_indices(place.layer_group, beam)
            pages = (slots if mode is None else convert(slots, mode)).tolist()
            tokens = start + count
            places = [pages[at // size] * size + at % size for at in range(start, tokens)]
            rows.append(Row(pages[: -(-tokens // size)], tokens, places))
    return rows, size
