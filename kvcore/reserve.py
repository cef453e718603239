"""Growth across managers: all or nobody."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_int, as_items
from kvcore.control.sequences import NO_LIMIT
from kvcore.errors import InternalError, wrong, wrong_type
from kvcore.ids import NO_SLOT
from kvcore.kv_cache import KVCache

if TYPE_CHECKING:
    from kvcore.runtime import Runtime

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]


def reserve_all(reservations: Iterable[tuple[KVCache, int]], *, block: bool = False) -> bool:
    """Grows caches of one or of several managers together, or none of them.

    For a request whose pages lie in several managers: an encoder-decoder model keeps the decoder's
    in one and the encoder's, which all beams read, in another on the same device.

    Parameters
    ----------
    reservations : iterable of (KVCache, int)
        Distinct active caches, and the capacity each shall have: tokens, at least the present ones.
    block : bool
        Where pages are short and parents of beam steps are on their way, BLOCK until these have
        arrived and freed what they free.

    Returns
    -------
    bool
        False if the pages for all of them are not there. Then nothing changed, and nothing was
        evicted.

    Raises
    ------
    ValueError, TypeError
        No such pairs; a cache occurs twice or is not active; a capacity is below the present one or
        above `max_seq_len`; a bound page-index row is too short. Nothing changed.
    StateError
        A manager was shut down.

    Notes
    -----
    Holds the locks of all the managers meanwhile, taken in one order for all threads. If the driver
    fails at one manager, what others took is given back. A handful of vector operations per
    manager, plus O(new pages). Enqueues nothing but waits for the previous owners of the new slots.

    Examples
    --------
    >>> import kvcore as k
    >>> config = k.KVCacheManagerConfig(
    ...     tokens_per_block=4,
    ...     cache_tiers=[k.GpuCacheTierConfig(quota=8 * 4096)],
    ...     layers=[
    ...         k.AttentionLayerConfig(layer_id=0, buffers=[k.BufferConfig(role="key", size=4096)])
    ...     ],
    ... )
    >>> own, cross = (k.KVCacheManager(config, device="host").create_kv_cache() for _ in range(2))
    >>> own.resume(), cross.resume()
    (True, True)
    >>> k.reserve_all([(own, 9), (cross, 33)]), own.capacity
    (False, 0)
    >>> k.reserve_all([(own, 9), (cross, 32)]), own.capacity
    (True, 9)
    """
    pairs = _as_pairs(reservations)
    runtimes = sorted({kv._runtime for kv, _ in pairs}, key=id)  # one order for all threads
    with ExitStack() as locks:
        for runtime in runtimes:
            locks.enter_context(runtime.lock)
        for runtime in runtimes:
            runtime.enter()
        growths = [_growth(runtime, pairs) for runtime in runtimes]
        while not all(growth.fits() for growth in growths):
            waiting = next((runtime for runtime in runtimes if runtime.parents), None)
            if not block or waiting is None:
                return False
            waiting.parents.wait_for_one()
        _grow_all(growths)
        for growth in growths:
            growth.runtime.control.seqs.capacity[growth.sequences] = growth.capacity
        return True


def _as_pairs(reservations: Iterable[tuple[KVCache, int]]) -> list[tuple[KVCache, int]]:
    some = as_items("reservations", reservations, "(KVCache, capacity)")
    pairs: list[tuple[KVCache, int]] = []
    seen: set[int] = set()  # ids: handles are identities
    for i, pair in enumerate(some):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise wrong_type(f"reservations[{i}]", "a pair (KVCache, capacity)", pair)
        kv, capacity = pair
        if not isinstance(kv, KVCache):
            raise wrong_type(f"reservations[{i}][0]", "a KVCache", kv)
        if id(kv) in seen:
            raise wrong(f"reservations[{i}][0]", "distinct caches", kv, "name each cache once")
        seen.add(id(kv))
        pairs.append((kv, as_int(f"reservations[{i}][1]", capacity, 0)))
    return pairs


def _growth(runtime: Runtime, pairs: list[tuple[KVCache, int]]) -> _Growth:
    """The part of `pairs` that one manager has to do, checked."""
    seqs, longest = runtime.control.seqs, runtime.longest
    sequences, capacities = [], []
    for i, (kv, capacity) in enumerate(pairs):
        if kv._runtime is not runtime:
            continue
        if not kv.is_active:
            raise wrong(f"reservations[{i}][0]", "an active KVCache", kv, "resume() it first")
        if capacity < kv.capacity:
            raise wrong(f"reservations[{i}][1]", f"at least the present {kv.capacity}", capacity)
        if longest is not None and capacity > longest:
            raise wrong(f"reservations[{i}][1]", f"at most max_seq_len={longest}", capacity)
        sequences.append(kv._sequence)
        capacities.append(min(capacity, NO_LIMIT))  # above any reach
    growth = _Growth(runtime, np.array(sequences, np.intp), np.array(capacities, np.int32))
    if runtime.bound_rows and growth.some.size:
        wanted = -(-growth.capacity[growth.more] // seqs.shape.tokens_per_block)
        runtime.bound_rows.check(growth.some, wanted)
    return growth


class _Growth:
    """What one manager has to do, and how it was before."""

    def __init__(self, runtime: Runtime, sequences: Index, capacity: Int32) -> None:
        self.runtime, self.sequences, self.capacity = runtime, sequences, capacity
        seqs = runtime.control.seqs
        self.more = capacity > seqs.limit[sequences]
        self.some: Index = sequences[self.more]  # those that need pages
        self._blocks, self._limit = seqs.num_blocks[self.some], seqs.limit[self.some]
        wanted = -(-capacity[self.more] // seqs.shape.tokens_per_block)
        self._count: Int32 = wanted - self._blocks
        self._pages = int(np.multiply(self._count, seqs.width[self.some], dtype=np.int64).sum())

    def fits(self) -> bool:
        """Whether there is room, free or evictable. Changes nothing."""
        return not self.runtime.control.missing(self._pages)

    def grow(self) -> None:
        """Takes the pages. An error leaves everything as it was."""
        if self.some.size and not self.runtime.grow(self.some, self.capacity[self.more]):
            raise InternalError("reserve_all: the room that was there is gone")

    def undo(self) -> None:
        """Gives the pages back, which nobody has used, as they were. Asks nothing of the driver."""
        control = self.runtime.control
        seqs = control.seqs
        if not self.some.size:
            return
        index = seqs.span(self.some, self._blocks, self._count, self._pages)
        for group, slots in enumerate(control.slots_of):
            where = index + group * seqs.shape.max_blocks
            slots.release(seqs.cells[where], None, distinct=True)  # keeps the moments to wait for
            seqs.cells[where] = NO_SLOT
        seqs.num_blocks[self.some], seqs.limit[self.some] = self._blocks, self._limit
        self.runtime.bound_rows.refresh_all(self.some)


def _grow_all(growths: list[_Growth]) -> None:
    done: list[_Growth] = []
    try:
        for growth in growths:
            growth.grow()
            done.append(growth)
    except BaseException:
        for growth in reversed(done):
            growth.undo()
        raise
