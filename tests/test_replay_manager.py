"""Replay on the real manager: against the slow model call by call, and counts that are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvcore as k
from bench.replay import find_trace
from kvcore.replay.policies import POLICIES
from kvcore.replay.report import Result, Settings
from kvcore.replay.simulate import replay
from kvcore.replay.trace import BLOCK, Trace, read_trace
from tests.replay_model import ModelManager, ModelSequence
from tests.test_replay import trace_of


class Both:
    """A manager and its model, which have to answer every call alike."""

    def __init__(self, config: k.KVCacheManagerConfig, device: str) -> None:
        self.real, self.model = k.KVCacheManager(config, device=device), ModelManager(config)
        self.hits: list[int] = []
        self.refused = 0

    def create_kv_cache(self, **given: Any) -> Pair:
        pair = Pair(self, *(m.create_kv_cache(**given) for m in (self.real, self.model)))
        assert pair.num_committed_tokens == pair.model.num_committed_tokens, len(self.hits)
        self.hits.append(pair.num_committed_tokens)
        self.get_storage_statistics()
        return pair

    def advance(self, pairs: list[Pair], n: int) -> bool:
        done = self.real.advance([pair.real for pair in pairs], n)
        return self.same(done, self.model.advance([pair.model for pair in pairs], n))

    def get_storage_statistics(self, level: int = 0) -> list[k.StorageStatistics]:
        found = self.real.get_storage_statistics(level)
        real, model = found[0], self.model.get_storage_statistics()[0]
        assert (real.total, real.free, real.evictable) == (model.total, model.free, model.evictable)
        return found

    def get_and_reset_iteration_stats(self) -> tuple[k.KVCacheIterationStats, ...]:
        found = self.real.get_and_reset_iteration_stats()
        assert found[0].host_dropped_blocks == self.model.evicted
        return found

    def same(self, real: bool, model: bool) -> bool:
        assert real is model
        self.refused += not real
        return real


class Pair:
    """A sequence of both."""

    def __init__(self, both: Both, real: k.KVCache, model: ModelSequence) -> None:
        self.both, self.real, self.model = both, real, model
        self.num_committed_tokens = real.num_committed_tokens

    def resume(self) -> bool:
        return self.both.same(self.real.resume(), self.model.resume())

    def resize(self, capacity: int) -> bool:
        return self.both.same(self.real.resize(capacity), self.model.resize(capacity))

    def commit(self, tokens: Any, is_end: bool = False) -> None:
        self.real.commit(tokens, is_end)
        self.model.commit(tokens, is_end)

    def close(self) -> None:
        self.real.close()
        self.model.close()


def compared(trace: Trace, **settings: Any) -> tuple[Result, Both]:
    made = []

    @contextmanager
    def open_both(config: k.KVCacheManagerConfig, device: str) -> Iterator[Both]:
        made.append(Both(config, device))
        with made[0].real:
            yield made[0]

    return replay(trace, Settings(**settings), open_manager=open_both), made[0]


def chats(seed: int, requests: int) -> Trace:
    """Conversations of several turns below a few system prompts, some of them asked twice."""
    rng = np.random.default_rng(seed)
    fresh, open_chats, found = iter(range(100, 10**6)), [], []
    for _ in range(requests):
        if open_chats and rng.random() < 0.6:
            ids = open_chats[rng.integers(len(open_chats))]
        else:
            ids = [int(rng.integers(3))]
            open_chats.append(ids)
        if rng.random() < 0.8:
            ids += [next(fresh) for _ in range(rng.integers(1, 4))]
        length = (len(ids) - 1) * BLOCK + int(rng.integers(1, BLOCK + 1))
        found.append((len(found), length, int(rng.integers(1, 400)), list(ids)))
    return trace_of(*found)


@pytest.mark.parametrize("policy", [policy.name for policy in POLICIES])
@pytest.mark.parametrize("seed", range(3))
def test_the_manager_decides_as_the_model_does(seed, policy):
    settings = {"tokens_per_block": 64, "capacity_tokens": 16_000, "max_running": 8}
    result, both = compared(chats(seed, 150), policy=policy, **settings)
    if policy != "none":
        assert result.evicted_pages > 500
        assert result.hit_tokens > 50_000
    assert both.refused > 2


def needs_trace(name: str) -> Trace:
    path = find_trace(name)
    if path is None:
        pytest.skip("needs the Mooncake traces (KVCORE_TRACES=FOLDER)")
    return read_trace(path)


@pytest.mark.parametrize(("size", "capacity"), [(512, 3_000_000), (512, 300_000), (128, 300_000)])
def test_real_traffic_in_little_room_is_served_as_by_the_model(size, capacity):
    trace = needs_trace("conversation").head(500)
    result, both = compared(trace, tokens_per_block=size, capacity_tokens=capacity, max_running=64)
    assert result.evicted_pages > 5_000
    assert len(both.hits) >= 500
    assert result.hit_tokens > 255_000


@pytest.mark.parametrize(
    ("name", "found", "blocks"),
    [("conversation", 105_710, 288_500), ("synthetic", 77_953, 121_877)],
)
def test_full_blocks_give_the_known_counts(name, found, blocks):
    result = replay(needs_trace(name), Settings(tokens_per_block=512, full_blocks=True))
    assert (result.hit_blocks, result.blocks) == (found, blocks)


@pytest.mark.parametrize("size", [16, 48, 512])
def test_with_room_for_all_the_longest_known_prefix_is_found_to_the_token(size):
    trace = chats(9, 120)
    _, both = compared(trace, tokens_per_block=size, max_running=1)
    known: list[np.ndarray] = []
    for number, hit in enumerate(both.hits):
        prompt = trace.prompt(number)
        assert hit == max((shared(prompt[:-1], one) for one in known), default=0), number
        known.append(np.concatenate((prompt, trace.output(number))))
    assert sum(hit % size > 0 for hit in both.hits) > 30


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with in common."""
    n = min(a.size, b.size)
    return int(np.append(a[:n] != b[:n], True).argmax())
