"""The specification of the cache as a program: lists of page objects, no arrays, no cleverness.

`ModelManager` takes the public calls of `kvcore.KVCacheManager` and answers what the real one must
answer: the value, `False` where pages are short, or the type of the exception. A slot has no number
here. A `Page` is an object, two table cells mean the same page iff they hold the same object, and
what is free follows from what can be reached. It covers full attention with `beam_mode="fork"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import CacheCapacityError, StateError
from kvcore.ids import Status, div_ceil
from kvcore.testing.model_reuse import ModelCommits, ModelReuse, Wishes
from kvcore.testing.model_tree import Choice, Node, Page, Scope

if TYPE_CHECKING:
    from kvcore.config import ReuseScope
    from kvcore.manager import KVCacheManager


class ModelKVCache(ModelCommits):
    """One sequence: a list of pages per beam, its committed tokens, and two numbers."""

    def __init__(
        self,
        manager: ModelManager,
        prompt: int | None,
        scope: Scope = (None, None),
        tokens: Sequence[int] = (),
        found: Sequence[tuple[Node, int]] = (),
        wishes: Wishes | None = None,
    ) -> None:
        super().__init__(manager, scope, tokens, found, wishes or Wishes())
        self.prompt = prompt
        self.status = Status.SUSPENDED
        self.capacity = self.history_length = len(self.tokens)

    @property
    def is_active(self) -> bool:
        """Whether pages may be used."""
        return self.status is Status.ACTIVE

    @property
    def beam_width(self) -> int:
        """Live beams; 0 once closed."""
        return len(self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks that the capacity takes."""
        blocks: int = div_ceil(self.capacity, self.manager.tokens_per_block)
        return blocks

    @property
    def pages(self) -> set[Page]:
        """The distinct pages of all beams."""
        return {page for row in self.rows for page in row}

    # -- life ----------------------------------------------------------------------------------

    def resume(self) -> bool:
        """False while others hold more than `max_util_for_resume` of the slots, or pages are short.

        The first one makes a partial last block our own.
        """
        if self.status is not Status.SUSPENDED:
            raise StateError("resume needs a suspended cache")
        others = self.manager.held_by_others(self)
        if len(others) / self.manager.slots > self.manager.max_util_for_resume:
            return False
        if not self.take_over_borrowed():
            return False
        self.status = Status.ACTIVE
        return True

    def suspend(self) -> None:
        """Hides the pages; they stay."""
        self._need_active()
        self.status = Status.SUSPENDED

    def close(self) -> None:
        """Publishes the tail and gives everything back; closing twice is nothing."""
        if self.status is not Status.CLOSED:
            self.stop_committing()
            self.manager.tree.touch(self.path())
            self.status = Status.CLOSED
            self.rows, self.tokens, self.capacity, self.history_length = [], [], 0, 0
            self.manager.caches.remove(self)

    # -- size ----------------------------------------------------------------------------------

    def resize(self, capacity: int | None = None, history_length: int | None = None) -> bool:
        """Both at once or neither; False if pages are short."""
        self._need_active()
        capacity = self.capacity if capacity is None else capacity
        history = self.history_length if history_length is None else history_length
        self._need_sizes(capacity, history)
        if not self.manager.make_room(self._missing(capacity)):
            return False
        self._set_sizes(capacity, history)
        return True

    def _need_sizes(self, capacity: int, history: int) -> None:
        longest = self.manager.max_seq_len
        if not self.history_length <= history <= capacity:
            raise ValueError("history_length <= new history <= new capacity")
        if longest is not None and capacity > longest:
            raise ValueError("new capacity <= max_seq_len")

    def _missing(self, capacity: int) -> int:
        """Pages to take: every beam writes its own new blocks."""
        blocks = div_ceil(capacity, self.manager.tokens_per_block)
        return max(0, blocks - self.num_blocks) * self.beam_width

    def _set_sizes(self, capacity: int, history: int) -> None:
        size = self.manager.tokens_per_block
        blocks = div_ceil(capacity, size)
        for row in self.rows:
            del row[blocks:]
            while len(row) < blocks:
                row.append(Page([None] * size))
        self._forget_from(min(capacity, self.capacity))
        self.capacity, self.history_length = capacity, history

    def _forget_from(self, position: int) -> None:
        """What was written from `position` on is not promised to anybody any more."""
        size = self.manager.tokens_per_block
        for row in self.rows:
            for place in range(position, len(row) * size):
                row[place // size].cells[place % size] = None

    # -- beams ---------------------------------------------------------------------------------

    def set_beam_width(self, width: int, parents: Sequence[int] | None = None) -> bool:
        """Row i becomes the old row `parents[i]`: by default itself, or row 0 for a new one."""
        self._need_open()
        if not 1 <= width <= self.manager.max_beam_width:
            raise ValueError("1 <= width <= max_beam_width")
        if width == self.beam_width and parents is None:
            return True
        if parents is None:
            parents = [i if i < self.beam_width else 0 for i in range(width)]
        self._need_parents(parents, width)
        if list(parents) == list(range(self.beam_width)):
            return True
        self._need_beams(width)
        more_rows = max(0, width - self.beam_width)
        more_pages = more_rows * (self.num_blocks - self._shared_blocks())
        if more_rows > self.manager.free_rows or not self.manager.make_room(more_pages):
            return False
        self._become(parents, self.capacity)
        return True

    def reorder_beams(self, parents: Sequence[int], valid_tokens: int | None = None) -> None:
        """Row i becomes the old row `parents[i]`; nothing is kept from `valid_tokens` on."""
        self._need_active()
        self._need_parents(parents, self.beam_width)
        valid = self.capacity if valid_tokens is None else valid_tokens
        if not self.history_length <= valid <= self.capacity:
            raise ValueError("history_length <= valid_tokens <= capacity")
        self._become(parents, valid)

    def _shared_blocks(self) -> int:
        """Blocks whose tokens are all final: rows may share them; behind them each row writes."""
        size: int = self.manager.tokens_per_block
        return self.history_length // size

    def _become(self, parents: Sequence[int], valid: int) -> None:
        """Shared blocks by reference; of the rest, the first child inherits and the others copy."""
        shared = self._shared_blocks()
        inherited: set[int] = set()
        rows = []
        for parent in parents:
            row = list(self.rows[parent])
            if parent in inherited:
                row[shared:] = [Page(page.cells) for page in row[shared:]]
            inherited.add(parent)
            rows.append(row)
        self.rows = rows
        self._forget_from(valid)

    # -- content -------------------------------------------------------------------------------

    def write(self, beam: int, position: int, key: int) -> None:
        """What an engine does with the page of that position."""
        size = self.manager.tokens_per_block
        self.rows[beam][position // size].cells[position % size] = key

    def content(self, beam: int) -> list[int | None]:
        """The keys that a reader of row `beam` finds, one per position up to the capacity."""
        return [key for page in self.rows[beam] for key in page.cells][: self.capacity]

    # -- refusals ------------------------------------------------------------------------------

    def _need_open(self) -> None:
        if self.status is Status.CLOSED:
            raise StateError("the cache is closed")

    def _need_active(self) -> None:
        if not self.is_active:
            raise StateError("the cache is not active")

    def _need_beams(self, width: int) -> None:
        if self.manager.enable_partial_commit:
            raise StateError("beams need enable_partial_commit=False")
        if width > self.beam_width:
            self._need_active()
            if self.history_length < (1 if self.prompt is None else self.prompt):
                raise StateError("the prompt is not computed yet")

    def _need_parents(self, parents: Sequence[int], count: int) -> None:
        if len(parents) != count or not all(0 <= p < self.beam_width for p in parents):
            raise ValueError("one parent per row, each a live beam")


class ModelManager(ModelReuse):
    """Every open sequence, the published prefixes, and the sizes that limit them.

    Examples
    --------
    >>> m = ModelManager(tokens_per_block=4, slots=6, max_beam_width=2)
    >>> kv = m.create_kv_cache()
    >>> kv.resume(), kv.resize(10, 10), m.free
    (True, True, 3)
    >>> kv.set_beam_width(2), m.free  # two full blocks are shared, the third becomes two
    (True, 2)
    >>> kv.rows[0][1] is kv.rows[1][1], kv.rows[0][2] is kv.rows[1][2]
    (True, False)
    """

    def __init__(
        self,
        *,
        tokens_per_block: int,
        slots: int,
        max_beam_width: int = 1,
        max_seq_len: int | None = None,
        max_rows: int = 1 << 30,
        max_sequences: int = 1 << 30,
        max_util_for_resume: float = 1.0,
        enable_partial_commit: bool = False,
        enable_partial_reuse: bool = True,
        commit_min_snapshot: bool = False,
        reuse_match_backoff: int = 0,
    ) -> None:
        super().__init__(
            tokens_per_block=tokens_per_block,
            partial_reuse=enable_partial_reuse,
            partial_commit=enable_partial_commit,
            min_snapshot=commit_min_snapshot,
            backoff=reuse_match_backoff,
        )
        self.slots = slots
        self.max_beam_width = max_beam_width
        self.max_seq_len = max_seq_len
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.max_util_for_resume = max_util_for_resume
        self.caches: list[ModelKVCache] = []

    @classmethod
    def of(cls, manager: KVCacheManager) -> ModelManager:
        """The model of a manager on which nothing is open yet."""
        config = manager.config
        return cls(
            tokens_per_block=config.tokens_per_block,
            slots=manager.get_storage_statistics()[0].total,
            max_beam_width=config.max_beam_width,
            max_seq_len=config.max_seq_len,
            max_rows=manager._runtime.control.seqs.shape.max_rows,
            max_sequences=config.max_sequences,
            max_util_for_resume=config.max_util_for_resume,
            enable_partial_commit=config.enable_partial_commit,
            enable_partial_reuse=config.enable_partial_reuse,
            commit_min_snapshot=config.commit_min_snapshot,
            reuse_match_backoff=config.reuse_match_backoff,
        )

    @property
    def free_rows(self) -> int:
        """Table rows to be had: every beam of every open sequence has one."""
        return self.max_rows - sum(cache.beam_width for cache in self.caches)

    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Sequence[int] | None = None,
        *,
        choose: Choice | None = None,
        **wishes: Any,
    ) -> ModelKVCache:
        """One sequence with what the tree has of its prompt."""
        asked = Wishes(**wishes)
        self._need_room(1)
        scope, tokens = self.scope(reuse_scope), list(input_tokens or ())
        found = self.tree.match(scope, tokens, choose)
        prompt = None if input_tokens is None else len(tokens)
        self.caches.append(ModelKVCache(self, prompt, scope, tokens, found, asked))
        return self.caches[-1]

    def create_kv_caches(self, prompts: Sequence[int | None]) -> list[ModelKVCache]:
        """All of them or none."""
        if any(prompt is not None and prompt < 0 for prompt in prompts):
            raise ValueError("a prompt has 0 tokens or more")
        self._need_room(len(prompts))
        made = [ModelKVCache(self, prompt) for prompt in prompts]
        self.caches += made
        return made

    def _need_room(self, count: int) -> None:
        if count > min(self.free_rows, self.max_sequences - len(self.caches)):
            raise CacheCapacityError("no table row, or no sequence, is left")

    def advance(
        self, caches: Sequence[ModelKVCache], n: int | Sequence[int], history: Any = None
    ) -> bool:
        """Every capacity grows by its n, or none does."""
        counts = [n] * len(caches) if isinstance(n, int) else list(n)
        finals = [cache.history_length for cache in caches] if history is None else list(history)
        self._need_batch(caches, counts, finals)
        if any(count < 0 for count in counts):
            raise ValueError("advance grows")
        sizes = [cache.capacity + count for cache, count in zip(caches, counts, strict=True)]
        for cache, size, final in zip(caches, sizes, finals, strict=True):
            cache._need_sizes(size, final)
        missing = sum(cache._missing(size) for cache, size in zip(caches, sizes, strict=True))
        if not self.make_room(missing):
            return False
        for cache, size, final in zip(caches, sizes, finals, strict=True):
            cache._set_sizes(size, final)
        return True

    def truncate(self, caches: Sequence[ModelKVCache], capacities: Sequence[int]) -> None:
        """Every capacity shrinks to its new value, not below the history."""
        self._need_batch(caches, capacities, capacities)
        for cache, size in zip(caches, capacities, strict=True):
            if not cache.history_length <= size <= cache.capacity:
                raise ValueError("history_length <= new capacity <= capacity")
        for cache, size in zip(caches, capacities, strict=True):
            cache._set_sizes(size, cache.history_length)

    def close_kv_caches(self, caches: Sequence[ModelKVCache]) -> None:
        """Closes each."""
        for cache in caches:
            cache.close()

    def _need_batch(self, caches: Sequence[ModelKVCache], *lists: Sequence[int]) -> None:
        if any(len(values) != len(caches) for values in lists):
            raise ValueError("one number per cache")
        if len(set(caches)) != len(caches) or not all(cache.is_active for cache in caches):
            raise ValueError("distinct active caches")

    def shutdown(self) -> None:
        """Refused while anything is open."""
        if self.caches:
            raise StateError(f"{len(self.caches)} KV caches are open")
