"""Pages as torch tensors, and kvcore's operations as operators, also inside `torch.compile`."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvcore as k
from kvcore.layer_config import DTYPE_BITS
from tests.helpers import opened, row, typed_manager

torch = pytest.importorskip("torch")
from kvcore_adapters import for_torch  # noqa: E402 - needs torch
from kvcore_adapters.for_torch import TorchBatch, TorchPools, tensor, torch_type  # noqa: E402

H, D, T = 2, 8, 4
BACKENDS = ["eager", "inductor"]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # Inductor's own


def some(dtype: str, *shape: int):
    """Random tensors of any type, by their bits."""
    size = DTYPE_BITS[dtype]
    dim = shape[-1] // 2 if size == 4 else shape[-1]
    raw = np.random.default_rng(5).integers(0, 2 if dtype == "bool" else 256,
                                            (*shape[:-1], dim * max(size // 8, 1)))  # fmt: skip
    return torch.from_numpy(raw.astype(np.uint8)).view(torch_type(dtype))


def bits(its):
    return its.contiguous().view(torch.uint8)


# -- tensors ---------------------------------------------------------------------------------------


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
    buffers = [k.BufferConfig(role=r, size=128, dtype=d, shape=s) for r, (d, s) in kinds.items()]
    config = k.KVCacheManagerConfig(
        tokens_per_block=4,
        cache_tiers=[k.GpuCacheTierConfig(quota=4096)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    )
    m = k.KVCacheManager(config, device="host")
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


# -- operators -------------------------------------------------------------------------------------


class Engine:
    """A manager with two caches, and a step over them."""

    def __init__(self, dtype: str = "float32", **settings) -> None:
        self.m = typed_manager(slots=64, layers=2, dtype=dtype, **settings)
        self.kvs = opened(self.m, 6, 3)
        self.pools = TorchPools(self.m)
        self.step = TorchBatch(self.pools, 8, 32)

    def wipe(self) -> None:
        for its in self.pools.tensors.values():
            its.zero_()

    def close(self) -> None:
        for kv in self.kvs:
            kv.close()
        self.pools.close()
        self.m.shutdown()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_compiled_step_writes_and_reads_in_order(backend):
    """What it reads through a view of the pool, and through gather, is what it wrote before."""
    engine = Engine()
    pools, step = engine.pools, engine.step
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)

    def work(keys, values):
        before = 2 * pools.pages(1, "key")[0, 0]
        step.append([0, 1], {"key": keys, "value": values})
        pages = 2 * pools.pages(1, "key")[0, 0]
        step.append(1, {"key": 3 * keys[1], "value": values[1]})
        gathered = step.gather(1)
        return before, pages, gathered[0] + 1, gathered[1], step.page_table(num_blocks=2)

    compiled = work
    if backend:
        torch._dynamo.reset()
        compiled = torch.compile(work, backend=backend, fullgraph=True)
    for count in ([6, 3], [4, 2], [1, 1]):
        step.prepare(engine.kvs, count, start=[0, 0])
        tokens = sum(count)
        keys, values = torch.randn(2, tokens, H, D), torch.randn(2, tokens, H, D)
        expected = 2 * pools.pages(1, "key")[0, 0]
        before, pages, got_keys, got_values, rows = compiled(keys, values)
        assert torch.equal(before, expected)
        assert torch.equal(pages, 2 * keys[1, 0])
        assert torch.equal(got_keys, 3 * keys[1] + 1)
        assert torch.equal(got_values, values[1])
        assert torch.equal(rows, table)
        assert torch.equal(pools.pages(1, "key")[0, 0], 3 * keys[1, 0])
    del keys, values, before, pages, got_keys, got_values, expected
    torch._dynamo.reset()
    gc.collect()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_beam_step_moves_rows_and_tails(backend):
    engine = Engine(max_beam_width=4, enable_partial_commit=False)
    kv, other = engine.kvs
    other.close()
    engine.kvs = [kv]
    kv.resize(None, 6)
    assert kv.set_beam_width(4)
    step = engine.step

    def work(keys, parents):
        step.append([0, 1], {"key": keys, "value": -keys})
        step.step_beams(parents)

    torch._dynamo.reset()
    compiled = torch.compile(work, backend=backend, fullgraph=True)
    history = [[] for _ in range(4)]
    rng = np.random.default_rng(3)
    for _ in range(6):
        assert engine.m.advance([kv], 1)
        step.prepare([kv], 1)
        keys = torch.randn(2, 4, H, D)
        parents = rng.integers(0, 4, 4)
        compiled(keys, torch.from_numpy(parents.astype(np.int32)))
        kv.resize(None, kv.capacity)
        history = [[*history[p], keys[:, p]] for p in parents]
        kv.settle()
    step.prepare([kv], 6, start=[6])
    found = step.gather([0, 1])[0].unflatten(1, (4, 6))
    expected = torch.stack([torch.stack(h, 1) for h in history], 1)
    assert torch.equal(found, expected)
    torch._dynamo.reset()
    del found, compiled
    gc.collect()
    engine.close()


@pytest.mark.parametrize("call", ["append", "step_beams"])
def test_a_backend_that_copies_pools_is_told(call):
    """Its copy, which holds nothing new, would go back over what was written."""
    engine = Engine(max_beam_width=2, enable_partial_commit=False)
    step = engine.step
    step.prepare(engine.kvs, [6, 3])
    torch._dynamo.reset()

    def work(keys):
        if call == "append":
            step.append([0, 1], {"key": keys, "value": keys})
        else:
            step.step_beams(torch.zeros(2, dtype=torch.int32))

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    with pytest.raises(k.StateError, match="a backend that works in place"):
        compiled(torch.zeros(2, 9, H, D))
    del compiled
    torch._dynamo.reset()
    gc.collect()
    engine.close()


def test_dense_caches_follow_their_parents_when_compiled():
    torch._dynamo.reset()
    parents = torch.tensor([1, 1, 1, 0], dtype=torch.int32)

    def work(keys, values, parents):
        for_torch.permute_dense([keys, values], parents, 2)
        return keys + 1

    arrays = [torch.randn(4, 2, 3, 5).to(torch.bfloat16) for _ in range(2)]
    expected = [its[[1, 1, 3, 2]] for its in arrays]
    got = torch.compile(work, backend="aot_eager", fullgraph=True)(*arrays, parents)
    for its, wanted in zip(arrays, expected, strict=True):
        assert torch.equal(its, wanted)
    assert torch.equal(got, expected[0] + 1)


def test_fake_tensors_have_the_shapes_and_types_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype, shape in (("bfloat16", (H, D)), ("float4_e2m1fn", (H, D)), ("float8_e5m2", (D,))):
        heads = shape[0] if len(shape) == 2 else 1
        size = T * heads * D * DTYPE_BITS[dtype] // 8
        config = k.KVCacheManagerConfig(
            tokens_per_block=T,
            cache_tiers=[k.GpuCacheTierConfig(quota=64 * 4096)],
            layers=[k.AttentionLayerConfig(layer_id=i, buffers=[
                k.BufferConfig(role=r, size=size, dtype=dtype, shape=shape)
                for r in ("key", "value")]) for i in range(2)],
        )  # fmt: skip
        m = k.KVCacheManager(config, device="host")
        (kv,) = opened(m, 5)
        pools = TorchPools(m)
        step = TorchBatch(pools, 2, 8)
        step.prepare([kv], 5)
        for layers in (0, [0, 1], (1,)):
            real = [*step.gather(layers), step.page_table()]
            number, tensors = step._number, list(pools.tensors.values())
            many, stacked = for_torch._many(layers), not isinstance(layers, int)
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(its) for its in tensors]
                fake = for_torch.gather(fakes, number, many, "key\nvalue", stacked, 5)
                table = mode.from_tensor(pools.tables[0])
                fake.append(for_torch.page_table(table, number, 0, 1, 2))
            for mine, theirs in zip(fake, real, strict=True):
                assert (mine.shape, mine.dtype, mine.stride()) == (
                    theirs.shape, theirs.dtype, theirs.stride())  # fmt: skip
        del tensors, fakes


def test_operators_say_what_they_write():
    writes = {
        "append": [False, True, False, False, False, False],
        "gather": [False] * 6,
        "page_table": [False] * 5,
        "step_beams": [False, True, True, False],
        "permute_dense": [True, False, False],
    }
    for name, expected in writes.items():
        arguments = getattr(torch.ops.kvcore, name).default._schema.arguments
        found = [bool(a.alias_info and a.alias_info.is_write) for a in arguments]
        assert found == expected


def test_tensors_with_gradients_and_no_tensors_are_refused():
    engine = Engine()
    engine.step.prepare(engine.kvs, 1)
    with pytest.raises(TypeError, match="require gradient"):
        engine.step.append(0, {"key": torch.zeros(2, H, D, requires_grad=True)})
    with pytest.raises(ValueError, match="buffers: expected an array for at least one role"):
        engine.step.append(0, {})
    engine.close()


def test_one_graph_serves_steps_of_any_size():
    """`dynamic=True`: the second size makes the graph that all the others use."""
    engine = Engine()
    step = engine.step

    def work(keys):
        step.append([0, 1], {"key": keys, "value": keys.transpose(1, 2).transpose(1, 2)})
        return step.gather(0)[0]

    torch._dynamo.reset()
    compiled = torch.compile(work, dynamic=True, fullgraph=True)
    made = []
    for counts in ([4, 1], [6, 3], [5, 2], [2, 2], [3, 3]):
        step.prepare(engine.kvs, counts, start=[0, 0])
        keys = torch.randn(2, H, sum(counts), D).transpose(1, 2)
        assert torch.equal(compiled(keys), keys[0])
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made[-1] == made[1]
    del compiled
    torch._dynamo.reset()
    gc.collect()
    engine.close()


def test_one_function_is_compiled_for_several_batches():
    """The compiler makes a symbol of what differs between them."""
    engine = Engine()

    def work(step, keys):
        step.append([0, 1], {"key": keys, "value": keys})
        return step.gather(0)[0]

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True)
    for step in [TorchBatch(engine.pools, 8, 32) for _ in range(3)]:
        for counts in ([6, 3], [4, 2]):
            step.prepare(engine.kvs, counts, start=[0, 0])
            keys = torch.randn(2, sum(counts), H, D)
            assert torch.equal(compiled(step, keys), keys[0])
    del compiled, step
    torch._dynamo.reset()
    gc.collect()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_after_layer_writes_and_attends_through_pages(backend):
    """Between two writes the pool is read in place, and never copied by the compiler."""
    engine = Engine()
    pools, step = engine.pools, engine.step
    engine.kvs.pop().close()

    def work(x):
        slots = step.page_table(num_blocks=2).long()[0]
        for layer in range(2):
            step.append(layer, {"key": x, "value": 2 * x})
            keys = pools.pages(layer, "key")[slots].flatten(0, 1)[:6]
            values = pools.pages(layer, "value")[slots].flatten(0, 1)[:6]
            weights = torch.einsum("qhd,khd->hqk", x, keys).softmax(-1)
            x = torch.einsum("hqk,khd->qhd", weights, values)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(work, backend=backend, fullgraph=True)
    for _ in range(2):
        step.prepare(engine.kvs, 6, start=[0])
        x = torch.randn(6, H, D)
        expected = work(x)
        engine.wipe()
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(step.gather(0)[1], 2 * x)
    torch._dynamo.reset()
    gc.collect()
    engine.close()


def test_a_batch_that_is_gone_is_named():
    engine = Engine()
    engine.step.prepare(engine.kvs, 1)
    number = engine.step._number
    engine.step = None
    gc.collect()
    others = [TorchBatch(engine.pools, 8, 32) for _ in range(4)]
    assert [its._number for its in others] == [number + i for i in (1, 2, 3, 4)]  # never again
    with pytest.raises(ValueError, match="batch: expected the number of a TorchBatch"):
        for_torch.page_table(engine.pools.tables[0], number, 0, 1, 1)
    engine.close()
