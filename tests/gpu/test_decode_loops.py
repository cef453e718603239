"""The decode loops of `examples/` on a GPU write what the demo does on dense arrays."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("safetensors")

# Before JAX starts: it would take three quarters of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from examples import decode_cupy
from examples.decode_setup import MAX_TOKENS, PROMPTS
from tests.gpu.tools import delay
from tests.test_decode_loops import AT_BOUNDARIES, JAX_COMPILATIONS, expected

pytestmark = pytest.mark.no_sanitizer  # of the frameworks' kernels

BATCHES = [(PROMPTS, MAX_TOKENS), (AT_BOUNDARIES, 20)]


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_cupy(prompts, max_tokens):
    assert decode_cupy.decode(prompts, max_tokens) == expected(prompts, max_tokens)


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_torch(torch, prompts, max_tokens):
    from examples import decode_torch

    assert decode_torch.decode(prompts, max_tokens, "cuda") == expected(prompts, max_tokens)


def test_torch_on_a_stream_of_its_own(torch):
    from examples import decode_torch

    with torch.cuda.stream(torch.cuda.Stream()):
        assert decode_torch.decode(PROMPTS, MAX_TOKENS, "cuda") == expected(PROMPTS)


@pytest.fixture
def gpu_of_jax():
    jax = pytest.importorskip("jax", reason="needs jax (the interop extra)")
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX finds no GPU")


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_jax(gpu_of_jax, prompts, max_tokens):
    from examples import decode_jax

    texts, compiled = decode_jax.decode(prompts, max_tokens, gpu_of_jax)
    assert texts == expected(prompts, max_tokens)
    assert compiled <= JAX_COMPILATIONS


@pytest.mark.parametrize("late", ["begin", "append"])
def test_jax_waits_for_pages_and_tables_that_come_late(gpu_of_jax, monkeypatch, late):
    """The stream that writes them stands still for a while in every step."""
    from examples import decode_jax
    from examples.jax_pages import Pages

    plain = getattr(Pages, late)

    def after_a_while(self, *args):
        device = self.manager.device
        delay(device, device.stream(self.exchange.stream), 3)
        return plain(self, *args)

    monkeypatch.setattr(Pages, late, after_a_while)
    assert decode_jax.decode(PROMPTS, MAX_TOKENS, gpu_of_jax)[0] == expected(PROMPTS)


def test_jax_reads_the_pool_where_it_lies(gpu_of_jax):
    import numpy as np

    import kvcore as k
    from examples.decode_setup import cache_config
    from examples.jax_pages import Exchange, Pages
    from kvcore.demo.weights import load_weights

    lengths = np.array([20, 5], np.int32)
    config = cache_config(load_weights().shape, lengths.tolist())
    with k.KVCacheManager(config, device="cuda") as manager:
        pages = Pages(manager, lengths, Exchange(gpu_of_jax))
        pool, table, _ = pages.begin(lengths)
        assert pool.unsafe_buffer_pointer() == manager.pool_group_descs[0].pool_addresses[0]
        assert table.tolist() == [[0, 1, *[-1] * 6], [2, *[-1] * 7]]
        del pool, table
        manager.close_kv_caches(pages.caches)
