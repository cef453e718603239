"""A node of the prefix tree: a run of blocks, and who used how much of it when.

The tree is path-compressed: a node holds consecutive blocks that no other sequence branches off
between. Full blocks may have children; a partial block is a node of its own and always a leaf. A
key in `children` is the image of the child's first block, so two siblings never share one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcore.config import ReuseScope
from kvcore.control.pieces import SortedPieces

Int32 = NDArray[np.int32]

TOKEN_BYTES: Final = 4
KEY_BYTES: Final = 32
FEW: Final = 16  # children that are compared one by one; of more the neighbours in order suffice
NOT_WAITING: Final = -1


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
    stairs : list of (end, stamp)
        Blocks below `end` were last let go at `stamp`. Uses cover prefixes, so stamps fall towards
        the tail; the tail's comes first. Blocks beyond the first end were never let go.
    waiting : int
        The key under which it waits for eviction, or `NOT_WAITING`.
    alive : bool
        Whether it is in the tree, reachable or not.
    """

    __slots__ = (
        "_order",
        "alive",
        "children",
        "keys",
        "num_partial",
        "parent",
        "partial",
        "root",
        "serial",
        "size",
        "slots",
        "stairs",
        "start",
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
        self.stairs: list[tuple[int, int]] = []
        self.children: dict[bytes, Node] = {}
        self.keys: bytearray | None = None
        self.partial = False
        self.num_partial = 0  # partial children
        self.waiting = NOT_WAITING
        self.alive = True
        self.serial = 0
        self._order: SortedPieces[bytes] | None = None

    @property
    def end(self) -> int:
        """Ordinal after the last block."""
        return self.start + self.size

    @property
    def run(self) -> Int32:
        """Slots `[layer groups, size]`. A view."""
        return self.slots[:, : self.size]

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
        stairs = self.stairs
        while stairs and (stairs[1][0] if len(stairs) > 1 else 0) >= left:
            del stairs[0]
        if stairs and stairs[0][0] > left:
            stairs[0] = left, stairs[0][1]
        return gone

    def split(self, at: int, block_bytes: int) -> Node:
        """Puts the first `at` blocks into a new node above, which takes this one's place."""
        parent: Node = self.parent  # type: ignore[assignment]  # only roots have none
        cut = at * block_bytes
        upper = Node(parent, self.root, self.start, self.tokens[:cut], self.slots[:, :at].copy())
        parent.children[bytes(upper.tokens[:block_bytes])] = upper
        if self.keys is not None:
            upper.keys = self.keys[: at * KEY_BYTES]
            self.keys = self.keys[at * KEY_BYTES :]
        below = [(end - at, stamp) for end, stamp in self.stairs if end > at]
        upper.stairs = [(end, stamp) for end, stamp in self.stairs if end <= at]
        if below and (not upper.stairs or upper.stairs[0][0] < at):
            upper.stairs.insert(0, (at, self.stairs[len(below) - 1][1]))
        self.stairs = below
        self.tokens = self.tokens[cut:]
        self.slots = self.run[:, at:].copy()
        self.size -= at
        self.start += at
        self.parent = upper
        upper.children[bytes(self.tokens[:block_bytes])] = self
        return upper

    def touch(self, end: int, stamp: int) -> None:
        """The first `end` blocks were let go just now. O(1), amortised."""
        stairs = self.stairs
        while stairs and stairs[-1][0] <= end:
            stairs.pop()
        stairs.append((end, stamp))

    # -- children ----------------------------------------------------------------------------------

    def adopt(self, child: Node, key: bytes) -> None:
        """Links a child whose first block is `key`."""
        self.children[key] = child
        self.num_partial += child.partial
        if self._order is not None:
            self._order.add(key)

    def drop(self, child: Node, key: bytes) -> None:
        """Unlinks a child, which keeps its way up."""
        del self.children[key]
        self.num_partial -= child.partial
        if self._order is not None:
            self._order.remove(key)
            if len(self.children) <= FEW // 2:
                self._order = None

    def closest(self, wanted: bytes) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `wanted`, and how many.

        O(sqrt n), once many children were put in order: the closest one is a neighbour there.
        """
        candidates = self.children.keys() if len(self.children) <= FEW else self._near(wanted)
        best, most = None, 0
        for key in candidates:
            common = common_tokens(key, wanted)
            if common > most:
                best, most = self.children[key], common
        return best, most

    def covering(self, wanted: bytes) -> bool:
        """Whether a child's first block starts with `wanted`."""
        return self.closest(wanted)[1] * TOKEN_BYTES == len(wanted)

    def partial_prefix(self, wanted: bytes) -> Node | None:
        """The partial child that `wanted` starts with and goes beyond; there is at most one."""
        if not self.num_partial:
            return None
        for length in range(TOKEN_BYTES, len(wanted), TOKEN_BYTES):
            child = self.children.get(wanted[:length])
            if child is not None:
                return child
        return None

    def _near(self, wanted: bytes) -> list[bytes]:
        if self._order is None:
            self._order = SortedPieces(self.children)
        return [key for key in self._order.neighbours(wanted) if key is not None]


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
