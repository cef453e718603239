"""Beam steps from parents on the device, expansion, and what beams hold. Needs a GPU.

Llama-3-8B's cache (32 layers, 8 KV heads of 128 16-bit items, token by token), 32 tokens to a
block. Steps are captured once and replayed, each with cold caches and parents of its own. Bytes
count what a step copies: the tokens of each further child's last block, in all layers.

    python -m bench beams             # everything
    python -m bench.beams --sweep     # threads, vectors, stores and blocks of both kernels
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import cycle, product
from typing import Any

import cupy
import numpy as np

import kvcore as k
from bench.gpu import Bench, Times, bandwidth, latency
from bench.harness import Case, Result

T, WIDTH, REPLAYS = 32, 4, 200
LENGTHS = tuple(np.linspace(4081, 4111, 8).round().astype(int).tolist())
FULL = (4095,) * 8  # 31 tokens in the last block: 93 MiB for all further children of one parent

STEP_BAR, TAIL_BAR = 30.0, 0.85
EXPAND_BAR, EXPAND_HOST_BAR, HOST_BAR = 20.0, 60.0, 150.0
PAGES_BAR = 0.45
RIVAL = "transformers' DynamicCache.reorder_cache"
RIVAL_QUOTED_US = 8_100.0
"""On the same shapes, on an H200; measured in the same run where torch and transformers are."""

Results = Iterator[dict[str, Any] | Result | Case]


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a cache of 16-bit items."""

    layers: int = 32
    heads: int = 8
    dim: int = 128

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers."""
        return self.layers * 2 * self.heads * self.dim * 2


class Search:
    """Requests at the end of a step: every beam has a new token, and the parents are to come.

    Parameters
    ----------
    bench : Bench
        Whose device it is.
    model : Model
    lengths : sequence of int
        Tokens of each request, the new one among them.
    width : int
        Beams of each.
    room : int, default 0
        Tokens that each beam will get later.
    """

    def __init__(
        self, bench: Bench, model: Model, lengths: Sequence[int], width: int, room: int = 0
    ) -> None:
        self.bench, self.model, self.width = bench, model, width
        self.lengths = np.array(lengths)
        self.captured = cupy.cuda.Stream(non_blocking=True)
        self.stream = bench.device.stream(self.captured)
        self.manager = k.KVCacheManager(
            self._config(room), device=bench.device, stream=self.stream
        )
        self.kvs = [self._opened(int(length) - 1) for length in lengths]
        self.rows = width * len(self.kvs)
        self.batch = self.manager.create_batch(self.rows, self.rows)
        self.parents = bench.put(np.tile(np.arange(width, dtype=np.int32), len(self.kvs)))
        bench.stream.synchronize()

    def _config(self, room: int) -> k.KVCacheManagerConfig:
        model, longest = self.model, int(self.lengths.max()) + room
        page = T * model.heads * model.dim * 2
        like = {"dtype": "bfloat16", "shape": (model.heads, model.dim), "layout": "NHD"}
        buffers = [k.BufferConfig(role=role, size=page, **like) for role in ("key", "value")]
        own = self.width * (2 + room // T)  # blocks that the beams of a request do not share
        blocks = int(np.sum(self.lengths // T + 1 + own))
        quota = blocks * T * model.token_bytes + (64 << 20)  # a quota is rounded down
        return k.KVCacheManagerConfig(
            tokens_per_block=T,
            cache_tiers=[k.GpuCacheTierConfig(quota=quota)],
            layers=[
                k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(model.layers)
            ],
            max_sequences=len(self.lengths),
            max_seq_len=-(-longest // T + 1) * T,
            max_beam_width=self.width,
            enable_partial_commit=False,
        )

    def _opened(self, prompt: int) -> k.KVCache:
        kv = self.manager.create_kv_cache(expected_prompt_length=prompt)
        if not (kv.resume() and kv.resize(prompt, prompt) and kv.set_beam_width(self.width)):
            raise RuntimeError(f"no pages for {self.width} beams of {prompt} tokens")
        return kv

    def begin(self) -> None:
        """Every beam gets room for one more token."""
        if not self.manager.advance(self.kvs, 1):
            raise RuntimeError("out of pages")
        self.batch.prepare(self.kvs, 1)

    def step(self) -> None:
        """The parents have come."""
        self.manager.step_beams(self.batch, self.parents)

    def end(self) -> None:
        """The new tokens are final."""
        self.manager.advance(self.kvs, 0, history=[kv.history_length + 1 for kv in self.kvs])

    def graph(self) -> Any:
        """The step as a graph."""
        self.captured.begin_capture()
        try:
            self.step()
        finally:
            graph = self.captured.end_capture()
        self.captured.synchronize()
        return graph

    def set_parents(self, parents: Any) -> None:
        """Puts parents where the graph reads them, in the order of the bench's stream."""
        self.bench.memcpy(self.parents.data.ptr, parents.data.ptr, self.parents.nbytes)

    def fill(self) -> None:
        """Random bytes in all pages."""
        for memory in (memory for group in self.manager._runtime.pools for memory in group):
            self.bench.fill(memory, memory.nbytes)

    def copied_bytes(self, parents: np.ndarray) -> float:
        """Bytes that a step with such parents `[steps, rows]` copies, on average."""
        by_request = np.sort(parents.reshape(-1, len(self.kvs), self.width), axis=2)
        distinct = 1 + np.count_nonzero(np.diff(by_request, axis=2), axis=2)
        tail = (self.lengths - 1) % T + 1
        further = (self.width - distinct).mean(axis=0)
        return float((further * tail).sum() * self.model.token_bytes)

    def close(self) -> None:
        """Gives everything back."""
        self.bench.device.synchronize()
        self.manager.close_kv_caches(self.kvs)
        self.manager.shutdown()


