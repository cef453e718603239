"""Events of several attention-DP ranks, and consumers that lose some, start late or see twice."""

from __future__ import annotations

import random

import pytest

from kvcore.event_types import KVCacheCreatedData, KVCacheEvent
from kvcore.events import KVCacheEventManager
from tests.event_runs import Consumer, flushed, keys_of, run_of, shown


def created(event: KVCacheEvent) -> list[int]:
    """The payload of a created event."""
    return list(event.data.num_blocks_per_cache_level)


def remote(*payloads: int) -> list[KVCacheEvent]:
    """Events of rank 1."""
    return [
        KVCacheEvent(i, KVCacheCreatedData((n,)), 0, "v2_sha256", attention_dp_rank=1)
        for i, n in enumerate(payloads)
    ]


# -- ranks -----------------------------------------------------------------------------------------


def test_rank_0_publishes_all_in_rank_order():  # E-24
    m = KVCacheEventManager(
        4, attention_dp_rank=0, attention_dp_gather=lambda events: [events, remote(3)]
    )
    m.add_created_event([2])
    events = flushed(m)
    assert [(event.attention_dp_rank, created(event)) for event in events] == [(0, [2]), (1, [3])]
    assert events[0].to_dict()["attention_dp_rank"] == 0


def test_other_ranks_send_their_newest_and_publish_nothing():  # E-25
    sent = []

    def gather(events: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
        sent.append(events)
        return [remote(5), events]

    m = KVCacheEventManager(1, attention_dp_rank=1, attention_dp_gather=gather)
    m.add_created_event([2])
    m.add_created_event([3])
    assert flushed(m) == []
    assert [[created(event) for event in events] for events in sent] == [[[3]]]


def test_capacity_is_per_rank():  # E-26
    m = KVCacheEventManager(
        1, attention_dp_rank=0, attention_dp_gather=lambda events: [events, remote(10, 11)]
    )
    m.add_created_event([2])
    m.flush_iteration_events()
    assert [created(event) for event in m.get_latest_events(0)] == [[2], [11]]
    assert m.num_dropped_events == 1  # what a rank sends beyond it is lost like any other


def test_the_gather_is_called_once_a_flush():  # E-27
    calls = []
    m = KVCacheEventManager(
        4, attention_dp_rank=0, attention_dp_gather=lambda e: calls.append(e) or [e]
    )
    m.add_created_event([7])
    m.flush_iteration_events()
    assert [[(e.attention_dp_rank, created(e)) for e in events] for events in calls] == [[(0, [7])]]
    m.flush_iteration_events()
    assert calls[1:] == [[]]  # the others wait for this rank, events or not
    assert [created(event) for event in m.get_latest_events(0)] == [[7]]


@pytest.mark.parametrize("capacity", [0, 4])
def test_a_rank_without_events_takes_part(capacity):
    calls = []
    m = KVCacheEventManager(capacity, attention_dp_rank=2, attention_dp_gather=calls.append)
    m.flush_iteration_events()
    assert calls == [[]]


def test_an_error_of_the_gather_loses_nothing():
    fail = [True]

    def gather(events):
        if fail.pop():
            raise ConnectionError
        return [events]

    m = KVCacheEventManager(4, attention_dp_rank=0, attention_dp_gather=gather)
    m.stored(run_of(range(8), 0, 1))
    with pytest.raises(ConnectionError):
        m.flush_iteration_events()
    m.stored(run_of(range(8), 1, 2))
    fail.append(False)
    assert [event.event_id for event in flushed(m)] == [0, 1]


@pytest.mark.parametrize("result", [None, 3, [3], []])
def test_a_gather_without_a_result_on_rank_0_loses_nothing(result):
    results = [result]
    m = KVCacheEventManager(
        4,
        attention_dp_rank=0,
        attention_dp_gather=lambda events: results.pop() if results else iter([events]),
    )
    m.add_created_event([2])
    with pytest.raises(TypeError, match=r"attention_dp_gather: expected the events of each rank"):
        m.flush_iteration_events()
    assert [created(event) for event in flushed(m)] == [[2]]


def test_a_gather_may_use_the_manager():
    """No lock is held while ranks wait for each other."""
    m = KVCacheEventManager(
        4,
        attention_dp_rank=0,
        attention_dp_gather=lambda events: [m.get_latest_events(0), events],
    )
    m.add_created_event([1])
    assert [created(event) for event in flushed(m)] == [[1]]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"attention_dp_gather": list}, ValueError, "attention_dp_rank"),
        ({"attention_dp_rank": -1}, ValueError, "attention_dp_rank"),
        ({"hash_algo": "md5"}, ValueError, "hash_algo: expected one of 'auto', 'v1_block_key'"),
        ({"mm_id_offset": -1}, ValueError, "mm_id_offset"),
        ({"window_size": None}, TypeError, "window_size"),
        ({"attention_dp_gather": 3, "attention_dp_rank": 0}, TypeError, "attention_dp_gather"),
        ({"window_size_by_layer_group": [4]}, TypeError, "window_size_by_layer_group"),
        ({"window_size_by_layer_group": {0: "4"}}, TypeError, r"window_size_by_layer_group\[0\]"),
        ({"window_size_by_layer_group": {"0": 4}}, TypeError, "window_size_by_layer_group"),
    ],
)
def test_wrong_settings(settings, error, text):  # E-23
    with pytest.raises(error, match=text):
        KVCacheEventManager(4, **settings)


