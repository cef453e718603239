"""Block-offset tables of mixed batches, for kernels that want K and V page indices per row."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_bool, as_int, as_items, as_tuple
from kvcore.device.base import PoolNumbers
from kvcore.errors import CacheCapacityError, wrong, wrong_type
from kvcore.ids import NO_SLOT, LayerGroupId, LayerId, align_up

if TYPE_CHECKING:
    from kvcore.kv_cache import KVCache
    from kvcore.layout import BufferPlace
    from kvcore.runtime import Runtime

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]

WHOLE_VECTORS = 4  # cells of 16 bytes, which kernels copy at a time


class IndexMapper:
    """Gives each request an index for its life, and the rows of a batch in a table by index.

    For tables that an engine keeps itself: request `index` owns rows `index * max_beam_width + j`.

    Parameters
    ----------
    max_batch : int
        Requests at a time.
    max_beam_width : int
        Rows of each request.
    max_copy_width : int, optional
        Most rows a request may have in a batch, where that is more because row 0 is repeated: the
        table of a cross cache has one row a request, whatever the decoder's width. Default:
        `max_beam_width`.

    Raises
    ------
    ValueError, TypeError
        `max_copy_width` is below `max_beam_width`, or something is no int of at least 1.

    Examples
    --------
    >>> mapper = IndexMapper(4, max_beam_width=4)
    >>> [mapper.add(name) for name in "BCA"]
    [0, 1, 2]
    >>> mapper.rows("ABC", num_contexts=1, beam_width=3)
    array([8, 0, 1, 2, 4, 5, 6], dtype=int32)
    """

    def __init__(
        self, max_batch: int, max_beam_width: int, max_copy_width: int | None = None
    ) -> None:
        self.max_beam_width = as_int("max_beam_width", max_beam_width, 1)
        copies = self.max_beam_width if max_copy_width is None else max_copy_width
        self.max_copy_width = as_int("max_copy_width", copies, self.max_beam_width)
        count = as_int("max_batch", max_batch, 1, (2**31 - 1) // self.max_beam_width)
        self._free = list(range(count - 1, -1, -1))
        self._index: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def add(self, request: Hashable) -> int:
        """An index for a new request; the last one given back is the next one handed out.

        Raises `ValueError` if it has one, `CacheCapacityError` if none is left.
        """
        if self._found(request) is not None:
            raise wrong("request", "a new request", request, "remove() it first")
        if not self._free:
            raise CacheCapacityError(f"all {len(self)} indices are in use; remove() a request")
        index = self._index[request] = self._free.pop()
        return index

    def remove(self, request: Hashable) -> None:
        """Gives the index of a request back. Raises `ValueError` if it has none."""
        self._free.append(self.index(request))
        del self._index[request]

    def index(self, request: Hashable) -> int:
        """The index of a request. Raises `ValueError` if it has none."""
        found = self._found(request)
        if found is None:
            raise wrong("request", "a request that was added", request)
        return found

    def _found(self, request: Hashable) -> int | None:
        try:
            return self._index.get(request)
        except TypeError:
            raise wrong_type("request", "what can be a key of a dictionary", request) from None

    def rows(
        self,
        requests: Sequence[Hashable],
        num_contexts: int,
        beam_width: int | Sequence[int],
        *,
        replicate_beam_zero: bool = False,
    ) -> Int32:
        """The table rows of a batch: one for each context, `beam_width` for each generation.

        Parameters
        ----------
        requests : sequence of hashable
            Contexts first.
        num_contexts : int
            How many of them are contexts.
        beam_width : int or sequence of int [number of generations]
            One width for all, or one each.
        replicate_beam_zero : bool
            Every beam reads row 0.

        Returns
        -------
        int32 array [rows]
            A new one: a copy may still be reading the last.

        Raises
        ------
        ValueError, TypeError
            A request has no index; a width is above `max_copy_width` or, not replicating,
            `max_beam_width`: those rows would be another request's.
        """
        named = isinstance(requests, str)  # one letter each
        names = list(requests) if named else as_items("requests", requests, "a request")
        first = np.array([self.index(name) for name in names], np.intp)
        replicate = as_bool("replicate_beam_zero", replicate_beam_zero)
        high = self.max_copy_width if replicate else self.max_beam_width
        widths = batch_widths(len(names), num_contexts, beam_width, high)
        owner, beam = _rows_and_beams(widths)
        chosen = first[owner] * self.max_beam_width + (0 if replicate else beam)
        return chosen.astype(np.int32)


def batch_widths(
    count: int, num_contexts: int, beam_width: int | Sequence[int], high: int
) -> Index:
    """The number of rows of each of `count` requests, contexts first; checked against `high`."""
    contexts = as_int("num_contexts", num_contexts, 0, count)
    widths: Index = np.ones(count, np.intp)
    if isinstance(beam_width, Iterable):
        some = as_items("beam_width", beam_width, "an int")
        each = [as_int(f"beam_width[{i}]", w, 1, high) for i, w in enumerate(some)]
        if len(each) != count - contexts:
            raise wrong("beam_width", f"{count - contexts} entries, one per generation", len(each))
        widths[contexts:] = each
    else:
        widths[contexts:] = as_int("beam_width", beam_width, 1, high)
    return widths


def _rows_and_beams(widths: Index) -> tuple[Index, Index]:
    """Whose each row of a batch is, and which beam of it."""
    owner = np.repeat(np.arange(widths.size), widths)
    return owner, np.arange(owner.size) - (np.cumsum(widths) - widths)[owner]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePool:
    """One entry of the first axis of a block-offset table.

    K is `slot * scale` and V is `slot * scale + kv_offset`, in pages of `page_stride` bytes counted
    from `address`. Where pages are finer than the block, these are the first of `expansion`.
    """

    address: int
    """Of the first layer's K in slot 0."""
    page_stride: int
    scale: int
    kv_offset: int
    expansion: int
    layer_group: LayerGroupId
    layers: tuple[LayerId, ...]
    layer_offsets: tuple[int, ...]
    """What to add for each of `layers`, in pages."""


