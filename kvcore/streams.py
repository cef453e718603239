"""Which stream orders the pages of each sequence, and which other stream they are lent to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvcore.control.sequences import SequenceTable
from kvcore.device.base import Device, Event, Stream
from kvcore.device.fences import Fences
from kvcore.errors import wrong
from kvcore.ids import NO_TICKET, Ticket

Index = NDArray[np.intp]
Int64 = NDArray[np.int64]


class Streams:
    """Binds sequences to streams, and lends their pages.

    A sequence's pages are used in the order of the stream it is bound to. Work that a batch
    enqueues on another stream has the pages on loan: it comes after everything before, and the
    owner comes after it before anything of the sequence changes hands. Pages are on loan to one
    stream at a time, so one wait brings them home.
    """

    def __init__(
        self, device: Device, seqs: SequenceTable, fences: Fences, default: Stream | None
    ) -> None:
        self.default = default
        self.changes = 0  # rises when a loan begins or ends
        self._device, self._seqs, self._fences = device, seqs, fences
        self.known: list[Stream | None] = [None]  # by number
        self._lent: dict[int, Stream] = {}
        self._behind: list[tuple[Stream, Event]] = []  # foreign work that a new stream waits for

    # -- binding -----------------------------------------------------------------------------------

    def bind(self, sequence: int, stream: Stream) -> None:
        """Moves a sequence without loans to `stream`, which waits for all work on its pages."""
        before = self.of(sequence)
        if before is stream:
            return
        if before is not None:
            stream.follow(before)
        self._seqs.stream[sequence] = self._number_of(stream)
        self.changes += 1

    def _number_of(self, stream: Stream) -> int:
        if stream in self.known:
            return self.known.index(stream)
        self._wait_behind(stream)
        used = set(np.unique(self._seqs.stream).tolist())
        for number in range(1, len(self.known)):
            if number not in used:
                self.known[number] = stream
                return number
        self.known.append(stream)
        return len(self.known) - 1

    def of(self, sequence: int) -> Stream | None:
        """The stream a sequence is bound to; None before the first resume."""
        return self.known[self._seqs.stream.item(sequence)]

    def of_all(self, sequences: Index) -> list[Stream]:
        """The distinct streams of resumed sequences."""
        if len(self.known) == 2 and sequences.size:  # the usual case: everyone on one stream
            return self.known[1:]  # type: ignore[return-value]
        numbers = np.unique(self._seqs.stream[sequences]).tolist()
        return [stream for number in numbers if (stream := self.known[number]) is not None]

    def choose(self, stream: object, bound: Iterable[Stream]) -> Stream:
        """The stream a call runs on: the one given, else the one all its sequences share."""
        if stream is not None:
            return self._device.stream(stream)
        distinct = list(bound)
        if len(distinct) == 1:
            return distinct[0]
        if self.default is not None:
            return self.default
        handles = [hex(other.handle) for other in distinct]
        raise wrong(
            "stream", f"a stream, since the sequences are bound to {handles}", None, "pass stream="
        )

    def forget(self, sequence: int) -> None:
        """Unbinds a sequence that is gone."""
        self._seqs.stream[sequence] = 0
        self._lent.pop(sequence, None)

    # -- loans -------------------------------------------------------------------------------------

    def lend(self, sequences: Index, stream: Stream) -> None:
        """Lets `stream` use the pages of `sequences`, after all earlier work on them."""
        if not self._lent and self.of_all(sequences) == [stream]:
            return
        if not sequences.size:  # it may still write the table, which others read
            self._wait_behind(stream)
        behind: set[Stream] = {stream}
        for sequence in sequences.tolist():
            owner = self.of(sequence)
            holder = self._lent.get(sequence, owner)
            if holder is None or holder is stream:
                continue
            if holder not in behind:
                stream.follow(holder)
                behind.add(holder)
            if owner is stream:
                del self._lent[sequence]
            else:
                self._lent[sequence] = stream
            self.changes += 1

    def come_home(self, sequence: int) -> None:
        """Makes a sequence's own stream wait for the one its pages are lent to."""
        lent = self._lent.get(sequence) if self._lent else None
        if lent is None:
            return
        owner = self.of(sequence)
        if owner is not None:
            owner.follow(lent)
        del self._lent[sequence]
        self.changes += 1

    # -- leases ------------------------------------------------------------------------------------

    def hand_over(self, stream: Stream) -> None:
        """Later work of `stream` comes after everything enqueued on any page so far."""
        for other in self.working():
            other = other.deputy or other
            if other is not stream:
                stream.follow(other)
        if self._fences.pending:
            self._fences.wait_all(stream)
        if self._behind:
            self._forget_passed()
            self._wait_behind(stream)

    def hand_back(self, stream: Stream) -> None:
        """All later work on any page comes after what `stream` has enqueued so far."""
        event = stream.record()
        for other in self.working():
            if other is not stream:
                other.wait(event)
        self._forget_passed()
        self._behind.append((stream, event))

    def _forget_passed(self) -> None:
        passed = [pair for pair in self._behind if pair[1].done()]
        if passed:  # a finalizer may have added some meanwhile
            self._behind = [pair for pair in self._behind if pair not in passed]

    def alone(self, stream: Stream) -> bool:
        """Whether all work on pages is that of `stream`, so that there is nothing to wait for."""
        if self._fences.pending or self._lent:
            return False
        if len(self.known) > 2 or self.known[-1] not in (None, stream):
            return False
        if self._behind and not stream.is_capturing():  # or it would end by that
            self._forget_passed()
        return not self._behind

    def working(self) -> list[Stream]:
        """The streams that sequences are bound or lent to."""
        known: list[Stream] = self.known[1:]  # type: ignore[assignment]
        return known if not self._lent else list(dict.fromkeys([*known, *self._lent.values()]))

    def _wait_behind(self, stream: Stream) -> None:
        for other, event in self._behind:
            if other is not stream:
                stream.wait(event)

    # -- moments -----------------------------------------------------------------------------------

    def moment(self, sequence: int) -> Ticket:
        """A ticket for the end of everything enqueued so far on a sequence's pages."""
        self.come_home(sequence)
        stream = self.of(sequence)
        return NO_TICKET if stream is None else self._fences.record(stream)

    def moments(self, sequences: Index) -> list[tuple[Index, Ticket]]:
        """`moment` of many: which of `sequences` have which ticket."""
        if self._lent:
            for sequence in sequences.tolist():
                self.come_home(sequence)
        numbers = self._seqs.stream[sequences]
        return [
            (
                np.flatnonzero(numbers == number),
                NO_TICKET
                if (stream := self.known[number]) is None
                else self._fences.record(stream),
            )
            for number in np.unique(numbers).tolist()
        ]

    def wait_for(self, sequence: int, tickets: Iterable[Int64]) -> None:
        """`wait` of one sequence."""
        self.wait(np.array([sequence]), tuple(tickets))

    def wait(self, sequences: Index, tickets: tuple[Int64, ...]) -> None:
        """Makes the streams of `sequences` wait for `tickets`, also those they are lent to."""
        streams = set(self.of_all(sequences))
        if self._lent:
            streams |= {self._lent[one] for one in sequences.tolist() if one in self._lent}
        for stream in streams:
            for some in tickets:
                self._fences.wait(stream, some)
