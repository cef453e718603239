"""`generate` on kvcore pages against transformers' own caches: the same tokens, the same scores."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
tf = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

from kvcore_adapters.for_transformers import KVCoreCache, cache_for  # noqa: E402

from kvcore.device.host import HostDevice  # noqa: E402

VOCAB, PAD, EOS, T = 40, 0, 1, 4
WINDOW = 6
IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
    "init_std": 0.2,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are computed fastest by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configs() -> dict[str, Any]:
    """Configurations of a few thousand weights; large initial ones, so that logits differ."""
    llama = dict(hidden_size=32, intermediate_size=32, initializer_range=0.2, **HEADS, **IDS)
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    whisper = {"num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 32}
    return {
        "llama": tf.LlamaConfig(**llama),
        "gpt2": tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, **IDS),
        "mistral": tf.MistralConfig(**llama, sliding_window=WINDOW),
        "gemma3": tf.Gemma3TextConfig(**llama, head_dim=8, sliding_window=WINDOW,
                                      layer_types=["sliding_attention", "full_attention"]),
        "t5": tf.T5Config(**t5, initializer_factor=1.0, decoder_start_token_id=2, **IDS),
        "bart": tf.BartConfig(max_position_embeddings=64, **ENCODER_DECODER, **IDS),
        "whisper": tf.WhisperConfig(**whisper, **ENCODER_DECODER, **IDS),
    }  # fmt: skip


DECODERS = "llama", "gpt2", "mistral", "gemma3"
MODELS = tuple(configs())


@cache
def model(name: str) -> Any:
    """A model of random weights, the same in every run."""
    classes = {
        "llama": "LlamaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "mistral": "MistralForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "t5": "T5ForConditionalGeneration",
        "bart": "BartForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
    }
    torch.manual_seed(0)
    made = getattr(tf, classes[name])(configs()[name]).eval()
    made.generation_config.forced_eos_token_id = None
    return made


def inputs(name: str, batch: int, length: int, padding: tuple[int, ...] = ()) -> dict[str, Any]:
    """What `generate` takes of a batch of prompts; `padding` tokens are left out of each row."""
    seed = torch.Generator().manual_seed(batch * 100 + length)
    if name == "whisper":
        features = torch.randn(batch, 4, 20, generator=seed)
        start = torch.randint(3, VOCAB, (batch, length), generator=seed)
        return {"input_features": features, "decoder_input_ids": start}
    tokens = torch.randint(3, VOCAB, (batch, length), generator=seed)
    mask = torch.ones_like(tokens)
    for row, pads in enumerate(padding):
        tokens[row, :pads], mask[row, :pads] = PAD, 0
    return {"input_ids": tokens, "attention_mask": mask}


def run(name: str, given: dict[str, Any], kv: Any = None, **how: Any) -> Any:
    """One call of `generate`, with the model's own cache or with `kv`."""
    how = {"max_new_tokens": 7, "return_dict_in_generate": True, "output_scores": True} | how
    if kv is not None:
        how["cache"] = kv
    made = model(name)  # seeds, too, where it is the first time
    torch.manual_seed(5)
    if name == "whisper":  # its own generate, which transcribes, ends in this one
        return tf.GenerationMixin.generate(made, **given, **how)
    return made.generate(**given, **how)


def paged(name: str, num_beams: int = 1, **settings: Any) -> Any:
    return cache_for(model(name).config, num_beams=num_beams, tokens_per_block=T, **settings)


