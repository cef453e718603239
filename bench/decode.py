"""Host time of one decode step on the host device: advance, prepare, one stacked append.

The host device does its work at once, so the append contains the copying that a GPU would do aside;
its limit is NumPy copying the same bytes into one contiguous array. Launch costs on CUDA are in
`bench.streams`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import kvcore as k
from bench.control import closer, staggered, started
from bench.harness import Case

SEQUENCES, LAYERS, HEADS, DIM, BLOCK = 256, 4, 2, 128, 16
CALLS = 320
LONGEST = CALLS + 6 * BLOCK


def manager() -> k.KVCacheManager:
    """A host cache in which `CALLS` steps of all sequences fit."""
    page = BLOCK * HEADS * DIM * 2
    shape = {"dtype": "float16", "shape": (HEADS, DIM), "layout": "NHD"}
    layers = [
        k.AttentionLayerConfig(
            layer_id=layer,
            buffers=[k.BufferConfig(role=role, size=page, **shape) for role in ("key", "value")],
        )
        for layer in range(LAYERS)
    ]
    blocks = SEQUENCES * LONGEST // BLOCK
    config = k.KVCacheManagerConfig(
        tokens_per_block=BLOCK,
        cache_tiers=[k.GpuCacheTierConfig(quota=blocks * LAYERS * 2 * page)],
        layers=layers,
        max_sequences=SEQUENCES,
        max_seq_len=LONGEST,
    )
    return k.KVCacheManager(config, device="host")


def touch_all_pages(m: k.KVCacheManager, caches: list[k.KVCache]) -> None:
    """Writes every page once, so that no page fault of the system falls on the clock."""
    batch = m.create_batch(max_rows=1, max_tokens=LONGEST)
    before = [cache.capacity for cache in caches]
    zeros = np.zeros((LAYERS, LONGEST, HEADS, DIM), np.float16)
    for cache in caches:
        cache.resize(LONGEST)
        batch.prepare([cache], num_tokens=LONGEST)
        batch.append(range(LAYERS), {"key": zeros, "value": zeros})
    m.truncate(caches, before)


def bench_decode_step() -> Iterator[Case]:
    yield step("advance", before="", clocked="a")
    yield step("prepare", before="a", clocked="p")
    yield step(f"stacked append, {LAYERS} layers", before="ap", clocked="w")
    yield step("all", before="", clocked="apw")


def step(name: str, *, before: str, clocked: str) -> Case:
    """A step whose parts are letters: a(dvance), p(repare), w(rite), on the clock or before it."""
    m = manager()
    caches = started(m, staggered(SEQUENCES))
    touch_all_pages(m, caches)
    batch = m.create_batch(max_rows=SEQUENCES, max_tokens=SEQUENCES)
    new = np.ones((LAYERS, SEQUENCES, HEADS, DIM), np.float16)
    contiguous = np.empty((2, *new.shape), np.float16)
    layers = range(LAYERS)
    history = np.array([cache.capacity for cache in caches], np.int32) - 1

    def advance() -> None:
        np.add(history, 1, out=history)
        if not m.advance(caches, 1, history=history):
            raise RuntimeError("out of pages")

    parts = {
        "a": advance,
        "p": lambda: batch.prepare(caches, num_tokens=1),
        "w": lambda: batch.append(layers, {"key": new, "value": new}),
    }

    def run(letters: str) -> None:
        for letter in letters:
            parts[letter]()

    def copy() -> None:
        contiguous[0], contiguous[1] = new, new

    writes = "w" in clocked
    return Case(
        name=f"decode step of {SEQUENCES}: {name}",
        fn=lambda _: run(clocked),
        setup=lambda: run(before),
        rival=(lambda _: copy()) if writes else None,
        rival_setup=lambda: None,
        against="NumPy copy of the bytes" if writes else "",
        calls=CALLS,
        meta={"bytes": contiguous.nbytes, "layers": LAYERS},
        close=closer(m, caches),
    )
