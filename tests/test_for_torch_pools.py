"""Pages and pools as torch tensors, in place."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.errors import DriverError
from kvcore.layer_config import DTYPE_BITS
from kvcore.lease_book import LeaseBook
from tests.helpers import mixed_manager, opened, row, typed_manager

torch = pytest.importorskip("torch")
from kvcore_adapters.for_torch import TorchBatch, TorchPools, tensor, torch_type  # noqa: E402

H, D, T = 2, 8, 4


def some(dtype: str, *shape: int):
    """Random tensors of any type, by their bits."""
    size = DTYPE_BITS[dtype]
    dim = shape[-1] // 2 if size == 4 else shape[-1]
    raw = np.random.default_rng(5).integers(0, 2 if dtype == "bool" else 256,
                                            (*shape[:-1], dim * max(size // 8, 1)))  # fmt: skip
    return torch.from_numpy(raw.astype(np.uint8)).view(torch_type(dtype))


def bits(its):
    return its.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_pages_are_tensors_of_their_type_in_place(layout, dtype):
    m = typed_manager(slots=64, layers=3, layout=layout, dtype=dtype)
    (kv,) = opened(m, 7)
    with TorchPools(m) as pools:
        step = TorchBatch(pools, 1, 8)
        step.prepare([kv], 7)
        new = some(dtype, 3, 7, H, D)
        step.append(range(3), {"key": new, "value": new.flip(1) if D > 8 else new})
        lease = m.lease(2, "value")
        for pages in (tensor(lease), pools.pages(2, "value")):
            assert pages.dtype == torch_type(dtype)
            assert pages.data_ptr() == lease.address
            assert pages.stride() == tuple(
                n if n == 1 else n // 2 if DTYPE_BITS[dtype] == 4 else n for n in lease.strides
            )
            found = torch.stack([bits(pages[slot]) for slot in row(kv)]).view(torch.uint8)
            if layout == "HND":
                found = found.transpose(1, 2)
            assert torch.equal(found.flatten(0, 1)[:7], bits(new[2]))
        assert torch.equal(bits(step.gather(2, ["value"])[0]), bits(new[2]))
        del pages, found
        lease.close()
    kv.close()
    m.shutdown()


def test_pools_of_several_kinds_are_bytes_with_typed_views():
    kinds = {"key": ("float16", (2, 8)), "value": ("float8_e5m2", (2, 16)), "scales": (None, None)}
    m = mixed_manager(kinds)
    with TorchPools(m) as pools:
        assert {its.dtype for its in pools.tensors.values()} == {torch.uint8}
        for role, (dtype, shape) in kinds.items():
            pages, lease = pools.pages(0, role), m.lease(0, role)
            assert pages.dtype == (torch.uint8 if dtype is None else torch_type(dtype))
            assert pages.data_ptr() == lease.address
            assert tuple(pages.shape) == lease.shape
            assert pages.stride() == lease.strides
            assert shape is None or pages.shape[2:] == shape
        del pages


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_finer_pages(layout):
    buffers = [
        k.BufferConfig(role=r, size=2 * H * D * 4, dtype="float32", shape=(H, D), layout=layout,
                       tokens_per_block_override=2) for r in ("key", "value")
    ]  # fmt: skip
    config = k.KVCacheManagerConfig(
        tokens_per_block=8,
        cache_tiers=[k.GpuCacheTierConfig(quota=8 * 4096)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    )
    m = k.KVCacheManager(config, device="host")
    with TorchPools(m) as pools:
        pages, lease = pools.pages(0, "value"), m.lease(0, "value")
        assert (tuple(pages.shape), pages.stride()) == (lease.shape, lease.strides)
        assert pages.data_ptr() == lease.address
        del pages


def test_closing_pools_that_somebody_holds():
    m = typed_manager()
    pools = TorchPools(m)
    held = pools.pages(0, "key")
    with pytest.raises(k.LeaseInUse, match="pool 0 of layer group 0"):
        pools.close()
    with pytest.raises(k.LeaseInUse, match="shutdown"):
        m.shutdown()
    held.fill_(1)
    del held
    pools.close()
    m.shutdown()


def test_closing_pools_again_after_the_driver_failed(monkeypatch):
    m = typed_manager()
    pools, real, left = TorchPools(m), LeaseBook.end, [True, True]

    def end(book, entry, stream):
        left.pop()
        if not left:
            raise DriverError("cuEventRecord", 1, "planted")
        real(book, entry, stream)

    with monkeypatch.context() as patch:
        patch.setattr(LeaseBook, "end", end)
        with pytest.raises(DriverError, match="planted") as told:
            pools.close()
    assert told.tb is not None
    pools.close()
    m.shutdown()


def test_what_is_no_lease_or_manager_is_named():
    with pytest.raises(TypeError, match="lease: expected a Lease"):
        tensor(None)
    with pytest.raises(TypeError, match="manager: expected a KVCacheManager"):
        TorchPools(None)
