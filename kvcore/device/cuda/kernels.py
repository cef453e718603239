"""The kernels as text: sources, entry points, argument layouts and tunables. Needs no GPU, no CuPy.

Every entry point takes one struct by value. Its layout stands here as an aligned NumPy dtype and in
the source as C++; the tests compare the two field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import numpy as np

from kvcore.device.cuda.structs import (
    DIVIDER,
    OFFSET_ARGS,
    ROW_PAGES_ARGS,
    TABLE_POOL,
    TOKEN_SLOT_ARGS,
)
from kvcore.device.cuda.structs import Fields as Fields
from kvcore.device.cuda.structs import struct as _struct

MAX_ROLES: Final = 4
MAX_POOLS: Final = 8
MAX_INLINE: Final = 256
MAX_DIMS: Final = 9
MAX_KINDS: Final = 8
MAX_ARRAYS: Final = 256
MAX_UNITS: Final = 2**31 - 1
"""Largest number that `quotient` of the kernels divides, and so of units in one launch."""

UNITS: Final = (16, 8, 4, 2, 1)

PLACE: Final = _struct(
    ("base", np.uint64), ("slot_bytes", np.int64), ("num_slots", np.int64), ("reserved", np.int64)
)
PAGES: Final = _struct(
    ("places", np.uint64),
    ("page_bytes", np.int64),
    ("token_stride", np.int64),
    ("head_stride", np.int64),
    ("page_tokens", DIVIDER),
    ("slot_tokens", np.uint32),
    ("num_roles", np.uint32),
    ("first_role", np.uint32),
)
TOKEN_ARGS: Final = _struct(
    ("mapping", np.uint64),
    ("base", np.uint64, MAX_ROLES),
    ("layer", np.int64, MAX_ROLES),
    ("num_units", np.uint32),
    ("reserved", np.uint32),
    ("pages", PAGES),
    ("token", np.int64, MAX_ROLES),
    ("head", np.int64, MAX_ROLES),
    ("item", np.int64, MAX_ROLES),
    ("token_units", DIVIDER),
    ("head_units", DIVIDER),
    ("item_units", DIVIDER),
    ("reserved_too", np.uint32),
)
FINGER_ARGS: Final = _struct(
    ("pages", PAGES),
    ("mapping", np.uint64),
    ("keys", np.uint64),
    ("bad", np.uint64),
    ("num_words", np.uint32),
    ("token_bytes", np.uint32),
    ("token_words", DIVIDER),
    ("head_bytes", DIVIDER),
)
POOL: Final = _struct(
    ("base", np.uint64), ("slot_bytes", np.int64), ("before", np.uint32), ("chunks", DIVIDER)
)
SLOT_ARGS: Final = _struct(
    ("slots", np.uint64),
    ("num_slots", np.uint32),
    ("limit", np.uint32),
    ("pattern", np.uint32),
    ("num_pools", np.uint32),
    ("pools", POOL, MAX_POOLS),
)
INLINE_SLOT_ARGS: Final = _struct(("args", SLOT_ARGS), ("slots", np.int32, 2 * MAX_INLINE))
WORD_ARGS: Final = _struct(
    ("target", np.uint64), ("count", np.int64), ("value", np.uint32), ("reserved", np.uint32)
)
SCATTER_ARGS: Final = _struct(
    ("table", np.uint64),
    ("index", np.uint64),
    ("value", np.uint64),
    ("target", np.uint64),
    ("words", np.uint64),
    ("table_cells", np.int64),
    ("num_cells", np.uint32),
    ("num_words", np.uint32),
)
STAGED_ARGS: Final = _struct(
    ("table", np.uint64),
    ("staged", np.uint64),
    ("target", np.uint64),
    ("table_cells", np.int64),
    ("num_words", np.uint32),
    ("reserved", np.uint32),
)
MAP_ARGS: Final = _struct(
    ("tables", np.uint64),
    ("group_stride", np.int64),
    ("row_stride", np.int64),
    ("rows", np.uint64),
    ("starts", np.uint64),
    ("ends", np.uint64),
    ("out", np.uint64),
    ("num_rows", np.uint32),
    ("num_blocks", np.uint32),
    ("num_entries", np.uint32),
    ("num_tokens", np.uint32),
    ("block_tokens", DIVIDER),
    ("reserved", np.uint32),
)
ROW_ARGS: Final = _struct(
    ("table", np.uint64),
    ("table_stride", np.int64),
    ("out", np.uint64),
    ("out_stride", np.int64),
    ("rows", np.uint64),
    ("table_rows", np.uint32),
    ("num_units", np.uint32),
    ("row_units", DIVIDER),
    ("table_units", np.uint32),
)
STRIDED_ARGS: Final = _struct(
    ("source", np.uint64),
    ("target", np.uint64),
    ("source_strides", np.int64, MAX_DIMS),
    ("target_strides", np.int64, MAX_DIMS),
    ("sizes", DIVIDER, MAX_DIMS),
    ("num_dims", np.uint32),
    ("num_units", np.uint32),
    ("reserved", np.uint32),
)
STEP_ROWS_ARGS: Final = _struct(
    ("table", np.uint64),
    ("row_stride", np.int64),
    ("group_stride", np.int64),
    *((name, np.uint64) for name in ("rows", "first", "width", "shared", "blocks")),
    ("parents", np.uint64),
    ("sources", np.uint64),
    ("num_rows", np.uint32),
    ("num_blocks", np.uint32),
    ("num_positions", np.uint32),
    ("num_parents", np.uint32),
    ("max_width", np.uint32),
    ("cells", np.uint32),
)
TAIL_KIND: Final = _struct(
    *((name, np.uint32) for name in ("first", "count", "units", "token_units"))
)
TAIL_BUFFERS: Final = _struct(
    ("places", np.uint64),
    ("num_kinds", np.uint32),
    ("reserved", np.uint32),
    ("kinds", TAIL_KIND, MAX_KINDS),
)
TAIL_ARGS: Final = _struct(
    ("table", np.uint64),
    ("row_stride", np.int64),
    *((name, np.uint64) for name in ("rows", "shared", "blocks", "valid", "sources")),
    ("num_rows", np.uint32),
    ("num_blocks", np.uint32),
    ("num_positions", np.uint32),
    ("block_tokens", np.uint32),
    ("buffers", TAIL_BUFFERS),
)
PAIR_ARGS: Final = _struct(
    ("lists", np.uint64),
    ("num_pairs", np.uint32),
    ("reserved", np.uint32),
    ("buffers", TAIL_BUFFERS),
)
INLINE_PAIR_ARGS: Final = _struct(("args", PAIR_ARGS), ("lists", np.int32, 3 * MAX_INLINE))
PERMUTE_ARGS: Final = _struct(
    *((name, np.uint64) for name in ("parents", "starts", "tokens")),
    ("row_stride", np.int64),
    ("num_rows", np.uint32),
    ("num_requests", np.uint32),
    ("width", np.uint32),
    ("segments", np.uint32),
    ("segment_units", np.uint32),
    ("token_units", np.uint32),
    ("shift", np.uint32),
    ("reserved", np.uint32),
    ("arrays", np.uint64, MAX_ARRAYS),
)
INDIRECTION_ARGS: Final = _struct(
    ("cells", np.uint64),
    ("request_stride", np.int64),
    ("beam_stride", np.int64),
    *((name, np.uint64) for name in ("parents", "starts", "ends", "widths")),
    *((name, np.uint32) for name in ("num_requests", "num_beams", "num_positions", "shift")),
)
LATCH_ARGS: Final = _struct(("flag", np.uint64), ("gave_up", np.uint64), ("max_cycles", np.int64))
DELAY_ARGS: Final = _struct(("cycles", np.int64))
BUSY_ARGS: Final = _struct(("out", np.uint64), ("rounds", np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One `.cu` file: its entry points with their arguments, and how it is tuned."""

    name: str
    entries: Mapping[str, Fields]
    structs: Mapping[str, Fields]
    """C++ names of the structs, for the comparison of layouts."""
    threads: int = 128
    vectors: int = 2
    stream_stores: bool = True

    @property
    def chunk(self) -> int:
        """Units that one block moves."""
        return self.threads * self.vectors

    def text(self) -> str:
        """What is compiled: the common part and the file, one after the other."""
        return _read("_common.cuh") + _read(f"{self.name}.cu")

    def options(self) -> tuple[str, ...]:
        """Compiler options, the tunables among them."""
        return (
            "-std=c++17",
            f"-DTHREADS={self.threads}",
            f"-DVECTORS={self.vectors}",
            f"-DSTREAM_STORES={int(self.stream_stores)}",
        )


