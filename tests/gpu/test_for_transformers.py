"""`generate` on pages in GPU memory against transformers' own caches on the same GPU."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest

from tests.helpers import row, used

torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
tf = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

from kvcore_adapters.for_transformers import cache_for  # noqa: E402

from tests import test_for_transformers as on_host  # noqa: E402

T = on_host.T
TOLERANCE = 1e-4
"""Of scores: float32 without TF32. Pages are gathered into tensors of other strides than a stock
cache's, for which cuBLAS and attention may choose kernels that add up in another order."""

pytestmark = [
    pytest.mark.no_sanitizer,  # of torch's kernels
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]


@pytest.fixture(autouse=True, scope="module")
def a_gpu_that_torch_sees():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@cache
def model(name, attention="sdpa"):
    """The model of the host's tests, with its weights."""
    made = deepcopy(on_host.model(name)).to("cuda")
    made.set_attn_implementation(attention)
    return made


def inputs(name, batch, length, padding=()):
    return {key: tensor.to("cuda") for key, tensor in
            on_host.inputs(name, batch, length, padding).items()}  # fmt: skip


def run(made, given, kv=None, **how):
    """One call of `generate`, with the model's own cache or with `kv`."""
    how = {"max_new_tokens": 7, "return_dict_in_generate": True, "output_scores": True} | how
    if kv is not None:
        how["cache"] = kv
    return made.generate(**given, **how)


def paged(made, num_beams=1, **settings):
    settings = {"device": "cuda"} | settings
    return cache_for(made.config, num_beams=num_beams, tokens_per_block=T, **settings)


def assert_same(got, expected):
    """Every token; every score to `TOLERANCE`."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.scores) == len(expected.scores)
    pairs = list(zip(got.scores, expected.scores, strict=True))
    if "sequences_scores" in expected:
        pairs.append((got.sequences_scores, expected.sequences_scores))
        assert got.beam_indices.tolist() == expected.beam_indices.tolist()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("beams", [1, 4])
def test_greedy_and_beam_search(beams, batch, attention):
    made = model("llama", attention)
    for length in (2 * T - 1, 2 * T, 2 * T + 1):
        given, how = inputs("llama", batch, length), {"num_beams": beams}
        expected = run(made, given, **how)
        with paged(made, beams) as kv:
            assert_same(run(made, given, kv, **how), expected)
            assert kv.manager.device.kind == "cuda"
            assert [sequence.beam_width for sequence in kv.sequences] == [beams] * batch
            if beams > 1:  # full pages of the prompt are one for all beams
                full = length // T
                for sequence in kv.sequences:
                    rows = [row(sequence, beam) for beam in range(beams)]
                    assert [cells[:full] for cells in rows] == [rows[0][:full]] * beams


def test_left_padding():
    made = model("llama")
    given, how = inputs("llama", 3, 2 * T + 1, (0, 3, 5)), {"num_beams": 4}
    with paged(made, 4) as kv:
        assert_same(run(made, given, kv, **how), run(made, given, **how))


def test_on_a_stream_of_torchs_own():
    """Pages are written and read on torch's current stream, and on another one afterwards."""
    made = model("llama")
    given, how = inputs("llama", 3, 2 * T + 1), {"num_beams": 4}
    expected = run(made, given, **how)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with paged(made, 4) as kv:
        with torch.cuda.stream(side):
            assert_same(run(made, given, kv, **how), expected)
        torch.cuda.current_stream().wait_stream(side)
        keys = kv.layers[1].keys
        kv.reset()
        assert_same(run(made, given, kv, **how), expected)
        assert keys.shape == (12, 2, kv.get_seq_length(), 8)
        torch.testing.assert_close(kv.layers[1].keys, keys, rtol=0, atol=TOLERANCE)


def test_a_published_prompt_is_found_by_the_next_cache():
    made = model("llama")
    given, how = inputs("llama", 3, 3 * T + 2), {"num_beams": 4}
    expected = run(made, given, **how)
    with paged(made, 4) as first:
        run(made, given, first, **how)
        assert first.publish(given["input_ids"]) == 3
        with paged(made, 4, manager=first.manager, prompt=given["input_ids"]) as second:
            assert second.get_seq_length() == 3 * T
            assert_same(run(made, given, second, **how), expected)


def test_an_encoder_decoder_and_the_next_one_of_the_same_input():
    made = model("bart")
    given, how = inputs("bart", 3, 2 * T + 1), {"num_beams": 4}
    ids, mask = given["input_ids"], given["attention_mask"]
    expected = run(made, given, **how)
    with paged(made, 4) as first:
        assert_same(run(made, given, first, **how), expected)
        cross = first.cross_attention_cache.manager
        assert used(cross) == 3 * 3
        assert first.publish(ids, mask) == 3
        managers = {"manager": first.self_attention_cache.manager, "cross_manager": cross}
        with paged(made, 4, encoder_input=ids, attention_mask=mask, **managers) as second:
            assert second.cross_attention_cache.get_seq_length() == 2 * T + 1
            assert_same(run(made, given, second, **how), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_pass_through_the_pages_bit_by_bit(dtype):
    stock, numbers = tf.DynamicCache(), torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    with paged(model("llama"), dtype=kind) as kv:
        for length in (T + 1, 1, 1, T):
            for layer in range(2):
                new = torch.randn(2, 3, 2, length, 8, generator=numbers).to("cuda", kind)
                for ours, theirs in zip(
                    kv.update(*new, layer), stock.update(*new, layer), strict=True
                ):
                    assert ours.dtype == theirs.dtype
                    assert torch.equal(ours, theirs)
