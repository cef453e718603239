"""Why a prompt was not found."""

from __future__ import annotations

import kvcore as k
from tests.helpers import opaque_manager
from tests.test_retention import fresh, seed, squeeze


def test_every_miss_has_a_reason():
    m = opaque_manager(slots=4)
    a, b = fresh(12), fresh(8)
    why = lambda tokens, **scope: m.explain(tokens, **scope)  # noqa: E731
    assert why(a).reason is k.MissReason.NEVER_SEEN
    seed(m, a)
    found = why(a)
    assert (found.num_tokens, found.reason) == (12, None)
    assert why(a[:6] + b).reason is k.MissReason.NEVER_SEEN
    assert why(a, reuse_scope=k.ReuseScope(salt=1)).reason is k.MissReason.OTHER_SALT
    assert why(a, reuse_scope=k.ReuseScope(lora_id=1)).reason is k.MissReason.OTHER_LORA
    squeeze(m, 2)
    found = why(a)
    assert (found.num_tokens, found.reason, found.evictions_ago) == (8, k.MissReason.EVICTED, 0)
    with m.pin(a[:4]):
        squeeze(m, 3)
        assert why(a).reason is k.MissReason.PINNED_ELSEWHERE
    m.set_weights_epoch(1)
    assert why(a).reason is k.MissReason.OTHER_EPOCH


def test_settings_are_reasons_too():
    m = opaque_manager(enable_partial_reuse=False)
    a = fresh(8)
    seed(m, a)
    found = m.explain(a[:6] + fresh(2))
    assert (found.num_tokens, found.reason) == (4, k.MissReason.PARTIAL_NOT_ALLOWED)
    m = opaque_manager(reuse_match_backoff=2)
    seed(m, a)
    assert m.explain(a).reason is k.MissReason.BACKOFF


def test_what_is_remembered_is_bounded(monkeypatch):
    from kvcore.control import ghosts

    monkeypatch.setattr(ghosts, "MOST", 8)
    m = opaque_manager(slots=2)
    prompts = [fresh(4) for _ in range(40)]
    for prompt in prompts:
        seed(m, prompt)
    memory = m._runtime.control.reuse.tree.ghosts
    assert len(memory._new) + len(memory._old) <= 16
    assert m.explain(prompts[0]).reason is k.MissReason.NEVER_SEEN
    assert m.explain(prompts[-4]).reason is k.MissReason.EVICTED
