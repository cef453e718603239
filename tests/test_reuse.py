"""Publishing prefixes and using them: the scenarios of a catalogue, with their ids.

R, G: reuse, clearing. P: partial blocks.
"""

from __future__ import annotations

import pytest

import kvcore as k
from kvcore.testing import check
from tests.helpers import opaque_manager, row, typed_manager
from tests.prefixes import Author, began, fresh, probe, published, stats, turn

# -- reuse, clearing -------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_reuse_of_what_was_computed(requests):
    """R-01, R-02, R-03: what a later request finds reads as what an earlier one computed."""
    m = typed_manager(slots=256, T=4, layers=3)
    author = Author(m)
    prompts = [fresh(88) for _ in range(requests)]
    caches = [author.began(prompt[:32], 88) for prompt in prompts]
    for start in range(0, 88, 8):
        for kv, prompt in zip(caches, prompts, strict=True):
            author.computes(kv, prompt[start : start + 8])
    author.engine.verify(caches)
    for kv in caches:
        author.engine.close(kv)
    assert stats(m)[2] == m.get_storage_statistics()[0].total - stats(m)[1] == 22 * requests
    again = author.began(prompts[0][:37], 88)
    assert again.num_committed_tokens == 37
    author.computes(again, fresh(51))
    author.engine.verify([again])
    author.engine.close(again)
    check(m, device=True)


def test_backoff_trims_the_match():
    """R-05."""
    m = opaque_manager(T=8, reuse_match_backoff=3)
    a = fresh(32)
    kv = began(m, None, 32)
    kv.commit(a)
    assert kv.num_committed_tokens == 32
    kv.close()
    assert probe(m, a, a[:2], a[:9], a[:11]) == [29, 0, 6, 8]
    assert m.create_kv_cache(input_tokens=a).num_committed_tokens == 29


def test_a_second_pass_finds_everything():
    """R-11."""
    m = opaque_manager(slots=1024, T=32, layers=2)
    prompts = [fresh(1000) for _ in range(20)]
    assert [turn(m, prompt) for prompt in prompts] == [0] * 20
    assert [turn(m, prompt) for prompt in prompts] == [1000] * 20


def test_a_drop_plan_of_full_attention_is_empty():
    """R-06 without windows: plans come after the end, and are dropped once."""
    m = opaque_manager(T=8)
    kv = began(m, None, 24)
    kv.commit(fresh(24))
    with pytest.raises(k.StateError, match="stop_committing"):
        kv.plan_committed_block_drop()
    kv.stop_committing()
    plan = kv.plan_committed_block_drop()
    assert plan.drop() == 0
    with pytest.raises(k.StateError, match="already been dropped"):
        plan.drop()
    nothing = began(m)
    nothing.stop_committing()
    assert nothing.plan_committed_block_drop() is None


@pytest.mark.parametrize("name", ["clear_reusable_blocks", "shutdown"])
def test_open_caches_keep_their_prefixes(name):
    """G-01, G-02, G-03: refused by name and number; nothing changed; open means not closed."""
    m = opaque_manager(T=32)
    a = fresh(64)
    kv = began(m, None, 64)
    kv.commit(a[:32])
    kv.commit(a[32:])
    kv.close()
    caches = m.create_kv_caches([None] * 3)
    for left in (3, 2):
        with pytest.raises(k.StateError, match=rf"{name}: {left} KV cache\(s\) still open"):
            getattr(m, name)()
        assert probe(m, a) == [64]
        caches[left - 1].close()
    m.close_kv_caches(caches)
    m.clear_reusable_blocks()
    assert (probe(m, a), stats(m)) == ([0], (16, 16, 0))
    m.shutdown()


# -- partial blocks --------------------------------------------------------------------------------


def partial_manager(**settings):
    return opaque_manager(T=32, **{"commit_min_snapshot": True, **settings})


def test_an_endpoint_survives_a_longer_sibling():
    """P-01, P-02."""
    for first, second in ((80, 160), (160, 80)):
        m = partial_manager()
        a = fresh(160)
        assert (turn(m, a[:first]), turn(m, a[:second])) == (0, 80)
        assert probe(m, [*a[:80], 0], a) == [80, 160]
        assert stats(m)[2] == 5


def test_coverage_only_grows():
    """P-06: 80, then 88 tokens, then 80 again."""
    m = partial_manager()
    a = fresh(88)
    assert (turn(m, a[:80]), turn(m, a)) == (0, 80)
    assert probe(m, [*a[:80], 0], [*a, 0]) == [80, 88]
    assert turn(m, a[:80]) == 80
    assert probe(m, [*a, 0]) == [88]
    assert stats(m)[2] == 3


