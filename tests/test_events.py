"""The event manager: events by hand, coalescing, removals that wait, announced blocks."""

from __future__ import annotations

import pickle

import pytest

from kvcore.event_types import (
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheUpdatedData,
    UniqueToken,
)
from kvcore.events import KVCacheEventManager
from tests.event_runs import Consumer, flushed, keys_of, run_of, shown

IDS = list(range(1, 13))
H0, H1, H2 = (key.hex() for key in keys_of(IDS))


def block(block_hash: str, *ids: int) -> KVCacheStoredBlockData:
    """A block made by hand."""
    return KVCacheStoredBlockData(block_hash, [UniqueToken(i) for i in ids], 0, 0)


# -- by hand ---------------------------------------------------------------------------------------


def test_serialised_events():  # E-02
    m = KVCacheEventManager(max_kv_event_entries=4, window_size=128)
    m.add_created_event([2, 3])
    m.add_stored_event(parent_hash=None, blocks=[block("abcd", 1, 2)])
    m.add_removed_event("abcd")
    m.flush_iteration_events()
    events = [event.to_dict() for event in m.get_latest_events()]
    assert [event["event_id"] for event in events] == [0, 1, 2]
    assert {(event["hash_algo"], event["window_size"]) for event in events} == {("v2_sha256", 128)}
    tokens = [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in (1, 2)]
    stored = {"type": "stored_block", "block_hash": "abcd", "tokens": tokens, "cache_level": 0}
    stored |= {"priority": 0, "mm_keys": [], "cache_salt": None}
    assert [event["data"] for event in events] == [
        {"type": "created", "num_blocks_per_cache_level": [2, 3]},
        {"type": "stored", "parent_hash": None, "blocks": [stored]},
        {"type": "removed", "block_hashes": ["abcd"]},
    ]
    assert m.get_latest_events(0) == []


def test_all_kinds_drain_the_queue():  # E-03
    m = KVCacheEventManager(16, window_size=128, window_size_by_layer_group={0: 64, 1: 96})
    m.add_created_event([8], layer_group_ids=[0, 1])
    m.stored(run_of(IDS, groups=(0, 1)))
    m.updated(keys_of(IDS)[0], 1, level=(0, 1))
    m.removed(keys_of(IDS)[2:], 0)
    m.removed(keys_of(IDS)[::-1], None)
    events = flushed(m)
    assert [(e.layer_group_id, e.window_size) for e in events[:2]] == [(0, 64), (1, 96)]
    assert {type(e.data).__name__ for e in events} == {
        f"KVCache{kind}Data" for kind in ("Created", "Stored", "Updated", "Removed")
    }
    for timeout in (0, -1, 0.0):
        assert m.get_latest_events(timeout) == []


def test_windows_can_be_set_later():
    m = KVCacheEventManager(4, window_size=7)
    m.set_layer_group_window_sizes({1: 32})
    m.add_created_event([1], layer_group_ids=[0, 1])
    assert [event.window_size for event in flushed(m)] == [7, 32]


def test_unknown_keys_are_harmless():  # E-04
    m = KVCacheEventManager(4)
    junk = b"\x07" * 32
    m.removed([junk], None)
    m.removed([junk], 0)
    m.updated(junk, 0, level=(0, 1))
    m.add_removed_event(junk)
    m.add_removed_event([junk, junk], layer_group_id=0)
    m.add_updated_event(junk, cache_level=KVCacheEventDiff(0, 1))
    assert flushed(m) == []
    assert m.last_event_id == -1


def test_removed_takes_one_or_several():  # E-12
    m = KVCacheEventManager(4)
    m.add_removed_event(block for block in ("a", "b"))
    m.add_removed_event("c")
    assert [event.data for event in flushed(m)] == [KVCacheRemovedData(("a", "b", "c"))]
    for wrong in (1.5, [None], None):
        with pytest.raises(TypeError, match="block_hashes"):
            m.add_removed_event(wrong)
    assert flushed(m) == []


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.add_created_event(5), TypeError, "num_blocks_per_cache_level"),
        (lambda m: m.add_created_event([5, "6"]), TypeError, r"num_blocks_per_cache_level\[1\]"),
        (lambda m: m.add_created_event([5], [0, None]), TypeError, r"layer_group_ids\[1\]"),
        (lambda m: m.add_created_event([5], [0, -1]), ValueError, r"layer_group_ids\[1\]"),
        (lambda m: m.add_stored_event(None, ["ab"]), TypeError, r"blocks\[0\]"),
        (lambda m: m.add_stored_event(1.5, []), TypeError, "parent_hash"),
        (lambda m: m.add_stored_event(None, [], "0"), TypeError, "layer_group_id"),
        (lambda m: m.add_removed_event(["ab", bytes(32)], -1), ValueError, "layer_group_id"),
        (lambda m: m.add_removed_event(["ab", True]), TypeError, r"block_hashes\[1\]"),
        (
            lambda m: m.add_updated_event(None, cache_level=KVCacheEventDiff(0, 1)),
            TypeError,
            "block_hash",
        ),
        (
            lambda m: m.add_updated_event("a", cache_level=None, layer_group_id="0"),
            TypeError,
            "layer_group_id",
        ),
        (lambda m: m.set_layer_group_window_sizes({0: None}), TypeError, r"window_sizes\[0\]"),
    ],
)  # fmt: skip
def test_wrong_calls_by_hand_add_nothing(call, error, text):
    m = KVCacheEventManager(4)
    m.stored(run_of(range(8)))
    assert len(flushed(m)) == 1
    with pytest.raises(error, match=f"^{text}: expected"):
        call(m)
    assert (flushed(m), m.last_event_id) == ([], 0)


