"""The prefix tree as dictionaries: what is published, what a prompt finds, what goes first.

One node is one block of one chain. Every question is answered by walking all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvcore.ids import div_ceil
from kvcore.retention import DEFAULT_PRIORITY

Scope = tuple[int | None, int | None]
"""LoRA id and salt: one tenant's prompts."""

Choice = Callable[[list["Node"]], "Node"]
"""Takes one of several children that begin like a query for equally long."""


class Page:
    """One page; `cells[i]` is the key last written to token i of its block, None if undefined."""

    def __init__(self, cells: Iterable[int | None]) -> None:
        self.cells = list(cells)
        self.node: Node | None = None  # where it can be found
        self.published = False  # whether it ever could
        self.priority = DEFAULT_PRIORITY
        self.deadline: float | None = None  # when the priority ends
        self.stamp = 0  # when a sequence last let go of it


class Node:
    """A published block: its tokens after everything above it, and the page that has them."""

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], page: Page | None) -> None:
        self.parent, self.tokens, self.page = parent, tokens, page
        self.children: dict[tuple[int, ...], Node] = {}

    @property
    def root(self) -> Node:
        """The node above everything."""
        return self if self.parent is None else self.parent.root

    def below(self) -> Iterator[Node]:
        """Every node under this one."""
        for child in self.children.values():
            yield child
            yield from child.below()


class ModelTree:
    """Every published block, by reuse scope.

    Parameters
    ----------
    tokens_per_block : int
        T.
    partial_reuse : bool
        Whether a match may end inside a block.
    backoff : int
        Tokens taken off the end of every match.

    Examples
    --------
    >>> tree = ModelTree(tokens_per_block=2, partial_reuse=True, backoff=0)
    >>> top = tree.root((7, None))
    >>> first = tree.enter(top, (1, 2), Page([7, 8]))
    >>> second = tree.enter(first, (3,), Page([9, None]))
    >>> [matched for _, matched in tree.match((7, None), [1, 2, 3])]
    [2, 1]
    >>> [matched for _, matched in tree.match((7, None), [1, 9])]
    [1]
    >>> tree.match((None, 7), [1, 2, 3])
    []
    """

    def __init__(self, *, tokens_per_block: int, partial_reuse: bool, backoff: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.partial_reuse = partial_reuse
        self.backoff = backoff
        self.roots: dict[Scope, Node] = {}
        self.dead: list[Page] = []  # nobody can find them: they go first
        self.replaced: Callable[[Page, Page], None] = lambda shorter, longer: None
        self._clock = 0

    def root(self, scope: Scope) -> Node:
        """Where the chains of a scope begin."""
        return self.roots.setdefault(scope, Node(None, (), None))

    def nodes(self) -> list[Node]:
        """Every block that can be found."""
        return [node for root in self.roots.values() for node in root.below()]

    def pages(self) -> list[Page]:
        """The page of every block that can be found."""
        return [page for node in self.nodes() if (page := node.page) is not None]

    # -- finding -------------------------------------------------------------------------------

    def match(
        self, scope: Scope, tokens: Sequence[int], choose: Choice | None = None
    ) -> list[tuple[Node, int]]:
        """The blocks a prompt finds, each with how many of its tokens count."""
        size, found = self.tokens_per_block, []
        node = self.roots.get(scope)
        for start in range(0, len(tokens), size):
            block = tuple(tokens[start : start + size])
            if node is None:
                break
            above, node = node, node.children.get(block)
            if node is not None:
                found.append((node, len(block)))
            elif self.partial_reuse:
                found += self._begin_like(above, block, choose)
        return self._back_off(found)

    def _begin_like(
        self, above: Node, block: tuple[int, ...], choose: Choice | None
    ) -> list[tuple[Node, int]]:
        """The child with the longest common start, if any has one."""
        longest = max((common(child.tokens, block) for child in above.children.values()), default=0)
        if not longest:
            return []
        equal = [c for c in above.children.values() if common(c.tokens, block) == longest]
        return [(equal[0] if choose is None or len(equal) == 1 else choose(equal), longest)]

    def _back_off(self, found: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        left = max(0, sum(matched for _, matched in found) - self.backoff)
        found = found[: div_ceil(left, self.tokens_per_block)]
        if found:
            node, _ = found[-1]
            found[-1] = node, left - (len(found) - 1) * self.tokens_per_block
        return found

    # -- publishing ----------------------------------------------------------------------------

    def covering(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """The block below `parent` that already answers for these tokens."""
        if len(tokens) == self.tokens_per_block:
            return parent.children.get(tokens)
        begun = (c for c in parent.children.values() if c.tokens[: len(tokens)] == tokens)
        return next(begun, None)

    def enter(self, parent: Node, tokens: tuple[int, ...], page: Page) -> Node:
        """Publishes a page; the partial block that these tokens continue makes way."""
        for shorter in list(parent.children.values()):
            if shorter.tokens == tokens[: len(shorter.tokens)]:
                self._unlink(shorter)
                if shorter.page is not None:
                    self.replaced(shorter.page, page)
        node = parent.children[tokens] = Node(parent, tokens, page)
        page.node, page.published = node, True
        return node

    def _unlink(self, node: Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.tokens]
        if node.page is not None:
            node.page.node = None

    # -- forgetting ----------------------------------------------------------------------------

    def touch(self, pages: Iterable[Page]) -> None:
        """Somebody lets go of a path: all of it was used last now."""
        self._clock += 1
        for page in pages:
            page.stamp = self._clock

    def evictable(self, held: Collection[Page]) -> list[Page]:
        """What nobody holds; all of it can go."""
        return [page for page in self.dead + self.pages() if page not in held]

    def evict(self, held: Collection[Page]) -> None:
        """Gives up one page: a dead one, else the least wanted that has no block below."""
        dead = [page for page in self.dead if page not in held]
        if dead:
            self.dead.remove(min(dead, key=_worth))
            return
        tips = [
            node.page
            for node in self.nodes()
            if node.page is not None and node.page not in held and not node.children
        ]
        victim = min(tips, key=_worth).node
        if victim is not None:
            self._unlink(victim)

    def expire(self, now: float) -> None:
        """Priorities whose time has come go back to the default."""
        for page in self.pages():
            if page.deadline is not None and page.deadline <= now:
                page.priority, page.deadline = DEFAULT_PRIORITY, None

    def abandon(self, scopes: Iterable[Scope]) -> None:
        """Nothing published so far in these scopes is found again."""
        for scope in scopes:
            for node in list(self.roots.pop(scope).below()):
                if node.page is not None:
                    node.page.node = None
                    self.dead.append(node.page)

    def clear(self) -> None:
        """Gives up everything."""
        self.abandon(list(self.roots))
        self.dead.clear()


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The length of the common start.

    >>> common((1, 2, 3), (1, 2, 4, 3))
    2
    """
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def _worth(page: Page) -> tuple[int, int]:
    return page.priority, page.stamp