class BatchTables:
    """Makes `[pools, rows, 2, blocks]` tables of page indices, K and V, for any batch.

    Contexts have one row each and generations one per beam, from the caches themselves: a row is
    found by the identity of its cache, wherever in the batch it stands. Made by
    `KVCacheManager.create_batch_tables`. `Batch.block_offsets` writes the same on the device.
    """

    def __init__(self, runtime: Runtime, roles: tuple[str, str]) -> None:
        self._runtime, self.roles = runtime, roles
        self.pools: tuple[TablePool, ...] = _table_pools(runtime, roles)
        self.numbers = tuple(
            PoolNumbers(its.layer_group, its.scale, its.kv_offset, its.expansion)
            for its in self.pools
        )
        """`pools`, as a device takes them."""
        self._expansion = max(pool.expansion for pool in self.pools)

    @property
    def layer_pools(self) -> dict[LayerId, tuple[int, int]]:
        """For each layer the entry of the first axis and the pages to add to its indices."""
        return {
            layer: (number, offset)
            for number, pool in enumerate(self.pools)
            for layer, offset in zip(pool.layers, pool.layer_offsets, strict=True)
        }

    def offsets(
        self,
        kv_caches: Sequence[KVCache],
        num_contexts: int = 0,
        beam_width: int | Sequence[int] | None = None,
        *,
        no_page: int = NO_SLOT,
        out: Int32 | None = None,
    ) -> Int32:
        """The table of a batch, from the host's rows.

        Parameters
        ----------
        kv_caches : sequence of KVCache
            Distinct and active, contexts first.
        num_contexts : int
            How many of them are contexts: one row each, of beam 0.
        beam_width : int or sequence of int [number of generations], optional
            Rows of the generations, one number for all or one each. A cache of one beam, as a cross
            cache is whatever the decoder's width, repeats its row; else it is the cache's own
            width. Default: every cache's own.
        no_page : int
            What stands where there is no page: -1, or 0 for TensorRT-LLM's kernels, which then read
            page 0 and must know the lengths.
        out : int32 array [pools, at least rows, 2, at least blocks], optional
            Where to write. Rows and blocks beyond are filled with `no_page`. Do not pass one that a
            copy is still reading.

        Returns
        -------
        int32 array [pools, rows, 2, blocks]
            `out`, or a new array with as many blocks as the longest cache has pages, rounded up to
            a multiple of 4.

        Raises
        ------
        ValueError, TypeError
            A width is neither the cache's own nor is that 1; `out` is too small.
        StateError
            `ParentsPending`: the parents of a beam step have not arrived yet.

        Notes
        -----
        O(pools * rows * blocks). Enqueues nothing.
        """
        check_no_page(no_page)
        runtime = self._runtime
        with runtime.lock:
            sequences = runtime.enter_with(kv_caches)
            runtime.refuse_pending(sequences.tolist(), "offsets")
            rows = table_rows(runtime, sequences, num_contexts, beam_width)
            seqs = runtime.control.seqs
            blocks = int(seqs.num_blocks[sequences].max(initial=0))
            if out is None:
                out = np.empty(self.shape(rows.size, blocks), np.int32)
            else:
                _check_out(out)
                self.check_shape(out.shape, rows.size, blocks)
            out[:] = no_page
            for target, pool in zip(out, self.pools, strict=True):
                slots = seqs.table[rows, pool.layer_group, :blocks]
                _write(target[: rows.size], slots, pool)
            return out

    def shape(self, rows: int, blocks: int) -> tuple[int, int, int, int]:
        """The shape of a table for so many rows of so many blocks."""
        rows, blocks = as_int("rows", rows, 0), as_int("blocks", blocks, 0)
        pages = align_up(blocks * self._expansion, WHOLE_VECTORS)
        return len(self.pools), rows, 2, pages

    def check_shape(self, given: tuple[int, ...], rows: int, blocks: int) -> None:
        """Raises `ValueError` unless a table of this shape has room for rows of so many blocks."""
        pages = blocks * self._expansion
        right = len(given) == 4 and (given[0], given[2]) == (len(self.pools), 2)
        if not right or given[1] < rows or given[3] < pages:
            expected = f"[{len(self.pools)}, at least {rows}, 2, at least {pages}]"
            raise wrong("out", expected, list(given))


