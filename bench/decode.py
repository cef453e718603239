"""Host time of one decode step on the host device: advance, prepare, one stacked append.

The host device does its work at once, so the append contains the copying that a GPU would do aside;
its limit is NumPy copying the same bytes into one contiguous array. `bench.decode_cuda` is the same
step where the host only enqueues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvcore as k
from bench.control import closer, staggered, started
from bench.harness import Case

SEQUENCES, BLOCK, WARMUP = 256, 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a step writes, and how many steps there are."""

    layers: int
    heads: int
    dim: int
    calls: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence after the last step, in whole blocks."""
        return (2 + -(-(self.calls + WARMUP) // BLOCK)) * BLOCK

    @property
    def new(self) -> tuple[int, int, int, int]:
        """Shape of a step's keys."""
        return self.layers, SEQUENCES, self.heads, self.dim


SMALL = Model(layers=4, heads=2, dim=128, calls=320)


def manager(model: Model, device: Any, stream: object = None) -> k.KVCacheManager:
    """A cache in which all steps of all sequences fit."""
    page = BLOCK * model.heads * model.dim * 2
    like = {"dtype": "float16", "shape": (model.heads, model.dim), "layout": "NHD"}
    buffers = [k.BufferConfig(role=role, size=page, **like) for role in ("key", "value")]
    blocks = SEQUENCES * model.longest // BLOCK
    config = k.KVCacheManagerConfig(
        tokens_per_block=BLOCK,
        # Two grains more than the pages take: a quota is rounded down.
        cache_tiers=[k.GpuCacheTierConfig(quota=blocks * model.layers * 2 * page + (64 << 20))],
        layers=[k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(model.layers)],
        max_sequences=SEQUENCES,
        max_seq_len=model.longest,
    )
    return k.KVCacheManager(config, device=device, stream=stream)


class Step:
    """A decode step of all sequences, in parts named by letters: a(dvance), p(repare), w(rite)."""

    def __init__(self, model: Model, manager: k.KVCacheManager, new: Any) -> None:
        self.manager, self.new, self.layers = manager, new, range(model.layers)
        self.caches = started(manager, staggered(SEQUENCES))
        self.batch = manager.create_batch(max_rows=SEQUENCES, max_tokens=SEQUENCES)
        self.history = np.array([cache.capacity for cache in self.caches], np.int32) - 1
        self.parts: dict[str, Callable[[], None]] = {
            "a": self.advance,
            "p": lambda: self.batch.prepare(self.caches, num_tokens=1),
            "w": lambda: self.batch.append(self.layers, {"key": new, "value": new}),
        }

    def advance(self) -> None:
        """One more token for everybody; the last one is final."""
        np.add(self.history, 1, out=self.history)
        if not self.manager.advance(self.caches, 1, history=self.history):
            raise RuntimeError("out of pages")

    def run(self, letters: str) -> None:
        """Does these parts, in this order."""
        for letter in letters:
            self.parts[letter]()


def touch_all_pages(model: Model, step: Step) -> None:
    """Writes every page once, so that no page fault of the system falls on the clock."""
    batch = step.manager.create_batch(max_rows=1, max_tokens=model.longest)
    before = [cache.capacity for cache in step.caches]
    zeros = np.zeros((model.layers, model.longest, model.heads, model.dim), np.float16)
    for cache in step.caches:
        cache.resize(model.longest)
        batch.prepare([cache], num_tokens=model.longest)
        batch.append(step.layers, {"key": zeros, "value": zeros})
    step.manager.truncate(step.caches, before)


def bench_decode_step() -> Iterator[Case]:
    yield host_case("advance", before="", clocked="a")
    yield host_case("prepare", before="a", clocked="p")
    yield host_case(f"stacked append, {SMALL.layers} layers", before="ap", clocked="w")
    yield host_case("all", before="", clocked="apw")


def host_case(name: str, *, before: str, clocked: str) -> Case:
    """Some parts of the step on the clock, others before it."""
    new = np.ones(SMALL.new, np.float16)
    step = Step(SMALL, manager(SMALL, "host"), new)
    touch_all_pages(SMALL, step)
    contiguous = np.empty((2, *new.shape), np.float16)

    def copy(_: object) -> None:
        contiguous[0], contiguous[1] = new, new

    writes = "w" in clocked
    return Case(
        name=f"decode step of {SEQUENCES}: {name}",
        fn=lambda _: step.run(clocked),
        setup=lambda: step.run(before),
        rival=copy if writes else None,
        rival_setup=lambda: None,
        against="NumPy copy of the bytes" if writes else "",
        calls=SMALL.calls,
        warmup=WARMUP,
        meta={"bytes": contiguous.nbytes, "layers": SMALL.layers},
        close=closer(step.manager, step.caches),
    )
