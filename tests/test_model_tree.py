"""The model of prefix reuse against numbers worked out by hand."""

from __future__ import annotations

from itertools import count

import pytest

from kvcore.config import ReuseScope
from kvcore.errors import StateError
from kvcore.retention import DEFAULT_PRIORITY, Retention
from kvcore.testing.model import ModelManager
from kvcore.testing.model_tree import ModelTree, Page

_ids = count(1_000)


def fresh(n):
    """Token ids never used before."""
    return [next(_ids) for _ in range(n)]


def model(slots=16, tokens_per_block=4, enable_partial_commit=True, **settings):
    return ModelManager(
        tokens_per_block=tokens_per_block,
        slots=slots,
        enable_partial_commit=enable_partial_commit,
        **settings,
    )


def opened(m, capacity=0, **how):
    kv = m.create_kv_cache(**how)
    assert kv.resume()
    assert kv.resize(max(capacity, kv.capacity))
    return kv


def seed(m, tokens, **how):
    """Publishes tokens and leaves; returns how many were found."""
    kv = m.create_kv_cache(input_tokens=tokens, **how)
    found = kv.num_committed_tokens
    assert kv.resume()
    assert kv.resize(len(tokens))
    kv.commit(tokens[found:])
    kv.close()
    return found


def probe(m, *prompts, scope=None):
    return [m.probe_reuse(scope, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("commit", "reuse", "expected"),
    [
        (True, True, [10, 10, 6]),
        (True, False, [8, 10, 4]),
        (False, True, [8, 8, 6]),
        (False, False, [8, 8, 4]),
    ],
)
def test_partial_commit_and_partial_reuse(commit, reuse, expected):
    m = model(enable_partial_commit=commit, enable_partial_reuse=reuse)
    a = fresh(10)
    seed(m, a)
    asked = [a + fresh(2), a, a[:6] + fresh(4)]
    assert probe(m, *asked) == expected
    for prompt, n in zip(asked, expected, strict=True):
        kv = m.create_kv_cache(input_tokens=prompt)
        assert (kv.num_committed_tokens, kv.history_length, kv.capacity) == (n, n, n)
        kv.close()
    assert (m.free, m.evictable) == (16 - (3 if commit else 2), 3 if commit else 2)


def test_scopes():
    m = model(slots=64)
    a = fresh(16)
    seed(m, a, reuse_scope=ReuseScope(lora_id=7, salt=11))
    scopes = [(7, 11), (7, 12), (8, 11), (7, None), (None, 11), (None, None), (0, 0)]
    found = [m.probe_reuse(ReuseScope(lora_id=x, salt=y), a[:15]) for x, y in scopes]
    assert found == [15, 0, 0, 0, 0, 0, 0]


def test_backoff():
    m = model(tokens_per_block=8, reuse_match_backoff=3)
    a = fresh(32)
    seed(m, a)
    assert probe(m, a, a[:2], a[:9], a[:11]) == [29, 0, 6, 8]
    assert m.create_kv_cache(input_tokens=a[:11]).borrowed is False


def test_the_longest_common_start_wins_and_a_tie_is_put_to_the_caller():
    m = model()
    a, b = fresh(3), fresh(2)
    seed(m, a[:2] + b)
    seed(m, a + b[:1])
    assert probe(m, [*a, 0], [*a[:2], 0]) == [3, 2]
    kv = m.create_kv_cache(input_tokens=[*a[:2], 0], choose=lambda nodes: nodes[1])
    assert kv.rows[0][0].node.tokens == (*a, b[0])


def test_a_borrowed_page_is_copied_at_the_first_resume():
    m = model()
    a = fresh(10)
    seed(m, a)
    b, c = (m.create_kv_cache(input_tokens=a[:6] + fresh(4)) for _ in range(2))
    assert b.rows == c.rows
    assert (m.free, m.evictable) == (13, 1)
    assert b.resume()
    assert c.resume()
    assert b.rows[0][0] is c.rows[0][0]
    assert b.rows[0][1] is not c.rows[0][1]
    assert (m.free, m.evictable) == (11, 2)
    b.close()
    c.close()
    assert (m.free, m.evictable) == (13, 3)


def test_content_follows_the_pages():
    m = model()
    kv = opened(m, 6)
    for position in range(6):
        kv.write(0, position, 100 + position)
    kv.commit([1, 2, 3, 4, 5, 6])
    kv.close()
    other = opened(m, 8, input_tokens=[1, 2, 3, 4, 5, 9])
    assert other.content(0) == [100, 101, 102, 103, 104, None, None, None]


def test_equal_full_blocks_are_stored_once():
    m = model()
    a = fresh(8)
    x, y = opened(m, 8), opened(m, 8)
    x.commit(a)
    y.commit(a)
    assert x.rows == y.rows
    assert m.free == 14
    x.close()
    y.close()
    assert (m.free, m.evictable) == (14, 2)


def test_a_partial_block_is_never_swapped():
    m = model()
    a = fresh(4)
    seed(m, a)
    kv = opened(m, 4)
    mine = kv.rows[0][0]
    kv.commit(a[:2])
    kv.stop_committing()
    assert kv.rows[0][0] is mine
    assert mine.node is None
    kv.close()
    assert (m.free, m.evictable, *probe(m, a)) == (15, 1, 4)


def test_a_longer_block_replaces_its_start_which_lives_while_it_is_held():
    m = model()
    a = fresh(6)
    seed(m, a)
    holder = m.create_kv_cache(input_tokens=a)
    seed(m, a + fresh(1))
    assert probe(m, a) == [6]
    assert (m.free, m.evictable) == (13, 1)  # a's two pages are held, one of them out of the tree
    holder.close()
    assert (m.free, m.evictable) == (14, 2)


def test_eviction_takes_leaves_by_age_and_never_what_is_held():
    m = model(slots=6)
    a, b = fresh(8), fresh(8)
    seed(m, a)
    seed(m, b)
    user = m.create_kv_cache(input_tokens=a)
    assert user.resume()
    c = opened(m, 12)
    assert probe(m, a, b) == [8, 4]
    assert c.resize(20) is False
    assert probe(m, a, b) == [8, 4]
    assert c.resize(16)
    assert probe(m, a, b) == [8, 0]


def test_a_probe_and_a_match_are_no_use():
    m = model(slots=4)
    a, b = fresh(8), fresh(8)
    seed(m, a)
    seed(m, b)
    assert probe(m, a, a, a) == [8, 8, 8]
    opened(m, 4)
    assert probe(m, a, b) == [4, 8]


def test_priorities_come_before_age_and_can_be_changed_by_whoever_comes_next():
    m = model(slots=6)
    a, b, c = fresh(8), fresh(8), fresh(8)
    seed(m, a, retention=[Retention(priority=80)])
    seed(m, b, retention=[Retention(priority=90), Retention(start=4, priority=10)])
    assert [page.priority for page in m.tree.pages()] == [80, 80, 90, 10]
    seed(m, c)  # default, newest
    opened(m, 4)
    assert probe(m, a, b, c) == [8, 4, 8]
    opened(m, 8)
    assert probe(m, a, b, c) == [8, 4, 0]
    seed(m, a, retention=[Retention(end=4, priority=95), Retention(start=8, priority=0)])
    assert [page.priority for page in m.tree.pages()] == [95, 80, 90]


def test_the_time_of_a_priority_ends():
    m = model()
    a = fresh(8)
    with pytest.raises(ValueError, match="now"):
        m.create_kv_cache(input_tokens=a, retention=Retention(ttl=5))
    seed(m, a, retention=[Retention(priority=80, ttl=5)], now=100)
    m.expire(104.5)
    assert [page.priority for page in m.tree.pages()] == [80, 80]
    seed(m, a, retention=[Retention(end=4, priority=70)])
    m.expire(105)
    assert [page.priority for page in m.tree.pages()] == [70, DEFAULT_PRIORITY]


def test_a_callback_sets_the_priority_of_what_is_published():
    m = model()
    a = fresh(10)
    seed(m, a, custom_priority_callback=lambda ordinal, group: 50 + ordinal)
    assert [page.priority for page in m.tree.pages()] == [50, 51, 52]


def test_a_pin_holds_and_its_end_is_a_use():
    m = model(slots=4)
    a, b = fresh(8), fresh(8)
    seed(m, a)
    seed(m, b)
    pin = m.pin(a[:6] + fresh(1), ttl=10, now=0)
    assert pin.num_tokens == 6
    assert (m.free, m.evictable) == (0, 2)
    kv = m.create_kv_cache()
    assert kv.resume()
    assert kv.resize(12) is False
    m.expire(9)
    assert len(m.pins) == 1
    m.expire(10)
    assert m.pins == []
    assert kv.resize(4)
    assert probe(m, a, b) == [8, 4]
    pin.close()


def test_new_weights():
    m = model(slots=8)
    a, b = fresh(8), fresh(8)
    seven = ReuseScope(lora_id=7)
    seed(m, a)
    seed(m, b, reuse_scope=seven)
    m.set_weights_epoch(1, lora_id=7)
    assert probe(m, a) == [8]
    assert probe(m, b, scope=seven) == [0]
    assert (m.free, m.evictable) == (4, 4)
    kv = opened(m, 12, input_tokens=a)
    m.set_weights_epoch(1)
    kv.commit(fresh(4))
    assert kv.num_committed_tokens == 12
    assert probe(m, a) == [0]
    assert (m.free, m.evictable) == (3, 2)
    kv.close()
    assert (m.free, m.evictable) == (4, 4)
    seed(m, a)
    m.set_weights_epoch(1)
    assert probe(m, a) == [8]
    opened(m, 20)  # 2 free, and three of the four old pages
    assert probe(m, a) == [8]


def test_clear():
    m = model()
    a = fresh(8)
    seed(m, a)
    kv = m.create_kv_cache(input_tokens=a)
    m.pin(a)
    with pytest.raises(StateError, match="1 KV"):
        m.clear_reusable_blocks()
    kv.close()
    m.clear_reusable_blocks()
    m.clear_reusable_blocks()
    assert (m.free, m.evictable, m.pins, *probe(m, a)) == (16, 0, [], 0)


def test_minimal_snapshots_copy_the_tail():
    m = model(commit_min_snapshot=True)
    a = fresh(16)
    kv = opened(m, 16)
    assert kv.resize(None, 4)
    with pytest.raises(StateError, match="history"):
        kv.commit(a[:3])
    kv.commit(a[:4])
    assert kv.resize(None, 6)
    kv.commit(a[4:6])
    assert (m.free, m.evictable, *probe(m, a)) == (11, 1, 6)
    kv.commit(a[6:7])
    assert (m.free, m.evictable, *probe(m, a)) == (11, 1, 7)  # the longer copy replaced it
    kv.commit(a[7:9])
    assert (m.free, m.evictable, *probe(m, a)) == (11, 1, 9)
    kv.stop_committing()
    kv.close()
    assert (m.free, m.evictable, *probe(m, a)) == (13, 3, 9)


def test_a_snapshot_without_a_slot_is_left_out_and_made_up_for_at_the_end():
    m = model(slots=2, commit_min_snapshot=True)
    a = fresh(6)
    kv = opened(m, 8)
    kv.commit(a)
    assert (m.free, m.evictable, *probe(m, a)) == (0, 0, 4)
    kv.close()
    assert (m.free, m.evictable, *probe(m, a)) == (0, 2, 6)


def test_beams_must_agree():
    m = model(enable_partial_commit=False, max_beam_width=2)
    kv = opened(m, 8)
    assert kv.resize(None, 4)
    assert kv.set_beam_width(2)
    a = fresh(8)
    with pytest.raises(StateError, match="disagree"):
        kv.commit(a)
    kv.commit(a[:4])
    assert kv.set_beam_width(1, [1])
    kv.commit(a[4:])
    assert probe(m, a) == [8]


def test_the_tree_alone():
    tree = ModelTree(tokens_per_block=2, partial_reuse=True, backoff=0)
    top = tree.root((None, None))
    one = tree.enter(top, (1, 2), Page([]))
    two = tree.enter(one, (3,), Page([]))
    assert tree.covering(one, (3,)) is two
    three = tree.enter(one, (3, 4), Page([]))
    assert two.page.node is None
    assert tree.nodes() == [one, three]
    assert tree.covering(one, (3,)) is three
    assert tree.covering(one, (4,)) is None
