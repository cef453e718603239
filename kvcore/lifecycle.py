"""Sequences come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.checks import LONGEST, as_items, as_optional_int
from kvcore.config import ReuseScope
from kvcore.control.reuse import Claim, PriorityOf
from kvcore.errors import wrong, wrong_type
from kvcore.kv_cache import KVCache
from kvcore.prefix import checked_scope
from kvcore.retention import Retention, as_retention, as_time
from kvcore.tokens import TokenIds, token_view

if TYPE_CHECKING:
    from kvcore.runtime import Runtime


class Lifecycle:
    """The part of a `KVCacheManager` that makes and closes sequences."""

    _runtime: Runtime

    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: TokenIds | None = None,
        *,
        id: object = None,
        expected_prompt_length: int | None = None,
        retention: Retention | Sequence[Retention] | None = None,
        custom_priority_callback: PriorityOf | None = None,
        now: float | None = None,
        stats_excluded: bool = False,
        text_only: bool | None = None,
    ) -> KVCache:
        """A new sequence: SUSPENDED, width 1, with the pages of the longest known prefix.

        Parameters
        ----------
        reuse_scope : ReuseScope, optional
            Tenant boundary of reuse.
        input_tokens : sequence or array of int [n], optional
            What to look up. At least one token has to be computed for logits, and that rule is the
            caller's: `input_tokens=prompt[:-1], expected_prompt_length=len(prompt)`.
        id : optional
            Anything; kept as `KVCache.id`.
        expected_prompt_length : int, optional
            Tokens of the prompt, checked when beams are widened. Default: `len(input_tokens)`.
        retention : Retention or sequence of them, optional
            How important the pages of the sequence are, those it reuses and those it publishes.
        custom_priority_callback : callable (ordinal, layer group) -> int, optional
            The priority of a page it publishes, in [0, 100]. Ranges of `retention` win. Called
            under the manager's lock, which it must not call.
        now : float, optional
            The present moment of the caller's clock, where `retention` has a `ttl`.
        stats_excluded : bool
            Count nothing of it: a warm-up or dummy sequence.
        text_only : bool, optional
            Refuse digests among its tokens. Default: the manager's `text_only`, which can't be
            loosened.

        Returns
        -------
        KVCache
            Capacity, history and `num_committed_tokens` are the tokens that were found. If they end
            inside a block, the first `resume` copies it into a page of its own.

        Raises
        ------
        CacheCapacityError
            `max_sequences` or `max_rows` is reached. Nothing changed.
        ValueError, TypeError
            Wrong ids, scope or retention; a `ttl` without `now`.

        Notes
        -----
        Enqueues nothing. O(n) of comparing plus O(pages found): about 0.1 ms for 128k cached tokens
        in an int32 array.
        """
        scope = checked_scope(reuse_scope)
        prompt = as_optional_int("expected_prompt_length", expected_prompt_length, 0, LONGEST)
        text_only = self._text_only(text_only)
        given = () if input_tokens is None else input_tokens
        image = token_view("input_tokens", given, text_only=text_only)
        if prompt is None and input_tokens is not None:
            prompt = len(image) // 4
        entries = as_retention(retention)
        if now is not None or any(entry.ttl is not None for entry in entries):
            now = as_time("now", now)
        if custom_priority_callback is not None and not callable(custom_priority_callback):
            raise wrong_type("custom_priority_callback", "a function", custom_priority_callback)
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            reuse = runtime.control.reuse
            match, length = reuse.look_up(scope, image)
            (sequence,) = runtime.control.seqs.create(1)
            claim = Claim(scope, reuse.epochs(scope))
            claim.retention, claim.priority_of = entries, custom_priority_callback
            claim.now, claim.text_only = now, text_only
            reuse.claim(sequence, claim, match, length)
            asked = len(image) // 4
            runtime.control.stats.created(sequence, id, prompt, asked, length, stats_excluded)
            return KVCache(runtime, sequence, prompt, id)

    def _text_only(self, wanted: bool | None) -> bool:
        strict = self._runtime.config.text_only
        if wanted is False and strict:
            raise wrong("text_only", "True or None under a text-only manager", False)
        return strict if wanted is None else wanted

    def create_kv_caches(
        self, expected_prompt_lengths: Sequence[int | None], ids: Sequence[object] | None = None
    ) -> list[KVCache]:
        """One new sequence per expected prompt length, all or none. See `create_kv_cache`.

        Raises `ValueError` if `ids` has another length, `CacheCapacityError` if there is no room.
        """
        prompts = [
            as_optional_int(f"expected_prompt_lengths[{i}]", length, 0, LONGEST)
            for i, length in enumerate(
                as_items("expected_prompt_lengths", expected_prompt_lengths, "an int or None")
            )
        ]
        names = [None] * len(prompts) if ids is None else as_items("ids", ids, "an id")
        if len(names) != len(prompts):
            raise wrong("ids", f"{len(prompts)} entries", len(names))
        return self._create(prompts, names)

    def _create(self, prompts: list[int | None], ids: Sequence[object]) -> list[KVCache]:
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            sequences = runtime.control.seqs.create(len(prompts))
            reuse, scope = runtime.control.reuse, ReuseScope()
            epochs = reuse.epochs(scope)
            for sequence in sequences:
                text_only = runtime.config.text_only
                reuse.claims[sequence] = Claim(scope, epochs, text_only=text_only)
            for sequence, prompt, id in zip(sequences, prompts, ids, strict=True):
                runtime.control.stats.created(sequence, id, prompt, 0, 0, excluded=False)
            return [
                KVCache(runtime, sequence, prompt, id)
                for sequence, prompt, id in zip(sequences, prompts, ids, strict=True)
            ]

    def close_kv_caches(self, kv_caches: Iterable[KVCache]) -> None:
        """Closes many sequences; those already closed are left out.

        Raises `TypeError` or `ValueError`, with nothing closed, for what is no handle of this
        manager.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            still_open = runtime.handles.still_open(kv_caches)
            sequences = runtime.handles.numbers_of(still_open)
            active = sequences[runtime.control.seqs.active[sequences]]
            for sequence in sequences.tolist():
                runtime.end_publishing(sequence)
            if active.size:
                runtime.shrink(active, np.zeros(active.size, np.int32))
            for kv in still_open:
                kv.close()