# -- consumers -------------------------------------------------------------------------------------

PROMPTS = [[number, *range(2, 13)] for number in range(100, 140)]


class Cache:
    """A tree of single chains that tells a manager; `length[p]` blocks of prompt p are held."""

    def __init__(self, capacity: int = 1000) -> None:
        self.events = KVCacheEventManager(capacity)
        self.length = dict.fromkeys(range(len(PROMPTS)), 0)

    def grow(self, prompt: int, blocks: int = 1) -> None:
        first = self.length[prompt]
        self.length[prompt] += blocks
        self.events.stored(run_of(PROMPTS[prompt], first, first + blocks))

    def shrink(self, prompt: int, blocks: int = 1) -> None:
        end = self.length[prompt]
        self.length[prompt] -= blocks
        self.events.removed(keys_of(PROMPTS[prompt])[end - blocks : end][::-1], 0)

    def clear(self) -> None:
        for prompt, blocks in self.length.items():
            if blocks:
                self.shrink(prompt, blocks)

    def keys(self) -> set[str]:
        return {
            key.hex() for prompt, n in self.length.items() for key in keys_of(PROMPTS[prompt])[:n]
        }

    def snapshot(self) -> tuple[list[KVCacheEvent], int]:
        runs = [run_of(PROMPTS[prompt], 0, n) for prompt, n in self.length.items() if n]
        return self.events.snapshot(runs), self.events.last_event_id


def twenty_events() -> tuple[Cache, list[KVCacheEvent], list[set[str]], list]:
    """A cache, its 20 events, and after each of them its keys and a snapshot."""
    cache, events, keys, snapshots = Cache(), [], [], []
    for n in range(20):
        if n == 15:
            cache.clear()
        elif n % 4 == 3:
            cache.shrink(n - 1)
        else:
            cache.grow(n, 2)
        events += flushed(cache.events)
        keys.append(cache.keys())
        snapshots.append(cache.snapshot())
    assert [event.event_id for event in events] == list(range(20))
    return cache, events, keys, snapshots


def test_replaying_gives_the_trees_keys_at_each_point():  # G1, G6
    _, events, keys, _ = twenty_events()
    c = Consumer()
    for event, expected in zip(events, keys, strict=True):
        assert c.follow([event])
        assert c.held.get(0, set()) == expected
    assert c.orphans == []
    assert keys[15] == set()


def test_lost_events_are_a_gap_and_a_snapshot_heals():  # G6
    _, events, keys, snapshots = twenty_events()
    c = Consumer()
    assert not c.follow(events[:5] + events[10:])
    assert (c.last, c.held[0]) == (4, keys[4])
    c.restart(*snapshots[12])
    assert c.held[0] == keys[12]
    assert c.follow(events[10:])  # what the snapshot knows is passed over
    assert c.held[0] == keys[19]


