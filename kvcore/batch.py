"""`Batch`: what one step needs to know at fixed addresses on the device, and its operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.beam_batch import BeamBatch
from kvcore.beam_steps import BEAM_WORDS, BeamSteps
from kvcore.checks import as_int, as_items, as_tuple
from kvcore.device.base import StepArrays
from kvcore.errors import StateError, wrong, wrong_type
from kvcore.formats import Formats
from kvcore.ids import NO_SLOT
from kvcore.indirect_steps import beam_steps
from kvcore.operands import as_operand, new_operand
from kvcore.steps import Step, UsualAppend

if TYPE_CHECKING:
    from kvcore.device.base import Array, PageStack, Stream
    from kvcore.kv_cache import KVCache
    from kvcore.runtime import Runtime

ROWS, STARTS, ENDS = 0, 1, 2


class Batch(BeamBatch, Formats):
    """The sequences of one step, on the device, at addresses that never change.

    A step is an uncaptured `prepare`, and operations that may lie in a CUDA graph captured on
    prepare's stream. Operations come one after the other, also on different streams. A step is void
    once a member was closed or suspended, lost blocks, or got other beams; growth does not matter.

    Rows go cache by cache and beam by beam; tokens go row by row. Rows and tokens beyond the
    present ones are padding: they map to -1 and touch no page, so a graph captured over
    `max_tokens` replays for any smaller step.

    Made by `KVCacheManager.create_batch`. One thread uses a batch at a time.
    """

    def __init__(
        self, runtime: Runtime, max_rows: int, max_tokens: int, max_table_rows: int = 0
    ) -> None:
        tables, device = runtime.device_tables(), runtime.device
        shape = runtime.control.seqs.shape
        self._runtime = runtime
        self.max_rows, self.max_tokens = max_rows, max_tokens
        count = 3 + (BEAM_WORDS if shape.max_beam_width > 1 else 0)
        self._flat_words = np.zeros(count * max_rows + max_table_rows, np.int32)
        self._words: NDArray[np.int32] = self._flat_words[: count * max_rows].reshape(count, -1)
        self._words[ROWS] = NO_SLOT
        self._staged: Array = device.empty(self._flat_words.size, np.int32)
        self._parts = [self._staged[i * max_rows : (i + 1) * max_rows] for i in range(count)]
        self.mapping: Array = device.empty((shape.num_groups, max_tokens, 2), np.int32)
        rows, starts, ends = self._parts[:3]
        self._list_rows(self._flat_words[count * max_rows :], self._staged[count * max_rows :])
        block = shape.tokens_per_block
        twin = tables.array, tables.by_group
        self._launch = device.step_launch(
            StepArrays(*twin, self._staged, rows, starts, ends, self.mapping, block)
        )
        self._beams: BeamSteps | None = None
        if count > 3:
            self._beams = beam_steps(runtime, self._words[3:], rows, self._parts[3:])
        self._views: dict[tuple[int, int], Array] = {}
        self._step: Step | None = None
        self._usual: UsualAppend | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the present step; 0 before the first."""
        return 0 if self._step is None else self._step.owner.size

    @property
    def num_tokens(self) -> int:
        """Tokens of the present step; 0 before the first."""
        return 0 if self._step is None else self._step.num_tokens

    @property
    def rows(self) -> Array:
        """The rows of the page table, int32 `[max_rows]` on the device; -1 is padding."""
        return self._parts[ROWS]

    def prepare(
        self,
        kv_caches: Iterable[KVCache],
        num_tokens: int | ArrayLike = 1,
        *,
        start: ArrayLike | None = None,
        num_contexts: int = 0,
        beam_width: int | Sequence[int] | None = None,
        stream: object = None,
    ) -> None:
        """Brings the device's page table up to date and maps the tokens of a step to their pages.

        Parameters
        ----------
        kv_caches : sequence of KVCache
            Distinct and active.
        num_tokens : int or array_like of int [len(kv_caches)]
            Tokens of this step per row of each cache.
        start : int or array_like of int [len(kv_caches)], optional
            Position of the first, one for all or each. Default: the history length.
        num_contexts, beam_width
            Which rows `block_offsets` gives, as for `BatchTables.offsets`. Rows other than every
            cache's own need a batch made with `max_table_rows`.
        stream : optional
            Where it runs. Default: the stream all the caches are bound to, else the manager's.
            Another stream waits, on the device, for the caches' earlier work.

        Raises
        ------
        ValueError
            A range leaves its capacity, the batch is too small, or no stream is known.

        Notes
        -----
        Enqueues two kernels; never blocks. Not for capture in a graph. The staging it writes is
        the batch's own: use two batches to prepare a step while another is still running elsewhere.
        In indirection mode a step that starts at the history length or after is for writing: its
        positions are each beam's own from then on. To read tokens that are not final, start before.
        """
        runtime = self._runtime
        with runtime.lock:
            sequences = runtime.enter_with(kv_caches)
            tables = runtime.device_tables()
            on = runtime.streams.choose(stream, runtime.streams.of_all(sequences))
            listed = self._listed(sequences, num_contexts, beam_width)
            step = self._describe(sequences, num_tokens, start)
            self._write_list(listed, step.owner.size)
            starts, ends = self._parts[STARTS], self._parts[ENDS]
            before, self._step = self._step, None  # until everything below is enqueued
            if before is not None and before.last is not on:
                on.follow(before.last)  # the step before still reads the staging
            runtime.streams.lend(sequences, on)
            seqs = runtime.control.seqs
            try:
                tables.send(seqs.dirty, seqs.used_rows, self._flat_words, on, self._launch)
                if self._beams is not None:
                    self._beams.map_tokens(step, starts, ends, self.mapping, on)
            finally:
                tables.seal(on)
            step.stream = step.last = on
            step.over = False
            step.changes, step.loans = seqs.changes, runtime.streams.changes
            self._step = step

    def _describe(
        self, sequences: NDArray[np.intp], num_tokens: int | ArrayLike, start: ArrayLike | None
    ) -> Step:
        """Writes rows, starts and ends of a step into the host's words.

        Rows and ends are kept from the step before where it had the very same shape.
        """
        runtime, words, before = self._runtime, self._words, self._step
        seqs = runtime.control.seqs
        starts, counts = runtime.ranges(sequences, num_tokens, start)
        same = (
            before is not None
            and before.sequences is sequences
            and before.changes == seqs.changes
            and type(counts) is int
            and before.count == counts
        )
        if same and before is not None:
            step = before
        else:
            rows, owner = runtime.control.batch_rows(sequences)
            ends = np.cumsum(np.broadcast_to(counts, sequences.shape)[owner])
            size, total = owner.size, int(ends[-1]) if owner.size else 0
            self._check_room(size, total)
            words[ROWS, :size], words[ROWS, size:] = rows, NO_SLOT
            words[ENDS, :size], words[ENDS, size:] = ends, total
            count = counts if type(counts) is int else -1
            step = Step(sequences, owner, total, count, seqs.version[sequences])
            if self._beams is not None:
                self._beams.describe_rows(step)
        if self._beams is not None:
            self._beams.describe_tokens(step, starts, counts)
        size = step.owner.size
        words[STARTS, :size] = starts if size == sequences.size else starts[step.owner]
        return step

    def _check_room(self, rows: int, tokens: int) -> None:
        if rows > self.max_rows or tokens > self.max_tokens:
            raise wrong(
                "kv_caches",
                f"at most max_rows={self.max_rows} rows and max_tokens={self.max_tokens} tokens",
                f"{rows} rows and {tokens} tokens",
                "create a larger batch",
            )

    # -- operations: may be captured in a graph ----------------------------------------------------

    def append(
        self,
        layers: int | Sequence[int],
        buffers: Mapping[str, Any],
        *,
        stream: object = None,
    ) -> None:
        """Writes the step's new keys and values into their pages: one launch.

        Parameters
        ----------
        layers : int or sequence of int
            One layer, or several stacked ones of the same layer group.
        buffers : mapping of role to array
            `[N, H, D]` for one layer, `[L, N, H, D]` for several, on this device; any strides. N is
            `num_tokens`, or `max_tokens` under a graph. `[N, D]` where the declared shape is
            `(D,)`. The type is the declared one, or unsigned integers for its bits. Arrays of other
            libraries come by DLPack, array interface or buffer, and `stream` waits for what their
            producer has enqueued, except under capture.
        stream : optional
            Default: `prepare`'s.

        Raises
        ------
        ValueError
            Shapes differ, or the roles' declarations do; a layer twice.
        TypeError
            An array of another device, of an item size or type that is not the declared one.
        """
        on, usual = self._on(stream), self._usual
        if usual is not None and usual.fits(layers, buffers, self.num_tokens):
            sources: list[Array] = list(buffers.values())
            self._runtime.device.append(usual.stack, usual.mapping, sources, stream=on)
            return
        if not isinstance(buffers, Mapping):
            raise wrong_type("buffers", "a mapping of roles to arrays", buffers)
        stack, group = self._stack(layers, tuple(buffers))
        sizes = self.num_tokens, self.max_tokens
        sources = [
            as_operand(self._runtime, role, array, stack, layers, sizes, on)
            for role, array in buffers.items()
        ]
        mapping = self._mapping_of(group, sources)
        self._runtime.device.append(stack, mapping, sources, stream=on)
        self._remember(layers, buffers, stack, mapping, sources)

    def gather(
        self,
        layers: int | Sequence[int],
        roles: Sequence[str] = ("key", "value"),
        *,
        out: Sequence[Any] | None = None,
        stream: object = None,
    ) -> tuple[Any, ...]:
        """Reads the step's tokens out of their pages into dense arrays: one launch.

        Parameters
        ----------
        layers, stream
            As for `append`.
        roles : sequence of str
            Which buffers.
        out : sequence of array, optional
            One per role, shaped as for `append`. Default: new arrays, of the declared type where
            NumPy has it and of its bits as an unsigned integer otherwise; their memory is recycled
            in the order of `stream`.

        Returns
        -------
        tuple of array
            Tokens packed row after row; zeros where a position has no page.

        Notes
        -----
        For whole sequences prepare with `start=0` and `num_tokens=length`.
        """
        runtime = self._runtime
        on = self._on(stream)
        if roles.__class__ is not tuple:
            roles = as_tuple("roles", roles, str, "a role")
        stack, group = self._stack(layers, roles)
        if out is None:
            out = [new_operand(runtime, stack, layers, role, self.num_tokens, on) for role in roles]
        else:
            out = as_items("out", out, "an array")
        if len(out) != len(roles):
            raise wrong("out", f"{len(roles)} arrays, one per role", len(out))
        sizes = self.num_tokens, self.max_tokens
        targets = [
            as_operand(runtime, role, array, stack, layers, sizes, on, writable=True)
            for role, array in zip(roles, out, strict=True)
        ]
        mapping = self._mapping_of(group, targets)
        runtime.device.gather(stack, mapping, targets, stream=on)
        return tuple(out)

    def page_table(
        self,
        layer_group: int = 0,
        num_blocks: int | None = None,
        *,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """The slots of the step's rows as a dense int32 array `[num_rows, num_blocks]`.

        One launch. -1 where there is no page. `num_blocks` defaults to the longest sequence's.
        Page indices of a buffer are `slot * scale`, see `KVCacheManager.get_page_index_converter`;
        for lists and tables of them that end with the tokens, `csr_pages` and `ragged_pages`.
        """
        runtime = self._runtime
        with runtime.lock:
            seqs = runtime.control.seqs
            as_int("layer_group", layer_group, 0, seqs.shape.num_groups - 1)
            on = self._on(stream, after_beams=True)
            if num_blocks is None and self._step is not None:
                num_blocks = int(seqs.num_blocks[self._step.sequences].max(initial=0))
            num_blocks = as_int("num_blocks", num_blocks, 0, seqs.shape.max_blocks)
            shape = (self.num_rows, num_blocks)
            if out is None:
                out = runtime.device.empty(shape, np.int32, stream=on)
            target = runtime.device.as_array(out, stream=on, writable=True, name="out")
            if target.shape != shape or target.dtype != np.int32:
                raise wrong("out", f"int32 {shape}", f"{target.dtype} {target.shape}")
            tables = runtime.device_tables()
            rows = self._parts[ROWS][: self.num_rows]
            runtime.device.take_rows(tables.by_group[layer_group], rows, target, stream=on)
            return out

    def _remember(
        self,
        layers: int | Sequence[int],
        buffers: Mapping[str, Any],
        stack: PageStack,
        mapping: Array,
        sources: Sequence[Array],
    ) -> None:
        """Lets the next append of the same kind pass with one look."""
        given = all(a is b for a, b in zip(buffers.values(), sources, strict=True))
        if given and isinstance(layers, Sequence):
            named = layers if isinstance(layers, (tuple, range)) else list(layers)
            first, count = sources[0], self.num_tokens
            look = type(first), first.shape, first.dtype
            self._usual = UsualAppend(named, list(buffers), count, stack, mapping, *look)

    # -- operands ----------------------------------------------------------------------------------

    def _on(self, stream: object, *, after_beams: bool = False) -> Stream:
        """The stream for the next operation, ordered behind all earlier work on the pages.

        What reads rows alone may come `after_beams`, when a beam step has ended the step.
        """
        runtime, step = self._runtime, self._step
        if step is None or (step.over and not after_beams):
            raise StateError("the batch holds no step; call prepare() first")
        on = step.stream if stream is None else runtime.device.stream(stream)
        seqs, streams = runtime.control.seqs, runtime.streams
        if runtime.leases.idle or runtime.leases.owed:
            with runtime.lock:
                runtime.leases.take_back()
        if step.changes == seqs.changes and step.loans == streams.changes and on is step.last:
            return on
        with runtime.lock:
            if (seqs.version[step.sequences] != step.versions).any():
                raise StateError(
                    "a sequence of this step was closed or suspended, lost blocks, or its beams "
                    "changed since prepare(); prepare the step again"
                )
            if on is not step.last:
                on.follow(step.last)
            streams.lend(step.sequences, on)
            step.changes, step.loans, step.last = seqs.changes, streams.changes, on
        return on

    def _stack(self, layers: int | Sequence[int], roles: tuple[str, ...]) -> tuple[PageStack, int]:
        if isinstance(layers, Sequence):
            return self._runtime.stacks.get(tuple(layers), roles)
        return self._runtime.stacks.get((as_int("layers", layers),), roles)

    def _mapping_of(self, group: int, operands: Sequence[Array]) -> Array:
        tokens = operands[0].shape[1]
        for operand in operands:
            if operand.shape[1] != tokens:
                raise wrong("buffers", "the same number of tokens for each role", "different ones")
        return self._mapping_view(group, tokens)

    def _mapping_view(self, group: int, tokens: int) -> Array:
        """The mapping of the first tokens: the same object for the same number."""
        view = self._views.get((group, tokens))
        if view is None:
            if len(self._views) > 64:
                self._views.clear()
            view = self._views[group, tokens] = self.mapping[group, :tokens]
        return view
