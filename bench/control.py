"""Host time of the control plane: `device="meta"`, so pages are counted and nothing is stored.

One layer group, 16 tokens per block. In the decode cases all 16 phases of a block occur equally
often. "Staggered": within each call, so that 16 of 256 sequences cross a block every time.
"Lockstep": from call to call, all sequences together. "All crossing" is the worst phase alone. Not
measured here: devices, kernels, prefix reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

import kvcore as k
from bench.harness import Case
from bench.rival import VLLM_ADVANCE_256_US, PlainManager

BLOCK = 16
SLOTS = 1 << 16
TOKENS_128K = 131_072
PLAIN = "plain Python objects"


def manager(
    *, sequences: int = 256, slots: int = SLOTS, tokens: int = 4_096, **settings: Any
) -> k.KVCacheManager:
    """A manager of `slots` pages without memory, for `sequences` of at most `tokens` tokens."""
    buffers = [k.BufferConfig(role=role, size=2_048) for role in ("key", "value")]
    config = k.KVCacheManagerConfig(
        tokens_per_block=BLOCK,
        cache_tiers=[k.GpuCacheTierConfig(quota=slots * 4_096)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
        max_sequences=sequences,
        max_seq_len=tokens,
        **settings,
    )
    return k.KVCacheManager(config, device="meta")


def started(m: k.KVCacheManager, capacities: Sequence[int]) -> list[k.KVCache]:
    """One active sequence per capacity."""
    caches = m.create_kv_caches([0] * len(capacities))
    for cache, capacity in zip(caches, capacities, strict=True):
        if not (cache.resume() and cache.resize(capacity)):
            raise RuntimeError(f"no pages for a sequence of {capacity} tokens")
    return caches


def staggered(count: int, least: int = BLOCK) -> list[int]:
    """Capacities whose phases within a block occur equally often."""
    return [least + i % BLOCK for i in range(count)]


def closer(m: k.KVCacheManager, caches: Sequence[k.KVCache] = ()) -> Callable[[], None]:
    """Closes a manager and the sequences in it."""

    def close() -> None:
        m.close_kv_caches(caches)
        m.shutdown()

    return close


def shuffles(caches: Sequence[k.KVCache]) -> Callable[[], list[k.KVCache]]:
    """Lists of the same sequences in an order that changes from call to call."""
    rng = np.random.default_rng(0)
    orders = cycle([rng.permutation(len(caches)).tolist() for _ in range(61)])
    return lambda: [caches[i] for i in next(orders)]


def plain(
    capacities: Sequence[int], slots: int = SLOTS, tokens: int = 4_096
) -> tuple[PlainManager, list[int]]:
    """The rival with the same sequences, and their keys."""
    rows, blocks = len(capacities), -(-tokens // BLOCK)
    rival = PlainManager(pages=slots, tokens_per_block=BLOCK, rows=rows, blocks=blocks)
    keys = list(range(rows))
    for key, capacity in zip(keys, capacities, strict=True):
        rival.create(key)
        rival.advance([key], capacity)
    return rival, keys


def decode(
    name: str,
    capacities: Sequence[int],
    *,
    fresh: bool = True,
    step: int = 1,
    calls: int = 1_008,
    **more: Any,
) -> Case:
    """`advance` of sequences of these capacities by `step` tokens.

    Twice as many pages as the run needs, so that none has to be given back in between.
    """
    count = len(capacities)
    tokens = 2 * BLOCK + (calls + 64) * step
    slots = max(1_024, 2 * count * (tokens // BLOCK + 1))
    m = manager(sequences=max(count, 16), slots=slots, tokens=tokens)
    caches = started(m, capacities)
    rival, keys = plain(capacities, slots, tokens)
    return Case(
        name=name,
        fn=lambda batch: m.advance(batch, step),
        setup=shuffles(caches) if fresh else lambda: caches,
        rival=lambda: rival.advance(keys, step),
        against=PLAIN,
        calls=calls,
        close=closer(m, caches),
        **more,
    )


def bench_advance_fresh_list() -> Iterator[Case]:
    vllm = {"vllm_0_33_us": VLLM_ADVANCE_256_US}
    for phases, capacities in (("staggered", staggered(256)), ("lockstep", [BLOCK] * 256)):
        name = f"advance 256 by 1 token, fresh list, {phases}"
        yield decode(name, capacities, bar=50.0, meta=vllm)


def bench_advance_same_list() -> Iterator[Case]:
    for phases, capacities in (("staggered", staggered(256)), ("lockstep", [BLOCK] * 256)):
        name = f"advance 256 by 1 token, same list, {phases}"
        yield decode(name, capacities, fresh=False, bar=30.0)


def bench_advance_all_crossing() -> Case:
    return decode("advance 256 by 16 tokens, all crossing", staggered(256), step=BLOCK)


def bench_advance_one() -> Case:
    return decode("advance 1 by 1 token", [BLOCK], bar=5.0)


def bench_advance_with_history() -> Case:
    """The form a decode loop uses: the last step's tokens become history in the same call."""
    capacities = staggered(256)
    m = manager()
    caches = started(m, capacities)
    history = np.array(capacities, np.int32) - 1

    def settled() -> list[k.KVCache]:
        np.add(history, 1, out=history)
        return caches

    return Case(
        name="advance 256 by 1 token, with history",
        fn=lambda batch: m.advance(batch, 1, history=history),
        setup=settled,
        close=closer(m, caches),
    )


