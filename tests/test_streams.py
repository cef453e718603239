"""Pages on several streams: right in every order that events allow, and each wait is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from tests.helpers import opened, row, typed_manager

H, D = 2, 256
SEEDS = range(80)


class Scene:
    """One deferred device, four streams, and a cache `a` of 4 tokens on the first."""

    def __init__(self, seed: int, slots: int = 1, **settings: Any) -> None:
        self.device = HostDevice(deferred=True, seed=seed)
        shape = {"layers": 1, "heads": H, "dim": D}
        self.m = typed_manager(slots=slots, device=self.device, **shape, **settings)
        self.s1, self.s2, self.s3, self.s4 = (self.device.create_stream() for _ in range(4))
        self.a = self.m.create_kv_cache()
        assert self.a.resume(self.s1)
        assert self.a.resize(4)
        self.step = self.m.create_batch(1, 4)

    def values(self, value: float) -> dict[str, np.ndarray]:
        page = np.full((4, H, D), value, np.float32)
        return {"key": page, "value": page}

    def take_over(self) -> None:
        """A new owner on the fourth stream gets the freed page and overwrites it at once."""
        self.b = self.m.create_kv_cache()
        assert self.b.resume(self.s4)
        assert self.b.resize(4)
        slots = self.b.get_base_page_indices(0)
        self.device.fill_pages(self.m._runtime.pool_places[0], slots, 9, stream=self.s4)

    def taken_over_page_is_the_new_owners(self) -> bool:
        self.device.drain()
        memory = self.m._runtime.pools[0][0]
        page = memory.array(np.uint8, (memory.nbytes,))[: 2 * 4 * H * D * 4]
        return bool((page == 9).all())


def append_on_two_lent_streams(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4, stream=s.s2)
    s.step.append(0, s.values(1), stream=s.s3)
    s.step.append(0, s.values(2))
    s.a.close()
    s.take_over()
    return s.taken_over_page_is_the_new_owners()


def append_after_coming_home(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4, stream=s.s2)
    s.step.finish()
    s.step.append(0, s.values(1))
    s.a.close()
    s.take_over()
    return s.taken_over_page_is_the_new_owners()


def two_batches_on_two_lent_streams(seed: int) -> bool:
    s = Scene(seed)
    other = s.m.create_batch(1, 4)
    s.step.prepare([s.a], 4, stream=s.s2)
    other.prepare([s.a], 4, stream=s.s3)
    s.step.append(0, s.values(1))
    other.append(0, s.values(2))
    s.step.append(0, s.values(3))
    s.a.close()
    s.take_over()
    return s.taken_over_page_is_the_new_owners()


def operations_of_a_step_on_changing_streams(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4)
    right = []
    for value in range(6):
        s.step.append(0, s.values(value))
        right.append(s.step.gather(0, stream=s.s3)[0])
    s.device.drain()
    return all(bool((keys == value).all()) for value, keys in enumerate(right))


def a_sequence_moves_to_another_stream(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4)
    s.step.append(0, s.values(1))
    s.a.suspend()
    assert s.a.resume(s.s2)
    slots = s.a.get_base_page_indices(0)
    s.device.fill_pages(s.m._runtime.pool_places[0], slots, 9, stream=s.s2)
    return s.taken_over_page_is_the_new_owners()


def reading_the_table_is_no_change_to_wait_for(seed: int) -> bool:
    """A page table read on one stream must not hide the rows another stream was filling."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=512, layers=1, max_sequences=8, device=device)
    one, two = device.create_stream(), device.create_stream()
    first, second = m.create_batch(2, 8), m.create_batch(2, 8)

    def active(stream):
        kv = m.create_kv_cache()
        assert kv.resume(stream)
        assert kv.resize(4)
        return kv

    a = active(one)
    first.prepare([a])
    unused, c = m.create_kv_cache(), active(two)
    second.prepare([c])  # fills new rows on the second stream
    first.page_table()
    d = active(one)
    first.prepare([a, d])
    table = device.to_host(first.page_table(), stream=one)
    unused.close()
    return table.tolist() == [row(a), row(d)]


