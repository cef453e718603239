"""Indirection mode: whose position is it after it was written again, or never was."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device.simulated import Gate
from kvcore.errors import ParentsPending
from kvcore.testing import check
from tests.helpers import row
from tests.test_indirection import Indirect, check_all


def test_a_sequence_that_takes_an_old_number_has_no_paths():
    """Closed with steps that nobody worked in, its number and rows go to a cache of one beam."""
    s = Indirect(13, (6,), (3,), deferred=False)
    for _ in range(6):
        s.step([2, 0, 1])
    s.kvs[0].close()
    kv = s.m.create_kv_cache()
    assert kv.resume(s.stream)
    assert kv.resize(12, 12)
    kv.commit(range(12))
    assert s.m.probe_reuse(input_tokens=range(12)) == 12
    check(s.m)


@pytest.mark.parametrize("on_device", [True, False])
def test_tokens_written_after_others_were_given_up_are_each_beam_s_own(on_device):
    """Also where no parents follow, because they would be the beams themselves."""
    s = Indirect(14, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    assert kv.resize(12)
    s.batch.prepare([kv], 3)
    new, parents = s.values(9), [1, 2, 0]
    s.append(new)
    s.expect(new[:, ::3], parents)
    if on_device:
        s.m.step_beams(s.batch, s.put(np.array(parents, np.int32)))
        kv.settle()
    else:
        kv.reorder_beams(parents)
    kv.resize(None, 6)
    for _ in range(3):
        s.batch.prepare([kv], 1)
        new = s.values(3)
        s.append(new)
        s.expect(new, [0, 1, 2])
        s.end_step()
        s.right()
    kv.reorder_beams([2, 2, 1])
    s.seen[0] = [s.seen[0][p] for p in (2, 2, 1)]
    s.right()
    check_all(s)


def test_parents_of_the_host_with_room_ahead():
    """The default of `valid_tokens` covers tokens that are written, by each beam, later."""
    s = Indirect(15, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    assert kv.resize(30)
    for _ in range(12):
        slots, offsets = s.m.slot_mapping([kv], 1)
        s.batch.prepare([kv], 1)
        np.testing.assert_array_equal(s.batch.mapping[0, :3], np.stack([slots, offsets], axis=1))
        new, parents = s.values(3), s.random()
        s.append(new)
        s.expect(new, parents)
        kv.reorder_beams(parents)
        kv.resize(None, kv.history_length + 1)
        s.right()
        check_all(s)


def pairs(mapping):
    return list(zip(*(part.tolist() for part in mapping), strict=True))


def test_a_mapping_of_the_host_that_writes_counts_as_a_step():
    s = Indirect(16, (5,), (2,), deferred=False)
    (kv,) = s.kvs
    assert kv.resize(8)
    kv.reorder_beams([1, 0])
    own = [(row(kv, b)[1], 1) for b in range(2)]
    assert pairs(s.m.slot_mapping([kv], 1)) == own
    assert kv.resize(None, 6)
    assert pairs(s.m.slot_mapping([kv], 1, start=[5])) == own


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_step_of_few_tokens_or_none_keeps_the_whole_history(tokens):
    """Drafts follow as well, until others are written in their place."""
    s = Indirect(17, (5,), (3,), deferred=False)
    (kv,) = s.kvs
    for _ in range(6):
        s.step(s.random())
    s.batch.prepare([kv], tokens, start=[0])
    s.m.step_beams(s.batch, s.put(np.array([1, 2, 0], np.int32)))
    s.seen[0] = [s.seen[0][p] for p in (1, 2, 0)]
    s.right()
    assert kv.resize(14)
    s.batch.prepare([kv], 3)
    new, parents = s.values(9), [2, 0, 0]
    s.append(new)
    for i in range(3):
        s.expect(new[:, i::3], parents if i == 2 else [0, 1, 2])
    s.m.step_beams(s.batch, s.put(np.array(parents, np.int32)))
    kv.settle()
    s.batch.prepare([kv], 0)  # writes nothing
    assert kv.resize(None, 14)
    s.right()
    check_all(s)


def test_the_oracle_judges_no_path_that_nobody_knows_yet():
    """Its rows hold cells of their owner before, who had more beams."""
    s = Indirect(18, (6,), (4,))
    (old,) = s.kvs
    s.step([3, 3, 3, 3])
    check_all(s)
    old.close()
    kv = s.m.create_kv_cache(expected_prompt_length=6)
    assert kv.resume(s.stream)
    assert kv.resize(7, 6)
    assert kv.set_beam_width(2)
    s.batch.prepare([kv], 1)
    gate = Gate()
    s.stream.wait(gate)
    s.m.step_beams(s.batch, s.put(np.array([1, 1], np.int32)))
    with pytest.raises(ParentsPending):
        row(kv)
    check(s.m)
    gate.open()
    kv.settle()
    check(s.m)
