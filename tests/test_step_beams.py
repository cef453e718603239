"""Beam steps from parents on the device: the host follows later, and never wrongly."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.errors import ParentsPending
from kvcore.testing import check
from tests.helpers import row, typed_manager, used

H, D, T = 2, 8, 4


class Search:
    """Beam searches of several requests, and a naive copy of everything they should see."""

    def __init__(
        self,
        seed,
        prompts,
        widths,
        layout="NHD",
        deferred=True,
        slots=512,
        device=None,
        max_tokens=512,
        **settings,
    ):
        self.rng = np.random.default_rng(seed)
        self.device = device or HostDevice(deferred=deferred, seed=seed)
        self.m = typed_manager(
            slots=slots,
            layers=2,
            layout=layout,
            device=self.device,
            max_beam_width=max(widths),
            enable_partial_commit=False,
            **settings,
        )
        self.stream = self.device.create_stream()
        self.batch = self.m.create_batch(sum(widths), max_tokens)
        self.widths = widths
        self.kvs, self.seen = [], []
        for length, width in zip(prompts, widths, strict=True):
            kv = self.m.create_kv_cache(expected_prompt_length=length)
            assert kv.resume(self.stream)
            assert kv.resize(length, length)
            self.kvs.append(kv)
            values = self.values(length)
            if length:
                self.batch.prepare([kv], length, start=[0])
                self.append(values)
            assert kv.set_beam_width(width)
            self.seen.append([values.copy() for _ in range(width)])

    def values(self, count):
        return self.rng.standard_normal((2, count, H, D)).astype(np.float32)

    def put(self, values):
        """A device array, in the order of the step's stream."""
        array = self.device.empty(values.shape, values.dtype, stream=self.batch_stream)
        self.device.from_host(values, array, stream=self.batch_stream)
        return array

    def append(self, values):
        self.batch.append([0, 1], {"key": self.put(values), "value": self.put(-values)})

    def step(self, parents, stream=None):
        """One token for every beam, then the parents."""
        assert self.m.advance(self.kvs, 1, block=True)
        self.batch.prepare(self.kvs, 1, stream=stream)
        new = self.values(sum(self.widths))
        self.append(new)
        self.expect(new, parents)
        self.m.step_beams(self.batch, self.put(np.array(parents, np.int32)), stream=stream)
        self.end_step()

    def expect(self, new, parents, chosen=None):
        """What the beams of all (or the chosen) requests should see after a step."""
        at = 0
        for i in range(len(self.widths)) if chosen is None else chosen:
            width = self.widths[i]
            grown = [
                np.concatenate([old, new[:, at + b : at + b + 1]], axis=1)
                for b, old in enumerate(self.seen[i])
            ]
            mine = parents[at : at + width]
            self.seen[i] = [grown[p if 0 <= p < width else b] for b, p in enumerate(mine)]
            at += width

    def end_step(self, kvs=None):
        kvs = self.kvs if kvs is None else kvs
        history = [kv.history_length + 1 for kv in kvs]
        assert self.m.advance(kvs, 0, history=history)

    @property
    def batch_stream(self):
        return self.batch._step.stream

    def random(self):
        return [int(p) for width in self.widths for p in self.rng.integers(0, width, width)]

    def content(self):
        """Keys of everything, gathered through the device's own table."""
        lengths = [kv.history_length for kv in self.kvs]
        self.batch.prepare(self.kvs, lengths, start=[0] * len(self.kvs))
        arrays = self.batch.gather([0, 1])
        keys, values = (self.device.to_host(a, stream=self.batch_stream) for a in arrays)
        np.testing.assert_array_equal(values, -keys)
        parts = np.split(keys, np.cumsum(np.repeat(lengths, self.widths))[:-1], axis=1)
        return parts

    def right(self):
        expected = [history for seen in self.seen for history in seen]
        for got, wanted in zip(self.content(), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prompts", [(8, 5, 7), (1, 12, 4)])
def test_random_parents_over_many_steps(seed, layout, prompts):
    s = Search(seed, prompts, (4, 1, 3), layout)
    for step in range(40):
        s.step(s.random())
        if step % 9 == 8:
            s.right()
        if step % 13 == 12:
            for kv in s.kvs:
                kv.settle()
            check(s.m)
            twin = s.device.to_host(s.m._runtime.tables.array, stream=s.stream)
            for kv in s.kvs:
                rows = s.m._runtime.control.seqs.rows[kv._sequence, : kv.beam_width]
                for beam, number in enumerate(rows.tolist()):
                    assert twin[number, 0, : kv.num_blocks].tolist() == row(kv, beam)
    s.right()
    for kv in s.kvs:
        kv.close()
    s.device.drain()
    s.m.create_kv_cache().close()
    assert used(s.m) == 0
    check(s.m)


@pytest.mark.parametrize(
    "parents", [[0, 0, 0, 0], [3, 3, 3, 3], [1, 2, 3, 0], [1, 0, 3, 2], [0, 1, 2, 3], [2, 2, 0, 0]]
)
@pytest.mark.parametrize("prompt", [7, 8, 9])
def test_the_device_follows_the_same_rule_as_the_host(parents, prompt):
    """The same steps through `reorder_beams`: equal rows, equal pages in use."""
    device, host = (Search(1, (prompt,), (4,), deferred=False) for _ in range(2))
    for _ in range(9):
        device.step(parents)
        device.kvs[0].settle()
        (kv,) = host.kvs
        assert host.m.advance([kv], 1)
        kv.reorder_beams(parents, valid_tokens=kv.capacity)
        kv.resize(None, kv.history_length + 1)
        assert [row(device.kvs[0], b) for b in range(4)] == [row(kv, b) for b in range(4)]
        assert used(device.m) == used(host.m)
    check(device.m)


def test_parents_out_of_range_mean_the_beam_itself():
    s = Search(2, (6,), (4,))
    for parents in ([4, 0, -1, 1 << 30], [-(1 << 31), 2, 2, 7], [1, 1, 9, 0]):
        s.step(parents)
    s.right()
    s.kvs[0].settle()
    check(s.m)


def test_questions_wait_and_growth_does_not():
    s = Search(3, (6,), (3,), slots=24)
    (kv,) = s.kvs
    gate = Gate()
    s.stream.wait(gate)
    s.step([2, 0, 0])
    for call in (
        lambda: row(kv),
        lambda: kv.get_aggregated_page_indices(0),
        kv.suspend,
        lambda: kv.reorder_beams([0, 0, 0]),
        lambda: kv.set_beam_width(2),
        lambda: kv.commit([1]),
        lambda: s.m.slot_mapping([kv]),
        lambda: s.m.truncate([kv], [7]),
    ):
        with pytest.raises(ParentsPending, match="settle"):
            call()
    for _ in range(5):
        s.step([1, 1, 0])
    assert kv.num_blocks == 3
    gate.open()
    kv.settle()
    assert len(row(kv)) == 3
    s.right()
    check(s.m)


def test_pages_are_freed_when_the_parents_have_arrived():
    s = Search(4, (4,), (4,), slots=17)
    (kv,) = s.kvs
    for _ in range(8):
        s.step([0, 1, 2, 3])
    kv.settle()
    assert used(s.m) == 1 + 8
    gate = Gate()
    s.stream.wait(gate)
    s.step([1, 1, 1, 1])
    total = s.m.get_storage_statistics()[0].total
    other = s.m.create_kv_cache()
    assert other.resume(s.device.create_stream())
    assert not other.resize((total - 8) * T)  # the pages are there, and nobody knows yet
    gate.open()
    assert other.resize((total - 8) * T, block=True)
    assert used(s.m) == total - 8 + 1 + 2 + 4
    check(s.m)


def test_a_pending_cache_can_be_closed():
    s = Search(5, (6, 3), (3, 2))
    gate = Gate()
    s.stream.wait(gate)
    s.step(s.random())
    s.kvs[0].close()
    s.kvs, s.widths, s.seen = s.kvs[1:], s.widths[1:], s.seen[1:]
    s.step(s.random())
    gate.open()
    s.right()
    s.kvs[0].settle()
    check(s.m)
    s.kvs[0].close()
    assert used(s.m) == 0


def test_the_step_is_over_afterwards():
    s = Search(6, (6,), (2,))
    s.step([1, 1])
    with pytest.raises(k.StateError, match="prepare"):
        s.batch.gather(0)


def test_steps_on_changing_streams():
    s = Search(7, (6, 9), (4, 3))
    others = [s.device.create_stream() for _ in range(2)]
    for step in range(24):
        s.step(s.random(), stream=others[step % 2])
    s.right()
    for kv in s.kvs:
        kv.settle()
    check(s.m)


def test_a_bound_row_follows_when_the_parents_have_arrived():
    s = Search(8, (8,), (2,), deferred=False)
    (kv,) = s.kvs
    mine = np.zeros(8, np.int32)
    kv.set_base_page_index_buf(1, 0, mine)
    for _ in range(6):
        s.step([1, 0])
        kv.settle()
        assert mine[: kv.num_blocks].tolist() == row(kv, 1)


def test_wrong_parents_are_refused():
    s = Search(9, (6,), (2,))
    assert s.m.advance(s.kvs, 1)
    s.batch.prepare(s.kvs, 1)
    for wrong in (np.zeros(3, np.int32), np.zeros(2, np.int64), np.zeros((2, 1), np.int32)):
        with pytest.raises((ValueError, TypeError), match="parents"):
            s.m.step_beams(s.batch, wrong)
    m = typed_manager()
    batch = m.create_batch(1, 4)
    with pytest.raises(k.StateError):
        m.step_beams(batch, np.zeros(1, np.int32))


def test_parents_read_too_early_show(monkeypatch):
    """Freed pages are overwritten at once by another stream, in every order that events allow."""

    def run(seed):
        s = Search(seed, (4, 6), (4, 3), slots=40)
        thief = s.m.create_kv_cache()
        assert thief.resume(s.device.create_stream())
        try:
            for _ in range(14):
                s.step(s.random())
                room = s.m.get_storage_statistics()[0].free
                if room > 4 and thief.resize(thief.capacity + T * (room - 4)):
                    slots = thief.get_base_page_indices(0)
                    places = s.m._runtime.pool_places[0]
                    s.device.fill_pages(places, slots, 9, stream=thief.stream)
                    s.m.truncate([thief], [0])
            s.right()
        except AssertionError:
            return False
        finally:
            for kv in (*s.kvs, thief):
                kv.close()
        return True

    assert all(run(seed) for seed in range(12))
    monkeypatch.setattr("kvcore.parents.PendingParents.take_arrived", _take_everything)
    assert not all(run(seed) for seed in range(12))


def _take_everything(pending):
    while pending._steps:
        pending._follow()
