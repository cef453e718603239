"""KV events over ZeroMQ, in the format that subscribers to vLLM's KV events read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import TracebackType
from typing import Any, Final, Self

from kvcore.checks import as_choice, as_float, as_int, as_optional_int, as_text, as_tuple
from kvcore.errors import StateError, wrong_type
from kvcore.event_stream import AllBlocksCleared, BlockRemoved, BlockStored, StreamEvent

_KINDS: Final = (BlockStored, BlockRemoved, AllBlocksCleared)
MOST_STEPS: Final = 1 << 29
"""Two answers of so many batches are still a number of messages for ZeroMQ."""
_END: Final = b"\xff" * 8
"""The sequence number -1: no more batches."""


def encode_event(event: StreamEvent, encoding: str) -> list[Any] | dict[str, Any]:
    """What MessagePack shows of an event: a tagged array, or a map of what is not left out.

    >>> encode_event(BlockRemoved((7,), "GPU"), "array")
    ['BlockRemoved', (7,), 'GPU', None]
    >>> encode_event(BlockRemoved((7,), "GPU"), "map")
    {'type': 'BlockRemoved', 'block_hashes': (7,), 'medium': 'GPU'}
    """
    tag = type(event).__name__
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    if encoding == "array":
        return [tag, *values.values()]
    optional = {field.name for field in fields(event) if field.default is None}
    shown = {name: v for name, v in values.items() if name not in optional or v is not None}
    return {"type": tag, **shown}


class ZmqEventPublisher:
    """Publishes batches of KV events on a PUB socket, and sends old ones again on request.

    A message is [topic, sequence number, payload]: 8 big-endian bytes, and MessagePack of
    [ts, events, data_parallel_rank]. Sequence numbers start at 0 and count every batch, so that one
    which was lost, here or on the way, is a gap. A subscriber that sees a gap sends the first
    number it lacks (8 big-endian bytes, from a REQ or DEALER socket) to the replay endpoint. It
    gets [topic, sequence number, payload] of every batch from there on that is still kept, then
    the end: an empty topic, number -1 (all bits set), no payload; REQ takes the first of these
    only. If that is later than what was asked for, the subscriber needs a snapshot
    (`StreamingEventSink.snapshot`) in the next batch. A client that asks again and again without
    reading loses what is beyond two such answers: nothing grows for it.

    `publish` encodes and queues; a thread sends. Nothing blocks the caller: a batch that finds the
    queue full is dropped and counted.

    Parameters
    ----------
    endpoint : str
        Where to bind, such as "tcp://*:5557"; port `*` takes a free one, see `endpoint`. Whoever
        can connect reads the tokens.
    replay_endpoint : str, optional
        Where to bind for requests of old batches; None answers none.
    topic : str
        What subscribers filter by. Some expect "kv@<address>@<model>".
    data_parallel_rank : int, optional
        Goes with every batch.
    encoding : str
        "array": events are tagged arrays in the order of their fields. "map": tagged maps, which
        vLLM sends since 2026. Both are widely read; take what your consumers read.
    buffer_steps : int
        Batches kept for replay.
    max_queue_size : int
        Batches that may wait to be sent.
    hwm : int
        Messages that may wait in the socket for one slow subscriber, who loses those beyond.
    linger_ms : int
        How long `close` waits for slow subscribers to take the last messages.

    Raises
    ------
    ModuleNotFoundError
        pyzmq or msgspec is not installed: `pip install 'kvcore[events]'`.
    zmq.ZMQError
        An endpoint can't be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int | None = None,
        encoding: str = "array",
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
        hwm: int = 100_000,
        linger_ms: int = 1_000,
    ) -> None:
        if not isinstance(topic, str):
            raise wrong_type("topic", "a str", topic)
        self._topic = topic.encode()
        self._rank = as_optional_int("data_parallel_rank", data_parallel_rank, 0)
        self._encoding = as_choice("encoding", encoding, ("array", "map"))
        self._limit = as_int("max_queue_size", max_queue_size, 1)
        kept = as_int("buffer_steps", buffer_steps, 0, MOST_STEPS)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._pack = _encoder()
        self._lock = threading.Lock()
        self._next = 0
        self._closed = False
        self.num_dropped_batches = 0
        """Batches that found the queue full."""
        self._sockets = _Sockets(
            as_text("endpoint", endpoint),
            None if replay_endpoint is None else as_text("replay_endpoint", replay_endpoint),
            as_int("hwm", hwm, 1),
            2 * (kept + 1),
            as_int("linger_ms", linger_ms, 0),
        )
        self._thread = threading.Thread(target=self._run, name="kvcore-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where the publisher is bound, with the port that was taken."""
        return self._sockets.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where it answers requests of old batches; None: nowhere."""
        return self._sockets.replay_endpoint

    def publish(self, events: Iterable[StreamEvent], ts: float | None = None) -> int:
        """Queues a batch and returns at once. Thread safe.

        Parameters
        ----------
        events : iterable of BlockStored, BlockRemoved or AllBlocksCleared
            As `StreamingEventSink.drain` gives them. None at all is a batch too.
        ts : float, optional
            Seconds since 1970; the time of the call by default.

        Returns
        -------
        int
            The batch's sequence number.

        Raises
        ------
        StateError
            The publisher is closed.
        """
        batch: tuple[StreamEvent, ...] = as_tuple("events", events, _KINDS, "a StreamEvent")
        ts = time.time() if ts is None else as_float("ts", ts)
        shown = [encode_event(event, self._encoding) for event in batch]
        payload = self._pack((ts, shown, self._rank))
        with self._lock:
            if self._closed:
                raise StateError("publish: the publisher is closed")
            number = self._next
            self._next += 1
            if len(self._queue) >= self._limit:
                self.num_dropped_batches += 1
                return number
            self._queue.append((number.to_bytes(8, "big"), payload))
            if len(self._queue) == 1:  # else the thread is not done with the queue
                self._sockets.wake()
        return number

    def close(self) -> None:
        """Sends what is queued and frees the ports; idempotent. BLOCKS, at most `linger_ms`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sockets.wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                request = self._sockets.wait()
                closed = self._closed  # before the queue: nothing is queued after it
                while self._queue:
                    self._sockets.publish((self._topic, *self._queue[0]))
                    self._kept.append(self._queue.popleft())
                if request is not None:
                    self._replay(request)
                if closed:
                    return
        finally:
            with self._lock:  # also after an error, such as a terminated context
                self._closed = True
                self._sockets.close()
            self._sockets.end()

    def _replay(self, request: list[bytes]) -> None:
        """Answers [client, (empty,) start]; anything else gets the end alone."""
        client, start = request[0], request[-1]
        if len(start) == 8 and len(request) > 1:
            for sequence, payload in self._kept:
                if sequence >= start:  # big-endian bytes compare like their numbers
                    self._sockets.answer((client, b"", self._topic, sequence, payload))
        self._sockets.answer((client, b"", b"", _END, b""))


def _encoder() -> Callable[[object], bytes]:
    """What packs a batch; raises if a package is missing."""
    try:
        import zmq  # noqa: F401  # `_Sockets` takes it
        from msgspec.msgpack import Encoder
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'kvcore[events]'"
        raise ModuleNotFoundError(text, name=error.name) from None
    pack: Callable[[object], bytes] = Encoder().encode
    return pack


class _Sockets:
    """PUB and ROUTER for the publisher's thread, and a bell that any thread may ring, locked."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, hwm: int, answers: int, linger: int
    ) -> None:
        import zmq

        self._context: Any = zmq.Context()  # its own, so that its end is the ports' end
        self._open: list[Any] = []
        try:
            self._pub = self._socket(zmq.PUB, hwm, linger)
            self._pub.bind(endpoint)
            self.endpoint: str = self._pub.last_endpoint.decode()
            self._router = self._socket(zmq.ROUTER, answers, linger)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._router.bind(replay_endpoint)
                self.replay_endpoint = self._router.last_endpoint.decode()
            self._bell = self._socket(zmq.PAIR, 0, 0)
            self._ear = self._socket(zmq.PAIR, 0, 0)
            self._ear.bind(f"inproc://kvcore-events-{id(self)}")
            self._bell.connect(f"inproc://kvcore-events-{id(self)}")
        except zmq.ZMQError:
            self.close()
            self.end()
            raise
        self._poller = zmq.Poller()
        for socket in (self._ear, self._router):
            self._poller.register(socket, zmq.POLLIN)

    def _socket(self, kind: int, hwm: int, linger: int) -> Any:
        socket = self._context.socket(kind)
        self._open.append(socket)
        socket.set_hwm(hwm)
        socket.linger = linger
        return socket

    def wake(self) -> None:
        """Rings the bell; never blocks."""
        self._bell.send(b"")

    def wait(self) -> list[bytes] | None:
        """Waits for the bell or a request, which it returns."""
        ready = dict(self._poller.poll())
        if self._ear in ready:
            self._ear.recv()
        request: list[bytes] | None = (
            self._router.recv_multipart() if self._router in ready else None
        )
        return request

    def publish(self, frames: tuple[bytes, ...]) -> None:
        """To all subscribers; PUB sockets never block."""
        self._pub.send_multipart(frames)

    def answer(self, frames: tuple[bytes, ...]) -> None:
        """To one client; ROUTER sockets never block."""
        self._router.send_multipart(frames)

    def close(self) -> None:
        """Closes all, also after a failed start."""
        for socket in self._open:
            socket.close()

    def end(self) -> None:
        """Waits, as long as messages linger, until the ports are free."""
        self._context.term()