@cache
def _read(name: str) -> str:
    return (files("kvcore") / "rawkernels" / name).read_text("utf-8")


def _sized(name: str, fields: Fields, units: tuple[int, ...] = UNITS) -> dict[str, Fields]:
    return {f"{name}_{unit}": fields for unit in units}


def _slot_sources() -> list[Source]:
    slots = {"SlotArgs": SLOT_ARGS, "Pool": POOL, "InlineSlotArgs": INLINE_SLOT_ARGS}
    return [
        Source(
            "copy_pages",
            _sized("copy_pages", SLOT_ARGS)
            | {"copy_pages_whole_16": SLOT_ARGS}
            | _sized("copy_pages_inline", INLINE_SLOT_ARGS),
            slots,
            threads=64,
            vectors=4,
        ),
        Source(
            "fill",
            {"fill_words": WORD_ARGS}
            | _sized("fill_pages", SLOT_ARGS)
            | _sized("fill_pages_inline", INLINE_SLOT_ARGS),
            {**slots, "WordArgs": WORD_ARGS},
            stream_stores=False,
        ),
    ]


def _beam_sources() -> list[Source]:
    tails = {
        "Place": PLACE,
        "TailKind": TAIL_KIND,
        "TailBuffers": TAIL_BUFFERS,
        "TailArgs": TAIL_ARGS,
        "PairArgs": PAIR_ARGS,
        "InlinePairArgs": INLINE_PAIR_ARGS,
    }
    entries = (
        _sized("copy_tails", TAIL_ARGS)
        | _sized("copy_tokens", PAIR_ARGS)
        | _sized("copy_tokens_inline", INLINE_PAIR_ARGS)
    )
    rows = {"StepRowsArgs": STEP_ROWS_ARGS}
    dense = _sized("permute_rows", PERMUTE_ARGS)
    return [
        Source("step_rows", {"step_rows": STEP_ROWS_ARGS}, rows, threads=256),
        Source("copy_tails", entries, tails, threads=256, vectors=4),
        Source(
            "step_indirection",
            {"step_indirection": INDIRECTION_ARGS},
            {"IndirectionArgs": INDIRECTION_ARGS},
            threads=256,
        ),
        Source("permute_rows", dense, {"PermuteArgs": PERMUTE_ARGS}, threads=256, vectors=4),
    ]


