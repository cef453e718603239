"""The launches of a fake engine: where its tokens lie, and what it enqueues there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import KVCoreError
from kvcore.layout import page_geometry

if TYPE_CHECKING:
    from kvcore.batch import Batch
    from kvcore.device.base import Array, PageStack, Stream
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager

SHARED = -1
"""The lane of no stream in particular."""

Int64 = NDArray[np.int64]

Part = tuple[list[Any], list[Any], list[Any]]
"""Caches, first positions and numbers of positions of one launch."""


class ContentError(KVCoreError, AssertionError):
    """A token read through the page tables is not what its beam wrote."""


@dataclass(frozen=True)
class Step:
    """What a launch works on."""

    stream: Stream
    mapping: Array
    keys: Array
    rows: Array | None  # of the page table, unless the mapping came from the host's table


@dataclass(frozen=True)
class Look:
    """A comparison on its way: of which tokens, and how many words differed."""

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


class Launches:
    """Prepares steps, in batches of the manager's or from the host's table, and enqueues work."""

    def __init__(self, manager: KVCacheManager, max_rows: int, max_tokens: int) -> None:
        self._manager, self._runtime = manager, manager._runtime
        self._device = manager.device
        self._groups = range(len(manager.layout.layer_groups))
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._lanes: dict[int, _Lane] = {}
        self._stacks = list(_stacks(manager))
        self._count = 0
        self.delay: Callable[[Stream], None] | None = None

    # -- preparing -----------------------------------------------------------------------------

    def parts(
        self, kv_caches: Sequence[KVCache], starts: Sequence[int], counts: Sequence[int]
    ) -> Iterator[Part]:
        """Cuts a ragged batch into parts that fit into one launch."""
        rows = tokens = 0
        part: Part = ([], [], [])
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

    def prepare(self, part: Part, keys: Int64, stream: object, own_table: bool) -> Step:
        """Maps the tokens of a part and brings their keys to the device."""
        kv_caches, starts, counts = part
        on = self._runtime.streams.choose(stream, {kv.stream for kv in kv_caches})
        lane = self._lane(on, own_table)
        if own_table:
            self.join(kv_caches)
            found = [
                np.stack(
                    self._manager.slot_mapping(kv_caches, counts, start=starts, layer_group=group),
                    axis=-1,
                )
                for group in self._groups
            ]
            self._device.from_host(np.stack(found), lane.mapping[:, : keys.size], stream=on)
        else:
            lane.batch.prepare(kv_caches, counts, start=starts, stream=on)
        if self.delay is not None:
            self.delay(on)
        self._device.from_host(keys, lane.keys[: keys.size], stream=on)
        mapping, rows = (lane.mapping, None) if own_table else (lane.batch.mapping, lane.batch.rows)
        return Step(on, mapping, lane.keys[: keys.size], rows)

    def join(self, kv_caches: Iterable[KVCache]) -> None:
        """What `Batch.finish` after every launch would do: the caches' own streams wait for it."""
        with self._runtime.lock:
            for kv in kv_caches:
                self._runtime.streams.come_home(kv._sequence)

    def _lane(self, stream: Stream, own_table: bool) -> _Lane:
        """The stream's own, so that streams run freely; two times in five one that all share."""
        self._count += 1
        name = stream.handle if own_table or self._count % 5 > 1 else SHARED
        if name not in self._lanes:
            self._lanes[name] = _Lane(
                self._manager.create_batch(self._max_rows, self._max_tokens),
                self._device.empty((len(self._groups), self._max_tokens, 2), np.int32),
                self._device.empty((self._max_tokens,), np.int64),
            )
        return self._lanes[name]

    # -- work ----------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """Fills the tokens of a step with the patterns of their keys."""
        for stack, group in self._stacks:
            mapping = step.mapping[group, : len(step.keys)]
            self._device.write_fingerprints(stack, mapping, step.keys, stream=step.stream)

    def compare(self, step: Step) -> list[Array]:
        """How many words of each token differ from the patterns, per kind of buffer."""
        results = []
        for stack, group in self._stacks:
            bad = self._device.empty((len(step.keys),), np.int32)
            mapping = step.mapping[group, : len(step.keys)]
            self._device.verify_fingerprints(stack, mapping, step.keys, bad, stream=step.stream)
            results.append(bad)
        return results

    def rekey(self, step: Step, keys: Int64) -> None:
        """Replaces the keys of a step."""
        self._device.from_host(keys, step.keys, stream=step.stream)

    def read_tables(
        self, step: Step, kv_caches: Sequence[KVCache]
    ) -> tuple[list[Array], list[list[list[int]]]]:
        """Reads the rows of a step in place, as an attention kernel does; and as they are now."""
        if step.rows is None:
            return [], []
        tables, rows = [], []
        for group in self._groups:
            rows.append(
                [
                    kv.get_base_page_indices(group, beam).tolist()
                    for kv in kv_caches
                    for beam in range(kv.beam_width)
                ]
            )
            seen = self._device.empty((len(rows[-1]), max(map(len, rows[-1]))), np.int32)
            table, own = self._manager.page_table(group), step.rows[: len(seen)]
            self._device.take_rows(table, own, seen, stream=step.stream)
            tables.append(seen)
        return tables, rows

    def settle(self, look: Look) -> None:
        """Waits for a comparison. BLOCKS. Raises `ContentError` for a difference."""
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


def _stacks(manager: KVCacheManager) -> Iterable[tuple[PageStack, int]]:
    """All typed buffers in few stacks: layers with the same roles of one geometry together."""
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
    look: Look, wrong: NDArray[np.intp], words: NDArray[Any], unread: NDArray[np.bool_]
) -> str:
    lines = [f"{wrong.size} tokens are not what was written:"]
    for n in wrong.tolist()[:20]:
        kv, beam, position = look.names[n]
        what = "has no page" if unread[n] else f"differs in {words[n]} words"
        lines.append(f"  {kv!r} beam {beam} position {position}, key {look.keys[n]}: {what}")
    return "\n".join(lines)
