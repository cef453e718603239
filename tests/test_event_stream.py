"""The sink for streams: what travels, what is left out and counted, joining, the cap."""

from __future__ import annotations

import random

import pytest

import kvcore as k
from kvcore.event_stream import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StreamEvent,
    StreamingEventSink,
    wire_hash,
)
from kvcore.tokens import intern_digest
from tests.event_runs import A_DIGEST, keys_of, run_of

IDS = list(range(1, 17))
W0, W1, W2, W3 = (int.from_bytes(key[:8], "big", signed=True) for key in keys_of(IDS))


def stored(parent: int | None, hashes: list[int], ids: list[int]) -> BlockStored:
    """A stored event of group 0 and the empty scope, four tokens a block."""
    return BlockStored(tuple(hashes), parent, tuple(ids), 4, None, "GPU", None, None, 0)


def removed(*hashes: int) -> BlockRemoved:
    """A removed event of group 0."""
    return BlockRemoved(hashes, "GPU", 0)


def counts(sink: StreamingEventSink) -> tuple[int, ...]:
    """What was left out."""
    s = sink
    return s.num_other_groups, s.num_partial, s.num_multimodal, s.num_orphans, s.num_dropped


class Index:
    """A router's index of one worker."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def apply(self, events: list[StreamEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockRemoved):
                self.held.difference_update(event.block_hashes)
            else:
                assert event.parent_block_hash in {None, *self.held}
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.held.update(event.block_hashes)


def test_hashes_are_signed():
    assert wire_hash(b"\x80" + bytes(31)) == -(2**63)
    assert wire_hash(bytes(7) + b"\x01" + b"\xff" * 24) == 1


def test_a_child_joins_the_event_before():
    sink = StreamingEventSink(4)
    sink.stored(run_of(IDS, 0, 2))
    sink.stored(run_of(IDS, 2, 3))
    assert sink.drain() == [stored(None, [W0, W1, W2], IDS[:12])]
    sink.stored(run_of(IDS, 3, 4))
    assert sink.drain() == [stored(W2, [W3], IDS[12:])]
    assert sink.drain() == []


def test_only_what_directly_precedes_is_joined():
    sink, other = StreamingEventSink(4), [9, 9, 9, 9, 1, 2, 3, 4]
    x0, x1 = map(wire_hash, keys_of(other))
    sink.stored(run_of(IDS, 0, 1))
    sink.stored(run_of(other))
    sink.stored(run_of(IDS, 1, 2))
    sink.removed(keys_of(IDS)[1:2], 0)
    sink.removed(keys_of(other)[::-1], None)
    sink.stored(run_of(IDS, 1, 3))
    assert sink.drain() == [
        stored(None, [W0], IDS[:4]),
        stored(None, [x0, x1], other),
        stored(W0, [W1], IDS[4:8]),
        removed(W1, x1, x0),
        stored(W0, [W1, W2], IDS[4:12]),
    ]


def test_other_layer_groups_are_counted():
    sink = StreamingEventSink(4, layer_group=1)
    sink.stored(run_of(IDS, groups=(0, 2)))
    assert (sink.drain(), counts(sink)) == ([], (8, 0, 0, 0, 0))
    sink.stored(run_of(IDS, groups=(0, 1)))
    assert sink.drain()[0].group_idx == 1
    sink.removed(keys_of(IDS)[3:], 0)
    assert (sink.drain(), counts(sink)) == ([], (13, 0, 0, 0, 0))
    sink.removed(keys_of(IDS)[3:], 1)
    assert sink.drain() == [BlockRemoved((W3,), "GPU", 1)]


def test_partial_blocks_stay():
    sink, ids = StreamingEventSink(4), IDS[:6]
    sink.stored(run_of(ids))
    sink.removed(keys_of(ids)[::-1], None)
    assert sink.drain() == [stored(None, [W0], ids[:4]), removed(W0)]
    assert counts(sink) == (0, 1, 0, 0, 0)


def test_digests_stay_and_so_do_their_children():
    sink = StreamingEventSink(4)
    ids = [1, 2, 3, 4, intern_digest(A_DIGEST), 6, 7, 8, *range(9, 17)]
    sink.stored(run_of(ids, 0, 3))
    sink.stored(run_of(ids, 3, 4))
    sink.removed(keys_of(ids)[::-1], None)
    assert sink.drain() == [stored(None, [W0], ids[:4]), removed(W0)]
    assert counts(sink) == (0, 0, 1, 2, 0)


def test_published_blocks_are_not_repeated():
    sink = StreamingEventSink(4)
    sink.stored(run_of(IDS, 0, 2))
    sink.stored(run_of(IDS, 0, 3))
    assert sink.drain() == [stored(None, [W0, W1, W2], IDS[:12])]
    sink.stored(run_of(IDS))
    assert sink.drain() == [stored(W2, [W3], IDS[12:])]
    assert counts(sink) == (0,) * 5


def test_the_cap_drops_stored_blocks_alone(caplog):
    sink = StreamingEventSink(4, max_blocks_per_iteration=2)
    sink.stored(run_of(IDS, 0, 3))
    sink.removed(keys_of(IDS)[::-1], None)
    assert sink.drain() == [stored(None, [W0, W1], IDS[:8]), removed(W1, W0)]
    assert counts(sink) == (0, 0, 0, 0, 1)
    for first in range(100, 109):
        sink.stored(run_of([first, 2, 3, 4]))
    assert [len(event.block_hashes) for event in sink.drain()] == [1, 1]
    assert sink.num_dropped == 8
    assert [record.args[0] for record in caplog.records] == [1, 2, 4, 8]
    sink.stored(run_of([108, 2, 3, 4]))  # a new iteration
    assert len(sink.drain()) == 1


def test_the_child_of_a_dropped_block_is_an_orphan():
    sink = StreamingEventSink(4, max_blocks_per_iteration=1)
    sink.stored(run_of(IDS, 0, 2))
    assert sink.drain() == [stored(None, [W0], IDS[:4])]
    sink.stored(run_of(IDS, 2, 3))
    assert (sink.drain(), counts(sink)) == ([], (0, 0, 0, 1, 1))


def test_names_and_salts():
    within = k.ReuseScope(lora_id=7, salt=11)
    first, second = map(wire_hash, keys_of(IDS[:8], scope=within))
    for names, name in (({7: "poet"}, "poet"), ({8: "other"}, "7"), (None, "7")):
        sink = StreamingEventSink(4, lora_names=names)
        sink.stored(run_of(IDS[:8], scope=within))
        sink.stored(run_of(IDS[:4]))
        sink.drain()
        sink.stored(run_of(IDS[:12], 2, 3, scope=within))
        assert sink.drain()[0].extra_keys is None
        fresh = sink.snapshot([run_of(IDS[:8], scope=within)])[1]
        assert (fresh.block_hashes, fresh.lora_id, fresh.lora_name) == ((first, second), 7, name)
        assert fresh.extra_keys == (("11",), None)


def test_moves_do_not_travel():
    sink = StreamingEventSink(4)
    sink.stored(run_of(IDS))
    sink.drain()
    sink.updated(keys_of(IDS)[0], 0, level=(0, 1), priority=(1, 2))
    assert sink.drain() == []


def test_a_snapshot_starts_over():
    sink, index = StreamingEventSink(4, max_blocks_per_iteration=1), Index()
    sink.stored(run_of(IDS, 0, 3))  # two are dropped by the cap
    sink.removed([keys_of(IDS)[2]], None)
    events = sink.snapshot([run_of(IDS, 0, 2)])
    assert events == [AllBlocksCleared(), stored(None, [W0, W1], IDS[:8])]
    index.held = {1, 2, 3}
    index.apply(events)
    sink.stored(run_of(IDS, 2, 3))
    sink.removed([keys_of(IDS)[2]], None)
    sink.removed([keys_of(IDS)[1]], 0)
    index.apply(sink.drain())
    assert index.held == {W0}
    assert counts(sink) == (0, 0, 0, 0, 2)


@pytest.mark.parametrize("seed", range(10))
def test_random_walks(seed):
    """An index ends with exactly the full blocks that were not capped, and knows every parent."""
    rng, sink, index = random.Random(seed), StreamingEventSink(4), Index()
    prompts = [[n, *range(2, 4 * rng.randint(1, 5) + rng.randint(1, 4))] for n in range(20)]
    length = [0] * 20
    for step in range(200):
        n = rng.randrange(20)
        keys = keys_of(prompts[n])
        if rng.random() < 0.6:
            end = rng.randint(length[n], len(keys))
            if end > length[n]:
                sink.stored(run_of(prompts[n], length[n], end, groups=(0, 1)))
            length[n] = end
        else:
            end = rng.randint(0, length[n])
            sink.removed(keys[end : length[n]][::-1], rng.choice((0, None)))
            length[n] = end
        if step % 7 == 0:
            index.apply(sink.drain())
            assert index.held == {
                wire_hash(key)
                for prompt, blocks in zip(prompts, length, strict=True)
                for key in keys_of(prompt)[: min(blocks, len(prompt) // 4)]
            }


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [((0,), {}), ((4,), {"max_blocks_per_iteration": 0}), ((4,), {"layer_group": -1})],
)
def test_wrong_settings(arguments, settings):
    with pytest.raises(ValueError, match="expected at least"):
        StreamingEventSink(*arguments, **settings)
