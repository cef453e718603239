"""Streams without a GPU: work that runs at once, or in any order that the recorded events allow.

In immediate mode every operation runs inside the call that enqueues it. In deferred mode it waits
in its stream's queue until somebody synchronises or asks whether something is over; then the
simulator picks one runnable stream after another at random and runs the item at its head. Only the
order inside a stream and the events really waited for hold work back, so that a wait someone forgot
becomes wrong data under some seeds, on a laptop. Equal seeds and equal calls give equal orders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from threading import RLock
from typing import Any, Final, NamedTuple

from kvcore.device.base import Event, Stream
from kvcore.errors import StateError, wrong, wrong_type

PACES: Final = (1, 8, 64, 512)
"""How likely a stream is picked, against others. Unequal, so that streams also run far apart."""

REDRAW_ONE_IN: Final = 16
"""How rarely a stream that was picked gets another pace."""

LOOK_STEPS: Final = (0, 0, 1, 2, 5, 20)
"""How many items may run while somebody looks at an event."""

HISTORY_LENGTH: Final = 1 << 16


class Past:
    """An event that has passed: all that immediate streams need."""

    __slots__ = ()
    passed: Final = True

    def done(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


PAST: Final = Past()


class Gate:
    """An event that the test itself makes pass: it holds streams until `open` is called.

    >>> gate = Gate()
    >>> gate.done()
    False
    >>> gate.open()
    >>> gate.done()
    True
    """

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False

    def open(self) -> None:
        """Lets the streams that wait here go on. Nothing runs yet."""
        self.passed = True

    def done(self) -> bool:
        """Whether the gate is open."""
        return self.passed

    def synchronize(self) -> None:
        """Raises `StateError` where the gate is closed: nobody else could open it."""
        if not self.passed:
            raise StateError("deadlock: this gate is closed; open it before waiting for it")


class DeferredEvent:
    """A marker in a deferred stream's queue."""

    __slots__ = ("passed", "stream")

    def __init__(self, stream: DeferredStream) -> None:
        self.stream, self.passed = stream, False

    def _pass(self) -> None:
        self.passed = True

    def done(self) -> bool:
        """Whether the marker was reached. Some work may run before the answer, as on a device."""
        if not self.passed:
            self.stream.simulator.run_some()
        return self.passed

    def synchronize(self) -> None:
        """Runs work, of any stream, until the marker is reached."""
        self.stream.simulator.run_until(lambda: self.passed)


class Item(NamedTuple):
    """An entry of a deferred queue: work, or a wait if `blocker` is an event."""

    label: str
    blocker: Past | Gate | DeferredEvent | None
    work: Callable[..., None]
    args: tuple[Any, ...]


def nothing() -> None:
    """The work of a wait."""


