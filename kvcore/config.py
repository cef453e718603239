"""What a cache is made of: frozen, keyword-only descriptions, checked when they are made.

Sequences given by the caller become tuples, NumPy integers become ints. Each field is followed
by what it means, when to set it and what it costs. A description that can be built is consistent;
whether this release can serve it is the manager's answer (`NotImplementedError`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvcore.checks import as_bool, as_choice, as_float, as_int, as_optional_int, as_text, as_tuple
from kvcore.errors import wrong, wrong_type
from kvcore.ids import CacheTier
from kvcore.layer_config import (
    DTYPE_BITS,
    AttentionLayerConfig,
    BufferConfig,
    LayerConfig,
    SsmLayerConfig,
    check_buffers,
    itemsize_bits,
    life_cycle_key,
)

__all__ = [
    "DTYPE_BITS",
    "AttentionLayerConfig",
    "BatchDesc",
    "BufferConfig",
    "CacheTierConfig",
    "DiskCacheTierConfig",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "KVCacheDesc",
    "KVCacheManagerConfig",
    "LayerConfig",
    "ReuseScope",
    "SsmLayerConfig",
    "SwaScratchReuseConfig",
    "itemsize_bits",
    "life_cycle_key",
]

_set: Final = object.__setattr__  # the way to normalise a field of a frozen dataclass
_RATIO_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCacheTierConfig:
    """GPU memory, where pages are used. Exactly one, the first tier."""

    quota: int
    """Bytes for all pools. Rounded down to the device's grain (2 to 32 MiB on CUDA) and never
    exceeded; a quota below what one minimal sequence needs is refused with the bytes it would
    take."""

    def __post_init__(self) -> None:
        _check_quota(self)

    @property
    def tier(self) -> CacheTier:
        """The kind of memory."""
        return CacheTier.GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCacheTierConfig:
    """Host memory below the GPU."""

    quota: int
    """Bytes for pages that left the GPU. Larger keeps more suspended sequences and prefixes
    warm."""

    def __post_init__(self) -> None:
        _check_quota(self)

    @property
    def tier(self) -> CacheTier:
        """The kind of memory."""
        return CacheTier.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheTierConfig:
    """Files below host memory."""

    quota: int
    """Bytes on disk."""

    path: str
    """An existing directory on a fast local disk. Files are anonymous and vanish with the
    manager."""

    def __post_init__(self) -> None:
        _check_quota(self)
        path = os.fspath(self.path) if isinstance(self.path, os.PathLike) else self.path
        _set(self, "path", as_text("path", path))

    @property
    def tier(self) -> CacheTier:
        """The kind of memory."""
        return CacheTier.DISK


CacheTierConfig: TypeAlias = GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheDesc:
    """The size of one sequence at one moment, for planning."""

    capacity: int
    """Tokens it has pages for."""

    history_length: int
    """Tokens whose KV is final; windows slide with it."""

    beam_width: int = 1
    """Live beams. Blocks after the prompt count once per beam; use 1 for the prompt phase."""

    prompt_length: int | None = None
    """Tokens of the prompt, whose full blocks all beams share. None with several beams means that
    nothing but the batch's system prompt is shared."""

    def __post_init__(self) -> None:
        _set(self, "capacity", as_int("capacity", self.capacity, 0))
        _set(self, "history_length", as_int("history_length", self.history_length, 0))
        if self.history_length > self.capacity:
            expected = f"at most capacity ({self.capacity})"
            raise wrong("history_length", expected, self.history_length)
        _set(self, "beam_width", as_int("beam_width", self.beam_width, 1))
        _set(self, "prompt_length", as_optional_int("prompt_length", self.prompt_length, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDesc:
    """Sequences that live at the same time."""

    kv_caches: Sequence[KVCacheDesc]
    """One description per sequence, at least one."""

    system_prompt_length: int = 0
    """First tokens that all of them share; their full blocks are counted once."""

    def __post_init__(self) -> None:
        caches = as_tuple("kv_caches", self.kv_caches, KVCacheDesc, "a KVCacheDesc")
        if not caches:
            raise wrong("kv_caches", "at least one KVCacheDesc", caches)
        _set(self, "kv_caches", caches)
        length = as_int("system_prompt_length", self.system_prompt_length, 0)
        _set(self, "system_prompt_length", length)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwaScratchReuseConfig:
    """Prefill blocks that leave the window within the step share scratch slots between layers."""

    max_rewind_len: int = 0
    """Tokens that may be taken back after a step (rejected drafts): their blocks keep real
    pages."""

    def __post_init__(self) -> None:
        _set(self, "max_rewind_len", as_int("max_rewind_len", self.max_rewind_len, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseScope:
    """The boundary of prefix reuse. Sequences of different scopes never share a page.

    >>> ReuseScope() == ReuseScope(lora_id=0)
    False
    """

    lora_id: int | None = None
    """The adapter the KV was computed with, unsigned 64-bit; None and 0 are different scopes."""

    salt: int | None = None
    """A tenant's secret, unsigned 64-bit; None and 0 are different scopes."""

    def __post_init__(self) -> None:
        _set(self, "lora_id", as_optional_int("lora_id", self.lora_id, 0, 2**64 - 1))
        _set(self, "salt", as_optional_int("salt", self.salt, 0, 2**64 - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheManagerConfig:
    """Everything a manager is built from.

    Raises `ValueError` or `TypeError` naming the argument, also under `python -O`.

    >>> config = KVCacheManagerConfig(
    ...     tokens_per_block=32,
    ...     cache_tiers=[GpuCacheTierConfig(quota=64 << 20)],
    ...     layers=[AttentionLayerConfig(layer_id=0, buffers=[BufferConfig(role="key", size=256)])],
    ... )
    >>> config.num_layer_groups
    1
    """

    tokens_per_block: int
    """Tokens of a block, the unit of allocation and reuse. Small blocks waste less at the end of a
    sequence and match prefixes more finely; large ones make tables short and copies efficient."""

    cache_tiers: Sequence[CacheTierConfig]
    """Memory from hot to cold: exactly one GPU tier, then host, then disk."""

    layers: Sequence[LayerConfig]
    """All layers. Layer groups are numbered in order of first appearance."""

    max_util_for_resume: float = 0.97
    """`resume` answers False while more than this part of a pool group is in use, in (0, 1].
    Lower it to keep room for the growth of what already runs; higher admits more and preempts
    more."""

    constraints: Sequence[BatchDesc] = ()
    """Batches that must always fit, headroom for `resume` included. They become floors of the
    pools, so a quota that cannot hold them is refused at construction instead of failing in
    service."""

    typical_step: BatchDesc | None = None
    """A representative batch: how a quota is divided between pool groups. Only matters with several
    layer groups. Without it the constraints decide, or one sequence of 2049 tokens."""

    initial_pool_ratio: Sequence[float] | None = None
    """The division itself, one positive share per layer group, summing to 1. Overrides
    `typical_step`; floors still hold."""

    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    """Lets long prefills of windowed layers run in few pages; pages are then indexed per layer."""

    commit_min_snapshot: bool = False
    """Commits keep only what resuming at their end needs. Mandatory with SSM layers, whose state
    exists at one position only; reuse then starts at ends of commits."""

    enable_stats: bool = True
    """Counts allocations, reuse and transfers. Turning it off saves little."""

    text_only: bool = False
    """Promises that no sequence holds multimodal tokens."""

    reuse_match_backoff: int = 0
    """Tokens taken off the end of every prefix match, for engines that must recompute some."""

    enable_partial_reuse: bool = True
    """A match may end inside a block, at the price of one page copy per layer group."""

    enable_partial_commit: bool = True
    """A finished sequence publishes its last, partly filled block. Must be off to widen beams."""

    max_beam_width: int = 1
    """Largest beam width of a sequence. Sizes tables and reserves; pages are taken on demand."""

    beam_mode: str = "fork"
    """"fork": each beam's table row is complete, so any paged kernel works. "indirection": rows
    share through an index that the kernel must read."""

    max_sequences: int = 1024
    """Sequences that may exist at once. Tables are reserved for it, about 4 bytes a block each."""

    max_rows: int | None = None
    """Live beams of all sequences together; None derives it from `max_sequences`. Set it when many
    sequences widen at the same time."""

    max_seq_len: int | None = None
    """Longest capacity of a sequence; None is what the pools could hold."""

    def __post_init__(self) -> None:
        _set(self, "tokens_per_block", as_int("tokens_per_block", self.tokens_per_block, 1))
        self._check_scalars()
        self._check_tiers()
        self._check_layers()
        self._check_batches()
        self._check_ratio()

    @property
    def num_layer_groups(self) -> int:
        """Number of layer groups."""
        return len({life_cycle_key(layer, self.tokens_per_block) for layer in self.layers})

    def _check_scalars(self) -> None:
        util = as_float("max_util_for_resume", self.max_util_for_resume)
        if not 0 < util <= 1:
            raise wrong("max_util_for_resume", "a value in (0, 1]", util)
        _set(self, "max_util_for_resume", util)
        for name in ("commit_min_snapshot", "enable_stats", "text_only"):
            _set(self, name, as_bool(name, getattr(self, name)))
        for name in ("enable_partial_reuse", "enable_partial_commit"):
            _set(self, name, as_bool(name, getattr(self, name)))
        backoff = as_int("reuse_match_backoff", self.reuse_match_backoff, 0)
        _set(self, "reuse_match_backoff", backoff)
        _set(self, "beam_mode", as_choice("beam_mode", self.beam_mode, ("fork", "indirection")))
        for name in ("max_beam_width", "max_sequences"):
            _set(self, name, as_int(name, getattr(self, name), 1))
        _set(self, "max_rows", as_optional_int("max_rows", self.max_rows, 1))
        _set(self, "max_seq_len", as_optional_int("max_seq_len", self.max_seq_len, 1))
        if self.max_rows is not None and self.max_rows < self.max_beam_width:
            expected = f"at least max_beam_width ({self.max_beam_width})"
            raise wrong("max_rows", expected, self.max_rows, "one sequence takes a row per beam")
        scratch = self.swa_scratch_reuse
        if scratch is not None and not isinstance(scratch, SwaScratchReuseConfig):
            raise wrong_type("swa_scratch_reuse", "a SwaScratchReuseConfig or None", scratch)

    def _check_tiers(self) -> None:
        kinds = (GpuCacheTierConfig, HostCacheTierConfig, DiskCacheTierConfig)
        tiers: tuple[CacheTierConfig, ...] = as_tuple(
            "cache_tiers", self.cache_tiers, kinds, "a cache tier config"
        )
        order = [tier.tier for tier in tiers]
        if order.count(CacheTier.GPU) != 1 or order != sorted(order):
            got = [tier.name for tier in order]
            raise wrong("cache_tiers", "one GPU tier first, then host, then disk", got)
        _set(self, "cache_tiers", tiers)

    def _check_layers(self) -> None:
        kinds = (AttentionLayerConfig, SsmLayerConfig)
        layers: tuple[LayerConfig, ...] = as_tuple("layers", self.layers, kinds, "a layer config")
        if not layers:
            raise wrong("layers", "at least one layer", layers)
        ids = [layer.layer_id for layer in layers]
        if len(set(ids)) < len(ids):
            repeated = sorted({i for i in ids if ids.count(i) > 1})
            raise wrong("layers", "a different layer_id for each", repeated, "renumber these")
        for layer in layers:
            check_buffers(layer, self.tokens_per_block)
        if not self.commit_min_snapshot and any(isinstance(x, SsmLayerConfig) for x in layers):
            raise wrong("commit_min_snapshot", "True with SSM layers", False, "set it")
        _set(self, "layers", layers)

    def _check_batches(self) -> None:
        constraints = as_tuple("constraints", self.constraints, BatchDesc, "a BatchDesc")
        _set(self, "constraints", constraints)
        if self.typical_step is not None and not isinstance(self.typical_step, BatchDesc):
            raise wrong_type("typical_step", "a BatchDesc or None", self.typical_step)
        named = [(f"constraints[{i}]", batch) for i, batch in enumerate(constraints)]
        if self.typical_step is not None:
            named.append(("typical_step", self.typical_step))
        for name, batch in named:
            widest = max(desc.beam_width for desc in batch.kv_caches)
            if widest > self.max_beam_width:
                expected = f"at most max_beam_width ({self.max_beam_width})"
                raise wrong(f"{name}: beam_width", expected, widest, "raise max_beam_width")

    def _check_ratio(self) -> None:
        if self.initial_pool_ratio is None:
            return
        name = "initial_pool_ratio"
        items = as_tuple(name, self.initial_pool_ratio, object, "a number")
        ratio = tuple(as_float(f"{name}[{i}]", value) for i, value in enumerate(items))
        if len(ratio) != self.num_layer_groups:
            raise wrong(name, f"{self.num_layer_groups} values, one per layer group", ratio)
        if min(ratio) <= 0:
            raise wrong(name, "positive values", ratio)
        if abs(sum(ratio) - 1) > _RATIO_TOLERANCE:
            raise wrong(name, "values that sum to 1", ratio, f"they sum to {sum(ratio)}")
        _set(self, name, ratio)


def _check_quota(tier: CacheTierConfig) -> None:
    _set(tier, "quota", as_int("quota", tier.quota, 1, remedy="give the bytes of this tier"))
