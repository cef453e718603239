"""Plain ZeroMQ sockets that read what a publisher of KV events sends. Needs pyzmq and msgspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from msgspec import msgpack

from kvcore.publisher import ZmqEventPublisher

FREE = "tcp://127.0.0.1:*"
END = (-1).to_bytes(8, "big", signed=True)


@contextmanager
def connected(kind: int, endpoint: str, topic: bytes | None = None) -> Iterator[Any]:
    """A socket that waits a minute at most."""
    with zmq.Context.instance().socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = 60_000
        if topic is not None:
            socket.subscribe(topic)
        socket.connect(endpoint)
        yield socket


@contextmanager
def subscribed(publisher: ZmqEventPublisher, topic: bytes = b"") -> Iterator[Any]:
    """A subscriber that hears what is published from now on."""
    with connected(zmq.SUB, publisher.endpoint, topic) as socket:
        socket.rcvtimeo = 20
        for _ in range(3_000):  # a subscription travels: publish until one batch arrives
            number = publisher.publish([])
            with suppress(zmq.Again):
                while int.from_bytes(socket.recv_multipart()[1], "big") < number:
                    pass
                break
        else:
            raise TimeoutError("no batch arrived")
        socket.rcvtimeo = 60_000
        yield socket


def received(socket: Any, count: int) -> list[tuple[int, Any]]:
    """The next batches: sequence number and content."""
    batches = []
    for _ in range(count):
        _, number, payload = socket.recv_multipart()
        batches.append((int.from_bytes(number, "big"), msgpack.decode(payload)))
    return batches


def replayed(endpoint: str, start: int, kind: int = zmq.DEALER) -> list[tuple[bytes, int, bytes]]:
    """All that a request of old batches brings, up to the end."""
    with connected(kind, endpoint) as socket:
        request = [start.to_bytes(8, "big", signed=start < 0)]
        socket.send_multipart(request if kind == zmq.REQ else [b"", *request])
        return until_end(socket)


def until_end(socket: Any) -> list[tuple[bytes, int, bytes]]:
    answers = []
    while True:
        *_, topic, number, payload = socket.recv_multipart()
        if number == END:
            assert (topic, payload) == (b"", b"")
            return answers
        answers.append((topic, int.from_bytes(number, "big"), payload))
