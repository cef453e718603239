"""The part of the device contract that serves beams in indirection mode.

Pages stay with the beam that wrote them. A table of *cells* `[R, C]`, one row per row of the page
table and one cell per position, names for each position of a beam the beam whose page holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from kvcore.device.parts import Array, PageStack, Stream


class PathArrays(NamedTuple):
    """A batch with beams, as int32 arrays `[N]` on the device.

    The beams of a request stand side by side and agree in everything but `rows`. Only `rows` of
    padding is read.
    """

    rows: Array
    """Table row of each position of the batch, all different; negative or too large: padding."""

    first: Array
    """Position of the request's beam 0."""

    width: Array
    """Beams of the request."""

    base: Array
    """Positions of the sequence before this one are beam 0's."""

    own: Array
    """Positions from here on (or from `base`, if that is more) are each beam's own."""

    valid: Array
    """Tokens of a row, counted from its start, that hold data."""

    max_width: int = 0
    """Wider requests are left alone by `step_paths`. 0: `min(N, MAX_BEAMS)`."""


class PathOperations(ABC):
    """Operations on paths. All enqueue on `stream`, return at once and can be captured in a graph.

    What beam i of a request finds at a position is called `at(i, position)`: 0 before `base`, i
    from `max(own, base)` on, and else `cells[rows[i], position]`, or i where that is no beam of the
    request or there is no cell.
    """

    @abstractmethod
    def step_paths(
        self, cells: Array, beams: PathArrays, parents: Array, *, stream: Stream
    ) -> None:
        """Makes the path of every beam go on from its parent's, in place, in one launch.

        `cells` int32 `[R, C]` (contiguous last axis). `parents` int32 `[P]` holds for the position
        of beam i of a request which of its beams i continues; an entry outside `[0, width)`, or at
        or after P, means i itself. For each request of more than one beam whose rows all exist::

            positions [base, valid)   cells[rows[i], position] = old at(parents[i], position)

        cut to the cells that there are. All other cells stay.
        """

    @abstractmethod
    def take_paths(self, cells: Array, beams: PathArrays, out: Array, *, stream: Stream) -> None:
        """`out[i, position] = at(i, position)` for `out` int32 `[M, n]`, M at most N; one launch.

        0 for padding and for requests of one beam.
        """

    @abstractmethod
    def map_paths(
        self,
        tables: Array,
        cells: Array,
        beams: PathArrays,
        starts: Array,
        ends: Array,
        out: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        """`Device.map_tokens` of `beams.rows`, through the paths.

        Position p of beam i lies where the row of beam `at(i, p)` says.
        """

    @abstractmethod
    def move_tokens(self, stack: PageStack, src: Array, dst: Array, *, stream: Stream) -> None:
        """Copies tokens from page to page, all layers and roles of a stack, in one launch.

        `src` and `dst` int32 `[N, 2]` on the device are (slot, token within the block). A pair with
        a place that does not exist is skipped. No place may be both a source and a target, or a
        target twice.
        """