class SimulatedStream(ABC):
    """A stream of a host device."""

    __slots__ = ("__weakref__", "_handle", "simulator")
    deputy: Final = None
    """Every thread has the same streams."""

    def __init__(self, handle: int, simulator: Simulator) -> None:
        self._handle, self.simulator = handle, simulator

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._handle}>"

    @property
    def handle(self) -> int:
        """The stream's serial number on its device."""
        return self._handle

    @abstractmethod
    def submit(self, label: str, work: Callable[..., None], *args: Any) -> None:
        """Enqueues `work(*args)`."""

    def is_capturing(self) -> bool:
        """False."""
        return False

    @abstractmethod
    def record(self) -> Event:
        """Marks the present end of the queue."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Holds later work until `event`, which must be of the same device, or a `Gate`."""

    def follow(self, other: Stream) -> None:
        """Holds later work until what `other` has enqueued so far is done."""
        self.wait(other.record())

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the queue is empty."""

    @abstractmethod
    def synchronize(self) -> None:
        """Runs until the queue is empty."""


class ImmediateStream(SimulatedStream):
    """Runs everything inside the call."""

    __slots__ = ()

    def submit(self, label: str, work: Callable[..., None], *args: Any) -> None:
        """Runs `work(*args)`."""
        work(*args)

    def record(self) -> Event:
        """The event that has passed, the same one each time."""
        return PAST

    def wait(self, event: Event) -> None:
        """Checks that there is nothing to wait for: this stream could not."""
        if event is PAST:
            return
        if not self.simulator.own(event).passed:
            raise StateError(
                f"deadlock: {self!r} runs work at once and cannot wait for a closed gate; "
                "use a deferred device"
            )

    def is_idle(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class DeferredStream(SimulatedStream):
    """Keeps work until the simulator picks it."""

    __slots__ = ("pace", "queue")

    def __init__(self, handle: int, simulator: Simulator) -> None:
        super().__init__(handle, simulator)
        self.queue: deque[Item] = deque()
        self.pace = simulator.draw_pace()

    def submit(self, label: str, work: Callable[..., None], *args: Any) -> None:
        """Enqueues `work(*args)`; what the arguments refer to is read when it runs."""
        self.simulator.enqueue(self, Item(label, None, work, args))

    def record(self) -> Event:
        """Marks the present end of the queue."""
        event = DeferredEvent(self)
        self.simulator.enqueue(self, Item("", None, event._pass, ()))
        return event

    def wait(self, event: Event) -> None:
        """Holds later work until `event`."""
        blocker = self.simulator.own(event)
        if not blocker.passed:
            self.simulator.enqueue(self, Item("", blocker, nothing, ()))

    def is_idle(self) -> bool:
        """Whether the queue is empty. Some work may run before the answer, as on a device."""
        if self.queue:
            self.simulator.run_some()
        return not self.queue

    def synchronize(self) -> None:
        """Runs work, of any stream, until this queue is empty."""
        self.simulator.run_until(lambda: not self.queue)

    def runnable(self) -> bool:
        """Whether the item at the head may run now. The queue is not empty."""
        blocker = self.queue[0].blocker
        return blocker is None or blocker.passed


class Simulator:
    """The streams of one host device and the order in which their work runs.

    Parameters
    ----------
    deferred : bool
        Whether work waits in queues, or runs at once.
    seed : int
        Decides the order in deferred mode.

    Examples
    --------
    >>> simulator = Simulator(deferred=True, seed=3)
    >>> first, second = simulator.create_stream(), simulator.create_stream()
    >>> first.submit("write", print, "written")
    >>> second.follow(first)
    >>> second.submit("read", print, "read")
    >>> simulator.drain()
    written
    read
    >>> list(simulator.history)
    [(1, 'write'), (2, 'read')]
    """

    def __init__(self, *, deferred: bool, seed: int = 0) -> None:
        self.deferred = deferred
        self.history: deque[tuple[int, str]] = deque(maxlen=HISTORY_LENGTH)
        self._random = Random(seed)
        self._serial = 0
        self._pending: dict[int, DeferredStream] = {}  # not empty; keeps unreferenced streams alive
        self._lock = RLock()  # managers may be called from several threads

    def create_stream(self) -> SimulatedStream:
        """A new stream with an empty queue."""
        with self._lock:
            self._serial += 1
            kind = DeferredStream if self.deferred else ImmediateStream
            return kind(self._serial, self)

    def draw_pace(self) -> int:
        """A random pace for a stream."""
        return self._random.choice(PACES)

    def own(self, event: Event) -> Past | Gate | DeferredEvent:
        """The event, checked to be one that this simulator's streams can wait for."""
        if isinstance(event, (Past, Gate)):
            return event
        if not isinstance(event, DeferredEvent):
            raise wrong_type("event", "an event of this host device", event)
        if event.stream.simulator is not self:
            raise wrong("event", "an event of this host device", event, "synchronize it instead")
        return event

    def enqueue(self, stream: DeferredStream, item: Item) -> None:
        """Puts an item at the end of a stream's queue."""
        with self._lock:
            stream.queue.append(item)
            self._pending[stream.handle] = stream

    def step(self) -> bool:
        """Runs one item of a random runnable stream; False if there is none.

        An exception of the work comes out here, and the item is gone.
        """
        with self._lock:
            runnable = [stream for stream in self._pending.values() if stream.runnable()]
            if not runnable:
                return False
            stream = self._random.choices(runnable, [one.pace for one in runnable])[0]
            if self._random.randrange(REDRAW_ONE_IN) == 0:
                stream.pace = self.draw_pace()
            item = stream.queue.popleft()
            if not stream.queue:
                del self._pending[stream.handle]
            if item.label:
                self.history.append((stream.handle, item.label))
            try:
                item.work(*item.args)
            except Exception as error:
                error.add_note(f"raised by {item.label!r}, enqueued earlier on {stream!r}")
                raise
            return True

    def run_some(self) -> None:
        """Runs a random number of items, perhaps none."""
        for _ in range(self._random.choice(LOOK_STEPS)):
            if not self.step():
                return

    def run_until(self, satisfied: Callable[[], bool]) -> None:
        """Runs items in random order until `satisfied()`.

        Raises `StateError` naming the streams where nothing can run any more.
        """
        while not satisfied():
            if not self.step() and not satisfied():
                raise StateError("deadlock: " + "; ".join(self._blocked()))

    def drain(self) -> None:
        """Runs everything that was enqueued."""
        self.run_until(lambda: not self._pending)

    def _blocked(self) -> Iterator[str]:
        for stream in self._pending.values():
            blocker = stream.queue[0].blocker
            if isinstance(blocker, DeferredEvent):
                yield f"{stream!r} waits for an event of {blocker.stream!r}"
            else:
                yield f"{stream!r} waits for a closed gate"
