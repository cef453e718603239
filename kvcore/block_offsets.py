"""Block-offset tables of a batch, written on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.batch_tables import BatchTables, check_no_page, table_rows
from kvcore.errors import wrong, wrong_type
from kvcore.ids import NO_SLOT

if TYPE_CHECKING:
    from kvcore.device.base import Array, Stream
    from kvcore.runtime import Runtime
    from kvcore.steps import Step

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

ROWS = 0
MOST_KEPT = 256


class BlockOffsets:
    """The part of a `Batch` that writes block-offset tables, and knows their rows."""

    _runtime: Runtime
    _step: Step | None
    _words: Int32
    _parts: list[Array]

    if TYPE_CHECKING:

        def _on(self, stream: object, *, after_beams: bool = False) -> Stream: ...

    @property
    def num_table_rows(self) -> int:
        """Rows of the present step in `block_offsets`; 0 before the first."""
        return 0 if self._step is None else self._num_listed

    def block_offsets(
        self,
        tables: BatchTables,
        *,
        no_page: int = NO_SLOT,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Page indices of K and V, `[pools, rows, 2, blocks]`, as TensorRT-LLM's kernels read them.

        What `BatchTables.offsets` gives for the caches, `num_contexts` and `beam_width` that
        `prepare` was called with. Pages taken since are not there.

        Parameters
        ----------
        tables : BatchTables
            Of the same manager.
        no_page : int
            What stands where there is no page: -1, or 0 for kernels that know the lengths.
        out : int32 array [pools, at least rows, 2, at least blocks], optional
            On the device, C-contiguous. Rows and blocks beyond are filled with `no_page`. Default:
            a new one with as many blocks as the longest cache has pages, rounded up to a multiple
            of 4; its memory is recycled in the order of `stream`.
        stream : optional
            Default: `prepare`'s.

        Returns
        -------
        array
            `out`, or the new one.

        Raises
        ------
        ValueError, TypeError
            `out` is too small or of another kind; `tables` is another manager's.
        StateError
            The batch holds no step.

        Notes
        -----
        One launch for all pools. Can be captured in a graph, also behind a beam step.
        """
        runtime = self._runtime
        if not isinstance(tables, BatchTables) or tables._runtime is not runtime:
            raise wrong_type("tables", "BatchTables of this manager", tables)
        check_no_page(no_page)
        with runtime.lock:
            on = self._on(stream, after_beams=True)
            blocks, rows = self._most_blocks(), self._num_listed
            if out is None:
                out = runtime.device.empty(tables.shape(rows, blocks), np.int32, stream=on)
            target = runtime.device.as_array(out, stream=on, writable=True, name="out")
            tables.check_shape(target.shape, rows, blocks)
            listed = self._first(self._table_rows, target.shape[1])
            twin, numbers = runtime.device_tables().by_group, tables.numbers
            runtime.device.block_offsets(twin, listed, target, numbers, no_page=no_page, stream=on)
            return out

    def _most_blocks(self) -> int:
        """Blocks of the longest sequence of the step."""
        if self._step is None:
            return 0
        return int(self._runtime.control.seqs.num_blocks[self._step.sequences].max(initial=0))

    # -- rows for block offsets --------------------------------------------------------------------

    def _list_rows(self, words: Int32, staged: Array) -> None:
        """Where the host writes rows that are not every cache's own, and where they arrive."""
        self._listed_words, self._num_listed = words, 0
        self._table_rows = staged if words.size else self._parts[ROWS]
        self._kept: dict[Any, Any] = {}  # views and pages that were asked for

    def _listed(
        self, sequences: Index, num_contexts: int, beam_width: int | Sequence[int] | None
    ) -> Index | None:
        """The rows for `block_offsets`; None for every cache's own."""
        if beam_width is None and type(num_contexts) is int and num_contexts == 0:
            return None
        rows = table_rows(self._runtime, sequences, num_contexts, beam_width)
        most = self._listed_words.size
        if not most:
            own, _ = self._runtime.control.batch_rows(sequences)
            if not np.array_equal(rows, own):
                remedy = "create the batch with max_table_rows"
                raise wrong("beam_width", "every cache's own rows", rows.tolist(), remedy)
            return None
        if rows.size > most:
            remedy = "create a larger batch"
            raise wrong("beam_width", f"at most max_table_rows={most} rows", rows.size, remedy)
        return rows

    def _write_list(self, listed: Index | None, own: int) -> None:
        """Writes the rows for `block_offsets` of a step with `own` rows into the host's words."""
        self._num_listed = own if listed is None else listed.size
        if self._listed_words.size:
            count = self._num_listed
            self._listed_words[:count] = self._words[ROWS, :own] if listed is None else listed
            self._listed_words[count:] = NO_SLOT

    # -- kept views -------------------------------------------------------------------------------

    def _first(self, array: Array, count: int) -> Array:
        """The first entries of one of the batch's arrays: the same object for the same number."""
        key = id(array), count
        view = self._kept.get(key)
        if view is None:
            view = self._keep(key, array[:count])
        return view

    def _keep(self, key: Any, value: Any) -> Any:
        if len(self._kept) > MOST_KEPT:
            self._kept.clear()
        self._kept[key] = value
        return value
