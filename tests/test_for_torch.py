"""kvcore's operations as operators of torch, also inside `torch.compile`."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvcore as k
from kvcore.layer_config import DTYPE_BITS
from tests.helpers import opened, row, typed_manager

torch = pytest.importorskip("torch")
from kvcore_adapters import for_torch  # noqa: E402 - needs torch
from kvcore_adapters.for_torch import TorchBatch, TorchPools  # noqa: E402

H, D, T = 2, 8, 4
BACKENDS = ["eager", "inductor"]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # Inductor's own


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


def test_pools_that_were_closed_and_groups_that_are_not_there():
    engine = Engine()
    step, pools = engine.step, engine.pools
    step.prepare(engine.kvs, 1, start=0)
    for group in (-1, 1):
        with pytest.raises(ValueError, match="layer_group: expected a number below 1"):
            step.page_table(group)
    values = torch.zeros(step.num_tokens, H, D)
    engine.close()
    for call in (
        lambda: step.append(0, {"key": values, "value": values}),
        lambda: step.gather(0),
        lambda: step.page_table(),
        lambda: step.prepare([]),
        lambda: pools.pages(0, "key"),
        lambda: pools.copy_pages(0, values, values),
    ):
        with pytest.raises(k.StateError, match="these pools were closed"):
            call()


def test_a_stream_of_handle_0_is_not_no_stream():
    engine = Engine()
    with pytest.raises(ValueError, match=r"^stream: expected"):
        engine.step.prepare(engine.kvs, 1, stream=0)
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
    with pytest.raises(TypeError, match=r"buffers\['key'\]: expected a tensor, got ndarray"):
        engine.step.append(0, {"key": np.zeros((2, H, D), np.float32)})
    with pytest.raises(ValueError, match="roles: expected at least one"):
        engine.step.gather(0, [])
    with pytest.raises(ValueError, match="layers: expected at least one"):
        engine.step.gather([])
    with pytest.raises(TypeError, match="layers: expected "):
        engine.step.gather(0.5)
    assert [its.shape for its in engine.step.gather(np.int64(0))] == 2 * [(2, H, D)]
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


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_slots_are_copied_between_writes(backend, kind):
    """With all layers and roles, in place, by slots that are read on the device."""
    engine = Engine()
    pools, step = engine.pools, engine.step

    def work(keys, values, sources, targets):
        step.append([0, 1], {"key": keys, "value": values})
        pools.copy_pages(0, sources, targets)
        seen = 2 * pools.pages(1, "key")[targets]
        step.append(1, {"key": 3 * keys[1], "value": values[1]})
        return seen, *step.gather(1)

    compiled = work
    if backend:
        torch._dynamo.reset()
        compiled = torch.compile(work, backend=backend, fullgraph=True)
    first, second = engine.kvs
    (a, b), (c,) = row(first), row(second)
    for places in (([a, c], [40, 41]), ([b, a], [41, 43]), ([c], [40])):
        engine.wipe()
        step.prepare(engine.kvs, [6, 3], start=[0, 0])
        keys, values = torch.randn(2, 9, H, D), torch.randn(2, 9, H, D)
        seen, *gathered = compiled(keys, values, *(torch.tensor(p, dtype=kind) for p in places))
        whole = torch.zeros(2, 64, T, H, D), torch.zeros(2, 64, T, H, D)
        for its, new in zip(whole, (keys, values), strict=True):
            its[:, a], its[:, b, :2], its[:, c, :3] = new[:, :4], new[:, 4:6], new[:, 6:]
            its[:, places[1]] = its[:, places[0]]
        assert torch.equal(seen, 2 * whole[0][1, places[1]])
        assert torch.equal(gathered[0], 3 * keys[1])
        assert torch.equal(gathered[1], values[1])
        for layer in range(2):
            for its, role in zip(whole, ("key", "value"), strict=True):
                targets = pools.pages(layer, role)[places[1]]
                assert torch.equal(targets, its[layer, places[1]])
    del seen, gathered, targets, compiled
    torch._dynamo.reset()
    gc.collect()
    engine.close()


def test_a_layer_group_that_is_none_is_named():
    engine = Engine()
    slots = torch.tensor([1])
    with pytest.raises(ValueError, match=r"layer_group: expected one of \[0\], got 1"):
        engine.pools.copy_pages(1, slots, slots)
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
