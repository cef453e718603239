"""The beams of a sequence: widen, reorder, shrink."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvcore.checks import as_int, as_items
from kvcore.control.beams import plan_reordering
from kvcore.control.indirection import plan_redirection
from kvcore.control.rebinding import BeamPlan, rows_and_pages
from kvcore.control.widening import plan_widening
from kvcore.errors import InternalError, OutOfPagesError, StateError, wrong
from kvcore.handle import Handle
from kvcore.ids import NO_TICKET, Ticket


class Beams(Handle):
    """The part of a `KVCache` that follows the hypotheses of a beam search.

    In fork mode a beam's row of the page table is complete in itself, so any paged attention kernel
    can read it. In indirection mode (`beam_mode="indirection"`) beams keep their pages, rows of
    beams after the first are -1 in the blocks that all share, and
    `Batch.cache_indirection` says which beam's page holds each position.
    """

    __slots__ = ()

    @property
    def beam_width(self) -> int:
        """Live beams, 0 once closed.

        Assigning is `set_beam_width` that raises `OutOfPagesError` instead of answering False: it
        says how many pages, or table rows, are missing.
        """
        return int(self._runtime.control.seqs.width[self._sequence]) if self._sequence >= 0 else 0

    @beam_width.setter
    def beam_width(self, width: int) -> None:
        with self._runtime.lock:
            if not self.set_beam_width(width):
                raise self._no_room(width)

    def set_beam_width(
        self, width: int, parents: Sequence[int] | None = None, *, block: bool = False
    ) -> bool:
        """Widens or narrows to `width` beams in one transaction.

        Parameters
        ----------
        width : int
            In `[1, max_beam_width]`.
        parents : sequence of int [width], optional
            The old beam that each new one continues; may repeat. Default: growing, old beams stay
            and the new ones continue beam 0; shrinking, the first `width` survive.
        block : bool
            As for `KVCache.resize`.

        Returns
        -------
        bool
            False, with nothing changed, if pages or table rows are short; retry once some are free.

        Raises
        ------
        ValueError, TypeError
            Wrong width or parents.
        StateError
            Growing a suspended cache or one whose prompt is not computed; partial commit is on.

        Notes
        -----
        Full blocks of the history are shared. Every beam gets its own copy of the blocks after,
        copied on the bound stream by one launch per layer group. O(beams * blocks) on the host.
        In indirection mode beams that are added later get pages and no copies; when beams leave,
        what the others read in their pages is moved token by token, which needs declared layouts.
        Where beams leave, copies and moves go into pages that survivors have no use for: a driver
        error after the first launch leaves those of the others undefined, and all else unchanged.
        """
        runtime = self._runtime
        with runtime.lock:
            sequence = self._known("set_beam_width")
            old = runtime.control.seqs.width.item(sequence)
            width = as_int("width", width, 1, runtime.config.max_beam_width)
            if width == old and parents is None:
                return True
            if parents is None:
                chosen = tuple(range(min(width, old))) + (0,) * (width - old)
            else:
                chosen = _checked_parents(parents, width, old)
            if width == old and chosen == tuple(range(old)):
                return True
            self._check_width_change(width, old)
            valid = runtime.control.seqs.capacity.item(sequence)
            return runtime.retry(partial(self._rebind, chosen, valid), block)

    def reorder_beams(self, parents: Sequence[int], *, valid_tokens: int | None = None) -> None:
        """Makes beam i continue what beam `parents[i]` was, for all beams at once.

        Parameters
        ----------
        parents : sequence of int [beam_width]
            Old beams; may repeat. The identity does nothing.
        valid_tokens : int, optional
            Positions from here on hold nothing worth copying. Default: the capacity.

        Raises
        ------
        ValueError, TypeError
            Wrong parents or `valid_tokens`; nothing changed.
        StateError
            It is not active.

        Notes
        -----
        Takes no page. Full blocks of the history are passed by reference and freed when no beam
        reaches them; blocks after it are copied only for the second and further children of a
        parent, over those of beams without children: a driver error after the first launch leaves
        these undefined, and all else unchanged. In indirection mode nothing is copied.
        """
        runtime = self._runtime
        with runtime.lock:
            self._active("reorder_beams")
            self._known("reorder_beams")
            width = self.beam_width
            chosen = _checked_parents(parents, width, width)
            if valid_tokens is None:
                valid_tokens = self.capacity
            valid_tokens = as_int("valid_tokens", valid_tokens, self.history_length, self.capacity)
            if chosen != tuple(range(width)) and not self._rebind(chosen, valid_tokens):
                raise InternalError("reordering beams asked for pages")

    def collapse(self, winner: int) -> None:
        """Ends the search: beam `winner` is the only one left.

        `set_beam_width(1, parents=[winner])`, which can't be short of pages. In indirection mode
        this gathers the winner's path into beam 0's pages, by one launch for all layers and roles
        of one layout. Its blocks can be committed afterwards.

        Raises
        ------
        ValueError, TypeError
            No such beam.
        StateError
            See `set_beam_width`.
        """
        if not self.set_beam_width(1, parents=[winner]):
            raise InternalError("collapsing beams asked for pages")

    def settle(self) -> None:
        """BLOCKS until the parents of all beam steps of this cache have arrived on the host.

        The one call that waits: afterwards page indices can be asked for and pages that no beam
        reaches are free. Returns at once where nothing is on its way.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.parents.settle(self._open())

    def _check_width_change(self, width: int, old: int) -> None:
        runtime, sequence = self._runtime, self._sequence
        if runtime.config.enable_partial_commit:
            raise StateError(
                "beam width: beams need enable_partial_commit=False, because their last block is "
                "still being written; set it in the KVCacheManagerConfig"
            )
        if width <= old:
            return
        if not runtime.control.seqs.active.item(sequence):
            raise StateError("beam width: only an active cache can be widened; resume() it first")
        prompt, history = self.expected_prompt_length, runtime.control.seqs.history.item(sequence)
        if history < (1 if prompt is None else prompt):
            raise StateError(
                f"beam width: the prompt is not computed yet: history_length is {history}, "
                f"expected_prompt_length {prompt}; widen when generation starts, after "
                "resize(None, prompt length)"
            )

    def _no_room(self, width: int) -> OutOfPagesError:
        control = self._runtime.control
        rows, pages = rows_and_pages(control, self._sequence, width)
        who, free = f"beam_width: {width} beams", control.seqs.num_free_rows
        if rows <= free:
            return control.refusal(who, pages)
        return OutOfPagesError(
            f"{who} take {rows} more table rows, {free} of max_rows={control.seqs.shape.max_rows} "
            f"are free: {rows - free} missing; close or narrow other caches, or raise max_rows"
        )

    def _rebind(self, parents: tuple[int, ...], valid_tokens: int) -> bool:
        runtime, sequence = self._runtime, self._sequence
        if runtime.bound_rows:
            blocks = runtime.control.seqs.num_blocks[[sequence]]
            runtime.bound_rows.check(np.array([sequence]), blocks)
        plan = self._plan(parents, valid_tokens)
        if plan is None:
            return False
        ticket = self._copy(plan)
        before = self.beam_width
        plan.publish(runtime.control, ticket)
        stats = runtime.control.stats
        stats.rebound(sequence, before, plan.width, plan.shared, plan.copied_blocks)
        if runtime.bound_rows:
            runtime.bound_rows.release(sequence, first_beam=plan.width)
            runtime.bound_rows.refresh(sequence)
        return True

    def _plan(self, parents: tuple[int, ...], valid_tokens: int) -> BeamPlan | None:
        control, sequence = self._runtime.control, self._sequence
        if control.seqs.width.item(sequence) == 1:
            return plan_widening(control, sequence, len(parents), valid_tokens)
        plan = plan_reordering if control.paths is None else plan_redirection
        return plan(control, sequence, parents, valid_tokens)

    def _copy(self, plan: BeamPlan) -> Ticket:
        """Enqueues the plan's copies; the moment after them, if somebody needs to know.

        A failure gives its slots back.
        """
        runtime, stream = self._runtime, self.stream
        enqueued = False
        try:
            if stream is not None:  # else it was never resumed and has no page
                if plan.moves:
                    runtime.token_mover.check()
                runtime.streams.come_home(self._sequence)
                for tickets in plan.tickets:
                    runtime.fences.wait(stream, tickets)
                enqueued = True
                runtime.copy_pages(plan.copies, stream)
                runtime.token_mover.enqueue(plan.moves, stream)
            return runtime.streams.moment(self._sequence) if plan.frees else NO_TICKET
        except BaseException:
            after = runtime.streams.moment(self._sequence) if enqueued else None
            plan.cancel(runtime.control, after)
            raise


def _checked_parents(parents: Sequence[int], length: int, old_width: int) -> tuple[int, ...]:
    some = as_items("parents", parents, "an int")
    chosen = tuple(
        [as_int(f"parents[{i}]", parent, 0, old_width - 1) for i, parent in enumerate(some)]
    )
    if len(chosen) != length:
        raise wrong("parents", f"{length} entries, one per beam", len(chosen))
    return chosen
