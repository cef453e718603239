"""An engine without a model: fills pages with fingerprints and proves later that they are still there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import KVCoreError
from kvcore.layout import page_geometry

if TYPE_CHECKING:
    from kvcore.batch import Batch
    from kvcore.device.base import Array, PageStack, Stream
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager

POISON = 0xFF
"""Byte of pages that were given up: NaN in every float type."""

SHARED = -1
"""The lane of no stream in particular."""

Lineage = list[int | None]
"""What one beam wrote or inherited: a key per position, None where nothing is promised."""

Int64 = NDArray[np.int64]


class ContentError(KVCoreError, AssertionError):
    """A token read through the page tables is not what its beam wrote."""


@dataclass(frozen=True)
class _Look:
    """A verification on its way: what was compared where, and how many words differed."""

    stream: Stream
    names: list[tuple[KVCache, int, int]]  # (cache, beam, position) of each token
    keys: Int64
    defined: NDArray[np.bool_]
    different: list[Array]  # words that differ from the pattern, per kind of buffer
    unlike: list[Array]  # the same against a wrong key: 0 if the token was not read at all
    tables: list[Array]  # the page table rows as a kernel saw them, per layer group
    rows: list[list[list[int]]]  # and as they were when it was enqueued


@dataclass(frozen=True)
class _Lane:
    """A batch, a mapping of our own, and the keys of the tokens in either."""

    batch: Batch
    mapping: Array
    keys: Array


@dataclass(frozen=True)
class _Step:
    """What a launch works on."""

    stream: Stream
    mapping: Array
    keys: Array
    rows: Array | None


class FakeEngine:
    """Writes a pattern of its own into every token and follows each beam's history beside the cache.

    Every write gets a key never used before, so a wrong page, a wrong beam and a stale page all read as
    different. Calls that move pages go through the engine, which then moves the histories in the
    same way. Pages that such a call gives up are overwritten with `0xFF` just before, in the order of
    the sequence's stream: whoever still reads them is found out.

    Every buffer must have a dtype and a shape. Works on any device with memory.

    Parameters
    ----------
    manager : KVCacheManager
        Whose pages to fill.
    max_rows, max_tokens : int
        Most rows and tokens in one launch; larger work is cut into several.
    poison : bool
        Whether to overwrite pages before they are given up.
    delay : callable, optional
        Called with the stream between preparing a launch and its work: the place for a latch or a
        delay kernel that widens races.

    Examples
    --------
    >>> import kvcore as k
    >>> buffers = [k.BufferConfig(role="key", size=4 * 2 * 8 * 4, dtype="float32", shape=(2, 8))]
    >>> config = k.KVCacheManagerConfig(
    ...     tokens_per_block=4,
    ...     cache_tiers=[k.GpuCacheTierConfig(quota=1 << 16)],
    ...     layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    ...     max_beam_width=2,
    ...     enable_partial_commit=False,
    ... )
    >>> manager = k.KVCacheManager(config, device="host")
    >>> engine, kv = FakeEngine(manager), manager.create_kv_cache()
    >>> kv.resume(), kv.resize(6)
    (True, True)
    >>> engine.write([kv], 6)
    >>> kv.resize(8, 6), engine.set_beam_width(kv, 2)
    (True, True)
    >>> engine.write([kv], 1)
    >>> engine.reorder_beams(kv, [1, 0])
    >>> engine.verify([kv])
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_rows: int = 64,
        max_tokens: int = 1024,
        poison: bool = True,
        delay: Callable[[Stream], None] | None = None,
    ) -> None:
        self.manager, self.poison, self.delay = manager, poison, delay
        self._runtime, self._device = manager._runtime, manager.device
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._lanes: dict[int, _Lane] = {}
        self._launches = 0
        self._stacks = list(_stacks(manager))
        self._lineages: WeakKeyDictionary[KVCache, list[Lineage]] = WeakKeyDictionary()
        self._looks: list[_Look] = []
        self._next_key = 1
        self._refuses_beams = manager.config.enable_partial_commit

    def lineage(self, kv: KVCache, beam: int) -> Lineage:
        """What `kv.get_base_page_indices(..., beam)` must lead to: a key per position up to the capacity."""
        known = self._rows(kv)[beam]
        return (known + [None] * kv.capacity)[: kv.capacity]

    def _rows(self, kv: KVCache) -> list[Lineage]:
        return self._lineages.setdefault(kv, [[] for _ in range(kv.beam_width)])

    # -- content -------------------------------------------------------------------------------------

    def write(
        self,
        kv_caches: Sequence[KVCache],
        num_tokens: int | Sequence[int] = 1,
        *,
        start: int | Sequence[int] | None = None,
        stream: object = None,
        own_table: bool = False,
    ) -> None:
        """Fills tokens of all beams with new patterns.

        Parameters
        ----------
        kv_caches : sequence of KVCache
            Distinct and active.
        num_tokens, start : int or sequence of int [len(kv_caches)]
            Which positions, inside the capacity and behind the last final block. `start` defaults to
            the history length.
        stream : optional
            As for `Batch.prepare`.
        own_table : bool
            Finds the pages in the host's table, as an engine does that has device tables of its own,
            instead of preparing a batch. The caches must be bound to one stream, where it runs.

        Notes
        -----
        Enqueues and does not block.
        """
        counts = _each(num_tokens, kv_caches)
        starts = [kv.history_length for kv in kv_caches] if start is None else _each(start, kv_caches)
        for part in self._parts(kv_caches, starts, counts):
            keys: list[int] = []
            for kv, first, count in zip(*part, strict=True):
                for lineage in self._rows(kv):
                    fresh = range(self._next_key, self._next_key + count)
                    self._next_key += count
                    lineage += [None] * (first - len(lineage))
                    lineage[first : first + count] = fresh
                    keys += fresh
            step = self._prepare(part, np.array(keys, np.int64), stream, own_table)
            for stack, group in self._stacks:
                mapping = step.mapping[group, : len(keys)]
                self._device.write_fingerprints(stack, mapping, step.keys, stream=step.stream)

    def look(
        self, kv_caches: Sequence[KVCache], *, stream: object = None, own_table: bool = False
    ) -> None:
        """Enqueues a comparison of every promised token of active caches; `settle` tells the result.

        The arguments are those of `write`.
        """
        lengths = [kv.capacity for kv in kv_caches]
        for part in self._parts(kv_caches, [0] * len(lengths), lengths):
            self._look(part, stream, own_table)

    def _look(self, part: _Part, stream: object, own_table: bool) -> None:
        names, keys = [], []
        for kv, first, count in zip(*part, strict=True):
            for beam in range(kv.beam_width):
                names += [(kv, beam, first + i) for i in range(count)]
                keys += self.lineage(kv, beam)[first : first + count]
        if not any(keys):
            return
        defined = np.array([key is not None for key in keys])
        right = np.array([key or 0 for key in keys], np.int64)
        step = self._prepare(part, right, stream, own_table)
        different = self._compare(step)
        self._device.from_host(-1 - right, step.keys, stream=step.stream)
        unlike = self._compare(step)
        seen, rows = self._read_tables(step, part[0])
        self._looks.append(_Look(step.stream, names, right, defined, different, unlike, seen, rows))

    def _compare(self, step: _Step) -> list[Array]:
        results = []
        for stack, group in self._stacks:
            bad = self._device.empty((len(step.keys),), np.int32)
            mapping = step.mapping[group, : len(step.keys)]
            self._device.verify_fingerprints(stack, mapping, step.keys, bad, stream=step.stream)
            results.append(bad)
        return results

    def _read_tables(
        self, step: _Step, kv_caches: Sequence[KVCache]
    ) -> tuple[list[Array], list[list[list[int]]]]:
        """Reads the rows of a prepared step in place, as an attention kernel does."""
        if step.rows is None:
            return [], []
        tables, rows = [], []
        for group in range(len(self.manager.layout.layer_groups)):
            rows.append(
                [
                    kv.get_base_page_indices(group, beam).tolist()
                    for kv in kv_caches
                    for beam in range(kv.beam_width)
                ]
            )
            seen = self._device.empty((len(rows[-1]), max(map(len, rows[-1]))), np.int32)
            table, own = self.manager.page_table(group), step.rows[: len(seen)]
            self._device.take_rows(table, own, seen, stream=step.stream)
            tables.append(seen)
        return tables, rows

    def settle(self) -> None:
        """Waits for every enqueued comparison. BLOCKS. Raises `ContentError` for a difference."""
        looks, self._looks = self._looks, []
        for look in looks:
            for seen, rows in zip(look.tables, look.rows, strict=True):
                found = self._device.to_host(seen, stream=look.stream).tolist()
                cut = [row[: len(own)] for row, own in zip(found, rows, strict=True)]
                if cut != rows:
                    raise ContentError(f"page table rows: expected {rows}, a kernel saw {cut}")
            for different, unlike in zip(look.different, look.unlike, strict=True):
                words = self._device.to_host(different, stream=look.stream)
                unread = self._device.to_host(unlike, stream=look.stream) == 0
                wrong = np.flatnonzero(look.defined & ((words != 0) | unread))
                if wrong.size:
                    raise ContentError(_explain(look, wrong, words, unread))

    def verify(self, kv_caches: Sequence[KVCache], *, stream: object = None) -> None:
        """`look` and `settle`."""
        self.look(kv_caches, stream=stream)
        self.settle()

    # -- calls that move pages -----------------------------------------------------------------------

    def resize(
        self, kv: KVCache, capacity: int | None = None, history_length: int | None = None
    ) -> bool:
        """`KVCache.resize`; what lies past a smaller capacity is forgotten."""
        history = kv.history_length if history_length is None else history_length
        if capacity is not None and kv.is_active and kv.history_length <= history <= capacity:
            self._give_up(kv, self._pages_past(kv, capacity))
        done = kv.resize(capacity, history_length)
        self._cut(kv)
        return done

    def truncate(self, kv_caches: Sequence[KVCache], capacities: Sequence[int]) -> None:
        """`KVCacheManager.truncate`."""
        sizes = list(zip(kv_caches, capacities, strict=True))
        distinct = len(set(kv_caches)) == len(sizes)
        if distinct and all(kv.is_active and kv.history_length <= n for kv, n in sizes):
            if all(n <= kv.capacity for kv, n in sizes):
                for kv, n in sizes:
                    self._give_up(kv, self._pages_past(kv, n))
        self.manager.truncate(kv_caches, capacities)
        for kv in kv_caches:
            self._cut(kv)

    def close(self, kv: KVCache) -> None:
        """`KVCache.close`."""
        if kv.beam_width:
            self._give_up(kv, self._pages_past(kv, 0))
        kv.close()
        self._lineages.pop(kv, None)

    def set_beam_width(self, kv: KVCache, width: int, parents: Sequence[int] | None = None) -> bool:
        """`KVCache.set_beam_width`."""
        before = kv.beam_width
        if parents is None and 1 <= width < before and not self._refuses_beams:
            self._give_up_without(kv, range(width))
        done = kv.set_beam_width(width, parents)
        if done and parents is None:
            parents = [i if i < before else 0 for i in range(width)]
        if done:
            self._follow(kv, parents or [], kv.capacity)
        return done

    def reorder_beams(
        self, kv: KVCache, parents: Sequence[int], valid_tokens: int | None = None
    ) -> None:
        """`KVCache.reorder_beams`."""
        width, valid = kv.beam_width, kv.capacity if valid_tokens is None else valid_tokens
        fine = kv.history_length <= valid <= kv.capacity and len(parents) == width
        if fine and kv.is_active and set(parents) <= set(range(width)):
            self._give_up_without(kv, parents)
        kv.reorder_beams(parents, valid_tokens=valid_tokens)
        self._follow(kv, parents, valid)

    def _follow(self, kv: KVCache, parents: Sequence[int], valid: int) -> None:
        rows = self._lineages.pop(kv, None)
        if rows is not None:
            self._lineages[kv] = [rows[parent][:valid] for parent in parents]

    def _cut(self, kv: KVCache) -> None:
        for lineage in self._rows(kv):
            del lineage[kv.capacity :]

    # -- pages given up ------------------------------------------------------------------------------

    def _pages(self, kv: KVCache, beam: int) -> list[tuple[int, int]]:
        """(layer group, slot) of each of a beam's pages."""
        groups = range(len(self.manager.layout.layer_groups))
        return [
            (group, slot)
            for group in groups
            for slot in kv.get_aggregated_page_indices(group, beam).tolist()
        ]

    def _pages_past(self, kv: KVCache, capacity: int) -> set[tuple[int, int]]:
        blocks = -(-capacity // self.manager.layout.tokens_per_block)
        groups = range(len(self.manager.layout.layer_groups))
        return {
            (group, slot)
            for beam in range(kv.beam_width)
            for group in groups
            for slot in kv.get_aggregated_page_indices(group, beam)[blocks:].tolist()
        }

    def _give_up_without(self, kv: KVCache, parents: Iterable[int]) -> None:
        """The pages that no row of a parent names."""
        rows = [self._pages(kv, beam) for beam in range(kv.beam_width)]
        kept = {page for parent in parents for page in rows[parent]}
        self._give_up(kv, {page for row in rows for page in row} - kept)

    def _give_up(self, kv: KVCache, pages: set[tuple[int, int]]) -> None:
        """Overwrites pages that the next call frees, after all earlier work on them."""
        stream = kv.stream
        if not self.poison or stream is None or not pages:
            return
        self._join([kv])
        for group, pool_group in enumerate(self._runtime.control.pool_group_of):
            slots = sorted(slot for owner, slot in pages if owner == group)
            if slots:
                pools = self._runtime.pool_places[pool_group]
                self._device.fill_pages(pools, np.array(slots, np.int32), POISON, stream=stream)

    # -- launches ------------------------------------------------------------------------------------

    def _prepare(self, part: _Part, keys: Int64, stream: object, own_table: bool) -> _Step:
        """Maps the tokens of a part and brings their keys to the device."""
        kv_caches, starts, counts = part
        on = self._runtime.streams.choose(stream, {kv.stream for kv in kv_caches})
        lane = self._lane(on, own_table)
        rows = None
        if own_table:
            self._join(kv_caches)
            found = [
                np.stack(self.manager.slot_mapping(*part[::2], start=starts, layer_group=group), -1)
                for group in range(len(lane.mapping))
            ]
            self._device.from_host(np.stack(found), lane.mapping[:, : keys.size], stream=on)
        else:
            lane.batch.prepare(kv_caches, counts, start=starts, stream=on)
            rows = lane.batch.rows
        if self.delay is not None:
            self.delay(on)
        self._device.from_host(keys, lane.keys[: keys.size], stream=on)
        mapping = lane.mapping if own_table else lane.batch.mapping
        return _Step(on, mapping, lane.keys[: keys.size], rows)

    def _join(self, kv_caches: Iterable[KVCache]) -> None:
        """What `Batch.finish` after every launch would do: the caches' own streams wait for it."""
        with self._runtime.lock:
            for kv in kv_caches:
                self._runtime.streams.come_home(kv._sequence)

    def _lane(self, stream: Stream, own_table: bool) -> _Lane:
        """The stream's own, so that streams run freely; two times in five one that all share."""
        self._launches += 1
        name = stream.handle if own_table or self._launches % 5 > 1 else SHARED
        if name not in self._lanes:
            groups = len(self.manager.layout.layer_groups)
            self._lanes[name] = _Lane(
                self.manager.create_batch(self._max_rows, self._max_tokens),
                self._device.empty((groups, self._max_tokens, 2), np.int32),
                self._device.empty((self._max_tokens,), np.int64),
            )
        return self._lanes[name]

    def _parts(
        self, kv_caches: Sequence[KVCache], starts: Sequence[int], counts: Sequence[int]
    ) -> Iterator[_Part]:
        """Cuts a ragged batch into parts that fit into one launch."""
        rows = tokens = 0
        part: _Part = ([], [], [])
        for kv, start, count in zip(kv_caches, starts, counts, strict=True):
            most = max(1, self._max_tokens // max(1, kv.beam_width))
            for first in range(start, start + count, most):
                some = min(most, start + count - first)
                rows, tokens = rows + kv.beam_width, tokens + some * kv.beam_width
                full = rows > self._max_rows or tokens > self._max_tokens
                if part[0] and (full or part[0][-1] is kv):
                    yield part
                    part, rows, tokens = ([], [], []), kv.beam_width, some * kv.beam_width
                for values, value in zip(part, (kv, first, some), strict=True):
                    values.append(value)
        if part[0]:
            yield part


_Part = tuple[list[Any], list[Any], list[Any]]
"""Caches, first positions and numbers of positions of one launch."""


def _each(value: int | Sequence[int], kv_caches: Sequence[KVCache]) -> list[int]:
    return [value] * len(kv_caches) if isinstance(value, int) else list(value)


def _stacks(manager: KVCacheManager) -> Iterable[tuple[PageStack, int]]:
    """All typed buffers in as few stacks as possible: layers with the same roles of one geometry."""
    layout = manager.layout
    kinds: dict[Any, list[int]] = {}
    for layer in dict.fromkeys(layer for layer, _ in layout.places):
        roles: dict[Any, list[str]] = {}
        for owner, role in layout.places:
            if owner == layer:
                place = layout.place(layer, role)
                kind = page_geometry(place, layout.tokens_per_block)
                roles.setdefault((kind, place.layer_group), []).append(role)
        for (kind, group), names in roles.items():
            kinds.setdefault((group, kind, tuple(names)), []).append(layer)
    for (_, _, names), layers in kinds.items():
        yield manager._runtime.stacks.get(tuple(layers), names)


def _explain(
    look: _Look, wrong: NDArray[np.intp], words: NDArray[Any], unread: NDArray[np.bool_]
) -> str:
    lines = [f"{wrong.size} tokens are not what was written:"]
    for n in wrong.tolist()[:20]:
        kv, beam, position = look.names[n]
        what = "has no page" if unread[n] else f"differs in {words[n]} words"
        lines.append(f"  {kv!r} beam {beam} position {position}, key {look.keys[n]}: {what}")
    return "\n".join(lines)
