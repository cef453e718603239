"""The beams of a batch follow parents on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import LONGEST, as_int
from kvcore.errors import StateError, wrong

if TYPE_CHECKING:
    from kvcore.beam_steps import BeamSteps
    from kvcore.device.base import Array, Stream
    from kvcore.runtime import Runtime
    from kvcore.steps import Step


class BeamBatch:
    """The part of a `Batch` that reorders its beams."""

    _runtime: Runtime
    _step: Step | None
    _beams: BeamSteps | None
    max_rows: int

    if TYPE_CHECKING:

        @property
        def num_rows(self) -> int: ...

        def _on(self, stream: object, *, after_beams: bool = False) -> Stream: ...

    def step_beams(self, parents: Any, stream: object = None) -> None:
        """See `KVCacheManager.step_beams`, which holds the lock."""
        runtime = self._runtime
        beams, on = self._with_beams(), self._on(stream)
        array = self._checked_parents(parents, on)
        if on.is_capturing():
            beams.enqueue(array, on)
            return
        tables, buffer = runtime.device_tables(), runtime.parents.lease(array.shape[0])
        try:
            tables.order_behind_last(on)
        except BaseException:
            runtime.parents.give_back(buffer)
            raise
        with beams.restored_on_failure(self._step):
            try:
                beams.enqueue(array, on)
            finally:
                tables.seal(on)
            self._follow(array, buffer, on)

    def cache_indirection(
        self, num_positions: int | None = None, *, out: Any = None, stream: object = None
    ) -> Any:
        """Which beam's page holds each position of each row, int32 `[num_rows, num_positions]`.

        For kernels that read through an indirection: row i finds position p in the row of
        `page_table` of its cache's beam `[i, p]`. 0 in what all beams share and in rows of one
        beam; the beam itself from this step's first position on. One launch; may be captured.

        Parameters
        ----------
        num_positions : int, optional
            Default: the longest capacity of the step's caches, up to whole blocks.
        out : int32 array [num_rows, num_positions], optional
            Where to write, on the device. Default: a new array.
        stream : optional
            Default: `prepare`'s.

        Raises
        ------
        StateError
            The manager's `beam_mode` is not "indirection", or it was made for one beam; the batch
            holds no step.
        ValueError, TypeError
            `out` has another shape or dtype, or is no array that can be written here.
        """
        runtime = self._runtime
        with runtime.lock:
            beams, seqs = self._with_beams("cache_indirection"), runtime.control.seqs
            on = self._on(stream)
            if num_positions is None and self._step is not None:
                blocks = int(seqs.num_blocks[self._step.sequences].max(initial=0))
                num_positions = blocks * seqs.shape.tokens_per_block
            count = as_int("num_positions", num_positions, 0, LONGEST)
            shape = (self.num_rows, count)
            if out is None:
                out = runtime.device.empty(shape, np.int32, stream=on)
            target = runtime.device.as_array(out, stream=on, writable=True, name="out")
            if target.shape != shape or target.dtype != np.int32:
                raise wrong("out", f"int32 {list(shape)}", f"{target.dtype} {list(target.shape)}")
            beams.take_indirection(target, on)
            return out

    def finish(self, parents: Any = None, *, stream: object = None) -> None:
        """Ends a step whose work was replayed from a graph, or runs on another stream.

        Gives the pages back to their sequences' own streams, which wait for this step's work: only
        needed where the engine goes on with the pages by itself, every change of a sequence does it
        anyway. With `parents`, of a beam step in the graph that was just replayed on `stream`, lets
        the host follow it. Enqueues waits and a copy; never blocks, but pins memory once in a
        while. Not for capture in a graph.
        """
        runtime = self._runtime
        with runtime.lock:
            if parents is not None:
                on = self._on(stream)
                array = self._checked_parents(parents, on)
                buffer = runtime.parents.lease(array.shape[0])
                with self._with_beams().restored_on_failure(self._step):
                    runtime.device_tables().seal(on)
                    self._follow(array, buffer, on)
                return
            for sequence in [] if self._step is None else self._step.sequences.tolist():
                runtime.streams.come_home(sequence)

    def _with_beams(self, call: str = "step_beams") -> BeamSteps:
        if self._beams is None:
            raise StateError(f"{call}: the manager was made with max_beam_width=1")
        return self._beams

    def _checked_parents(self, parents: Any, on: Stream) -> Array:
        array = self._runtime.device.as_array(parents, stream=on, name="parents")
        fits = array.ndim == 1 and array.shape[0] in (self.num_rows, self.max_rows)
        if not fits or array.dtype != np.int32:
            raise wrong("parents", f"int32 [{self.num_rows}]", f"{array.dtype} {array.shape}")
        return array

    def _follow(self, parents: Array, buffer: NDArray[np.uint8], on: Stream) -> None:
        """The host takes over a beam step that was enqueued on `on`; the step is over."""
        runtime, step = self._runtime, self._step
        if step is None:
            raise StateError("the batch holds no step; call prepare() first")
        members = self._with_beams().members(step)
        runtime.parents.fetch(parents, buffer, members, on)
        self._with_beams().noted(members)
        seqs = runtime.control.seqs
        seqs.touch(members.sequences)
        step.over, step.versions = True, seqs.version[step.sequences]
