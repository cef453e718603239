"""What `generate` is given, as tokens to look up."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import kvcore as k
from kvcore.checks import as_int
from kvcore.errors import wrong


def padded(prompt: Any, attention_mask: Any) -> list[bool]:
    """Which rows of a prompt are padded."""
    if prompt.dim() != 2 or not len(prompt):
        raise wrong("prompt", "ids [batch, length] of a row or more", list(prompt.shape))
    if attention_mask is None:
        return [False] * len(prompt)
    if attention_mask.shape != prompt.shape:
        expected = f"the prompt's shape {list(prompt.shape)}"
        raise wrong("attention_mask", expected, list(attention_mask.shape))
    found: list[bool] = (attention_mask == 0).any(1).tolist()
    return found


def whole_inputs(given: Any, attention_mask: Any, length: int | None) -> list[list[int]]:
    """The tokens that stand for each row of an encoder's input, the first one for all of it.

    An encoder looks both ways, so what it makes of equal leading tokens differs where others do.
    """
    if given is None:
        if attention_mask is not None:
            raise wrong("attention_mask", "None without encoder_input", list(attention_mask.shape))
        return []
    if given.dim() < 2:
        raise wrong("encoder_input", "a batch, [rows, ...]", list(given.shape))
    masks = [None] * len(given) if attention_mask is None else list(attention_mask)
    if len(masks) != len(given):
        raise wrong("attention_mask", f"{len(given)} rows, as encoder_input", len(masks))
    if not given.is_floating_point():
        if length not in (None, given.shape[1]):
            raise wrong("encoder_input", f"ids of {length} positions", given.shape[1])
        length = given.shape[1]
    if length is None:
        expected = "the positions that the encoder makes of features"
        raise wrong("encoder_length", expected, None, "a Whisper's max_source_positions")
    length = as_int("encoder_length", length, 1)
    digests = [_digest(row, mask) for row, mask in zip(given, masks, strict=True)]
    return [k.gen_multimodal_cache_key_tokens(0, digest, length) for digest in digests]


def _digest(*parts: Any) -> bytes:
    """SHA-256 of tensors, with their types and shapes; None counts as well."""
    digest = hashlib.sha256()
    for part in parts:
        if part is None:
            digest.update(b"none;")
            continue
        digest.update(f"{part.dtype} {list(part.shape)};".encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
