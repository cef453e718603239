"""The handles of a manager: which sequence is whose, and batches of them as row numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.control.sequences import SequenceTable
from kvcore.errors import wrong, wrong_type

if TYPE_CHECKING:
    from kvcore.kv_cache import KVCache
    from kvcore.runtime import Runtime

Index = NDArray[np.intp]


class Registry:
    """Open handles, handles that were dropped, and the last batch that was looked up.

    The last batch is remembered with its handles, so that the same one costs one comparison of
    lists. Any other call lets go of it first: a dropped handle never outlives the next call.
    """

    def __init__(self, runtime: Runtime, seqs: SequenceTable) -> None:
        self._runtime, self._seqs = runtime, seqs
        self._open: dict[int, weakref.ref[KVCache]] = {}
        self._dropped: list[int] = []
        self._batch: list[KVCache] = []
        self._batch_sequences: Index = np.empty(0, np.intp)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def add(self, sequence: int, handle: KVCache) -> None:
        """Remembers whose handle `sequence` has, and notices when it is dropped."""
        dropped = self._dropped

        def gone(_: object) -> None:
            dropped.append(sequence)

        self._open[sequence] = weakref.ref(handle, gone)

    def remove(self, sequence: int) -> None:
        """Forgets the handle of a closed sequence."""
        self._open.pop(sequence, None)
        self.forget_batch()

    def sweep(self, close: Callable[[int], None]) -> int | None:
        """Closes one sequence whose handle was dropped and returns it; None if there is none."""
        if not self._dropped:
            return None
        sequence = self._dropped[-1]
        close(sequence)
        self._dropped.remove(sequence)
        return sequence

    def forget_batch(self) -> None:
        """Lets go of the last batch."""
        if self._batch:
            self._batch, self._batch_sequences = [], np.empty(0, np.intp)

    def remembered(self, kv_caches: Iterable[KVCache]) -> Index | None:
        """The sequence numbers of the last batch, if that is what `kv_caches` is."""
        if kv_caches.__class__ is not list or not self._batch or self._dropped:
            return None
        try:
            same = kv_caches == self._batch  # identities: handles have no __eq__
        except ValueError:  # an array among them: looking them up says what is wrong
            return None
        return self._batch_sequences if same else None

    def resolve(self, kv_caches: Iterable[KVCache]) -> Index:
        """The sequence numbers of distinct active handles of this manager, then remembered."""
        handles = as_list(kv_caches)  # the caller's own list may change
        sequences = self.numbers_of(handles)
        active = self._seqs.active[sequences]
        if np.count_nonzero(active) != active.size:
            bad = int(np.argmin(active))
            raise wrong(
                f"kv_caches[{bad}]", "an active KVCache", handles[bad], "resume() or leave it out"
            )
        self._batch, self._batch_sequences = handles, sequences
        return sequences

    def numbers_of(self, kv_caches: list[KVCache]) -> Index:
        """The sequence numbers of distinct open handles of this manager."""
        count, runtime = len(kv_caches), self._runtime
        try:
            mine = [kv._sequence for kv in kv_caches if kv._runtime is runtime]
        except AttributeError:
            raise _no_handles(kv_caches) from None
        if len(mine) != count:
            bad = next(i for i, kv in enumerate(kv_caches) if kv._runtime is not runtime)
            raise wrong(f"kv_caches[{bad}]", "a cache of this manager", kv_caches[bad])
        sequences = np.fromiter(mine, np.intp, count)
        if np.count_nonzero(sequences < 0):
            bad = int(np.argmin(sequences))
            raise wrong(f"kv_caches[{bad}]", "an open KVCache", kv_caches[bad])
        twice = self._seqs.first_duplicate(sequences)
        if twice is not None:
            raise wrong("kv_caches", "distinct caches", f"sequence {twice} more than once")
        return sequences

    def still_open(self, kv_caches: Iterable[KVCache]) -> list[KVCache]:
        """The distinct handles that are open; raises for anything that is no handle of ours."""
        distinct = list({id(kv): kv for kv in as_list(kv_caches)}.values())
        self.numbers_of([kv for kv in distinct if getattr(kv, "_sequence", 0) >= 0])
        return [kv for kv in distinct if kv._sequence >= 0]


def as_list(kv_caches: Iterable[KVCache]) -> list[KVCache]:
    """A new list of `kv_caches`; raises `TypeError` if they are not iterable."""
    try:
        return list(kv_caches)
    except TypeError:
        raise wrong_type("kv_caches", "an iterable of KVCache handles", kv_caches) from None


def _no_handles(kv_caches: list[KVCache]) -> TypeError:
    return wrong_type("kv_caches", "KVCache handles", kv_caches)
