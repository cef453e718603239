"""Pages of a GPU as arrays of CuPy and torch, and torch's operators in a captured graph."""

from __future__ import annotations

import cupy
import pytest
from kvcore_adapters import for_cupy

import kvcore as k
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.helpers import typed_manager

H, D = 2, 8


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_cupy_has_the_pages_or_asks_for_a_cast(device, dtype):
    m = typed_manager(slots=65_536, device=device, stream=device.create_stream(), dtype=dtype)
    lease, lacking = m.lease(1, "value"), array_type(dtype).name != dtype
    consumer = cupy.cuda.Stream(non_blocking=True)
    with consumer:
        if lacking:
            with pytest.raises(BufferError, match=f"CuPy has no {dtype}; ask for a cast"):
                for_cupy.array(lease)
            with pytest.raises(ValueError, match="cast: expected a type of"):
                for_cupy.array(lease, cast="complex128")
        its = for_cupy.array(lease, cast=array_type(dtype) if lacking else None)
    mine = m.get_pages(1, "value")
    assert (its.data.ptr, its.shape, its.strides, its.dtype) == (
        mine.data.ptr, mine.shape, mine.strides, mine.dtype)  # fmt: skip
    with pytest.raises(k.LeaseInUse):
        lease.close()
    del its, mine
    m.shutdown()  # hands the pages back from the consumer's stream, which is still there


@pytest.mark.no_sanitizer
def test_operators_of_torch_are_replayed(device):
    """Captured on the stream that prepares: each replay reads what was prepared last."""
    torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
    from kvcore_adapters.for_torch import TorchBatch, TorchPools

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch sees")
    side = torch.cuda.Stream()
    m = typed_manager(slots=8_192, device=device, stream=side, layers=2)
    kv = m.create_kv_cache()
    assert kv.resume()
    assert kv.resize(16)
    keys = torch.zeros(2, 8, H, D, device="cuda")
    seen = []
    with TorchPools(m) as pools:
        step = TorchBatch(pools, 1, 8)

        def work():
            step.append([0, 1], {"key": keys, "value": -keys})
            return step.gather(1)

        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            step.prepare([kv], 8, start=[0])
            work()  # outside of the graph first, as torch asks for
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = work()
        with torch.cuda.stream(side):
            for number, start in ((1, 0), (2, 8)):
                step.prepare([kv], 8, start=[start])
                keys.fill_(number)
                graph.replay()
                seen.append([its.clone() for its in found])
            step.prepare([kv], 8, start=[0])
            seen.append(step.gather(1))
        torch.cuda.synchronize()
        for number, (got_keys, got_values) in zip((1, 2, 1), seen, strict=True):
            assert (got_keys == number).all()
            assert (got_values == -number).all()
        del graph
    kv.close()
    m.shutdown()
