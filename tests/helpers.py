"""Managers for tests: small, with exact numbers of slots."""

from __future__ import annotations

from typing import Any

import kvcore as k

HALF = 1024  # bytes of a key or value page where nothing else is said


def opaque_manager(
    slots: int = 16, T: int = 4, layers: int = 1, device: Any = "host", **settings: Any
) -> k.KVCacheManager:
    """Opaque pages; every slot is 2 * HALF * layers bytes, and `slots` fit the quota exactly."""
    slot_bytes = 2 * HALF * layers
    assert slots * slot_bytes % 4096 == 0, "the quota would be rounded down to the grain"
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=slots * slot_bytes)],
        layers=[
            k.AttentionLayerConfig(
                layer_id=i, buffers=[k.BufferConfig(role=r, size=HALF) for r in ("key", "value")]
            )
            for i in range(layers)
        ],
        **settings,
    )
    return k.KVCacheManager(config, device=device)


def typed_manager(
    slots: int = 16,
    T: int = 4,
    layers: int = 2,
    heads: int = 2,
    dim: int = 8,
    layout: str = "NHD",
    dtype: str = "float32",
    device: Any = "host",
    stream: Any = None,
    **settings: Any,
) -> k.KVCacheManager:
    """Typed keys and values; about `slots` slots."""
    size = T * heads * dim * k.config.itemsize_bits(dtype) // 8
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=-(-slots * 2 * layers * size // 4096) * 4096)],
        layers=[
            k.AttentionLayerConfig(
                layer_id=i,
                buffers=[
                    k.BufferConfig(
                        role=r, size=size, dtype=dtype, shape=(heads, dim), layout=layout
                    )
                    for r in ("key", "value")
                ],
            )
            for i in range(layers)
        ],
        **settings,
    )
    return k.KVCacheManager(config, device=device, stream=stream)


def mixed_manager(
    kinds: dict[str, tuple[str | None, tuple[int, ...] | None]],
) -> k.KVCacheManager:
    """One layer whose buffers have 128 bytes a page each, and these types and shapes."""
    buffers = [k.BufferConfig(role=r, size=128, dtype=d, shape=s) for r, (d, s) in kinds.items()]
    config = k.KVCacheManagerConfig(
        tokens_per_block=4,
        cache_tiers=[k.GpuCacheTierConfig(quota=4096)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    )
    return k.KVCacheManager(config, device="host")


def used(manager: k.KVCacheManager) -> int:
    """Slots in use, over all pool groups."""
    return sum(group.unavailable for group in manager.get_storage_statistics(0))


def row(kv: k.KVCache, beam: int = 0) -> list[int]:
    """One beam's page indices."""
    return kv.get_base_page_indices(0, beam).tolist()


def opened(manager: k.KVCacheManager, *capacities: int) -> list[k.KVCache]:
    """Active caches of the given capacities."""
    caches = manager.create_kv_caches([None] * len(capacities))
    for kv, capacity in zip(caches, capacities, strict=True):
        assert kv.resume()
        assert kv.resize(capacity)
    return caches
