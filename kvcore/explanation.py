"""Why a prefix was not found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvcore.config import ReuseScope
from kvcore.control.node import Node, Root
from kvcore.control.reuse import PrefixReuse
from kvcore.control.tree import Match, above


class MissReason(Enum):
    """What ends a match."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    PINNED_ELSEWHERE = "pinned elsewhere"
    """Evicted while pins kept other pages from going."""

    OTHER_SALT = "other salt"
    OTHER_LORA = "other LoRA id"
    OTHER_EPOCH = "other weights epoch"
    PARTIAL_NOT_ALLOWED = "partial block not allowed"
    BACKOFF = "reuse_match_backoff"
    MISSING = "window or state missing"
    """For windowed and recurrent layer groups."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a match ends, and why.

    Attributes
    ----------
    num_tokens : int
        Tokens that are reused: the first one that is not has this position.
    reason : MissReason or None
        None if all of them are.
    detail : str
        The same for people.
    evictions_ago : int or None
        Evicted runs since, for a block that was evicted.
    """

    num_tokens: int
    reason: MissReason | None
    detail: str
    evictions_ago: int | None = None


def explain(reuse: PrefixReuse, scope: ReuseScope, tokens: memoryview) -> Explanation:
    """Where the match of a token image ends, and the likeliest reason. Changes nothing."""
    match, length = reuse.look_up(scope, tokens)
    raw = match.blocks * reuse.tokens_per_block + match.tail
    total = len(tokens) // 4
    if length == total:
        return Explanation(length, None, "every token is found")
    if raw > length:
        text = f"{raw} tokens are there; reuse_match_backoff={reuse.rules.backoff} leaves the last"
        return Explanation(length, MissReason.BACKOFF, text)
    loose = reuse.tree.match(reuse.root(scope), tokens, True)
    if loose.blocks * reuse.tokens_per_block + loose.tail > raw:
        text = f"{loose.tail} tokens of the next block are there, but enable_partial_reuse is off"
        return Explanation(length, MissReason.PARTIAL_NOT_ALLOWED, text)
    found = _evicted(reuse, scope, match, length, tokens)
    found = found or _elsewhere(reuse, scope, length, tokens)
    text = f"nothing was published that goes on like this at token {length}"
    return found or Explanation(length, MissReason.NEVER_SEEN, text)


def _evicted(
    reuse: PrefixReuse, scope: ReuseScope, match: Match, length: int, tokens: memoryview
) -> Explanation | None:
    step = reuse.tree.block_bytes
    at: Node | None = reuse.root(scope)
    if at is None:
        at = Root(scope, reuse.epochs(scope), 1, b"")
    elif match.path and match.blocks:
        at = above(match.path[-1], match.blocks)
    block = bytes(tokens[match.blocks * step : (match.blocks + 1) * step])
    found = reuse.tree.ghosts.ask(at, match.blocks, block, reuse.rules.partial_reuse)
    if found is None:
        return None
    ago, pressure = found
    text = f"evicted {ago} runs ago: {pressure.call} needed {pressure.needed} pages"
    if pressure.pinned:
        text += f" while {pressure.pinned} were pinned"
        return Explanation(length, MissReason.PINNED_ELSEWHERE, text, ago)
    return Explanation(length, MissReason.EVICTED, text, ago)


def _elsewhere(
    reuse: PrefixReuse, scope: ReuseScope, length: int, tokens: memoryview
) -> Explanation | None:
    """Another scope that has more of the prefix, the most of all; O(scopes)."""
    best, most = None, length
    for root in [*reuse.tree.roots.values(), *reuse.tree.stale]:
        found = reuse.tree.match(root, tokens, True)
        tokens_there = found.blocks * reuse.tokens_per_block + found.tail
        if tokens_there > most:
            best, most = root, tokens_there
    if best is None:
        return None
    if best.scope == scope:
        reason = MissReason.OTHER_EPOCH
    elif best.scope.lora_id != scope.lora_id:
        reason = MissReason.OTHER_LORA
    else:
        reason = MissReason.OTHER_SALT
    return Explanation(
        length, reason, f"{most} tokens are there under another scope ({reason.value})"
    )
