"""Counters: what was allocated, reused, copied and dropped.

Nothing is counted on the way of a decode step. What a sequence has pending follows from its block
counts: the blocks from `stat_from` on are not reported yet, those from `gen_from` on were added
while generating. Only where the width or the kind changes a segment is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvcore.control.sequences import NO_LIMIT, SequenceTable


class _Sums:
    """Counters that add up."""

    def add(self, other: Self) -> None:
        """Adds another one's counters."""
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class KVCacheStats(_Sums):
    """Blocks over all attention layer groups: of one report, or of all since the start."""

    alloc_total: int = 0
    """Pages taken from the pools, private copies of partly matched blocks among them."""

    alloc_new: int = 0
    """Those that were not brought back from a lower level."""

    reused: int = 0
    """Blocks found in the prefix tree."""

    missed: int = 0
    """Blocks of prompts that had to be computed."""

    requests: int = 0
    """Sequences that were admitted: their first resume succeeded."""

    queried_tokens: int = 0
    """Tokens they were created with."""

    hit_tokens: int = 0
    """Those of them that were found. Counted once a request, however often it was tried."""

    @property
    def hit_rate(self) -> float:
        """Reused blocks among reused and missed ones; 0 if nothing was reused."""
        return self.reused / (self.reused + self.missed) if self.reused else 0.0


@dataclass(slots=True)
class KVCacheIterationStats(_Sums):
    """Blocks and bytes of one layer group since the last reading."""

    alloc_total: int = 0
    alloc_new: int = 0
    reused: int = 0
    full_reused: int = 0
    partial_reused: int = 0
    missed: int = 0
    gen_alloc: int = 0
    onboard_blocks: int = 0
    onboard_bytes: int = 0
    offload_blocks: int = 0
    offload_bytes: int = 0
    intra_device_copy_blocks: int = 0
    intra_device_copy_bytes: int = 0
    host_dropped_blocks: int = 0
    host_dropped_bytes: int = 0
    """Dropped from the last cache level, which without a host level is the GPU."""

    @property
    def hit_rate(self) -> float:
        """Reused blocks among reused and missed ones; 0 if nothing was reused."""
        return self.reused / (self.reused + self.missed) if self.reused else 0.0


@dataclass(slots=True)
class _Segment:
    """Pages pending for some blocks; `pages` of each, of which `missed` and `gen` so many."""

    first: int
    end: int
    pages: int
    missed: int = 0
    gen: int = 0


@dataclass(slots=True)
class _Pending:
    """What is not reported of one sequence, beside its newest blocks."""

    id: object = None
    excluded: bool = False
    full: int = 0
    partial: int = 0
    queried: int = 0
    hit: int = 0
    segments: list[_Segment] = field(default_factory=list)


