"""What the planes hand each other: frozen arrays that both understand.

The control plane decides and writes its own tables; what the device must do for it stands here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.ids import NO_TICKET, Ticket

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class DirtyCells(NamedTuple):
    """Cells of the host page table that the device twin has to take over.

    The values are read from the host table when they are sent, so the newest always wins.
    """

    cells: Int64
    """Flat indices into the table `[row, layer group, ordinal]`."""

    after: Ticket = NO_TICKET
    """The moment after which the old values are no longer read."""


class PageCopies(NamedTuple):
    """Pages of one layer group to copy, each up to its last token that holds data.

    No slot is both a source and a target.
    """

    layer_group: int
    pairs: Int32
    """`[3, n]`: the sources, the targets, and how many first tokens of each block to copy, at least
    1. Pages whose layout is not declared are copied whole."""


class TokenMoves(NamedTuple):
    """Tokens of one layer group to copy from page to page.

    No token is both a source and a target.
    """

    layer_group: int
    src: Int32
    """(slot, token within the block) of each, `[n, 2]`."""

    dst: Int32
