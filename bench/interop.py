"""What it costs the host to lend pages: lease, import, drop, end. On the GPU if there is one.

The rival of JAX's import is its own of an array that another library holds: CuPy's on a GPU,
NumPy's on the host. Torch's is `torch.from_dlpack` of such an array.

    python -m bench interop
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

import kvcore as k
from bench.harness import Case
from kvcore.device import open_device

T = 16
TORCH_BAR, JAX_MORE = 20.0, 20.0


def _manager(device: Any) -> k.KVCacheManager:
    like = {"size": T * 8 * 128 * 4, "dtype": "float32", "shape": (8, 128), "layout": "NHD"}
    buffers = [k.BufferConfig(role=role, **like) for role in ("key", "value")]
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=256 << 20)],
        layers=[k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(4)],
    )
    stream = device.create_stream() if device.kind == "cuda" else None
    return k.KVCacheManager(config, device=device, stream=stream)


def _where(device: Any) -> str:
    return "a GPU" if device.kind == "cuda" else "the host"


def _foreign(device: Any) -> Any:
    """An array of the same size that is not kvcore's."""
    shape = 4_096, 1_024
    if device.kind != "cuda":
        return device.empty(shape, np.float32)
    import cupy

    return cupy.zeros(shape, np.float32)


def bench_torch() -> Iterator[Case]:
    """A lease of one buffer as a tensor, dropped, and its end."""
    if find_spec("torch") is None:
        print("\ntorch: left out, it is not installed")
        return
    import torch
    from kvcore_adapters.for_torch import tensor

    device = open_device("auto")
    if device.kind == "cuda" and not torch.cuda.is_available():
        device = open_device("host")
    manager, theirs = _manager(device), _foreign(device)

    def ours() -> None:
        lease = manager.lease(1, "key")
        tensor(lease)
        lease.close()

    def rival() -> None:
        torch.from_dlpack(theirs)

    yield Case(
        name=f"host: lease, torch's import and the drop, on {_where(device)}",
        fn=ours,
        rival=rival,
        against="torch's import of CuPy's or NumPy's",
        bar=TORCH_BAR,
        close=manager.shutdown,
    )


def bench_jax() -> Iterator[Case]:
    """A lease of a whole pool as a JAX array, dropped, and its end."""
    if find_spec("jax") is None:
        print("\njax: left out, it is not installed")
        return
    import jax
    from kvcore_adapters.for_jax import array

    from bench.harness import measure

    device = open_device("auto")
    if device.kind == "cuda" and jax.default_backend() != "gpu":
        device = open_device("host")
    manager, theirs = _manager(device), _foreign(device)

    def ours() -> None:
        lease = manager.lease(layer_group=0)
        array(lease)
        lease.close()

    def rival() -> None:
        jax.numpy.from_dlpack(theirs)

    alone = measure(rival, calls=1_000, warmup=100).median
    yield Case(
        name=f"host: lease, JAX's import and the drop, on {_where(device)}",
        fn=ours,
        rival=rival,
        against="JAX's import of CuPy's or NumPy's",
        bar=alone + JAX_MORE,
        meta={"more than JAX alone": JAX_MORE},
        close=manager.shutdown,
    )
