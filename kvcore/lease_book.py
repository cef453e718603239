"""What the memory knows of a lease: who uses it, on which streams, and when it is over."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Final

from kvcore.errors import LeaseInUse, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcore.device.base import Memory, Stream
    from kvcore.page_views import Leasable
    from kvcore.runtime import Runtime


MOST_PARTS: Final = 1024
"""Parts of memory that are remembered, with what makes their capsules."""

Idle = dict[object, "LeaseEntry"]
"""Entries that nobody uses just now, since the last look, by the moment when that began."""


class LeaseEntry:
    """One lease, from its first hand-over to the moment when its last consumer is gone.

    Keeps the memory. A consumer may go in any thread, also while another one is inside the manager:
    so what happens then (`settle`) takes no lock and enqueues nothing. The entry is put into
    `idle`, and the manager's next call hands its pages back.
    """

    __slots__ = (
        "_idle",
        "_number",
        "_part",
        "_users",
        "closed",
        "given",
        "memory",
        "streams",
        "waits",
    )

    def __init__(self, number: int, part: str, memory: Memory, end: int, idle: Idle) -> None:
        self.memory = memory
        self._number, self._part = number, part
        self.streams: dict[Stream, bool | None] = {}
        """Of consumers, since their work was last handed back; and those that stay.

        With each of them, whether the caller named it himself, and so orders it; None where only
        copies are made on it.
        """
        self.given: Stream | None = None
        """The stream that the lease was taken for: handed back as long as the lease is open."""
        self.closed = False
        """Whether nothing more is handed over."""
        self.waits = False
        """Whether it is among the idle, with nothing handed back since."""
        self._users: dict[object, bool] = {}
        """Arrays that tell when they are dropped: True; what lends its own life to arrays: False.

        Each operation on it is one that no other thread can come into.
        """
        self._idle = idle
        memory.holds.add(self, end)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"lease {self._number} of {self._part}"

    @property
    def num_uses(self) -> int:
        """Arrays that consumers still hold."""
        return list(self._users.values()).count(True)

    @property
    def in_use(self) -> bool:
        """Whether consumers may still enqueue work on the memory."""
        return bool(self._users)

    @property
    def ordered(self) -> bool:
        """Whether the caller named a stream that is not handed back yet."""
        return any(self.streams.values())

    def use(self) -> Callable[[], None]:
        """Counts one more array; what has to be called when it is dropped.

        As the others that count, raises `StateError` once closed.
        """
        token = object()
        self._users[token] = True  # as _count does; this is asked for every array
        if self.closed:
            self._drop(token)
            self.refuse_closed()
        return partial(self._drop, token)

    def use_while(self, window: object) -> None:
        """Counts one more array, which is dropped together with `window`."""
        self._count(weakref.ref(window, self._drop), is_array=True)

    def view(self, viewer: object) -> None:
        """Counts `viewer` as long as it lives: arrays that hold it tell nobody else."""
        self._count(weakref.ref(viewer, self._drop), is_array=False)

    def _count(self, user: object, *, is_array: bool) -> None:
        """First counts and then looks: `close`, in another thread, does it the other way round."""
        known = user in self._users  # a viewer counts once
        self._users[user] = is_array
        if self.closed:
            if not known:
                self._drop(user)
            self.refuse_closed()

    def _drop(self, user: object) -> None:
        self._users.pop(user, None)
        self.settle()

    def forget(self, streams: list[Stream]) -> None:
        """They are handed back: no work is left there, but on `given` more may come."""
        for stream in streams:
            if self.closed or stream is not self.given:
                self.streams.pop(stream, None)

    def close(self) -> None:
        """Hands nothing more over."""
        self.closed = True
        self.settle()

    def settle(self) -> None:
        """Lets go of the memory where nobody uses it any more. In any thread; idempotent."""
        closed = self.closed  # first: what is not in use after that stays so
        if self._users:
            return
        if self.streams and not self.waits:
            self.waits = True
            self._idle[object()] = self
        if closed:
            self.memory.holds.remove(self)

    def wait(self) -> None:
        """Lets the manager's next call hand the pages back from all streams."""
        self.waits = True
        self._idle[object()] = self

    def refuse_use(self, call: str) -> None:
        """Raises `LeaseInUse` where a consumer still holds an array."""
        arrays = self.num_uses
        if arrays:
            raise LeaseInUse(
                f"{call}: {arrays} array(s) of {self.name} are still held; the memory "
                "stays mapped until the last one is dropped"
            )

    def refuse_closed(self) -> None:
        """Raises `StateError` after `close`."""
        if self.closed:
            raise StateError(f"{self.name} is closed; take another one")


