"""Kernels against the memory's own speed, and launches in microseconds. Needs a GPU.

Bandwidths count bytes read plus bytes written, with cold caches and random data, and are compared
with the driver's copy of the same run. This is not how fast an engine decodes: there, most steps
are launches, see the latencies and `bench.streams`.

    python -m bench kernels                          # everything
    python -m bench.kernels --sweep [--filter NAME]  # threads, vectors and stores of each kernel
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bench.gpu import (
    GIB,
    MIB,
    Bench,
    Times,
    bandwidth,
    latency,
    model_geometry,
    sweep_main,
    tuning_label,
)

KIB = 1 << 10
TOKENS, T = 65_536, 32
LARGE = 512 << 20  # bytes, several times any cache
COPY_BAR, MOVE_BAR, FEW_BAR = 0.93, 0.85, 1.15

Results = Iterator[dict[str, Any]]


class Pages:
    """A pool of 2 GiB and the driver's copy of one half to the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.memory = bench, bench.reserve(2 * GIB)

    def limit(self, nbytes: int = GIB) -> Times:
        """The driver's copy of `nbytes`."""
        base, measure = self.memory.base, self._measure(nbytes)
        return measure(lambda: self.bench.memcpy(base + GIB, base, nbytes))

    def copy(self, page: int, count: int, seed: int = 0) -> Times:
        """`count` scattered pages onto others, none of them twice."""
        slots = np.random.default_rng(seed).permutation(2 * GIB // page).astype(np.int32)
        src, dst = slots[:count].copy(), slots[count : 2 * count].copy()
        pools, device, stream = [(self.memory, page)], self.bench.device, self.bench.stream
        measure = self._measure(count * page)
        return measure(lambda: device.copy_pages(pools, src, dst, stream=stream))

    def _measure(self, nbytes: int) -> Callable[[Callable[[], object]], Times]:
        """Few bytes are flushed from the cache before; many never were in it."""
        return self.bench.behind if nbytes >= LARGE else self.bench.cold


def bench_copy_pages(device: Any) -> Results:
    with Bench(device) as bench:
        pages = Pages(bench)
        limit = pages.limit()
        yield bandwidth("memcpy 1 GiB", limit, GIB, limit, GIB, None)
        for size, bar in ((128 * KIB, COPY_BAR), (1 * MIB, None), (16 * KIB, None)):
            count = GIB // size
            name = f"copy_pages, {count} pages of {size // KIB} KiB"
            yield bandwidth(name, pages.copy(size, count), GIB, limit, GIB, bar)


def bench_copy_few_pages(device: Any) -> Results:
    """Few pages, as beams copy them: the whole chip has to take part."""
    with Bench(device) as bench:
        pages = Pages(bench)
        for count, size, bar in ((8, MIB, FEW_BAR), (3, 256 * KIB, None), (64, 64 * KIB, None)):
            limit, times = pages.limit(count * size), pages.copy(size, count)
            name = f"copy_pages, {count} pages of {size // KIB} KiB"
            result = latency(name, times, "one memcpy of as many bytes", limit)
            if bar is not None:
                result |= {"bar": 1 / bar, "ok": times.median <= bar * limit.median}
                result["meta"] |= {"bar_on": "ratio"}
            yield result


class Tokens:
    """Keys and values of one layer for 65,536 tokens in scattered pages."""

    def __init__(self, bench: Bench, layout: str) -> None:
        self.bench, self.geometry = bench, model_geometry(layout, T)
        page = self.geometry.page_bytes
        slots = TOKENS // T
        memory = bench.reserve(2 * page * slots)
        places = [(memory, 2 * page, 0), (memory, 2 * page, page)]
        self.stack = bench.device.page_stack(places, 2, self.geometry)
        order = np.random.default_rng(3).permutation(slots).astype(np.int32)
        mapping = np.stack((np.repeat(order, T), np.tile(np.arange(T, dtype=np.int32), slots)), 1)
        self.mapping = bench.put(mapping)
        self.arrays = [bench.random((1, TOKENS, 8, 128)) for _ in range(2)]
        self.bytes = 2 * TOKENS * 2048

    def append(self, tokens: int = TOKENS) -> Times:
        arrays, mapping = [a[:, :tokens] for a in self.arrays], self.mapping[:tokens]
        device, stream = self.bench.device, self.bench.stream
        return self.bench.cold(lambda: device.append(self.stack, mapping, arrays, stream=stream))

    def gather(self, tokens: int = TOKENS) -> Times:
        arrays, mapping = [a[:, :tokens] for a in self.arrays], self.mapping[:tokens]
        device, stream = self.bench.device, self.bench.stream
        return self.bench.cold(lambda: device.gather(self.stack, mapping, arrays, stream=stream))


def bench_append_and_gather(device: Any) -> Results:
    with Bench(device) as bench:
        limit = Pages(bench).limit()
        for layout in ("NHD", "HND"):
            tokens = Tokens(bench, layout)
            bar = MOVE_BAR if layout == "NHD" else None
            for name, times in (("append", tokens.append()), ("gather", tokens.gather())):
                full = f"{name}, {TOKENS:,} tokens of 8x128 16-bit, K and V, {layout}"
                yield bandwidth(full, times, tokens.bytes, limit, GIB, bar)


def bench_append_of_strided_sources(device: Any) -> Results:
    """Views of one fused projection, and items that lie apart: the slow way, for comparison."""
    with Bench(device) as bench:
        limit, tokens = Pages(bench).limit(), Tokens(bench, "NHD")
        fused = bench.random((1, TOKENS // 2, 24, 128))
        views = {
            "of a fused projection": [fused[:, :, 8:16], fused[:, :, 16:24]],
            "with items apart": [a[:, ::2, :, ::-1] for a in tokens.arrays],
        }
        mapping, stream = tokens.mapping[: TOKENS // 2], bench.stream
        for name, arrays in views.items():
            times = bench.cold(
                lambda arrays=arrays: device.append(tokens.stack, mapping, arrays, stream=stream)
            )
            yield bandwidth(f"append {name}", times, tokens.bytes // 2, limit, GIB, None)


class Step:
    """What a decode step of 256 rows enqueues besides attention."""

    def __init__(self, bench: Bench, rows: int = 256, blocks: int = 1024) -> None:
        self.device, self.stream = bench.device, bench.stream
        self.table = bench.put(np.random.default_rng(5).integers(0, 500, (rows, 1, blocks), "i4"))
        self.by_group = self.table.transpose(1, 0, 2)
        words = np.zeros((3, rows), np.int32)
        words[0], words[1], words[2] = np.arange(rows), 5_000, np.arange(1, rows + 1)
        self.words = bench.put(words.reshape(-1))
        self.parts = [self.words[i * rows : (i + 1) * rows] for i in range(3)]
        self.mapping = bench.put(np.zeros((1, rows, 2), np.int32))
        self.placed, self.dense = self.mapping[0], bench.put(np.zeros((rows, blocks), np.int32))
        page = 2 * model_geometry("NHD").page_bytes
        self.memory = bench.reserve(512 * page)
        geometry = model_geometry("NHD")
        places = [(self.memory, page, 0), (self.memory, page, page // 2)]
        self.stack = bench.device.page_stack(places, 2, geometry)
        self.arrays = [bench.random((1, rows, 8, 128)) for _ in range(2)]
        pinned = bench.device.pinned(1 << 14)
        self.index, self.value = pinned[:128].view(np.int64), pinned[128:192].view(np.int32)
        self.staged = pinned[1024 : 1024 + 12 * rows].view(np.int32)
        self.index[:], self.value[:], self.staged[:] = np.arange(16) * 37, 3, words.reshape(-1)
        self.src, self.dst = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)
        self.pools = [(self.memory, page)]
        self.keys = bench.put(np.arange(rows, dtype=np.int64))
        self.bad = bench.put(np.zeros(rows, np.int32))
        self.first = self.by_group[0]

    def scatter(self) -> None:
        self.device.scatter_table(
            self.table, self.index, self.value, self.words, self.staged, stream=self.stream
        )

    def map(self) -> None:
        self.device.map_tokens(
            self.by_group, *self.parts, self.mapping, tokens_per_block=T, stream=self.stream
        )

    def append(self) -> None:
        self.device.append(self.stack, self.placed, self.arrays, stream=self.stream)

    def gather(self) -> None:
        self.device.gather(self.stack, self.placed, self.arrays, stream=self.stream)

    def take(self) -> None:
        self.device.take_rows(self.first, self.parts[0], self.dense, stream=self.stream)

    def copy(self) -> None:
        self.device.copy_pages(self.pools, self.src, self.dst, stream=self.stream)

    def fill(self) -> None:
        self.device.fill_pages(self.pools, self.dst, 0xFF, stream=self.stream)

    def write(self) -> None:
        self.device.write_fingerprints(self.stack, self.placed, self.keys, stream=self.stream)

    def verify(self) -> None:
        self.device.verify_fingerprints(
            self.stack, self.placed, self.keys, self.bad, stream=self.stream
        )


STEPS = ("scatter", "map", "append", "gather", "take", "copy", "fill", "write", "verify")
NAMES = {
    "scatter": "scatter_table, 16 cells and 768 words",
    "map": "map_tokens, 256 rows",
    "append": "append, 256 tokens of 8x128 16-bit, K and V",
    "gather": "gather, the same",
    "take": "take_rows, 256 rows of 1,024",
    "copy": "copy_pages, 4 pages of 128 KiB",
    "fill": "fill_pages, 4 pages of 128 KiB",
    "write": "write_fingerprints, 256 tokens of 8x128 16-bit, K and V",
    "verify": "verify_fingerprints, the same",
}


def bench_step_on_the_device(device: Any) -> Results:
    with Bench(device) as bench:
        step = Step(bench)
        step.scatter(), step.map()
        for name in STEPS:
            yield latency(f"device: {NAMES[name]}", bench.warm(getattr(step, name)))


def bench_step_on_the_host(device: Any) -> Results:
    with Bench(device) as bench:
        step = Step(bench)
        step.scatter(), step.map()
        for name in STEPS:
            yield latency(f"host: {NAMES[name]}", bench.host(getattr(step, name)))


def bench_ways_to_launch(device: Any) -> Results:
    """Our launch of an empty piece of work against CuPy's, with the same argument block."""
    from kvcore.device.cuda import launch as launching

    with Bench(device) as bench:
        ours = device.launch("latch", "delay")
        function = launching.load(device.index, device.source("latch"))["delay"]
        block = np.zeros(1, device.source("latch").entries["delay"])
        stream = bench.stream
        cupy = bench.host(lambda: function((1, 1, 1), (128, 1, 1), (block,), 0, stream))
        found = bench.host(lambda: ours(stream, 1, 1, 1, 0))
        yield latency("host: launch", found, "CuPy's Function", cupy)


# -- the sweep -------------------------------------------------------------------------------------

THREADS, VECTORS = (64, 128, 256, 512), (1, 2, 4, 8)


def sweep(device: Any, wanted: str) -> None:
    """Prints, per kernel, the tunings by speed; the best three are measured again."""
    with Bench(device) as bench:
        pages = Pages(bench)
        limit = pages.limit()
        cases = {
            "copy_pages": (lambda: pages.copy(128 * KIB, GIB // (128 * KIB)), GIB),
            "copy_pages, few": (lambda: pages.copy(MIB, 8), 8 * MIB),
        }
        for layout in ("NHD", "HND"):
            tokens = Tokens(bench, layout)
            for name in ("append", "gather"):
                cases[f"{name}, {layout}"] = getattr(tokens, name), tokens.bytes
                # 256 tokens: what a decode step moves
                few = getattr(tokens, name)
                cases[f"{name}, {layout}, few"] = (lambda few=few: few(256)), 256 * 4096
        for name, (work, nbytes) in cases.items():
            if wanted in name:
                sweep_one(bench, name, work, nbytes, limit)


def sweep_one(bench: Bench, name: str, work: Any, nbytes: int, limit: Times) -> None:
    kernel = name.partition(",")[0]
    device, usual = bench.device, bench.device.source(kernel)
    found = []
    for threads in THREADS:
        for vectors in VECTORS:
            for stores in (True, False):
                if threads * vectors > 2048:
                    continue
                tuned = replace(usual, threads=threads, vectors=vectors, stream_stores=stores)
                device.retune(tuned)
                found.append((work().median, threads, vectors, stores, tuned))
    found.sort(key=lambda its: its[0])
    print(f"\n{name}: memcpy {2 * GIB / limit.median / 1000:.0f} GB/s; now {tuning_label(usual)}")
    print("| threads | vectors | stores | µs | GB/s | of memcpy | again |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    for rank, (spent, threads, vectors, stores, tuned) in enumerate(found[:8]):
        again = ""
        if rank < 3:
            device.retune(tuned)
            again = f"{work().median:.2f}"
        speed = 2 * nbytes / spent / 1000
        share = speed / (2 * GIB / limit.median / 1000)
        kind = "streaming" if stores else "plain"
        cells = threads, vectors, kind, f"{spent:.2f}", f"{speed:.0f}", f"{share:.3f}", again
        print(f"| {' | '.join(map(str, cells))} |")
    device.retune(usual)


if __name__ == "__main__":
    sys.exit(sweep_main("bench.kernels", sweep))
