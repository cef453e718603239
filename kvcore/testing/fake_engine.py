"""An engine without a model: writes fingerprints and proves later that they are still there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from kvcore.ids import div_ceil
from kvcore.testing.holders import need_own, sole_pages
from kvcore.testing.launches import ContentError, Launches, Look, Part
from kvcore.testing.lineage import Keys, Lineage

if TYPE_CHECKING:
    from kvcore.config import ReuseScope
    from kvcore.device.base import Stream
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager

__all__ = ["POISON", "ContentError", "FakeEngine"]

POISON = 0xFF
"""Byte of pages that were given up: NaN in every float type."""


class FakeEngine:
    """Writes a pattern of its own into every token and follows each beam's history.

    A write without tokens gets keys never used before, so a wrong page, a wrong beam and a stale
    page all read as different. A write of tokens gets keys that depend on the whole prefix, the
    scope and the weights, as keys and values do: what another sequence computed of the same prefix
    reads as right, everything else as wrong. Nothing writes a page that somebody else may read.

    Calls that move pages go through the engine, which then moves the histories in the same way.
    Pages that such a call gives up are overwritten with `0xFF` just before, in the order of the
    sequence's stream, and so are new ones: whoever still reads them is found out.

    Every buffer must have a dtype and a shape. Works on any device with memory.

    Parameters
    ----------
    manager : KVCacheManager
        Whose pages to fill.
    max_rows, max_tokens : int
        Most rows and tokens in one launch; larger work is cut into several.
    poison : bool
        Whether to overwrite pages before they are given up and when they are new.
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
        self._roots: WeakKeyDictionary[KVCache, Hashable] = WeakKeyDictionary()
        self._keys = Keys()
        self._looks: list[Look] = []

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

    # -- prefixes ------------------------------------------------------------------------------

    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Sequence[int] | None = None,
        **settings: Any,
    ) -> KVCache:
        """`KVCacheManager.create_kv_cache`; what was found of the prompt must read as right."""
        kv = self.manager.create_kv_cache(reuse_scope, input_tokens, **settings)
        tokens = () if input_tokens is None else input_tokens
        self.follow(kv, reuse_scope, tokens[: kv.num_committed_tokens])
        return kv

    def follow(
        self, kv: KVCache, reuse_scope: ReuseScope | None = None, tokens: Iterable[int] = ()
    ) -> None:
        """A cache that was just created and found `tokens`."""
        lora = None if reuse_scope is None else reuse_scope.lora_id
        salt = None if reuse_scope is None else reuse_scope.salt
        adapter = None if lora is None else self.manager.weights_epoch(lora)
        self._roots[kv] = root = (lora, salt, self.manager.weights_epoch(), adapter)
        self._lineages[kv] = [[*self._keys.chain(root, map(int, tokens))]]

    def spelled(self, kv: KVCache, beam: int = 0) -> list[int]:
        """The tokens whose content a beam has, from position 0 on: these may be committed."""
        return self._keys.tokens(self._root(kv), self.lineage(kv, beam))

    def _root(self, kv: KVCache) -> Hashable:
        """What the content of position 0 depends on."""
        if kv not in self._roots:
            self._roots[kv] = (None, None, self.manager.weights_epoch(), None)
        return self._roots[kv]

    # -- content -------------------------------------------------------------------------------

    def write(
        self,
        kv_caches: Sequence[KVCache],
        num_tokens: int | Sequence[int] = 1,
        *,
        start: int | Sequence[int] | None = None,
        tokens: Sequence[Sequence[int] | None] | None = None,
        stream: object = None,
        own_table: bool = False,
    ) -> None:
        """Fills tokens of all beams with patterns.

        Parameters
        ----------
        kv_caches : sequence of KVCache
            Distinct and active.
        num_tokens, start : int or sequence of int [len(kv_caches)]
            Which positions, inside the capacity and behind the last final block. `start` defaults
            to the history length.
        tokens : sequence of sequences of int, optional
            What each cache computes there, in all its beams. None: something new.
        stream : optional
            As for `Batch.prepare`.
        own_table : bool
            Finds the pages in the host's table, as an engine does that has device tables of its
            own, instead of preparing a batch. The caches must be bound to one stream, and it runs
            there.

        Raises
        ------
        ContentError
            A token is committed; a page is published, or has another holder.

        Notes
        -----
        Enqueues and does not block. What could not be enqueued is not expected later.
        """
        counts = _each(num_tokens, kv_caches)
        starts = [kv.history_length for kv in kv_caches]
        if start is not None:
            starts = _each(start, kv_caches)
        for kv, first, count in zip(kv_caches, starts, counts, strict=True):
            need_own(kv, first, count)
        spelled: dict[KVCache, Sequence[int] | None] = {}
        if tokens is not None:
            spelled = dict(zip(kv_caches, tokens, strict=True))
        begun = dict(zip(kv_caches, starts, strict=True))
        for part in self._launches.parts(kv_caches, starts, counts):
            written: list[tuple[Lineage, int, list[int]]] = []
            for kv, first, count in zip(*part, strict=True):
                some = spelled.get(kv)
                if some is not None:
                    some = some[first - begun[kv] :][:count]
                for lineage in self._rows(kv):
                    keys = self._keys_from(kv, lineage, first, count, some)
                    written.append((lineage, first, keys))
            every = np.array([key for _, _, keys in written for key in keys], np.int64)
            self._launches.write(self._launches.prepare(part, every, stream, own_table))
            for lineage, first, keys in written:
                lineage += [None] * (first - len(lineage))
                lineage[first : first + len(keys)] = keys

    def _keys_from(
        self, kv: KVCache, lineage: Lineage, first: int, count: int, tokens: Sequence[int] | None
    ) -> list[int]:
        """The keys of `count` tokens that are written from `first` on."""
        if tokens is None:
            return [self._keys.new() for _ in range(count)]
        before: Any = self._root(kv)
        if first:
            before = lineage[first - 1] if first <= len(lineage) else None
        return self._keys.chain(self._keys.new() if before is None else before, tokens)

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
            self._give_up(kv, self._pages(kv, range(kv.beam_width), past=capacity))
        before = kv.num_blocks
        done = kv.resize(capacity, history_length)
        self._cut(kv)
        self._overwrite(kv, self._pages(kv, range(kv.beam_width), blocks=before))
        return done

    def advance(
        self,
        kv_caches: Sequence[KVCache],
        n: int | Sequence[int],
        *,
        history: Sequence[int] | None = None,
    ) -> bool:
        """`KVCacheManager.advance`."""
        before = [(kv, kv.num_blocks) for kv in kv_caches]
        done = self.manager.advance(kv_caches, n, history=history)
        for kv, blocks in before:
            self._overwrite(kv, self._pages(kv, range(kv.beam_width), blocks=blocks))
        return done

    def truncate(self, kv_caches: Sequence[KVCache], capacities: Sequence[int]) -> None:
        """`KVCacheManager.truncate`."""
        sizes = list(zip(kv_caches, capacities, strict=True))
        fine = all(kv.is_active and kv.history_length <= n <= kv.capacity for kv, n in sizes)
        if fine and len(set(kv_caches)) == len(sizes):
            for kv, size in sizes:
                self._give_up(kv, self._pages(kv, range(kv.beam_width), past=size))
        self.manager.truncate(kv_caches, capacities)
        for kv in kv_caches:
            self._cut(kv)

    def close(self, kv: KVCache) -> None:
        """`KVCache.close`. A partial last block, which may be published, is not overwritten."""
        committed, size = kv.num_committed_tokens, self.manager.layout.tokens_per_block
        pages = self._pages(kv, range(kv.beam_width))
        if committed % size and self.manager.config.enable_partial_commit:
            last = committed // size
            pages -= self._pages(kv, [0], blocks=last) - self._pages(kv, [0], blocks=last + 1)
        self._give_up(kv, pages)
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

    # -- pages given up, and new ones ----------------------------------------------------------

    def _pages(
        self, kv: KVCache, beams: Iterable[int], past: int = 0, blocks: int | None = None
    ) -> set[tuple[int, int]]:
        """(layer group, slot) of some beams past a capacity, or from a block on."""
        if blocks is None:
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
        """Overwrites what the next call frees of `pages`, after all earlier work on them."""
        self._overwrite(kv, sole_pages(kv, pages))

    def _overwrite(self, kv: KVCache, pages: set[tuple[int, int]]) -> None:
        """Fills pages that nobody else reads with `POISON`, on the sequence's stream."""
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