def assert_same(got: Any, expected: Any) -> None:
    """Every token; every score to 1e-5."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.scores) == len(expected.scores)
    for step, (ours, theirs) in enumerate(zip(got.scores, expected.scores, strict=True)):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-5, msg=lambda m, n=step: f"{n}: {m}"
        )
    if "sequences_scores" in expected:
        torch.testing.assert_close(
            got.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-5
        )
        assert got.beam_indices.tolist() == expected.beam_indices.tolist()


def compare(name: str, given: dict[str, Any], group: int, **how: Any) -> Any:
    """Generates twice, with `group` rows per prompt; what the paged cache gave."""
    expected = run(name, given, **how)
    with paged(name, group) as kv:
        got = run(name, given, kv, **how)
        assert got.cache is kv
        assert_same(got, expected)
        if group > 1:
            assert {seq.beam_width for seq in sequences(kv)} == {group}
    return got


def sequences(kv: Any) -> tuple[Any, ...]:
    """Of the decoder's own cache."""
    return getattr(kv, "self_attention_cache", kv).sequences


# -- the modes of generate -------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("beams", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_beam_search(name, beams, batch):
    for length in (2 * T - 1, 2 * T, 2 * T + 1):
        compare(name, inputs(name, batch, length), beams, num_beams=beams)


