"""An engine without a model: writes fingerprints and proves later that they are still there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvcore.ids import div_ceil
from kvcore.testing.launches import ContentError, Launches, Look, Part

if TYPE_CHECKING:
    from kvcore.device.base import Stream
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager

__all__ = ["POISON", "ContentError", "FakeEngine"]

POISON = 0xFF
"""Byte of pages that were given up: NaN in every float type."""

Lineage = list[int | None]
"""What one beam wrote or inherited: a key per position, None where nothing is promised."""


class FakeEngine:
    """Writes a pattern of its own into every token and follows each beam's history.

    Every write gets a key never used before, so a wrong page, a wrong beam and a stale page all
    read as different. Calls that move pages go through the engine, which then moves the histories
    in the same way. Pages that such a call gives up are overwritten with `0xFF` just before, in the
    order of the sequence's stream: whoever still reads them is found out.

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
        self.manager, self.poison = manager, poison
        self._launches = Launches(manager, max_rows, max_tokens)
        self.delay = delay
        self._groups = range(len(manager.layout.layer_groups))
        self._lineages: WeakKeyDictionary[KVCache, list[Lineage]] = WeakKeyDictionary()
        self._looks: list[Look] = []
        self._next_key = 1

    @property
    def delay(self) -> Callable[[Stream], None] | None:
        """See the parameter; may be changed at any time."""
        return self._launches.delay

    @delay.setter
    def delay(self, call: Callable[[Stream], None] | None) -> None:
        self._launches.delay = call

    def lineage(self, kv: KVCache, beam: int) -> Lineage:
        """What the page indices of a beam must lead to: a key per position up to the capacity."""
        known = self._rows(kv)[beam]
        return (known + [None] * kv.capacity)[: kv.capacity]

    def _rows(self, kv: KVCache) -> list[Lineage]:
        return self._lineages.setdefault(kv, [[] for _ in range(kv.beam_width)])

    # -- content -------------------------------------------------------------------------------

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
            Which positions, inside the capacity and behind the last final block. `start` defaults
            to the history length.
        stream : optional
            As for `Batch.prepare`.
        own_table : bool
            Finds the pages in the host's table, as an engine does that has device tables of its
            own, instead of preparing a batch. The caches must be bound to one stream, and it runs
            there.

        Notes
        -----
        Enqueues and does not block.
        """
        counts = _each(num_tokens, kv_caches)
        starts = [kv.history_length for kv in kv_caches]
        if start is not None:
            starts = _each(start, kv_caches)
        for part in self._launches.parts(kv_caches, starts, counts):
            keys: list[int] = []
            for kv, first, count in zip(*part, strict=True):
                for lineage in self._rows(kv):
                    fresh = range(self._next_key, self._next_key + count)
                    self._next_key += count
                    lineage += [None] * (first - len(lineage))
                    lineage[first : first + count] = fresh
                    keys += fresh
            step = self._launches.prepare(part, np.array(keys, np.int64), stream, own_table)
            self._launches.write(step)

    def look(
        self, kv_caches: Sequence[KVCache], *, stream: object = None, own_table: bool = False
    ) -> None:
        """Enqueues a comparison of every promised token; `settle` tells the result.

        The arguments are those of `write`.
        """
        lengths = [kv.capacity for kv in kv_caches]
        for part in self._launches.parts(kv_caches, [0] * len(lengths), lengths):
            self._look(part, stream, own_table)

    def _look(self, part: Part, stream: object, own_table: bool) -> None:
        launches = self._launches
        names, keys = [], []
        for kv, first, count in zip(*part, strict=True):
            for beam in range(kv.beam_width):
                names += [(kv, beam, first + i) for i in range(count)]
                keys += self.lineage(kv, beam)[first : first + count]
        if not any(keys):
            return
        defined = np.array([key is not None for key in keys])
        right = np.array([key or 0 for key in keys], np.int64)
        step = launches.prepare(part, right, stream, own_table)
        different = launches.compare(step)
        launches.rekey(step, -1 - right)
        unlike = launches.compare(step)
        seen, rows = launches.read_tables(step, part[0])
        self._looks.append(Look(step.stream, names, right, defined, different, unlike, seen, rows))

    def settle(self) -> None:
        """Waits for every enqueued comparison. BLOCKS. Raises `ContentError` for a difference."""
        looks, self._looks = self._looks, []
        for look in looks:
            self._launches.settle(look)

    def verify(self, kv_caches: Sequence[KVCache], *, stream: object = None) -> None:
        """`look` and `settle`."""
        self.look(kv_caches, stream=stream)
        self.settle()

    # -- calls that move pages -----------------------------------------------------------------

    def resize(
        self, kv: KVCache, capacity: int | None = None, history_length: int | None = None
    ) -> bool:
        """`KVCache.resize`; what lies past a smaller capacity is forgotten."""
        history = kv.history_length if history_length is None else history_length
        if capacity is not None and kv.is_active and kv.history_length <= history <= capacity:
            self._give_up(kv, self._pages(kv, range(kv.beam_width), capacity))
        done = kv.resize(capacity, history_length)
        self._cut(kv)
        return done

    def truncate(self, kv_caches: Sequence[KVCache], capacities: Sequence[int]) -> None:
        """`KVCacheManager.truncate`."""
        sizes = list(zip(kv_caches, capacities, strict=True))
        fine = all(kv.is_active and kv.history_length <= n <= kv.capacity for kv, n in sizes)
        if fine and len(set(kv_caches)) == len(sizes):
            for kv, size in sizes:
                self._give_up(kv, self._pages(kv, range(kv.beam_width), size))
        self.manager.truncate(kv_caches, capacities)
        for kv in kv_caches:
            self._cut(kv)

    def close(self, kv: KVCache) -> None:
        """`KVCache.close`."""
        self._give_up(kv, self._pages(kv, range(kv.beam_width)))
        kv.close()
        self._lineages.pop(kv, None)

    def set_beam_width(self, kv: KVCache, width: int, parents: Sequence[int] | None = None) -> bool:
        """`KVCache.set_beam_width`."""
        before = kv.beam_width
        allowed = not self.manager.config.enable_partial_commit
        if parents is None and 1 <= width < before and allowed:
            self._give_up_without(kv, range(width))
        done = kv.set_beam_width(width, parents)
        if done:
            default = [i if i < before else 0 for i in range(width)]
            self._follow(kv, default if parents is None else parents, kv.capacity)
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

    # -- pages given up ------------------------------------------------------------------------

    def _pages(self, kv: KVCache, beams: Iterable[int], past: int = 0) -> set[tuple[int, int]]:
        """(layer group, slot) of the blocks of some beams that lie past a capacity."""
        blocks = div_ceil(past, self.manager.layout.tokens_per_block)
        return {
            (group, slot)
            for beam in beams
            for group in self._groups
            for slot in kv.get_aggregated_page_indices(group, beam)[blocks:].tolist()
        }

    def _give_up_without(self, kv: KVCache, parents: Iterable[int]) -> None:
        """The pages that no row of a parent names."""
        everything = self._pages(kv, range(kv.beam_width))
        self._give_up(kv, everything - self._pages(kv, set(parents)))

    def _give_up(self, kv: KVCache, pages: set[tuple[int, int]]) -> None:
        """Overwrites pages that the next call frees, after all earlier work on them."""
        stream = kv.stream
        if not self.poison or stream is None or not pages:
            return
        self._launches.join([kv])
        runtime = self.manager._runtime
        for group, pool_group in enumerate(runtime.control.pool_group_of):
            slots = np.array(sorted(slot for owner, slot in pages if owner == group), np.int32)
            if slots.size:
                pools = runtime.pool_places[pool_group]
                self.manager.device.fill_pages(pools, slots, POISON, stream=stream)


def _each(value: int | Sequence[int], kv_caches: Sequence[KVCache]) -> list[int]:
    return [value] * len(kv_caches) if isinstance(value, int) else list(value)