def resize_case(name: str, tokens: int, *, calls: int = 1_008, **more: Any) -> Case:
    """`resize(tokens)` of an empty sequence; taking the pages back is not timed."""
    m = manager(sequences=16, slots=2 * tokens // BLOCK, tokens=tokens)
    (cache,) = started(m, [0])
    rival, keys = plain([0], 2 * tokens // BLOCK, tokens)
    return Case(
        name=name,
        fn=lambda _: cache.resize(tokens),
        setup=lambda: m.truncate([cache], [0]),
        rival=lambda _: rival.advance(keys, tokens),
        rival_setup=lambda: rival.truncate(keys, 0),
        against=PLAIN,
        calls=calls,
        close=closer(m, [cache]),
        **more,
    )


def bench_resize_128k() -> Case:
    return resize_case("resize 0 to 131,072 tokens", TOKENS_128K, bar=150.0)


def bench_truncate_128k() -> Case:
    m = manager(sequences=16, slots=2 * TOKENS_128K // BLOCK, tokens=TOKENS_128K)
    (cache,) = started(m, [0])
    return Case(
        name="truncate 131,072 tokens to 0",
        fn=lambda _: m.truncate([cache], [0]),
        setup=lambda: cache.resize(TOKENS_128K),
        close=closer(m, [cache]),
    )


def bench_create_and_close() -> Case:
    m = manager()
    lengths = [0] * 256
    return Case(
        name="create and close 256 sequences",
        fn=lambda: m.close_kv_caches(m.create_kv_caches(lengths)),
        calls=200,
        close=closer(m),
    )


def bench_slot_mapping() -> Iterator[Case]:
    for count, num_tokens in ((256, 1), (16, 2_048)):
        m = manager()
        caches = started(m, [2_048 + i % BLOCK for i in range(count)])
        start = [cache.capacity - num_tokens for cache in caches]
        yield Case(
            name=f"slot_mapping of {count} × {num_tokens} tokens",
            fn=lambda m=m, c=caches, n=num_tokens, s=start: m.slot_mapping(c, n, start=s),
            calls=200,
            close=closer(m, caches),
        )


def bench_beams() -> Iterator[Case]:
    """A prompt of 4,096 tokens and 256 generated ones, on four beams."""
    m = manager(max_beam_width=4, enable_partial_commit=False, tokens=8_192)
    cache = m.create_kv_cache(expected_prompt_length=4_096)
    if not (cache.resume() and cache.resize(4_097, 4_096) and cache.set_beam_width(4)):
        raise RuntimeError("no pages for four beams")
    if not cache.resize(4_353, 4_352):
        raise RuntimeError("no pages for 256 more tokens")
    parents = cycle([[1, 0, 3, 2], [0, 0, 1, 2], [3, 3, 3, 3]])
    yield Case(
        name="reorder_beams, 4 beams of 4,353 tokens",
        fn=cache.reorder_beams,
        setup=lambda: next(parents),
        calls=400,
        close=closer(m, [cache]),
    )


# -- growth ----------------------------------------------------------------------------------------


def bench_growth_over_sequences() -> Iterator[Case]:
    for count in (4, 16, 64, 256, 1_024):
        yield decode(
            f"advance {count} by 1 token, growth",
            staggered(count),
            calls=320,
            meta={"sequences": count},
        )


def bench_growth_over_tokens() -> Iterator[Case]:
    for step in (1, 16, 64, 256):
        name = f"advance 64 by {step}, growth"
        yield decode(name, staggered(64), step=step, calls=160, meta={"tokens": step})


def bench_growth_over_prompt() -> Iterator[Case]:
    for tokens in (2_048, 8_192, 32_768, 131_072):
        name = f"resize 0 to {tokens:,} tokens, growth"
        yield resize_case(name, tokens, calls=200, meta={"tokens": tokens})


def bench_growth_over_pages() -> Iterator[Case]:
    """Cost must not depend on how many pages there are, nor on how many are in use."""
    for exponent in (12, 16, 20):
        slots = 1 << exponent
        m = manager(sequences=64, slots=slots, tokens=slots * BLOCK // 2)
        (big,) = started(m, [slots * BLOCK // 2])
        caches = started(m, staggered(32))
        yield Case(
            name=f"advance 32 by 1 token, {slots:,} pages",
            fn=lambda batch, m=m: m.advance(batch, 1),
            setup=shuffles(caches),
            calls=320,
            meta={"pages": slots, "used": big.num_blocks},
            close=closer(m, [big, *caches]),
        )
