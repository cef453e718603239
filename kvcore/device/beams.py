"""The part of the device contract that moves beams: rows of the page table and written tails.

`N` positions of a batch: request by request, beam by beam, then padding. `R` rows of the page
table, `G` layer groups, `B` blocks per row, `T` tokens per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from kvcore.device.parts import Array, Int32, Memory, Stream

MAX_BEAMS: Final = 12_000
"""The widest request that `step_rows` and `permute_rows` reorder."""


class BeamArrays(NamedTuple):
    """A batch with beams, as int32 arrays `[N]` on the device.

    The beams of a request stand side by side and agree in everything but `rows`. Only `rows` of
    padding is read.
    """

    rows: Array
    """Table row of each position, all different; negative (or too large) for padding."""

    first: Array
    """Position of the request's beam 0."""

    width: Array
    """Beams of the request."""

    shared: Array
    """Blocks before this one may be shared by rows; the blocks from here on are a row's own."""

    blocks: Array
    """Blocks of a row."""

    valid: Array
    """Tokens of a row, counted from its start, that hold data."""

    max_width: int = 0
    """No request is wider; those that are all the same are left alone. 0: `min(N, MAX_BEAMS)`."""


class TailPlace(NamedTuple):
    """Where one buffer of a block lies in the slots of a pool, and how much of it a token takes."""

    memory: Memory
    slot_bytes: int
    offset: int
    nbytes: int

    token_bytes: int
    """The first n tokens of a block are the buffer's first `n * token_bytes` bytes, at most
    `nbytes`. 0: tokens are scattered in it, so it is copied whole if any of them is."""


class TailBuffers(Protocol):
    """The buffers of a block of one layer group, ready for kernels.

    Made by `Device.tail_buffers`; immutable; on CUDA it holds their addresses in device memory.
    """

    @property
    def num_places(self) -> int: ...


class BeamOperations(ABC):
    """Operations on beams. All enqueue on `stream`, return at once and can be captured in a graph.

    Whatever changes from step to step is read from device memory.
    """

    @abstractmethod
    def step_rows(
        self,
        table: Array,
        beams: BeamArrays,
        parents: Array,
        sources: Array,
        *,
        stream: Stream,
    ) -> None:
        """Makes every beam continue what its parent was, for a whole batch, in one launch.

        `table` int32 `[R, G, B]` (contiguous last axis) is changed in place. `parents` int32 `[P]`
        holds for the position of beam i of a request which of its beams i continues; an entry
        outside `[0, width)`, or at or after P, means i itself. In every layer group, with
        `shared` and `blocks` cut to `[0, B]`::

            ordinals [0, shared)        new[i] = old[parents[i]]
            ordinals [shared, blocks)   new[i] = old[take[i]]

        where take[i] is the parent for its first child (the lowest i), and for the k-th further
        child of whatever parent (ascending i) the k-th beam without children (ascending).
        `sources` int32 `[N]` gets the table row that a further child copies its tail from: that of
        its parent's first child; -1 for all other positions, padding among them.
        """

    @abstractmethod
    def tail_buffers(self, places: Sequence[TailPlace]) -> TailBuffers:
        """Prepares the copies of written tails of one layer group.

        May block; made once; stays right when a pool is resized. Raises `ValueError` where a buffer
        would leave its slot or `nbytes` is no whole number of tokens.
        """

    @abstractmethod
    def copy_tails(
        self,
        buffers: TailBuffers,
        table: Array,
        beams: BeamArrays,
        sources: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        """Copies the written part of own blocks from row to row, in one launch.

        `table` int32 `[R, B]` (contiguous last axis) is the page table of the layer group, after
        `step_rows`. For each position i whose `sources[i]` and `rows[i]` are rows of the table, and
        each ordinal of `[shared, blocks)` that starts before `valid`: the slot of `rows[i]` gets
        the tokens before `valid` of the slot of `sources[i]`. Slots outside the pools are skipped.
        No slot may be both a source and a target, or a target twice.
        """

    @abstractmethod
    def copy_tokens(self, buffers: TailBuffers, pairs: Int32, *, stream: Stream) -> None:
        """Copies the first tokens of slots to other slots, in one launch.

        `pairs` `[3, n]` are the sources, the targets and how many tokens of each; a host array,
        copied before the call returns. No slot may be both a source and a
        target, or a target twice. Pairs with a slot outside the pools, or without tokens, are
        skipped.
        """

    @abstractmethod
    def permute_rows(
        self,
        arrays: Sequence[Array],
        parents: Array,
        *,
        width: int,
        starts: Array | None = None,
        tokens: Array | None = None,
        token_axis: int = 2,
        stream: Stream,
    ) -> None:
        """Puts the rows of dense arrays in the order of their parents, in place.

        For caches without pages. Each array is `[N, ...]` with items of any kind: every row is
        contiguous, rows may lie apart, and arrays must not overlap. Request r has the rows
        `[starts[r], starts[r + 1])`, from int32 `starts` `[requests + 1]` on the device, which must
        not overlap; without it, `width` rows each. A request without rows, of more than `width` or
        that leaves `[0, N)` is left alone. `parents` int32 `[N]` holds for row i of a request
        which of its rows i continues, any of them any number of times; an entry outside the
        request means i itself. In every array::

            new[i] = old[parents[i]]            or, with `tokens` int32 `[requests]`,
            new[i][:n] = old[parents[i]][:n]    along `token_axis` (0 is that of the rows)

        where n is `tokens` of the request, cut to the axis. Rows that stay are not written. One
        launch for all arrays whose rows are laid out alike (up to 256 of them), however many
        layers; a GPU needs no second buffer.
        """
