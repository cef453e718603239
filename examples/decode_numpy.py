"""A decode loop in NumPy, on host memory: three prompts of different lengths at once.

Tokens are packed: those of one sequence after those of another, which is how `Batch.append` takes
them and `Batch.gather` gives them. So a step of whole prompts and a step of one token each are the
same code, and only attention looks at one sequence at a time.

`examples/decode_cupy.py` runs this very loop on a GPU, with CuPy for NumPy.
Run it from the source tree: `python -m examples.decode_numpy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore as k
from examples.decode_setup import MAX_TOKENS, PROMPTS, cache_config, show
from kvcore.demo.weights import load_weights
from kvcore.device.base import Array

Counts = NDArray[np.int64]


class Pages:
    """The keys and values of a batch. `counts` are the new tokens of each sequence.

    Everything runs on the stream that the caches are bound to, which is the one that computes:
    what is appended has been computed there, and what is gathered is read there.
    """

    def __init__(self, manager: k.KVCacheManager, prompts: Counts, longest: Counts, stream: Any):
        self.manager, self.lengths = manager, np.zeros_like(prompts)
        self.caches = manager.create_kv_caches(prompts.tolist())
        for kv in self.caches:
            kv.resume(stream)
        # One batch maps the new tokens, for writing; the other maps every token, for reading.
        self.writes = manager.create_batch(len(prompts), int(prompts.sum()))
        self.reads = manager.create_batch(len(prompts), int(longest.sum()))

    def begin(self, counts: Counts) -> None:
        """Makes room for a step's tokens; those of the steps before are final."""
        before, self.lengths = self.lengths, self.lengths + counts
        if not self.manager.advance(self.caches, counts, history=before):
            raise k.OutOfPagesError(f"no pages for {counts} more tokens")
        self.writes.prepare(self.caches, counts)  # from the history on
        self.reads.prepare(self.caches, self.lengths, start=0)

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Writes the new tokens' [N, K, D]."""
        self.writes.append(layer, {"key": keys, "value": values})

    def gather(self, layer: int) -> tuple[Array, Array]:
        """Reads every token's [sum of lengths, K, D], the new ones included."""
        keys, values = self.reads.gather(layer)
        return keys, values


class Decoder:
    """The demo's model on packed tokens."""

    def __init__(self, xp: Any) -> None:
        weights = load_weights(xp)
        self.xp, self.shape, self.w = xp, weights.shape, weights.tensors
        s = self.shape
        turns = s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
        angles = np.arange(s.context)[:, None, None] * turns  # [context, 1, D / 2]
        self.cos = xp.asarray(np.cos(angles).astype("float32"))
        self.sin = xp.asarray(np.sin(angles).astype("float32"))

    def step(self, tokens: Array, counts: Counts, pages: Pages) -> Array:
        """The likeliest next token of each sequence, int [B], after `tokens` [sum of counts]."""
        s, w = self.shape, self.w
        pages.begin(counts)
        spans = [np.arange(end - n, end) for n, end in zip(counts, pages.lengths, strict=True)]
        positions = self.xp.asarray(np.concatenate(spans))
        x = w["embed"][tokens]
        for i in range(s.layers):
            normed = self.norm(x, w[f"layers.{i}.attn_norm"])
            heads = (normed @ w[f"layers.{i}.qkv"].T).reshape(len(x), -1, s.head_dim)
            turned = self.rotate(heads[:, : s.heads + s.kv_heads], positions)
            pages.append(i, turned[:, s.heads :], heads[:, s.heads + s.kv_heads :])
            keys, values = (each_of(a, pages.lengths) for a in pages.gather(i))
            rows = zip(each_of(turned[:, : s.heads], counts), keys, values, strict=True)
            mixed = self.xp.concatenate([self.attend(*row) for row in rows])
            x = x + mixed @ w[f"layers.{i}.out"].T
            x = x + self.feed_forward(i, self.norm(x, w[f"layers.{i}.mlp_norm"]))
        logits = self.norm(x[self.xp.asarray(np.cumsum(counts) - 1)], w["norm"]) @ w["embed"].T
        return logits.argmax(axis=-1)

    def norm(self, x: Array, scale: Array) -> Array:
        return x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + self.shape.norm_eps) * scale

    def rotate(self, heads: Array, positions: Array) -> Array:
        cos, sin = self.cos[positions], self.sin[positions]
        a, b = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
        return self.xp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def attend(self, q: Array, keys: Array, values: Array) -> Array:
        """Causal attention of one sequence: its last n tokens, [n, H, D], to all, [L, K, D]."""
        xp, (n, heads, dim), (length, kv_heads, _) = self.xp, q.shape, keys.shape
        group = heads // kv_heads  # query heads that read one KV head: rows of one product
        q = q.reshape(n, kv_heads, group, dim).transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)
        scores = q @ keys.transpose(1, 2, 0) * xp.float32(dim**-0.5)  # [K, n * H / K, L]
        positions = xp.repeat(xp.arange(length - n, length), group)[:, None]
        scores = xp.where(xp.arange(length) <= positions, scores, xp.float32(-np.inf))
        parts = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = parts @ values.transpose(1, 0, 2) / parts.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(kv_heads, n, group, dim).transpose(1, 0, 2, 3)
        return mixed.reshape(n, heads * dim)

    def feed_forward(self, layer: int, x: Array) -> Array:
        both = x @ self.w[f"layers.{layer}.gate_up"].T
        gate, up = both[:, : self.shape.hidden], both[:, self.shape.hidden :]
        return gate / (1 + self.xp.exp(-gate)) * up @ self.w[f"layers.{layer}.down"].T


def each_of(packed: Array, counts: Counts) -> list[Array]:
    """The tokens of each sequence, as views."""
    return [packed[end - n : end] for n, end in zip(counts, np.cumsum(counts), strict=True)]


def decode(
    prompts: Sequence[bytes],
    max_tokens: int,
    *,
    xp: Any = np,
    device: str = "host",
    stream: Any = None,
) -> list[bytes]:
    """Completes every prompt by `max_tokens` bytes, greedily, all of them in each step.

    `xp` computes on its current stream, which must be `stream`; it is what `device` consists of.
    """
    decoder = Decoder(xp)
    counts = np.array([len(prompt) for prompt in prompts])
    longest = counts + max_tokens - 1  # the last token is chosen and not computed
    with k.KVCacheManager(cache_config(decoder.shape, longest.tolist()), device=device) as manager:
        pages = Pages(manager, counts, longest, stream)
        tokens, chosen = xp.asarray(list(b"".join(prompts))), []
        for _ in range(max_tokens):
            tokens = decoder.step(tokens, counts, pages)  # stays on the device
            chosen.append(tokens)
            counts = np.ones_like(counts)
        texts = [bytes(row) for row in xp.stack(chosen, axis=1).tolist()]
        manager.close_kv_caches(pages.caches)
    return texts


def main() -> None:
    """Three prompts."""
    show(PROMPTS, decode(PROMPTS, MAX_TOKENS))


if __name__ == "__main__":
    main()
