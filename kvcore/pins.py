"""Pins: prefixes that stay, until they are let go or their time is over."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from kvcore.control.reuse import PinHold
    from kvcore.runtime import Runtime


class Pin:
    """A lease on the pages of a prefix, from `KVCacheManager.pin`. A context manager.

    Attributes
    ----------
    num_tokens : int
        Tokens that are pinned.
    deadline : float or None
        The moment of the caller's clock from which `KVCacheManager.expire` ends it.
    """

    __slots__ = ("_held", "_runtime", "deadline", "num_tokens")

    def __init__(
        self,
        runtime: Runtime,
        num_tokens: int,
        deadline: float | None,
        held: PinHold | None,
    ) -> None:
        self._runtime, self._held = runtime, held
        self.num_tokens, self.deadline = num_tokens, deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the pages are still held."""
        return self._held is not None

    def close(self) -> None:
        """Lets the pages go. Idempotent."""
        with self._runtime.lock:
            self._runtime.refuse_reentry()
            held, self._held = self._held, None
            if held is not None:
                self._runtime.pins.pop(self, None)
                self._runtime.control.reuse.unpin(held)
