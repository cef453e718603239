"""What a sequence publishes for reuse by others."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from kvcore.beams import Beams
from kvcore.checks import as_bool
from kvcore.control.commit import CommitPlan, plan_commit, publish
from kvcore.control.indirection import let_go_of_published, plan_gathering
from kvcore.control.node import TOKEN_BYTES
from kvcore.control.reuse import Claim
from kvcore.control.statistics import KVCacheStats
from kvcore.drops import PlannedDrop
from kvcore.errors import StateError, wrong
from kvcore.ids import div_ceil
from kvcore.tokens import TokenIds, token_view


class Publishing(Beams):
    """The part of a `KVCache` that feeds the prefix tree."""

    __slots__ = ()

    def commit(self, tokens: TokenIds, is_end: bool = False) -> None:
        """Declares the keys and values of the next tokens final and publishes full blocks.

        Parameters
        ----------
        tokens : sequence or array of int [n]
            The ids at the positions from `num_committed_tokens` on. Their keys and values are
            written, or enqueued on the stream the cache is bound to.
        is_end : bool
            Nothing follows: the partial last block is published too (if `enable_partial_commit`),
            and then committing has stopped. Its page must not be written any more.

        Raises
        ------
        ValueError, TypeError
            Wrong ids; more tokens than the capacity holds.
        StateError
            It is not active; committing has stopped; beams have different pages at the tokens;
            `commit_min_snapshot` is set and the history is neither the old nor the new number of
            committed tokens. Nothing changed.

        Notes
        -----
        The history becomes at least the number of committed tokens. A block whose tokens are in
        the tree already is replaced by the page there, and the own page is freed. Records an event;
        a stream that reads the pages waits for it. O(n), about 0.2 ms for 128k tokens without
        events. Tokens of a block that is not full are kept until it is.
        """
        runtime, is_end = self._runtime, as_bool("is_end", is_end)
        with runtime.lock:
            sequence = self._active("commit")
            self._known("commit")
            claim = runtime.control.reuse.claims[sequence]
            image = token_view("tokens", tokens, text_only=claim.text_only)
            if not image:
                if is_end:
                    self._stop()
                return
            self._check_commit(claim, len(image) // TOKEN_BYTES)
            self._publish(image, is_end)

    def stop_committing(self) -> None:
        """Publishes the partial last block, if that is allowed and new, and nothing more after it.

        Idempotent. The page of that block must not be written any more. Raises `StateError` once
        closed.
        """
        with self._runtime.lock:
            self._open()
            self._stop()

    def plan_committed_block_drop(self) -> PlannedDrop | None:
        """A handle that drops from the tree what only this sequence's end needs.

        That is the window of sliding-window groups and the state of recurrent ones; full attention
        keeps its pages. None if nothing was committed or the tree has not all of it.

        Raises
        ------
        StateError
            Committing has not stopped.
        """
        with self._runtime.lock:
            claim = self._runtime.control.reuse.claims[self._open()]
            if not claim.stopped:
                raise StateError("plan_committed_block_drop: call stop_committing() first")
            size = self._runtime.control.seqs.shape.tokens_per_block
            held = claim.blocks * size >= claim.committed
            lost = self._runtime.control.reuse.is_lost(claim)
            return PlannedDrop() if claim.committed and held and not lost else None

    # -- statistics --------------------------------------------------------------------------------

    def commit_pending_stats(self) -> KVCacheStats:
        """Reports what this sequence allocated and reused since the last report, and returns it.

        A scheduler calls it when a step is certain to run; until then shrinking takes back what
        growing counted. All zero with `enable_stats` off or for an excluded sequence.
        """
        with self._runtime.lock:
            return self._runtime.control.stats.commit(self._open())

    def discard_pending_stats(self) -> None:
        """Forgets what is not reported, as `close` does."""
        with self._runtime.lock:
            self._runtime.control.stats.discard(self._open())

    # -- steps -------------------------------------------------------------------------------------

    def _check_commit(self, claim: Claim, count: int) -> None:
        runtime = self._runtime
        if claim.stopped:
            raise StateError("commit: committing has stopped; only an empty commit is allowed now")
        total = claim.committed + count
        if total > self.capacity:
            raise wrong("tokens", f"at most {self.capacity - claim.committed} up to the capacity",
                        count, "resize() first")  # fmt: skip
        if runtime.config.commit_min_snapshot and self.history_length not in (
            claim.committed,
            total,
        ):
            raise StateError(
                f"commit: with commit_min_snapshot the history ({self.history_length}) must be the "
                f"committed tokens before ({claim.committed}) or after ({total}) the call"
            )
        if not runtime.control.reuse.is_lost(claim) and not self._beams_agree(claim, total):
            raise StateError(
                "commit: the beams differ in a block to be published; choose one first with "
                "set_beam_width(1, parents=[winner])"
            )

    def _beams_agree(self, claim: Claim, total: int) -> bool:
        """Whether all beams have one history from the last committed token to the `total`-th."""
        control, sequence = self._runtime.control, self._sequence
        if control.paths is not None and control.seqs.width[sequence] > 1:
            return control.paths.agree(sequence, claim.committed, total)
        size = control.seqs.shape.tokens_per_block
        first, last = claim.committed // size, div_ceil(total, size)
        return control.reuse.rows_agree(sequence, first, last)

    def _publish(self, tokens: memoryview, is_end: bool) -> None:
        """Commits checked tokens: everything that may fail comes before the first change."""
        runtime, sequence = self._runtime, self._sequence
        if runtime.bound_rows:
            blocks = runtime.control.seqs.num_blocks[[sequence]]
            runtime.bound_rows.check(np.array([sequence]), blocks)
        control, snapshot = runtime.control, runtime.config.commit_min_snapshot and not is_end
        plan = plan_commit(control.reuse, sequence, tokens, with_tail=is_end or snapshot)
        copy = None
        with ExitStack() as undo:
            if plan.publishes_tail and not is_end:
                room = control.make_room(1, "snapshot")  # may evict what was just looked up
                plan = plan_commit(control.reuse, sequence, tokens, with_tail=room)
                if plan.publishes_tail:
                    copy, after = control.take_block()
                    undo.enter_context(runtime.given_back_on_failure(sequence, copy, after))
                    own = control.reuse.own_pages(sequence, plan.tail_block, 1)
                    used = np.array([len(plan.tail) // TOKEN_BYTES], np.int32)
                    runtime.copy_blocks(sequence, own, copy, used)
            self._gather_first(plan)
            ready = runtime.ready_to_publish(plan)
        publish(control.reuse, plan, ready, copy)
        if control.paths is not None:
            let_go_of_published(control, sequence, plan.claim.blocks, ready)
        if copy is not None:
            control.stats.copied(1, sequence)
        claim, seqs = plan.claim, control.seqs
        claim.stopped = claim.stopped or is_end
        seqs.set_history_of_one(sequence, max(seqs.history.item(sequence), claim.committed))
        runtime.bound_rows.refresh(sequence)

    def _gather_first(self, plan: CommitPlan) -> None:
        """In indirection mode what is published is beam 0's: the beams' common path moves there."""
        runtime, sequence = self._runtime, self._sequence
        stream, count = self.stream, plan.own.shape[1]
        if runtime.control.paths is None or not count or stream is None or self.beam_width == 1:
            return
        size, first = runtime.control.seqs.shape.tokens_per_block, plan.claim.blocks
        moves = plan_gathering(runtime.control, sequence, first * size, (first + count) * size)
        if moves:
            runtime.token_mover.check()
            runtime.streams.come_home(sequence)
            runtime.token_mover.enqueue(moves, stream)

    def _stop(self) -> None:
        if not self._runtime.control.reuse.claims[self._sequence].stopped:
            self._publish(memoryview(b""), True)
