"""What a replay asks the cache to keep, said with the public retention settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcore.errors import wrong
from kvcore.retention import DEFAULT_PRIORITY, Retention

Ranges = tuple[Retention, ...] | None

BELOW_DEFAULT: Final = DEFAULT_PRIORITY - 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to retain pages."""

    name: str
    help: str
    retention: Callable[[int], Ranges] = lambda prompt_length: None
    """The ranges to give with a prompt of so many tokens."""
    reuse: bool = True
    """Whether prompts are looked up and anything is published at all."""


def _prompts_first(prompt_length: int) -> Ranges:
    return (Retention(start=prompt_length, priority=BELOW_DEFAULT),)


_HEADS: Final = tuple(
    Retention(start=start, priority=priority)
    for start, priority in zip(
        (0, *(1024 << doubling for doubling in range(8))), range(90, 0, -10), strict=True
    )
)
"""90 for the first 1,024 tokens, and 10 less from each doubling on, down to 10 from 131,072."""


POLICIES: Final = (
    Policy(name="lru", help="what was let go of longest ago leaves first"),
    Policy(
        name="prompts-first",
        help="outputs leave before any prompt does (priority 20 instead of 35)",
        retention=_prompts_first,
    ),
    Policy(
        name="heads-first",
        help="the deeper, the earlier: priority 90 for the first 1,024 tokens, 10 less from each "
        "doubling on, so that system prompts outlive tails",
        retention=lambda prompt_length: _HEADS,
    ),
    Policy(name="none", help="nothing is looked up or published", reuse=False),
)


def policy_of(name: str, argument: str = "policy") -> Policy:
    """The policy of that name. Raises `ValueError` naming `argument`."""
    for policy in POLICIES:
        if policy.name == name:
            return policy
    raise wrong(argument, "one of " + ", ".join(p.name for p in POLICIES), name)