def the_next_step_is_another_sequences_on_another_stream(seed: int) -> bool:
    """Both steps are described in the same memory: the second comes after who reads the first."""
    s = Scene(seed, slots=2)
    b = s.m.create_kv_cache()
    assert b.resume(s.s2)
    assert b.resize(4)
    for kv, value in ((s.a, 1), (b, 2)):
        s.step.prepare([kv], 4)
        s.step.append(0, s.values(value))
    s.device.drain()
    pages = s.m.get_pages(0, "key")
    return all(bool((pages[row(kv)] == value).all()) for kv, value in ((s.a, 1), (b, 2)))


def a_finished_steps_pages_are_their_own_streams(seed: int) -> bool:
    """The engine goes on with them by itself, where the sequence is bound."""
    s = Scene(seed)
    s.step.prepare([s.a], 4, stream=s.s2)
    s.step.append(0, s.values(1))
    s.step.finish()
    slots = s.a.get_base_page_indices(0)
    s.device.fill_pages(s.m._runtime.pool_places[0], slots, 9, stream=s.s1)
    return s.taken_over_page_is_the_new_owners()


def pages_of_many_are_cut_off(seed: int) -> bool:
    """Where a batch on another stream has them on loan and is still writing."""
    s = Scene(seed, slots=2)
    b = s.m.create_kv_cache()
    assert b.resume(s.s1)
    assert b.resize(4)
    both = s.m.create_batch(2, 8)
    both.prepare([s.a, b], 4, stream=s.s2)
    page = np.ones((8, H, D), np.float32)
    both.append(0, {"key": page, "value": page})
    s.m.truncate([s.a, b], 0)
    s.take_over()
    s.device.drain()
    return bool((s.m.get_pages(0, "key")[row(s.b)[0]].view(np.uint8) == 9).all())


def searching(manager: k.KVCacheManager, stream: object) -> k.KVCache:
    """A cache of two beams that share one block, which is computed, and have one each behind it."""
    kv = manager.create_kv_cache(expected_prompt_length=4)
    assert kv.resume(stream)
    assert kv.resize(4, 4)
    assert kv.set_beam_width(2)
    assert kv.resize(5)
    return kv


BEAMS = {"max_beam_width": 2, "enable_partial_commit": False}


def a_beam_step_is_no_change_to_wait_for_instead(seed: int) -> bool:
    """Parents on one stream must not hide the rows of the table another stream was filling."""
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=512, layers=1, max_sequences=8, device=device, **BEAMS)
    one, two = device.create_stream(), device.create_stream()
    first, second = m.create_batch(2, 8), m.create_batch(2, 8)
    a = searching(m, one)
    first.prepare([a])
    _unused = [m.create_kv_cache() for _ in range(2)]  # in the rows that are there already
    c = m.create_kv_cache()
    assert c.resume(two)
    assert c.resize(4)
    second.prepare([c])  # fills new rows on the second stream
    m.step_beams(first, np.array([1, 0], np.int32))
    d = m.create_kv_cache()
    assert d.resume(one)
    assert d.resize(4)
    first.prepare([d])
    return device.to_host(first.page_table(), stream=one).tolist() == [row(d)]


def a_new_beams_page_is_still_written(seed: int) -> bool:
    """The copy for a beam comes after the work of those who had its page before."""
    s = Scene(seed, slots=2, **BEAMS)
    device, m = s.device, s.m
    s.step.prepare([s.a], 4)
    s.step.append(0, s.values(1))
    b = m.create_kv_cache()
    assert b.resume(s.s2)
    assert b.resize(4)
    s.step.prepare([b], 4)
    s.step.append(0, s.values(2))
    b.close()
    assert s.a.resize(None, 1)
    assert s.a.set_beam_width(2)
    device.drain()
    return bool((m.get_pages(0, "key")[row(s.a, 1)] == 1).all())


def shutdown_waits_for_streams_nobody_is_bound_to(seed: int) -> bool:
    s = Scene(seed)
    s.step.prepare([s.a], 4)
    s.step.append(0, s.values(1))
    s.a.close()
    with s.m.create_kv_cache() as other:
        assert other.resume(s.s2)
    s.m.shutdown()
    return not s.device.simulator.step()  # nothing was left to run


