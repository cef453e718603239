"""The rules of the prefix tree, counted again from its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.control.node import TOKEN_BYTES, Node, Root
from kvcore.control.slots import PRIVATE, PUBLISHED, SHARED, SlotTable
from kvcore.control.tree import above, below

if TYPE_CHECKING:
    from kvcore.control.plane import ControlPlane
    from kvcore.control.reuse import Claim
    from kvcore.control.sequences import SequenceTable
    from kvcore.runtime import Runtime


class TreeRules:
    """What holds of the tree, of the claims of sequences on it, and of its pages."""

    runtime: Runtime
    control: ControlPlane
    seqs: SequenceTable
    alive: list[int]
    same: Callable[[str, object, object], None]

    # -- nodes ---------------------------------------------------------------------------------

    def tree(self) -> list[list[int]]:
        """Every node by itself and below its parent; the published slots of each pool group."""
        tree = self.control.reuse.tree
        published: list[list[int]] = [[] for _ in self.control.slots]
        tips = set()
        for root in _roots(self.runtime):
            for node in below(root):
                self._node(node, root)
                for group, run in enumerate(node.run.tolist()):
                    published[self.control.pool_group_of[group]] += run
                last = node.slots[0, node.size - 1]
                if not node.children and not self.control.slots_of[0].refs[last]:
                    tips.add(node)
        for number, slots in enumerate(published):
            self.same(f"pool group {number}: pages of one node each", len(slots), len(set(slots)))
        self.same("nodes that wait for eviction", tips, set(tree.queue.waiting()))
        for node in tips:
            key = tree.queue._key(node, node.slots.item(0, node.size - 1))
            self.same(f"{_name(node)}: its place in the line", key, node.waiting)
        return published

    def _node(self, node: Node, root: Root) -> None:
        name, step, parent = _name(node), self.control.reuse.tree.block_bytes, node.parent
        first = bytes(node.tokens[:step])
        self.same(f"{name}: alive", (True, True), (node.alive, root.alive))
        self.same(f"{name}: root", root, node.root)
        linked = parent is not None and parent.children.get(first) is node
        self.same(f"{name}: found from above", True, linked)
        self.same(f"{name}: start", parent.end if parent is not None else 0, node.start)
        self.same(f"{name}: partial", len(node.tokens) < step, node.partial)
        if node.partial:
            self.same(f"{name}: a leaf of one block", (1, {}), (node.size, node.children))
            begun = [_tokens(key) for key in _siblings(node) if key.startswith(first)]
            self.same(f"{name}: siblings that begin with it", [], begun)
        else:
            self.same(f"{name}: bytes of tokens", node.size * step, len(node.tokens))
        partial = sum(child.partial for child in node.children.values())
        self.same(f"{name}: partial children", partial, node.children.num_partial)
        self._stamps(node, name)

    def _stamps(self, node: Node, name: str) -> None:
        ends, stamps = [end for end, _ in node.stairs], [stamp for _, stamp in node.stairs]
        self.same(f"{name}: ends of stamps", sorted({*ends}, reverse=True), ends)
        self.same(f"{name}: ends of stamps inside", [], [e for e in ends if not 0 < e <= node.size])
        self.same(f"{name}: stamps", sorted({*stamps}), stamps)
        below_all = node.parent is None or not node.parent.stairs or not stamps
        if not below_all and node.parent is not None:
            newer = stamps[-1] > node.parent.stairs[0][1]
            self.same(f"{name}: used later than what is above it", False, newer)

    # -- pages ---------------------------------------------------------------------------------

    def pinned(self, pool_group: int) -> Iterator[int]:
        """Slots that pins hold, one for each pin."""
        for pin in self.runtime.pins:
            held: Any = pin._held
            for group, run in enumerate(held.pages.tolist()):
                if self.control.pool_group_of[group] == pool_group:
                    yield from run

    def marks(
        self, name: str, table: SlotTable, holders: NDArray[np.intp], published: list[int]
    ) -> None:
        """A slot is marked as its node, or having had one, says; and what is evictable counted."""
        expected = np.full(table.capacity, PRIVATE, np.uint8)
        expected[(holders > 0) & (table.in_tree == SHARED)] = SHARED
        expected[published] = PUBLISHED
        wrong = np.flatnonzero(expected != table.in_tree).tolist()
        self.same(f"{name}: marks of slots", [], [(s, table.in_tree.item(s)) for s in wrong])
        evictable = sum(not holders[slot] for slot in published)
        self.same(f"{name}: num_evictable", evictable, table.num_evictable)

    # -- sequences -----------------------------------------------------------------------------

    def claims(self) -> None:
        """Each sequence has the pages of its path, and its tokens are those of the path."""
        claims = self.control.reuse.claims
        self.same("sequences with a claim", set(self.alive), set(claims))
        for sequence, claim in claims.items():
            self._claim(sequence, claim, f"sequence {sequence}")

    def _claim(self, sequence: int, claim: Claim, name: str) -> None:
        history = int(self.seqs.history[sequence])
        self.same(f"{name}: committed tokens in the history", True, claim.committed <= history)
        pages, blocks, node = self.seqs.page_rows(sequence), claim.blocks, claim.node
        if node is None:
            self.same(f"{name}: blocks of no path", 0, blocks)
            return
        node = above(node, blocks)
        while node.parent is not None:
            if not node.alive:  # a longer block has replaced a partial one that we hold
                self.same(f"{name}: a dead node of its path is partial", True, node.partial)
            else:
                run = node.run[:, : blocks - node.start]
                rows = slice(0, 1) if self.control.paths else slice(None)
                cells = pages[rows, :, node.start : node.start + run.shape[1]]
                right = bool((cells == run).all()) and cells.shape[2] == run.shape[1]
                self.same(f"{name}: pages of {_name(node)}", True, right)
            blocks, node = node.start, above(node.parent, node.start)


def _roots(runtime: Runtime) -> list[Root]:
    tree = runtime.control.reuse.tree
    return [*tree.roots.values(), *tree.stale]


def _siblings(node: Node) -> list[bytes]:
    own = bytes(node.tokens)
    return [] if node.parent is None else [key for key in node.parent.children if key != own]


def _name(node: Node) -> str:
    return f"node of block {node.start} with {_tokens(node.tokens)}"


def _tokens(image: bytes | bytearray) -> list[int]:
    values: list[int] = np.frombuffer(image, np.int32, len(image) // TOKEN_BYTES).tolist()
    return values


def describe_tree(runtime: Runtime) -> list[str]:
    """All nodes as text."""
    lines = []
    for root in _roots(runtime):
        lines.append(f"  {root.scope} {root.epochs}{', out of reach' if root.stale else ''}")
        for node in below(root):
            waits = "waits" if node.waiting >= 0 else "is used"
            lines.append(
                f"    {node.start}: {_tokens(node.tokens)} in {node.run.tolist()}, stamps "
                f"{node.stairs}, {waits}"
            )
    for sequence, claim in runtime.control.reuse.claims.items():
        where = None if claim.node is None else _name(claim.node)
        lines.append(
            f"  claim of {sequence}: {claim.committed} tokens, {claim.blocks} blocks, {where}"
        )
    return lines
