"""Publishing: worked out first, then done with nothing left that can fail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.control.node import TOKEN_BYTES
from kvcore.control.reuse import Claim, PrefixReuse
from kvcore.control.slots import PUBLISHED
from kvcore.control.tree import Found
from kvcore.errors import StateError
from kvcore.ids import Ticket

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]


@dataclass(slots=True)
class CommitPlan:
    """What a commit will do. Nothing has changed yet."""

    sequence: int
    claim: Claim
    tokens: int
    """Tokens that are committed."""

    body: memoryview
    """The image of the blocks they complete."""

    tail: bytes
    """The image of what follows."""

    own: Int32
    """The sequence's pages of these blocks, `[layer groups, n]`."""

    found: Found
    asked: UInt8 | None
    publishes_tail: bool
    asked_for_tail: UInt8 | None

    @property
    def tail_block(self) -> int:
        """The ordinal of the block that holds the tail."""
        return self.claim.blocks + int(self.own.shape[1])

    @property
    def publishes(self) -> bool:
        """Whether anything is published or taken from the tree."""
        return self.publishes_tail or bool(self.own.shape[1])


def plan_commit(
    reuse: PrefixReuse, sequence: int, tokens: memoryview, *, with_tail: bool
) -> CommitPlan:
    """Works out the commit of `tokens`; `with_tail` also of a block that they do not fill.

    Asks the caller's callback for priorities: its errors come through.
    """
    claim, step = reuse.claims[sequence], reuse.tree.block_bytes
    image = memoryview(claim.tail + tokens) if claim.tail else tokens
    count = 0 if reuse.is_lost(claim) else len(image) // step
    body, tail = image[: count * step], bytes(image[len(image) // step * step :])
    root_or_node = claim.node or reuse.root(claim.scope)
    found = reuse.tree.find(root_or_node, claim.blocks, body, count)
    new_tail = with_tail and reuse.rules.partial_commit and bool(tail)
    new_tail = new_tail and not (claim.stopped or claim.borrowed or reuse.is_lost(claim))
    if new_tail and found.known == count:
        new_tail = not reuse.tree.covers(found, tail)
    own = reuse.own_pages(sequence, claim.blocks, count)
    _refuse_published(reuse, own[:, found.known :])
    first_new = claim.blocks + found.known
    return CommitPlan(
        sequence=sequence,
        claim=claim,
        tokens=len(tokens) // TOKEN_BYTES,
        body=body,
        tail=tail,
        own=own,
        found=found,
        asked=reuse.asked(claim, first_new, count - found.known) if count > found.known else None,
        publishes_tail=new_tail,
        asked_for_tail=reuse.asked(claim, claim.blocks + count, 1) if new_tail else None,
    )


def _refuse_published(reuse: PrefixReuse, new: Int32) -> None:
    """A page has one place in the tree: forks that share it must agree on its tokens."""
    for slots, pages in zip(reuse.slots_of, new, strict=True):
        if np.count_nonzero(slots.in_tree[pages] == PUBLISHED):
            raise StateError(
                "commit: a page of these blocks is published already, with other tokens, by a "
                "cache this one was forked from or to; their tokens must be equal there"
            )


def publish(reuse: PrefixReuse, plan: CommitPlan, ready: Ticket, copy: Int32 | None) -> None:
    """Does what was planned. Cannot fail.

    The tail's page is the sequence's own, which must not be written any more, or a `copy`
    `[layer groups, 1]`. `ready` is the moment after which pages may be read, and after which the
    sequence's own pages that the tree has already are no longer used.
    """
    claim, known, step = plan.claim, plan.found.known, reuse.tree.block_bytes
    count = plan.own.shape[1]
    if plan.publishes:
        node = plan.found.node or reuse.tree.root(claim.scope, claim.epochs)
        inside = plan.found.inside
        if known < count:
            new, at = plan.own[:, known:], claim.blocks + known
            reuse.prioritise_new(claim, at, new, plan.asked)
            node = reuse.tree.insert(node, inside, at, plan.body[known * step :], new, ready)
            reuse.tell_kin(plan.sequence, node, at, new)
            inside = claim.blocks + count - node.start
        if known:
            reuse.prioritise_known(claim, claim.blocks, plan.found.pages)
            reuse.adopt(plan.sequence, np.hstack([plan.found.pages, plan.own[:, known:]]), ready)
        if inside == node.size:
            reuse.tree.queue.leave(node)  # the sequence holds its last block
        if count:
            claim.node = node
    claim.blocks += 0 if reuse.is_lost(claim) else count
    claim.tail = plan.tail
    claim.committed += plan.tokens
    if plan.publishes_tail:
        _publish_tail(reuse, plan, ready, copy)


def _publish_tail(reuse: PrefixReuse, plan: CommitPlan, ready: Ticket, copy: Int32 | None) -> None:
    claim = plan.claim
    page = reuse.own_pages(plan.sequence, claim.blocks, 1) if copy is None else copy
    reuse.prioritise_new(claim, claim.blocks, page, plan.asked_for_tail)
    found = reuse.tree.find(
        claim.node or reuse.tree.root(claim.scope, claim.epochs), claim.blocks, plan.body[:0], 0
    )
    node = found.node or reuse.tree.root(claim.scope, claim.epochs)
    tail = memoryview(plan.tail)
    child = reuse.tree.insert(node, found.inside, claim.blocks, tail, page, ready)
    if copy is None:
        claim.node, claim.blocks = child, claim.blocks + 1
        return
    for slots, taken in zip(reuse.slots_of, copy, strict=True):
        slots.release(taken, ready, distinct=True)
    reuse.tree.let_go(child, claim.blocks + 1)
