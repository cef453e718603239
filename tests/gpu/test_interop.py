"""Leased pages in torch and JAX on a GPU: in order, by events alone, also late and in graphs.

Each framework that is missing, or sees no GPU, is skipped by itself.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import cupy
import numpy as np
import pytest

import kvcore as k
from kvcore.device.cuda import CudaDevice
from kvcore.dlpack.exports import exports
from kvcore.dlpack.importer import from_capsule
from kvcore.dlpack.structs import CPU, CUDA
from tests.device.harness import Rig
from tests.gpu import tools
from tests.gpu.sharing import D, H, Scene, T, adapter, framework, raw

RUNS = 1_000
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

# -- in order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 1, 2, "own", -1])
def test_the_consumers_stream_waits_for_pages_that_are_late(scene, given):
    s = scene()
    consumer = s.device.create_stream()
    handle = consumer.handle if given == "own" else given
    reader = s.device.stream(1 if given is None else consumer.handle if given == -1 else handle)
    lease = s.m.lease(0, "key")
    page = s.m.get_pages(0, "key")[s.slot].view(np.uint8)
    s.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    before = cupy.cuda.runtime.getDevice()
    tools.delay(s.device, s.rig.stream, 50)
    s.fill(7)
    capsule = lease.__dlpack__(stream=handle, max_version=(1, 0))
    assert cupy.cuda.runtime.getDevice() == before
    if given == -1:
        assert not s.rig.stream.record().done()
    else:
        found = s.device.to_host(page, stream=reader)
        assert set(found.reshape(-1).tolist()) == {7}
    s.rig.stream.synchronize()
    del capsule, page


def test_a_copy_for_the_host_comes_after_late_work(scene):
    """And is there when the call returns: host code has no stream to wait on."""
    s = scene()
    lease = s.m.lease(0, "key")
    s.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    tools.delay(s.device, s.rig.stream, 50)
    s.fill(7)
    capsule = lease.__dlpack__(dl_device=(CPU, 0), copy=True, max_version=(1, 0))
    found = from_capsule(capsule).numpy()
    assert set(found[s.slot].view(np.uint8).reshape(-1).tolist()) == {7}
    for copy in (None, False):
        with pytest.raises(BufferError, match="copy=True"):
            lease.__dlpack__(dl_device=(CPU, 0), copy=copy, max_version=(1, 0))
    del found, capsule
    lease.close()


def test_the_second_gpus_pages_while_the_first_is_current(monkeypatch):
    if tools.device_count() < 2:
        pytest.skip("needs a second GPU")
    device = CudaDevice(1)
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    rig = Rig(device, device.create_stream())
    s = Scene(rig)
    consumer = device.create_stream()
    page = s.m.get_pages(0, "key")[s.slot].view(np.uint8)
    with s.m.lease(0, "key") as lease:
        assert lease.__dlpack_device__() == (CUDA, 1)
        for value in range(5):
            tools.delay(device, rig.stream, 10)
            s.fill(value)
            capsule = lease.__dlpack__(stream=consumer.handle, max_version=(1, 0))
            found = device.to_host(page, stream=consumer)
            assert set(found.reshape(-1).tolist()) == {value}
            del capsule
    assert cupy.cuda.runtime.getDevice() == 0
    del page
    s.close()
    rig.close()
    device.close()


def test_a_copy_for_another_gpu_comes_after_late_work_and_before_what_follows(scene):
    if tools.device_count() < 2:
        pytest.skip("needs a second GPU")
    s = scene()
    there = CudaDevice(1)
    consumer, asked = there.create_stream(), {"dl_device": (CUDA, 1), "copy": True}
    with s.m.lease(0, "key") as lease:
        for value in range(1, 6):
            tools.delay(s.device, s.rig.stream, 10)
            s.fill(value)
            capsule = lease.__dlpack__(stream=consumer.handle, max_version=(1, 0), **asked)
            s.fill(0)
            copy = from_capsule(capsule)
            found = there.to_host(there.view(copy), stream=consumer)[s.slot]
            assert set(found.reshape(-1).view(np.uint8).tolist()) == {value}
            del capsule, copy
    there.close()


@pytest.mark.parametrize("kind", ["non-blocking", "legacy", "per-thread"])
@pytest.mark.parametrize("late", ["producer", "consumer"])
def test_no_stale_reads_in_many_runs(scene, kind, late):
    """kvcore writes, a consumer copies, kvcore writes again at once; each side is late by turns."""  # noqa: D403
    s = scene()
    stream = {"non-blocking": s.device.create_stream(), "legacy": s.device.stream(1),
              "per-thread": s.device.stream(2)}[kind]  # fmt: skip
    lease = s.m.lease(0, "key")
    page = s.m.get_pages(0, "key")[s.slot].view(np.uint8)
    seen = s.device.empty((RUNS, *page.shape), np.uint8)
    for run in range(RUNS):
        if late == "producer":
            tools.delay(s.device, s.rig.stream, 0.02)
        s.fill(run % 251)
        lease.acquire(stream)
        if late == "consumer":
            tools.delay(s.device, stream, 0.02)
        s.device.copy(page, seen[run], stream=stream)
        lease.release(stream)
    found = s.device.to_host(seen, stream=s.rig.stream)
    wanted = np.broadcast_to(np.arange(RUNS).reshape(-1, 1, 1, 1) % 251, found.shape)
    np.testing.assert_array_equal(found, wanted)
    del page, seen


def test_a_late_consumer_is_waited_for_when_its_array_is_dropped(scene):
    torch = framework("torch")
    s = scene()
    side = torch.cuda.Stream()
    for _ in range(50):
        s.fill(1)
        with torch.cuda.stream(side):
            pages = adapter("torch")(s.m.lease(0, "key"))
            torch.cuda._sleep(200_000)
            pages[s.slot].view(torch.uint8).fill_(9)
            del pages
        got = s.device.empty((4, H, D), np.float32, stream=s.rig.stream)
        step = s.m.create_batch(1, 4)
        step.prepare([s.kv], 4, start=[0])
        step.gather(0, ["key"], out=[got])
        assert set(s.rig.get(got).view(np.uint8).reshape(-1).tolist()) == {9}


def test_a_page_is_not_overwritten_while_a_consumer_reads_it(scene):
    torch = framework("torch")
    s = scene()
    side = torch.cuda.Stream()
    lease = s.m.lease(0, "key")
    for run in range(50):
        s.fill(run)
        with torch.cuda.stream(side):
            pages = adapter("torch")(lease)
            torch.cuda._sleep(200_000)
            seen = pages[s.slot].clone()
            lease.release(side)
            del pages
        s.fill(255)
        side.synchronize()
        assert set(raw(seen).tolist()) == {run}


def test_nothing_waits_on_the_host(scene):
    """Leases come and go while kvcore's stream stands still."""
    s = scene()
    takers = [adapter("cupy")]
    try:
        framework("torch")
        takers.append(adapter("torch"))
    except pytest.skip.Exception:
        pass
    for take in takers:
        take(s.m.lease(0, "key"))  # whatever a first call loads
    consumer = s.device.create_stream()
    with tools.held(s.device, s.rig.stream):
        for take in takers:
            with s.m.lease(0, "key", stream=consumer) as lease:
                its = take(lease)
                lease.acquire(consumer)
                lease.release(consumer)
                del its
        s.m.get_storage_statistics()
        assert not s.rig.stream.record().done()


