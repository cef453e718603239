"""The kernels as text: sources, entry points, tunables. Needs no GPU, no CuPy.

Every entry point takes one struct by value, whose layout stands in `kvcore.device.cuda.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import numpy as np

from kvcore.device.cuda.arguments import (
    BUSY_ARGS,
    DELAY_ARGS,
    DIVIDER,
    FINGER_ARGS,
    INLINE_PAIR_ARGS,
    INLINE_SLOT_ARGS,
    LATCH_ARGS,
    MAP_ARGS,
    MAP_PATHS_ARGS,
    MOVE_ARGS,
    OFFSET_ARGS,
    PAGES,
    PAIR_ARGS,
    PATHS,
    PERMUTE_ARGS,
    PLACE,
    POOL,
    ROW_ARGS,
    ROW_PAGES_ARGS,
    SCATTER_ARGS,
    SLOT_ARGS,
    STAGED_ARGS,
    STEP_PATHS_ARGS,
    STEP_ROWS_ARGS,
    STRIDED_ARGS,
    TABLE_POOL,
    TAIL_ARGS,
    TAIL_BUFFERS,
    TAIL_KIND,
    TAKE_PATHS_ARGS,
    TOKEN_ARGS,
    TOKEN_SLOT_ARGS,
    WORD_ARGS,
    Fields,
)

UNITS: Final = (16, 8, 4, 2, 1)


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
            "paths",
            {"step_paths": STEP_PATHS_ARGS, "take_paths": TAKE_PATHS_ARGS},
            {"Paths": PATHS, "StepPathsArgs": STEP_PATHS_ARGS, "TakePathsArgs": TAKE_PATHS_ARGS},
            threads=256,
        ),
        Source(
            "move_tokens",
            _sized("move_tokens", MOVE_ARGS),
            {"MoveArgs": MOVE_ARGS, "Pages": PAGES, "Place": PLACE},
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
        Source(
            "map_tokens",
            {"map_tokens": MAP_ARGS, "map_paths": MAP_PATHS_ARGS},
            {"MapArgs": MAP_ARGS, "MapPathsArgs": MAP_PATHS_ARGS},
        ),
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
