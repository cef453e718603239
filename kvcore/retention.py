"""How long published pages should stay: priorities by token range, for a time or for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcore.checks import as_int, as_optional_int, as_tuple
from kvcore.errors import wrong, wrong_type

DEFAULT_PRIORITY: Final = 35
HIGHEST_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The priority of the pages of a token range. Lower ones are evicted first.

    A block takes the range that covers its first token; the last matching entry wins. Pages keep
    the priority until a later sequence sets another one, or for `ttl`.

    >>> Retention(start=0, end=1024, priority=90, ttl=60.0)
    Retention(start=0, end=1024, priority=90, ttl=60.0)
    """

    start: int = 0
    """First token."""

    end: int | None = None
    """Token after the last; None: without end."""

    priority: int = DEFAULT_PRIORITY
    """In [0, 100]. 35 is what pages have that nobody spoke for."""

    ttl: float | None = None
    """How long it lasts, in the unit of the caller's `now`; None: for good. Afterwards the pages
    have the default priority again: `KVCacheManager.expire` says when that is."""

    def __post_init__(self) -> None:
        as_int("start", self.start, 0)
        as_optional_int("end", self.end, self.start + 1)
        as_int("priority", self.priority, 0, HIGHEST_PRIORITY)
        if self.ttl is not None and not as_time("ttl", self.ttl) > 0:
            raise wrong("ttl", "a time above 0", self.ttl)


def as_retention(retention: object) -> tuple[Retention, ...]:
    """The entries of a `retention` argument: one of them or several."""
    if retention is None:
        return ()
    if isinstance(retention, Retention):
        return (retention,)
    return as_tuple("retention", retention, Retention, "a Retention")


def as_time(name: str, value: object) -> float:
    """A finite moment of the caller's clock."""
    if value is None:
        raise wrong(name, "a number, the present moment of your clock", None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise wrong_type(name, "a number, the present moment of your clock", value)
    if value in (float("inf"), float("-inf")):
        raise wrong(name, "a finite number", value)
    return float(value)
