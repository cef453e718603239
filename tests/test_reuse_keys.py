"""Finding prefixes: the scenarios of a catalogue, with their ids.

K: keys and scopes. TR: the tree. FN: the first new block.
"""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.testing import check
from tests.helpers import opaque_manager
from tests.prefixes import fresh, probe, squeeze, stats, turn

SCOPES = [(7, 11), (7, 12), (8, 11), (7, None), (None, 11), (None, None)]


def scope(lora_id=None, salt=None):
    return k.ReuseScope(lora_id=lora_id, salt=salt)


def keys_of(tokens, T=4, of=None):
    return [key for _, key in k.sequence_to_blockchain_keys(T, of or scope(), tokens)][1:]


# -- keys, tokens, scopes --------------------------------------------------------------------------


def test_a_match_is_scoped():
    """K-07."""
    m = opaque_manager(T=2)
    turn(m, [1, 2], reuse_scope=scope(7, 11))
    assert probe(m, [1, 2], [1], scope=scope(7, 11)) == [2, 1]
    assert probe(m, [1, 2], [1], scope=scope(7, 12)) == [0, 0]


def test_scopes_isolate():
    """K-08."""
    m = opaque_manager(T=8, layers=2, slots=32)
    a = fresh(64)
    turn(m, a, reuse_scope=scope(7, 11))

    def asked():
        found = []
        for of in [scope(*each) for each in SCOPES] + [None]:
            found += probe(m, a[:63], scope=of)
            kv = m.create_kv_cache(of, a[:63])
            assert kv.num_committed_tokens == found[-1]
            kv.close()
        return found

    assert asked() == [63, 0, 0, 0, 0, 0, 0]
    turn(m, a)
    assert asked() == [63, 0, 0, 0, 0, 63, 63]


def test_arrays_and_lists_are_the_same():
    """K-09."""
    m = opaque_manager(T=8)
    a = fresh(24)
    array = np.array(a, np.int32)
    turn(m, array)
    assert probe(m, a, array) == [24, 24]
    m.clear_reusable_blocks()
    assert probe(m, a) == [0]
    turn(m, a)
    assert probe(m, array) == [24]


def test_any_sequence_is_a_prompt():
    """K-10."""
    m = opaque_manager()
    a = fresh(8)
    turn(m, a)
    assert m.create_kv_cache(input_tokens=tuple(a)).num_committed_tokens == 8


# -- the tree --------------------------------------------------------------------------------------


def tree_of(m):
    return m._runtime.control.reuse.tree


def nodes_of(m):
    return list(tree_of(m).walk())


def test_clearing_an_empty_tree():
    """TR-01, TR-02: also with a scope under which nothing was published."""
    m = opaque_manager(T=2)
    m.clear_reusable_blocks()
    m.create_kv_cache(scope(1), [1, 2]).close()
    m.clear_reusable_blocks()
    assert tree_of(m).roots == {}


@pytest.mark.parametrize(
    "prompts",
    [
        [(1, [1, 2, 3, 4, 5, 6])],
        [(1, [1, 2, 3, 4]), (3, [1, 2, 3, 4, 5, 6, 7, 8])],
        [(1, [1, 2, 3, 4, 5, 6]), (1, [1, 2, 9, 9]), (2, [5, 5])],
    ],
    ids=["TR-03", "TR-04", "TR-05"],
)
def test_clearing_orphans_everything(prompts):
    """TR-03, TR-04, TR-05: a chain; several roots, some without blocks; branches."""
    m = opaque_manager(T=2)
    for lora, tokens in prompts:
        turn(m, tokens, reuse_scope=scope(lora))
        m.create_kv_cache(scope(lora + 10), tokens).close()
    nodes = nodes_of(m)
    assert len(nodes) >= len(prompts)
    assert len(tree_of(m).roots) == len({lora for lora, _ in prompts})
    m.clear_reusable_blocks()
    assert tree_of(m).roots == {}
    assert [node.alive for node in nodes] == [False] * len(nodes)
    assert stats(m) == (16, 16, 0)
    check(m)


def test_clearing_twice_and_going_on():
    """TR-06."""
    m = opaque_manager(T=2)
    turn(m, [1, 2, 3, 4], reuse_scope=scope(5, 7))
    (before,) = tree_of(m).roots.values()
    m.clear_reusable_blocks()
    m.clear_reusable_blocks()
    turn(m, [1, 2], reuse_scope=scope(5, 7))
    (after,) = tree_of(m).roots.values()
    assert after is not before
    assert probe(m, [1, 2], scope=scope(5, 7)) == [2]


def test_a_tip_without_pages_goes_with_what_only_it_kept():
    """TR-08: with one layer group a block whose page is evicted is gone, up to the root."""
    m = opaque_manager(slots=2, T=2)
    turn(m, [1, 2, 3, 4])
    squeeze(m, 2)
    assert probe(m, [1, 2, 3, 4]) == [2]
    squeeze(m, 4)
    assert tree_of(m).roots == {}


