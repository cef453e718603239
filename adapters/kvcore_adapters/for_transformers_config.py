"""From a transformers configuration to a kvcore manager."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import kvcore as k
from kvcore.checks import as_int
from kvcore.config import itemsize_bits
from kvcore.device.base import Device
from kvcore.errors import wrong, wrong_type
from kvcore.ids import align_up, div_ceil

KEPT_WHOLE = "full_attention", "sliding_attention", "chunked_attention"
"""Types of layers whose cache is all keys and values; what to attend to is the mask's business."""
GRAIN = 32 << 20  # bytes; quotas are rounded down to the device's grain, which is at most this
MOST_SEQUENCES = 64
"""Of a manager made here: table rows are reserved for all their beams."""


class LayerShape(NamedTuple):
    """What one layer keeps of a token, twice."""

    heads: int
    dim: int


def decoder_layers(config: Any) -> list[LayerShape]:
    """The shape of every cached layer of a model's decoder.

    Raises `NotImplementedError` for layers whose cache is no pair of equal keys and values.
    """
    decoder = config.get_text_config(decoder=True)
    count = getattr(decoder, "num_decoder_layers", None)
    count = count or getattr(decoder, "num_hidden_layers", None)
    if not count or not hasattr(decoder, "num_attention_heads"):
        raise NotImplementedError(f"{type(config).__name__}: it names no attention layers")
    if getattr(decoder, "cross_attention_layers", None):
        raise NotImplementedError(
            "layers of cross-attention in a decoder: only some steps use them"
        )
    each = list(getattr(decoder, "per_layer_config", None) or ())
    each = each if len(each) == count else [decoder] * count
    types = getattr(decoder, "layer_types", None) or ("full_attention",)
    for name in types:
        if name not in KEPT_WHOLE:
            raise NotImplementedError(f"layers of type {name!r}: their cache is no keys and values")
    if "reuse" in (getattr(decoder, "kv_sharing_modes", None) or ()):
        raise NotImplementedError("layers that share the cache of others are not built yet")
    if any(getattr(layer, "kv_lora_rank", None) for layer in each):
        raise NotImplementedError("latent attention (MLA): its keys and values differ in size")
    return [_shape(layer) for layer in each]


def _shape(layer: Any) -> LayerShape:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return LayerShape(heads, dim)


def type_name(config: Any, dtype: object) -> str:
    """The type of keys and values by name: as asked, else the model's, else float32."""
    found = dtype or config.dtype or config.get_text_config(decoder=True).dtype or "float32"
    return str(found).removeprefix("torch.")


def torch_type(manager: k.KVCacheManager) -> Any:
    """Torch's type of a manager's keys and values."""
    return getattr(torch, str(manager.config.layers[0].buffers[0].dtype))


def open_manager(
    layers: list[LayerShape],
    num_beams: int,
    device: str | Device,
    dtype: str,
    max_tokens: int,
    tokens_per_block: int,
) -> k.KVCacheManager:
    """A manager with pages for `max_tokens` tokens, for beams if there are several."""
    num_beams, item = as_int("num_beams", num_beams, 1), itemsize_bits(dtype) // 8
    max_tokens = as_int("max_tokens", max_tokens, 1)
    tokens_per_block = as_int("tokens_per_block", tokens_per_block, 1)
    buffers = {
        shape: [
            k.BufferConfig(
                role=role,
                size=tokens_per_block * shape.heads * shape.dim * item,
                dtype=dtype,
                shape=tuple(shape),
            )
            for role in ("key", "value")
        ]
        for shape in set(layers)
    }
    block = sum(2 * tokens_per_block * shape.heads * shape.dim * item for shape in layers)
    quota = align_up(div_ceil(max_tokens, tokens_per_block) * block, GRAIN)
    config = k.KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=[k.GpuCacheTierConfig(quota=quota)],
        layers=[
            k.AttentionLayerConfig(layer_id=i, buffers=buffers[shape])
            for i, shape in enumerate(layers)
        ],
        max_util_for_resume=1.0,
        enable_partial_commit=num_beams == 1,
        max_beam_width=num_beams,
        max_sequences=MOST_SEQUENCES,
        max_seq_len=align_up(max_tokens, tokens_per_block),
    )
    return k.KVCacheManager(config, device=device)


def check_manager(name: str, manager: k.KVCacheManager, num_layers: int, num_beams: int) -> None:
    """Raises `ValueError` or `TypeError` where a manager does not fit the layers or the beams."""
    if not isinstance(manager, k.KVCacheManager):
        raise wrong_type(name, "a KVCacheManager", manager)
    config = manager.config
    found = [
        (layer.layer_id, buffer.role, len(buffer.shape or ()))
        for layer in config.layers
        for buffer in layer.buffers
    ]
    if found != [(i, role, 2) for i in range(num_layers) for role in ("key", "value")]:
        expected = f'layers 0 to {num_layers - 1}, each "key" and "value" of a shape (heads, dim)'
        raise wrong(f"{name}: layers", expected, found)
    if num_beams > config.max_beam_width:
        raise wrong("num_beams", f"at most {name}'s {config.max_beam_width}", num_beams)
    if num_beams > 1 and config.enable_partial_commit:
        raise wrong(f"{name}: enable_partial_commit", "False for beams", True)
