"""The decode loops of `examples/`: every framework writes what the demo does on dense arrays."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("safetensors")

import kvcore as k
from examples import decode_numpy
from examples.decode_setup import MAX_TOKENS, PROMPTS, cache_config
from kvcore.demo.model import Decoder
from kvcore.demo.stores import TOKENS_PER_BLOCK, DenseStore
from kvcore.demo.weights import load_weights

JAX_COMPILATIONS = 3  # prompts; steps with up to 8 blocks before them; steps with up to 16

ALONE = (PROMPTS[1],)
AT_BOUNDARIES = (
    b"Now therefore th",
    b"Now therefore thus saith the LOR",
    b"And God said unto Moses, Speak unto the childre",
)


@cache
def alone(prompt, max_tokens):
    """The text of a prompt run by itself on dense arrays, and by how much the best logit led."""
    decoder = Decoder(load_weights(), np)
    dense = DenseStore(decoder.shape, len(prompt) + max_tokens, np)
    tokens, text, lead = np.array([list(prompt)]), [], np.inf
    for _ in range(max_tokens):
        second, first = np.partition(logits := decoder.step(tokens, dense)[0], -2)[-2:]
        lead = min(lead, first - second)
        text.append(int(logits.argmax()))
        tokens = np.array([text[-1:]])
    return bytes(text), lead


def expected(prompts, max_tokens=MAX_TOKENS):
    return [alone(prompt, max_tokens)[0] for prompt in prompts]


def test_the_prompts_are_ragged_cross_blocks_and_leave_no_doubt():
    """What makes equal tokens a fair demand of frameworks that add up in other orders."""
    assert [len(prompt) for prompt in PROMPTS] == [6, 35, 82]
    crossed = [
        (len(p) + MAX_TOKENS) // TOKENS_PER_BLOCK - len(p) // TOKENS_PER_BLOCK for p in PROMPTS
    ]
    assert crossed == [4, 4, 4]
    assert min(alone(prompt, MAX_TOKENS)[1] for prompt in PROMPTS) > 0.12
    assert min(alone(prompt, 20)[1] for prompt in AT_BOUNDARIES) > 0.12
    assert [len(prompt) for prompt in AT_BOUNDARIES] == [16, 32, 47]


BATCHES = [
    pytest.param(PROMPTS, MAX_TOKENS, id="ragged"),
    pytest.param(ALONE, 20, id="alone"),
    pytest.param(AT_BOUNDARIES, 20, id="at boundaries"),
    pytest.param(PROMPTS, 1, id="prompts only"),
]


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_numpy(prompts, max_tokens):
    assert decode_numpy.decode(prompts, max_tokens) == expected(prompts, max_tokens)


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_torch(prompts, max_tokens):
    pytest.importorskip("torch", reason="needs torch (the interop extra)")
    from examples import decode_torch

    assert decode_torch.decode(prompts, max_tokens, "cpu") == expected(prompts, max_tokens)


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax", reason="needs jax (the interop extra)")


@pytest.mark.parametrize(("prompts", "max_tokens"), BATCHES)
def test_jax(jax, prompts, max_tokens):
    from examples import decode_jax

    texts, compiled = decode_jax.decode(prompts, max_tokens, jax.devices("cpu")[0])
    assert texts == expected(prompts, max_tokens)
    assert compiled <= JAX_COMPILATIONS


def test_jax_compiles_nothing_but_the_step_and_that_a_stated_number_of_times(jax):
    """64 tokens; no operation outside of `jit` compiles something of its own."""
    from examples import decode_jax

    compilations = []

    def count(event, _seconds, **_):
        compilations.extend([event] * event.endswith("backend_compile_duration"))

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        _, compiled = decode_jax.decode(PROMPTS, MAX_TOKENS, jax.devices("cpu")[0])
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == JAX_COMPILATIONS
    assert len(compilations) == JAX_COMPILATIONS


def test_jax_reads_the_pool_where_it_lies(jax):
    from examples.jax_pages import Exchange, Pages

    lengths = np.array([20, 5], np.int32)
    config = cache_config(load_weights().shape, lengths.tolist())
    with k.KVCacheManager(config, device="host") as manager:
        pages = Pages(manager, lengths, Exchange(jax.devices("cpu")[0]))
        pool, table, starts = pages.begin(lengths)
        assert pool.unsafe_buffer_pointer() == manager.pool_group_descs[0].pool_addresses[0]
        assert table.tolist() == [[0, 1, *[-1] * 6], [2, *[-1] * 7]]
        assert starts.tolist() == [0, 0]
        numbers = np.arange(6 * 32 * 2 * 32, dtype=np.float32).reshape(6, 32, 2, 32)  # 7 of padding
        keys, values = jax.device_put((numbers, -numbers), pages.exchange.device)
        pages.append(keys, values)
        # The token at position 17 of the first sequence, in layer 4: its second page, slot 1.
        number = int(table[0, 1]) * pages.scale + pages.offsets[4]
        for page, tokens in zip(number, (keys, values), strict=True):
            np.testing.assert_array_equal(pages.exchange.to_jax(pages.pool)[page, 1], tokens[4, 17])
        manager.close_kv_caches(pages.caches)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_the_programs_print_what_they_wrote(name, capsys):
    needed = {"torch": "torch", "jax": "jax"}.get(name, "numpy")
    pytest.importorskip(needed, reason=f"needs {needed} (the interop extra)")
    program = pytest.importorskip(f"examples.decode_{name}")
    program.main()
    out = capsys.readouterr().out
    for prompt, text in zip(PROMPTS, expected(PROMPTS), strict=True):
        assert f"{prompt.decode()}|{text.decode()}\n" in out
