"""Published pages on several streams: right in every order that events allow, each wait needed."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.device.fences import Fences
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from tests.helpers import typed_manager

H, D = 2, 256
SEEDS = range(60)
PROMPT = list(range(8))


class Scene:
    """A deferred device, streams, and a manager with few pages of 4 tokens."""

    def __init__(self, seed: int, slots: int = 4) -> None:
        self.device = HostDevice(deferred=True, seed=seed)
        self.m = typed_manager(slots=slots, layers=1, heads=H, dim=D, device=self.device)
        self.streams = [self.device.create_stream() for _ in range(5)]
        self.slots = slots
        self.open: list[k.KVCache] = []

    def begin(self, stream: int, tokens: list[int] | None = None) -> k.KVCache:
        kv = self.m.create_kv_cache(input_tokens=tokens)
        assert kv.resume(self.streams[stream])
        self.open.append(kv)
        return kv

    def computed(self, stream: int, tokens: list[int], value: float) -> k.KVCache:
        """A sequence that has written `value` everywhere, and published nothing yet."""
        kv = self.begin(stream)
        assert kv.resize(len(tokens))
        step = self.m.create_batch(1, len(tokens))
        step.prepare([kv], len(tokens), start=[0])
        page = np.full((len(tokens), H, D), value, np.float32)
        step.append(0, {"key": page, "value": page})
        return kv

    def published(self, stream: int, tokens: list[int], value: float) -> k.KVCache:
        kv = self.computed(stream, tokens, value)
        kv.commit(tokens)
        return kv

    def read(self, kv: k.KVCache, count: int) -> np.ndarray:
        """The keys of its first tokens, once everything has run."""
        step = self.m.create_batch(1, count)
        step.prepare([kv], count, start=[0])
        return step.gather(0)[0]

    def overwrite_everything(self, stream: int) -> None:
        """Someone else takes all pages, evicting what is published, and fills them at once."""
        kv = self.begin(stream)
        assert kv.resize(self.slots * 4)
        slots = kv.get_base_page_indices(0)
        places = self.m._runtime.pool_places[0]
        self.device.fill_pages(places, slots, 9, stream=self.streams[stream])

    def saw(self, value: float, *seen: np.ndarray) -> bool:
        self.device.drain()
        return all(bool((keys == value).all()) for keys in seen)


def a_reader_waits_for_the_publisher(seed: int) -> bool:
    s = Scene(seed)
    a = s.published(0, PROMPT, 1)
    seen = s.read(s.begin(1, PROMPT), 8)
    a.close()
    return s.saw(1, seen)


def a_private_copy_waits_for_the_publisher(seed: int) -> bool:
    s = Scene(seed)
    s.published(0, PROMPT, 1)
    return s.saw(1, s.read(s.begin(1, PROMPT[:6]), 6))


def a_duplicate_waits_for_the_publisher(seed: int) -> bool:
    """It computed the same tokens, here with another value, and then reads the first one's."""
    s = Scene(seed)
    b = s.computed(1, PROMPT, 2)
    s.published(0, PROMPT, 1)
    b.commit(PROMPT)
    return s.saw(1, s.read(b, 8))