def table_rows(
    runtime: Runtime,
    sequences: Index,
    num_contexts: int,
    beam_width: int | Sequence[int] | None,
) -> Index:
    """The rows of the page table that a batch consists of, as `BatchTables.offsets` names them."""
    seqs, count = runtime.control.seqs, sequences.size
    own = seqs.width[sequences]
    contexts = as_int("num_contexts", num_contexts, 0, count)
    asked = own[contexts:].tolist() if beam_width is None else beam_width
    widths = batch_widths(count, contexts, asked, 2**31 - 1)
    bad = np.flatnonzero((own != 1) & (own != widths))
    bad = bad[bad >= contexts]
    if bad.size:
        i = int(bad[0])
        expected = f"the width of kv_caches[{i}], {own[i]}, or a cache of one beam to repeat"
        raise wrong("beam_width", expected, int(widths[i]))
    owner, beam = _rows_and_beams(widths)
    rows: Index = seqs.rows[sequences[owner], np.minimum(beam, own[owner] - 1)]
    return rows


def check_no_page(no_page: int) -> None:
    """Raises `ValueError` or `TypeError` for anything but -1 and 0, which kernels know."""
    as_int("no_page", no_page, NO_SLOT, 0)


def _write(target: Int32, slots: Int32, pool: TablePool) -> None:
    """Fills `[rows, 2, blocks]` with the indices of `slots`, where there are any."""
    pages = np.repeat(slots, pool.expansion, axis=1)
    first = pages * pool.scale + np.arange(pages.shape[1]) % pool.expansion
    for plane, offset in enumerate((0, pool.kv_offset)):
        cells = target[:, plane, : pages.shape[1]]
        np.copyto(cells, first + offset, where=pages >= 0, casting="same_kind")


def _check_out(out: Int32) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.int32 or out.ndim != 4:
        raise wrong_type("out", "an int32 NumPy array of four dimensions", out)
    if not out.flags.writeable:
        raise wrong("out", "a writable array", "a read-only one")


def _table_pools(runtime: Runtime, roles: tuple[str, str]) -> tuple[TablePool, ...]:
    """Layers whose pages are found in the same way, in the order of the configuration."""
    names = as_tuple("roles", roles, str, "a role")
    if len(names) != 2:
        raise wrong("roles", "two roles, that of K and that of V", roles)
    places = runtime.layout.places
    members: dict[tuple[LayerGroupId, int, int, int], list[BufferPlace]] = {}
    for layer, role in places:
        if role != names[0]:
            continue
        key, value = places[layer, role], places.get((layer, names[1]))
        if value is None or (value.pool, value.expansion) != (key.pool, key.expansion):
            raise wrong("roles", f"K and V of layer {layer} in one pool", roles,
                        "give both buffers the same size")  # fmt: skip
        apart = (value.layer_offset - key.layer_offset) * key.expansion
        if apart < 0:  # V of slot 0 would have a negative index, which is no page
            raise wrong("roles", f"the buffer of K before that of V in layer {layer}", roles,
                        "declare them in this order")  # fmt: skip
        members.setdefault((key.layer_group, key.pool, key.expansion, apart), []).append(key)
    if not members:
        raise wrong("roles", "roles that a layer has", roles)
    return tuple(_pool_of(runtime, keys, which[3]) for which, keys in members.items())


def _pool_of(runtime: Runtime, keys: list[BufferPlace], kv_offset: int) -> TablePool:
    first = keys[0]
    memory = runtime.pools[first.pool_group][first.pool]
    scale = first.scale * first.expansion
    if scale * runtime.control.slots[first.pool_group].capacity > 2**31 - 1:
        raise wrong("roles", "page indices below 2**31", f"{scale} for each slot")
    return TablePool(
        address=memory.base + first.offset,
        page_stride=first.page_stride,
        scale=scale,
        kv_offset=kv_offset,
        expansion=first.expansion,
        layer_group=first.layer_group,
        layers=tuple(key.layer_id for key in keys),
        layer_offsets=tuple(
            (key.layer_offset - first.layer_offset) * first.expansion for key in keys
        ),
    )
