"""Torch and JAX on one pool in one process: one writes, the other reads, ordered by events."""

from __future__ import annotations

import os

import numpy as np
import pytest

import kvcore as k
from tests.helpers import typed_manager

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to the others
torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
jax = pytest.importorskip("jax", reason="needs jax (the interop extra)")

from kvcore_adapters.for_jax import JaxPools  # noqa: E402
from kvcore_adapters.for_torch import tensor  # noqa: E402

pytestmark = pytest.mark.no_sanitizer
RUNS, T, H, D = 1_000, 4, 2, 8


@pytest.fixture
def pool(device):
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("needs a GPU that torch and jax see")
    m = typed_manager(slots=8_192, device=device, stream=device.create_stream())
    kv = m.create_kv_cache()
    assert kv.resume()
    assert kv.resize(8)
    yield m, kv
    device.synchronize()
    kv.close()
    m.shutdown()


def slow(device, stream, run):
    device.launch("latch", "delay")(stream, 1, 1, 1, (run * 7919) % 300_000)


def test_jax_reads_what_torch_has_written(device, pool):
    """On a slow stream of torch's. Nobody synchronises between the two."""
    m, kv = pool
    slots = kv.get_base_page_indices(0).tolist()
    numbers = m.get_page_index_converter(1, "value")
    index = jax.numpy.asarray(numbers(np.array(slots, np.int32), k.PageIndexMode.PER_LAYER))
    side = torch.cuda.Stream()
    on = device.stream(side)

    @jax.jit
    def total(pages, index):
        return pages[0][index].sum(axis=(1, 2, 3))

    found = []
    with JaxPools(m) as pools, m.lease(1, "value", stream=side) as lease:
        with torch.cuda.stream(side):
            pages = tensor(lease)
        for run in range(RUNS):
            lease.acquire(side)
            with torch.cuda.stream(side):
                slow(device, on, run)
                pages[slots[0]] = run
                pages[slots[1]] = run + 1
            lease.release(side)
            found.append(pools.read(total, index))
        device.synchronize()
        del pages
    for run, array in enumerate(found):
        assert np.asarray(array).tolist() == [run * T * H * D, (run + 1) * T * H * D], run


def test_torch_reads_what_jax_has_computed_and_kvcore_appended(device, pool):
    m, kv = pool
    slots = kv.get_base_page_indices(0).tolist()
    batch = m.create_batch(1, 8)
    side = torch.cuda.Stream()
    on = device.stream(side)
    found = torch.zeros(RUNS, 2, device="cuda")

    @jax.jit
    def values(run):
        x = jax.numpy.ones((512, 512)) * run  # some work first
        return jax.numpy.full((2, 8, H, D), (x @ x).max() / 512 / jax.numpy.maximum(run, 1))

    kept = []
    for run in range(RUNS):
        array = values(jax.numpy.float32(run + 1))
        kept.append(array)
        batch.prepare([kv], 8, start=0)
        batch.append([0, 1], {"key": array, "value": array})
        with m.lease(0, "key") as lease, torch.cuda.stream(side):
            pages = tensor(lease)
            slow(device, on, run)
            found[run, 0], found[run, 1] = pages[slots[0]].min(), pages[slots[1]].max()
            del pages
    device.synchronize()
    expected = np.repeat(np.arange(1, RUNS + 1, dtype=np.float32)[:, None], 2, axis=1)
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-3)
