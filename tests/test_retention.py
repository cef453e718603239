"""What stays and what goes: priorities, times to live, pins, epochs, and why a prompt missed."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import kvcore as k
from kvcore.control.pieces import SortedPieces
from tests.helpers import opaque_manager

_ids = itertools.count(50_000)


def fresh(n):
    return [next(_ids) for _ in range(n)]


def seed(manager, tokens, **settings):
    kv = manager.create_kv_cache(input_tokens=tokens, **settings)
    known = kv.num_committed_tokens
    assert kv.resume()
    assert kv.resize(len(tokens))
    kv.commit(tokens[known:])
    kv.close()
    return known


def squeeze(manager, blocks):
    """Takes so many blocks and gives them back unpublished."""
    kv = manager.create_kv_cache()
    assert kv.resume()
    assert kv.resize(blocks * 4)
    kv.close()


def there(manager, *prompts, **scope):
    return [manager.probe_reuse(input_tokens=prompt, **scope) for prompt in prompts]


# -- priorities ------------------------------------------------------------------------------------


def test_lower_priorities_go_first():
    m = opaque_manager(slots=4)
    a, b, c = fresh(4), fresh(4), fresh(4)
    seed(m, a, retention=k.Retention(priority=90))
    seed(m, b)
    seed(m, c, retention=[k.Retention(priority=10)])
    squeeze(m, 2)
    assert there(m, a, b, c) == [4, 4, 0]
    squeeze(m, 3)
    assert there(m, a, b, c) == [4, 0, 0]


def test_ranges_cover_the_first_token_of_a_block_and_the_last_entry_wins():
    m = opaque_manager(slots=8)
    a = fresh(16)
    seed(m, a, retention=[k.Retention(priority=90), k.Retention(start=5, end=9, priority=1)])
    b = fresh(12)
    seed(m, b)
    squeeze(m, 2)  # one is free; block 2 of `a` (first token 8) is below its block 3, so `b` gives
    assert there(m, a, b) == [16, 8]
    seed(m, a[:12], retention=k.Retention(priority=1))  # block 3 keeps 90 and protects the others
    squeeze(m, 4)
    assert there(m, a, b) == [16, 0]


def test_a_later_sequence_changes_what_it_reuses():
    m = opaque_manager(slots=4)
    a, b = fresh(4), fresh(4)
    seed(m, a)
    seed(m, b)
    kv = m.create_kv_cache(input_tokens=a, retention=k.Retention(priority=0))
    kv.close()  # used last, but least important
    squeeze(m, 3)
    assert there(m, a, b) == [0, 4]


def test_a_callback_gives_priorities():
    m = opaque_manager(slots=4)
    seen = []

    def priority(ordinal, group):
        seen.append((ordinal, group.layer_ids))
        return 5 if ordinal else 80

    a, b = fresh(8), fresh(4)
    seed(m, a, custom_priority_callback=priority)
    seed(m, b)
    assert seen == [(0, (0,)), (1, (0,))]
    squeeze(m, 2)
    assert there(m, a, b) == [4, 4]
    squeeze(m, 3)
    assert there(m, a, b) == [4, 0]


def test_a_callback_out_of_range_changes_nothing():
    m = opaque_manager()
    a = fresh(4)
    kv = m.create_kv_cache(custom_priority_callback=lambda ordinal, group: 101)
    kv.resume()
    kv.resize(4)
    with pytest.raises(ValueError, match="custom_priority_callback"):
        kv.commit(a)
    assert (kv.num_committed_tokens, kv.history_length, there(m, a)) == (0, 0, [0])


def closing(**settings):
    """A manager and a cache that holds one full block and half of one, not yet closed."""
    manager = opaque_manager(T=4, enable_partial_commit=True)
    kv = manager.create_kv_cache(**settings)
    assert kv.resume()
    assert kv.resize(6)
    tokens = fresh(6)
    kv.commit(tokens)
    return manager, kv, tokens


def test_a_callback_that_fails_at_close_costs_the_last_block_only():
    def priority(ordinal, layer_group):
        if ordinal == 1:
            raise KeyError(ordinal)
        return 50

    manager, kv, tokens = closing(custom_priority_callback=priority)
    with pytest.warns(RuntimeWarning, match=r"custom_priority_callback failed.*KeyError\(1\)"):
        kv.close()
    assert there(manager, tokens) == [4]


def test_an_error_of_ours_at_close_is_not_told_as_a_callbacks(monkeypatch):
    manager, kv, tokens = closing()

    def broken(*args, **settings):
        raise k.InternalError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("kvcore.runtime.plan_commit", broken)
        with pytest.raises(k.InternalError, match="broken"):
            kv.close()
    kv.close()  # nothing had changed
    assert there(manager, tokens) == [6]


def test_wrong_retention_is_refused():
    for wrong in ({"priority": 101}, {"start": -1}, {"start": 3, "end": 3}, {"ttl": 0}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            k.Retention(**wrong)
    m = opaque_manager()
    with pytest.raises(TypeError, match="retention"):
        m.create_kv_cache(retention=[35])
    with pytest.raises(ValueError, match="now"):
        m.create_kv_cache(retention=k.Retention(priority=50, ttl=1))


# -- times -----------------------------------------------------------------------------------------


def test_a_priority_ends_with_its_time():
    m = opaque_manager(slots=4)
    a, b = fresh(4), fresh(4)
    seed(m, a, retention=k.Retention(priority=90, ttl=10), now=100)
    seed(m, b)
    m.expire(now=109.9)
    squeeze(m, 3)
    assert there(m, a, b) == [4, 0]
    seed(m, b)
    m.expire(now=110)
    squeeze(m, 3)
    assert there(m, a, b) == [0, 4]


def test_a_later_setting_replaces_the_time():
    m = opaque_manager(slots=4)
    a, b = fresh(4), fresh(4)
    seed(m, a, retention=k.Retention(priority=90, ttl=10), now=0)
    m.create_kv_cache(input_tokens=a, retention=k.Retention(priority=80)).close()
    seed(m, b)
    m.expire(now=50)
    squeeze(m, 3)
    assert there(m, a, b) == [4, 0]


def test_a_recycled_page_does_not_inherit_a_time():
    m = opaque_manager(slots=2)
    a, b = fresh(4), fresh(4)
    seed(m, a, retention=k.Retention(priority=90, ttl=10), now=0)
    squeeze(m, 2)
    seed(m, b, retention=k.Retention(priority=90))
    c = fresh(4)
    seed(m, c, retention=k.Retention(priority=50))
    m.expire(now=50)
    squeeze(m, 1)
    assert there(m, b, c) == [4, 0]


# -- pins ------------------------------------------------------------------------------------------


def test_a_pin_holds_until_it_is_closed():
    m = opaque_manager(slots=4)
    a = fresh(10)
    seed(m, a)
    pin = m.pin(a[:9])
    assert (pin.num_tokens, m.get_storage_statistics()[0].evictable) == (9, 0)
    kv = m.create_kv_cache()
    kv.resume()
    assert not kv.resize(8)
    assert kv.resize(4)
    pin.close()
    pin.close()
    assert kv.resize(8)
    assert there(m, a) == [8]


def test_a_pin_ends_by_itself():
    m = opaque_manager(slots=4)
    a = fresh(8)
    seed(m, a)
    pin = m.pin(a, ttl=5, now=1)
    m.expire(now=5.9)
    assert pin.is_open
    m.expire(now=6)
    assert not pin.is_open
    assert m.get_storage_statistics()[0].evictable == 2
    with pytest.raises(ValueError, match="now"):
        m.pin(a, ttl=5)


def test_a_pin_of_nothing_and_clear_under_a_pin():
    m = opaque_manager(slots=4)
    with m.pin(fresh(8)) as pin:
        assert pin.num_tokens == 0
        assert not pin.is_open
    a = fresh(8)
    seed(m, a)
    pin = m.pin(a)
    m.clear_reusable_blocks()
    assert not pin.is_open
    assert m.get_storage_statistics()[0].free == 4


# -- epochs ----------------------------------------------------------------------------------------


def test_new_weights_put_old_pages_out_of_reach():
    """Cases B4 and B12."""
    m = opaque_manager(slots=8)
    a = fresh(8)
    lora = k.ReuseScope(lora_id=7)
    seed(m, a)
    seed(m, a, reuse_scope=lora)
    m.set_weights_epoch(1, lora_id=7)
    assert (there(m, a), there(m, a, reuse_scope=lora)) == ([8], [0])
    seed(m, a, reuse_scope=lora)
    assert there(m, a, reuse_scope=lora) == [8]
    m.set_weights_epoch(1, lora_id=7)
    assert there(m, a, reuse_scope=lora) == [8]
    m.set_weights_epoch(3)
    assert (there(m, a), there(m, a, reuse_scope=lora)) == ([0], [0])
    assert (m.weights_epoch(), m.weights_epoch(7), m.weights_epoch(8)) == (3, 1, None)
    assert m.get_storage_statistics()[0].evictable == 6


def test_an_open_sequence_of_old_weights_publishes_nothing_more():
    """Case B12."""
    m = opaque_manager(slots=8)
    a = fresh(16)
    kv = m.create_kv_cache()
    kv.resume()
    kv.resize(16)
    kv.commit(a[:6])
    m.set_weights_epoch(2)
    kv.commit(a[6:14])
    assert kv.num_committed_tokens == 14
    assert there(m, a) == [0]
    kv.close()
    assert there(m, a) == [0]
    assert seed(m, a) == 0
    assert there(m, a) == [16]


def test_unreachable_pages_are_reclaimed_first():
    m = opaque_manager(slots=6)
    a, b, c = fresh(8), fresh(8), fresh(8)
    scope = k.ReuseScope(lora_id=1)
    seed(m, a)
    seed(m, b, reuse_scope=scope, retention=k.Retention(priority=100))
    m.set_weights_epoch(1, lora_id=1)
    seed(m, c)
    squeeze(m, 2)
    assert there(m, a, c) == [8, 8]


# -- digests -------------------------------------------------------------------------------------


def test_a_sequence_may_be_text_only_and_a_manager_must_not_be_loosened():
    image = k.gen_multimodal_cache_key_tokens(1_000, bytes(range(32)), 4)
    m = opaque_manager()
    seed(m, image)
    with pytest.raises(ValueError, match="input_tokens"):
        m.create_kv_cache(input_tokens=image, text_only=True)
    kv = m.create_kv_cache(text_only=True)
    kv.resume()
    kv.resize(8)
    with pytest.raises(ValueError, match="tokens"):
        kv.commit(image)
    kv.commit(fresh(4))
    strict = opaque_manager(text_only=True)
    for call in (
        lambda: strict.create_kv_cache(text_only=False),
        lambda: strict.create_kv_cache(input_tokens=image),
        lambda: strict.probe_reuse(input_tokens=image),
    ):
        with pytest.raises(ValueError, match="text"):
            call()


# -- order -----------------------------------------------------------------------------------------


def test_a_branch_keeps_its_trunk():
    m = opaque_manager(slots=6)
    a = fresh(8)
    b = a[:4] + fresh(4)
    seed(m, a)
    seed(m, b)
    seed(m, fresh(4))
    squeeze(m, 3)  # two are free: the older branch's tip
    assert there(m, a, b) == [4, 8]
    squeeze(m, 4)
    assert there(m, a, b) == [4, 4]
    squeeze(m, 5)  # the trunk was last used before the other prompt
    assert there(m, a, b) == [0, 0]


def test_sorted_pieces_are_a_sorted_map():
    rng = random.Random(3)
    pieces, model = SortedPieces(), []
    for _ in range(6000):
        if model and rng.random() < 0.4:
            key = model.pop(0 if rng.random() < 0.5 else rng.randrange(len(model)))
            pieces.remove(key)
        else:
            key = rng.randrange(1 << 40)
            pieces.put(key, -key)
            model = sorted([*model, key])
        if model:
            assert pieces.first() == -model[0]
            probe = rng.choice(model) + rng.randrange(-1, 2)
            below = [-x for x in model if x < probe]
            above = [-x for x in model if x >= probe]
            assert pieces.neighbours(probe) == [*below[-1:], *above[:1]]
    assert list(pieces) == [-key for key in model]
    assert len(pieces) == len(model)
    for _ in range(100):
        pieces.sift_next(lambda value: value % 3)
    assert list(pieces) == [-key for key in model if -key % 3]
    pieces.sift_at(model[0], lambda value: False)
    assert len(pieces) < sum(key % 3 > 0 for key in model)


def test_the_order_of_children_forgets_those_that_left():
    """Also where neighbours in the order leave one after the other."""
    m = opaque_manager(slots=1024)
    for i in range(1000):
        seed(m, [7, i, 0, 0])
    assert m.probe_reuse(input_tokens=[7, 500, 1, 1]) == 2
    squeeze(m, 1024 - 40)
    (root,) = m._runtime.control.reuse.tree.roots.values()
    assert len(root.children) == 40
    assert m.probe_reuse(input_tokens=[7, 500, 1, 1]) == 1
    assert m.probe_reuse(input_tokens=[7, 990, 1, 1]) == 2
    for i in range(1000):
        seed(m, [7, i, 1, 0])
    assert len(root.children.order) < 4 * 1024
    assert m.probe_reuse(input_tokens=[7, 500, 2, 2]) == 2


def test_the_closest_of_many_branches_is_found():
    """No guard that shortens a match where many branches hang on one block."""
    m = opaque_manager(slots=256)
    rng = np.random.default_rng(5)
    stored = rng.integers(0, 3, (200, 4)).tolist()
    for block in stored:
        seed(m, block)
    for _ in range(100):
        asked = rng.integers(0, 3, 4).tolist()
        best = max(next((i for i in range(4) if one[i] != asked[i]), 4) for one in stored)
        assert m.probe_reuse(input_tokens=asked) == best
