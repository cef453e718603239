"""Batches that were lost: replay on request, gaps, and a follower that rebuilds the keys."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcore.event_stream import BlockRemoved, StreamEvent, StreamingEventSink, wire_hash
from kvcore.publisher import ZmqEventPublisher
from tests.event_runs import keys_of, run_of

zmq = pytest.importorskip("zmq", reason="needs pyzmq")
msgpack = pytest.importorskip("msgspec.msgpack", reason="needs msgspec")

from tests.event_sockets import FREE, connected, replayed, subscribed, until_end  # noqa: E402


@pytest.mark.parametrize("kind", ["DEALER", "REQ"])
def test_replay(kind):
    with ZmqEventPublisher(FREE, replay_endpoint=FREE, topic="t") as publisher:
        for n in range(6):
            publisher.publish([BlockRemoved((n,), None)], ts=n)
        with connected(getattr(zmq, kind), publisher.replay_endpoint) as socket:
            start = (4).to_bytes(8, "big")
            socket.send_multipart([b"", start] if kind == "DEALER" else [start])
            if kind == "REQ":  # it takes one answer a request
                topic, number, _ = socket.recv_multipart()
                assert (topic, int.from_bytes(number, "big")) == (b"t", 4)
                return
            answers = until_end(socket)
    assert [(topic, number) for topic, number, _ in answers] == [(b"t", 4), (b"t", 5)]
    payloads = [msgpack.decode(payload) for *_, payload in answers]
    assert payloads == [[n, [["BlockRemoved", [n], None, None]], None] for n in (4, 5)]


def test_only_so_many_are_kept():
    with ZmqEventPublisher(FREE, replay_endpoint=FREE, buffer_steps=3) as publisher:
        for _ in range(8):
            publisher.publish([])
        answers = replayed(publisher.replay_endpoint, 2)
        assert [number for _, number, _ in answers] == [5, 6, 7]  # later than asked: too old
        assert replayed(publisher.replay_endpoint, 8) == []
        assert replayed(publisher.replay_endpoint, 2**63) == []


def test_a_client_that_never_reads_takes_no_more_than_two_answers():
    with ZmqEventPublisher(FREE, replay_endpoint=FREE, buffer_steps=3) as publisher:
        assert publisher._sockets._router.sndhwm == 2 * (3 + 1)


@pytest.mark.parametrize(
    "request_frames", [[b"", b"\0" * 7], [b"", b"0" * 9], [b""], [b"", b"", b"", b"junk"]]
)
def test_a_request_that_is_none_gets_the_end_and_harms_nobody(request_frames):
    with ZmqEventPublisher(FREE, replay_endpoint=FREE) as publisher:
        publisher.publish([])
        with connected(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart(request_frames)
            assert until_end(socket) == []
        assert len(replayed(publisher.replay_endpoint, 0)) == 1


def test_a_full_queue_drops_the_batch_and_leaves_a_gap():
    with ZmqEventPublisher(FREE, replay_endpoint=FREE, max_queue_size=2) as publisher:
        blocked, go = threading.Event(), threading.Event()
        send = publisher._sockets.publish
        publisher._sockets.publish = lambda frames: (blocked.set(), go.wait(60), send(frames))
        assert publisher.publish([]) == 0
        assert blocked.wait(60)  # the thread is sending number 0
        assert [publisher.publish([]) for _ in range(3)] == [1, 2, 3]
        assert publisher.num_dropped_batches == 2
        go.set()
        assert [number for _, number, _ in replayed(publisher.replay_endpoint, 0)] == [0, 1]
        assert publisher.publish([]) == 4
        assert [number for _, number, _ in replayed(publisher.replay_endpoint, 0)] == [0, 1, 4]


class Follower:
    """An index in another process: sees gaps, asks for what it missed, starts over if it can't."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self.publisher, self.next = publisher, 0
        self.held: set[int] = set()

    def take(self, number: int, payload: bytes) -> bool:
        """Applies one batch; False if some before it are missing for good."""
        if number > self.next:
            for _, missed, old in replayed(self.publisher.replay_endpoint, self.next):
                if self.next == missed < number:
                    self.apply(msgpack.decode(old)[1])
        if number > self.next and not self.starts_over(payload):
            return False
        if number >= self.next:
            self.next = number
            self.apply(msgpack.decode(payload)[1])
        return True

    def starts_over(self, payload: bytes) -> bool:
        events = msgpack.decode(payload)[1]
        return bool(events) and events[0][0] == "AllBlocksCleared"

    def apply(self, events: list[Any]) -> None:
        self.next += 1
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.held.clear()
            elif tag == "BlockRemoved":
                self.held.difference_update(fields[0])
            else:
                assert fields[1] in {None, *self.held}
                self.held.update(fields[0])


@pytest.mark.parametrize("kept", [1_000, 3])
def test_a_follower_rebuilds_the_keys(kept):
    """With replay if enough is kept, else with a snapshot."""
    sink, ids, held = StreamingEventSink(4), list(range(1, 13)), set()
    keys = keys_of(ids)

    def step(n: int) -> list[StreamEvent]:
        mine = [n, *ids[1:]]
        sink.stored(run_of(mine))
        held.update(map(wire_hash, keys_of(mine)))
        if n % 2:
            sink.removed(keys_of(mine)[:0:-1], 0)
            held.difference_update(map(wire_hash, keys_of(mine)[1:]))
        return sink.drain()

    with ZmqEventPublisher(FREE, replay_endpoint=FREE, buffer_steps=kept) as publisher:
        for n in range(10):  # nobody listens yet
            publisher.publish(step(n))
        follower = Follower(publisher)
        with subscribed(publisher) as socket:
            number = publisher.publish(step(10))
            _, sequence, payload = socket.recv_multipart()
            assert int.from_bytes(sequence, "big") == number
            caught_up = follower.take(number, payload)
            assert caught_up is (kept == 1_000)
            if not caught_up:
                runs = [run_of([n, *ids[1:]], 0, 1 if n % 2 else 3) for n in range(11)]
                publisher.publish(sink.snapshot(runs))
                _, sequence, payload = socket.recv_multipart()
                assert follower.take(int.from_bytes(sequence, "big"), payload)
            assert follower.held == held
            sink.removed(keys_of([10, *ids[1:]])[:0:-1], 0)
            held.difference_update(map(wire_hash, keys_of([10, *ids[1:]])[1:]))
            publisher.publish(sink.drain())
            _, sequence, payload = socket.recv_multipart()
            assert follower.take(int.from_bytes(sequence, "big"), payload)
    assert follower.held == held
    assert wire_hash(keys[0]) in held
