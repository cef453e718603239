"""How prefix caches failed elsewhere: room, tenants and counting.

Each test names its case and, where the failure is public, whose it was.
"""

from __future__ import annotations

import random

import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import FaultError, Lockstep, check, fail_at
from kvcore.testing.small import small_config
from tests.helpers import opaque_manager, typed_manager
from tests.prefixes import Author, began, fresh, probe, squeeze, stats, turn

# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["take", "record", "wait", "copy"])
def test_a_failure_that_meets_eviction_loses_no_page(what):
    """A18: pages vanished when an allocation failed half-way (ovg-project/kvcached#364)."""
    device = HostDevice(deferred=True)
    m = k.KVCacheManager(small_config(slots=5, enable_partial_commit=True), device=device)
    streams, caches = [device.create_stream() for _ in range(2)], []
    gate, a = Gate(), fresh(18)
    streams[0].wait(gate)  # so that its moments are still to come

    def use():
        for tokens, capacity, stream in zip((a, a[:6]), (18, 16), streams, strict=True):
            kv = m.create_kv_cache(input_tokens=tokens)
            caches.append(kv)
            assert kv.resume(stream)
            assert kv.resize(capacity)
            kv.commit(tokens[kv.num_committed_tokens :])
            kv.close()

    with fail_at(m, what, 10**6) as counted:
        use()
    assert counted.calls > 0
    m.clear_reusable_blocks()
    for step in range(1, counted.calls + 1):
        with fail_at(m, what, step), pytest.raises(FaultError, match=what):
            use()
        check(m)
        m.close_kv_caches(caches)
        check(m)
        assert sum(stats(m)[1:]) == 5
        m.clear_reusable_blocks()
        use()
        m.clear_reusable_blocks()
        assert stats(m) == (5, 5, 0)
    gate.open()


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("steps", [199, 200])
def test_room_taken_a_step_ahead_is_freed_once(T, steps):
    """A19: the look-ahead slot was freed by two paths (sgl-project/sglang#12224)."""
    m = opaque_manager(slots=256, T=T)
    a = fresh(5 + steps)
    kv = began(m, None, 5)
    kv.commit(a[:5])
    for i in range(5, 5 + steps):
        assert m.advance([kv], 1)
        kv.commit(a[i : i + 1])
    assert m.advance([kv], 1)
    kv.close()
    check(m)
    blocks = -(-(5 + steps) // T)
    assert stats(m) == (256, 256 - blocks, blocks)
    m.clear_reusable_blocks()
    assert sorted(m._runtime.control.slots[0].free_slots().tolist()) == list(range(256))


def test_evictable_counts_pages():
    """A20: counted in two units, and a short prompt failed (sgl-project/sglang#10637)."""
    m = opaque_manager(slots=4, enable_partial_commit=False)
    a = fresh(10)
    assert probe(m, a[:3]) == [0]
    turn(m, a)
    assert probe(m, a[:3]) == [3]
    assert stats(m) == (4, 2, 2)
    squeeze(m, 16)
    assert stats(m) == (4, 4, 0)


@pytest.mark.parametrize("split", [31, 32, 33, 40])
def test_a_page_counts_once_whatever_shares_it(split):
    """A21: two nodes referred to one page (sgl-project/sglang#35270)."""
    m = opaque_manager(T=32)
    a = fresh(48)
    turn(m, a)
    check(m)
    kv = began(m, a[:split] + fresh(8), 64)
    assert kv.num_committed_tokens == split
    free, shared = 12 + split // 32, split // 32
    assert stats(m) == (16, free, 2 - shared)
    kv.commit(fresh(48 - split))
    check(m)
    assert stats(m) == (16, free, 2 - shared)
    kv.close()
    check(m)
    assert stats(m) == (16, free, 16 - free)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_order_of_eviction_does_not_depend_on_when_work_is_done(deferred):
    """A25: heads were evicted before tails (vllm-project/vllm#48489)."""
    device = HostDevice(deferred=deferred)
    m = k.KVCacheManager(small_config(slots=6), device=device)
    a, b = fresh(12), fresh(12)
    turn(m, a)
    turn(m, b)
    kv, found = began(m), []
    for tokens in range(4, 28, 4):
        assert kv.resize(tokens)
        found.append(probe(m, a, b))
    assert found == [[8, 12], [4, 12], [0, 12], [0, 8], [0, 4], [0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_many_prefixes_in_few_pages(seed):
    """A26: hits and content of a fuzzer's requests shifted (vllm-project/vllm#37076)."""
    rng = random.Random(seed)
    m = k.KVCacheManager(small_config(slots=8, enable_partial_commit=True), device="host")
    pair = Lockstep(m)
    base = list(range(17))
    prompts = [base[: rng.randint(0, n)] + fresh(17) for n in range(16)]
    prompts = [prompt[: i + 1] for i, prompt in enumerate(prompts)]
    hits = 0
    for _ in range(250):
        prompt = rng.choice(prompts)
        kv = pair.create_with(prompt)
        if kv is None or not (pair.resume(kv) and pair.resize(kv, len(prompt))):
            pair.close(rng.choice(pair.pairs))
            continue
        done = kv.model.num_committed_tokens
        hits += done
        pair.write([kv], [done], [len(prompt) - done], [prompt[done:]])
        pair.commit(kv, prompt[done:])
        pair.look([kv])
        if len(pair.pairs) > 2 or rng.random() < 0.5:
            pair.close(rng.choice(pair.pairs))
    pair.settle()
    assert hits > 200


def test_what_was_closed_last_stays_longest_also_of_a_batch():
    """A25: pages wait for eviction as they were let go of last, not first."""
    m = opaque_manager(slots=4)
    a, b = fresh(4), fresh(4)
    first, between, last = began(m, a), began(m, b), began(m, a)
    for kv, tokens in ((first, a), (between, b), (last, a)):
        kv.commit(tokens)
    m.close_kv_caches([first, between, last])
    check(m)
    squeeze(m, 12)
    assert probe(m, a, b) == [4, 0]


def test_letting_go_below_a_block_that_was_replaced_and_split():
    """A1: what was published under has changed meanwhile; the path to the root counts as used."""
    m = opaque_manager(slots=6)
    a, d = fresh(12), fresh(4)
    c = a[:8] + fresh(4)
    kv = began(m, None, 6)
    kv.commit(a[:6], is_end=True)  # its partial block is replaced, then the run above is split
    for tokens in (a, c, d):
        turn(m, tokens)
    kv.close()
    check(m)
    assert probe(m, a, c, d) == [12, 12, 4]
    squeeze(m, 16)
    check(m)
    assert probe(m, a, c, d) == [4, 4, 4]


def test_pins_that_end_together_end_in_their_order():
    """A25: ranks that make the same calls evict the same pages."""
    m = opaque_manager(slots=8)
    prompts = [fresh(4) for _ in range(8)]
    for prompt in prompts:
        turn(m, prompt)
    pins = [m.pin(prompt, ttl=1, now=0) for prompt in reversed(prompts)]
    m.expire(1)
    assert [pin.is_open for pin in pins] == [False] * 8
    kv, left = began(m), []
    for blocks in range(1, 9):
        assert kv.resize(4 * blocks)
        left.append(sum(probe(m, *prompts)) // 4)
        assert probe(m, *prompts[: 8 - blocks]) == [4] * (8 - blocks)
    assert left == [7, 6, 5, 4, 3, 2, 1, 0]


# -- who may find what -----------------------------------------------------------------------------


def test_tokens_decide_not_hashes(monkeypatch):
    """B1: equal hashes served another tenant's pages (vllm-project/vllm#12621)."""
    monkeypatch.setattr("kvcore.control.keychain.chain_keys", lambda *_: [bytes(32)])
    monkeypatch.setattr("kvcore.control.tree.root_key", lambda *_: bytes(32))
    monkeypatch.setattr("kvcore.control.reuse.root_key", lambda *_: bytes(32))
    m = typed_manager(slots=16, T=4, layers=1)
    author = Author(m)
    author.turn(list(range(8)))
    tenant = k.ReuseScope(salt=2)
    assert probe(m, list(range(100, 108)), [0, 1, 2, 3, 200, 201, 202, 203]) == [0, 4]
    assert probe(m, list(range(8)), scope=tenant) == [0]
    reader = author.began([0, 1, 2, 3, 200, 201, 202, 203])
    author.engine.verify([reader])


def test_an_adapter_that_is_replaced_is_another_one():
    """B4: pages of the old adapter were found (vllm-project/vllm#30931)."""
    m = opaque_manager()
    a = fresh(8)
    old, other = k.ReuseScope(lora_id=1), k.ReuseScope(lora_id=2)
    m.set_weights_epoch(1, lora_id=1)
    turn(m, a, reuse_scope=old)
    assert (probe(m, a, scope=old), probe(m, a, scope=other)) == ([8], [0])
    m.set_weights_epoch(1, lora_id=1)
    assert probe(m, a, scope=old) == [8]
    m.set_weights_epoch(2, lora_id=1)
    assert (probe(m, a, scope=old), m.weights_epoch(1)) == ([0], 2)
    turn(m, a, reuse_scope=old)
    m.set_weights_epoch(5, lora_id=2)
    assert probe(m, a, scope=old) == [8]


def test_new_weights_are_a_new_cache():
    """B12: pages of the old weights were found (InternLM/lmdeploy#4917)."""
    m = typed_manager(slots=8, T=4, layers=1)
    author = Author(m)
    a = fresh(8)
    author.turn(a)
    live = author.began(a[:6], 12)
    m.set_weights_epoch(1)
    assert probe(m, a) == [0]
    author.computes(live, fresh(4))
    author.engine.verify([live])
    assert author.turn(a) == 0
    assert author.turn(a) == 8
    author.engine.verify([live])
    author.engine.close(live)
    check(m)
    assert probe(m, a) == [8]


def test_salts_are_applied():
    """B10: five salts found one another's pages (kvcache-ai/ktransformers#2184)."""
    m = opaque_manager()
    a = fresh(8)
    scopes = [k.ReuseScope(salt=salt) for salt in range(5)]
    assert [turn(m, a, reuse_scope=scope) for scope in scopes] == [0] * 5
    assert [turn(m, a, reuse_scope=scope) for scope in scopes] == [8] * 5


# -- counting --------------------------------------------------------------------------------------


def test_a_hit_is_counted_once():
    """G7: counted at each look-up (vllm-project/vllm#43736)."""
    m = opaque_manager(slots=4)
    a = fresh(8)
    turn(m, a[:4])
    blocker = began(m, None, 12)
    before = m.get_committed_stats()
    for _ in range(3):
        probe(m, a)
        with m.create_kv_cache(input_tokens=a[:3]) as kv:
            assert kv.resume() is False
    blocker.close()
    kv = began(m, a)
    kv.suspend()
    assert kv.resume()
    after = m.get_committed_stats()
    assert after.requests - before.requests == 1
    assert after.queried_tokens - before.queried_tokens == 8
    assert after.hit_tokens - before.hit_tokens == 4


def test_reuse_is_subtracted_from_the_budget_once():
    """G10: chunks shifted by what was reused (NVIDIA/TensorRT-LLM#12665)."""
    m = opaque_manager()
    a = fresh(20)
    turn(m, a[:8])
    kv = m.create_kv_cache(input_tokens=a)
    assert kv.resume()
    chunks = []
    while kv.num_committed_tokens < len(a):
        start = kv.num_committed_tokens
        end = min(start + 6, len(a))
        assert kv.resize(end)
        kv.commit(a[start:end])
        chunks.append((start, end))
    assert chunks == [(8, 14), (14, 20)]
