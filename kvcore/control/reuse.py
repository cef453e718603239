"""How far each sequence is published, and what it shares with others through the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from kvcore.errors import wrong
from kvcore.ids import Ticket, div_ceil
from kvcore.keys import next_key, root_key
from kvcore.retention import DEFAULT_PRIORITY, HIGHEST_PRIORITY, Retention

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]
Index = NDArray[np.intp]

CALLBACK = "custom_priority_callback(ordinal, layer_group)"

PriorityOf = Callable[[int, Any], int]
"""The priority of a block, from its ordinal and its layer group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRules:
    """The settings of a manager that matter here."""

    partial_reuse: bool = True
    partial_commit: bool = True
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
    text_only: bool = False
    kin: set[int] | None = None
    """Forks of one sequence, which may hold pages that another of them publishes later."""

    held: tuple[Node, int] | None = None
    """A path whose pages it holds beyond its own, published by its kin."""


@dataclass(slots=True, eq=False)
class PinHold:
    """The pages `[layer groups, blocks]` that one pin holds: the path that ends in `node`."""

    node: Node
    blocks: int
    pages: Int32


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
        self.deadlines = Deadlines(slots_of[0].capacity)
        self.layer_groups: tuple[Any, ...] = tuple(range(len(slots_of)))
        self.pinned = 0  # pages, counted once per pin
        self.pins: dict[Node, list[PinHold]] = {}
        self.tree.replaced = self._move_pins
        self.calling = False  # a priority callback of the caller's is running
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
        now = self.epoch(lora_id)
        if now == epoch:
            return
        if now is not None and epoch < now:
            raise wrong("epoch", f"more than the present {now}: epochs rise", epoch)
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
        if claim.retention:
            self.prioritise_known(claim, 0, pages)
        seqs.capacity[sequence] = seqs.history[sequence] = length
        seqs.num_blocks[sequence] = count
        seqs.limit[sequence] = seqs.limit_of(count)
        seqs.parked[sequence] = pages[None]

    def share_claim(self, sequence: int, fork: int, shared: int) -> None:
        """Gives a fork the claim of `sequence`, as far as its first `shared` blocks reach."""
        origin = self.claims[sequence]
        kin = origin.kin = {sequence} if origin.kin is None else origin.kin
        kin.add(fork)
        claim = self.claims[fork] = replace(origin)
        if claim.blocks > shared:  # a published partial block, of which the fork has a copy
            claim.blocks = shared
            claim.node = None if claim.node is None or not shared else above(claim.node, shared)

    def tell_kin(self, sequence: int, node: Node, first: int, pages: Int32) -> None:
        """Forks that hold `pages`, published from block `first` on, hold a path in the tree."""
        kin = self.claims[sequence].kin
        for other in () if kin is None else kin - {sequence}:
            theirs = self.own_pages(other, first, pages.shape[1])
            same = (theirs == pages[:, : theirs.shape[1]]).all(axis=0)
            reach = first + (int(same.argmin()) if not same.all() else same.size)
            claim = self.claims[other]
            before = max(claim.blocks, claim.held[1] if claim.held else 0)
            if reach > max(first, before):  # else they hold none of these
                claim.held = node, reach

    def let_go(self, sequence: int) -> None:
        """Forgets a sequence whose pages were released."""
        claim = self.claims.pop(sequence, None)
        if claim is None:
            return
        if claim.kin is not None:
            claim.kin.discard(sequence)
        if claim.held is not None and claim.held[1] > claim.blocks:
            self.tree.let_go(*claim.held)
        elif claim.node is not None:
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

    def rows_agree(self, sequence: int, first: int, last: int) -> bool:
        """Whether all beams have the same pages in blocks `first` to `last - 1`."""
        rows = self.seqs.page_rows(sequence)[:, :, first:last]
        return len(rows) == 1 or bool((rows == rows[0]).all())

    def adopt(self, sequence: int, pages: Int32, ticket: Ticket) -> None:
        """Lets a sequence use the tree's `pages` from the claim's `blocks` on, and frees its own.

        `ticket` is the moment after which its own are no longer used.
        """
        seqs, first = self.seqs, self.claims[sequence].blocks
        own = self.own_pages(sequence, first, pages.shape[1])
        width = 1 if seqs.shape.indirect else int(seqs.width[sequence])
        rows = seqs.rows[sequence, :width]
        for group, slots in enumerate(self.slots_of):
            where = np.flatnonzero(own[group] != pages[group])
            if not where.size:
                continue
            slots.hold_distinct(pages[group, where], width)
            slots.release_each(own[group, where], ticket, width)
            seqs.table[rows[:, None], group, first + where] = pages[group, where]
            flat = rows[:, None] * seqs.row_stride + group * seqs.shape.max_blocks + first + where
            seqs.mark(flat.reshape(-1), ticket)
        seqs.touch(sequence)

    def own_pages(self, sequence: int, first: int, count: int) -> Int32:
        """Slots `[layer groups, count]` of a sequence's blocks from `first` on."""
        row: Int32 = self.seqs.page_rows(sequence)[0, :, first : first + count]
        return row

    # -- retention ---------------------------------------------------------------------------------

    def asked(self, claim: Claim, first: int, count: int) -> UInt8 | None:
        """The priorities that a sequence wants for its blocks from `first` on; None: the default.

        Calls the caller's callback, whose errors come through. Changes nothing.
        """
        if not claim.retention and claim.priority_of is None:
            return None
        asked = np.full((len(self.slots_of), count), DEFAULT_PRIORITY, np.uint8)
        if claim.priority_of is not None:
            self.calling = True
            try:
                for group, layer_group in enumerate(self.layer_groups):
                    for i in range(count):
                        priority = claim.priority_of(first + i, layer_group)
                        asked[group, i] = as_int(CALLBACK, priority, 0, HIGHEST_PRIORITY)
            finally:
                self.calling = False
        for entry, blocks in self._ranges(claim, first, count):
            asked[:, blocks] = entry.priority
        return asked

    def prioritise_new(self, claim: Claim, first: int, pages: Int32, asked: UInt8 | None) -> None:
        """Gives pages that are about to be published the priorities that were `asked` for."""
        if asked is None:
            if not self._plain:
                self._set(pages, np.full(pages.shape, DEFAULT_PRIORITY, np.uint8))
            return
        self._plain = False
        self._set(pages, asked)
        self.deadlines.set(pages[0], None)
        self._set_deadlines(claim, first, pages)

    def prioritise_known(self, claim: Claim, first: int, pages: Int32) -> None:
        """Gives published pages that a sequence uses the priorities of its `retention`."""
        for entry, blocks in self._ranges(claim, first, pages.shape[1]):
            self._plain = False
            chosen = pages[:, blocks]
            self._set(chosen, np.full(chosen.shape, entry.priority, np.uint8))
        self._set_deadlines(claim, first, pages)

    def _ranges(
        self, claim: Claim, first: int, count: int
    ) -> Iterator[tuple[Retention, NDArray[np.intp]]]:
        """Which of some blocks each entry of a claim's retention covers, if any."""
        starts = np.arange(first, first + count) * self.tokens_per_block
        for entry in claim.retention:
            inside = starts >= entry.start
            if entry.end is not None:
                inside &= starts < entry.end
            blocks = np.flatnonzero(inside)
            if blocks.size:
                yield entry, blocks

    def _set_deadlines(self, claim: Claim, first: int, pages: Int32) -> None:
        for entry, blocks in self._ranges(claim, first, pages.shape[1]):
            ends = None if entry.ttl is None or claim.now is None else claim.now + entry.ttl
            self.deadlines.set(pages[0, blocks], ends)

    def _set(self, pages: Int32, priorities: UInt8) -> None:
        for slots, chosen, values in zip(self.slots_of, pages, priorities, strict=True):
            slots.priority[chosen] = values

    def expire(self, now: float) -> None:
        """Gives pages whose time has come the default priority."""
        due = self.deadlines.passed(now)
        if due.size:
            self.slots_of[0].priority[due] = DEFAULT_PRIORITY
            for node in self.tree.queue.with_last_in(due):
                self.tree.queue.requeue(node)

    # -- room --------------------------------------------------------------------------------------

    def make_room(self, blocks: int, call: str) -> int:
        """Evicts up to `blocks` blocks; how many it were."""
        pressure = self._pressure
        if pressure.needed != blocks or pressure.call != call or pressure.pinned != self.pinned:
            pressure = self._pressure = Pressure(call, blocks, self.pinned)
        return self.tree.evict(blocks, pressure)

    def pin(self, match: Match, length: int) -> PinHold:
        """Holds the pages of a match."""
        count = div_ceil(length, self.tokens_per_block)
        pages = self.tree.hold(match, count)
        self.pinned += pages.size
        pin = PinHold(above(match.path[-1], count), count, pages)
        self.pins.setdefault(pin.node, []).append(pin)
        return pin

    def unpin(self, pin: PinHold) -> None:
        """Ends what `pin` began."""
        held = self.pins[pin.node]
        held.remove(pin)
        if not held:
            del self.pins[pin.node]
        for slots, pages in zip(self.slots_of, pin.pages, strict=True):
            slots.release(pages, None, distinct=True)
        self.pinned -= pin.pages.size
        self.tree.let_go(pin.node, pin.blocks)

    def _move_pins(self, shorter: Node, longer: Node) -> None:
        """Pins of a partial block hold the longer one that took its place."""
        for pin in self.pins.pop(shorter, ()):
            pin.node = above(longer, pin.blocks)
            last = longer.slots[:, pin.blocks - 1 - longer.start]
            for group, slots in enumerate(self.slots_of):
                slots.hold_distinct(last[group : group + 1])
                slots.release(pin.pages[group, -1:], None, distinct=True)
            pin.pages[:, -1] = last
            self.pins.setdefault(pin.node, []).append(pin)
