"""What every handle on a sequence has: its number, its state, and the guards at the door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from kvcore.checks import as_int
from kvcore.errors import StateError
from kvcore.ids import Status

if TYPE_CHECKING:
    from kvcore.device.base import Stream
    from kvcore.runtime import Runtime


class Handle:
    """A row number of the sequence table, -1 once closed.

    Has no `__eq__`: handles are identities.
    """

    __slots__ = ("__weakref__", "_runtime", "_sequence", "expected_prompt_length", "id")

    _runtime: Runtime
    _sequence: int
    expected_prompt_length: int | None
    id: object

    @property
    def status(self) -> Status:
        """SUSPENDED, ACTIVE or CLOSED."""
        if self._sequence < 0:
            return Status.CLOSED
        return Status.ACTIVE if self.is_active else Status.SUSPENDED

    @property
    def is_active(self) -> bool:
        """Whether it is between `resume` and `suspend`."""
        return self._sequence >= 0 and bool(self._runtime.control.seqs.active[self._sequence])

    @property
    def is_open(self) -> bool:
        """Whether it is not closed."""
        return self._sequence >= 0

    @property
    def capacity(self) -> int:
        """Tokens it has pages for; 0 once closed."""
        return (
            int(self._runtime.control.seqs.capacity[self._sequence]) if self._sequence >= 0 else 0
        )

    @property
    def history_length(self) -> int:
        """Tokens whose keys and values are final; 0 once closed."""
        return int(self._runtime.control.seqs.history[self._sequence]) if self._sequence >= 0 else 0

    @property
    def num_committed_tokens(self) -> int:
        """Tokens that were committed or reused; 0 once closed."""
        return self._runtime.control.reuse.claims[self._sequence].committed if self.is_open else 0

    @property
    def num_blocks(self) -> int:
        """`ceil(capacity / tokens_per_block)`; 0 once closed."""
        if self._sequence < 0:
            return 0
        return int(self._runtime.control.seqs.num_blocks[self._sequence])

    @property
    def stream(self) -> Stream | None:
        """The stream bound at `resume`; None before and once closed."""
        return self._runtime.streams.of(self._sequence) if self._sequence >= 0 else None

    # -- guards ------------------------------------------------------------------------------------

    def __copy__(self) -> Never:
        raise TypeError("a KVCache owns its pages and cannot be copied; create another one")

    def __deepcopy__(self, memo: object) -> Never:
        self.__copy__()

    def __reduce__(self) -> Never:
        raise TypeError("a KVCache lives in its process and cannot be pickled")

    def _open(self) -> int:
        self._runtime.enter()
        if self._sequence < 0:
            raise StateError("the KVCache is closed; create a new one")
        return self._sequence

    def _active(self, call: str) -> int:
        sequence = self._open()
        if not self._runtime.control.seqs.active[sequence]:
            raise StateError(f"{call}: the cache is suspended; resume() it first")
        return sequence

    def _known(self, call: str) -> int:
        """The sequence, if the host knows its rows."""
        sequence = self._open()
        if self._runtime.parents:
            self._runtime.refuse_pending((sequence,), call)
        return sequence

    def _place(self, layer_group: int, beam: int) -> None:
        self._known("page indices")
        as_int("layer_group", layer_group, 0, self._runtime.control.seqs.shape.num_groups - 1)
        as_int("beam", beam, 0, int(self._runtime.control.seqs.width[self._sequence]) - 1)