class Replays:
    """Captured steps of a search, timed."""

    def __init__(self, bench: Bench, lengths: Sequence[int]) -> None:
        self.bench, self.search = bench, Search(bench, Model(), lengths, WIDTH)
        self.search.fill()
        self.search.begin()
        self.search.step()  # prepares what a capture would have to
        for kv in self.search.kvs:
            kv.settle()
        self.search.batch.prepare(self.search.kvs, 1)
        self._on = cupy.cuda.Stream.from_external(bench.stream)
        self._graph = self.search.graph()

    def recapture(self) -> None:
        """Captures the step anew, with the tunings of now."""
        self._graph = self.search.graph()

    def time(self, parents: np.ndarray, repeats: int = REPLAYS) -> Times:
        """Replays with one row of `parents` `[n, rows]` after the other."""
        draws = self.bench.put(parents.astype(np.int32))
        given = cycle(list(draws))
        return self.bench.cold(
            lambda: self._graph.launch(self._on),
            repeats,
            before=lambda: self.search.set_parents(next(given)),
        )

    def memcpy(self, nbytes: int) -> Times:
        """The driver's copy of as many bytes, between pages."""
        memory = self.search.manager._runtime.pools[0][0]
        half = memory.nbytes // 2
        return self.bench.cold(lambda: self.bench.memcpy(memory.base + half, memory.base, nbytes))


def random_parents(rows: int, steps: int = REPLAYS) -> np.ndarray:
    return np.random.default_rng(8).integers(0, WIDTH, (steps, rows))


