"""Configuration: what is normalised, and that every rule is enforced, also under `python -O`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcore import config as c

NAMES = {name: getattr(c, name) for name in c.__all__} | {"np": np}
GPU = c.GpuCacheTierConfig(quota=1 << 20)
HOST = c.HostCacheTierConfig(quota=1 << 20)
DISK = c.DiskCacheTierConfig(quota=1 << 20, path="/tmp")
KEY = c.BufferConfig(role="key", size=1024)
LAYER = c.AttentionLayerConfig(layer_id=0, buffers=[KEY])
WINDOW = c.AttentionLayerConfig(layer_id=1, buffers=[KEY], sliding_window_size=8)
SSM = c.SsmLayerConfig(layer_id=2, buffers=[c.BufferConfig(role="state", size=64)])
WIDE = c.BatchDesc(kv_caches=[c.KVCacheDesc(capacity=8, history_length=8, beam_width=3)])
NAMES |= {"G": GPU, "H": HOST, "D": DISK, "B": KEY, "A": LAYER, "S": WINDOW, "M": SSM, "WIDE": WIDE}


def manager_config(**kw):
    return c.KVCacheManagerConfig(
        **({"tokens_per_block": 4, "cache_tiers": [GPU], "layers": [LAYER]} | kw)
    )


def buffers(text):
    return (
        "KVCacheManagerConfig(tokens_per_block=4, cache_tiers=[G], "
        f"layers=[AttentionLayerConfig(layer_id=0, buffers=[BufferConfig(role='key', {text})])])"
    )


def managers(text):
    defaults = {"tokens_per_block": "4", "cache_tiers": "[G]", "layers": "[A]"}
    rest = ", ".join(f"{k}={v}" for k, v in defaults.items() if f"{k}=" not in text)
    return f"KVCacheManagerConfig({text}, {rest})"


# (expression, error, a part of its message)
BAD = [
    ("BufferConfig(role='', size=1)", "ValueError", "role: expected a name, got ''"),
    ("BufferConfig(role=3, size=1)", "TypeError", "role: expected a str, got int (3)"),
    ("BufferConfig(role='key', size=0)", "ValueError", "size: expected at least 1, got 0"),
    ("BufferConfig(role='key', size=1.5)", "TypeError", "size: expected an int, got float"),
    ("BufferConfig(role='key', size=True)", "TypeError", "size: expected an int, got bool"),
    ("BufferConfig(role='key', size=np.array([1]))", "TypeError", "size: expected an int"),
    (
        "BufferConfig(role='key', size=8, tokens_per_block_override=0)",
        "ValueError",
        "tokens_per_block_override: expected at least 1",
    ),
    ("BufferConfig(role='key', size=8, dtype='int8')", "ValueError", "expected both or neither"),
    ("BufferConfig(role='key', size=8, shape=(2,))", "ValueError", "expected both or neither"),
    (
        "BufferConfig(role='key', size=8, layout='NHD')",
        "ValueError",
        "layout: expected None without a shape",
    ),
    (
        "BufferConfig(role='key', size=8, dtype='bf16', shape=(2,))",
        "ValueError",
        "dtype: expected one of",
    ),
    ("BufferConfig(role='key', size=8, dtype=np.int8, shape=(2,))", "TypeError", "dtype"),
    ("BufferConfig(role='key', size=8, dtype='int8', shape=())", "ValueError", "(heads, dim)"),
    ("BufferConfig(role='key', size=8, dtype='int8', shape=(1, 1, 2))", "ValueError", "shape"),
    ("BufferConfig(role='key', size=8, dtype='int8', shape=(0, 2))", "ValueError", "shape[0]"),
    ("BufferConfig(role='key', size=8, dtype='int8', shape=8)", "TypeError", "a sequence"),
    (
        "BufferConfig(role='key', size=8, dtype='int8', shape=(2,), layout='NDH')",
        "ValueError",
        "layout: expected one of 'NHD', 'HND'",
    ),
    (
        "BufferConfig(role='key', size=6, dtype='float4_e2m1fn', shape=(1, 3))",
        "ValueError",
        "an even dim",
    ),
    (buffers("size=8, tokens_per_block_override=3"), "ValueError", "a divisor of tokens_per_block"),
    (buffers("size=8, tokens_per_block_override=8"), "ValueError", "a divisor of tokens_per_block"),
    (
        buffers("size=65, dtype='float16', shape=(2, 4)"),
        "ValueError",
        "layer 0, buffer 'key': size: expected 64 bytes (4 x (2, 4) x float16), got 65",
    ),
    (
        buffers("size=64, dtype='float16', shape=(2, 4), tokens_per_block_override=2"),
        "ValueError",
        "size: expected 32 bytes (2 x (2, 4) x float16), got 64",
    ),
    (
        "AttentionLayerConfig(layer_id=-1, buffers=[B])",
        "ValueError",
        "layer_id: expected at least 0",
    ),
    ("AttentionLayerConfig(layer_id='0', buffers=[B])", "TypeError", "layer_id: expected an int"),
    ("AttentionLayerConfig(layer_id=0, buffers=[])", "ValueError", "at least one BufferConfig"),
    ("AttentionLayerConfig(layer_id=0, buffers=B)", "TypeError", "a sequence, each item"),
    ("AttentionLayerConfig(layer_id=0, buffers=['key'])", "TypeError", "layer 0: buffers[0]"),
    (
        "AttentionLayerConfig(layer_id=0, buffers=[B, B])",
        "ValueError",
        "layer 0: buffers: expected a different role for each",
    ),
    (
        "AttentionLayerConfig(layer_id=0, buffers=[B], sliding_window_size=0)",
        "ValueError",
        "sliding_window_size: expected at least 1",
    ),
    (
        "AttentionLayerConfig(layer_id=0, buffers=[B], num_sink_tokens=4)",
        "ValueError",
        "num_sink_tokens: expected None without a window",
    ),
    ("AttentionLayerConfig(layer_id=0, buffers=[B], kind='gqa')", "ValueError", "kind"),
    (
        "SsmLayerConfig(layer_id=0, buffers=[BufferConfig(role='s', size=4, "
        "tokens_per_block_override=1)])",
        "ValueError",
        "layer 0, buffer 's': tokens_per_block_override: expected None in an SSM layer",
    ),
    ("GpuCacheTierConfig(quota=0)", "ValueError", "quota: expected at least 1, got 0"),
    ("HostCacheTierConfig(quota=-1)", "ValueError", "quota"),
    ("DiskCacheTierConfig(quota=1, path='')", "ValueError", "path: expected a name"),
    ("DiskCacheTierConfig(quota=1, path=None)", "TypeError", "path: expected a str"),
    ("KVCacheDesc(capacity=-1, history_length=0)", "ValueError", "capacity"),
    (
        "KVCacheDesc(capacity=3, history_length=4)",
        "ValueError",
        "history_length: expected at most capacity (3), got 4",
    ),
    ("KVCacheDesc(capacity=3, history_length=3, beam_width=0)", "ValueError", "beam_width"),
    ("KVCacheDesc(capacity=3, history_length=3, prompt_length=-1)", "ValueError", "prompt_length"),
    ("BatchDesc(kv_caches=[])", "ValueError", "kv_caches: expected at least one"),
    ("BatchDesc(kv_caches=[(3, 3)])", "TypeError", "kv_caches[0]: expected a KVCacheDesc"),
    (
        "BatchDesc(kv_caches=[KVCacheDesc(capacity=1, history_length=0)], system_prompt_length=-1)",
        "ValueError",
        "system_prompt_length",
    ),
    ("SwaScratchReuseConfig(max_rewind_len=-1)", "ValueError", "max_rewind_len"),
    (
        "ReuseScope(lora_id=-1)",
        "ValueError",
        "lora_id: expected a value in [0, 18446744073709551615]",
    ),
    ("ReuseScope(salt=2**64)", "ValueError", "salt"),
    ("ReuseScope(salt='tenant')", "TypeError", "salt: expected an int"),
    (managers("tokens_per_block=0"), "ValueError", "tokens_per_block: expected at least 1, got 0"),
    (managers("tokens_per_block=4.0"), "TypeError", "tokens_per_block: expected an int"),
    (managers("cache_tiers=[]"), "ValueError", "one GPU tier first, then host, then disk, got []"),
    (managers("cache_tiers=[H]"), "ValueError", "got ['HOST']"),
    (managers("cache_tiers=[H, G]"), "ValueError", "got ['HOST', 'GPU']"),
    (managers("cache_tiers=[G, G]"), "ValueError", "got ['GPU', 'GPU']"),
    (managers("cache_tiers=[G, D, H]"), "ValueError", "got ['GPU', 'DISK', 'HOST']"),
    (managers("cache_tiers=[1 << 20]"), "TypeError", "cache_tiers[0]"),
    (managers("layers=[]"), "ValueError", "layers: expected at least one layer"),
    (managers("layers=[A, A]"), "ValueError", "a different layer_id for each, got [0]"),
    (managers("layers=[B]"), "TypeError", "layers[0]: expected a layer config"),
    (managers("layers=[A, M]"), "ValueError", "commit_min_snapshot: expected True with SSM layers"),
    (managers("max_util_for_resume=0"), "ValueError", "a value in (0, 1], got 0.0"),
    (managers("max_util_for_resume=1.5"), "ValueError", "a value in (0, 1], got 1.5"),
    (managers("max_util_for_resume=float('nan')"), "ValueError", "a finite number"),
    (managers("max_util_for_resume='1'"), "TypeError", "max_util_for_resume: expected a number"),
    (managers("max_util_for_resume=True"), "TypeError", "max_util_for_resume: expected a number"),
    (managers("constraints=[A]"), "TypeError", "constraints[0]: expected a BatchDesc"),
    (managers("typical_step=[]"), "TypeError", "typical_step: expected a BatchDesc or None"),
    (managers("typical_step=WIDE"), "ValueError", "typical_step: beam_width: expected at most"),
    (managers("constraints=[WIDE]"), "ValueError", "constraints[0]: beam_width"),
    (managers("initial_pool_ratio=[]"), "ValueError", "1 values, one per layer group, got ()"),
    (managers("initial_pool_ratio=[0.5]"), "ValueError", "they sum to 0.5"),
    (managers("initial_pool_ratio=[0.5, 0.5]"), "ValueError", "1 values, one per layer group"),
    (managers("layers=[A, S], initial_pool_ratio=[1.0]"), "ValueError", "2 values, one per"),
    (managers("layers=[A, S], initial_pool_ratio=[0, 1]"), "ValueError", "positive values"),
    (managers("layers=[A, S], initial_pool_ratio=[-0.1, 1.1]"), "ValueError", "positive values"),
    (managers("layers=[A, S], initial_pool_ratio=[0.4, 0.5]"), "ValueError", "sum to 1"),
    (managers("layers=[A, S], initial_pool_ratio=[0.5, 0.500002]"), "ValueError", "sum to 1"),
    (managers("swa_scratch_reuse=1"), "TypeError", "a SwaScratchReuseConfig or None"),
    (managers("commit_min_snapshot=1"), "TypeError", "commit_min_snapshot: expected a bool"),
    (managers("enable_partial_commit=None"), "TypeError", "enable_partial_commit: expected a bool"),
    (managers("reuse_match_backoff=-1"), "ValueError", "reuse_match_backoff"),
    (managers("max_beam_width=0"), "ValueError", "max_beam_width: expected at least 1"),
    (managers("beam_mode='tree'"), "ValueError", "beam_mode: expected one of 'fork'"),
    (managers("max_sequences=0"), "ValueError", "max_sequences: expected at least 1"),
    (managers("max_rows=3, max_beam_width=4"), "ValueError", "at least max_beam_width (4), got 3"),
    (managers("max_seq_len=0"), "ValueError", "max_seq_len: expected at least 1"),
]


def complaint(expression):
    """The error an expression raises, as 'Type: message', or '' if it raises none."""
    try:
        eval(expression, dict(NAMES))
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("expression", "kind", "part"), BAD)
def test_bad_values_are_refused(expression, kind, part):
    got = complaint(expression)
    assert got.startswith(kind + ": ")
    assert part in got


def test_refusals_survive_optimised_python():
    root = Path(__file__).parents[1]
    code = (
        "from tests.test_config import BAD, complaint\n"
        "assert False, 'gone under -O'\n"
        "for expression, _, _ in BAD: print(complaint(expression))\n"
    )
    out = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
    )
    assert out.stdout.splitlines() == [complaint(expression) for expression, _, _ in BAD]


def test_lists_become_tuples_and_numpy_integers_ints():
    config = manager_config(
        tokens_per_block=np.int64(4),
        layers=[LAYER, WINDOW],
        constraints=[WIDE],
        initial_pool_ratio=np.array([0.25, 0.75]),
        max_beam_width=np.uint8(3),
    )
    assert type(config.tokens_per_block) is int
    assert config.layers == (LAYER, WINDOW)
    assert config.cache_tiers == (GPU,)
    assert config.constraints == (WIDE,)
    assert config.initial_pool_ratio == (0.25, 0.75)
    assert type(config.max_beam_width) is int
    assert config.layers[0].buffers == (KEY,)
    assert WIDE.kv_caches == (c.KVCacheDesc(capacity=8, history_length=8, beam_width=3),)
    assert hash(config) == hash(dataclasses.replace(config))


def test_defaults():
    config = manager_config()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert values == {
        "tokens_per_block": 4,
        "cache_tiers": (GPU,),
        "layers": (LAYER,),
        "max_util_for_resume": 0.97,
        "constraints": (),
        "typical_step": None,
        "initial_pool_ratio": None,
        "swa_scratch_reuse": None,
        "commit_min_snapshot": False,
        "enable_stats": True,
        "text_only": False,
        "reuse_match_backoff": 0,
        "enable_partial_reuse": True,
        "enable_partial_commit": True,
        "max_beam_width": 1,
        "beam_mode": "fork",
        "max_sequences": 1024,
        "max_rows": None,
        "max_seq_len": None,
    }


@pytest.mark.parametrize("kind", [c.KVCacheManagerConfig, c.BufferConfig, c.ReuseScope])
def test_configs_are_frozen_slotted_and_keyword_only(kind):
    params = kind.__dataclass_params__
    assert params.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert "__slots__" in vars(kind)
    with pytest.raises(TypeError, match="positional"):
        kind(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYER.layer_id = 3


def test_valid_edge_cases_are_accepted():
    manager_config(cache_tiers=[GPU, HOST, DISK])
    manager_config(cache_tiers=[GPU, DISK])
    manager_config(max_util_for_resume=1)
    manager_config(layers=[LAYER, SSM], commit_min_snapshot=True)
    manager_config(layers=[LAYER, WINDOW], initial_pool_ratio=[0.5, 0.5000009])
    c.AttentionLayerConfig(layer_id=0, buffers=[KEY], num_sink_tokens=0)
    c.KVCacheDesc(capacity=0, history_length=0, prompt_length=9)
    assert c.DiskCacheTierConfig(quota=1, path=Path("/tmp")).path == "/tmp"
    assert c.ReuseScope(salt=2**64 - 1) != c.ReuseScope(lora_id=2**64 - 1)
    assert c.ReuseScope() != c.ReuseScope(salt=0)


@pytest.mark.parametrize(
    ("dtype", "shape", "override", "size"),
    [
        ("bfloat16", (8, 128), None, 4 * 8 * 128 * 2),
        ("float32", (576,), None, 4 * 576 * 4),
        ("float8_e4m3fn", (2, 16), 2, 2 * 2 * 16),
        ("float4_e2m1fn", (2, 16), None, 4 * 2 * 8),
        ("bool", (3,), 1, 3),
    ],
)
def test_typed_buffers_must_have_exactly_their_size(dtype, shape, override, size):
    def build(nbytes):
        typed = c.BufferConfig(
            role="key", size=nbytes, dtype=dtype, shape=shape, tokens_per_block_override=override
        )
        return manager_config(layers=[c.AttentionLayerConfig(layer_id=0, buffers=[typed])])

    assert build(size).layers[0].buffers[0].layout == "NHD"
    for wrong_size in (size - 1, size + 1, 2 * size):
        with pytest.raises(ValueError, match=rf"expected {size} bytes"):
            build(wrong_size)


def test_a_typed_state_has_no_tokens():
    typed = c.BufferConfig(role="state", size=2 * 16 * 4, dtype="float32", shape=(2, 16))
    layer = c.SsmLayerConfig(layer_id=0, buffers=[typed])
    assert manager_config(layers=[layer], commit_min_snapshot=True).num_layer_groups == 1


def test_dtype_bits():
    assert {name: c.itemsize_bits(name) for name in c.DTYPE_BITS} == {
        "float4_e2m1fn": 4,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "float8_e8m0fnu": 8,
        "uint8": 8,
        "int8": 8,
        "bool": 8,
        "float16": 16,
        "bfloat16": 16,
        "int16": 16,
        "uint16": 16,
        "float32": 32,
        "int32": 32,
        "uint32": 32,
        "float64": 64,
        "int64": 64,
        "uint64": 64,
    }


def test_life_cycle_keys():
    def key(**kw):
        return c.life_cycle_key(c.AttentionLayerConfig(layer_id=0, buffers=[KEY], **kw), 32)

    assert key() == ("attention", None, 0)
    assert key(kind="mla") == ("attention", None, 0)
    assert key(kind="sparse") == ("sparse", None, 0)
    assert key(sliding_window_size=128) == ("attention", 128, 0)
    assert key(sliding_window_size=128, num_sink_tokens=33) == ("attention", 128, 2)
    assert key(sliding_window_size=128, num_sink_tokens=64) == ("attention", 128, 2)
    assert c.life_cycle_key(SSM, 32) == ("ssm", None, 0)