def _format_sources() -> list[Source]:
    offsets = {"OffsetArgs": OFFSET_ARGS, "TablePool": TABLE_POOL, "Divider": DIVIDER}
    entries = dict.fromkeys(("csr_pages", "ragged_pages"), ROW_PAGES_ARGS)
    return [
        Source("block_offsets", {"block_offsets": OFFSET_ARGS}, offsets),
        Source("row_pages", entries, {"RowPagesArgs": ROW_PAGES_ARGS}, threads=256),
        Source("token_slots", {"token_slots": TOKEN_SLOT_ARGS}, {"TokenSlotArgs": TOKEN_SLOT_ARGS}),
    ]


def _for_tests() -> Source:
    return Source(
        "latch",
        {"latch": LATCH_ARGS, "delay": DELAY_ARGS, "busy": BUSY_ARGS},
        {"LatchArgs": LATCH_ARGS, "DelayArgs": DELAY_ARGS, "BusyArgs": BUSY_ARGS},
    )


def _sources() -> dict[str, Source]:
    tokens = {"TokenArgs": TOKEN_ARGS, "Pages": PAGES, "Place": PLACE, "Divider": DIVIDER}
    whole = [
        *(
            Source(name, {f"{name}_flat_16": TOKEN_ARGS, **_sized(name, TOKEN_ARGS)}, tokens)
            for name in ("append", "gather")
        ),
        *_slot_sources(),
        *_beam_sources(),
        *_format_sources(),
        Source(
            "scatter_table",
            {"scatter_table": SCATTER_ARGS, "scatter_staged": STAGED_ARGS},
            {"ScatterArgs": SCATTER_ARGS, "StagedArgs": STAGED_ARGS},
        ),
        Source("map_tokens", {"map_tokens": MAP_ARGS}, {"MapArgs": MAP_ARGS}),
        Source("take_rows", _sized("take_rows", ROW_ARGS, UNITS[:3]), {"RowArgs": ROW_ARGS}),
        Source(
            "fingerprint",
            {"write_fingerprints": FINGER_ARGS, "verify_fingerprints": FINGER_ARGS},
            {"FingerArgs": FINGER_ARGS},
        ),
        Source("strided", _sized("copy_strided", STRIDED_ARGS), {"StridedArgs": STRIDED_ARGS}),
        _for_tests(),
    ]
    return {source.name: source for source in whole}


SOURCES: Final[Mapping[str, Source]] = MappingProxyType(_sources())


@lru_cache(4096)
def divider(div: int) -> tuple[int, int, int]:
    """The `Divider` (mul, shift, div) of the kernels: `n // div == (n * mul >> 32) + n >> shift`.

    >>> mul, shift, div = divider(7)
    >>> [((n * mul >> 32) + n) >> shift for n in (0, 6, 7, 48, 49, 2**31 - 1)]
    [0, 0, 1, 6, 7, 306783378]
    """
    shift = (div - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - div)) // div + 1, shift, div


def unit_bytes(*quantities: int) -> int:
    """The widest access, in bytes, at which all addresses, strides and lengths are aligned.

    >>> unit_bytes(4096, -48, 24)
    8
    """
    bits = 16
    for quantity in quantities:
        bits |= quantity
    return bits & -bits


def packing(fields: Fields) -> str:
    """The `struct` format of a whole argument layout, for one call that packs all its scalars.

    >>> packing(DIVIDER)
    '<III'
    """
    return "<" + "".join(_codes(fields))


def _codes(fields: Fields) -> list[str]:
    if fields.subdtype is not None:
        item, shape = fields.subdtype
        return _codes(item) * int(np.prod(shape))
    if fields.names is None:
        return [fields.char.translate(_CODES)]
    return [code for name in fields.names for code in _codes(fields[name])]


_CODES: Final = str.maketrans({"l": "q", "L": "Q"})
"""NumPy's codes of 64-bit integers are `struct`'s of 32 bits in the standard sizes."""
