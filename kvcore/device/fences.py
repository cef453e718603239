"""Moments by number, so that the control plane can say "after this" without knowing a stream."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Event, Stream
from kvcore.ids import NO_TICKET, Ticket


class Fences:
    """Numbers events in the order they are recorded and makes streams wait for numbers.

    Tickets rise, so one watermark tells which are known to have passed; a stream never waits for
    itself. Recording and waiting cost one driver call each and never block the host.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Ticket, Event, Stream]] = deque()
        self._first = 1  # ticket of the oldest pending entry
        self._next = 1
        self._only: Stream | None = None  # the stream of all pending entries, if it is one

    def __len__(self) -> int:
        return len(self._pending)

    def record(self, stream: Stream) -> Ticket:
        """A ticket for the present end of `stream`; `NO_TICKET` if that has already passed."""
        event = stream.record()
        if event.done():
            return NO_TICKET
        self._forget_passed()
        if not self._pending:
            self._only = stream
        elif self._only is not stream:
            self._only = None
        ticket = Ticket(self._next)
        self._next += 1
        self._pending.append((ticket, event, stream))
        return ticket

    def wait(self, stream: Stream, tickets: NDArray[np.int64]) -> None:
        """Later work of `stream` starts after all `tickets`. At most one wait per other stream."""
        if not self._pending or self._only is stream or not tickets.size:
            return
        if int(tickets.max()) < self._first:
            return
        for ticket in self.newest_of_each_stream(set(tickets.tolist())):
            self.wait_one(stream, ticket)

    def wait_one(self, stream: Stream, ticket: Ticket) -> None:
        """`wait` for a single ticket."""
        if ticket < self._first or not self._pending:
            return
        _, event, owner = self._pending[ticket - self._first]
        if owner is not stream:
            stream.wait(event)

    def newest_of_each_stream(self, tickets: set[Ticket]) -> list[Ticket]:
        """Those of `tickets` that may not have passed, and only the last of each stream."""
        newest: dict[Stream, Ticket] = {}
        for ticket in sorted(tickets):
            if ticket >= self._first and self._pending:
                newest[self._pending[ticket - self._first][2]] = ticket
        return list(newest.values())

    def _forget_passed(self) -> None:
        for _ in range(2):  # twice as fast as they come, so the queue stays short
            if not self._pending or not self._pending[0][1].done():
                return
            self._pending.popleft()
            self._first += 1
