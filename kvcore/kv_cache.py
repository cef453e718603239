"""`KVCache`: the handle on one sequence and its beams."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_bool, as_int
from kvcore.errors import StateError, wrong, wrong_type
from kvcore.ids import div_ceil
from kvcore.publishing import Publishing

if TYPE_CHECKING:
    from kvcore.runtime import Runtime

Int32 = NDArray[np.int32]


class KVCache(Publishing):
    """The cached keys and values of one sequence, made by `KVCacheManager.create_kv_cache`.

    A cache is SUSPENDED when made, ACTIVE between `resume` and `suspend`, CLOSED after `close`.
    Only an active one grows and has page indices. One thread drives one cache at a time. Calls
    either do all of their work or change nothing; where pages are short they return False.

    All work a cache enqueues itself runs on the stream bound at `resume`, in order, without
    blocking.
    """

    __slots__ = ()

    def __init__(
        self, runtime: Runtime, sequence: int, expected_prompt_length: int | None, id: object
    ) -> None:
        self._runtime, self._sequence = runtime, sequence
        self.expected_prompt_length, self.id = expected_prompt_length, id
        runtime.handles.add(sequence, self)

    def __repr__(self) -> str:
        if self._sequence < 0:
            return "<KVCache closed>"
        return (
            f"<KVCache {self._sequence} {self.status.value}, history {self.history_length} of "
            f"{self.capacity} tokens, width {self.beam_width}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- life --------------------------------------------------------------------------------------

    def resume(self, stream: object = None) -> bool:
        """Makes the pages usable and binds the stream that their work is ordered by.

        Parameters
        ----------
        stream : optional
            An object with `__cuda_stream__`, a CuPy or torch stream, or a raw handle. Default: the
            one bound before, else the manager's, else (host) the device's own. A new stream waits,
            on the device, for earlier work on the old one.

        Returns
        -------
        bool
            False, with nothing changed, if other sequences hold more than `max_util_for_resume` of
            a pool group, or if there is no page for the copy of a partly matched last block.

        Raises
        ------
        StateError
            It is active or closed.
        ValueError
            No stream is known (CUDA).
        """
        runtime = self._runtime
        with runtime.lock:
            sequence = self._open()
            if self.is_active:
                raise StateError("resume: the cache is already active; suspend() it first")
            if stream is not None:
                bound = runtime.device.stream(stream)
            else:
                known = runtime.streams.of(sequence) or runtime.streams.default
                bound = runtime.device.stream(None) if known is None else known
            if runtime.control.utilisation_without(sequence) > runtime.config.max_util_for_resume:
                return False
            first = runtime.streams.of(sequence) is None
            runtime.streams.bind(sequence, bound)
            if first and not self._first_resume():
                return False
            if first:
                runtime.control.stats.admitted(sequence)
            runtime.control.seqs.unpark(sequence)
            return True

    def _first_resume(self) -> bool:
        """Readies what was matched; unless that works, the sequence is as it was before."""
        done = False
        try:
            done = self._runtime.first_resume(self._sequence)
        finally:
            if not done:
                self._runtime.streams.forget(self._sequence)
        return done

    def suspend(self) -> None:
        """Hides the pages: they are kept, nobody else gets them, and all page indices become -1.

        Rows bound by the caller are filled with -1 and let go; bind them again after `resume`.
        Raises `StateError` unless it is active. O(blocks of all beams); enqueues an event.
        """
        runtime = self._runtime
        with runtime.lock:
            sequence = self._active("suspend")
            self._known("suspend")
            after = runtime.streams.moment(sequence)
            runtime.bound_rows.release(sequence)
            runtime.control.seqs.park(sequence, after)

    def close(self) -> None:
        """Frees all pages, in any state. Idempotent.

        Freed slots can be handed out at once; their next owner's stream waits for this one's.
        """
        runtime = self._runtime
        with runtime.lock:
            if self._sequence >= 0:
                runtime.destroy(self._sequence)
                self._sequence = -1

    def resize(
        self,
        capacity: int | None = None,
        history_length: int | None = None,
        *,
        block: bool = False,
    ) -> bool:
        """Sets how many tokens there are pages for, and how many are final. None: unchanged.

        Parameters
        ----------
        capacity : int, optional
            Tokens; at least the history length. Blocks past the new end are freed.
        history_length : int, optional
            Tokens; never less than before.
        block : bool
            Where pages are short and parents of beam steps are on their way, BLOCK until these
            have arrived and freed what they free.

        Returns
        -------
        bool
            False, with nothing changed, if the pages it takes are not there.

        Raises
        ------
        ValueError
            History would shrink or exceed the capacity; a bound page-index row is too short;
            `max_seq_len` is exceeded.
        StateError
            It is not active. `ParentsPending`: blocks would be freed whose order among the beams
            is not known yet.

        Notes
        -----
        O(new or freed blocks); constant where the number of blocks stays. Enqueues nothing but
        waits for the previous owners of the new slots.
        """
        runtime = self._runtime
        with runtime.lock:
            sequence = self._active("resize")
            seqs = runtime.control.seqs
            old, before = int(seqs.capacity[sequence]), int(seqs.history[sequence])
            new = old if capacity is None else as_int("capacity", capacity)
            history = before if history_length is None else as_int("history_length", history_length)
            if history < before:
                raise wrong("history_length", f"at least the present {before}", history)
            if history > new:
                name, got = (
                    ("capacity", new) if capacity is not None else ("history_length", history)
                )
                raise wrong(name, f"history_length ({history}) <= capacity ({new})", got)
            if new > seqs.limit[sequence]:
                if not runtime.retry(lambda: runtime.grow_one(sequence, new), block):
                    return False
            elif new < old:
                blocks = div_ceil(new, seqs.shape.tokens_per_block)
                if blocks < seqs.num_blocks[sequence]:
                    self._known("resize to fewer blocks")
                    runtime.shrink(np.array([sequence]), np.array([blocks], np.int32))
            seqs.capacity[sequence] = new
            if history_length is not None:
                seqs.set_history_of_one(sequence, history)
            return True

    def fork(self, n: int, *, block: bool = False) -> list[KVCache]:
        """Independent active caches that go on from here, for several samples of one prompt.

        Full blocks of the history are shared, and so is what was committed. The blocks after are
        copied on the bound stream, one launch per pool group for all forks. Each fork is bound to
        the same stream, and has this cache's `expected_prompt_length` and `id`.

        Parameters
        ----------
        n : int
            How many, beside this one.
        block : bool
            As for `resize`.

        Returns
        -------
        list of KVCache

        Raises
        ------
        OutOfPagesError, CacheCapacityError
            Pages, sequences or table rows are short. Nothing changed.
        StateError
            It is not active, or has several beams.
        """
        runtime = self._runtime
        with runtime.lock:
            sequence = self._active("fork")
            self._known("fork")
            if self.beam_width != 1:
                raise StateError("fork: the cache has several beams; set_beam_width(1) first")
            forks = runtime.fork(sequence, as_int("n", n, 1), block)
            return [KVCache(runtime, fork, self.expected_prompt_length, self.id) for fork in forks]

    # -- page indices ------------------------------------------------------------------------------

    def get_base_page_indices(self, layer_group: int, beam: int = 0) -> Int32:
        """Slots of one beam's pages, int32 `[num_blocks]`; all -1 while suspended. A copy.

        Raises `ValueError` for a layer group or beam that is not there.
        """
        runtime = self._runtime
        with runtime.lock:
            self._place(layer_group, beam)
            return runtime.control.seqs.cells_of(self._sequence, layer_group, beam)

    def get_aggregated_page_indices(
        self, layer_group: int, beam: int = 0, valid_only: bool = False
    ) -> Int32:
        """Slots that hold one beam's pages, also while suspended; int32.

        With `valid_only` entries without a page are left out. Raises `ValueError` for a layer group
        or beam that is not there.
        """
        only = as_bool("valid_only", valid_only)
        with self._runtime.lock:
            self._place(layer_group, beam)
            row: Int32 = self._runtime.control.seqs.page_rows(self._sequence)[beam, layer_group]
            return row[row >= 0] if only else row

    def set_base_page_index_buf(self, beam: int, layer_group: int, buffer: Int32 | None) -> None:
        """Keeps a row of the caller's own table up to date from now on.

        Parameters
        ----------
        beam, layer_group : int
            Which row it follows. Widen first, bind second.
        buffer : writable int32 array [at least num_blocks], or None
            Gets the present indices and -1 beyond, and later changes as they happen; those of a
            beam step on the device once its parents have arrived. None, or an
            empty array, fills the row bound before with -1 and lets go of it.

        Raises
        ------
        TypeError, ValueError
            Not such an array, or too short; no such beam or layer group.
        StateError
            It is not active.
        """
        runtime = self._runtime
        with runtime.lock:
            self._active("set_base_page_index_buf")
            self._place(layer_group, beam)
            if buffer is None:
                runtime.bound_rows.unbind(self._sequence, beam, layer_group)
                return
            self._check_buffer(buffer)
            if not buffer.size:
                runtime.bound_rows.unbind(self._sequence, beam, layer_group)
                return
            runtime.bound_rows.bind(self._sequence, beam, layer_group, buffer)

    def _check_buffer(self, buffer: Int32) -> None:
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.int32 or buffer.ndim != 1:
            raise wrong_type("buffer", "a one-dimensional int32 NumPy array", buffer)
        if not buffer.flags.writeable:
            raise wrong("buffer", "a writable array", "a read-only one")
        if buffer.size and buffer.size < self.num_blocks:
            raise wrong("buffer", f"at least num_blocks={self.num_blocks} entries", buffer.size)
