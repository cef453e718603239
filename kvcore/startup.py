"""From a configuration to memory: what a manager does before its first sequence."""

from __future__ import annotations

from kvcore.checks import LONGEST
from kvcore.config import KVCacheManagerConfig
from kvcore.control.plane import ControlPlane
from kvcore.control.reuse import ReuseRules
from kvcore.control.sequences import TableShape
from kvcore.control.sizing import solve_slots
from kvcore.device.base import Device, Memory
from kvcore.errors import wrong
from kvcore.ids import align_up, div_ceil
from kvcore.layer_config import AttentionLayerConfig, SsmLayerConfig
from kvcore.layout import Layout, build_layout
from kvcore.runtime import Runtime

MOST_ROWS = 1 << 16  # rows reserved by default


def open_runtime(config: KVCacheManagerConfig, device: Device, stream: object) -> Runtime:
    """Sizes the pools, reserves their memory and makes empty tables. Blocks meanwhile."""
    layout = build_layout(config)
    quota = config.cache_tiers[0].quota
    grain = device.grain(quota)
    num_slots = solve_slots(layout, config, quota, grain)
    default = device.default_stream if stream is None else device.stream(stream)
    control = ControlPlane(
        _table_shape(config, layout, num_slots, device.has_memory),
        num_slots,
        tuple(int(group.pool_group) for group in layout.layer_groups),
        ReuseRules(
            partial_reuse=config.enable_partial_reuse,
            partial_commit=config.enable_partial_commit,
            backoff=config.reuse_match_backoff,
        ),
        tuple(sum(group.slot_bytes) for group in layout.pool_groups)
        if config.enable_stats
        else None,
    )
    pools = _reserve_pools(device, layout, num_slots, grain)
    try:
        return Runtime(config, layout, device, control, pools, default)
    except BaseException:
        _close(pools)
        raise


def refuse_unbuilt(config: KVCacheManagerConfig) -> None:
    """Raises `NotImplementedError` with the reason for the first thing that is not built."""
    reasons = {
        "sliding windows": any(
            isinstance(layer, AttentionLayerConfig) and layer.sliding_window_size is not None
            for layer in config.layers
        ),
        "recurrent (SSM) layers": any(isinstance(layer, SsmLayerConfig) for layer in config.layers),
        "sparse attention layers": any(
            isinstance(layer, AttentionLayerConfig) and layer.kind == "sparse"
            for layer in config.layers
        ),
        "host and disk tiers": len(config.cache_tiers) > 1,
        "scratch reuse": config.swa_scratch_reuse is not None,
        "beams over float4 MLA buffers": config.max_beam_width > 1
        and any(
            isinstance(layer, AttentionLayerConfig)
            and layer.kind == "mla"
            and any(str(buffer.dtype).startswith("float4") for buffer in layer.buffers)
            for layer in config.layers
        ),
    }
    for what, asked in reasons.items():
        if asked:
            raise NotImplementedError(
                f"{what}: not built yet; leave it out of the KVCacheManagerConfig for now"
            )


def _table_shape(
    config: KVCacheManagerConfig, layout: Layout, num_slots: tuple[int, ...], twin: bool
) -> TableShape:
    T = config.tokens_per_block  # noqa: N806 - the field's symbol
    holds = min(num_slots[group.id] // len(group.layer_groups) for group in layout.pool_groups)
    if (config.max_seq_len or 0) > LONGEST:
        raise wrong("max_seq_len", f"at most {LONGEST}", config.max_seq_len)
    longest = config.max_seq_len or min(holds * T, align_up(LONGEST - T + 1, T))
    rows = max(config.max_sequences, min(config.max_sequences * config.max_beam_width, MOST_ROWS))
    return TableShape(
        max_sequences=config.max_sequences,
        max_rows=config.max_rows or rows,
        max_beam_width=config.max_beam_width,
        num_groups=len(layout.layer_groups),
        max_blocks=div_ceil(longest, T),
        max_seq_len=longest,
        tokens_per_block=T,
        twin=twin,
        indirect=config.beam_mode == "indirection" and config.max_beam_width > 1,
    )


def _reserve_pools(
    device: Device, layout: Layout, num_slots: tuple[int, ...], grain: int
) -> list[list[Memory]]:
    pools: list[list[Memory]] = []
    try:
        for group, count in zip(layout.pool_groups, num_slots, strict=True):
            pools.append([])
            for slot_bytes in group.slot_bytes:
                nbytes = align_up(count * slot_bytes, grain)
                pools[-1].append(device.reserve(nbytes, nbytes, grain))
    except BaseException:
        _close(pools)
        raise
    return pools


def _close(pools: list[list[Memory]]) -> None:
    for memory in (memory for group in pools for memory in group):
        memory.close()