def test_updated_as_given():  # E-10, E-28
    m = KVCacheEventManager(4)
    m.add_updated_event(
        "abcd",
        cache_level=KVCacheEventDiff(0, 1),
        priority=KVCacheEventDiff(old_value=3, new_value=5),
    )
    assert flushed(m)[0].to_dict()["data"] == {
        "type": "updated",
        "block_hash": "abcd",
        "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
        "priority": {"type": "event_diff", "old_value": 3, "new_value": 5},
    }


def test_updated_needs_a_difference():  # E-07
    m = KVCacheEventManager(4)
    with pytest.raises(TypeError, match="cache_level or priority: expected a KVCacheEventDiff"):
        m.add_updated_event("abcd")
    with pytest.raises(TypeError, match="priority: expected a KVCacheEventDiff or None, got tuple"):
        m.add_updated_event("abcd", priority=(0, 1))
    assert flushed(m) == []


@pytest.mark.parametrize("level", [None, (0, 1), (1, 1)])
@pytest.mark.parametrize("priority", [None, (35, 80), (35, 35)])
def test_every_difference_serialises_and_none_is_silent(level, priority):  # G3
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1))
    m.updated(keys_of(IDS)[0], 0, level, priority)
    as_diff = {None: None, (0, 1): KVCacheEventDiff(0, 1), (35, 80): KVCacheEventDiff(35, 80)}
    diffs = as_diff.get(level), as_diff.get(priority)
    m.add_updated_event(keys_of(IDS)[0], cache_level=diffs[0], priority=diffs[1])
    events = flushed(m)[1:]
    assert [event.data for event in events] == [KVCacheUpdatedData(H0, *diffs)] * (
        2 if any(diffs) else 0
    )
    for event in events:
        shown_diffs = [event.to_dict()["data"][name] for name in ("cache_level", "priority")]
        assert [d is None for d in shown_diffs] == [d is None for d in diffs]


def test_updated_only_where_it_is_announced():
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1, groups=(0,)))
    m.updated(keys_of(IDS)[0], 1, level=(0, 1))
    assert shown(flushed(m)) == [("stored", 0, [H0])]


# -- coalescing ------------------------------------------------------------------------------------


def test_a_child_joins_its_parents_event():  # E-01
    m = KVCacheEventManager(4)
    m.stored(run_of(IDS, 0, 1))
    m.stored(run_of(IDS, 1, 2))
    events = flushed(m)
    assert shown(events) == [("stored", 0, [H0, H1])]
    assert events[0].data.parent_hash is None
    assert [[t.token_id for t in b.tokens] for b in events[0].data.blocks] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ]
    assert pickle.loads(pickle.dumps(events)) == events


def test_what_does_not_follow_does_not_join():
    other = [1, 2, 3, 4, 50, 60, 70, 80]
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 2))
    m.stored(run_of(other, 1, 2))  # a brother of H1
    m.stored(run_of(IDS, 2, 3))  # a child of H1, no longer the last
    m.flush_iteration_events()
    m.stored(run_of([*IDS, 13], 3, 4))  # its parent's event is flushed
    m.flush_iteration_events()
    events = m.get_latest_events(0)
    last, brother = keys_of([*IDS, 13])[3].hex(), keys_of(other)[1].hex()
    assert [named for _, _, named in shown(events)] == [[H0, H1], [brother], [H2], [last]]
    assert [event.data.parent_hash for event in events] == [None, H0, H1, H2]


def test_layer_groups_have_runs_of_their_own():
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1, groups=(0, 1)))
    m.stored(run_of(IDS, 1, 2, groups=(0, 1)))
    assert shown(flushed(m)) == [("stored", 0, [H0, H1]), ("stored", 1, [H0, H1])]


def test_a_removal_ends_the_groups_run():
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 2))
    m.removed([keys_of(IDS)[1]], 0)
    m.stored(run_of(IDS, 1, 2))
    assert shown(flushed(m)) == [("stored", 0, [H0, H1]), ("removed", 0, [H1]), ("stored", 0, [H1])]


