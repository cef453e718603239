"""The rows of a batch as attention kernels read them: block offsets, CSR, ragged pages, slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.batch_tables import check_no_page
from kvcore.block_offsets import BlockOffsets
from kvcore.checks import LONGEST, as_choice, as_int, as_tuple
from kvcore.device.base import RowRanges
from kvcore.errors import StateError, wrong, wrong_type
from kvcore.ids import PageIndexMode
from kvcore.layer_config import LAYOUTS
from kvcore.page_numbers import Pages, find_pages

if TYPE_CHECKING:
    from kvcore.device.base import Array, Stream

Int32 = NDArray[np.int32]

STARTS, ENDS = 1, 2
INT32: Final = np.dtype(np.int32)


class CsrPages(NamedTuple):
    """The pages of a batch's rows one behind the other, as FlashInfer reads them."""

    kv_indptr: Any
    """int32 `[rows + 1]` on the device: row i has the indices from `kv_indptr[i]` on."""
    kv_indices: Any
    """int32 `[pages]` on the device."""
    kv_last_page_len: Any
    """int32 `[rows]` on the device: tokens in a row's last page; 0 for a row without tokens."""
    host_indptr: Int32
    """`kv_indptr` on the host."""


class RaggedPages(NamedTuple):
    """The pages of a batch's rows as a dense table, with lengths: JAX's ragged paged attention."""

    page_indices: Any
    """int32 `[rows, pages]` on the device."""
    cu_q_lens: Any
    """int32 `[rows + 1]` on the device: row i has the step's tokens from `cu_q_lens[i]` on."""
    kv_lens: Any
    """int32 `[rows]` on the device: tokens of a row when the step is done; 0 for padding."""
    num_seqs: Any
    """int32 `[1]` on the device: rows that are not padding."""


