"""Prefix reuse in the model: what a sequence finds, publishes and lets go, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import StateError
from kvcore.ids import Status
from kvcore.retention import DEFAULT_PRIORITY
from kvcore.testing.model_tree import Choice, ModelTree, Node, Page, Scope

if TYPE_CHECKING:
    from kvcore.config import ReuseScope
    from kvcore.testing.model import ModelKVCache

Wish = tuple[int, float | None]
"""A priority, and when it ends."""


class Wishes:
    """What one sequence asks for its blocks.

    Parameters
    ----------
    retention : Retention or sequence of them
        By token position; the last one that covers a block's first token counts.
    custom_priority_callback : callable, optional
        (ordinal, layer group) -> priority of a block that is published.
    now : float, optional
        What `ttl` counts from.
    """

    def __init__(
        self,
        retention: Any = (),
        custom_priority_callback: Callable[[int, int], int] | None = None,
        now: float | None = None,
    ) -> None:
        retention = retention if isinstance(retention, Sequence) else [retention]
        if now is None and any(entry.ttl is not None for entry in retention):
            raise ValueError("ttl needs now")
        self.retention, self.callback, self.now = retention, custom_priority_callback, now

    def explicit(self, position: int) -> Wish | None:
        """What retention says of the block that begins there."""
        wish = None
        for entry in self.retention:
            if entry.start <= position and (entry.end is None or position < entry.end):
                wish = entry.priority, None if entry.ttl is None else (self.now or 0) + entry.ttl
        return wish

    def apply(self, page: Page, position: int) -> None:
        """Overwrites the priority of a page that was found, if there is a wish for it."""
        wish = self.explicit(position)
        if wish is not None:
            page.priority, page.deadline = wish

    def publish(self, page: Page, ordinal: int, position: int) -> None:
        """Sets the priority of a new page."""
        page.priority, page.deadline = DEFAULT_PRIORITY, None
        if self.callback is not None:
            page.priority = self.callback(ordinal, 0)
        self.apply(page, position)


class ModelPin:
    """Holds the pages of a match until it is closed."""

    def __init__(self, manager: ModelReuse, found: list[tuple[Node, int]], end: float | None):
        self.manager, self.end = manager, end
        self.num_tokens = sum(matched for _, matched in found)
        self.pages = {page for node, _ in found if (page := node.page) is not None}
        manager.pins.append(self)

    def close(self) -> None:
        """Lets go; a second time does nothing."""
        if self in self.manager.pins:
            self.manager.pins.remove(self)
            self.manager.tree.touch(self.pages)


class ModelReuse:
    """What a manager knows beyond its open sequences: the tree, pins and epochs.

    `caches`, `slots`, `free` and `held` are those of `ModelManager`.
    """

    caches: list[ModelKVCache]
    slots: int

    def __init__(
        self, *, tokens_per_block: int, partial_reuse: bool, partial_commit: bool,
        min_snapshot: bool, backoff: int,
    ) -> None:  # fmt: skip
        self.tree = ModelTree(
            tokens_per_block=tokens_per_block, partial_reuse=partial_reuse, backoff=backoff
        )
        self.tokens_per_block = tokens_per_block
        self.enable_partial_commit = partial_commit
        self.commit_min_snapshot = min_snapshot
        self.pins: list[ModelPin] = []
        self.tree.replaced = self._move_pins
        self.epochs: dict[int | None, int] = {}

    @staticmethod
    def scope(scope: ReuseScope | None) -> Scope:
        """What names a tenant."""
        return (None, None) if scope is None else (scope.lora_id, scope.salt)

    # -- pages ---------------------------------------------------------------------------------

    @property
    def held(self) -> set[Page]:
        """Distinct pages that a table or a pin reaches."""
        return self.held_by([*self.caches, *self.pins])

    @staticmethod
    def held_by(holders: Iterable[ModelKVCache | ModelPin]) -> set[Page]:
        """Distinct pages of some holders."""
        return {page for holder in holders for page in holder.pages}

    def held_by_others(self, cache: ModelKVCache) -> set[Page]:
        """Distinct pages that anybody else holds."""
        return self.held_by([*(c for c in self.caches if c is not cache), *self.pins])

    @property
    def evictable(self) -> int:
        """Published pages that nobody holds."""
        return len(self.tree.evictable(self.held))

    @property
    def free(self) -> int:
        """Slots without a page."""
        return self.slots - len(self.held) - self.evictable

    def make_room(self, count: int) -> bool:
        """Sees to it that so many slots are free, by eviction; False if there are not so many."""
        if count > self.free + self.evictable:
            return False
        while count > self.free:
            self.tree.evict(self.held)
        return True

    # -- questions -----------------------------------------------------------------------------

    def probe_reuse(self, reuse_scope: ReuseScope | None, tokens: Sequence[int]) -> int:
        """How many tokens a new sequence would find."""
        return sum(matched for _, matched in self.tree.match(self.scope(reuse_scope), tokens))

    # -- holding, forgetting -------------------------------------------------------------------

    def pin(
        self, tokens: Sequence[int], reuse_scope: ReuseScope | None = None, *,
        ttl: float | None = None, now: float | None = None, choose: Choice | None = None,
    ) -> ModelPin:  # fmt: skip
        """Holds what a prompt finds."""
        if ttl is not None and now is None:
            raise ValueError("ttl needs now")
        found = self.tree.match(self.scope(reuse_scope), tokens, choose)
        return ModelPin(self, found, None if ttl is None or now is None else now + ttl)

    def expire(self, now: float) -> None:
        """Ends the pins and the priorities whose time has come."""
        due = [(pin.end, pin) for pin in self.pins if pin.end is not None and pin.end <= now]
        for _, pin in sorted(due, key=lambda item: item[0]):
            pin.close()
        self.tree.expire(now)

    def set_weights_epoch(self, epoch: int, lora_id: int | None = None) -> None:
        """Other weights: what was computed with the old ones is not found any more."""
        if epoch < self.epochs.get(lora_id, 0):
            raise ValueError("epochs rise")
        if self.epochs.get(lora_id) == epoch:
            return
        self.epochs[lora_id] = epoch
        scopes = [s for s in self.tree.roots if lora_id is None or s[0] == lora_id]
        self.tree.abandon(scopes)

    def _move_pins(self, shorter: Page, longer: Page) -> None:
        for pin in self.pins:
            if shorter in pin.pages:
                pin.pages = (pin.pages - {shorter}) | {longer}

    def clear_reusable_blocks(self) -> None:
        """Forgets everything; refused while a sequence is open."""
        if self.caches:
            raise StateError(f"{len(self.caches)} KV cache(s) still open")
        self.pins.clear()
        self.tree.clear()


class ModelCommits:
    """What a sequence does with the tree. The attributes are those of `ModelKVCache`."""

    status: Status
    capacity: int
    history_length: int

    def __init__(
        self, manager: Any, scope: Scope, tokens: Sequence[int],
        found: Sequence[tuple[Node, int]], wishes: Wishes,
    ) -> None:  # fmt: skip
        matched, size = sum(count for _, count in found), manager.tokens_per_block
        self.manager, self.scope, self.root = manager, scope, manager.tree.root(scope)
        self.tokens = list(tokens[:matched])  # committed
        self.stopped = False
        self.wishes = wishes
        self.rows = [[page for node, _ in found if (page := node.page) is not None]]
        self.borrowed = matched % size > 0  # the last page is somebody else's until resume
        for ordinal, page in enumerate(self.rows[0]):
            wishes.apply(page, ordinal * size)

    @property
    def outdated(self) -> bool:
        """Whether the weights have changed since it began: it publishes nothing more."""
        return self.manager.tree.roots.get(self.scope) is not self.root

    @property
    def num_committed_tokens(self) -> int:
        """Tokens that can't change any more."""
        return len(self.tokens)

    @property
    def first_own(self) -> int:
        """The first position that may be written: before it all is final, shared or published."""
        size: int = self.manager.tokens_per_block
        ends = [(i + 1) * size for i, page in enumerate(self.rows[0]) if page.published]
        return max([self.history_length // size * size, len(self.tokens), *ends])

    def path(self) -> list[Page]:
        """What the sequence uses of the tree."""
        return [page for page in self.rows[0] if page.node is not None]

    def take_over_borrowed(self) -> bool:
        """The first resume: a partial last block is copied. False if there is no slot for it."""
        if not self.borrowed:
            return True
        if not self.manager.make_room(1):
            return False
        self.manager.tree.touch(self.path())
        size = self.manager.tokens_per_block
        valid = len(self.tokens) % size
        cells = self.rows[0][-1].cells[:valid] + [None] * (size - valid)
        self.rows[0][-1] = Page(cells)
        self.borrowed = False
        return True

    # -- publishing ----------------------------------------------------------------------------

    def commit(self, tokens: Sequence[int], is_end: bool = False) -> None:
        """These tokens follow; every block that became full is published."""
        self._need_commit(tokens)
        before, size = len(self.tokens), self.manager.tokens_per_block
        after = before + len(tokens)
        full, touched = (
            range(before // size, after // size),
            range(before // size, -(-after // size)),
        )
        differ = any(len({row[ordinal] for row in self.rows}) > 1 for ordinal in touched)
        if tokens and differ and not self.outdated:
            raise StateError("the beams disagree")
        copies = tokens and self.manager.commit_min_snapshot and not is_end
        copies = copies and self._will_have_a_tail(tokens) and self.manager.make_room(1)
        if tokens:
            self.tokens += tokens
            self.history_length = max(self.history_length, len(self.tokens))
            for ordinal in full:
                self._publish_full(ordinal)
            if copies:
                self._publish_copy()
        if is_end:
            self.stop_committing()

    def _need_commit(self, tokens: Sequence[int]) -> None:
        if self.status is not Status.ACTIVE:
            raise StateError("the cache is not active")
        after = len(self.tokens) + len(tokens)
        if tokens and self.stopped:
            raise StateError("committing was stopped")
        if after > self.capacity:
            raise ValueError("commit stays inside the capacity")
        snapshots = tokens and self.manager.commit_min_snapshot
        if snapshots and self.history_length not in (len(self.tokens), after):
            raise StateError("history must be what was committed, before or after")

    def stop_committing(self) -> None:
        """No more; a partial last block is published with the page it has."""
        if self.status is Status.CLOSED:
            raise StateError("the cache is closed")
        if self.stopped:
            return
        self.stopped = True
        if (parent := self._parent_of_tail()) is not None:
            ordinal = len(self.tokens) // self.manager.tokens_per_block
            self._enter(parent, ordinal, self.rows[0][ordinal])

    def _publish_full(self, ordinal: int) -> None:
        """A new block enters the tree; of an equal one we take the page that is there."""
        parent = self._parent(ordinal)
        if parent is None:
            return
        node = self.manager.tree.covering(parent, self._block(ordinal))
        if node is None:
            self._enter(parent, ordinal, self.rows[0][ordinal])
        else:
            for row in self.rows:
                row[ordinal] = node.page
            self.wishes.apply(node.page, ordinal * self.manager.tokens_per_block)

    def _will_have_a_tail(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens end inside a block that the tree does not answer for."""
        size, known = self.manager.tokens_per_block, (*self.tokens, *tokens)
        over = len(known) % size
        if not over or self.outdated or not self.manager.enable_partial_commit:
            return False
        node: Node | None = self.root
        for start in range(0, len(known) - over, size):
            node = None if node is None else node.children.get(known[start : start + size])
        return node is None or self.manager.tree.covering(node, known[-over:]) is None

    def _publish_copy(self) -> None:
        """A copy of a partial last block goes into the tree."""
        parent = self._parent_of_tail()
        if parent is not None:
            ordinal, valid = divmod(len(self.tokens), self.manager.tokens_per_block)
            copy = Page(self.rows[0][ordinal].cells[:valid])
            self._enter(parent, ordinal, copy)
            self.manager.tree.touch([*self.path(), copy])

    def _enter(self, parent: Node, ordinal: int, page: Page) -> None:
        self.manager.tree.enter(parent, self._block(ordinal), page)
        self.wishes.publish(page, ordinal, ordinal * self.manager.tokens_per_block)

    def _block(self, ordinal: int) -> tuple[int, ...]:
        size = self.manager.tokens_per_block
        return tuple(self.tokens[ordinal * size : (ordinal + 1) * size])

    def _parent_of_tail(self) -> Node | None:
        """Where a partial last block goes; None if there is none, or the tree has its tokens."""
        ordinal, over = divmod(len(self.tokens), self.manager.tokens_per_block)
        if not over or self.borrowed or not self.manager.enable_partial_commit:
            return None
        parent = self._parent(ordinal)
        if parent is None or self.manager.tree.covering(parent, self._block(ordinal)) is not None:
            return None
        return parent

    def _parent(self, ordinal: int) -> Node | None:
        """The node that a block goes under; None once the weights have changed."""
        if self.outdated:
            return None
        return self.root if ordinal == 0 else self.rows[0][ordinal - 1].node
