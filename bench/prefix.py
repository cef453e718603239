"""Host time of prefix reuse: `device="meta"`, one layer group, 16 tokens a block.

Rivals that can't run beside are quoted with their version, as measured on two CPU cores: vLLM 0.33
(hashing and looking up a cached prompt), SGLang 0.5.23 (its radix tree). A bare comparison of as
many tokens by NumPy is measured in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore as k
from bench.control import BLOCK, TOKENS_128K, manager
from bench.harness import Case, Result

Tokens = NDArray[np.int32]

VLLM_FIND_128K_US = 21_300  # hash 15.9 ms + look-up 5.4 ms
SGLANG_CHAIN_64_US = 570
SGLANG_EVICT_41K_US = 70_000  # rebuilding its heap, sgl-project/sglang#38454
COMPARE = "NumPy comparing the tokens once"
LEAVES = 41_000

_rng = np.random.default_rng(11)


def fresh(tokens: int) -> Tokens:
    """Random ids."""
    return _rng.integers(0, 2**31 - 1, tokens, np.int32)


def seed(m: k.KVCacheManager, tokens: Tokens) -> None:
    """Publishes a prompt."""
    kv = begun(m, tokens)
    kv.commit(tokens[kv.num_committed_tokens :])
    kv.close()


def begun(m: k.KVCacheManager, tokens: Tokens, *, look_up: bool = True) -> k.KVCache:
    """A sequence with pages for a prompt."""
    kv = m.create_kv_cache(input_tokens=tokens if look_up else None)
    if not (kv.resume() and kv.resize(len(tokens))):
        raise RuntimeError(f"no pages for {len(tokens)} tokens")
    return kv


def opened(tokens: int = 4 * TOKENS_128K) -> k.KVCacheManager:
    """A manager whose pool holds so many tokens."""
    return manager(slots=tokens // BLOCK, tokens=TOKENS_128K)


def bench_probe() -> Iterator[Case]:
    m, prompt = opened(), fresh(TOKENS_128K)
    seed(m, prompt)
    twin, as_list = prompt.copy(), prompt.tolist()
    vllm = {"vllm_0_33_us": VLLM_FIND_128K_US}
    yield Case(
        name="probe_reuse, 128k cached tokens, int32 array",
        fn=lambda: m.probe_reuse(input_tokens=prompt),
        rival=lambda: np.array_equal(prompt, twin),
        against=COMPARE,
        bar=80.0,
        meta=vllm,
    )
    yield Case(
        name="probe_reuse, 128k cached tokens, list",
        fn=lambda: m.probe_reuse(input_tokens=as_list),
        rival=lambda: np.array(as_list, np.int32),
        against="NumPy converting the list",
        bar=3_080.0,
        calls=48,
        meta=vllm,
    )


def bench_create() -> Iterator[Case]:
    m, prompt = opened(), fresh(TOKENS_128K)
    seed(m, prompt)
    kept: list[k.KVCache] = []

    def room() -> Tokens:
        m.close_kv_caches(kept)
        kept.clear()
        return prompt

    yield Case(
        name="create_kv_cache, 128k cached tokens, int32 array",
        fn=lambda tokens: kept.append(m.create_kv_cache(input_tokens=tokens)),
        setup=room,
        bar=120.0,
        meta={"vllm_0_33_us": VLLM_FIND_128K_US},
    )


def bench_chain() -> Iterator[Case]:
    """Every 512 tokens another prompt branches off."""
    m, trunk = opened(8 * TOKENS_128K), fresh(64 * 512)
    for end in range(512, len(trunk) + 1, 512):
        seed(m, trunk[:end])
        seed(m, np.concatenate([trunk[:end], fresh(BLOCK)]))
    yield Case(
        name="probe_reuse, chain of 64 runs of 512 tokens",
        fn=lambda: m.probe_reuse(input_tokens=trunk),
        bar=120.0,
        meta={"sglang_0_5_23_us": SGLANG_CHAIN_64_US},
    )


def bench_commit() -> Iterator[Case]:
    m, prompt = opened(), fresh(TOKENS_128K)
    kept: list[k.KVCache] = []

    def again(*, clear: bool) -> k.KVCache:
        m.close_kv_caches(kept)
        kept.clear()
        if clear:
            m.clear_reusable_blocks()
        kept.append(begun(m, prompt, look_up=False))
        return kept[0]

    yield Case(
        name="commit, 128k new tokens",
        fn=lambda kv: kv.commit(prompt),
        setup=lambda: again(clear=True),
        bar=250.0,
        calls=208,
    )
    yield Case(
        name="commit, 128k tokens that are there already",
        fn=lambda kv: kv.commit(prompt),
        setup=lambda: again(clear=False),
        calls=208,
    )


def bench_eviction() -> Iterator[Result]:
    """41,000 prompts of one block, all used once more, then room is needed."""
    yield from eviction(per_call=64, calls=200, bar=2.5)
    yield from eviction(per_call=1, calls=4_000, bar=5.0)


def eviction(*, per_call: int, calls: int, bar: float) -> Iterator[Result]:
    """Making room for so many pages, again and again; another sequence takes them in between."""
    m = opened((LEAVES + 8) * BLOCK)
    prompts = [fresh(BLOCK) for _ in range(LEAVES)]
    for prompt in prompts:
        seed(m, prompt)
    for prompt in prompts:
        m.create_kv_cache(input_tokens=prompt).close()
    control, takers = m._runtime.control, [begun(m, fresh(8 * BLOCK), look_up=False)]
    times = np.empty(min(calls, LEAVES // per_call - 8))
    gc.collect()
    gc.disable()
    for call in range(times.size):
        start = time.perf_counter_ns()
        there = control.make_room(per_call, "bench")
        times[call] = (time.perf_counter_ns() - start) / 1_000
        wanted = takers[-1].capacity + per_call * BLOCK
        if wanted > TOKENS_128K:
            takers.append(m.create_kv_cache())
            wanted = per_call * BLOCK
        active = takers[-1].is_active or takers[-1].resume()
        if not (there and active and takers[-1].resize(wanted)):
            raise RuntimeError("no room was made")
    gc.enable()
    m.close_kv_caches(takers)
    m.shutdown()
    p10, median = np.percentile(times, (10, 50)) / per_call
    name = f"evict {per_call} page{'s' if per_call > 1 else ''} a call of 41,000 tips"
    facts: dict[str, Any] = {
        "p10": float(p10), "sglang_us": SGLANG_EVICT_41K_US, "calls": times.size,
    }  # fmt: skip
    value = float(median)
    yield Result(name=name, value=value, unit="µs", bar=bar, ok=value <= bar, meta=facts)
    worst = float(times.max())
    name = f"longest of these calls, {per_call} a call"
    yield Result(name=name, value=worst, unit="µs", bar=2_000.0, ok=worst <= 2_000.0)


def bench_metadata() -> Iterator[Result]:
    """Bytes of tree and slot tables per cached block, beyond its token ids, runs of 16 blocks."""
    import tracemalloc

    runs, run = 2_000, 16
    m = manager(slots=runs * run + run, tokens=4_096)
    seed(m, fresh(run * BLOCK))
    gc.collect()
    tracemalloc.start()
    for _ in range(runs):
        seed(m, fresh(run * BLOCK))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    m.shutdown()
    tables = m_tables(runs * run)
    value = (grown - 4 * BLOCK * run * runs + tables) / (runs * run)
    name = f"metadata per cached block, runs of {run} blocks"
    yield Result(name=name, value=value, unit="B", bar=64.0, ok=value <= 64.0)


def m_tables(slots: int) -> int:
    """Bytes of the slot table of so many slots, which are there before anything is cached."""
    m = manager(slots=slots, tokens=4_096)
    (table,) = m._runtime.control.slots
    arrays = (getattr(table, name) for name in table.__slots__)
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