def bench_beam_step(device: Any) -> Results:
    with Bench(device) as bench:
        replays = Replays(bench, LENGTHS)
        rows = replays.search.rows
        given = random_parents(rows)
        times = replays.time(given)
        name = f"device: beam step, {len(LENGTHS)} x {WIDTH} beams at 4,081 to 4,111 tokens"
        quoted = Times(*(3 * [RIVAL_QUOTED_US]))
        result = latency(f"{name}, random parents", times, f"{RIVAL}, quoted", quoted, STEP_BAR)
        result["meta"]["bytes"] = replays.search.copied_bytes(given)
        yield result
        own = np.tile(np.arange(WIDTH), (1, rows // WIDTH))
        yield latency(f"{name}, nobody moves", replays.time(own))
        turned = (own + 1) % WIDTH
        yield latency(f"{name}, all rows move, no tails", replays.time(turned))
        replays.search.close()


def bench_full_tails(device: Any) -> Results:
    with Bench(device) as bench:
        replays = Replays(bench, FULL)
        equal = np.zeros((1, replays.search.rows), np.int32)
        nbytes = int(replays.search.copied_bytes(equal))
        limit = replays.memcpy(nbytes)
        name = f"beam step, all parents equal, {nbytes >> 20} MiB of tails"
        yield bandwidth(name, replays.time(equal), nbytes, limit, nbytes, TAIL_BAR)
        replays.search.close()


def bench_rival(_: Any) -> Results:
    """The reorder of a dense cache on the same shapes, where there is torch with a GPU."""
    if not (find_spec("torch") and find_spec("transformers")):
        print("\ntransformers: left out, needs torch and transformers")
        return
    import torch
    from transformers import DynamicCache

    if not torch.cuda.is_available():
        print("\ntransformers: left out, torch finds no GPU")
        return
    model, cache, rows = Model(), DynamicCache(), len(LENGTHS) * WIDTH
    shape = rows, model.heads, 4096, model.dim
    for layer in range(model.layers):
        pair = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        cache.update(*pair, layer)
    firsts = np.repeat(np.arange(0, rows, WIDTH), WIDTH)
    found = []
    for repeat, parents in enumerate(random_parents(rows, 23)):
        index = torch.tensor(firsts + parents, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        cache.reorder_cache(index)
        end.record()
        end.synchronize()
        if repeat >= 3:
            found.append(start.elapsed_time(end) * 1000)
    yield latency(f"device: {RIVAL}", Times.of(found))


def bench_expansion(device: Any) -> Results:
    """From 1 beam to 4, again and again: pages are taken, the tail is copied to three of them."""
    with Bench(device) as bench:
        search = Search(bench, Model(), [4112], WIDTH)  # 4,111 tokens and the one to come
        (kv,) = search.kvs
        search.fill()
        kv.suspend()
        kv.resume(bench.stream)

        def shrink() -> None:
            kv.set_beam_width(1)

        def expand() -> None:
            if not kv.set_beam_width(WIDTH):
                raise RuntimeError("out of pages")

        name = f"expansion 1 to {WIDTH} at 4,111 tokens"
        times = bench.cold(expand, REPLAYS, before=shrink, lead=True)
        nbytes = 3 * (4111 % T) * Model().token_bytes
        result = latency(f"device: {name}", times, bar=EXPAND_BAR)
        yield {**result, "meta": {**result["meta"], "bytes": nbytes}}
        yield Case(
            name=f"host: {name}",
            fn=expand,
            setup=None,
            calls=1,
            warmup=0,
        ) if False else host_case(f"host: {name}", bench, expand, shrink, EXPAND_HOST_BAR)
        search.close()


def host_case(name: str, bench: Bench, fn: Any, before: Any, bar: float | None = None) -> Case:
    """Host time of `fn()`, each after `before()` with the device idle."""

    def ready() -> None:
        before()
        bench.device.synchronize()

    return Case(
        name=name, fn=lambda _: fn(), setup=ready, calls=REPLAYS, warmup=20, bar=bar
    )


def bench_step_on_the_host(device: Any) -> Results:
    with Bench(device) as bench:
        lengths = np.resize(LENGTHS, 64).tolist()
        search = Search(bench, Model(heads=1, dim=8), lengths, WIDTH)
        search.set_parents(bench.put(random_parents(search.rows, 1)[0].astype(np.int32)))
        search.begin()

        def prepare() -> None:
            search.batch.prepare(search.kvs, 1)

        def stepped() -> None:
            prepare()
            search.step()

        name = f"64 requests of {WIDTH} beams"
        yield host_case(f"host: step_beams, {name}", bench, search.step, prepare, HOST_BAR)
        yield host_case(f"host: prepare, {name}", bench, prepare, prepare)
        yield host_case(f"host: prepare that follows their parents, {name}", bench, prepare,
                        stepped)  # fmt: skip
        search.close()


# -- whole searches --------------------------------------------------------------------------------


def bench_five_thousand_beams(device: Any) -> Results:
    """Generative recommendation: 128 tokens behind a prompt of 5, with what a beam should see."""
    width, prompt, steps = 5_000, 5, 128
    with Bench(device) as bench:
        model = Model(layers=2, heads=2, dim=16)
        search = Search(bench, model, [prompt + 1], width, steps)
        rng = np.random.default_rng(4)
        shape = model.layers, width, model.heads, model.dim
        start, seen = bench.stream.record(), np.zeros((width, 0), np.uint16)
        started = cupy.cuda.Event(), cupy.cuda.Event()
        started[0].record(search.captured)
        for _ in range(steps):
            ids = rng.integers(0, 1 << 16, width, np.uint16)
            parents = rng.integers(0, width, width)
            seen = np.column_stack((seen, ids))[parents]
            new = bench.put(np.broadcast_to(ids[None, :, None, None], shape))
            search.set_parents(bench.put(parents.astype(np.int32)))
            bench.stream.synchronize()
            search.begin()
            search.batch.append(range(model.layers), {"key": new, "value": new})
            search.step()
            search.end()
        started[1].record(search.captured)
        right = content(search, prompt, steps) == seen
        yield {
            "name": f"{width:,} beams x {steps} tokens behind a prompt of {prompt}",
            "value": cupy.cuda.get_elapsed_time(*started) * 1000 / steps,
            "unit": "µs a step",
            "ok": bool(np.all(right)) and start.done(),
        }
        search.close()
