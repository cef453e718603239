"""What the memory knows of a lease: who uses it, on which streams, and when it is over."""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from kvcore.errors import LeaseInUse, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcore.device.base import Memory, Stream
    from kvcore.page_views import Leasable
    from kvcore.runtime import Runtime


MOST_IDLE: Final = 32
"""Leases whose ends may wait for a call that enqueues work, or for another consumer."""

MOST_PARTS: Final = 1024
"""Parts of memory that are remembered, with what makes their capsules."""


class LeaseEntry:
    """One lease, from its first hand-over to the moment when its last consumer is gone.

    Keeps the memory. A consumer may go in any thread, also while another one is inside the manager:
    so what happens then (`settle`) takes no lock and enqueues nothing. The entry is put into
    `idle`, and the manager's next call hands its pages back.
    """

    def __init__(
        self, number: int, part: str, memory: Memory, end: int, idle: deque[LeaseEntry]
    ) -> None:
        self.memory = memory
        self._number, self._part = number, part
        self.streams: list[Stream] = []
        """Of consumers, since their work was last handed back, and `given`."""
        self.acquired: set[Stream] = set()
        """Those of them that the caller named himself, and so orders."""
        self.given: Stream | None = None
        """The stream that the lease was taken for: handed back as long as the lease is open."""
        self.closed = False
        """Whether nothing more is handed over."""
        self.waits = False
        """Whether it is among the idle."""
        self._uses: set[object] = set()  # arrays that tell when they are dropped
        self._viewers: set[object] = set()  # objects that lend their own life to arrays
        self._idle = idle
        self._lease: weakref.ref[object] | None = None
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
        return len(self._uses)

    @property
    def in_use(self) -> bool:
        """Whether consumers may still enqueue work on the memory."""
        return bool(self._uses or self._viewers)

    def follow(self, lease: object) -> None:
        """Closes when `lease` is dropped."""
        self._lease = weakref.ref(lease, lambda _: self.close())

    def use(self) -> Callable[[], None]:
        """Counts one more array; what has to be called when it is dropped.

        As the others that count, raises `StateError` once closed.
        """
        token = object()
        self._count(self._uses, token)
        return partial(self._drop, self._uses, token)

    def use_while(self, window: object) -> None:
        """Counts one more array, which is dropped together with `window`."""
        self._count(self._uses, weakref.ref(window, lambda one: self._drop(self._uses, one)))

    def view(self, viewer: object) -> None:
        """Counts `viewer` as long as it lives: arrays that hold it tell nobody else."""
        self._count(self._viewers, weakref.ref(viewer, lambda one: self._drop(self._viewers, one)))

    def _count(self, users: set[object], one: object) -> None:
        """First counts and then looks: `close`, in another thread, does it the other way round."""
        users.add(one)
        if self.closed:
            self._drop(users, one)
            self.refuse_closed()

    def _drop(self, users: set[object], one: object) -> None:
        users.discard(one)
        self.settle()

    def close(self) -> None:
        """Hands nothing more over."""
        self.closed = True
        self.settle()

    def settle(self) -> None:
        """Lets go of the memory where nobody uses it any more. In any thread; idempotent."""
        if self._uses or self._viewers:
            return
        if self.streams and not self.waits:
            self.waits = True
            self._idle.append(self)
        if self.closed:
            self.memory.holds.remove(self)

    def refuse_use(self, call: str) -> None:
        """Raises `LeaseInUse` where a consumer still holds an array."""
        if self._uses:
            raise LeaseInUse(
                f"{call}: {len(self._uses)} array(s) of {self.name} are still held; the memory "
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
        self.idle: deque[LeaseEntry] = deque()
        """Entries that nobody uses just now, whose pages are not yet handed back."""

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

    def hand_over(self, entry: LeaseEntry, stream: Stream, *, named: bool = False) -> None:
        """Later work of `stream` comes after all that was enqueued on pages and tables so far.

        `named` where the caller says which stream that is, and not a library.
        """
        runtime = self._runtime
        if self._others_left(stream):  # what they did comes first
            self.take_back()
        if not runtime.streams.alone(stream):
            self._refuse_capture([stream])
            runtime.streams.hand_over(stream)
        if runtime.tables is not None:
            runtime.tables.order_behind_last(stream)
        if stream not in entry.streams:
            entry.streams.append(stream)
        if named:
            entry.acquired.add(stream)

    def hand_back(self, entry: LeaseEntry, streams: list[Stream], *, forget: bool = True) -> None:
        """All later work on pages comes after what was enqueued on `streams` so far.

        Without `forget` they are handed back once more when the last consumer is gone.
        """
        if any(not self._runtime.streams.alone(stream) for stream in streams):
            self._refuse_capture(streams)
        for stream in streams:
            self._runtime.streams.hand_back(stream)
        if forget:
            self._forget(entry, streams)

    def _forget(self, entry: LeaseEntry, streams: list[Stream]) -> None:
        for stream in streams:
            ended = entry.closed or stream is not entry.given
            if ended and stream in entry.streams:
                entry.streams.remove(stream)
                entry.acquired.discard(stream)

    def take_back(self) -> None:
        """Hands back what nobody uses any more; later, where a graph is being captured.

        What was taken anew since then may still be worked on: its streams are not forgotten.
        """
        done: list[Stream] = []
        for _ in range(len(self.idle)):
            entry = self.idle.popleft()
            streams = list(entry.streams)
            new = [stream for stream in streams if stream not in done]
            if new and self._captured(new):
                self.idle.append(entry)
                continue
            entry.waits = False
            for stream in new:
                self._runtime.streams.hand_back(stream)
            done += new
            if not entry.in_use:
                self._forget(entry, streams)

    def _others_left(self, stream: Stream) -> bool:
        """Whether pages are still to be handed back from other streams than this one."""
        return any(other is not stream for entry in list(self.idle) for other in entry.streams)

    def _captured(self, streams: list[Stream]) -> Stream | None:
        """A stream that a graph is being captured from, of those that would wait or be awaited."""
        capturing = self._runtime.device.is_capturing
        return next((s for s in [*streams, *self._runtime.streams.working()] if capturing(s)), None)

    def _refuse_capture(self, streams: list[Stream]) -> None:
        found = self._captured(streams)
        if found is not None:
            raise StateError(
                f"a graph is being captured from {found!r}: events of other streams cannot be part "
                "of it; take leases and hand them over and back outside of the capture"
            )

    def refuse(self, call: str) -> None:
        """Raises `LeaseInUse`, which names a lease, if there is any."""
        for memory in self._memories():
            memory.holds.refuse(call)

    def _memories(self) -> list[Memory]:
        runtime = self._runtime
        tables = [] if runtime.tables is None else [runtime.tables.memory]
        return [*(memory for pool in runtime.pools for memory in pool), *tables]
