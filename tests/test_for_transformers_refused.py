"""What the transformers cache refuses, and what it says then."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
tf = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

import kvcore_adapters.for_transformers as module  # noqa: E402
from kvcore_adapters.for_transformers import KVCoreCache, KVCoreEncoderDecoderCache  # noqa: E402

import kvcore as k  # noqa: E402
from tests.helpers import opaque_manager, typed_manager, used  # noqa: E402
from tests.test_for_transformers import T, configs, inputs, one_thread, paged, run  # noqa: E402
from tests.test_for_transformers_pages import LLAMA, states  # noqa: E402

__all__ = ["one_thread"]  # a fixture


def test_groups_that_are_none():
    given = inputs("llama", 2, 6)
    with paged("llama", 4) as kv:
        with pytest.raises(ValueError, match=r"row 2: expected the prompt of row 0, .*num_beams=4"):
            run("llama", given, kv, num_beams=2)
        with pytest.raises(ValueError, match="a multiple of num_beams=4 rows, got 2"):
            run("llama", given, kv, num_beams=1)
        assert (used(kv.manager), kv.sequences) == (0, ())
    with (
        paged("llama", 2) as kv,
        pytest.raises(ValueError, match=r"beam_idx\[\d\]: .* its group of num_beams=2"),
    ):
        run("llama", given, kv, num_beams=4)


def test_rotary_functions_are_settled_before_the_first_model():
    """Or the first ones that several threads call may give coarse positions to equal rows."""
    code = """if 1:
        import torch
        seen = []
        for name in ("cos", "sin"):
            setattr(torch, name, lambda x, name=name: seen.append((name, x.numel(), x.dtype)))
        import kvcore_adapters.for_transformers_rows
        print(seen == [("cos", 1, torch.float32), ("sin", 1, torch.float32)])
    """
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.stdout.strip(), out.stderr) == ("True", "")


def test_equal_rows_may_differ_by_rounding():
    keys, values = states(4, 5, equal=4)
    noise = 1 + torch.tensor([0.0, 1.0, -1.0, 1.0])[:, None, None, None] * 2**-23
    with paged("llama", 4) as kv:
        read, _ = kv.update(keys * noise, values, 0)
        assert torch.equal(read, keys)
    with paged("llama", 4) as kv, pytest.raises(ValueError, match="row 1"):
        kv.update(keys * noise**100, values, 0)


def test_rows_of_other_steps_and_batches():
    with paged("llama") as kv:
        kv.update(*states(2, 5), 0)
        with pytest.raises(ValueError, match="layer 1: key_states: expected 2 rows of 5 tokens"):
            kv.update(*states(2, 4), 1)
        with pytest.raises(k.StateError, match="did not reach layer 1"):
            kv.update(*states(2, 1), 0)
        with pytest.raises(k.StateError, match="crop: the last forward did not reach layer 1"):
            kv.crop(-1)
        with pytest.raises(k.StateError, match="reorder_cache: the last forward"):
            kv.reorder_cache(torch.tensor([0, 1]))
        kv.update(*states(2, 5), 1)
        with pytest.raises(ValueError, match="2 rows, as before, got 3; reset"):
            kv.update(*states(3, 1), 0)
        with pytest.raises(ValueError, match="beam_idx: expected 2 rows, got 3"):
            kv.reorder_cache(torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match="2 rows of at most 5 tokens"):
            kv.publish(torch.ones(2, 6, dtype=torch.long))


def test_cross_attention_of_another_input():
    with paged("bart") as kv:
        run("bart", inputs("bart", 1, 5), kv, max_new_tokens=2)
        cross = kv.cross_attention_cache
        with pytest.raises(k.StateError, match="written once"):
            cross.update(*torch.zeros(2, 1, 4, 5, 8), 0)


def test_states_of_another_type_or_shape():
    keys, values = states(1, 2)
    with paged("llama") as kv:
        with pytest.raises(ValueError, match=r"layer 0: key_states: .* got 'float16 \(2, 8\)'"):
            kv.update(keys.half(), values, 0)
        with pytest.raises(ValueError, match=r"layer 1: value_states: .* got 'float32 \(2, 7\)'"):
            kv.update(keys, values[..., :7], 1)
        with pytest.raises(ValueError, match=r"layer 0: value_states: expected .* \[1, 2, 2, 8\]"):
            kv.update(keys, values[:, :, :1], 0)
        with pytest.raises(ValueError, match=r"layer 0: key_states: expected .* \[2, 2, 8\]"):
            kv.update(keys[0], values, 0)
        with pytest.raises(ValueError, match=r"layer 0: key_states: .* cpu, .*got 'meta'"):
            kv.update(keys.to("meta"), values, 0)
        assert (kv.sequences, kv.get_seq_length(), used(kv.manager)) == ((), 0, 0)


def test_gradients():
    keys, values = states(1, 2)
    with paged("llama") as kv:
        with pytest.raises(NotImplementedError, match="no gradients"):
            kv.update(keys.requires_grad_(), values, 0)
        with torch.no_grad():
            kv.update(keys, values, 0)


def test_calls_that_are_not_supported():
    with paged("llama") as kv, paged("t5") as both:
        for cache in (kv, both):
            with pytest.raises(NotImplementedError, match="batch_repeat_interleave"):
                cache.batch_repeat_interleave(2)
            with pytest.raises(NotImplementedError, match="batch_select_indices"):
                cache.batch_select_indices(torch.tensor([0]))
        for call in ("reset", "crop", "reorder_cache"):
            with pytest.raises(NotImplementedError, match="call it on the cache"):
                getattr(kv.layers[0], call)()
        for call in ("offload", "prefetch"):
            with pytest.raises(NotImplementedError, match="where their manager keeps them"):
                getattr(kv.layers[0], call)()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tf.Qwen3NextConfig(num_hidden_layers=4), "'linear_attention'"),
        (lambda: tf.DeepseekV3Config(num_hidden_layers=2), "latent attention"),
        (lambda: tf.RwkvConfig(num_hidden_layers=2), "RwkvConfig: .*no attention"),
        (lambda: tf.xLSTMConfig(num_hidden_layers=2), "xLSTMConfig: .*no attention"),
        (lambda: tf.BltConfig(), "BltConfig: .*no attention"),
        (lambda: tf.MllamaConfig().text_config, "cross-attention"),
    ],
    ids=["recurrent", "latent", "rwkv", "xlstm", "patches", "images"],
)
def test_models_that_are_not_supported(config, reason):
    with pytest.raises(NotImplementedError, match=reason):
        KVCoreCache(config())


def test_managers_that_do_not_fit():
    config = configs()["llama"]
    for other in (typed_manager(T=T, layers=3), opaque_manager(T=T, layers=2)):
        with other, pytest.raises(ValueError, match=r'manager: layers: .* each "key" and "value"'):
            KVCoreCache(config, other)
    with typed_manager(**LLAMA) as manager:
        with pytest.raises(ValueError, match="num_beams: expected at most manager's 1, got 2"):
            KVCoreCache(config, manager, num_beams=2)
        with pytest.raises(ValueError, match="both or neither"):
            KVCoreEncoderDecoderCache(configs()["t5"], manager)
    with (
        typed_manager(max_beam_width=2, **LLAMA) as manager,
        pytest.raises(ValueError, match="enable_partial_commit: expected False"),
    ):
        KVCoreCache(config, manager, num_beams=2)
    with pytest.raises(ValueError, match="num_beams: expected at least 1, got 0"):
        KVCoreCache(config, num_beams=0)
    for name in ("max_tokens", "tokens_per_block"):
        for value, error in ((0, ValueError), (-5, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match=f"^{name}: expected"):
                KVCoreCache(config, **{name: value})
    with pytest.raises(ValueError, match=r"^max_encoder_tokens: expected"):
        KVCoreEncoderDecoderCache(configs()["t5"], max_encoder_tokens=0)
    with pytest.raises(ValueError, match=r"^dtype: expected"):
        KVCoreCache(config, dtype="float3")
    with pytest.raises(TypeError, match="a KVCacheManager"):
        KVCoreCache(config, "host")
    with pytest.raises(ValueError, match="KVCoreEncoderDecoderCache"):
        KVCoreCache(configs()["t5"])


@pytest.mark.parametrize("wrong", ["mask", "scope", "prompt", "rows", "manager"])
def test_a_cache_that_could_not_be_made_keeps_no_memory(wrong, monkeypatch):
    """Managers that it had opened for itself are shut down."""
    opened = []
    open_manager = module.open_manager
    monkeypatch.setattr(
        module, "open_manager", lambda *how: opened.append(open_manager(*how)) or opened[-1]
    )
    tokens = torch.ones(2, 9, dtype=torch.long)
    settings = {
        "mask": {"prompt": tokens, "attention_mask": torch.ones(2, 8)},
        "scope": {"prompt": tokens, "reuse_scope": 3},
        "prompt": {"prompt": tokens[0]},
        "rows": {"prompt": tokens[:0]},
        "manager": {"prompt": tokens, "num_beams": 0},
    }[wrong]
    with pytest.raises((ValueError, TypeError), match=r"attention_mask|scope|prompt|num_beams"):
        KVCoreCache(configs()["llama"], **settings)
    if wrong == "scope":
        settings = {"encoder_input": tokens, "reuse_scope": 3}
        with pytest.raises(TypeError, match="scope"):
            KVCoreEncoderDecoderCache(configs()["t5"], **settings)
        assert len(opened) == 3
    for manager in opened:
        with pytest.raises(k.StateError, match="shut down"):
            manager.create_kv_cache()


def test_a_model_is_no_configuration():
    for given in (torch.nn.Linear(1, 1), None):
        for make in (module.cache_for, KVCoreCache, KVCoreEncoderDecoderCache):
            with pytest.raises(TypeError, match=r"config: expected .*; pass model\.config"):
                make(given)


def test_a_configuration_of_the_other_kind():
    with pytest.raises(ValueError, match="config: expected an encoder-decoder's"):
        KVCoreEncoderDecoderCache(configs()["llama"])