@pytest.mark.parametrize("start", range(20))
def test_a_snapshot_and_what_follows_is_a_full_replay(start):  # G6
    _, events, keys, snapshots = twenty_events()
    snapshot, last = snapshots[start]
    assert {event.event_id for event in snapshot} <= {last} == {start}
    c = Consumer()
    c.restart(snapshot, last)
    assert c.held.get(0, set()) == keys[start]
    assert c.follow(events)
    assert c.held.get(0, set()) == keys[19]
    assert c.orphans == []


def test_twice_the_same_event_is_harmless():  # G6
    _, events, keys, _ = twenty_events()
    c = Consumer()
    assert c.follow(events[:8] + events[7:8] + events[8:])
    assert c.held[0] == keys[19]
    plain = Consumer()
    for event in events[:8] + events[7:8] + events[8:]:  # one that does not look at ids
        plain.apply(event)
    assert plain.held[0] == keys[19]


def test_an_overflow_is_signalled():  # G6
    cache = Cache(capacity=4)
    for prompt in range(10):
        cache.grow(prompt)
        cache.shrink(prompt) if prompt % 3 == 0 else None
    events, c = flushed(cache.events), Consumer()
    assert len(events) == 4
    assert not c.follow(events)
    assert cache.events.num_dropped_events == events[0].event_id > 0
    c.restart(*cache.snapshot())
    assert c.held[0] == cache.keys()


@pytest.mark.parametrize("removal_waits", [False, True])
def test_a_snapshot_ends_runs_and_waiting_removals(removal_waits):
    """What grows after a snapshot has a larger id than the snapshot, even in the same iteration."""
    cache = Cache()
    if removal_waits:
        cache.grow(0)
    cache.grow(1)
    if removal_waits:
        cache.shrink(0)
    snapshot, last = cache.snapshot()
    cache.grow(1)
    c = Consumer()
    c.restart(snapshot, last)
    assert c.follow(flushed(cache.events))
    assert c.held[0] == cache.keys()
    assert shown(snapshot) == [("stored", 0, [keys_of(PROMPTS[1])[0].hex()])]


def test_a_snapshot_tells_each_group_and_announces_nothing():
    m = KVCacheEventManager(8)
    m.stored(run_of(range(8), groups=(0, 1)))
    before = flushed(m)
    snapshot = m.snapshot([run_of(range(8), groups=(0, 1))])
    assert [event.data for event in snapshot] == [event.data for event in before]
    assert [event.layer_group_id for event in snapshot] == [0, 1]
    assert flushed(m) == []
    assert KVCacheEventManager(8).snapshot([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_walks(seed):  # G6
    """Consumers that join, lose or repeat at random end where the tree is."""
    rng = random.Random(seed)
    cache = Cache(capacity=rng.choice((2, 5, 1000)))
    consumers = [Consumer() for _ in range(3)]
    for _ in range(60):
        for _ in range(rng.randrange(1, 6)):
            prompt = rng.randrange(len(PROMPTS))
            held = cache.length[prompt]
            if held and rng.random() < 0.5:
                cache.shrink(prompt, rng.randint(1, held))
            elif held < 3:
                cache.grow(prompt, rng.randint(1, 3 - held))
            elif rng.random() < 0.05:
                cache.clear()
        events = flushed(cache.events)
        for c in consumers:
            cut = rng.choice((0, 0, 0, 1))
            again = events[: rng.randrange(3)] if rng.random() < 0.2 else []
            if not c.follow([*events[cut:], *again]):
                c.restart(*cache.snapshot())
        lagging = [c for c in consumers if c.last != cache.events.last_event_id]
        for c in lagging:  # the last event was the lost one: nothing shows it yet
            c.restart(*cache.snapshot())
        assert all(c.held.get(0, set()) == cache.keys() for c in consumers)
