"""What argument blocks of kernels are made of, and those of the kernels that write page tables.

Those of all other kernels stand in `kvcore.device.cuda.kernels`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Fields = np.dtype[Any]

MAX_TABLE_POOLS: Final = 128
"""Pools of one launch of `block_offsets`; more take several."""


def struct(*fields: tuple[str, Any] | tuple[str, Any, int]) -> Fields:
    """The layout of a C++ struct."""
    return np.dtype(list(fields), align=True)


DIVIDER: Final = struct(("mul", np.uint32), ("shift", np.uint32), ("div", np.uint32))
TABLE_POOL: Final = struct(
    ("group", np.int32), ("scale", np.int32), ("kv_offset", np.int32), ("expansion", DIVIDER)
)
OFFSET_ARGS: Final = struct(
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
ROW_PAGES_ARGS: Final = struct(
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
TOKEN_SLOT_ARGS: Final = struct(
    ("mapping", np.uint64),
    ("out", np.uint64),
    ("scale", np.int64),
    ("offset", np.int64),
    ("num_tokens", np.int64),
)