def test_a_replaced_page_does_not_outlive_its_block():
    """P-07: its publisher is still open."""
    m = partial_manager(commit_min_snapshot=False)
    a = fresh(96)
    kv = began(m, None, 72)
    kv.commit(a[:72], is_end=True)
    last = row(kv)[2]
    assert published(m, last)
    other = began(m, a[:80])
    assert other.num_committed_tokens == 72
    other.commit(a[72:80], is_end=True)
    other.close()
    assert not published(m, last)
    assert turn(m, a) == 80
    assert not published(m, last)
    check(m)
    kv.close()
    check(m)
    assert (stats(m), probe(m, a)) == ((16, 13, 3), [96])


def test_a_replaced_page_lives_as_long_as_it_is_held():
    """P-08: by a sequence that has found it and was not resumed yet."""
    m = typed_manager(slots=16, T=4, layers=1)
    author = Author(m)
    a = fresh(12)
    author.turn(a[:9])
    holder = author.engine.create_kv_cache(None, a[:9])
    assert holder.num_committed_tokens == 9
    last = holder.get_aggregated_page_indices(0)[2]
    assert published(m, last)
    assert author.turn(a[:10]) == 9
    assert not published(m, last)
    assert author.turn(a) == 10
    assert not published(m, last)
    check(m)
    assert holder.resume()
    author.engine.verify([holder])
    author.engine.close(holder)
    check(m)
    assert stats(m)[2] == 3


@pytest.mark.parametrize(("partial", "expected"), [(False, 8), (True, 9)])
def test_partial_reuse_is_a_setting(partial, expected):
    """P-09: a prompt of 10 tokens, looked up without its last."""
    m = opaque_manager(enable_partial_reuse=partial)
    a = fresh(12)
    turn(m, a)
    assert m.create_kv_cache(input_tokens=a[:9]).num_committed_tokens == expected


def test_a_partial_chunk_is_committed():
    """P-10."""
    m = opaque_manager(commit_min_snapshot=True)
    kv = began(m, None, 6)
    a = fresh(6)
    kv.commit(a)
    assert (kv.num_committed_tokens, kv.history_length) == (6, 6)
    assert probe(m, a) == [6]


@pytest.mark.parametrize(
    ("commit", "reuse", "expected"),
    [
        (True, True, [10, 10, 6]),
        (True, False, [8, 10, 4]),
        (False, True, [8, 8, 6]),
        (False, False, [8, 8, 4]),
    ],
)
def test_partial_commit_and_partial_reuse_are_independent(commit, reuse, expected):
    m = opaque_manager(enable_partial_commit=commit, enable_partial_reuse=reuse)
    a = fresh(10)
    turn(m, a)
    asked = [a + fresh(2), a, a[:6] + fresh(4)]
    assert probe(m, *asked) == expected
    for prompt, n in zip(asked, expected, strict=True):
        kv = m.create_kv_cache(input_tokens=prompt)
        assert (kv.num_committed_tokens, kv.history_length, kv.capacity) == (n, n, n)
        kv.close()


def test_history_must_be_at_a_commit_with_minimal_snapshots():
    """Capacity 64, history 48, commit of 32: refused; with history 32 or 0 it is fine."""
    m = partial_manager()
    for history in (48, 32, 0):
        kv = began(m, None, 64)
        kv.resize(None, history)
        if history == 48:
            with pytest.raises(k.StateError, match="commit_min_snapshot"):
                kv.commit(fresh(32))
            assert (kv.num_committed_tokens, kv.history_length) == (0, 48)
        else:
            kv.commit(fresh(32))
            assert (kv.num_committed_tokens, kv.history_length) == (32, 32)
        kv.close()


def test_committing_ends():
    m = opaque_manager()
    kv = began(m, None, 12)
    a = fresh(12)
    kv.commit([])
    kv.commit(a[:6])
    assert probe(m, a) == [4]
    kv.commit([], is_end=True)
    assert probe(m, a) == [6]
    kv.commit([])
    with pytest.raises(k.StateError, match="stopped"):
        kv.commit(a[6:])
    kv.stop_committing()
    kv.suspend()
    with pytest.raises(k.StateError, match="suspended"):
        kv.commit([])
    assert kv.num_committed_tokens == 6
    assert kv.resume()
    with pytest.raises(ValueError, match="tokens"):
        began(m, None, 4).commit(fresh(5))
