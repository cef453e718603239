"""The keys of the tree's blocks, computed when somebody asks, and what listeners are told."""

from __future__ import annotations

from kvcore.control.listener import StoredRun
from kvcore.control.node import KEY_BYTES, TOKEN_BYTES, Node
from kvcore.control.slots import SlotTable
from kvcore.keys import chain_keys


class KeyChain:
    """Keys of nodes, each computed once and kept with its node."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.block_bytes = tokens_per_block * TOKEN_BYTES

    def of(self, node: Node) -> bytearray:
        """The keys of a node's blocks, computed down the path where they are missing."""
        missing: list[Node] = []
        step: Node | None = node
        while step is not None and step.size and len(step.keys or b"") < step.size * KEY_BYTES:
            missing.append(step)
            step = step.parent
        for each in reversed(missing):
            keys = each.keys = bytearray() if each.keys is None else each.keys
            done = len(keys) // KEY_BYTES
            before = bytes(keys[-KEY_BYTES:]) if done else self.before(each)
            new = bytes(each.tokens[done * self.block_bytes :])
            keys += b"".join(chain_keys(before, new, self.tokens_per_block))
        return node.keys if node.keys is not None else bytearray()

    def key(self, node: Node, index: int) -> bytes:
        """The key of one block of a node."""
        return bytes(self.of(node)[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def before(self, node: Node) -> bytes:
        """The key that a node's first block is chained to."""
        parent: Node = node.parent  # type: ignore[assignment]  # it is no root
        return parent.root.key if parent.parent is None else self.key(parent, parent.size - 1)

    def backwards(self, node: Node, first: int) -> list[bytes]:
        """The keys of a node's blocks from the last down to `first`."""
        keys = bytes(self.of(node)[first * KEY_BYTES :])
        starts = range(len(keys) - KEY_BYTES, -KEY_BYTES, -KEY_BYTES)
        return [keys[start : start + KEY_BYTES] for start in starts]

    def run(self, node: Node, first: int, slots_of: list[SlotTable]) -> StoredRun:
        """A node's blocks from `first` on, as listeners are told of them."""
        cut, parent = first * self.block_bytes, None
        if first or node.start:
            parent = self.key(node, first - 1) if first else self.before(node)
        keys = bytes(self.of(node)[first * KEY_BYTES :])
        return StoredRun(
            scope=node.root.scope,
            parent=parent,
            keys=[keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)],
            tokens=bytes(node.tokens[cut:]),
            groups=tuple(range(len(slots_of))),
            level=0,
            priorities=slots_of[0].priority[node.slots[0, first : node.size]].tolist(),
            before=lambda: tokens_before(node, cut),
            tokens_per_block=self.tokens_per_block,
        )

    def match(self, root: Node | None, keys: list[bytes]) -> tuple[int, int]:
        """Blocks and tokens of the longest path with these keys.

        O(keys); children that nobody asked for by key before are named first, each once.
        """
        node, done, tokens = root, 0, 0
        while node is not None and done < len(keys):
            node = self._child(node, keys[done])
            if node is None:
                break
            mine = bytes(self.of(node))
            for start in range(0, len(mine), KEY_BYTES):
                if done == len(keys) or mine[start : start + KEY_BYTES] != keys[done]:
                    return done, tokens
                done += 1
                tokens += min(len(node.tokens) // TOKEN_BYTES, self.tokens_per_block)
        return done, tokens

    def _child(self, node: Node, key: bytes) -> Node | None:
        children = node.children
        if not children:
            return None
        if children.by_key is None:
            children.by_key, children.unnamed = {}, list(children.values())
        for child in children.unnamed:
            if child.alive:
                children.by_key[self.key(child, 0)] = child
        children.unnamed = []
        found = children.by_key.get(key)
        if found is not None and not (found.alive and found.parent is node):
            del children.by_key[key]  # it has left since
            found = None
        return found


def tokens_before(node: Node, cut: int) -> bytes:
    """The image of everything from the root to byte `cut` of a node."""
    parts = [bytes(node.tokens[:cut])]
    step = node.parent
    while step is not None:
        parts.append(bytes(step.tokens))
        step = step.parent
    return b"".join(reversed(parts))
