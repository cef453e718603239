"""Beam steps from parents on the device, on a GPU: searches, wide beams, captured graphs."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.errors import ParentsPending
from kvcore.testing import check
from tests.device.battery_beams import Request, batch_of, expect_step, put_beams
from tests.device.battery_tails import Tails
from tests.gpu import tools
from tests.helpers import row, used
from tests.test_step_beams import D, H, Search, T

EXTREMES = (-1, -(1 << 31), (1 << 31) - 1, 1 << 30)


@pytest.fixture
def search(device, monkeypatch):
    """Makes searches on the device; everything is given back in the end."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)  # few, small pages
    made = []

    def make(*args, **settings):
        made.append(Search(*args, device=device, **settings))
        return made[-1]

    yield make
    while made:
        s = made.pop()
        for kv in s.kvs:
            kv.close()
        assert used(s.m) == 0
        check(s.m)
        s.m.shutdown()
        del s


def busy(s, stream):
    """Keeps a stream from going on for a while, up to a third of a millisecond."""
    cycles = int(s.rng.integers(0, 500_000))
    s.device.launch("latch", "delay")(stream, 1, 1, 1, cycles)


def rows_agree(s):
    """The device's rows are the host's."""
    for kv in s.kvs:
        kv.settle()
    check(s.m)
    runtime = s.m._runtime
    twin = s.device.to_host(runtime.tables.array[: runtime.control.seqs.used_rows],
                            stream=s.stream)  # fmt: skip
    for kv in s.kvs:
        rows = runtime.control.seqs.rows[kv._sequence, : kv.beam_width]
        for beam, number in enumerate(rows.tolist()):
            assert twin[number, 0, : kv.num_blocks].tolist() == row(kv, beam)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prompts", [(8, 5, 7), (1, 12, 4)])
def test_random_parents_over_many_steps(search, seed, layout, prompts):
    s = search(seed, prompts, (4, 1, 3), layout)
    for step in range(40):
        s.step(s.random())
        if step % 9 == 8:
            s.right()
        if step % 13 == 12:
            rows_agree(s)
    s.right()


@pytest.mark.parametrize("seed", range(4))
def test_steps_on_changing_streams(search, seed):
    """Streams that are late by chance, each step on another one."""
    s = search(seed, (6, 9), (4, 3))
    streams = [s.device.create_stream() for _ in range(3)]
    for step in range(30):
        for stream in (s.stream, *streams):
            busy(s, stream)
        s.step(s.random(), stream=streams[step % 3])
    s.right()
    rows_agree(s)


@pytest.mark.parametrize("seed", range(4))
def test_freed_pages_are_overwritten_at_once(search, seed):
    """Another stream writes into whatever is free; no beam may still have read it later."""
    s = search(seed, (4, 6), (4, 3), slots=40)
    thief = s.m.create_kv_cache()
    assert thief.resume(s.device.create_stream())
    thefts = 0
    for _ in range(24):
        busy(s, s.stream)
        s.step(s.random())
        room = s.m.get_storage_statistics()[0].free
        if room > 4 and thief.resize(thief.capacity + T * (room - 4)):
            slots, places = thief.get_base_page_indices(0), s.m._runtime.pool_places[0]
            s.device.fill_pages(places, slots, 9, stream=thief.stream)
            s.m.truncate([thief], [0])
            thefts += 1
    s.right()
    assert thefts
    thief.close()


def test_parents_out_of_range_mean_the_beam_itself(search):
    s = search(2, (6,), (4,))
    for parents in ([4, 0, -1, 1 << 30], [-(1 << 31), 2, 2, 7], [1, 1, 9, 0]):
        s.step(parents)
    s.right()
    rows_agree(s)


def test_nothing_waits_for_the_device(search):
    """Steps, growth and answers come back while the stream stands still."""
    s = search(3, (6, 5), (4, 3))
    (kv, _) = s.kvs
    for _ in range(3):
        s.step(s.random())
    s.right()  # every kernel is loaded; now the staging, which is made by waiting
    runtime = s.m._runtime
    for ring, size in ((runtime.parents._ring, 64), (runtime.tables._ring, 4096),
                       (s.device._uploads._ring, 4096)):  # fmt: skip
        for buffer in [ring.lease(size) for _ in range(24)]:
            ring.retire(buffer, None)
    with tools.held(s.device, s.stream):
        for _ in range(3):
            s.step(s.random())
        with pytest.raises(ParentsPending, match="settle"):
            row(kv)
        assert not s.stream.record().done()
    s.right()
    rows_agree(s)


# -- wide ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 5, 8, 16, 31, 32, 33, 64, 127, 128])
def test_widths_up_to_128(search, width):
    """Beside a request of one beam."""
    s = search(width, (5, 2), (width, 1), slots=32 + 6 * width, max_tokens=32 * width)
    for _ in range(9):
        s.step(s.random())
    s.right()
    rows_agree(s)


@pytest.mark.no_sanitizer
def test_five_thousand_beams(search):
    s = search(0, (5,), (5_000,), slots=4 * 5_000, max_tokens=13 * 5_000)
    for _ in range(5):
        s.step(s.random())
    s.step([4_999] * 5_000)
    s.step(np.roll(np.arange(5_000), 1).tolist())
    s.right()
    rows_agree(s)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 40, 300])
