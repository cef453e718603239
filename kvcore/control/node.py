"""A node of the prefix tree: a run of blocks, and who used how much of it when.

The tree is path-compressed: a node holds consecutive blocks that no other sequence branches off
between. Full blocks may have children; a partial block is a node of its own and always a leaf. A
key in `children` is the image of the child's first block, so two siblings never share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcore.config import ReuseScope
from kvcore.control.pieces import SortedPieces

Int32 = NDArray[np.int32]

TOKEN_BYTES: Final = 4
KEY_BYTES: Final = 32
SIFTED: Final = 256  # children that leave before another piece of the order is sifted
FEW: Final = 16  # children that are compared one by one; of more the neighbours in order suffice
NOT_WAITING: Final = -1
GONE: Final = -2


class Node:
    """Consecutive blocks.

    Attributes
    ----------
    parent : Node or None
        Kept after removal, so that a sequence finds its way up.
    root : Root
    start, size : int
        Ordinal of the first block, number of blocks.
    tokens : bytearray
        Image of their tokens.
    slots : int32 array [layer groups, at least size]
        Their pages. `run` is the part in use.
    steps : tuple of int (end, stamp, end, stamp, ...)
        Blocks below `end` were last let go at `stamp`. Uses cover prefixes, so stamps fall towards
        the tail; the tail's comes first. Blocks beyond the first end were never let go.
    waiting : int
        The key under which it waits for eviction, `NOT_WAITING`, or `GONE` from the tree.
    serial : int
        Its name in the memory of evicted blocks, 0 before it has one.
    """

    __slots__ = (
        "children",
        "keys",
        "parent",
        "partial",
        "root",
        "serial",
        "size",
        "slots",
        "start",
        "steps",
        "tokens",
        "waiting",
    )

    def __init__(
        self, parent: Node | None, root: Root | None, start: int, tokens: bytearray, slots: Int32
    ) -> None:
        self.parent = parent
        self.root: Root = self if root is None else root  # type: ignore[assignment]
        self.start, self.tokens, self.slots = start, tokens, slots
        self.size: int = slots.shape[1]
        self.steps: tuple[int, ...] = ()
        self.children: Children = NO_CHILDREN
        self.keys: bytearray | None = None
        self.partial = False
        self.waiting = NOT_WAITING
        self.serial = 0

    @property
    def end(self) -> int:
        """Ordinal after the last block."""
        return self.start + self.size

    @property
    def run(self) -> Int32:
        """Slots `[layer groups, size]`. A view."""
        return self.slots[:, : self.size]

    @property
    def alive(self) -> bool:
        """Whether it is in the tree, reachable or not."""
        return self.waiting != GONE

    @property
    def stairs(self) -> list[tuple[int, int]]:
        """`steps` as pairs."""
        return list(zip(self.steps[::2], self.steps[1::2], strict=True))

    # -- growing and shrinking ---------------------------------------------------------------------

    def extend(self, tokens: memoryview, slots: Int32) -> None:
        """Appends full blocks; O(new blocks), amortised."""
        count = slots.shape[1]
        if self.size + count > self.slots.shape[1]:
            wider = np.empty((len(slots), max(2 * self.size, self.size + count)), np.int32)
            wider[:, : self.size] = self.run
            self.slots = wider
        self.slots[:, self.size : self.size + count] = slots
        self.size += count
        self.tokens += tokens

    def trim(self, count: int, block_bytes: int) -> Int32:
        """Takes the last blocks away; their slots `[layer groups, count]`. O(count), amortised."""
        left = self.size - count
        gone = self.slots[:, left : self.size]
        self.size = left
        del self.tokens[left * block_bytes :]
        if self.keys is not None:
            del self.keys[left * KEY_BYTES :]
        steps = self.steps
        while len(steps) > 2 and steps[2] >= left:
            steps = steps[2:]
        self.steps = (min(steps[0], left), *steps[1:]) if steps and left else ()
        return gone

    def split(self, at: int, block_bytes: int) -> Node:
        """Puts the first `at` blocks into a new node above, which takes this one's place."""
        parent: Node = self.parent  # type: ignore[assignment]  # only roots have none
        cut = at * block_bytes
        upper = Node(parent, self.root, self.start, self.tokens[:cut], self.slots[:, :at].copy())
        parent.children.add(bytes(upper.tokens[:block_bytes]), upper)
        upper.serial = self.serial
        if self.keys is not None:
            upper.keys = self.keys[: at * KEY_BYTES]
            self.keys = self.keys[at * KEY_BYTES :]
        stairs = self.stairs
        below = [(end - at, stamp) for end, stamp in stairs if end > at]
        above = [(end, stamp) for end, stamp in stairs if end <= at]
        if below and (not above or above[0][0] < at):
            above.insert(0, (at, stairs[len(below) - 1][1]))
        upper.steps = tuple(chain.from_iterable(above))
        self.steps = tuple(chain.from_iterable(below))
        self.tokens = self.tokens[cut:]
        self.slots = self.run[:, at:].copy()
        self.size -= at
        self.start += at
        self.parent = upper
        upper.adopt(self, bytes(self.tokens[:block_bytes]))
        return upper

    def touch(self, end: int, stamp: int) -> None:
        """The first `end` blocks were let go just now. O(1), amortised."""
        steps = self.steps
        while steps and steps[-2] <= end:
            steps = steps[:-2]
        self.steps = (*steps, end, stamp)

    # -- children ----------------------------------------------------------------------------------

    def adopt(self, child: Node, key: bytes) -> None:
        """Links a child whose first block is `key`."""
        if self.children is NO_CHILDREN:
            self.children = Children()
        self.children.add(key, child)

    def drop(self, child: Node, key: bytes) -> None:
        """Unlinks a child, which keeps its way up."""
        if len(self.children) == 1:
            self.children = NO_CHILDREN
        else:
            self.children.remove(key, child)

    def closest(self, wanted: bytes) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `wanted`, and how many."""
        best, most = None, 0
        for child in self.children.near(wanted):
            common = common_tokens(child.tokens, wanted)
            if common > most:
                best, most = child, common
        return best, most

    def covering(self, wanted: bytes) -> bool:
        """Whether a child's first block starts with `wanted`."""
        return self.closest(wanted)[1] * TOKEN_BYTES == len(wanted)

    def partial_prefix(self, wanted: bytes) -> Node | None:
        """The partial child that `wanted` starts with and goes beyond; there is at most one."""
        if not self.children.num_partial:
            return None
        for length in range(TOKEN_BYTES, len(wanted), TOKEN_BYTES):
            child = self.children.get(wanted[:length])
            if child is not None:
                return child
        return None


