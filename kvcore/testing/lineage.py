"""What a token's content depends on: itself and everything before it, as one number."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

Lineage = list[int | None]
"""What one beam wrote or inherited: a key per position, None where nothing is promised."""


class Keys:
    """Numbers content: equal keys are equal prefixes of tokens under equal weights and scopes.

    >>> keys = Keys()
    >>> first = keys.chain("tenant", [5, 6])
    >>> keys.chain("tenant", [5, 7])[0] == first[0], keys.chain("another", [5])[0] in first
    (True, False)
    >>> keys.tokens("tenant", [*first, keys.new()])
    [5, 6]
    """

    def __init__(self) -> None:
        self._last = 0
        self._after: dict[tuple[Hashable, int], int] = {}
        self._made_of: dict[int, tuple[Hashable, int]] = {}

    def new(self) -> int:
        """A key of content that nothing else equals."""
        self._last += 1
        return self._last

    def chain(self, before: Hashable, tokens: Iterable[int]) -> list[int]:
        """The keys of `tokens` that come after the content `before`: a key, or a root's name."""
        found = []
        for token in tokens:
            link = before, token
            if link not in self._after:
                self._after[link] = self.new()
                self._made_of[self._last] = link
            before = self._after[link]
            found.append(before)
        return found

    def tokens(self, root: Hashable, lineage: Sequence[int | None]) -> list[int]:
        """The tokens that a lineage spells from its root on, as far as it does."""
        spelled: list[int] = []
        for key in lineage:
            before, token = self._made_of.get(key or 0, (None, 0))
            if key is None or before != root:
                break
            spelled.append(token)
            root = key
        return spelled