def a_freed_duplicate_is_overwritten_after_its_writer(seed: int) -> bool:
    s = Scene(seed)
    s.published(0, PROMPT, 1)
    b = s.computed(1, PROMPT, 2)
    theirs = b.get_base_page_indices(0)
    b.commit(PROMPT)
    other = s.begin(2)
    assert other.resize(8)
    assert set(other.get_base_page_indices(0)) == set(theirs)
    places = s.m._runtime.pool_places[0]
    s.device.fill_pages(places, theirs, 9, stream=s.streams[2])
    s.device.drain()
    memory = s.m._runtime.pools[0][0]
    pages = memory.array(np.uint8, (4, memory.nbytes // 4))
    return bool((pages[theirs] == 9).all())


def an_evicted_page_waits_for_all_its_readers(seed: int) -> bool:
    s = Scene(seed)
    s.published(0, PROMPT, 1).close()
    readers = [s.begin(stream, PROMPT) for stream in (1, 2)]
    seen = [s.read(reader, 8) for reader in readers]
    for reader in readers:
        reader.close()
    s.overwrite_everything(3)
    return s.saw(1, *seen)


def an_evicted_page_waits_for_those_who_copied_from_it(seed: int) -> bool:
    s = Scene(seed, slots=6)
    s.published(0, PROMPT, 1).close()
    copies = [s.begin(stream, PROMPT[:6]) for stream in (1, 2)]
    seen = [s.read(copy, 6) for copy in copies]
    for copy in copies:
        copy.close()
    s.overwrite_everything(3)
    return s.saw(1, *seen)


def a_page_that_left_the_tree_waits_for_its_readers(seed: int) -> bool:
    s = Scene(seed, slots=5)
    s.published(0, PROMPT[:6], 1).close()
    holders = [s.begin(stream, PROMPT[:4]) for stream in (1, 2)]
    seen = [s.read(holder, 4) for holder in holders]
    s.m.set_weights_epoch(1)
    for holder in holders:
        holder.close()
    s.overwrite_everything(3)
    return s.saw(1, *seen)


def a_snapshot_is_read_after_it_was_copied(seed: int) -> bool:
    device = HostDevice(deferred=True, seed=seed)
    s = Scene(seed)
    s.device = device
    s.m = typed_manager(slots=6, layers=1, heads=H, dim=D, device=device, commit_min_snapshot=True)
    s.streams = [device.create_stream() for _ in range(3)]
    a = s.published(0, PROMPT[:6], 1)
    page = np.full((2, H, D), 5, np.float32)
    assert a.resize(8)
    step = s.m.create_batch(1, 2)
    step.prepare([a], 2, start=[6])
    step.append(0, {"key": page, "value": page})
    return s.saw(1, s.read(s.begin(1, PROMPT[:6]), 6))


SCENES = [
    a_reader_waits_for_the_publisher,
    a_private_copy_waits_for_the_publisher,
    a_duplicate_waits_for_the_publisher,
    a_freed_duplicate_is_overwritten_after_its_writer,
    an_evicted_page_waits_for_all_its_readers,
    an_evicted_page_waits_for_those_who_copied_from_it,
    a_page_that_left_the_tree_waits_for_its_readers,
    a_snapshot_is_read_after_it_was_copied,
]


@pytest.mark.parametrize("scene", SCENES)
def test_right_in_every_order(scene):
    wrong = [seed for seed in SEEDS if not scene(seed)]
    assert not wrong


@pytest.mark.parametrize(
    ("scene", "without"),
    [
        (a_reader_waits_for_the_publisher, "ready"),
        (a_private_copy_waits_for_the_publisher, "ready"),
        (a_duplicate_waits_for_the_publisher, "ready"),
        (an_evicted_page_waits_for_all_its_readers, "join"),
        (a_snapshot_is_read_after_it_was_copied, "ready"),
    ],
)
def test_each_wait_is_needed(scene, without, monkeypatch):
    if without == "ready":
        monkeypatch.setattr("kvcore.control.slots.SlotTable.ready", lambda self, slots: None)
    else:
        monkeypatch.setattr(Fences, "join", lambda self, before, ticket: ticket)
    assert not all(scene(seed) for seed in SEEDS)


def test_joined_moments_stand_for_all_their_parts():
    device = HostDevice(deferred=True, seed=3)
    fences, gate = Fences(), Gate()
    streams = [device.create_stream() for _ in range(4)]
    for stream in streams[:3]:
        stream.wait(gate)
    one, two, three = (fences.record(stream) for stream in streams[:3])
    joint = fences.join(np.array([one, 0, two]), two)
    assert joint.tolist()[1:] == [two, two]
    assert fences.newest_of_each_stream({joint[0]}) == [one, two]
    (all_three,) = fences.join(joint[:1], three)
    assert fences.newest_of_each_stream({all_three, joint[0]}) == [one, two, three]
    assert fences.join(np.array([all_three]), 0).tolist() == [all_three]
    later = fences.record(streams[0])
    (renewed,) = fences.join(np.array([all_three]), later)
    assert fences.newest_of_each_stream({renewed}) == [two, three, later]
    fences.wait_one(streams[3], renewed)
    assert len(streams[3].queue) == 3
    last = streams[3].record()
    assert not last.done()
    gate.open()
    device.drain()
    assert last.done()
