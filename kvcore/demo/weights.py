"""The shipped weights: a shape, named float32 matrices, and what is known about their training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from kvcore.device.base import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The decoder's shape. Symbols used in this package: D is `head_dim`, V is `vocab`."""

    vocab: int
    dim: int
    layers: int
    heads: int
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int
    head_dim: int
    hidden: int
    """Width of the gated feed-forward layer."""
    context: int
    """Longest sequence in tokens: prompt and completion together."""
    rope_base: float
    norm_eps: float

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's float32 keys and values in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Everything the decoder is made of, as arrays of one array module."""

    shape: Shape
    tensors: Mapping[str, Array]
    """float32, by name: `embed`, `norm`, and per layer `layers.<i>.` + `attn_norm`, `qkv`, `out`,
    `mlp_norm`, `gate_up`, `down`. Matrices are [out, in]."""
    training: Mapping[str, Any]
    """Facts of the training run: `text`, `steps`, `held_out_bits_per_byte`, `parameters`, ..."""


def load_weights(xp: Any = np, path: Path | None = None) -> Weights:
    """Reads the weights and turns them into float32 arrays of `xp`.

    Parameters
    ----------
    xp : module
        `numpy`, or `cupy` with the wanted device and stream current.
    path : Path, optional
        A file written by `train.py`; default is the one that comes with the package.
    """
    if path is None:
        with resources.as_file(resources.files("kvcore.demo") / "weights.safetensors") as shipped:
            return load_weights(xp, shipped)
    with safe_open(path, "np") as file:
        facts = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return Weights(
        shape=Shape(**json.loads(facts["shape"])),
        tensors={name: xp.asarray(value.astype(np.float32)) for name, value in stored.items()},
        training=json.loads(facts["training"]),
    )