def test_wild_parents_never_leave_the_memory(rig, width):
    """Table, sources and pools lie between guards; parents are any 32 bits, or too few."""
    rows = rig.rng.permutation(width + 3)[:width].tolist()
    tails = Tails.make(rig, [[(16 * T, 16), (48 * T, 48)]], 3 * (width + 3), 16)
    slots = rig.rng.permutation(3 * (width + 3)).astype(np.int32)
    whole = np.full((width + 7, 3, 7), -5, np.int32)
    whole[2:-2, 1:2, 2:-2] = slots.reshape(-1, 1, 3)
    around = rig.put(whole)
    table = around[2:-2, 1:2, 2:-2]
    room = rig.put(np.full(width + 64, 77, np.int32))
    sources = room[32:-32]
    for given in range(6):
        parents = rig.rng.integers(-(1 << 31), 1 << 31, width).astype(np.int32)
        parents[rig.rng.random(width) < 0.4] = rig.rng.integers(0, width)
        parents[:4] = EXTREMES
        parents = parents[: width - given * width // 8]
        filled = np.concatenate([parents, np.full(width - len(parents), -1, np.int32)])
        request = Request(rows, filled.tolist(), 1, 3, 2 * T + 1)
        beams = put_beams(rig, batch_of([request]))
        rig.device.step_rows(table, beams, rig.put(parents), sources, stream=rig.stream)
        rig.device.copy_tails(
            tails.buffers, table[:, 0], beams, sources, tokens_per_block=T, stream=rig.stream
        )
        before = whole[2:-2, 1:2, 2:-2].copy()
        whole[2:-2, 1:2, 2:-2], copied = expect_step(before, [request], width)
        np.testing.assert_array_equal(rig.get(around), whole)
        found = rig.get(room)
        assert found[32:-32].tolist() == copied
        assert set(found[:32]) | set(found[-32:]) == {77}
        for at, donor in zip(rows, copied, strict=True):
            for ordinal in (1, 2) if donor >= 0 else ():
                pair = whole[2 + donor, 1, 2 + ordinal], whole[2 + at, 1, 2 + ordinal]
                tails.expect(*pair, min(2 * T + 1 - ordinal * T, T))
        tails.check()


# -- captured graphs -------------------------------------------------------------------------------


class CapturedStep:
    """Append, rows and tails of a step in one graph, which is replayed for any requests."""

    def __init__(self, s):
        self.s, self._graph, self._on = s, None, tools.capturable(s.device)
        self.stream = s.device.stream(self._on)
        rows = sum(s.widths) + 3  # never all of them: the rest is padding
        self.batch = s.m.create_batch(rows, rows)
        put = s.device.empty
        self.arrays = [put((2, rows, H, D), np.float32) for _ in range(2)]
        self.parents = put((rows,), np.int32)

    def work(self, stream):
        roles = dict(zip(("key", "value"), self.arrays, strict=True))
        self.batch.append([0, 1], roles)
        self.s.m.step_beams(self.batch, self.parents)

    def step(self, chosen, captured=True):
        """One token for the beams of the chosen requests; the host follows from the graph."""
        s = self.s
        kvs = [s.kvs[i] for i in chosen]
        assert s.m.advance(kvs, 1)
        self.batch.prepare(kvs, 1, stream=self.stream)
        count = self.batch.num_rows
        parents = [int(p) for i in chosen for p in s.rng.integers(-1, s.widths[i], s.widths[i])]
        new = s.values(count)
        padded = np.zeros((2, self.batch.max_rows, H, D), np.float32)
        padded[:, :count] = new
        for values, array in ((padded, self.arrays[0]), (-padded, self.arrays[1]),
                              (_padded(parents, self.batch.max_rows), self.parents)):  # fmt: skip
            s.device.from_host(values, array, stream=self.stream)
        if not captured:
            self.work(self.stream)
        else:
            if self._graph is None:
                self._graph = tools.Graph(s.device, self.work, self._on)
            self._graph.launch()
            self.batch.finish(self.parents, stream=self.stream)
        s.expect(new, parents, chosen)
        s.end_step(kvs)


def _padded(values, size):
    """Nonsense behind the values."""
    return np.array(values + list(range(size - len(values))), np.int32)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("warm", [True, False])
def test_a_captured_step_replays_with_other_parents_and_lengths(search, layout, warm):
    """Also without any beam step before: then the capture prepares what it needs."""
    s = search(11, (6, 9, 1, 13), (4, 3, 1, 5), layout)
    graph = CapturedStep(s)
    if warm:
        graph.step([0, 1], captured=False)
    for step in range(36):
        count = 1 + int(s.rng.integers(0, 4))
        graph.step([int(i) for i in s.rng.permutation(4)[:count]])
        if step % 9 == 8:
            s.right()
            rows_agree(s)
    s.right()


def test_captured_steps_alternate_with_others(search):
    """A graph on one stream, eager steps on another."""
    s = search(12, (6, 9), (4, 3))
    graph = CapturedStep(s)
    for _ in range(12):
        busy(s, s.stream)
        s.step(s.random())
        busy(s, graph.stream)
        graph.step([1, 0])
    s.right()
    rows_agree(s)
