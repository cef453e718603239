"""Beam searches on a GPU, stopped where a sampler would say how they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

import kvcore as k
from bench.gpu import Bench

T = 32  # tokens of a block


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
    stream : optional
        Default: one of its own, which can be captured.
    mode : str, default "fork"
        The manager's `beam_mode`.
    """

    def __init__(
        self,
        bench: Bench,
        model: Model,
        lengths: Sequence[int],
        width: int,
        room: int = 0,
        stream: Any = None,
        mode: str = "fork",
    ) -> None:
        self.bench, self.model, self.width, self.mode = bench, model, width, mode
        self.lengths = np.array(lengths)
        self.captured = cupy.cuda.Stream(non_blocking=True)
        self.stream = bench.device.stream(self.captured if stream is None else stream)
        self.manager = k.KVCacheManager(self._config(room), device=bench.device, stream=self.stream)
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
            max_seq_len=(longest // T + 1) * T,
            max_beam_width=self.width,
            beam_mode=self.mode,
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

    def set_parents(self, parents: np.ndarray) -> None:
        """Says who goes on, in the order of the steps."""
        values = np.asarray(parents, np.int32)
        self.bench.device.from_host(values, self.parents, stream=self.stream)

    def fill(self) -> None:
        """Random bytes in all pages."""
        for memory in (memory for group in self.manager._runtime.pools for memory in group):
            self.bench.fill(memory, memory.nbytes)

    def content(self, start: int, count: int) -> np.ndarray:
        """One item of each beam's tokens `[start, start + count)`, as read through the pages."""
        batch = self.manager.create_batch(self.rows, self.rows * count)
        batch.prepare(self.kvs, count, start=[start] * len(self.kvs))
        _, values = batch.gather(self.model.layers - 1)
        items = self.bench.device.to_host(values[:, 0, 0], stream=self.stream)
        return items.view(np.uint16).reshape(self.rows, count)

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
