"""What the decode loops have in common whatever computes them: the prompts and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import kvcore as k
from kvcore.demo import stores
from kvcore.demo.weights import Shape
from kvcore.ids import align_up, div_ceil

# Greedy search finds the same bytes in every framework only where no two of them are equally
# likely. Along these texts the best logit leads by at least 0.12; summing in another order, or in
# TF32, moves one by far less.
PROMPTS = (
    b"Praise",
    b"And God said unto Moses, Speak unto",
    b"And it came to pass, when the king heard the words of the book of the law, that he",
)
MAX_TOKENS = 64


def cache_config(shape: Shape, lengths: Sequence[int]) -> k.KVCacheManagerConfig:
    """Keys and values of the demo's layers, float32, in pages for sequences of these lengths."""
    blocks = sum(div_ceil(length, stores.TOKENS_PER_BLOCK) for length in lengths)
    quota = blocks * stores.TOKENS_PER_BLOCK * shape.token_bytes
    return replace(
        stores.cache_config(shape, max(lengths), width=1),
        cache_tiers=(k.GpuCacheTierConfig(quota=align_up(quota, stores.GRAIN)),),
        max_sequences=len(lengths),
        max_seq_len=shape.context,
    )


def show(prompts: Sequence[bytes], texts: Sequence[bytes]) -> None:
    """Prints what became of every prompt."""
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt.decode()}|{text.decode('latin-1')}")