class Children(dict[bytes, Node]):
    """Children by the image of their first block, put in order once they are many.

    Those that leave stay in the order for a while: it is sifted piece by piece.
    """

    __slots__ = ("_left", "by_key", "num_partial", "order", "unnamed")

    def __init__(self) -> None:
        super().__init__()
        self.num_partial = 0
        self.order: SortedPieces[bytes, Node] | None = None
        self._left = 0
        self.by_key: dict[bytes, Node] | None = None  # once somebody asked by keys
        self.unnamed: list[Node] = []  # not in `by_key` yet

    def add(self, key: bytes, child: Node) -> None:
        """A new child, or another full one for the same block."""
        self[key] = child
        self.num_partial += child.partial
        if self.order is not None:
            self.order.put(key, child)
        elif len(self) > FEW:
            self.order = SortedPieces(self.items())
        if self.by_key is not None:
            self.unnamed.append(child)

    def remove(self, key: bytes, child: Node) -> None:
        """One child less, which is gone."""
        del self[key]
        self.num_partial -= child.partial
        if self.order is not None:
            self._left += 1
            if self._left % SIFTED == 0:
                self.order.sift_next(_is_there)

    def near(self, wanted: bytes) -> Iterable[Node]:
        """Those that may share most leading tokens with `wanted`: of many its neighbours in order.

        O(sqrt n) once they are in order, amortised.
        """
        if self.order is None:
            return self.values()
        if len(self) <= FEW // 2:
            self.order = None
            return self.values()
        found = self.order.neighbours(wanted)
        while not all(map(_is_there, found)):
            self.order.sift_at(wanted, _is_there)
            found = self.order.neighbours(wanted)
        return found


def _is_there(node: Node) -> bool:
    return node.waiting != GONE


NO_CHILDREN: Final = Children()
"""Of every tip: most nodes are tips."""


class Root(Node):
    """Above the first block of a scope. Holds no block itself.

    Attributes
    ----------
    scope : ReuseScope
    epochs : (int or None, int or None)
        Of the base weights and of the LoRA's.
    stale : bool
        Whether an epoch has passed: nothing finds it any more.
    """

    __slots__ = ("epochs", "key", "scope", "stale")

    def __init__(
        self, scope: ReuseScope, epochs: tuple[int | None, int | None], groups: int, key: bytes
    ) -> None:
        super().__init__(None, None, 0, bytearray(), np.empty((groups, 0), np.int32))
        self.scope, self.epochs, self.key, self.stale = scope, epochs, key, False
        self.serial = hash((scope.lora_id, scope.salt, epochs)) | 1 << 62


def common_tokens(a: bytes | bytearray | memoryview, b: bytes | bytearray | memoryview) -> int:
    """Tokens that two images share at their start.

    >>> common_tokens(bytes([1, 0, 0, 0, 2, 0, 0, 0]), bytes([1, 0, 0, 0, 3, 0, 0, 0]))
    1
    """
    size = min(len(a), len(b))
    if size <= 256:  # bytes: as numbers
        differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
        return (size - (differ.bit_length() + 7) // 8) // TOKEN_BYTES
    left = np.frombuffer(a, np.int32, size // TOKEN_BYTES)
    unequal = left != np.frombuffer(b, np.int32, size // TOKEN_BYTES)
    first = int(unequal.argmax())
    return first if unequal[first] else unequal.size
