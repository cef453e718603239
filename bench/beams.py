"""Beam steps from parents on the device, expansion, and what beams hold. Needs a GPU.

Llama-3-8B's cache (32 layers, 8 KV heads of 128 16-bit items, token by token), 32 tokens to a
block. Steps are captured once and replayed, each with cold caches and parents of its own. Bytes
count what a step copies: the tokens of each further child's last block, in all layers.

    python -m bench beams             # everything
    python -m bench.beams --sweep     # threads, vectors, stores and blocks of both kernels
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, product
from typing import Any
from unittest import mock

import cupy
import numpy as np

from bench.beam_search import Model, Search, T
from bench.gpu import Bench, Times, bandwidth, latency, sweep_main, tuning_label
from bench.harness import Case, Result
from kvcore.device.cuda import tails

WIDTH, REPLAYS = 4, 200
LENGTHS = tuple(np.linspace(4081, 4111, 8).round().astype(int).tolist())
FULL = (4095,) * 8  # 31 tokens in the last block: 93 MiB for all further children of one parent
WIDE = 5_000, 5, 128  # beams, prompt, further tokens
LONG = 3_072, 4_096  # prompt, all tokens

DENSE_ROWS, DENSE_TOKENS = 32, 4096  # of a cache without pages: 16 GiB

STEP_BAR, TAIL_BAR, DENSE_BAR = 30.0, 0.85, 0.9
EXPAND_BAR, EXPAND_HOST_BAR, HOST_BAR = 20.0, 60.0, 150.0
PAGES_BAR = 0.45
RIVAL = "transformers' DynamicCache.reorder_cache"
RIVAL_QUOTED_US = 8_100.0
"""On the same shapes, on an H200; measured in the same run where torch and transformers are."""

Results = Iterator[dict[str, Any] | Result | Case]


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
        given = cycle(range(len(draws)))
        return self.bench.cold(
            lambda: self._graph.launch(self._on),
            repeats,
            before=lambda: self._put_parents(draws[next(given)]),
        )

    def _put_parents(self, parents: Any) -> None:
        """Puts them where the graph reads them."""
        target = self.search.parents
        self.bench.memcpy(target.data.ptr, parents.data.ptr, target.nbytes)

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


def derangements(width: int, count: int) -> np.ndarray:
    """Random parents of `DENSE_ROWS` rows: permutations that leave none where it is."""
    rng, own = np.random.default_rng(9), np.arange(width)
    found: list[np.ndarray] = []
    while len(found) < count * DENSE_ROWS // width:
        drawn = rng.permutation(width)
        if (drawn != own).all():
            found.append(drawn)
    return np.array(found, np.int32).reshape(count, DENSE_ROWS)


def bench_dense_rows(device: Any) -> Results:
    """In place, all layers in one launch, against a memcpy of half the cache to the other half."""
    with Bench(device) as bench:
        model = Model()
        shape = 2 * model.layers, DENSE_ROWS, model.heads, DENSE_TOKENS, model.dim
        memory = bench.reserve(2 * int(np.prod(shape)))
        arrays = list(memory.array(np.uint16, shape))
        half = memory.nbytes // 2
        limit = bench.behind(lambda: bench.memcpy(memory.base + half, memory.base, half), 20)
        for width, tokens in ((WIDTH, DENSE_TOKENS), (WIDTH, 1000), (8, 4096), (32, 4096)):
            given = cycle([bench.put(row) for row in derangements(width, 8)])
            counts = bench.put(np.full(DENSE_ROWS // width, tokens, np.int32))

            def permute(width: int = width, counts: Any = counts, given: Any = given) -> None:
                device.permute_rows(
                    arrays, next(given), width=width, tokens=counts, stream=bench.stream
                )

            nbytes = 2 * int(np.prod(shape)) // DENSE_TOKENS * tokens
            name = f"dense rows, {DENSE_ROWS // width} x {width} beams, {tokens:,} tokens"
            yield bandwidth(name, bench.behind(permute, 20), nbytes, limit, half, DENSE_BAR)
        own = bench.put(np.tile(np.arange(WIDTH, dtype=np.int32), DENSE_ROWS // WIDTH))

        def stay() -> None:
            device.permute_rows(arrays, own, width=WIDTH, stream=bench.stream)

        yield latency("device: dense rows, nobody moves", bench.cold(stay, REPLAYS, lead=True))
        yield latency("host: dense rows", bench.host(stay))


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


def bench_paths(device: Any) -> Results:
    """Indirection mode: a step behind 1,024 generated tokens, and the end of such a search."""
    prompt, end = LONG
    with Bench(device) as bench:
        lengths = [prompt + 1] * len(LENGTHS)
        search = Search(bench, Model(), lengths, WIDTH, room=end - prompt, mode="indirection")
        for parents in random_parents(search.rows, end - prompt):
            search.begin()
            search.set_parents(parents)
            search.step()
            search.end()
        search.manager.advance(search.kvs, 1)
        search.batch.prepare(search.kvs, 1)
        search.step()
        for kv in search.kvs:
            kv.settle()
        search.batch.prepare(search.kvs, 1)
        graph, on = search.graph(), cupy.cuda.Stream.from_external(bench.stream)
        times = bench.cold(lambda: graph.launch(on), REPLAYS)
        name = f"{len(LENGTHS)} x {WIDTH} beams, {end - prompt:,} tokens behind the prompt"
        yield latency(f"device: beam step through paths, {name}", times)
        found = []
        for kv in search.kvs:
            began = time.perf_counter()
            kv.collapse(1)
            bench.device.synchronize()
            found.append((time.perf_counter() - began) * 1e6)
        yield latency("collapse of one search, until the device is done", Times.of(found))
        search.close()


def bench_expansion(device: Any) -> Results:
    """From 1 beam to 4, again and again: pages are taken, three of them get the tail."""
    with Bench(device) as bench:
        search = Search(bench, Model(), [4112], WIDTH, stream=bench.stream)
        (kv,) = search.kvs  # 4,111 tokens, and one to come
        search.fill()

        def shrink() -> None:
            kv.set_beam_width(1)

        def expand() -> None:
            if not kv.set_beam_width(WIDTH):
                raise RuntimeError("out of pages")

        name = f"expansion 1 to {WIDTH} at 4,111 tokens"
        times = bench.cold(expand, REPLAYS, before=shrink, lead=True)
        result = latency(f"device: {name}", times, bar=EXPAND_BAR)
        result["meta"]["bytes"] = (WIDTH - 1) * (4111 % T) * Model().token_bytes
        yield result
        yield host_case(f"host: {name}", bench, expand, shrink, EXPAND_HOST_BAR)
        search.close()


def host_case(
    name: str,
    bench: Bench,
    fn: Callable[[], object],
    before: Callable[[], object],
    bar: float | None = None,
) -> Case:
    """Host time of `fn()`, each time after `before()` and with the device idle."""

    def ready() -> None:
        before()
        bench.device.synchronize()

    def timed(_: object) -> None:
        fn()

    return Case(name=name, fn=timed, setup=ready, calls=REPLAYS, warmup=20, bar=bar)


def bench_step_on_the_host(device: Any) -> Results:
    with Bench(device) as bench:
        lengths = np.resize(LENGTHS, 64).tolist()
        search = Search(bench, Model(heads=1, dim=8), lengths, WIDTH)
        search.set_parents(random_parents(search.rows, 1)[0])
        search.begin()

        def prepare() -> None:
            search.batch.prepare(search.kvs, 1)

        def prepare_and_step() -> None:
            prepare()
            search.step()

        name = f"64 requests of {WIDTH} beams"
        yield host_case(f"host: step_beams, {name}", bench, search.step, prepare, HOST_BAR)
        yield host_case(f"host: prepare, {name}", bench, prepare, prepare)
        follows = f"host: prepare that follows their parents, {name}"
        yield host_case(follows, bench, prepare, prepare_and_step)
        search.close()


# -- whole searches --------------------------------------------------------------------------------


def bench_five_thousand_beams(device: Any) -> Results:
    """Generative recommendation: 128 tokens behind a prompt of 5. Beams must see their own."""
    width, prompt, steps = WIDE
    with Bench(device) as bench:
        model = Model(layers=2, heads=2, dim=16)
        search = Search(bench, model, [prompt + 1], width, steps)
        rng, shape = np.random.default_rng(4), (model.layers, width, model.heads, model.dim)
        new, seen = device.empty(shape, np.uint16), np.zeros((width, 0), np.uint16)
        begun = time.perf_counter()
        for _ in range(steps):
            ids, parents = rng.integers(0, 1 << 16, width, np.uint16), rng.integers(0, width, width)
            seen = np.column_stack((seen, ids))[parents]
            values = np.broadcast_to(ids[None, :, None, None], shape)
            device.from_host(np.ascontiguousarray(values), new, stream=search.stream)
            search.set_parents(parents)
            search.begin()
            search.batch.append(range(model.layers), {"key": new, "value": new})
            search.step()
            search.end()
        device.synchronize()
        spent = time.perf_counter() - begun
        found = search.content(prompt, steps)
        yield {
            "name": f"{width:,} beams x {steps} tokens behind a prompt of {prompt}, a step",
            "value": spent * 1e6 / steps,
            "unit": "µs",
            "ok": bool(np.array_equal(found, seen)),
        }
        search.close()


def bench_pages_held(device: Any) -> Results:
    """At 4,096 tokens with a prompt of 3,072, against a copy of everything for each beam."""
    prompt, tokens = LONG
    for name in ("never converge", "follow random parents"):
        with Bench(device) as bench:
            model, requests = Model(layers=1, heads=1, dim=8), len(LENGTHS)
            search = Search(bench, model, [prompt + 1] * requests, WIDTH, tokens - prompt)
            given = random_parents(search.rows, tokens - prompt)
            for parents in given:
                if name != "never converge":
                    search.set_parents(parents)
                search.begin()
                search.step()
                search.end()
            for kv in search.kvs:
                kv.settle()
            held = search.manager.get_storage_statistics()[0].unavailable
            share = held / (search.rows * tokens // T)
            yield {
                "name": f"pages held by {WIDTH} beams that {name}",
                "value": share,
                "unit": "",
                "against": "a dense cache's",
                "bar": PAGES_BAR,
                "ok": share <= PAGES_BAR,
            }
            search.close()


# -- the sweep -------------------------------------------------------------------------------------

THREADS, VECTORS, PER_PROCESSOR = (128, 256, 512), (2, 4, 8), (1, 2, 4, 8)


def sweep(device: Any, wanted: str) -> None:
    """Prints, per kernel, the tunings of a whole step by speed."""
    rows = len(LENGTHS) * WIDTH
    cases = {
        "random parents": (LENGTHS, random_parents(rows)),
        "all equal": (FULL, np.zeros((1, rows), np.int32)),
    }
    for name, (lengths, parents) in cases.items():
        with Bench(device) as bench:
            replays = Replays(bench, lengths)
            for kernel in ("step_rows", "copy_tails"):
                if wanted in kernel:
                    print(f"\n{kernel}, {name}; now {tuning_label(device.source(kernel))}")
                    sweep_one(replays, kernel, parents)
            replays.search.close()


def sweep_one(replays: Replays, kernel: str, parents: np.ndarray) -> None:
    device = replays.bench.device
    usual, found = device.source(kernel), []
    own = (VECTORS, (True, False), PER_PROCESSOR)
    others = own if kernel == "copy_tails" else ((usual.vectors,), (usual.stream_stores,), (4,))
    for threads, vectors, stores, blocks in product(THREADS, *others):
        tuned = replace(usual, threads=threads, vectors=vectors, stream_stores=stores)
        with mock.patch.object(tails, "PER_PROCESSOR", blocks):
            device.retune(tuned)
            replays.recapture()
            times = replays.time(parents, 60)
        found.append((times.median, times.p90, tuning_label(tuned), blocks))
    device.retune(usual)
    replays.recapture()
    print("| step, µs | p90 | tuning | blocks a processor |\n|---:|---:|---|---:|")
    for median, p90, tuning, blocks in sorted(found)[:10]:
        print(f"| {median:.2f} | {p90:.2f} | {tuning} | {blocks} |")


if __name__ == "__main__":
    sys.exit(sweep_main("bench.beams", sweep))