def test_matching_by_keys():
    """TR-10, TR-11, TR-12, TR-13, TR-15, TR-17."""
    m, of = opaque_manager(T=2), scope(7, 11)
    turn(m, [1, 2, 3, 4, 5, 6, 9], reuse_scope=of)
    keys = keys_of([1, 2, 3, 4, 5, 6, 9], 2, of)
    assert m.match_block_keys(keys[:3], of) == (3, 6)
    assert probe(m, [1, 2, 3, 4, 5, 6], scope=of) == [6]
    assert m.match_block_keys(keys[:2], of) == (2, 4)
    assert m.match_block_keys(keys[:3], scope(7, 12)) == (0, 0)
    assert m.match_block_keys([keys[0], bytes(32), keys[2]], of) == (1, 2)
    assert m.match_block_keys(keys, of) == (4, 7)
    assert m.match_block_keys([], of) == (0, 0)


# -- the first new block ---------------------------------------------------------------------------


def test_the_first_new_block_is_the_one_that_gets_stored():
    """FN-01."""
    events = k.KVCacheEventManager(100)
    m = k.KVCacheManager(opaque_manager().config, device="host", event_manager=events)
    a = fresh(16)
    key = m.probe_first_new_block_key(input_tokens=a)
    turn(m, a)
    events.flush_iteration_events()
    stored = events.get_latest_events(0)
    assert stored[0].data.blocks[0].block_hash == key.hex()


def test_duplicates_have_one_first_new_block_until_one_is_published():
    """FN-02."""
    m = opaque_manager()
    shared = fresh(12)
    a, b = shared + fresh(4), shared + fresh(4)
    first = [m.probe_first_new_block_key(input_tokens=x) for x in (a, b)]
    assert first == [keys_of(shared)[0]] * 2
    turn(m, a)
    assert m.probe_first_new_block_key(input_tokens=b) == keys_of(b)[3]
    assert probe(m, b) == [12]


def test_prefixes_and_scopes_have_different_first_new_blocks():
    """FN-04, FN-05."""
    m = opaque_manager()
    a, b = list(range(16)), list(range(500, 516))
    keys = [m.probe_first_new_block_key(input_tokens=x) for x in (a, b)]
    keys.append(m.probe_first_new_block_key(scope(salt=1234), a))
    assert len({None, *keys}) == 4


def test_the_first_new_block_is_hashed_from_the_prompt():
    """FN-06."""
    m = opaque_manager()
    a = fresh(16)
    turn(m, a)
    for shared in (0, 1, 3, 4, 5, 7, 8, 11):
        query = a[:shared] + fresh(16 - shared)
        assert probe(m, query) == [shared]
        assert m.probe_first_new_block_key(input_tokens=query) == keys_of(query)[shared // 4]


@pytest.mark.parametrize("backoff", [1, 4, 5, 16])
def test_backoff_uncovers_blocks_that_are_there(backoff):
    """FN-07."""
    m, of = opaque_manager(reuse_match_backoff=backoff), scope(7, 1234)
    a = fresh(16)
    turn(m, a, reuse_scope=of)
    assert probe(m, a, scope=of) == [16 - backoff]
    key = m.probe_first_new_block_key(of, a)
    assert key == keys_of(a, of=of)[(16 - backoff) // 4]
    assert m.match_block_keys(keys_of(a, of=of), of) == (4, 16)


def test_clearing_brings_the_first_new_block_back():
    """FN-08."""
    m = opaque_manager()
    a = fresh(12)
    cold = m.probe_first_new_block_key(input_tokens=a)
    turn(m, a[:8])
    assert m.probe_first_new_block_key(input_tokens=a) == keys_of(a)[2] != cold
    m.clear_reusable_blocks()
    assert m.probe_first_new_block_key(input_tokens=a) == cold
    turn(m, a)
    assert m.probe_first_new_block_key(input_tokens=a) is None
    assert m.probe_first_new_block_key(input_tokens=a[:3]) is None


def test_the_first_new_block_with_digests():
    """FN-09."""
    m, of = opaque_manager(), scope(9, 4567)
    a = fresh(16)
    for place in (3, 9):
        a[place : place + 2] = k.gen_multimodal_cache_key_tokens(2000, bytes([place]) * 32, 2)
    turn(m, a[:8], reuse_scope=of)
    key = m.probe_first_new_block_key(of, a)
    assert key == keys_of(a, of=of)[2]
    assert m.probe_first_new_block_key(input_tokens=a) == keys_of(a)[0] != key


def test_the_first_new_block_of_an_array():
    """FN-10."""
    m = opaque_manager()
    a = np.arange(16, dtype=np.int32)
    for _ in range(2):
        key = m.probe_first_new_block_key(input_tokens=a)
        assert key == m.probe_first_new_block_key(input_tokens=a.tolist())
        turn(m, a[:8])
    assert key == keys_of(a.tolist())[2]
