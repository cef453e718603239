"""Page tables in other forms on the devices without a GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcore.device import reference_formats as reference
from kvcore.device.checks import check_block_offsets, check_row_pages, check_token_slots
from kvcore.device.formats import FormatOperations, PageNumbers, PoolNumbers, RowRanges
from kvcore.device.parts import Array, Stream


class HostFormats(FormatOperations):
    """The contract on NumPy."""

    @abstractmethod
    def _submit(self, stream: Stream, label: str, work: Callable[..., None], *args: Any) -> None:
        """Enqueues work."""

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
        args = tables, rows, out, tuple(pools), no_page
        check_block_offsets(*args, np.ndarray)
        self._submit(stream, "block_offsets", reference.block_offsets, *args)

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
        arrays = {"indptr": indptr, "last_page_len": last_page_len, "indices": indices}
        check_row_pages(table, ranges, arrays, numbers, page_tokens, -1, np.ndarray)
        args = table, ranges, indptr, indices, last_page_len, numbers, page_tokens
        self._submit(stream, "csr_pages", reference.csr_pages, *args)

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
        outs = page_indices, cu_q_lens, kv_lens, num_seqs
        names = "page_indices", "cu_q_lens", "kv_lens", "num_seqs"
        arrays = dict(zip(names, outs, strict=True))
        check_row_pages(table, ranges, arrays, numbers, page_tokens, no_page, np.ndarray)
        args = table, ranges, *outs, numbers, page_tokens, no_page
        self._submit(stream, "ragged_pages", reference.ragged_pages, *args)

    def token_slots(
        self, mapping: Array, out: Array, *, scale: int, offset: int = 0, stream: Stream
    ) -> None:
        check_token_slots(mapping, out, scale, offset, np.ndarray)
        self._submit(stream, "token_slots", reference.token_slots, mapping, out, scale, offset)
