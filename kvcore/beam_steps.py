"""A beam step of a batch: the words that describe it to the device, and its launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import BeamArrays, TailPlace
from kvcore.errors import StateError
from kvcore.ids import NO_TICKET, LayerGroupId
from kvcore.layout import page_geometry
from kvcore.parents import Members

if TYPE_CHECKING:
    from kvcore.device.base import Array, Stream, TailBuffers
    from kvcore.runtime import Runtime
    from kvcore.steps import Step

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

FIRST, WIDTH, SHARED, BLOCKS, VALID = range(5)
BEAM_WORDS: Final = 5


class BeamSteps(ABC):
    """The beam steps of one batch, in one of the two modes.

    Parameters
    ----------
    runtime : Runtime
    words : int32 array [BEAM_WORDS, max_rows]
        The host's, sent with each `prepare`.
    rows, parts : device int32 arrays [max_rows]
        The batch's rows, and where `words` arrive.
    """

    def __init__(self, runtime: Runtime, words: Int32, rows: Array, parts: list[Array]) -> None:
        self._runtime, self._words = runtime, words
        self._rows, self._parts = rows, parts

    def describe_rows(self, step: Step) -> None:
        """Writes which rows belong together."""
        words, owner = self._words, step.owner
        size = owner.size
        widths = self._runtime.control.seqs.width[step.sequences]
        words[FIRST, :size] = (np.cumsum(widths) - widths)[owner]
        words[WIDTH, :size], words[WIDTH, size:] = widths[owner], 0

    @abstractmethod
    def describe_tokens(self, step: Step, starts: Int32, counts: int | Int32) -> None:
        """Writes what else the mode's operations need to know, for tokens of these positions."""

    def members(self, step: Step) -> Members:
        """The sequences of a step that have beams, as `describe_*` wrote them."""
        widths = self._runtime.control.seqs.width[step.sequences]
        some = np.flatnonzero(widths > 1)
        first = (np.cumsum(widths) - widths)[some].astype(np.intp)
        return Members(step.sequences[some], first, widths[some], *self._changes(first))

    @abstractmethod
    def _changes(self, first: Index) -> tuple[Int32, Int32, Int32]:
        """`low`, `high` and `tails` of `Members`, from the words at these positions."""

    @abstractmethod
    def map_tokens(self, step: Step, starts: Array, ends: Array, out: Array, on: Stream) -> None:
        """Enqueues what the step's mapping needs beyond `Device.map_tokens`."""

    @abstractmethod
    def noted(self, members: Members) -> None:
        """A step of `members` is enqueued, and its parents are on their way."""

    @abstractmethod
    def take_indirection(self, out: Array, stream: Stream) -> None:
        """Enqueues who has which position, for the rows of the batch."""

    @contextmanager
    def restored_on_failure(self, step: Step | None) -> Iterator[None]:
        """Where the host can't follow what was enqueued, the next `prepare` sends its own rows.

        The last blocks of these beams may have been overwritten: what they hold is lost. BLOCKS
        then until the parents of earlier steps have arrived, without which its rows are old ones.
        """
        try:
            yield
        except BaseException:
            if step is not None:
                for sequence in self.members(step).sequences.tolist():
                    self._runtime.parents.settle(sequence)
                    self._resend(sequence)
                self._runtime.control.seqs.touch(step.sequences)
            raise

    @abstractmethod
    def _resend(self, sequence: int) -> None:
        """Lets the device take over what the host knows of a sequence's beams."""

    @abstractmethod
    def enqueue(self, parents: Array, stream: Stream) -> None:
        """The launches of a step. May be captured."""