def a_lent_sequence_grows_into_a_page_still_read(seed: int) -> bool:
    """Who has the pages on loan waits for the last reader of new ones, as their owner does."""
    s = Scene(seed, slots=2)  # as many as there are: 4 tokens for `a`, 4 for `other`
    s.step.prepare([s.a], 4, stream=s.s2)
    other = s.m.create_kv_cache()
    assert other.resume(s.s3)
    assert other.resize(4)
    theirs = s.m.create_batch(1, 4)
    theirs.prepare([other], 4)
    theirs.append(0, s.values(1))
    keys, _ = theirs.gather(0)
    other.close()
    assert s.a.resize(8)
    slots = s.a.get_base_page_indices(0)[1:]
    s.device.fill_pages(s.m._runtime.pool_places[0], slots, 9, stream=s.s2)
    s.device.drain()
    return bool((keys == 1).all())


SCENES = [
    pages_of_many_are_cut_off,
    a_beam_step_is_no_change_to_wait_for_instead,
    a_finished_steps_pages_are_their_own_streams,
    a_lent_sequence_grows_into_a_page_still_read,
    a_new_beams_page_is_still_written,
    append_on_two_lent_streams,
    append_after_coming_home,
    two_batches_on_two_lent_streams,
    operations_of_a_step_on_changing_streams,
    a_sequence_moves_to_another_stream,
    reading_the_table_is_no_change_to_wait_for,
    the_next_step_is_another_sequences_on_another_stream,
    shutdown_waits_for_streams_nobody_is_bound_to,
]


@pytest.mark.parametrize("scene", SCENES)
def test_right_in_every_order(scene):
    wrong = [seed for seed in SEEDS if not scene(seed)]
    assert not wrong


@pytest.mark.parametrize(
    ("scene", "without"),
    [
        (append_on_two_lent_streams, "come_home"),
        (append_after_coming_home, "come_home"),
        (two_batches_on_two_lent_streams, "come_home"),
        (a_sequence_moves_to_another_stream, "bind"),
    ],
)
def test_each_wait_is_needed(scene, without, monkeypatch):
    def home_without_waiting(streams, sequence):
        streams._lent.pop(sequence, None)

    def bind_without_waiting(streams, sequence, stream):
        streams._seqs.stream[sequence] = streams._number_of(stream)

    broken = {"come_home": home_without_waiting, "bind": bind_without_waiting}[without]
    monkeypatch.setattr(f"kvcore.streams.Streams.{without}", broken)
    assert not all(scene(seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda kv: kv.close(),
        lambda kv: kv.suspend(),
        lambda kv: kv.resize(3),
        lambda kv: kv.reorder_beams([1, 0]),
        lambda kv: kv.set_beam_width(1),
        lambda kv: (kv.suspend(), kv.resume()),
    ],
)
def test_a_step_is_void_once_its_pages_changed(change):
    m = typed_manager(slots=32, max_beam_width=2, enable_partial_commit=False)
    kv, other = opened(m, 9, 4)
    kv.resize(None, 3)
    kv.set_beam_width(2)
    step = m.create_batch(4, 16)
    step.prepare([kv, other], 1)
    assert other.resize(8)  # growth does not matter
    assert kv.resize(11)
    step.gather(0)
    change(kv)
    for operation in (lambda: step.gather(0), step.page_table):
        with pytest.raises(k.StateError, match="prepare the step again"):
            operation()


def test_a_prepare_that_fails_leaves_no_step_and_can_be_repeated(monkeypatch):
    device = HostDevice(deferred=True, seed=2)
    m = typed_manager(slots=32, device=device)
    a, b = opened(m, 9, 5)
    step = m.create_batch(4, 16)
    step.prepare([a], 1)
    real = device.map_tokens

    def failing(*args, **kwargs):
        raise k.DriverError("cuLaunchKernel", 1, "made to fail")

    monkeypatch.setattr(device, "map_tokens", failing)
    with pytest.raises(k.DriverError):
        step.prepare([a, b], [4, 3], start=[5, 2])
    with pytest.raises(k.StateError, match="prepare"):
        step.gather(0)
    monkeypatch.setattr(device, "map_tokens", real)
    assert b.resize(13)
    step.prepare([a, b], [4, 3], start=[5, 2])
    assert (step.num_rows, step.num_tokens) == (2, 7)
    table = device.to_host(step.page_table(), stream=a.stream)
    assert table.tolist() == [[*row(a), -1], row(b)]
