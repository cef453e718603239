"""Argument layouts of the kernels, as aligned NumPy dtypes. Needs no GPU, no CuPy.

Every entry point takes one struct by value. Its C++ twin stands in the source; the tests compare
the two field by field.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

MAX_ROLES: Final = 4
MAX_POOLS: Final = 8
MAX_INLINE: Final = 256
MAX_DIMS: Final = 9
MAX_KINDS: Final = 8
MAX_ARRAYS: Final = 256
MAX_TABLE_POOLS: Final = 128
"""Pools of one launch of `block_offsets`; more take several."""

MAX_UNITS: Final = 2**31 - 1
"""Largest number that `quotient` of the kernels divides, and so of units in one launch."""

Fields = np.dtype[Any]


def _struct(*fields: tuple[str, Any] | tuple[str, Any, int]) -> Fields:
    return np.dtype(list(fields), align=True)


DIVIDER: Final = _struct(("mul", np.uint32), ("shift", np.uint32), ("div", np.uint32))
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
PATHS: Final = _struct(
    ("cells", np.uint64),
    ("row_stride", np.int64),
    *((name, np.uint64) for name in ("rows", "first", "width", "base", "own")),
    *((name, np.uint32) for name in ("num_rows", "num_cells", "num_positions", "reserved")),
)
STEP_PATHS_ARGS: Final = _struct(
    ("paths", PATHS),
    ("valid", np.uint64),
    ("parents", np.uint64),
    *((name, np.uint32) for name in ("num_parents", "max_width", "shift", "reserved")),
)
TAKE_PATHS_ARGS: Final = _struct(
    ("paths", PATHS), ("out", np.uint64), ("num_units", np.uint32), ("columns", DIVIDER)
)
MAP_PATHS_ARGS: Final = _struct(
    ("map", MAP_ARGS),
    ("cells", np.uint64),
    ("cell_stride", np.int64),
    *((name, np.uint64) for name in ("first", "width", "base", "own")),
    ("num_cell_rows", np.uint32),
    ("num_cells", np.uint32),
)
MOVE_ARGS: Final = _struct(
    ("src", np.uint64),
    ("dst", np.uint64),
    ("num_units", np.uint32),
    ("token_units", DIVIDER),
    ("head_units", DIVIDER),
    ("reserved", np.uint32),
    ("pages", PAGES),
)
TABLE_POOL: Final = _struct(
    ("group", np.int32), ("scale", np.int32), ("kv_offset", np.int32), ("expansion", DIVIDER)
)
OFFSET_ARGS: Final = _struct(
    ("tables", np.uint64),
    ("group_stride", np.int64),
    ("row_stride", np.int64),
    ("rows", np.uint64),
    ("out", np.uint64),
    *((name, np.uint32) for name in ("table_rows", "table_blocks", "num_rows")),
    *((name, np.uint32) for name in ("out_rows", "out_pages")),
    ("no_page", np.int32),
    ("pools", TABLE_POOL, MAX_TABLE_POOLS),
)
ROW_PAGES_ARGS: Final = _struct(
    ("table", np.uint64),
    ("row_stride", np.int64),
    *((name, np.uint64) for name in ("rows", "starts", "ends")),
    *((name, np.uint64) for name in ("pages", "bounds", "lens", "count")),
    *((name, np.uint32) for name in ("num_rows", "num_pages", "table_rows", "max_tokens")),
    *((name, np.int32) for name in ("scale", "offset", "no_page")),
    ("block_rows", np.uint32),
    ("page_tokens", DIVIDER),
    ("expansion", DIVIDER),
)
TOKEN_SLOT_ARGS: Final = _struct(
    ("mapping", np.uint64),
    ("out", np.uint64),
    ("scale", np.int64),
    ("offset", np.int64),
    ("num_tokens", np.int64),
)
LATCH_ARGS: Final = _struct(("flag", np.uint64), ("gave_up", np.uint64), ("max_cycles", np.int64))
DELAY_ARGS: Final = _struct(("cycles", np.int64))
BUSY_ARGS: Final = _struct(("out", np.uint64), ("rounds", np.int64))
