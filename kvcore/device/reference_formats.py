"""The NumPy reference of page tables in other forms: what the kernels must do, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.device.formats import PageNumbers, PoolNumbers, RowRanges
from kvcore.device.parts import Int32, Int64
from kvcore.ids import NO_SLOT

LONGEST = 2**31 - 1  # tokens of a row


def block_offsets(
    tables: Int32, rows: Int32, out: Int32, pools: Sequence[PoolNumbers], no_page: int
) -> None:
    """Page indices of K and V, pool by pool."""
    out[...] = no_page
    _, num_rows, num_blocks = tables.shape
    real = np.flatnonzero((rows >= 0) & (rows < num_rows))
    for target, pool in zip(out, pools, strict=True):
        count = min(num_blocks * pool.expansion, out.shape[3])
        block, within = np.divmod(np.arange(count), pool.expansion)
        slots = tables[pool.layer_group][rows[real][:, None], block]
        first = slots * pool.scale + within
        for plane, offset in enumerate((0, pool.kv_offset)):
            target[real, plane, :count] = np.where(slots < 0, no_page, first + offset)


def csr_pages(
    table: Int32,
    ranges: RowRanges,
    indptr: Int32,
    indices: Int32,
    last_page_len: Int32,
    numbers: PageNumbers,
    page_tokens: int,
) -> None:
    """The pages of the rows one behind the other."""
    tokens = row_tokens(table, ranges, numbers.expansion * page_tokens)
    pages = -(-tokens // page_tokens)
    indptr[0], indptr[1:] = 0, np.cumsum(pages)
    last_page_len[...] = np.where(pages > 0, tokens - (pages - 1) * page_tokens, 0)
    which = np.repeat(np.arange(pages.size), pages)
    page = np.arange(which.size) - (np.cumsum(pages) - pages)[which]
    found = _numbers_of(table, ranges.rows[which], page, numbers, NO_SLOT)
    indices[: found.size] = found[: indices.size]


def ragged_pages(
    table: Int32,
    ranges: RowRanges,
    page_indices: Int32,
    cu_q_lens: Int32,
    kv_lens: Int32,
    num_seqs: Int32,
    numbers: PageNumbers,
    page_tokens: int,
    no_page: int,
) -> None:
    """The pages of the rows as a dense table."""
    tokens = row_tokens(table, ranges, numbers.expansion * page_tokens)
    page_indices[...] = no_page
    row, page = np.nonzero(np.arange(page_indices.shape[1]) < -(-tokens[:, None] // page_tokens))
    page_indices[row, page] = _numbers_of(table, ranges.rows[row], page, numbers, no_page)
    cu_q_lens[0], cu_q_lens[1:] = 0, ranges.ends
    kv_lens[...] = tokens
    num_seqs[...] = np.count_nonzero((ranges.rows >= 0) & (ranges.rows < len(table)))


def token_slots(mapping: Int32, out: Int64, scale: int, offset: int) -> None:
    """The number of each token's place."""
    slot, token = mapping.astype(np.int64).T
    out[...] = np.where(slot < 0, -1, slot * scale + offset + token)


def row_tokens(table: Int32, ranges: RowRanges, block_tokens: int) -> NDArray[np.int64]:
    """Tokens of each row of a batch when its step is done."""
    num_rows, num_blocks = table.shape
    new = np.diff(ranges.ends.astype(np.int64), prepend=0)
    tokens = np.clip(ranges.starts + new, 0, min(num_blocks * block_tokens, LONGEST))
    return np.where((ranges.rows >= 0) & (ranges.rows < num_rows), tokens, 0)


def _numbers_of(
    table: Int32, rows: Int32, page: NDArray[np.intp], numbers: PageNumbers, no_page: int
) -> Int32:
    """Indices of pages of some rows."""
    block, within = np.divmod(page, numbers.expansion)
    slots = table[rows, block]
    index = slots * numbers.scale + numbers.offset + within
    return np.where(slots < 0, no_page, index).astype(np.int32)
