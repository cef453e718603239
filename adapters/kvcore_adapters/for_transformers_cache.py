"""The side of a cache that transformers sees: layers, lengths, masks; what it may ask and not."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Never, Self

from transformers.cache_utils import Cache, CacheLayerMixin

import kvcore as k
from kvcore.errors import wrong
from kvcore_adapters.for_transformers_rows import PagedRows


class PagedLayer(CacheLayerMixin):
    """One layer's view of the rows of a batch."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: PagedRows, index: int) -> None:
        self._rows, self._index = rows, index

    @property
    def is_initialized(self) -> bool:
        """Whether there is a token."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> Any:
        """All keys, dense `[rows, heads, length, dim]`, read from the pages; None if empty."""
        return self._rows.read(self._index, ("key",))[0] if self.is_initialized else None

    @property
    def values(self) -> Any:
        """All values, as `keys`."""
        return self._rows.read(self._index, ("value",))[0] if self.is_initialized else None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: pages come with tokens."""

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes new keys and values; all of them so far, dense."""
        return self._rows.update(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens of this layer."""
        return self._rows.lengths[self._index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next `update` returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum but the pages."""
        return -1

    def offload(self) -> Never:
        """Refused: tiers are the manager's business."""
        raise NotImplementedError("offload: pages stay where their manager keeps them")

    prefetch = offload

    def _whole(self, *args: object) -> Never:
        raise NotImplementedError("layers share their pages' table: call it on the cache")

    reset = reorder_cache = crop = _whole


class PagedCache(Cache):
    """A transformers cache on one kvcore manager. Made by the classes below."""

    def __init__(self, rows: PagedRows, *, owns_manager: bool) -> None:
        self._rows, self._owns_manager = rows, owns_manager
        super().__init__(layers=[PagedLayer(rows, i) for i in range(rows.num_layers)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def manager(self) -> k.KVCacheManager:
        """Whose pages they are."""
        return self._rows.manager

    @property
    def sequences(self) -> tuple[k.KVCache, ...]:
        """The sequences, one per `num_beams` rows of the batch; empty before the first token."""
        return tuple(self._rows.sequences)

    @property
    def num_beams(self) -> int:
        """Neighbouring rows that share a sequence."""
        return self._rows.group

    def reorder_cache(self, beam_idx: Any) -> None:
        """Makes row i of the batch continue row `beam_idx[i]`, one of its own sequence.

        Raises `ValueError`, with nothing changed, for a row of another sequence.
        """
        self._rows.reorder(beam_idx.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens of every row; 0 does nothing.

        Raises
        ------
        ValueError
            It is positive, or more than there is.
        NotImplementedError
            Final tokens would go: those before the latest `reorder_cache` or widening of beams,
            and what was reused or published.
        """
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            expected = f"a value in [-{self.get_seq_length()}, 0]"
            raise wrong("tokens_to_remove", expected, tokens_to_remove)
        self._rows.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Frees all pages; the cache is as new, but reuses nothing."""
        self._rows.reset()

    def close(self) -> None:
        """Frees all pages, and the manager if the cache made it. Idempotent."""
        self._rows.reset()
        if self._owns_manager:
            self.manager.shutdown()

    def batch_repeat_interleave(self, repeats: int) -> Never:
        """Refused."""
        raise NotImplementedError(
            "batch_repeat_interleave: rows are repeated by num_beams, when their tokens differ"
        )

    def batch_select_indices(self, indices: object) -> Never:
        """Refused."""
        raise NotImplementedError(
            "batch_select_indices: rows stay until the cache is closed; use reorder_cache"
        )
