"""A decode loop in JAX: one jitted step that reads pages in place, on a GPU or the CPU.

JAX's arrays don't change, so kvcore writes and JAX reads. Each step hands JAX the whole pool, where
it lies, and the page table; the jitted function gathers pages by number, attends, and returns the
new keys and values of all layers; kvcore appends them outside of `jit`, in one launch. How arrays
get from one to the other, and who waits for whom, is in `examples/jax_pages.py`. Shapes are padded
to powers of two, so that the step compiles when a sequence doubles and not per token.

On a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false: else JAX takes most of the memory at its start.

Run it from the source tree: `python -m examples.decode_jax`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import kvcore as k
from examples.decode_setup import MAX_TOKENS, PROMPTS, cache_config, show
from examples.jax_pages import Exchange, Pages, power_of_two
from kvcore.demo.weights import Shape, load_weights

Params = dict[str, Any]


class Decoder:
    """The demo's model as one jitted function."""

    def __init__(self, pages: Pages, exchange: Exchange) -> None:
        weights = load_weights()
        s, tensors = weights.shape, dict(weights.tensors)
        turns = s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
        angles = np.arange(s.context)[:, None, None] * turns  # [context, 1, D / 2]
        names = ("attn_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
        layers = {n: np.stack([tensors[f"layers.{i}.{n}"] for i in range(s.layers)]) for n in names}
        layers["offsets"], self.scale = pages.offsets, pages.scale
        rest = {"embed": tensors["embed"], "norm": tensors["norm"]}
        tables = {"cos": np.cos(angles).astype("f4"), "sin": np.sin(angles).astype("f4")}
        self.params = exchange.put({"layers": layers, **rest, **tables})
        self.shape, self.compiled = s, 0
        self.step = jax.jit(self._step)

    def _step(
        self,
        params: Params,
        pool: jax.Array,  # float32 [pages, T, K, D]; not JAX's, so never donate it
        table: jax.Array,  # int32 [B, blocks]: slots, -1 where there is no page
        starts: jax.Array,  # int32 [B]: tokens in the pages
        tokens: jax.Array,  # int32 [B, n], padded
        counts: jax.Array,  # int32 [B]: of `tokens`, those that are no padding
        order: jax.Array,  # int32 [B * n]: where in `tokens` these are, one after the other
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next tokens, int32 [B, 1]; new keys and values, [layers, B * n, K, D], packed."""
        self.compiled += 1  # runs while JAX traces, not when it computes
        rows, n = tokens.shape
        positions = starts[:, None] + jnp.arange(n)
        turns = params["cos"][positions], params["sin"][positions]  # [B, n, 1, D / 2]
        written = jnp.arange(table.shape[1] * pool.shape[1]) < starts[:, None]
        causal = jnp.broadcast_to(jnp.tri(n, dtype=bool), (rows, 1, n, n))
        old = jnp.broadcast_to(written[:, None, None], (rows, 1, n, written.shape[1]))
        mask = jnp.concatenate((old, causal), axis=-1)

        def layer(x: jax.Array, p: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            pages = pool[table * self.scale + p["offsets"][:, None, None]]
            pages = pages.reshape(2, rows, -1, *pool.shape[2:])  # [2, B, blocks * T, K, D]
            # Nobody has written what is behind the last token: 0 * NaN would be NaN.
            past = jnp.where(written[..., None, None], pages, 0)
            return transform(self.shape, p, x, past, turns, mask)

        with jax.default_matmul_precision("highest"):  # else a GPU takes TF32
            x, new = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
            last = norm(self.shape, x[jnp.arange(rows), counts - 1], params["norm"])
            chosen = (last @ params["embed"].T).argmax(-1).astype(jnp.int32)
        keys, values = (a.reshape(len(a), rows * n, *a.shape[3:])[:, order] for a in new)
        return chosen[:, None], keys, values


def transform(
    s: Shape, p: Params, x: jax.Array, past: jax.Array, turns: Sequence[jax.Array], mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer on x [B, n, dim] after `past` keys and values; gives the new ones as well."""
    heads = (norm(s, x, p["attn_norm"]) @ p["qkv"].T).reshape(*x.shape[:2], -1, s.head_dim)
    q, key, value = jnp.split(heads, (s.heads, s.heads + s.kv_heads), axis=2)
    q, key = rotate(q, *turns), rotate(key, *turns)
    every = (jnp.concatenate(both, axis=1) for both in zip(past, (key, value), strict=True))
    mixed = jax.nn.dot_product_attention(q, *every, mask=mask)  # grouped-query
    x = x + mixed.reshape(*x.shape[:2], -1) @ p["out"].T
    gate, up = jnp.split(norm(s, x, p["mlp_norm"]) @ p["gate_up"].T, 2, axis=-1)
    return x + jax.nn.silu(gate) * up @ p["down"].T, (key, value)


def norm(s: Shape, x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + s.norm_eps) * scale


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def padded(prompts: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompts as int32 [B, n], and where in it their tokens are: int32 [B * n], then zeros."""
    n = power_of_two(max(map(len, prompts)))
    tokens = np.zeros((len(prompts), n), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = list(prompt)
    inside = np.arange(n) < np.array([[len(prompt)] for prompt in prompts])
    order = np.zeros(tokens.size, np.int32)
    order[: inside.sum()] = np.flatnonzero(inside)
    return tokens, order


def decode(
    prompts: Sequence[bytes], max_tokens: int, device: jax.Device | None = None
) -> tuple[list[bytes], int]:
    """Completes every prompt by `max_tokens` bytes, greedily, all of them in each step.

    `device` is one of JAX's, by default its first. Gives the number of compilations as well.
    """
    exchange = Exchange(device or jax.devices()[0])
    kind = "host" if exchange.stream is None else "cuda"
    lengths = [len(prompt) + max_tokens - 1 for prompt in prompts]  # the last one is not computed
    config = cache_config(load_weights().shape, lengths)
    with k.KVCacheManager(config, device=kind) as manager:
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        pages = Pages(manager, counts, exchange)
        decoder, chosen = Decoder(pages, exchange), []
        host_tokens, order = padded(prompts)
        tokens, rest = exchange.put(host_tokens), exchange.put((counts, order))
        for _ in range(max_tokens):
            given = pages.begin(counts)
            tokens, keys, values = decoder.step(decoder.params, *given, tokens, *rest)
            pages.append(keys, values)
            chosen.append(tokens)  # stays on the device
            counts = np.ones_like(counts)
            rest = exchange.put((counts, np.arange(len(prompts), dtype=np.int32)))
        texts = [bytes(row) for row in np.concatenate(jax.device_get(chosen), axis=1).tolist()]
        manager.close_kv_caches(pages.caches)
    return texts, decoder.compiled


def main() -> None:
    """Three prompts."""
    texts, compiled = decode(PROMPTS, MAX_TOKENS)
    show(PROMPTS, texts)
    print(f"compiled {compiled} times")


if __name__ == "__main__":
    main()
