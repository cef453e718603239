"""Small managers and the choices of random walks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final, Protocol, TypeVar

from kvcore.config import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManagerConfig,
)

T = TypeVar("T")

SLOT_BYTES: Final = 4096
"""Of the largest pool: the grain of the host device."""


class Draw(Protocol):
    """Where a walk's choices come from."""

    def number(self, low: int, high: int) -> int:
        """An int in [low, high]."""
        ...

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        ...


class RandomDraw:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def number(self, low: int, high: int) -> int:
        """An int in [low, high]."""
        return self.random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.random.choice(options)


def small_config(
    *, tokens_per_block: int = 4, slots: int = 12, scales: bool = False, **settings: Any
) -> KVCacheManagerConfig:
    """A configuration with few slots, so that pages are often short.

    Parameters
    ----------
    tokens_per_block : int
        Up to 256.
    slots : int
        Pages that fit.
    scales : bool
        Adds a third role of another size, which gets a pool of its own.
    **settings
        Further fields of `KVCacheManagerConfig`.

    Examples
    --------
    >>> small_config(slots=3, max_beam_width=2).layers[0].buffers[0].shape
    (2, 64)
    """
    words = SLOT_BYTES // 2 // (2 * 4 * tokens_per_block)
    size, shape = words * 2 * 4 * tokens_per_block, (2, words)
    buffers = [
        BufferConfig(role=role, size=size, dtype="float32", shape=shape)
        for role in ("key", "value")
    ]
    if scales:
        few = tokens_per_block * 2 * 2 * 4
        buffers.append(BufferConfig(role="scale", size=few, dtype="float32", shape=(2, 2)))
    quota = slots * SLOT_BYTES + (SLOT_BYTES if scales else 0)
    usual = {"max_beam_width": 4, "max_util_for_resume": 1.0, "enable_partial_commit": False}
    settings = {**usual, **settings}
    return KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=(GpuCacheTierConfig(quota=quota),),
        layers=(AttentionLayerConfig(layer_id=0, buffers=tuple(buffers)),),
        **settings,
    )


def draw_config(draw: Draw) -> KVCacheManagerConfig:
    """A small configuration for a walk: with beams, or with partial blocks that are published."""
    width, size = draw.pick([1, 1, 2, 3, 4, 4]), draw.pick([1, 2, 3, 4, 5])
    return small_config(
        tokens_per_block=size,
        slots=draw.pick([draw.number(5, 12), draw.number(16, 64)]),
        scales=draw.pick([False, True]),
        max_beam_width=width,
        max_rows=draw.pick([None, None, width + 2]),
        max_sequences=draw.pick([4, 16, 16]),
        max_util_for_resume=draw.pick([1.0, 1.0, 1.0, 0.6]),
        max_seq_len=draw.pick([None, None, None, 9]),
        enable_partial_commit=width == 1 and draw.pick([True, True, False]),
        enable_partial_reuse=draw.pick([True, True, False]),
        commit_min_snapshot=draw.pick([False, False, True]),
        reuse_match_backoff=draw.pick([0, 0, 0, draw.number(1, size + 1)]),
    )
