"""How far each sequence is published, and what it shares with others through the prefix tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_int
from kvcore.config import ReuseScope
from kvcore.control.deadlines import Deadlines
from kvcore.control.ghosts import Pressure
from kvcore.control.node import TOKEN_BYTES, Node, Root
from kvcore.control.sequences import SequenceTable
from kvcore.control.slots import SlotTable
from kvcore.control.tree import Epochs, Match, PrefixTree, above
from kvcore.ids import Ticket, div_ceil
from kvcore.keys import next_key, root_key
from kvcore.retention import DEFAULT_PRIORITY, HIGHEST_PRIORITY, Retention

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

CALLBACK = "custom_priority_callback(ordinal, layer_group)"

PriorityOf = Callable[[int, Any], int]
"""The priority of a block, from its ordinal and its layer group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRules:
    """The settings of a manager that matter here."""

    partial_reuse: bool = True
    partial_commit: bool = True
    min_snapshot: bool = False
    backoff: int = 0


@dataclass(slots=True)
class Claim:
    """One sequence's place in the tree.

    Its first `blocks` blocks are the path that ends in `node`. `tail` is the image of the committed
    tokens after its last full block there.
    """

    scope: ReuseScope
    epochs: Epochs
    node: Node | None = None
    blocks: int = 0
    tail: bytes = b""
    committed: int = 0
    stopped: bool = False
    borrowed: bool = False
    """Whether the last block of the path is partly matched and not copied yet."""

    retention: tuple[Retention, ...] = ()
    priority_of: PriorityOf | None = None
    now: float | None = None


