"""What tests of prefix reuse have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import kvcore as k
from kvcore.control.slots import PUBLISHED
from kvcore.testing import FakeEngine

_ids = itertools.count(1_000)


def fresh(n: int) -> list[int]:
    """Token ids never used before."""
    return [next(_ids) for _ in range(n)]


def stats(m: k.KVCacheManager) -> tuple[int, int, int]:
    """(total, free, evictable) of the only pool group."""
    (s,) = m.get_storage_statistics(0)
    assert (s.available, s.unavailable) == (s.free + s.evictable, s.total - s.available)
    return s.total, s.free, s.evictable


def probe(m: k.KVCacheManager, *prompts: Sequence[int], scope: Any = None) -> list[int]:
    """What each prompt would find."""
    return [m.probe_reuse(scope, prompt) for prompt in prompts]


def began(m: k.KVCacheManager, prompt: Any = None, capacity: int = 0, **how: Any) -> k.KVCache:
    """An active sequence with room for its prompt."""
    kv = m.create_kv_cache(input_tokens=prompt, **how)
    assert kv.resume()
    assert kv.resize(max(capacity, kv.capacity, 0 if prompt is None else len(prompt)))
    return kv


def turn(m: k.KVCacheManager, tokens: Any, **how: Any) -> int:
    """Computes and publishes `tokens`, then leaves; how many were found."""
    kv = began(m, tokens, **how)
    found = kv.num_committed_tokens
    kv.commit(tokens[found:])
    kv.close()
    return found


def squeeze(m: k.KVCacheManager, tokens: int) -> None:
    """Takes room for so many tokens, and gives it back with nothing published."""
    began(m, None, tokens).close()


def published(m: k.KVCacheManager, slot: int) -> bool:
    """Whether the page in a slot can be found."""
    return m._runtime.control.slots[0].in_tree[slot] == PUBLISHED


class Author:
    """Sequences that compute what they commit, so that every reader of a page can be checked."""

    def __init__(self, m: k.KVCacheManager) -> None:
        self.m, self.engine = m, FakeEngine(m)

    def began(self, prompt: Sequence[int] = (), capacity: int = 0, **how: Any) -> k.KVCache:
        """As `began`."""
        kv = self.engine.create_kv_cache(None, prompt, **how)
        assert kv.resume()
        assert self.engine.resize(kv, max(capacity, kv.capacity, len(prompt)))
        return kv

    def computes(self, kv: k.KVCache, tokens: Iterable[int], commit: bool = True) -> None:
        """Writes what follows the committed tokens, and commits it."""
        tokens = list(tokens)
        if tokens:
            at = kv.num_committed_tokens
            self.engine.write([kv], len(tokens), start=at, tokens=[tokens])
        if commit:
            kv.commit(tokens)

    def turn(self, tokens: Sequence[int], close: bool = True, **how: Any) -> int:
        """As `turn`, reading everything in the end."""
        kv = self.began(tokens, **how)
        found = kv.num_committed_tokens
        self.computes(kv, tokens[found:])
        self.engine.verify([kv])
        if close:
            self.engine.close(kv)
        return found