class LeaseBook:
    """The leases of one manager. Its methods expect the manager's lock to be held."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._count = 0
        self._parts: dict[Hashable, Leasable] = {}
        self.idle: Idle = {}
        self.owed: dict[Stream, object] = {}
        """Streams of consumers that are gone, from which pages are still to be handed back, and
        the moment when the last one went.
        """

    def __bool__(self) -> bool:
        return any(memory.holds for memory in self._memories())

    def new(self, part: str, memory: Memory, end: int) -> LeaseEntry:
        """An entry on the first `end` bytes of a memory."""
        self._count += 1
        return LeaseEntry(self._count, part, memory, end, self.idle)

    def known_part(self, key: Hashable) -> Leasable | None:
        """What was leased before under the same arguments."""
        try:
            return self._parts.get(key)
        except TypeError:  # not hashable: checking the arguments says what is wrong
            return None

    def remember(self, key: Hashable, part: Leasable) -> Leasable:
        """Keeps what was found for `key`; of parts of any kind, a few."""
        if len(self._parts) >= MOST_PARTS:
            self._parts.clear()
        self._parts[key] = part
        return part

    def hand_over(self, entry: LeaseEntry, stream: Stream, *, named: bool | None = False) -> None:
        """Later work of `stream` comes after all that was enqueued on pages and tables so far.

        `named` where the caller says which stream that is, and not a library, whose array is
        counted already. None for a copy, which is handed back at once.
        """
        runtime = self._runtime
        if self.idle:
            self._part_with_idle(None if named else entry)
        looked = False  # for captures: once is enough
        if self.owed and (len(self.owed) > 1 or stream not in self.owed):
            self._put_behind_owed(stream)
            looked = True
        if stream.deputy is not None or not runtime.streams.alone(stream):
            if not looked:
                self._refuse_capture([stream])
            runtime.streams.hand_over(stream)
            looked = True
        tables = runtime.tables
        if tables is not None and tables.last is not None and tables.last[0] is not stream:
            if not looked:
                self._refuse_capture([stream])
            tables.order_behind_last(stream)
        lasting = stream.deputy or stream
        if named or entry.streams.get(lasting) is None:
            entry.streams[lasting] = named

    def _put_behind_owed(self, stream: Stream) -> None:
        """Later work of `stream` comes after that of consumers that are gone."""
        owed = self.owed.copy()
        # Not even asked under capture, which would end by that; and all or none.
        if len(owed) > 1 or len(self._runtime.streams.known) > 1 or stream.is_capturing():
            self._refuse_capture([stream] if len(owed) == 1 else [stream, *owed])
        for other, moment in owed.items():
            if other is stream:
                continue
            if not other.is_idle():
                if other.is_capturing():
                    raise _captured(other)
                stream.follow(other)
            elif self.owed.get(other) is moment:  # nobody has to wait for it
                del self.owed[other]

    def end(self, entry: LeaseEntry, stream: Stream | None) -> None:
        """Closes a lease whose work, on its streams and on one more, comes before all later work.

        An array that is dropped meanwhile, in another thread, is handed back by the next call.
        """
        entry.waits = False  # what is dropped from here on comes again
        ended, held = not entry.in_use, entry.num_uses
        streams = [] if stream is None else [stream]
        if not held:
            streams += [other for other in entry.streams if other not in streams]
        self.hand_back(entry, streams, forget=False)
        if not held:  # those that it knows no more, as others have taken it since
            self._take_back_owed()
        entry.closed = True
        if ended and not (entry.in_use or entry.waits):
            entry.streams.clear()
        entry.settle()

    def hand_back(self, entry: LeaseEntry, streams: list[Stream], *, forget: bool = True) -> None:
        """All later work on pages comes after what was enqueued on `streams` so far.

        Without `forget` they are handed back once more when the last consumer is gone.
        """
        streams = [stream.deputy or stream for stream in streams]
        self._refuse_capture(streams)
        for stream in streams:
            if not stream.is_idle():
                self._runtime.streams.hand_back(stream)
            self.owed.pop(stream, None)
        if forget:
            entry.forget(streams)

    def take_back(self) -> None:
        """Hands back what nobody uses any more; later, where a graph is being captured."""
        self._part_with_idle()
        self._take_back_owed()

    def _take_back_owed(self) -> None:
        streams = self._runtime.streams
        if not self.owed or any(stream.is_capturing() for stream in streams.working()):
            return
        for stream, moment in self.owed.copy().items():
            if not stream.is_idle():
                if stream.is_capturing():
                    continue
                streams.hand_back(stream)
            if self.owed.get(stream) is moment:
                del self.owed[stream]

    def _part_with_idle(self, taken: LeaseEntry | None = None) -> None:
        """Owes the streams of idle entries, and no longer the entries themselves.

        What was taken anew since then may still be worked on: its streams are not forgotten; but
        for `taken`, whose next array is counted already, and not handed over yet. An entry leaves
        last: other threads look here before they take the lock.
        """
        for moment, entry in self.idle.copy().items():
            entry.waits = False  # what is dropped from here on comes again
            ended = len(entry._users) == (entry is taken)
            streams = dict(entry.streams)
            for stream in streams:
                self.owed[stream] = moment
            if ended and entry.closed:
                entry.streams.clear()
            elif ended:  # what was acquired is the caller's until he releases it
                entry.forget([one for one, named in streams.items() if not named])
            self.idle.pop(moment, None)

    def _refuse_capture(self, streams: list[Stream]) -> None:
        """Raises `StateError` if one of `streams` or of kvcore's is captured.

        Of those that would wait or be awaited: without `streams`, none.
        """
        if streams:
            for stream in [*streams, *self._runtime.streams.working()]:
                if stream.is_capturing():
                    raise _captured(stream)

    def refuse(self, call: str) -> None:
        """Raises `LeaseInUse`, which names a lease, if there is any."""
        for memory in self._memories():
            memory.holds.refuse(call)

    def _memories(self) -> list[Memory]:
        runtime = self._runtime
        tables = [] if runtime.tables is None else [runtime.tables.memory]
        return [*(memory for pool in runtime.pools for memory in pool), *tables]


def _captured(stream: Stream) -> StateError:
    return StateError(
        f"a graph is being captured from {stream!r}: events of other streams cannot be part of it; "
        "take leases and hand them over and back outside of the capture"
    )
