"""Events of a whole manager: what is told is what can be reused, at every moment."""

from __future__ import annotations

import random

import pytest

import kvcore as k
from kvcore.errors import StateError
from kvcore.event_stream import AllBlocksCleared, BlockRemoved, BlockStored, StreamingEventSink
from tests.event_runs import Consumer, flushed, keys_of, shown
from tests.helpers import opaque_manager


def told(slots: int = 16, events: object = None, **settings: object) -> k.KVCacheManager:
    """A manager of blocks of 4 tokens, with its events."""
    config = opaque_manager(slots, **settings).config
    events = k.KVCacheEventManager(1000) if events is None else events
    return k.KVCacheManager(config, device="host", event_manager=events)


def seed(m: k.KVCacheManager, ids: list[int], scope: k.ReuseScope | None = None) -> int:
    """Publishes a prompt and closes; how much of it was known."""
    with m.create_kv_cache(scope, ids) as kv:
        known = kv.num_committed_tokens
        assert kv.resume()
        assert kv.resize(len(ids))
        kv.commit(ids[known:], is_end=True)
    return known


def hexes(ids: list[int], scope: k.ReuseScope | None = None) -> list[str]:
    """The keys of a prompt's blocks as events show them."""
    return [key.hex() for key in keys_of(ids, scope=scope)]


IDS = list(range(8))


def test_stored_blocks_match_the_key_chain():  # E-41
    m = told()
    seed(m, IDS)
    (event,) = flushed(m.event_manager)
    chain = [key.hex() for _, key in k.sequence_to_blockchain_keys(4, None, IDS)]
    assert shown([event]) == [("stored", 0, chain[1:])]
    assert event.data.parent_hash is None
    assert [block.tokens.ids for block in event.data.blocks] == [IDS[:4], IDS[4:]]
    assert [(block.cache_level, block.priority) for block in event.data.blocks] == [(0, 35)] * 2


def test_a_salt_reaches_the_v1_hash():  # E-42
    m = told(events=k.KVCacheEventManager(8, hash_algo="auto"))
    seed(m, [1, 2, 3, 4, 5, 6], k.ReuseScope(salt=123))
    (event,) = flushed(m.event_manager)
    assert shown([event]) == [("stored", 0, [6280297290684427985, 18177682803760873588])]
    assert [block.cache_salt for block in event.data.blocks] == ["123", "123"]


def test_a_reused_prefix_is_not_repeated():  # E-43
    m = told()
    seed(m, IDS)
    flushed(m.event_manager)
    assert seed(m, [*IDS, 8, 9, 10, 11]) == 8
    (event,) = flushed(m.event_manager)
    third = hexes([*IDS, 8, 9, 10, 11])
    assert shown([event]) == [("stored", 0, third[2:])]
    assert event.data.parent_hash == third[1]


def test_clearing_removes_what_was_stored():  # E-44
    m = told()
    for prompt in (IDS, [*IDS[:4], 50, 51], [60, 61]):
        seed(m, prompt)
    stored = [h for _, _, named in shown(flushed(m.event_manager)) for h in named]
    m.clear_reusable_blocks()
    removed = [h for _, _, named in shown(flushed(m.event_manager)) for h in named]
    assert len(stored) == len(removed) == 4
    assert set(stored) == set(removed)
    assert removed.index(hexes(IDS)[1]) < removed.index(hexes(IDS)[0])  # children first


def test_two_sequences_of_one_prompt_tell_once():
    m = told()
    a, b = m.create_kv_cache(), m.create_kv_cache()
    for kv in (a, b):
        assert kv.resume()
        assert kv.resize(8)
    a.commit(IDS)
    b.commit(IDS)
    assert shown(flushed(m.event_manager)) == [("stored", 0, hexes(IDS))]
    a.close()
    b.close()
    assert flushed(m.event_manager) == []


def test_a_full_block_takes_the_place_of_a_partial_one():
    m, c = told(), Consumer()
    seed(m, IDS[:6])
    assert c.follow(flushed(m.event_manager))
    assert c.held[0] == set(hexes(IDS[:6]))
    seed(m, IDS)
    assert c.follow(flushed(m.event_manager))
    assert c.held[0] == set(hexes(IDS))