@pytest.mark.parametrize("penalty", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_early_stopping_and_length_penalties(name, early, penalty):
    many = {"eos_token_id": list(range(5, 13)), "num_beams": 4, "num_return_sequences": 4}
    how = {"early_stopping": early, "length_penalty": penalty, "max_new_tokens": 10}
    got = compare(name, inputs(name, 3, 6), 4, **many, **how)
    lengths = set((got.beam_indices >= 0).sum(1).tolist())
    assert len(lengths) > 1 or penalty > 1, "beams ended at different steps"


@pytest.mark.parametrize("name", MODELS)
def test_sampling(name):
    for length in (2 * T, 2 * T + 1):
        given = inputs(name, 3, length)
        compare(name, given, 1, do_sample=True)
        compare(name, given, 4, do_sample=True, num_return_sequences=4, top_k=0, temperature=1.5)
        compare(name, given, 4, do_sample=True, num_beams=4, num_return_sequences=2)


@pytest.mark.parametrize("beams", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DECODERS)
def test_left_padding(name, beams):
    for padding in ((0, 3, 5), (2, T, T + 1)):
        compare(name, inputs(name, 3, 2 * T + 1, padding), beams, num_beams=beams)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_of_the_encoder(name):
    compare(name, inputs(name, 3, 2 * T + 1, (0, 3, 5)), 4, num_beams=4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_far_beyond_prompt_and_window(name):
    compare(name, inputs(name, 2, 3), 4, num_beams=4, max_new_tokens=30)


@pytest.mark.parametrize("name", DECODERS)
def test_eager_attention(name):
    own = model(name).config._attn_implementation
    model(name).set_attn_implementation("eager")
    try:
        compare(name, inputs(name, 3, 2 * T + 1, (0, 3, 5)), 4, num_beams=4)
    finally:
        model(name).set_attn_implementation(own)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_prompt_computed_in_chunks(name):
    how = {"num_beams": 4, "prefill_chunk_size": 3}
    compare(name, inputs(name, 3, 3 * T, (0, 3, 5)), 4, **how)


def test_whisper_transcribes():
    """Its own `generate`, which also takes the dense keys and values out of the cache."""
    whisper, audio = model("whisper"), inputs("whisper", 2, 1)["input_features"]
    for beams in (1, 3):
        how = {"num_beams": beams, "max_new_tokens": 8, "return_dict_in_generate": True}
        expected = whisper.generate(audio, **how)
        with paged("whisper", beams) as kv:
            got = whisper.generate(audio, cache=kv, **how)
        assert got.sequences.tolist() == expected.sequences.tolist()
        for ours, theirs in zip(got.cache, expected.cache, strict=True):
            torch.testing.assert_close(ours[:2] + ours[3:5], theirs[:2] + theirs[3:5])


def test_t5_with_more_decoder_than_encoder_layers():
    """Where the cache that `generate` makes by itself is too short."""
    config = configs()["t5"]
    config.num_layers, config.num_decoder_layers = 1, 3
    torch.manual_seed(0)
    t5, given = tf.T5ForConditionalGeneration(config).eval(), inputs("t5", 2, 5)
    stock = tf.EncoderDecoderCache(tf.DynamicCache(), tf.DynamicCache())
    how = {"num_beams": 2, "max_new_tokens": 7}
    expected = t5.generate(**given, **how, cache=stock)
    with cache_for(config, num_beams=2) as kv:
        assert t5.generate(**given, **how, cache=kv).tolist() == expected.tolist()


def test_the_old_name_of_the_argument():
    given = inputs("llama", 1, 5)
    with paged("llama") as kv:
        with pytest.warns(FutureWarning, match="past_key_values"):
            got = model("llama").generate(**given, past_key_values=kv, max_new_tokens=3)
        assert kv.get_seq_length() == got.shape[1] - 1


# -- more than one call ----------------------------------------------------------------------------


def test_assisted_decoding_takes_tokens_back(monkeypatch):
    """Prompt lookup proposes what followed before; what is refused is cropped from the pages."""
    cropped = []
    whole = KVCoreCache.crop
    monkeypatch.setattr(KVCoreCache, "crop", lambda kv, n: (cropped.append(n), whole(kv, n)))
    given = inputs("llama", 1, T)
    given = {key: tensor.repeat(1, 5) for key, tensor in given.items()}
    compare("llama", given, 1, prompt_lookup_num_tokens=3, max_new_tokens=24)
    assert min(cropped) < 0


@pytest.mark.parametrize("name", DECODERS)
def test_a_second_call_goes_on(name):
    given = inputs(name, 2, T)
    with paged(name) as kv:
        tokens = run(name, given, kv).sequences
        longer = {"input_ids": torch.cat([tokens, given["input_ids"]], 1)}
        longer["attention_mask"] = torch.ones_like(longer["input_ids"])
        assert_same(run(name, longer, kv), run(name, longer))
        assert kv.get_seq_length() == longer["input_ids"].shape[1] + 6


def test_reset_makes_room_for_another_input():
    with paged("bart", 2) as kv:
        for length, batch in ((5, 1), (9, 3)):
            given = inputs("bart", batch, length)
            assert_same(run("bart", given, kv, num_beams=2), run("bart", given, num_beams=2))
            kv.reset()


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", DECODERS)
def test_a_published_prompt_is_found_by_the_next_cache(name, beams):
    given, how = inputs(name, 3, 3 * T + 2), {"num_beams": beams}
    expected = run(name, given, **how)
    with paged(name, beams) as first:
        assert_same(run(name, given, first, **how), expected)
        assert first.publish(given["input_ids"]) == 3
        settings = {"manager": first.manager, "prompt": given["input_ids"]}
        with paged(name, beams, **settings) as second:
            assert second.get_seq_length() == 3 * T
            assert_same(run(name, given, second, **how), expected)
            ours, theirs = (
                [seq.get_base_page_indices(0).tolist()[:3] for seq in kv.sequences]
                for kv in (first, second)
            )
            assert ours == theirs


# -- devices and types -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_device_that_defers_its_work(name):
    """Nothing is read before it was written, in whatever order the device works."""
    given, how = inputs(name, 3, 2 * T + 1), {"num_beams": 4}
    for seed in range(3):
        with paged(name, 4, device=HostDevice(deferred=True, seed=seed)) as kv:
            assert_same(run(name, given, kv, **how), run(name, given, **how))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_pass_through_the_pages_bit_by_bit(dtype):
    stock, numbers = tf.DynamicCache(), torch.Generator().manual_seed(0)
    with paged("llama", dtype=getattr(torch, dtype)) as kv:
        for length in (T + 1, 1, 1, T):
            for layer in range(2):
                new = torch.randn(2, 3, 2, length, 8, generator=numbers).to(getattr(torch, dtype))
                for ours, theirs in zip(
                    kv.update(*new, layer), stock.update(*new, layer), strict=True
                ):
                    assert ours.dtype == theirs.dtype
                    assert torch.equal(ours, theirs)
        assert torch.equal(kv.layers[1].keys, stock.layers[1].keys)
        assert torch.equal(kv.layers[0].values, stock.layers[0].values)