class PrefixReuse:
    """The prefix tree and the claims of all sequences on it.

    Parameters
    ----------
    seqs : SequenceTable
    slots_of : list of SlotTable
        By layer group.
    rules : ReuseRules
    """

    def __init__(self, seqs: SequenceTable, slots_of: list[SlotTable], rules: ReuseRules) -> None:
        self.seqs, self.slots_of, self.rules = seqs, slots_of, rules
        self.tokens_per_block = seqs.shape.tokens_per_block
        self.tree = PrefixTree(slots_of, self.tokens_per_block)
        self.claims: dict[int, Claim] = {}
        self.deadlines = Deadlines(slots_of)
        self.layer_groups: tuple[Any, ...] = tuple(range(len(slots_of)))
        self.pinned = 0  # pages, counted once per pin
        self._base_epoch: int | None = None
        self._lora_epochs: dict[int, int] = {}
        for slots in slots_of:
            slots.priority[:] = DEFAULT_PRIORITY
        self._pressure = Pressure("", 0, 0)  # the last one: mostly the next one too
        self._plain = True  # no page has another priority

    # -- scopes ------------------------------------------------------------------------------------

    def epoch(self, lora_id: int | None) -> int | None:
        """The epoch of the base weights, or of a LoRA id's."""
        return self._base_epoch if lora_id is None else self._lora_epochs.get(lora_id)

    def epochs(self, scope: ReuseScope) -> Epochs:
        """The epochs that keys of a scope contain."""
        lora = scope.lora_id
        return self._base_epoch, None if lora is None else self._lora_epochs.get(lora)

    def set_epoch(self, epoch: int, lora_id: int | None) -> None:
        """Puts everything computed with other weights out of reach."""
        if self.epoch(lora_id) == epoch:
            return
        if lora_id is None:
            self._base_epoch = epoch
        else:
            self._lora_epochs[lora_id] = epoch
        self.tree.make_stale(lambda root: root.epochs != self.epochs(root.scope))

    def root(self, scope: ReuseScope) -> Root | None:
        """The root of a scope, if anything was published under it."""
        return self.tree.roots.get((scope, self.epochs(scope)))

    # -- questions ---------------------------------------------------------------------------------

    def look_up(self, scope: ReuseScope, tokens: memoryview) -> tuple[Match, int]:
        """The longest match, and how many tokens of it may be reused. Changes nothing."""
        match = self.tree.match(self.root(scope), tokens, self.rules.partial_reuse)
        length = match.blocks * self.tokens_per_block + match.tail
        return match, max(0, length - self.rules.backoff)

    def first_new_key(self, scope: ReuseScope, tokens: memoryview) -> bytes | None:
        """The key of the first block that is not reused, if `tokens` fill it."""
        match, length = self.look_up(scope, tokens)
        step = self.tree.block_bytes
        block = length // self.tokens_per_block
        wanted = tokens[block * step : (block + 1) * step]
        if len(wanted) < step:
            return None
        if not block:
            return next_key(root_key(scope, *self.epochs(scope)), wanted)
        node = above(match.path[-1], block)
        return next_key(self.tree.keys.key(node, block - 1 - node.start), wanted)

    # -- claims ------------------------------------------------------------------------------------

    def claim(self, sequence: int, claim: Claim, match: Match, length: int) -> None:
        """Gives an empty sequence the first `length` matched tokens: holds their pages."""
        self.claims[sequence] = claim
        if not length:
            return
        seqs, size = self.seqs, self.tokens_per_block
        count, tail = div_ceil(length, size), length % size
        pages = self.tree.hold(match, count)
        claim.node, claim.blocks = above(match.path[-1], count), count
        claim.committed, claim.borrowed = length, bool(tail)
        if tail:
            offset = (count - 1 - claim.node.start) * self.tree.block_bytes
            claim.tail = bytes(claim.node.tokens[offset : offset + tail * TOKEN_BYTES])
        if claim.retention or claim.priority_of:
            self._prioritise(claim, 0, pages, known=True)
        seqs.capacity[sequence] = seqs.history[sequence] = length
        seqs.num_blocks[sequence] = count
        seqs.limit[sequence] = seqs.limit_of(count)
        seqs.parked[sequence] = pages[None]

    def let_go(self, sequence: int) -> None:
        """Forgets a sequence whose pages were released."""
        claim = self.claims.pop(sequence, None)
        if claim is not None and claim.node is not None:
            self.tree.let_go(claim.node, claim.blocks)

    def return_loan(self, sequence: int) -> bool:
        """The last matched block was copied, and the shared page of it released.

        False if that page has left the tree meanwhile.
        """
        claim = self.claims[sequence]
        offered = claim.node is not None and claim.node.alive and not claim.node.root.stale
        claim.borrowed = False
        claim.blocks -= 1
        if claim.node is not None:
            self.tree.let_go(claim.node, claim.blocks + 1)
            claim.node = above(claim.node, claim.blocks) if claim.blocks else None
        return offered

    def is_lost(self, claim: Claim) -> bool:
        """Whether the weights have changed since the sequence began: it publishes nothing more."""
        return claim.epochs != self.epochs(claim.scope)

    # -- publishing --------------------------------------------------------------------------------

    def new_blocks(self, claim: Claim, tokens: int) -> int:
        """Full blocks that committing so many more tokens completes."""
        return (len(claim.tail) // TOKEN_BYTES + tokens) // self.tokens_per_block

    def rows_agree(self, sequence: int, first: int, count: int) -> bool:
        """Whether all beams have the same pages in some blocks."""
        rows = self.seqs.page_rows(sequence)[:, :, first : first + count]
        return len(rows) == 1 or bool((rows == rows[0]).all())

    def insert(self, sequence: int, tokens: memoryview, ready: Ticket) -> Int32:
        """Commits `tokens`: publishes every block they complete.

        Returns
        -------
        int32 array [layer groups, n]
            The tree's pages of the new full blocks, which start at the claim's `blocks`. Where they
            are not the sequence's own, `adopt` has to follow.
        """
        claim = self.claims[sequence]
        image = tokens if not claim.tail else memoryview(claim.tail + tokens)
        count = len(image) // self.tree.block_bytes
        if not count or self.is_lost(claim):
            return np.empty((len(self.slots_of), 0), np.int32)
        node = claim.node or self.tree.root(claim.scope, claim.epochs)
        own = self._own(sequence, claim.blocks, count)
        self._prioritise(claim, claim.blocks, own)
        body = image[: count * self.tree.block_bytes]
        claim.node, pages, known = self.tree.insert(node, claim.blocks, body, own, ready)
        if known and claim.retention:
            self._prioritise(claim, claim.blocks, pages[:, :known], known=True)
        return pages

    def advance(self, sequence: int, tokens: memoryview) -> None:
        """Notes that `tokens` are committed."""
        claim = self.claims[sequence]
        image = claim.tail + tokens
        claim.committed += len(tokens) // TOKEN_BYTES
        count = len(image) // self.tree.block_bytes
        claim.tail = image[count * self.tree.block_bytes :]
        if not self.is_lost(claim):
            claim.blocks += count

    def adopt(self, sequence: int, pages: Int32, ticket: Ticket) -> None:
        """Lets a sequence use the tree's `pages` from the claim's `blocks` on, and frees its own.

        `ticket` is the moment after which its own are no longer used.
        """
        seqs, first = self.seqs, self.claims[sequence].blocks
        width, own = int(seqs.width[sequence]), self._own(sequence, first, pages.shape[1])
        rows = seqs.rows[sequence, :width]
        for group, slots in enumerate(self.slots_of):
            where = np.flatnonzero(own[group] != pages[group])
            if not where.size:
                continue
            slots.hold_published(pages[group, where], width)
            slots.release_each(own[group, where], ticket, width)
            seqs.table[rows[:, None], group, first + where] = pages[group, where]
            flat = rows[:, None] * seqs.row_stride + group * seqs.shape.max_blocks + first + where
            seqs.mark(flat.reshape(-1), ticket)
        seqs.touch(sequence)

    def insert_tail(self, sequence: int, ready: Ticket, copy: Int32 | None = None) -> bool:
        """Publishes the partial last block, its own page or a `copy` of it `[layer groups, 1]`.

        False if a known block covers it.
        """
        claim = self.claims[sequence]
        node = claim.node or self.tree.root(claim.scope, claim.epochs)
        page = self._own(sequence, claim.blocks, 1) if copy is None else copy
        self._prioritise(claim, claim.blocks, page)
        child = self.tree.insert_partial(node, claim.blocks, claim.tail, page, ready)
        if child is None:
            return False
        if copy is None:
            claim.node, claim.blocks = child, claim.blocks + 1
        else:
            for slots, taken in zip(self.slots_of, copy, strict=True):
                slots.release(taken, ready, distinct=True)
            self.tree.let_go(child, claim.blocks + 1)
        return True

    def tail_is_new(self, sequence: int) -> bool:
        """Whether a partial last block is there to be published, and no known block covers it."""
        claim = self.claims[sequence]
        if not claim.tail or claim.stopped or claim.borrowed or self.is_lost(claim):
            return False
        node: Node | None = claim.node or self.root(claim.scope)
        if node is None:
            return True
        node = above(node, claim.blocks)
        inside = claim.blocks - node.start
        if inside < node.size:
            return not node.tokens.startswith(claim.tail, inside * self.tree.block_bytes)
        return not node.covering(claim.tail)

    def _own(self, sequence: int, first: int, count: int) -> Int32:
        row: Int32 = self.seqs.page_rows(sequence)[0, :, first : first + count]
        return row

    # -- retention ---------------------------------------------------------------------------------

    def _prioritise(self, claim: Claim, first: int, pages: Int32, known: bool = False) -> None:
        """Gives pages the priority their publisher asked for; `known` ones only where it did."""
        if not claim.retention and claim.priority_of is None:
            if not self._plain and not known:
                self._set(pages, np.full(pages.shape, DEFAULT_PRIORITY, np.uint8))
            return
        self._plain = False
        count = pages.shape[1]
        starts = np.arange(first, first + count) * self.tokens_per_block
        if not known:
            self._set(pages, self._asked(claim, first, pages.shape))
            self.deadlines.remove(pages)
        for entry in claim.retention:
            end = starts[-1] + 1 if entry.end is None else entry.end
            chosen = pages[:, (starts >= entry.start) & (starts < end)]
            if known:
                self._set(chosen, np.full(chosen.shape, entry.priority, np.uint8))
            if entry.ttl is not None and claim.now is not None:
                self.deadlines.add(claim.now + entry.ttl, chosen)
            else:
                self.deadlines.remove(chosen)

    def _asked(self, claim: Claim, first: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        asked = np.full(shape, DEFAULT_PRIORITY, np.uint8)
        if claim.priority_of is not None:
            for group in range(shape[0]):
                for i in range(shape[1]):
                    priority = claim.priority_of(first + i, self.layer_groups[group])
                    asked[group, i] = as_int(CALLBACK, priority, 0, HIGHEST_PRIORITY)
        starts = np.arange(first, first + shape[1]) * self.tokens_per_block
        for entry in claim.retention:
            end = starts[-1] + 1 if entry.end is None else entry.end
            asked[:, (starts >= entry.start) & (starts < end)] = entry.priority
        return asked

    def _set(self, pages: Int32, priorities: NDArray[np.uint8]) -> None:
        for slots, chosen, values in zip(self.slots_of, pages, priorities, strict=True):
            slots.priority[chosen] = values

    def expire(self, now: float) -> None:
        """Gives pages whose time has come the default priority."""
        changed = self.deadlines.passed(now)
        if not changed.size:
            return
        self.slots_of[0].priority[changed] = DEFAULT_PRIORITY
        tails = set(changed.tolist())
        for node in self.tree.queue.waiting():
            if node.slots.item(0, node.size - 1) in tails:
                self.tree.queue.requeue(node)

    # -- room --------------------------------------------------------------------------------------

    def make_room(self, blocks: int, call: str) -> int:
        """Evicts up to `blocks` blocks; how many it were."""
        pressure = self._pressure
        if pressure.needed != blocks or pressure.call != call or pressure.pinned != self.pinned:
            pressure = self._pressure = Pressure(call, blocks, self.pinned)
        return self.tree.evict(blocks, pressure)

    def pin(self, match: Match, length: int) -> tuple[Node, int, Int32]:
        """Holds the pages of a match: its node, its blocks, its pages."""
        count = div_ceil(length, self.tokens_per_block)
        pages = self.tree.hold(match, count)
        self.pinned += pages.size
        return above(match.path[-1], count), count, pages

    def unpin(self, node: Node, blocks: int, pages: Int32) -> None:
        """Ends what `pin` began."""
        for slots, held in zip(self.slots_of, pages, strict=True):
            slots.release(held, None, distinct=True)
        self.pinned -= pages.size
        self.tree.let_go(node, blocks)