class Formats(BlockOffsets):
    """The part of a `Batch` that writes tables for kernels of others, one launch each.

    They are read from the device's page table, so they are right at once after a beam step, also
    while the host does not know the rows. A beam is a row. All may be captured in a graph; then
    give `out`, with room for the largest step: what is beyond the present one is padding. An `out`
    of another library is written after what that has enqueued on it, but for captures; readers of
    the device's own arrays are the caller's to order before `stream`.
    """

    max_rows: int
    max_tokens: int

    if TYPE_CHECKING:

        @property
        def num_rows(self) -> int: ...

        @property
        def num_tokens(self) -> int: ...

        def _mapping_view(self, group: int, tokens: int) -> Array: ...

    # -- pages up to the tokens --------------------------------------------------------------------

    @property
    def kv_lens(self) -> Int32:
        """Tokens of each row when the step is done, `start + num_tokens` of `prepare`.

        int32 `[num_rows]` on the host, a new array. O(rows).
        """
        size = self.num_rows
        new = np.diff(self._words[ENDS, :size], prepend=np.int32(0))
        lens: Int32 = self._words[STARTS, :size] + new
        return lens

    def host_indptr(self, page_tokens: int | None = None, *, rows: int | None = None) -> Int32:
        """Where the pages of each row begin in a CSR list, int32 `[rows + 1]` on the host.

        The `kv_indptr` of `csr_pages`, also for a step whose list is made by a graph. `page_tokens`
        are the tokens of a page, by default a block's; `rows` the rows of the list, padding
        included, by default `num_rows`, at most `max_rows`. O(rows); launches nothing.
        """
        block = self._runtime.layout.tokens_per_block
        size = as_int("page_tokens", block if page_tokens is None else page_tokens, 1, LONGEST)
        least, high = self.num_rows, self.max_rows
        most = as_int("rows", least if rows is None else rows, least, high)
        indptr = np.zeros(most + 1, np.int32)
        lens = self.kv_lens
        np.cumsum(-(-lens // size), out=indptr[1 : lens.size + 1])
        indptr[lens.size + 1 :] = indptr[lens.size]
        return indptr

    def csr_pages(
        self,
        layers: int | Sequence[int],
        roles: Sequence[str] = ("key", "value"),
        *,
        layout: str,
        mode: PageIndexMode | None = None,
        out: Sequence[Any] | None = None,
        stream: object = None,
    ) -> CsrPages:
        """The pages of each row one behind the other, as FlashInfer's wrappers read them.

        Parameters
        ----------
        layers : int or sequence of int
            Whose pages: one layer, or several that have the same page numbers.
        roles : sequence of str
            Which of their buffers.
        layout : str
            "NHD" or "HND", the `kv_layout` of the kernel. The buffers must be declared so.
        mode : PageIndexMode, optional
            How pages are numbered, see `KVCacheManager.get_mem_pool_base_address`. Default: by
            their slot, for arrays from `get_pages`.
        out : sequence of three int32 arrays, optional
            `kv_indptr [n + 1]`, `kv_indices [at least all pages]` and `kv_last_page_len [n]` on the
            device, n from `num_rows` to `max_rows`; a `CsrPages` of before will do. Rows beyond
            have no pages, indices beyond are left alone. Default: new ones, whose memory is
            recycled in the order of `stream`.
        stream : optional
            Default: `prepare`'s.

        Raises
        ------
        ValueError, TypeError
            The buffers are unknown, declared otherwise or differ in their numbers; `out` is too
            small or of another kind.
        StateError
            The batch holds no step, or its rows are incomplete (`beam_mode="indirection"`).

        Notes
        -----
        One launch; a row's pages are shared out among several thread blocks.
        """
        runtime = self._runtime
        with runtime.lock:
            if as_choice("layout", layout, LAYOUTS) == "NH2D":
                text = "'NHD' or 'HND', since FlashInfer has keys and values in pages of their own"
                raise wrong("layout", text, layout, "use ragged_pages")
            pages = self._pages_of(layers, roles, layout, mode)
            on = self._on(stream, after_beams=True)
            self._check_complete("csr_pages", on)
            rows, given, arrays = self._given(out, 3, on)
            host = self.host_indptr(pages.tokens, rows=rows)
            total = int(host[-1])
            if out is None:
                given = arrays = self._new([(rows + 1,), (total,), (rows,)], on)
            shapes = [array.shape for array in arrays]
            if shapes[0] != (rows + 1,) or len(shapes[1]) != 1 or shapes[1][0] < total:
                text = f"[{rows + 1}], [at least {total}] and [{rows}]"
                raise wrong("out", text, [list(shape) for shape in shapes])
            runtime.device.csr_pages(
                self._table(pages.layer_group),
                self._ranges(rows),
                *arrays,
                numbers=pages.numbers,
                page_tokens=pages.tokens,
                stream=on,
            )
            indptr, indices, last = given
            return CsrPages(indptr, indices, last, host)

    def ragged_pages(
        self,
        layers: int | Sequence[int],
        roles: Sequence[str],
        *,
        layout: str,
        mode: PageIndexMode | None = None,
        num_pages: int | None = None,
        no_page: int = 0,
        out: Sequence[Any] | None = None,
        stream: object = None,
    ) -> RaggedPages:
        """The pages of each row as a dense table, with the lengths that go with it.

        What JAX's ragged paged attention reads. With `no_page=-1` it is the block table,
        `query_start_loc` and `seq_lens` of vLLM's and FlashAttention's kernels.

        Parameters
        ----------
        layers, mode, stream
            As for `csr_pages`.
        roles : sequence of str
            Which of their buffers.
        layout : str
            What the kernel reads, as the buffers are declared: "NH2D" for JAX's
            `ragged_paged_attention`, "NHD" or "HND" for those that read keys and values apart.
        num_pages : int, optional
            Pages of a row of a new table. Default: those of the longest row.
        no_page : int
            What stands behind the last page of a row: 0, since JAX's kernels take any entry for a
            page, or -1.
        out : sequence of four int32 arrays, optional
            `page_indices [n, at least the longest row's]`, `cu_q_lens [n + 1]`, `kv_lens [n]` and
            `num_seqs [1]` on the device, n from `num_rows` to `max_rows`; a `RaggedPages` of before
            will do. Rows beyond are padding. Default: new ones, whose memory is recycled in the
            order of `stream`.

        Raises
        ------
        ValueError, TypeError, StateError
            As for `csr_pages`.

        Notes
        -----
        One launch.
        """
        runtime = self._runtime
        with runtime.lock:
            check_no_page(no_page)
            pages = self._pages_of(layers, roles, layout, mode)
            on = self._on(stream, after_beams=True)
            self._check_complete("ragged_pages", on)
            rows, given, arrays = self._given(out, 4, on)
            least = -(-int(self.kv_lens.max(initial=0)) // pages.tokens)
            columns = as_int("num_pages", least if num_pages is None else num_pages, least, LONGEST)
            if out is None:
                given = arrays = self._new([(rows, columns), (rows + 1,), (rows,), (1,)], on)
            shapes = [array.shape for array in arrays]
            fits = len(shapes[0]) == 2 and shapes[0][0] == rows and shapes[0][1] >= least
            if not fits or shapes[1:] != [(rows + 1,), (rows,), (1,)]:
                text = f"[{rows}, at least {least}], [{rows + 1}], [{rows}] and [1]"
                raise wrong("out", text, [list(shape) for shape in shapes])
            runtime.device.ragged_pages(
                self._table(pages.layer_group),
                self._ranges(rows),
                *arrays,
                numbers=pages.numbers,
                page_tokens=pages.tokens,
                no_page=no_page,
                stream=on,
            )
            return RaggedPages(*given)

    # -- slots -------------------------------------------------------------------------------------

    def slot_mapping(
        self,
        layers: int | Sequence[int],
        roles: Sequence[str] = ("key", "value"),
        *,
        layout: str,
        mode: PageIndexMode | None = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Where each token of the step goes, counted in tokens, as vLLM's cache kernels read it.

        Parameters
        ----------
        layers, roles, mode, stream
            As for `csr_pages`.
        layout : str
            What the kernel writes, as the buffers are declared: "NHD", "HND" or "NH2D".
        out : int64 array [from num_tokens to max_tokens], optional
            On the device. Default: a new one of `num_tokens`, whose memory is recycled in the order
            of `stream`.

        Returns
        -------
        array
            `out`, or the new one: page times tokens of a page plus the token within; -1 for
            padding.

        Raises
        ------
        ValueError, TypeError
            As for `csr_pages`.
        StateError
            The batch holds no step.

        Notes
        -----
        One launch. The same as `mapping`, in one number.
        """
        runtime = self._runtime
        with runtime.lock:
            pages = self._pages_of(layers, roles, layout, mode)
            on, tokens = self._on(stream), self.num_tokens
            if out is None:
                out = runtime.device.empty((tokens,), np.int64, stream=on)
            target = runtime.device.as_array(out, stream=on, writable=True, name="out")
            size = target.shape[0] if target.ndim == 1 else -1
            if not tokens <= size <= self.max_tokens:
                raise wrong("out", f"[{tokens} to {self.max_tokens}]", list(target.shape))
            runtime.device.token_slots(
                self._mapping_view(pages.layer_group, size),
                target,
                scale=pages.numbers.scale * pages.tokens,
                offset=pages.numbers.offset * pages.tokens,
                stream=on,
            )
            return out

    # -- checks ------------------------------------------------------------------------------------

    def _pages_of(
        self,
        layers: int | Sequence[int],
        roles: Sequence[str],
        layout: str,
        mode: PageIndexMode | None,
    ) -> Pages:
        """The pages of some buffers, after a look at how those are declared."""
        named = layers if isinstance(layers, Sequence) else (layers,)
        numbers = tuple([as_int("layers", layer) for layer in named])
        names = as_tuple("roles", roles, str, "a role")
        if mode is not None and not isinstance(mode, PageIndexMode):
            raise wrong_type("mode", "a PageIndexMode or None", mode)
        key = numbers, names, as_choice("layout", layout, LAYOUTS), mode
        pages: Pages | None = self._kept.get(key)
        if pages is None:
            pages = self._keep(key, find_pages(self._runtime.layout, *key))
        return pages

    def _check_complete(self, call: str, on: Stream) -> None:
        """Raises `StateError` where a beam's row of the page table does not tell all its pages."""
        config, step = self._runtime.config, self._step
        if config.beam_mode != "indirection" or config.max_beam_width == 1 or step is None:
            return
        if step.owner.size > step.sequences.size or on.is_capturing():
            raise StateError(
                f"{call}: with beam_mode='indirection' a beam finds pages in the rows of others, "
                "which this format can't express; use block_offsets() with cache_indirection() "
                "and a kernel that reads both, or beam_mode='fork'"
            )

    # -- arrays ------------------------------------------------------------------------------------

    def _new(self, shapes: list[tuple[int, ...]], on: Stream) -> list[Array]:
        device = self._runtime.device
        return [device.empty(shape, np.int32, stream=on) for shape in shapes]

    def _given(
        self, out: Sequence[Any] | None, count: int, on: Stream
    ) -> tuple[int, list[Any], list[Array]]:
        """The rows to write, what the caller gave for them, and that as arrays of the device.

        The third array has an entry for each row.
        """
        if out is None:
            return self.num_rows, [], []
        if not isinstance(out, Sequence) or len(out) < count:
            raise wrong_type("out", f"a sequence of {count} arrays", out)
        given = list(out[:count])
        device = self._runtime.device
        arrays = [
            device.as_array(array, stream=on, writable=True, name=f"out[{i}]")
            for i, array in enumerate(given)
        ]
        for i, array in enumerate(arrays):
            if array.dtype != INT32 or not array.flags.c_contiguous:
                got = f"{array.dtype} {list(array.shape)} with strides {array.strides}"
                raise wrong(f"out[{i}]", "a C-contiguous array of dtype int32", got)
        shape, low, high = arrays[2].shape, self.num_rows, self.max_rows
        if len(shape) != 1 or not low <= shape[0] <= high:
            raise wrong("out[2]", f"[{low} to {high}], an entry for each row", list(shape))
        return shape[0], given, arrays

    def _ranges(self, count: int) -> RowRanges:
        """The first rows of the step."""
        rows, starts, ends = (self._first(part, count) for part in self._parts[: ENDS + 1])
        return RowRanges(rows, starts, ends)

    def _table(self, group: int) -> Array:
        """The page table of a layer group."""
        table = self._kept.get(group)
        if table is None:
            table = self._keep(group, self._runtime.device_tables().by_group[group])
        return table
