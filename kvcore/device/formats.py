"""The part of the device contract that gives page tables the forms that attention kernels read.

`N` rows of a batch, `R` rows of a page table, `G` layer groups, `B` blocks per row, `C` pages per
row. Where pages are finer than blocks, a block has `expansion` of them one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.device.parts import Array, Stream


class PageNumbers(NamedTuple):
    """How slots become page indices: page e of slot s has `s * scale + offset + e`."""

    scale: int = 1
    offset: int = 0
    expansion: int = 1
    """Pages of a slot's buffer."""


class PoolNumbers(NamedTuple):
    """One pool of a block-offset table: page e of slot s has K at `s * scale + e`."""

    layer_group: int
    scale: int
    kv_offset: int
    """What V has more."""

    expansion: int
    """Pages of a slot's buffer."""


class RowRanges(NamedTuple):
    """The rows of a batch and the tokens of a step, as int32 arrays `[N]` on the device.

    Row i has `starts[i] + ends[i] - ends[i-1]` tokens when the step is done (`ends[-1] = 0`), at
    least 0 and at most what a row of the table has room for.
    """

    rows: Array
    """Table row of each; negative, or at or after R, for padding, which has no tokens."""

    starts: Array
    """Position of the first token of the step."""

    ends: Array
    """Tokens of the step in this row and all before it; does not decrease."""


class FormatOperations(ABC):
    """Page tables in other forms. One launch each; all can be captured in a graph.

    What changes from step to step is read from device memory. Indices must fit int32.
    """

    @abstractmethod
    def block_offsets(
        self,
        tables: Array,
        rows: Array,
        out: Array,
        pools: Sequence[PoolNumbers],
        *,
        no_page: int = -1,
        stream: Stream,
    ) -> None:
        """Page indices of K and V for some rows, in all `P` pools.

        `tables` is an int32 view `[G, R, B]` whose last axis is contiguous, `rows` int32 `[M]`,
        `out` int32 `[P, N, 2, C]` with N at least M. `out[p, i, 0, c]` is the index of page c of
        table row `rows[i]` in pool p, and `out[p, i, 1, c]` is `kv_offset` more. `no_page` stands
        in both where i is at or after M, the row or the block is outside the table, or the cell
        is negative. Up to 128 pools are one launch.
        """

    @abstractmethod
    def csr_pages(
        self,
        table: Array,
        ranges: RowRanges,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        *,
        numbers: PageNumbers,
        page_tokens: int,
        stream: Stream,
    ) -> None:
        """The pages of each row up to the end of its tokens, one row after the other.

        `table` is an int32 view `[R, B]` whose last axis is contiguous. `indptr` int32 `[N + 1]`:
        row i has the indices from `indptr[i]` to `indptr[i + 1]`. Those at or after the end of
        `indices` int32 `[K]` are dropped, and what is behind the last one stays as it is. -1 where
        a cell is negative. `last_page_len` int32 `[N]`: tokens in the last page, 0 for a row
        without tokens. There are fewer than 2**31 pages in all.
        """

    @abstractmethod
    def ragged_pages(
        self,
        table: Array,
        ranges: RowRanges,
        page_indices: Array,
        cu_q_lens: Array,
        kv_lens: Array,
        num_seqs: Array,
        *,
        numbers: PageNumbers,
        page_tokens: int,
        no_page: int = 0,
        stream: Stream,
    ) -> None:
        """The pages of each row up to the end of its tokens, as a dense table, and the lengths.

        `table` is an int32 view `[R, B]` whose last axis is contiguous. `page_indices` int32
        `[N, C]`: `no_page` behind the last page of a row, and where a cell is negative.
        `cu_q_lens` int32 `[N + 1]` is 0 and then `ends`. `kv_lens` int32 `[N]`: tokens of each
        row. `num_seqs` int32 `[1]`: rows that are not padding.
        """

    @abstractmethod
    def token_slots(
        self, mapping: Array, out: Array, *, scale: int, offset: int = 0, stream: Stream
    ) -> None:
        """Where each token lies in a pool, counted in tokens.

        `mapping` int32 `[N, 2]` as from `map_tokens`, `out` int64 `[N]`: `slot * scale + offset +
        token`, and -1 where the slot is negative.
        """
