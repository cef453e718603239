"""Moments by number, so that the control plane can say "after this" without knowing a stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Event, Stream
from kvcore.ids import NO_TICKET, Ticket


@dataclass(frozen=True, slots=True)
class _Both:
    """The moment after several others, each of another stream."""

    parts: tuple[Ticket, ...]

    def done(self) -> bool:
        return True  # asked at the front of the queue: the parts, which are older, have passed


class Fences:
    """Numbers events in the order they are recorded and makes streams wait for numbers.

    Tickets rise, so one watermark tells which are known to have passed; a stream never waits for
    itself. Recording and waiting cost one driver call each and never block the host.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[Ticket, Event | _Both, Stream | None]] = deque()
        self._first = 1  # ticket of the oldest pending entry
        self._next = 1
        self._joint: dict[tuple[Ticket, ...], Ticket] = {}  # of pending joint tickets
        self._only: Stream | None = None  # the stream of all pending entries, if it is one

    def record(self, stream: Stream) -> Ticket:
        """A ticket for the present end of `stream`; `NO_TICKET` if that has already passed."""
        event = stream.record()
        if event.done():
            return NO_TICKET
        self._forget_passed()
        if not self.pending:
            self._only = stream
        elif self._only is not stream:
            self._only = None
        ticket = Ticket(self._next)
        self._next += 1
        self.pending.append((ticket, event, stream))
        return ticket

    def wait(self, stream: Stream, tickets: NDArray[np.int64]) -> None:
        """Later work of `stream` starts after all `tickets`. At most one wait per other stream."""
        if not self.pending or self._only is stream or not tickets.size:
            return
        if int(tickets.max()) < self._first:
            return
        for ticket in self.newest_of_each_stream(set(tickets.tolist())):
            self.wait_one(stream, ticket)

    def wait_all(self, stream: Stream) -> None:
        """Later work of `stream` starts after every moment that may not have passed."""
        self._forget_passed()
        for ticket in self.newest_of_each_stream({entry[0] for entry in self.pending}):
            self.wait_one(stream, ticket)

    def wait_one(self, stream: Stream, ticket: Ticket) -> None:
        """`wait` for a single ticket."""
        if ticket < self._first or not self.pending:
            return
        _, event, owner = self.pending[ticket - self._first]
        if isinstance(event, _Both):
            for part in event.parts:
                self.wait_one(stream, part)
        elif owner is not stream:
            stream.wait(event)

    def newest_of_each_stream(self, tickets: set[Ticket]) -> list[Ticket]:
        """Those of `tickets` that may not have passed, and only the last of each stream."""
        newest: dict[Stream | None, Ticket] = {}
        for ticket in sorted(self._parts(tickets)):
            newest[self.pending[ticket - self._first][2]] = ticket
        return list(newest.values())

    def join(self, before: NDArray[np.int64], ticket: Ticket) -> NDArray[np.int64] | Ticket:
        """Tickets that stand for both `before[i]` and `ticket`, which was recorded later.

        One for all where nothing before can still be running on another stream.
        """
        self._forget_passed()
        if not self.pending or int(before.max(initial=0)) < self._first:
            return ticket
        if not ticket:  # has passed
            return before
        if self._only is not None:
            return ticket
        joint: NDArray[np.int64] = np.full(before.shape, ticket, np.int64)
        for old in np.unique(before[before >= self._first]).tolist():
            joint[before == old] = self._join_two(Ticket(old), ticket)
        return joint

    def _join_two(self, old: Ticket, ticket: Ticket) -> Ticket:
        parts = tuple(sorted(self.newest_of_each_stream({old, ticket})))
        if len(parts) == 1:
            return parts[0]
        joint = self._joint.get(parts)
        if joint is None:
            joint = self._joint[parts] = Ticket(self._next)
            self._next += 1
            self.pending.append((joint, _Both(parts), None))
            self._only = None
        return joint

    def _parts(self, tickets: set[Ticket]) -> set[Ticket]:
        """The single moments behind `tickets` that may not have passed."""
        single: set[Ticket] = set()
        for ticket in tickets:
            if ticket >= self._first and self.pending:
                event = self.pending[ticket - self._first][1]
                if isinstance(event, _Both):
                    single |= self._parts(set(event.parts))
                else:
                    single.add(ticket)
        return single

    def _forget_passed(self) -> None:
        """Each entry is asked once more than it takes: O(1), amortised."""
        while self.pending and self.pending[0][1].done():
            _, event, _ = self.pending.popleft()
            self._first += 1
            if isinstance(event, _Both):
                del self._joint[event.parts]