def test_a_removal_of_another_group_keeps_runs_from_growing_and_waits():
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1, groups=(0, 1)))
    m.removed([keys_of(IDS)[0]], 1)
    m.stored(run_of(IDS, 1, 2, groups=(0,)))
    m.stored(run_of(IDS, 2, 3, groups=(1,)))
    assert shown(flushed(m)) == [
        ("stored", 0, [H0]),
        ("stored", 1, [H0]),
        ("stored", 0, [H1]),
        ("removed", 1, [H0]),
        ("stored", 1, [H2]),
    ]


def test_removals_gather_by_group_until_something_else_comes():  # E-40
    m = KVCacheEventManager(16)
    m.stored(run_of(IDS, groups=(0, 1)))
    k0, k1, k2 = keys_of(IDS)
    m.removed([k2], 0)
    m.removed([k2], 1)
    m.removed([k1], 0)
    m.updated(k0, 0, priority=(35, 50))
    m.removed([k1], 1)
    m.add_created_event([1])
    assert shown(flushed(m))[2:] == [
        ("removed", 0, [H2, H1]),
        ("removed", 1, [H2]),
        ("updated", 0, [H0]),
        ("removed", 1, [H1]),
        ("created", None, []),
    ]


def test_events_without_a_group_stand_in_every_groups_way():
    m = KVCacheEventManager(8)
    m.add_stored_event(None, [block("a")], layer_group_id=0)
    m.add_removed_event("a")
    m.add_stored_event(None, [block("a")], layer_group_id=0)
    m.add_stored_event("a", [])
    assert shown(flushed(m)) == [
        ("stored", 0, ["a"]),
        ("removed", None, ["a"]),
        ("stored", 0, ["a"]),
    ]


# -- announced blocks ------------------------------------------------------------------------------


def test_removed_once():  # E-29
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1))
    for _ in range(2):
        m.removed([keys_of(IDS)[0]], None)
    assert shown(flushed(m)) == [("stored", 0, [H0]), ("removed", 0, [H0])]


def test_a_group_is_told_once_and_what_is_missing_later():  # E-34, E-35
    m = KVCacheEventManager(8)
    for groups in ((0,), (0,), (0, 1)):
        m.stored(run_of(IDS, 0, 2, groups=groups))
    assert shown(flushed(m)) == [("stored", 0, [H0, H1]), ("stored", 1, [H0, H1])]


def test_only_the_gaps_of_a_run_are_told():
    m = KVCacheEventManager(8)
    ids = list(range(20))
    names = [key.hex() for key in keys_of(ids)]
    m.stored(run_of(ids, 2, 3))
    m.stored(run_of(ids))
    events = flushed(m)
    assert [named for _, _, named in shown(events)] == [[names[2]], names[:2], names[3:]]
    assert [event.data.parent_hash for event in events] == [names[1], None, names[2]]


def test_a_whole_block_after_one_of_its_groups():  # E-37
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, 0, 1, groups=(0, 1)))
    m.removed([keys_of(IDS)[0]], 0)
    m.removed([keys_of(IDS)[0]], None)
    assert shown(flushed(m))[2:] == [("removed", 0, [H0]), ("removed", 1, [H0])]


def test_told_again_after_all_was_removed():  # E-39
    m = KVCacheEventManager(8)
    for _ in range(2):
        m.stored(run_of(IDS, 0, 1, groups=(0, 1)))
        m.removed([keys_of(IDS)[0]], 1)
        m.removed([keys_of(IDS)[0]], 0)
    events = flushed(m)
    for group in (0, 1):
        mine = [kind for kind, of, _ in shown(events) if of == group]
        assert mine == ["stored", "removed"] * 2


def test_a_run_that_covers_no_whole_block_is_silent():
    m = KVCacheEventManager(8)
    m.stored(run_of(IDS, groups=()))
    m.removed(keys_of(IDS), None)
    assert flushed(m) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), "subtree", "clear"])
def test_removed_reaches_every_block(order):  # G1
    m, c, keys = KVCacheEventManager(32), Consumer(), keys_of(IDS)
    m.stored(run_of(IDS))
    c.follow(flushed(m))
    assert c.held == {0: {H0, H1, H2}}
    left = [H0, H1, H2]
    steps = [[i] for i in order] if isinstance(order, tuple) else [[2, 1, 0]]
    for step in steps:
        m.removed([keys[i] for i in step], None if order == "clear" else 0)
        left = [h for h in left if h not in [keys[i].hex() for i in step]]
        assert c.follow(flushed(m))
        assert c.held[0] == set(left)
    assert m._announced == {}  # nothing is remembered of what went
    m.stored(run_of(IDS))
    assert shown(flushed(m)) == [("stored", 0, [H0, H1, H2])]
