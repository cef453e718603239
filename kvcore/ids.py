"""The field's words as types: identifiers, sentinels, enums and the arithmetic of blocks.

A page has a *slot* (its physical home), an *ordinal* (its index in a sequence), a *layer group*
(whose layers it serves) and a *cache level* (where it lies). Five nouns, never mixed.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NewType

LayerId = NewType("LayerId", int)
LayerGroupId = NewType("LayerGroupId", int)
PoolGroupId = NewType("PoolGroupId", int)
CacheLevel = NewType("CacheLevel", int)
Ordinal = NewType("Ordinal", int)
SlotId = NewType("SlotId", int)
Ticket = NewType("Ticket", int)

NO_SLOT: Final = SlotId(-1)
"""Where a page index stands for no page. Kernels skip it."""

NO_TICKET: Final = Ticket(0)
"""A moment that has already passed: nothing to wait for."""


class CacheTier(IntEnum):
    """The kind of memory behind a cache level."""

    GPU = 0
    HOST = 1
    DISK = 2


class PageIndexMode(Enum):
    """What a kernel's page index is relative to."""

    SHARED = "shared"
    """The layer's base address contains its offset:

    index = slot * scale, one table for all layers.
    """

    PER_LAYER = "per_layer"
    """The base address is the bare pool's: index = slot * scale + layer offset."""


class Status(Enum):
    """The life of a `KVCache`."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


def div_ceil(value: int, step: int) -> int:
    """`value / step` rounded up.

    >>> div_ceil(9, 4)
    3
    """
    return -(-value // step)


def align_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`.

    >>> align_up(9, 4)
    12
    """
    return div_ceil(value, step) * step


def align_down(value: int, step: int) -> int:
    """The largest multiple of `step` that is not above `value`.

    >>> align_down(9, 4)
    8
    """
    return value // step * step