def test_foreign_operands_are_waited_for(scene):
    """torch writes late on its stream; append and gather take its tensors at once."""  # noqa: D403
    torch = framework("torch")
    s = scene()
    side = torch.cuda.Stream()
    step = s.m.create_batch(1, 4)
    step.prepare([s.kv], 4, start=[0])
    for value in range(50):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            keys = torch.full((4, H, D), float(value), device="cuda")
            step.append(0, {"key": keys, "value": keys})
        found = s.rig.get(step.gather(0)[0])
        assert set(np.unique(found).tolist()) == {value}


# -- torch: operators ------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_operators_in_a_captured_graph(rig, few_pages, compiled):
    """Static inputs are filled anew before every replay; the graph's own results are compared."""
    torch = framework("torch")
    from kvcore_adapters.for_torch import TorchBatch, TorchPools

    s = Scene(rig, dtype="bfloat16")
    side = torch.cuda.Stream()
    with TorchPools(s.m) as pools, torch.cuda.stream(side):
        step = TorchBatch(pools, 2, 8)
        static = [torch.zeros(2, 4, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        sources = torch.tensor([s.slot], device="cuda")
        targets = torch.zeros_like(sources)
        slots = s.m.pool_group_descs[0].num_slots

        def work():
            step.append([0, 1], {"key": static[0], "value": static[1]})
            pools.copy_pages(0, sources, targets)
            got = step.gather(1)
            return got[0] + 0, got[1] + 0, step.page_table(num_blocks=1)

        step.prepare([s.kv], 4, start=[0])
        targets.fill_((s.slot + 1) % slots)
        graph, results = captured(torch, torch.compile(work, fullgraph=True) if compiled else work)
        for value in range(5):
            for its in static:
                its.normal_()
            target = (s.slot + 1 + value) % slots
            targets.fill_(target)
            step.prepare([s.kv], 4, start=[0])
            graph.replay()
            side.synchronize()
            assert all(torch.equal(results[i], static[i][1]) for i in range(2))
            assert results[2].tolist() == [[s.slot]], value
            for page in pools.pages(0, "key")[[s.slot, target]]:
                assert torch.equal(page, static[0][0])
            del page
        del graph, results
        torch._dynamo.reset()
        gc.collect()
    s.close()


def test_a_lease_of_the_captured_stream_stays_open_until_the_capture_is_over(rig, few_pages):
    """Nobody else works on pages. The capture is none the worse for the refusal."""
    on, refused = tools.capturable(rig.device), []
    s = Scene(Rig(rig.device, rig.device.stream(on)))
    lease = s.m.lease(0, "key", stream=on)
    page = s.m.get_pages(0, "key")[s.slot].view(np.uint8)
    s.fill(0)

    def work(stream):
        s.fill(7, stream)
        for call in (lease.close, lease.release):
            with pytest.raises(k.StateError, match="a graph is being captured"):
                call()
            refused.append(call)

    graph = tools.Graph(rig.device, work, on)
    assert len(refused) == 2
    assert lease.is_open
    graph.replay()
    found = rig.device.to_host(page, stream=rig.device.stream(on))
    assert set(found.reshape(-1).tolist()) == {7}
    lease.close()
    del page
    s.close()


def captured(torch, work):
    """A graph of `work`, captured on torch's stream after three runs, and its results."""
    stream = torch.cuda.current_stream()
    for _ in range(3):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = work()
    return graph, results


# -- JAX -------------------------------------------------------------------------------------------


def test_jax_returns_what_dlpack_lacks(rig, few_pages):
    jax = framework("jax")
    from kvcore_adapters.for_jax import JaxPools

    s = Scene(rig)
    with JaxPools(s.m) as pools:
        work = jax.jit(lambda pages: (pages[0] + 0, jax.random.key(3)))
        _, key = pools.read(work)
        expected = jax.random.key_data(jax.random.key(3))
        assert jax.random.key_data(key).tolist() == expected.tolist()
        del work
    s.close()


def test_jax_reads_what_torch_and_kvcore_wrote_in_one_process(rig, few_pages):
    """Producers on streams of their own, late by turns; a consumer that names none."""
    torch, jax = framework("torch"), framework("jax")
    from kvcore_adapters.for_jax import JaxPools
    from kvcore_adapters.for_torch import tensor

    s = Scene(rig)
    side = torch.cuda.Stream()
    total = jax.jit(lambda pages, index: pages[0][index].sum())
    convert = s.m.get_page_index_converter(0, "key")
    index = jax.numpy.asarray(convert([s.slot], k.PageIndexMode.PER_LAYER))
    lease = s.m.lease(0, "key")
    with JaxPools(s.m) as pools:
        for value in range(1, 51):
            lease.acquire(side)
            with torch.cuda.stream(side):
                pages = tensor(lease)
                torch.cuda._sleep(200_000)
                pages[s.slot].fill_(float(value))
                del pages
            lease.release(side)
            results = pools.read(total, index)
            s.fill(0)  # comes after what JAX has read
            assert float(results) == value * T * H * D
            tools.delay(s.device, s.rig.stream, 0.2)
            assert float(pools.read(total, index)) == 0
    lease.close()
    s.close()


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("name", ["torch", "jax", "cupy"])
def test_a_hundred_thousand_leases_leave_nothing(scene, name):
    """Leased, taken and dropped: structures, entries, owed streams and device memory as before."""
    framework(name)
    s, module = scene(), import_module("jax.numpy" if name == "jax" else name)
    take, book = module.from_dlpack, s.m._runtime.leases

    def state():
        gc.collect()  # JAX itself keeps something until then
        cupy.cuda.runtime.deviceSynchronize()
        s.m.get_storage_statistics()
        memory = cupy.cuda.runtime.memGetInfo()[0]
        return len(exports()), bool(book), len(book.idle), len(book.owed), memory

    for number in range(100_000):
        if number == 50_000:
            before, blocks = state(), sys.getallocatedblocks()
        take(s.m.lease(layer_group=0))
    assert state() == before == (0, False, 0, 0, before[-1])
    assert sys.getallocatedblocks() - blocks < 1_000


def test_jax_gives_no_pool_away(rig, few_pages):
    jax = framework("jax")
    from kvcore_adapters.for_jax import JaxPools

    s = Scene(rig)
    s.fill(5)
    rig.stream.synchronize()
    before = rig.get(s.m.get_pages(0, "key"))
    give = jax.jit(lambda pages: tuple(7 * p for p in pages), donate_argnums=0)
    with JaxPools(s.m) as pools:
        try:
            (found,) = pools.read(give)
        except (k.StateError, RuntimeError, ValueError):
            found = None
        cupy.cuda.runtime.deviceSynchronize()
        after = rig.get(s.m.get_pages(0, "key"))
        np.testing.assert_array_equal(after.view(np.uint8), before.view(np.uint8))
        del found
    s.close()
