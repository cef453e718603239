"""The prefix tree: which token prefixes have pages, and where.

A path-compressed radix tree over blocks, with one root per scope. Equality of tokens decides, so no
hash can collide. Matching changes nothing; only publishing splits runs. Based on the radix trees of
prefix caches such as SGLang's (https://arxiv.org/abs/2312.07104), on runs of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.config import ReuseScope
from kvcore.control.eviction import EvictionQueue
from kvcore.control.ghosts import Ghosts, Pressure
from kvcore.control.keychain import KeyChain
from kvcore.control.listener import TreeListener
from kvcore.control.node import GONE, TOKEN_BYTES, Node, Root, common_tokens
from kvcore.control.slots import SlotTable
from kvcore.ids import Ticket
from kvcore.keys import root_key

Int32 = NDArray[np.int32]

Epochs = tuple[int | None, int | None]


@dataclass(slots=True)
class Match:
    """The longest known prefix of some tokens.

    `path` leads from below the root to the node of the last matched block, in which `tail` tokens
    match if they are not all: `blocks` full blocks come before it.
    """

    path: list[Node]
    blocks: int
    tail: int

    def pages(self, count: int, groups: int) -> Int32:
        """Slots `[layer groups, count]` of the first `count` blocks. A copy."""
        parts = []
        for node in self.path:
            if node.start >= count:
                break
            parts.append(node.slots[:, : min(node.size, count - node.start)])
        if not parts:
            return np.empty((groups, 0), np.int32)
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=1)


class Found(NamedTuple):
    """Which of some blocks are in the tree, and where they end."""

    node: Node | None
    """Holds the last of them, or what they would hang on. None: there is no root."""

    inside: int
    """Blocks of `node` up to there."""

    known: int
    pages: Int32
    """Of the known blocks, `[layer groups, known]`."""


class PrefixTree:
    """All roots of a manager, and the line of pages that may be evicted.

    Parameters
    ----------
    slots_of : list of SlotTable
        By layer group.
    tokens_per_block : int
    """

    def __init__(self, slots_of: list[SlotTable], tokens_per_block: int) -> None:
        self.slots_of = slots_of
        self.tokens_per_block = tokens_per_block
        self.block_bytes = tokens_per_block * TOKEN_BYTES
        self.roots: dict[tuple[ReuseScope, Epochs], Root] = {}
        self.stale: list[Root] = []
        self.queue = EvictionQueue(slots_of[0])
        self.keys = KeyChain(tokens_per_block)
        self.listener: TreeListener | None = None
        self.replaced: Callable[[Node, Node], None] = lambda shorter, longer: None
        self.ghosts = Ghosts()
        self._stamp = 0

    def root(self, scope: ReuseScope, epochs: Epochs) -> Root:
        """The root of a scope, made if need be."""
        root = self.roots.get((scope, epochs))
        if root is None:
            root = Root(scope, epochs, len(self.slots_of), root_key(scope, *epochs))
            self.roots[scope, epochs] = root
        return root

    # -- reading -----------------------------------------------------------------------------------

    def match(self, root: Root | None, tokens: memoryview, partial: bool) -> Match:
        """The longest prefix of `tokens` below `root`.

        With `partial` the last block may match in its first tokens only; else a block matches
        whole, or as a partial one that ends exactly where `tokens` do. Changes nothing.
        O(tokens) of comparing, plus O(nodes).
        """
        found = Match([], 0, 0)
        node: Node | None = root
        at, step, size = 0, self.block_bytes, len(tokens)
        while node is not None and at < size:
            child = node.children.get(bytes(tokens[at : at + step]))
            if child is None:
                if partial:
                    self._match_child(node, tokens[at : at + step], found)
                break
            found.path.append(child)
            length = len(child.tokens)
            if child.partial:
                found.tail = length // TOKEN_BYTES
                break
            if child.tokens.startswith(tokens[at : at + length]) and size - at >= length:
                found.blocks += child.size
                at += length
                node = child
                continue
            blocks, tail = divmod(
                common_tokens(child.tokens, tokens[at : at + length]), self.tokens_per_block
            )
            found.blocks += blocks
            found.tail = tail if partial else 0
            break
        return found

    def _match_child(self, node: Node, block: memoryview, found: Match) -> None:
        child, found.tail = node.closest(bytes(block))
        if child is not None:
            found.path.append(child)

    def walk(self) -> Iterator[Node]:
        """Every node that can be found, parents first."""
        for root in self.roots.values():
            yield from below(root)

    # -- publishing --------------------------------------------------------------------------------

    def find(self, node: Node | None, at: int, tokens: memoryview, count: int) -> Found:
        """Which of `count` blocks below block `at` of the path through `node` are there.

        `tokens` is their image. `node` holds block `at - 1` or lies below it; None: the root is not
        there yet. Changes nothing.
        """
        if node is None:
            return Found(None, 0, 0, np.empty((len(self.slots_of), 0), np.int32))
        node = above(node, at)
        known, inside, parts = 0, at - node.start, [np.empty((len(self.slots_of), 0), np.int32)]
        while known < count:
            rest = tokens[known * self.block_bytes :]
            if inside == node.size:
                child = node.children.get(bytes(rest[: self.block_bytes]))
                if child is None:
                    break
                node, inside = child, 0
            equal = self._equal_blocks(node, inside, rest)
            if not equal:
                break
            parts.append(node.slots[:, inside : inside + equal])
            known, inside = known + equal, inside + equal
        pages = parts[-1].copy() if len(parts) < 3 else np.concatenate(parts, axis=1)
        return Found(node, inside, known, pages)

    def covers(self, found: Found, tokens: bytes) -> bool:
        """Whether a known block that follows `found` starts with `tokens`."""
        node = found.node
        if node is None:
            return False
        if found.inside < node.size:
            return node.tokens.startswith(tokens, found.inside * self.block_bytes)
        return node.covering(tokens)

    def insert(
        self, node: Node, inside: int, at: int, tokens: memoryview, slots: Int32, ready: Ticket
    ) -> Node:
        """Puts new blocks below block `inside` of `node`, full ones or one partial block.

        Parameters
        ----------
        node, inside : Node, int
            As `find` says; nothing there goes on like `tokens`.
        at : int
            Ordinal of the first block.
        tokens : memoryview
            Their image.
        slots : int32 array [layer groups, n]
            Their pages, held by whoever publishes them.
        ready : Ticket
            The moment after which they may be read.

        Returns
        -------
        Node
            Holds the blocks.
        """
        if inside < node.size:
            node = node.split(inside, self.block_bytes)
        shorter = node.partial_prefix(bytes(tokens[: self.block_bytes]))
        if shorter is not None:
            self._retire(shorter)
        node = self._add(node, at, tokens, slots)
        for table, taken in zip(self.slots_of, slots, strict=True):
            table.publish(taken, ready)
        if shorter is not None:
            self.replaced(shorter, node)
        if self.listener is not None:
            self.listener.stored(self.keys.run(node, at - node.start, self.slots_of))
        return node

    def _equal_blocks(self, node: Node, inside: int, rest: memoryview) -> int:
        offset = inside * self.block_bytes
        length = min(len(node.tokens) - offset, len(rest))
        if node.tokens.startswith(rest[:length], offset):
            return length // self.block_bytes
        here = np.frombuffer(node.tokens, np.int32, length // TOKEN_BYTES, offset)
        there = np.frombuffer(rest, np.int32, length // TOKEN_BYTES)
        return int((here != there).argmax()) // self.tokens_per_block

    def _add(self, node: Node, at: int, tokens: memoryview, slots: Int32) -> Node:
        self.queue.leave(node)
        full = len(tokens) >= self.block_bytes
        if full and node.size and not node.children:
            node.extend(tokens, slots)
            return node
        child = Node(node, node.root, at, bytearray(tokens), slots.copy())
        child.partial = not full
        node.adopt(child, bytes(tokens[: self.block_bytes]))
        return child

    # -- using and removing ------------------------------------------------------------------------

    def hold(self, match: Match, count: int) -> Int32:
        """Adds a holder to the first `count` pages of a match; their slots."""
        pages = match.pages(count, len(self.slots_of))
        for slots, taken in zip(self.slots_of, pages, strict=True):
            slots.hold_distinct(taken)
        if match.path:
            node = above(match.path[-1], count)
            if node.end == count:
                self.queue.leave(node)
        return pages

    def let_go(self, node: Node, blocks: int) -> None:
        """Stamps the path down to block `blocks`, which somebody has just let go. O(nodes)."""
        self._stamp += 1
        node = above(node, blocks)
        while not node.alive and node.parent is not None:
            blocks = node.start
            node = above(node.parent, blocks)
        step: Node | None = node
        while step is not None and step.size:
            step.touch(min(step.size, blocks - step.start), self._stamp)
            step = step.parent
        self.queue.leave(node)
        self.queue.offer(node)

    def evict(self, count: int, pressure: Pressure) -> int:
        """Frees the pages of up to `count` blocks, the least important first; how many it were.

        Amortised O(sqrt(tips)) per run, O(1) per further block of a run.
        """
        left, queue = count, self.queue
        while left and (node := queue.first()) is not None:
            blocks = 1 if node.size == 1 else queue.tail(node, left)
            left -= blocks
            if blocks < node.size:
                self._trim(node, blocks, pressure)
            elif blocks > 1:
                self._remove_first(node, pressure)
                self._free(node.run)
            else:
                self._remove_first(node, pressure)
                for group, slots in enumerate(self.slots_of):
                    slots.withdraw_one(node.slots.item(group, 0))
        return count - left

    def _free(self, pages: Int32) -> None:
        for slots, gone in zip(self.slots_of, pages, strict=True):
            slots.withdraw(gone)

    def _trim(self, node: Node, count: int, pressure: Pressure) -> None:
        """Frees the last `count` blocks of a tip."""
        left = node.size - count
        if self.listener is not None and not node.root.stale:
            self.listener.removed(self.keys.backwards(node, left), None)
        first = left * self.block_bytes
        block = bytes(node.tokens[first : first + self.block_bytes])
        self.ghosts.remember(node, node.start + left, block, pressure)
        self._free(node.trim(count, self.block_bytes))
        self.queue.requeue(node)

    def _remove_first(self, node: Node, pressure: Pressure) -> None:
        """Takes the first tip of the line away; its slots are still marked as in the tree."""
        if self.listener is not None and not node.root.stale:
            self.listener.removed(self.keys.backwards(node, 0), None)
        self.queue.take_first()
        parent: Node = node.parent  # type: ignore[assignment]  # it is no root
        first = bytes(node.tokens if node.size == 1 else node.tokens[: self.block_bytes])
        parent.drop(node, first)
        self.ghosts.remember(parent, node.start, first, pressure)
        if not parent.children:
            if parent.parent is not None:
                self.queue.offer(parent)
            else:
                self._forget_root(parent.root)

    def _forget_root(self, root: Root) -> None:
        root.waiting = GONE
        if root.stale:
            self.stale.remove(root)
        else:
            del self.roots[root.scope, root.epochs]

    def _retire(self, node: Node) -> None:
        """A partial block leaves, because a longer one takes its place."""
        parent: Node = node.parent  # type: ignore[assignment]  # it is no root
        if self.listener is not None:
            self.listener.removed(self.keys.backwards(node, 0), None)
        self.queue.leave(node)
        node.waiting = GONE
        parent.drop(node, bytes(node.tokens))
        self._free(node.run)

    def make_stale(self, passed: Callable[[Root], bool]) -> None:
        """Puts roots out of reach. Their pages go first when room is needed."""
        for root in [root for root in self.roots.values() if passed(root)]:
            nodes = list(below(root))
            if self.listener is not None:
                for node in reversed(nodes):
                    self.listener.removed(self.keys.backwards(node, 0), None)
            root.stale = True
            del self.roots[root.scope, root.epochs]
            self.stale.append(root)
            for node in nodes:
                if node.waiting >= 0:
                    self.queue.requeue(node)

    def clear(self, pressure: Pressure) -> None:
        """Takes every page away. Nobody holds one."""
        while (node := self.queue.first()) is not None:
            self._remove_first(node, pressure)
            self._free(node.run)


def above(node: Node, at: int) -> Node:
    """The node on the way up that holds block `at - 1`: the root for 0."""
    while node.start >= at and node.parent is not None:
        node = node.parent
    return node


def below(root: Node) -> Iterator[Node]:
    """Every node under `root`, parents first."""
    open_nodes = list(root.children.values())
    while open_nodes:
        node = open_nodes.pop()
        yield node
        open_nodes += node.children.values()