class Statistics:
    """The counters of a manager.

    Parameters
    ----------
    seqs : SequenceTable
    slot_bytes : list of int
        Bytes of a slot over all pools, by layer group.
    enabled : bool
    """

    def __init__(self, seqs: SequenceTable, slot_bytes: list[int], enabled: bool) -> None:
        self._seqs, self._slot_bytes, self.enabled = seqs, slot_bytes, enabled
        self.total = KVCacheStats()
        self.iteration = [KVCacheIterationStats() for _ in slot_bytes]
        self._pending: dict[int, _Pending] = {}
        self._dropped = 0  # blocks, since the last reading

    def _counts(self, sequence: int) -> _Pending | None:
        pending = self._pending.get(sequence)
        return None if pending is None or pending.excluded else pending

    # -- moments -----------------------------------------------------------------------------------

    def created(
        self, sequence: int, id: object, prompt: int | None, queried: int, hit: int, excluded: bool
    ) -> None:
        """A sequence begins, with `hit` of `queried` tokens found."""
        if not self.enabled:
            return
        seqs, size = self._seqs, self._seqs.shape.tokens_per_block
        seqs.stat_from[sequence] = seqs.num_blocks[sequence]
        seqs.gen_from[sequence] = NO_LIMIT
        seqs.prompt[sequence] = NO_LIMIT if prompt is None else prompt
        pending = _Pending(id, excluded, queried=queried, hit=hit)
        pending.full, pending.partial = hit // size, int(hit % size > 0)
        self._pending[sequence] = pending

    def forked(self, sequence: int, fork: int, shared: int) -> None:
        """A sequence begins as another one, with private pages from block `shared` on."""
        pending = self._pending.get(sequence)
        if pending is not None:
            seqs = self._seqs
            seqs.stat_from[fork], seqs.gen_from[fork] = shared, seqs.gen_from[sequence]
            seqs.prompt[fork] = seqs.prompt[sequence]
            self._pending[fork] = _Pending(pending.id, pending.excluded)
            self.copied(seqs.num_blocks.item(sequence) - shared, fork)

    def admitted(self, sequence: int) -> None:
        """Its first resume succeeded."""
        pending = self._counts(sequence)
        if pending is not None:
            self.total.requests += 1
            self.total.queried_tokens += pending.queried
            self.total.hit_tokens += pending.hit

    def copied_loan(self, sequence: int, offered: bool) -> None:
        """The partly matched last block became private; `offered`: the tree still has its page."""
        pending = self._counts(sequence)
        if pending is not None:
            last = self._seqs.num_blocks.item(sequence) - 1
            pending.segments.append(_Segment(last, last + 1, 1, missed=int(not offered)))
            self.copied(1)

    def stepped(self, sequences: NDArray[np.intp], blocks: NDArray[np.int32]) -> None:
        """A beam step copied so many blocks of each sequence."""
        if self.enabled:
            counted = [self._counts(sequence) is not None for sequence in sequences.tolist()]
            self.copied(int(blocks[counted].sum()))

    def copied(self, blocks: int, sequence: int | None = None) -> None:
        """So many blocks were copied on the device, for a sequence that may be excluded."""
        if self.enabled and (sequence is None or self._counts(sequence) is not None):
            for counts, nbytes in zip(self.iteration, self._slot_bytes, strict=True):
                counts.intra_device_copy_blocks += blocks
                counts.intra_device_copy_bytes += blocks * nbytes

    def dropped(self, blocks: int) -> None:
        """So many blocks were evicted from the last level."""
        self._dropped += blocks

    def rebound(self, sequence: int, before: int, width: int, shared: int, copied: int) -> None:
        """Beams were added, removed or reordered; `copied` blocks were copied for that.

        Beams that were added have private pages from block `shared` on; those of removed beams are
        taken back as far as they were not reported.
        """
        self.copied(copied, sequence)
        pending = self._counts(sequence)
        if pending is None or width == before:
            return
        self._close_segment(sequence, pending, before)
        blocks = self._seqs.num_blocks.item(sequence)
        if width > before and blocks > shared:
            more = width - before
            pending.segments.append(_Segment(shared, blocks, more, gen=more))
        elif width < before:
            pending.segments = list(_without(pending.segments, shared, before - width))

    def cut(self, sequence: int, blocks: int) -> None:
        """A sequence has only its first `blocks` blocks: what was pending beyond is taken back."""
        pending = self._counts(sequence)
        if pending is not None and pending.segments:
            for segment in pending.segments:
                segment.end = min(segment.end, blocks)
            pending.segments = [s for s in pending.segments if s.end > s.first]

    # -- reports -----------------------------------------------------------------------------------

    def commit(self, sequence: int) -> KVCacheStats:
        """Reports what is pending of a sequence, and returns it."""
        report = KVCacheStats()
        pending = self._counts(sequence)
        if pending is None:
            return report
        self._close_segment(sequence, pending, self._seqs.width.item(sequence))
        counts = KVCacheIterationStats(full_reused=pending.full, partial_reused=pending.partial)
        counts.reused = pending.full + pending.partial
        for segment in pending.segments:
            blocks = segment.end - segment.first
            counts.alloc_total += blocks * segment.pages
            counts.missed += blocks * segment.missed
            counts.gen_alloc += blocks * segment.gen
        counts.alloc_new = counts.alloc_total
        for total in self.iteration:
            total.add(counts)
            each = KVCacheStats(counts.alloc_total, counts.alloc_new, counts.reused, counts.missed)
            report.add(each)
        self.total.add(report)
        self._forget(pending)
        return report

    def discard(self, sequence: int) -> None:
        """Takes back what is pending of a sequence."""
        pending = self._counts(sequence)
        if pending is not None:
            self._seqs.stat_from[sequence] = self._seqs.num_blocks[sequence]
            self._forget(pending)

    def ended(self, sequence: int) -> None:
        """A sequence is closed."""
        self._pending.pop(sequence, None)

    def dirty(self) -> set[object]:
        """The ids of sequences that have something pending."""
        seqs = self._seqs
        return {
            pending.id
            for sequence, pending in self._pending.items()
            if not pending.excluded
            and (
                pending.segments
                or pending.full
                or pending.partial
                or seqs.num_blocks[sequence] > seqs.stat_from[sequence]
            )
        }

    def take_iteration(self) -> tuple[KVCacheIterationStats, ...]:
        """The counters by layer group since the last call, which begin at 0 again."""
        taken = tuple(self.iteration)
        self.iteration = [KVCacheIterationStats() for _ in taken]
        for counts, nbytes in zip(taken, self._slot_bytes, strict=True):
            counts.host_dropped_blocks = self._dropped if self.enabled else 0
            counts.host_dropped_bytes = counts.host_dropped_blocks * nbytes
        self._dropped = 0
        return taken

    def _close_segment(self, sequence: int, pending: _Pending, width: int) -> None:
        seqs = self._seqs
        first, blocks = seqs.stat_from.item(sequence), seqs.num_blocks.item(sequence)
        generated = min(max(seqs.gen_from.item(sequence), first), max(blocks, first))
        if generated > first:
            pending.segments.append(_Segment(first, generated, width, missed=width))
        if blocks > generated:
            pending.segments.append(_Segment(generated, blocks, width, gen=width))
        seqs.stat_from[sequence] = blocks

    def _forget(self, pending: _Pending) -> None:
        pending.segments, pending.full, pending.partial = [], 0, 0


def _without(segments: list[_Segment], shared: int, pages: int) -> Iterator[_Segment]:
    """The segments less `pages` of each block from `shared` on, the latest taken back first."""
    left: dict[int, int] = {}
    for segment in reversed(segments):
        if segment.first < shared:
            yield replace(segment, end=min(segment.end, shared))
        for block in range(max(segment.first, shared), segment.end):
            gone = min(segment.pages, left.get(block, pages))
            left[block] = left.get(block, pages) - gone
            if segment.pages > gone:
                gen = max(0, segment.gen - gone)
                missed = min(segment.missed, segment.pages - gone - gen)
                yield _Segment(block, block + 1, segment.pages - gone, missed, gen)