class ForkSteps(BeamSteps):
    """Rows are complete in themselves: they are permuted, and tails copied."""

    def __init__(self, runtime: Runtime, words: Int32, rows: Array, parts: list[Array]) -> None:
        super().__init__(runtime, words, rows, parts)
        first, width, shared, blocks, valid = parts
        most = runtime.config.max_beam_width
        self.arrays = BeamArrays(rows, first, width, shared, blocks, valid, most)
        self._sources: Array = runtime.device.empty(rows.shape, np.int32)
        tables = runtime.device_tables()
        groups = range(runtime.control.seqs.shape.num_groups)
        self._tails = runtime.tails.by_layer_group  # made here: a capture must not
        self._tables = [tables.by_group[group] for group in groups]  # kept: views are checked once

    def describe_tokens(self, step: Step, starts: Int32, counts: int | Int32) -> None:
        seqs, owner, size = self._runtime.control.seqs, step.owner, step.owner.size
        history, blocks = seqs.history[step.sequences], seqs.num_blocks[step.sequences]
        shared = np.minimum(history // seqs.shape.tokens_per_block, blocks)
        for word, values in ((SHARED, shared), (BLOCKS, blocks), (VALID, starts + counts)):
            self._words[word, :size] = values[owner]

    def map_tokens(self, step: Step, starts: Array, ends: Array, out: Array, on: Stream) -> None:
        """Rows are complete: nothing."""

    def noted(self, members: Members) -> None:
        """The host's rows are those of before until the parents arrive: nothing."""

    def take_indirection(self, out: Array, stream: Stream) -> None:
        raise StateError(
            "cache_indirection: every row is complete in itself with beam_mode='fork'; make the "
            "manager with beam_mode='indirection', or read the page table alone"
        )

    def _changes(self, first: Index) -> tuple[Int32, Int32, Int32]:
        words, size = self._words, self._runtime.control.seqs.shape.tokens_per_block
        shared, blocks = words[SHARED, first], words[BLOCKS, first]
        return shared, blocks, np.maximum(-(-words[VALID, first] // size) - shared, 0)

    def _resend(self, sequence: int) -> None:
        seqs = self._runtime.control.seqs
        rows = seqs.rows[sequence, : seqs.width[sequence]]
        seqs.mark_blocks(rows, int(seqs.num_blocks[sequence]), NO_TICKET)

    def enqueue(self, parents: Array, stream: Stream) -> None:
        runtime = self._runtime
        device, tables = runtime.device, runtime.device_tables()
        device.step_rows(tables.array, self.arrays, parents, self._sources, stream=stream)
        for group, buffers in enumerate(self._tails):
            device.copy_tails(
                buffers,
                self._tables[group],
                self.arrays,
                self._sources,
                tokens_per_block=runtime.control.seqs.shape.tokens_per_block,
                stream=stream,
            )


class Tails:
    """How the written part of a block is copied, by layer group.

    Where the layout is declared token by token it is the first tokens of each buffer; else the
    whole slot.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made: list[TailBuffers] | None = None

    @property
    def by_layer_group(self) -> list[TailBuffers]:
        """Made when first asked for."""
        if self._made is None:
            layout = self._runtime.layout
            self._made = [
                self._runtime.device.tail_buffers(self._places(LayerGroupId(group)))
                for group in range(len(layout.layer_groups))
            ]
        return self._made

    def _places(self, group: LayerGroupId) -> list[TailPlace]:
        layout = self._runtime.layout
        pool_group = layout.layer_groups[group].pool_group
        pools = self._runtime.pool_places[pool_group]
        places = [place for place in layout.places.values() if place.layer_group == group]
        tokens = layout.tokens_per_block
        token_bytes = []
        for place in places:
            geometry = page_geometry(place, tokens) if place.buffer.shape is not None else None
            token_bytes.append(0 if geometry is None else dense_token_bytes(geometry, tokens))
        if not all(token_bytes):
            return [TailPlace(memory, size, 0, size, 0) for memory, size in pools]
        return [
            TailPlace(*pools[place.pool], place.offset, tokens * nbytes, nbytes)
            for place, nbytes in zip(places, token_bytes, strict=True)
        ]


def dense_token_bytes(geometry: Any, tokens_per_block: int) -> int:
    """Bytes of a token where the first tokens of a block are the first bytes of its buffer, else 0.

    That is token-major (NHD) without expansion and without gaps.
    """
    nbytes: int = geometry.heads * geometry.dim * geometry.itemsize
    dense = geometry.token_stride == nbytes and geometry.expansion == 1
    return nbytes if dense and geometry.page_tokens == tokens_per_block else 0