def test_eviction_is_told():
    m, c = told(slots=4), Consumer()
    seed(m, IDS)
    seed(m, [20, 21, 22, 23])
    with m.create_kv_cache() as kv:
        assert kv.resume()
        assert kv.resize(8)  # one free slot, and the end of the oldest prompt
        assert c.follow(flushed(m.event_manager))
    assert c.held[0] == {*hexes(IDS)[:1], *hexes([20, 21, 22, 23])}


def test_new_weights_remove_at_once_and_only_once():
    m, c = told(), Consumer()
    adapter = k.ReuseScope(lora_id=7)
    seed(m, IDS)
    seed(m, IDS, adapter)
    m.set_weights_epoch(1, lora_id=7)
    assert c.follow(flushed(m.event_manager))
    assert c.held[0] == set(hexes(IDS))
    with m.create_kv_cache() as kv:  # the old pages go for good
        assert kv.resume()
        assert kv.resize(4 * 16 - 8)
    assert flushed(m.event_manager) == []
    seed(m, IDS, adapter)
    (event,) = flushed(m.event_manager)
    assert not set(shown([event])[0][2]) & set(hexes(IDS, adapter))  # other weights, other keys


@pytest.mark.parametrize("capacity", [1000, 3])
@pytest.mark.parametrize("number", range(4))
def test_a_consumer_knows_what_can_be_reused(number, capacity):  # G1, G6
    rng, c = random.Random(number), Consumer()
    m = told(slots=12, events=k.KVCacheEventManager(capacity))
    for _ in range(150):
        family = rng.randrange(3)
        ids = [family, *(rng.randrange(2) for _ in range(rng.randrange(3, 20)))]
        seed(m, ids, rng.choice((None, k.ReuseScope(salt=1))))
        if rng.random() < 0.03:
            m.clear_reusable_blocks()
        if rng.random() < 0.03:
            m.set_weights_epoch((m.weights_epoch() or 0) + rng.randrange(2))
        if rng.random() < 0.6:
            continue
        events = flushed(m.event_manager)
        snapshot = m.snapshot_events()
        if not c.follow(events):
            c.restart(snapshot, m.event_manager.last_event_id)
        fresh = Consumer()
        fresh.restart(snapshot, 0)
        assert c.held.get(0, set()) == fresh.held.get(0, set())
        assert c.orphans == fresh.orphans == []
        assert len(fresh.held.get(0, ())) == sum(len(e.data.blocks) for e in snapshot)
    assert (m.event_manager.num_dropped_events > 0) is (capacity == 3)


def test_the_probe_agrees_with_events():
    m, c, rng = told(slots=12), Consumer(), random.Random(0)
    prompts = [[n % 3, *(rng.randrange(2) for _ in range(11))] for n in range(12)]
    for prompt in prompts:
        seed(m, prompt)
        c.follow(flushed(m.event_manager))
        for other in prompts:
            chain = hexes(other)
            known = next((i for i, h in enumerate(chain) if h not in c.held[0]), len(chain))
            assert m.probe_reuse(input_tokens=other) // 4 == known


def test_a_stream_follows_the_manager():
    sink = StreamingEventSink(4)
    m = told(events=sink)
    seed(m, IDS[:6])
    (stored,) = sink.drain()
    assert isinstance(stored, BlockStored)
    seed(m, IDS)
    (more,) = sink.drain()
    assert (stored.token_ids, more.token_ids) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert more.parent_block_hash == stored.block_hashes[0]
    cleared, again = m.snapshot_events()
    assert cleared == AllBlocksCleared()
    assert again.token_ids == tuple(IDS)
    m.clear_reusable_blocks()
    assert sink.drain() == [BlockRemoved(again.block_hashes[::-1], "GPU", 0)]


@pytest.mark.parametrize(
    ("sink", "text"),
    [
        (lambda: StreamingEventSink(8), "tokens_per_block: expected the manager's 4, got 8"),
        (lambda: StreamingEventSink(4, layer_group=1), r"layer_group: expected .*\[0, 0\], got 1"),
        (lambda: StreamingEventSink(2), "tokens_per_block"),
    ],
)
def test_a_sink_of_another_shape_is_refused(sink, text):
    """It would tell consumers other tokens than the blocks have, or nothing at all."""
    with pytest.raises(ValueError, match=f"^event_manager: {text}"):
        told(events=sink())


def test_a_manager_without_events_has_no_snapshot():
    with opaque_manager() as m, pytest.raises(StateError, match="without an event_manager"):
        m.snapshot_events()
