"""Layers and their buffers: the part of the configuration that decides what a page holds.

Import these names from `kvcore.config`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from kvcore.checks import as_choice, as_int, as_optional_int, as_text, as_tuple
from kvcore.errors import wrong
from kvcore.ids import div_ceil

_BITS: Final = {
    4: ("float4_e2m1fn",),
    8: ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint8", "int8", "bool"),
    16: ("float16", "bfloat16", "int16", "uint16"),
    32: ("float32", "int32", "uint32"),
    64: ("float64", "int64", "uint64"),
}
DTYPE_BITS: Final = MappingProxyType(
    {name: bits for bits, names in _BITS.items() for name in names}
)
"""Bits of one element, by the name of its type."""

LAYOUTS: Final = ("NHD", "HND", "NH2D")

_set: Final = object.__setattr__  # the way to normalise a field of a frozen dataclass


def itemsize_bits(dtype: str) -> int:
    """Bits of one element of `dtype`; 4 for `float4_e2m1fn`, of which two share a byte.

    >>> itemsize_bits("bfloat16")
    16
    """
    return DTYPE_BITS[as_choice("dtype", dtype, tuple(DTYPE_BITS))]


@cache
def array_type(declared: str) -> np.dtype[Any]:
    """The NumPy type of a buffer's items; the bits of those that NumPy lacks.

    Not "what np.dtype knows": other packages teach it names, and must make no difference.
    """
    if declared.startswith(("bfloat16", "float8", "float4")):
        return np.dtype(f"u{max(itemsize_bits(declared) // 8, 1)}")
    return np.dtype(declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferConfig:
    """One kind of bytes that a layer keeps per token, such as its keys.

    >>> BufferConfig(role="key", size=32 * 8 * 128 * 2, dtype="bfloat16", shape=[8, 128]).layout
    'NHD'
    """

    role: str
    """What the bytes are ("key", "value", "scales"); unique within the layer."""

    size: int
    """Bytes of one page at the page's own granularity: `tokens_per_block_override` tokens if that
    is set, else `tokens_per_block`. Buffers of equal stored size share a pool and one page table
    entry, so keep sizes of like buffers equal; nothing is padded."""

    tokens_per_block_override: int | None = None
    """Tokens of one page as kernels see it, a divisor of `tokens_per_block`. Set it when one
    buffer's kernel needs smaller pages than the others; each block then gives several page
    indices."""

    dtype: str | None = None
    """Element type by name, one of `DTYPE_BITS`. Set it with `shape` to read and write tokens
    through the library; without both the bytes are opaque and only whole pages move."""

    shape: Sequence[int] | None = None
    """Elements of one token: `(heads, dim)` or `(dim,)`. `size` must then be exactly the tokens
    of a page times this. For `float4_e2m1fn`, `dim` counts elements and must be even."""

    layout: str | None = None
    """Order inside a page: "NHD" is [tokens, heads, dim], the default where a shape is given;
    "HND" is [heads, tokens, dim]; "NH2D" is NHD with keys and values in one buffer, whose heads are
    in turn a head's key and its value, so that there are two for each. Take what the attention
    kernel reads; NHD writes a token contiguously."""

    def __post_init__(self) -> None:
        _set(self, "role", as_text("role", self.role))
        _set(self, "size", as_int("size", self.size, 1, remedy="give the bytes of one page"))
        override = as_optional_int("tokens_per_block_override", self.tokens_per_block_override, 1)
        _set(self, "tokens_per_block_override", override)
        if (self.dtype is None) != (self.shape is None):
            raise wrong("dtype and shape", "both or neither", (self.dtype, self.shape))
        if self.shape is None:
            if self.layout is not None:
                raise wrong("layout", "None without a shape", self.layout, "set dtype and shape")
            return
        _set(self, "shape", self._checked_shape())
        layout = "NHD" if self.layout is None else self.layout
        _set(self, "layout", as_choice("layout", layout, LAYOUTS))
        if layout == "NH2D" and (len(self.shape) != 2 or self.shape[0] % 2):
            raise wrong("shape", "(2 * heads, dim) with layout 'NH2D'", self.shape)

    def _checked_shape(self) -> tuple[int, ...]:
        bits = DTYPE_BITS[as_choice("dtype", self.dtype, tuple(DTYPE_BITS))]
        items = as_tuple("shape", self.shape, object, "an int")
        shape = tuple(as_int(f"shape[{i}]", value, 1) for i, value in enumerate(items))
        if len(shape) not in (1, 2):
            raise wrong("shape", "(heads, dim) or (dim,), the elements of one token", shape)
        if shape[-1] * bits % 8:
            raise wrong("shape", f"an even dim ({self.dtype} packs two elements a byte)", shape)
        return shape

    @property
    def token_bytes(self) -> int | None:
        """Bytes of one token, or None where the buffer is opaque."""
        if self.dtype is None or self.shape is None:
            return None
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def tokens(self, tokens_per_block: int) -> int:
        """Tokens of one page at its own granularity."""
        return self.tokens_per_block_override or tokens_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerConfig:
    """A layer that keeps something for every token it may still attend to."""

    layer_id: int
    """The caller's number of the layer, at least 0, unique over all layers."""

    buffers: Sequence[BufferConfig]
    """What the layer keeps, in memory order. Declare the value right after the key at equal size:
    kernels that derive the value's page from the key's rely on it."""

    sliding_window_size: int | None = None
    """Tokens the layer attends to, the newest included; None attends to all. Layers with equal
    (window, sink blocks) form one layer group, whose pages are freed as they leave the window."""

    num_sink_tokens: int | None = None
    """First tokens that stay attended to whatever the window; needs a window. Rounded up to
    blocks."""

    kind: str = "mha"
    """"mha" (also GQA and MQA), "mla" (one latent buffer) or "sparse" (pages selected by the
    engine, in a layer group of its own)."""

    def __post_init__(self) -> None:
        _check_layer(self)
        window = as_optional_int("sliding_window_size", self.sliding_window_size, 1)
        sinks = as_optional_int("num_sink_tokens", self.num_sink_tokens, 0)
        if sinks and window is None:
            raise wrong(
                "num_sink_tokens", "None without a window", sinks, "set sliding_window_size"
            )
        _set(self, "sliding_window_size", window)
        _set(self, "num_sink_tokens", sinks)
        _set(self, "kind", as_choice("kind", self.kind, ("mha", "mla", "sparse")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmLayerConfig:
    """A recurrent layer: one state per sequence and beam instead of pages per block."""

    layer_id: int
    """The caller's number of the layer, at least 0, unique over all layers."""

    buffers: Sequence[BufferConfig]
    """The parts of one state; `size` is the bytes of the whole part. All SSM layers form one layer
    group, so a state is one slot."""

    def __post_init__(self) -> None:
        _check_layer(self)
        for buffer in self.buffers:
            if buffer.tokens_per_block_override is not None:
                name = f"layer {self.layer_id}, buffer {buffer.role!r}: tokens_per_block_override"
                got = buffer.tokens_per_block_override
                raise wrong(name, "None in an SSM layer", got, "a state does not grow with tokens")


LayerConfig: TypeAlias = AttentionLayerConfig | SsmLayerConfig


def _check_layer(layer: LayerConfig) -> None:
    """Normalises what both kinds of layers have."""
    _set(layer, "layer_id", as_int("layer_id", layer.layer_id, 0))
    name = f"layer {layer.layer_id}: buffers"
    buffers = as_tuple(name, layer.buffers, BufferConfig, "a BufferConfig")
    if not buffers:
        raise wrong(name, "at least one BufferConfig", buffers)
    roles = [buffer.role for buffer in buffers]
    if len(set(roles)) < len(roles):
        raise wrong(name, "a different role for each", roles, "rename the repeated role")
    _set(layer, "buffers", buffers)


def life_cycle_key(layer: LayerConfig, tokens_per_block: int) -> tuple[str, int | None, int]:
    """(kind, window, sink blocks): layers with equal keys form one layer group."""
    if isinstance(layer, SsmLayerConfig):
        return "ssm", None, 0
    kind = "sparse" if layer.kind == "sparse" else "attention"
    if layer.sliding_window_size is None:
        return kind, None, 0
    return kind, layer.sliding_window_size, div_ceil(layer.num_sink_tokens or 0, tokens_per_block)


def check_buffers(layer: LayerConfig, tokens_per_block: int) -> None:
    """Checks of a layer that need the manager's tokens per block. Raises `ValueError`."""
    for buffer in layer.buffers:
        name = f"layer {layer.layer_id}, buffer {buffer.role!r}"
        tokens = buffer.tokens(tokens_per_block)
        if tokens_per_block % tokens:
            expected = f"a divisor of tokens_per_block ({tokens_per_block})"
            raise wrong(f"{name}: tokens_per_block_override", expected, tokens)
        if buffer.token_bytes is None:
            continue
        units = 1 if isinstance(layer, SsmLayerConfig) else tokens
        if buffer.size != units * buffer.token_bytes:
            parts = f"{units} x {buffer.shape} x {buffer.dtype}"
            expected = f"{units * buffer.token_bytes} bytes ({parts})"
            raise wrong(f"{name}: size", expected, buffer.size, "correct size, shape or dtype")
