"""Faults planted in the code: random walks on simulated streams find each of them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import kvcore.control.beams as beams
from kvcore.batch import Batch
from kvcore.bound_rows import BoundRows
from kvcore.control.eviction import STAMP_BITS, EvictionQueue
from kvcore.control.node import Node
from kvcore.control.reuse import PrefixReuse
from kvcore.control.sequences import SequenceTable
from kvcore.control.slots import SlotTable
from kvcore.control.tree import PrefixTree
from kvcore.device.fences import Fences
from kvcore.device.staging import StagingRing
from kvcore.device.tables import DeviceTables
from kvcore.errors import KVCoreError
from kvcore.plan import DirtyCells
from kvcore.runtime import Runtime
from kvcore.streams import Streams
from tests import stress


def nothing(*_, **__):
    """In place of a method that does something."""


def lend_without_waiting(self, sequences, stream):
    for sequence in sequences.tolist():
        if self.of(sequence) is not stream:
            self._lent[sequence] = stream


def bind_without_waiting(self, sequence, stream):
    self._seqs.stream[sequence] = self._number_of(stream)


def prepare_without_waiting(self, *args, right=Batch.prepare, **kwargs):
    self._step = None  # what still reads the batch's staging
    right(self, *args, **kwargs)


def lease_what_is_still_read(self, nbytes):
    place = next(i for i, (buffer, _) in enumerate(self._retired) if buffer.nbytes >= nbytes)
    buffer, _ = self._retired[place]
    del self._retired[place]
    self._leased[id(buffer)] = buffer
    return buffer


def free_without_ticket(self, slots, ticket, *, distinct, right=SlotTable.release):
    return right(self, slots, 0, distinct=distinct)


def mark_without_ticket(self, index, after=0, right=SequenceTable.mark):
    return right(self, index)


def copy_from_the_wrong_parent(parents, width, right=beams._share_out):
    takers, donors, spare = right(parents, width)
    return takers, donors[::-1], spare


def copy_one_token_less(self, copies, stream, right=Runtime.copy_pages):
    one = np.array([[0], [0], [1]], np.int32)
    right(self, tuple(c._replace(pairs=np.maximum(c.pairs - one, 0)) for c in copies), stream)


def merge_without_waits(self, dirty):
    dirty[:] = [DirtyCells(np.unique(np.concatenate([entry.cells for entry in dirty])))]


def find_and_use(self, scope, tokens, right=PrefixReuse.look_up):
    match, length = right(self, scope, tokens)
    if match.path:
        self.tree.let_go(match.path[-1], match.blocks + (match.tail > 0))
    return match, length


def hold_without_counting(self, slots, holders=1):
    self.refs[slots] += holders


def newest_first(self, node, slot, right=EvictionQueue._key):
    rank, stamp = divmod(right(self, node, slot), 1 << STAMP_BITS)
    return rank << STAMP_BITS | (1 << STAMP_BITS) - 1 - stamp


def whatever_the_priority(self, node, slot, right=EvictionQueue._key):
    return right(self, node, slot) % (1 << STAMP_BITS)


def all_of_the_tail(self, node, most, right=EvictionQueue.tail):
    return min(most, node.size)


def not_covered(self, wanted):
    return False


FAULTS = {
    "new slots without waiting": (Streams, "wait", nothing),
    "lending without waiting": (Streams, "lend", lend_without_waiting),
    "taking back without waiting": (Streams, "come_home", nothing),
    "changing streams without waiting": (Streams, "bind", bind_without_waiting),
    "no waits on tickets": (Fences, "wait_one", nothing),
    "table work of two streams unordered": (DeviceTables, "order_behind_last", nothing),
    "staging reused too early": (StagingRing, "lease", lease_what_is_still_read),
    "batch reused too early": (Batch, "prepare", prepare_without_waiting),
    "freed without ticket": (SlotTable, "release", free_without_ticket),
    "cells cleared too early": (SequenceTable, "mark", mark_without_ticket),
    "cells never sent": (SequenceTable, "mark", nothing),
    "waits lost when changes are merged": (DeviceTables, "compact", merge_without_waits),
    "shared pages not held": (SlotTable, "hold", nothing),
    "copies from the wrong parent": (beams, "_share_out", copy_from_the_wrong_parent),
    "the last token not copied": (Runtime, "copy_pages", copy_one_token_less),
    "bound rows not refreshed": (BoundRows, "refresh", nothing),
    "matched pages not held": (SlotTable, "hold_distinct", nothing),
    "evictable pages miscounted": (SlotTable, "hold_distinct", hold_without_counting),
    "a probe is a use": (PrefixReuse, "look_up", find_and_use),
    "the newest evicted first": (EvictionQueue, "_key", newest_first),
    "priorities ignored": (EvictionQueue, "_key", whatever_the_priority),
    "heads evicted with their tails": (EvictionQueue, "tail", all_of_the_tail),
    "tips in use evicted": (EvictionQueue, "leave", nothing),
    "covered partial blocks published": (Node, "covering", not_covered),
    "shorter blocks left beside longer ones": (Node, "partial_prefix", nothing),
    "borrowed pages not copied": (Runtime, "copy_blocks", nothing),
    "duplicates keep their pages": (PrefixReuse, "adopt", nothing),
    "pages of old weights found": (PrefixTree, "make_stale", nothing),
    "published pages read too early": (SlotTable, "ready", nothing),
    "shared pages recycled too early": (SlotTable, "_note", nothing),
    "priorities that never end": (PrefixReuse, "expire", nothing),
}


@pytest.mark.filterwarnings("ignore:a KVCache")  # a walk that fails leaves its caches open
@pytest.mark.parametrize("fault", FAULTS)
def test_random_walks_find_a_planted_fault(fault):
    with mock.patch.object(*FAULTS[fault]):
        found = first_failure(most_walks=150)
    assert found is not None, "the walks did not notice"


TELLING = (0, 1, 8, 7, 11, 12, 14, 10, 47, 66, 74, 79, 120)
"""Seeds whose walks found some of the faults, tried first to save time."""


def first_failure(most_walks):
    seeds = [*TELLING, *(seed for seed in range(most_walks) if seed not in TELLING)]
    for seed in seeds[:most_walks]:
        try:
            stress.walk(seed, 250, deferred=True)
        except (KVCoreError, LookupError, StopIteration, ValueError) as error:
            return error
    return None


def test_the_walks_find_nothing_without_a_fault():
    assert first_failure(most_walks=2) is None
