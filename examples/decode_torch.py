"""A decode loop in torch: `scaled_dot_product_attention` over gathered pages, on a GPU or the CPU.

Tokens are packed, those of one sequence after those of another, as `Batch.append` takes them and
`Batch.gather` gives them. Linear layers do not care; for attention, queries, keys and values are
padded to the longest sequence, and a mask says which keys a query may see.

Run it from the source tree: `python -m examples.decode_torch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import kvcore as k
from examples.decode_setup import MAX_TOKENS, PROMPTS, cache_config, show
from kvcore.demo.weights import load_weights

Counts = list[int]


class Pages:
    """The keys and values of a batch. `counts` are the new tokens of each sequence.

    This is where tensors and pages meet. kvcore takes tensors as they are, without a copy, also to
    gather into: then their memory is torch's, and recycled as torch does it. On a GPU everything
    runs on torch's current stream, so what is appended has been computed there and what is gathered
    is read there. On the CPU there is no stream, and both sides are done when a call returns.
    """

    def __init__(self, manager: k.KVCacheManager, prompts: Counts, longest: Counts) -> None:
        self.manager, self.device = (
            manager,
            torch.device("cuda" if manager.device.kind == "cuda" else "cpu"),
        )
        self.lengths, shape = [0] * len(prompts), manager.config.layers[0].buffers[0].shape
        self.token_shape = tuple(shape or ())  # (K, D)
        self.caches = manager.create_kv_caches(prompts)
        for kv in self.caches:
            kv.resume(self.stream)
        # One batch maps the new tokens, for writing; the other maps every token, for reading.
        self.writes = manager.create_batch(len(prompts), sum(prompts))
        self.reads = manager.create_batch(len(prompts), sum(longest))

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def begin(self, counts: Counts) -> None:
        """Makes room for a step's tokens; those of the steps before are final."""
        before, self.lengths = (
            self.lengths,
            [a + b for a, b in zip(self.lengths, counts, strict=True)],
        )
        if not self.manager.advance(self.caches, counts, history=before):
            raise k.OutOfPagesError(f"no pages for {counts} more tokens")
        self.writes.prepare(self.caches, counts, stream=self.stream)  # from the history on
        self.reads.prepare(self.caches, self.lengths, start=0, stream=self.stream)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes the new tokens' [N, K, D]."""
        self.writes.append(layer, {"key": keys, "value": values}, stream=self.stream)

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Reads every token's [sum of lengths, K, D], the new ones included."""
        shape = (sum(self.lengths), *self.token_shape)
        keys, values = (torch.empty(shape, device=self.device) for _ in "kv")
        self.reads.gather(layer, out=(keys, values), stream=self.stream)
        return keys, values


class Decoder:
    """The demo's model on packed tokens."""

    def __init__(self, device: torch.device) -> None:
        weights = load_weights()
        self.shape, s = weights.shape, weights.shape
        self.w = {name: torch.from_numpy(a).to(device) for name, a in weights.tensors.items()}
        turns = s.rope_base ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim)
        angles = torch.arange(s.context)[:, None, None] * turns  # [context, 1, D / 2]
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def step(self, tokens: Tensor, counts: Counts, pages: Pages) -> Tensor:
        """The likeliest next token of each sequence, [B], after `tokens` [sum of counts]."""
        s, w, device = self.shape, self.w, tokens.device
        pages.begin(counts)
        spans = [torch.arange(end - n, end) for n, end in zip(counts, pages.lengths, strict=True)]
        positions = torch.cat(spans).to(device)
        # [B, 1, n, L]: a query sees the keys up to its own position, which are never padding.
        places = pad_sequence(spans, batch_first=True).to(device)
        mask = torch.arange(max(pages.lengths), device=device) <= places[:, None, :, None]
        x = F.embedding(tokens, w["embed"])
        for i in range(s.layers):
            heads = F.linear(self.norm(x, f"layers.{i}.attn_norm"), w[f"layers.{i}.qkv"])
            heads = heads.view(len(x), -1, s.head_dim)
            q, keys, values = heads.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            pages.append(i, self.rotate(keys, positions), values)
            mixed = attend(self.rotate(q, positions), counts, *pages.gather(i), pages.lengths, mask)
            x = x + F.linear(mixed.flatten(1), w[f"layers.{i}.out"])
            both = F.linear(self.norm(x, f"layers.{i}.mlp_norm"), w[f"layers.{i}.gate_up"])
            gate, up = both.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w[f"layers.{i}.down"])
        last = torch.tensor(counts).cumsum(0).to(device) - 1
        return F.linear(self.norm(x[last], "norm"), w["embed"]).argmax(-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.shape.norm_eps)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(
    q: Tensor, counts: Counts, keys: Tensor, values: Tensor, lengths: Counts, mask: Tensor
) -> Tensor:
    """Attention of packed queries [N, H, D] to packed keys and values [sum of lengths, K, D]."""
    packed = ((q, counts), (keys, lengths), (values, lengths))
    padded = (pad_sequence(a.split(sizes), batch_first=True).transpose(1, 2) for a, sizes in packed)
    mixed = F.scaled_dot_product_attention(*padded, attn_mask=mask, enable_gqa=True)
    return torch.cat([row[:n] for row, n in zip(mixed.transpose(1, 2), counts, strict=True)])


def decode(prompts: Sequence[bytes], max_tokens: int, device: str | None = None) -> list[bytes]:
    """Completes every prompt by `max_tokens` bytes, greedily, all of them in each step.

    `device` is "cuda" or "cpu"; by default a GPU, if torch sees one.
    """
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    decoder, counts = Decoder(on), [len(prompt) for prompt in prompts]
    longest = [count + max_tokens - 1 for count in counts]  # the last token is not computed
    config, kind = cache_config(decoder.shape, longest), "host" if on.type == "cpu" else str(on)
    with k.KVCacheManager(config, device=kind) as manager, torch.inference_mode():
        pages, chosen = Pages(manager, counts, longest), []
        tokens = torch.tensor(list(b"".join(prompts)), device=on)
        for _ in range(max_tokens):
            tokens = decoder.step(tokens, counts, pages)  # stays on the device
            chosen.append(tokens)
            counts = [1] * len(prompts)
        texts = [bytes(row) for row in torch.stack(chosen, dim=1).tolist()]
        manager.close_kv_caches(pages.caches)
    return texts


def main() -> None:
    """Three prompts."""
    show(PROMPTS, decode(PROMPTS, MAX_TOKENS))


if __name__ == "__main__":
    main()
