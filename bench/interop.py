"""What a lease costs on the host until another library has its array, and gave it back.

On a GPU where there is one, else on the host device. A library that is missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

import kvcore as k
from bench.harness import Case, Result, measure

BAR = 20.0  # microseconds
CALLS = 1_008
ROUNDS = 12  # by turns: a processor changes its pace within seconds


def open_manager() -> k.KVCacheManager:
    """32 layers of 8 heads of 128 in bfloat16, a few slots."""
    size, shape = 16 * 8 * 128 * 2, (8, 128)
    buffers = [
        k.BufferConfig(role=role, size=size, dtype="bfloat16", shape=shape)
        for role in ("key", "value")
    ]
    layers = [k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(32)]
    tiers = [k.GpuCacheTierConfig(quota=256 << 20)]
    config = k.KVCacheManagerConfig(tokens_per_block=16, cache_tiers=tiers, layers=layers)
    return k.KVCacheManager(config)


def put_to_use(manager: k.KVCacheManager) -> k.KVCache:
    """A sequence on a stream of its own, whose work every consumer waits for."""
    device = manager.device
    kv = manager.create_kv_cache()
    if not kv.resume(None if device.kind == "host" else device.create_stream()) or not kv.resize(
        16
    ):
        raise RuntimeError("out of pages")
    return kv


def own_array(manager: k.KVCacheManager) -> Any:
    """An array of the device's own library, of as many axes."""
    return manager.device.empty((8, 16, 8, 128), np.float16)


def bench_torch() -> Iterator[Case | Result]:
    if find_spec("torch") is None:
        return
    import torch

    manager, used = open_manager(), open_manager()
    if manager.device.kind == "cuda" and not torch.cuda.is_available():
        return
    own, lease = own_array(manager), manager.lease(0, "key")
    kv = put_to_use(used)
    kind = manager.device.kind
    calls = {
        "lease, torch's import, drop": lambda: _taken(torch.from_dlpack, manager),
        "torch's import of an open lease, drop": lambda: bool(torch.from_dlpack(lease).dim()),
        "the lease beside a sequence": lambda: _taken(torch.from_dlpack, used),
    }
    for name, call in calls.items():
        yield Case(
            name=f"{name} ({kind})",
            fn=call,
            rival=lambda: bool(torch.from_dlpack(own).dim()),
            against=f"torch's import of {type(own).__module__.partition('.')[0]}'s array",
            bar=BAR,
            calls=CALLS,
        )
    kv.close()


def _taken(from_dlpack: Callable[[Any], Any], manager: k.KVCacheManager) -> bool:
    return bool(from_dlpack(manager.lease(0, "key")).dim())


def bench_jax() -> Iterator[Result]:
    if find_spec("jax") is None:
        return
    import jax

    manager, used = open_manager(), open_manager()
    kind = manager.device.kind
    if kind == "cuda" and jax.default_backend() != "gpu":
        return
    kv = put_to_use(used)
    yield from above_jax(manager, "lease", kind)
    yield from above_jax(used, "lease beside a sequence", kind)
    kv.close()


def above_jax(manager: k.KVCacheManager, name: str, kind: str) -> Iterator[Result]:
    """What a lease of a pool takes, and how much of that is not JAX's import."""
    from jax.numpy import from_dlpack as take

    own = own_array(manager)
    rounds = [
        [
            measure(call, calls=CALLS // ROUNDS, warmup=32).median
            for call in (
                lambda: bool(take(manager.lease(layer_group=0)).ndim),
                lambda: bool(take(own).ndim),
            )
        ]
        for _ in range(ROUNDS)
    ]
    ours, rival = np.median(rounds, axis=0).tolist()
    above = float(np.median([one - other for one, other in rounds]))
    yield Result(
        name=f"{name}, JAX's import, drop ({kind})",
        value=ours,
        unit="µs",
        ratio=rival / ours,
        against=f"JAX's import of an own array, {rival:.1f} µs",
    )
    yield Result(
        name=f"{name}, JAX's import, drop, above JAX's import of an own array ({kind})",
        value=above,
        unit="µs",
        bar=BAR,
        ok=above <= BAR,
        meta={"ours_us": ours, "rival_us": rival, "calls": CALLS},
    )
