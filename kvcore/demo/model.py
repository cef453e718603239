"""The decoder in NumPy or CuPy, float32: grouped-query attention, RoPE, SwiGLU, tied embedding.

It computes and keeps nothing: keys and values go to a `KVStore`, which may hold them in any way.
Symbols: `R` rows (beams), `n` new tokens per row, `L` tokens per row so far, `H` query heads, `K`
KV heads, `D` head dimension, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvcore.demo.weights import Weights
from kvcore.device.base import Array


class KVStore(Protocol):
    """Where the keys and values of R equally long rows live."""

    @property
    def length(self) -> int:
        """Tokens per row whose keys and values are final."""
        ...

    def begin(self, n: int) -> None:
        """Makes room for n more tokens per row. Raises `OutOfPagesError` with nothing changed."""
        ...

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Stores the new tokens of one layer, float32 [R, n, K, D]."""
        ...

    def read(self, layer: int) -> tuple[Array, Array]:
        """All keys and values of one layer, new ones included, contiguous float32 [R, L, K, D]."""
        ...

    def end(self) -> None:
        """Declares the new tokens final."""
        ...


class Decoder:
    """A stateless model: tokens in, logits out.

    Parameters
    ----------
    weights : Weights
        Arrays of `xp`.
    xp : module
        `numpy` or `cupy`. On CuPy everything runs on the current stream and nothing waits.
    """

    def __init__(self, weights: Weights, xp: Any) -> None:
        self.shape, self.xp = weights.shape, xp
        self._w = {
            name: xp.ascontiguousarray(tensor.T)  # [in, out]
            for name, tensor in {**weights.tensors, "unembed": weights.tensors["embed"]}.items()
        }
        self._embed = weights.tensors["embed"]
        s = weights.shape
        turns = s.rope_base ** (-xp.arange(0, s.head_dim, 2, dtype="float64") / s.head_dim)
        angles = xp.arange(s.context, dtype="float64")[:, None] * turns
        self._cos, self._sin = xp.cos(angles).astype("float32"), xp.sin(angles).astype("float32")

    def step(self, tokens: Array, store: KVStore) -> Array:
        """Logits float32 [R, V] of what follows the last of `tokens`.

        Parameters
        ----------
        tokens : int array [R, n]
            The next n tokens of every row; n > 1 is a prefill.
        store : KVStore
            Holds the tokens before; gets the keys and values of these.
        """
        rows, count = tokens.shape
        store.begin(count)
        x = self._embed[tokens.reshape(-1)]  # [R * n, dim]
        for layer in range(self.shape.layers):
            x = x + self._attend(layer, x, rows, count, store)
            x = x + self._feed_forward(layer, x)
        store.end()
        last = x.reshape(rows, count, -1)[:, -1]
        return self._times(self._norm(last, "norm"), "unembed")

    def _times(self, x: Array, name: str) -> Array:
        """[N, in] times a matrix.

        One product per row: NumPy's OpenBLAS would spread the product of a few rows over threads,
        whose waiting for each other costs far more than they save on matrices this small.
        """
        return (x[:, None] @ self._w[name])[:, 0]

    def _norm(self, x: Array, name: str) -> Array:
        scale = (x * x).mean(axis=-1, keepdims=True) + self.shape.norm_eps
        return x / self.xp.sqrt(scale) * self._w[name]

    def _feed_forward(self, layer: int, x: Array) -> Array:
        both = self._times(self._norm(x, f"layers.{layer}.mlp_norm"), f"layers.{layer}.gate_up")
        gate, up = both[:, : self.shape.hidden], both[:, self.shape.hidden :]
        return self._times(gate / (1 + self.xp.exp(-gate)) * up, f"layers.{layer}.down")

    def _attend(self, layer: int, x: Array, rows: int, count: int, store: KVStore) -> Array:
        s = self.shape
        normed = self._norm(x, f"layers.{layer}.attn_norm")
        heads = self._times(normed, f"layers.{layer}.qkv").reshape(rows, count, -1, s.head_dim)
        turned = self._rotate(heads[:, :, : s.heads + s.kv_heads], store.length)
        store.append(layer, turned[:, :, s.heads :], heads[:, :, s.heads + s.kv_heads :])
        mixed = self._mix(turned[:, :, : s.heads], *store.read(layer))
        return self._times(mixed.reshape(rows * count, -1), f"layers.{layer}.out")

    def _rotate(self, heads: Array, first: int) -> Array:
        """Turns [R, n, heads, D] by the positions from `first` on."""
        half = self.shape.head_dim // 2
        cos = self._cos[first : first + heads.shape[1], None]
        sin = self._sin[first : first + heads.shape[1], None]
        a, b = heads[..., :half], heads[..., half:]
        return self.xp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def _mix(self, queries: Array, keys: Array, values: Array) -> Array:
        """Causal attention: [R, n, H, D] over [R, L, K, D]; H / K query heads read one KV head."""
        xp, (rows, count, _, dim) = self.xp, queries.shape
        length, kv_heads = keys.shape[1:3]
        # [R, K, n * H/K, D]: the query heads of a KV head become rows of one matrix product.
        grouped = queries.reshape(rows, count, kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
        group = grouped.shape[3]
        grouped = grouped.reshape(rows, kv_heads, count * group, dim)
        scores = grouped @ keys.transpose(0, 2, 3, 1) * dim**-0.5  # [R, K, n * H/K, L]
        if count > 1:
            positions = xp.repeat(xp.arange(length - count, length), group)[:, None]
            scores = xp.where(xp.arange(length) <= positions, scores, xp.float32(-xp.inf))
        scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = scores @ values.transpose(0, 2, 1, 3) / scores.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(rows, kv_heads, count, group, dim)
        return mixed.transpose(0, 2, 1, 3, 4).reshape(rows, count, -1, dim)
