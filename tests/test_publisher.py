"""The ZeroMQ publisher, read by plain sockets and MessagePack: frames, order, closing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import StateError
from kvcore.event_stream import AllBlocksCleared, BlockRemoved, BlockStored
from kvcore.publisher import ZmqEventPublisher, encode_event

zmq = pytest.importorskip("zmq", reason="needs pyzmq")
msgpack = pytest.importorskip("msgspec.msgpack", reason="needs msgspec")

from tests.event_sockets import FREE, connected, received, subscribed  # noqa: E402

STORED = BlockStored((5, -6), None, (1, 2, 3, 4), 2, 7, "GPU", "poet", (("11",), None), 0)
REMOVED = BlockRemoved((-6, 2**63 - 1), "GPU", 0)


# -- what travels ----------------------------------------------------------------------------------


def test_frames():
    settings = {"topic": "kv@pod@model", "data_parallel_rank": 3}
    with (
        ZmqEventPublisher(FREE, **settings) as publisher,
        subscribed(publisher, b"kv@pod") as socket,
    ):
        number = publisher.publish([STORED, REMOVED, AllBlocksCleared()], ts=12.5)
        topic, sequence, payload = socket.recv_multipart()
    assert topic == b"kv@pod@model"
    assert sequence == number.to_bytes(8, "big")
    assert msgpack.decode(payload) == [
        12.5,
        [
            ["BlockStored", [5, -6], None, [1, 2, 3, 4], 2, 7, "GPU", "poet", [["11"], None], 0],
            ["BlockRemoved", [-6, 2**63 - 1], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        3,
    ]


def test_maps():
    plain = BlockStored((1,), 9, (1, 2), 2, None, "GPU", None)
    with ZmqEventPublisher(FREE, encoding="map") as publisher, subscribed(publisher) as socket:
        publisher.publish([STORED, plain, BlockRemoved((1,), None), AllBlocksCleared()], ts=1)
        ((_, batch),) = received(socket, 1)
    first = {"type": "BlockStored", "block_hashes": [5, -6], "parent_block_hash": None}
    first |= {"token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": 7, "medium": "GPU"}
    first |= {"lora_name": "poet", "extra_keys": [["11"], None], "group_idx": 0}
    second = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 9}
    second |= {"token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU"}
    second |= {"lora_name": None}
    third = {"type": "BlockRemoved", "block_hashes": [1], "medium": None}
    assert batch == [1.0, [first, second, third, {"type": "AllBlocksCleared"}], None]


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_typed_subscribers_decode(encoding):
    """Structs as subscribers declare them: tagged, defaults last, unknown fields passed over."""
    import msgspec

    settings = {"array_like": encoding == "array", "tag": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[int | bytes]),
            ("parent_block_hash", int | bytes | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ],
        **settings,
    )
    older = [("block_hashes", list[int]), ("medium", str | None)]
    removed = msgspec.defstruct("BlockRemoved", older, **settings)
    cleared = msgspec.defstruct("AllBlocksCleared", [], **settings)
    batch = msgspec.defstruct(
        "Batch",
        [
            ("ts", float),
            ("events", list[stored | removed | cleared]),
            ("data_parallel_rank", int | None, None),
        ],
        array_like=True,
    )
    events = [encode_event(e, encoding) for e in (STORED, REMOVED, AllBlocksCleared())]
    decoded = msgpack.decode(msgpack.encode((1.5, events, 0)), type=batch)
    one, two, three = decoded.events
    assert (one.token_ids, one.lora_name, one.extra_keys) == ([1, 2, 3, 4], "poet", [("11",), None])
    assert two.block_hashes == [-6, 2**63 - 1]
    assert type(three) is cleared


def test_the_time_is_the_calls(monkeypatch):
    monkeypatch.setattr("kvcore.publisher.time.time", lambda: 1234.5)
    with ZmqEventPublisher(FREE) as publisher, subscribed(publisher) as socket:
        publisher.publish([])
        assert received(socket, 1)[0][1][0] == 1234.5


def test_topics_filter():
    with (
        ZmqEventPublisher(FREE, topic="b") as publisher,
        connected(zmq.SUB, publisher.endpoint, b"a") as deaf,
        subscribed(publisher, b"b"),
    ):
        deaf.rcvtimeo = 0
        with pytest.raises(zmq.Again):
            deaf.recv_multipart()


# -- order -----------------------------------------------------------------------------------------


def test_batches_come_in_order():
    with ZmqEventPublisher(FREE) as publisher, subscribed(publisher) as socket:
        first = publisher.publish([REMOVED])
        for n in range(1, 200):
            assert publisher.publish([BlockRemoved((n,), None)]) == first + n
        batches = received(socket, 200)
    assert [number for number, _ in batches] == list(range(first, first + 200))
    assert [batch[1][0][1] for _, batch in batches][1:] == [[n] for n in range(1, 200)]


def test_threads_may_publish():
    with ZmqEventPublisher(FREE) as publisher, subscribed(publisher) as socket:
        numbers: list[int] = []

        def publish(name: int) -> None:
            for n in range(50):
                numbers.append(publisher.publish([BlockRemoved((name, n), None)]))

        threads = [threading.Thread(target=publish, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        batches = received(socket, 200)
    assert [number for number, _ in batches] == sorted(numbers)
    for name in range(4):
        mine = [b[1][0][1][1] for _, b in batches if b[1][0][1][0] == name]
        assert mine == list(range(50))


# -- opening and closing ---------------------------------------------------------------------------


def test_close_sends_what_is_queued():
    publisher = ZmqEventPublisher(FREE)
    with subscribed(publisher) as socket:
        numbers = [publisher.publish([]) for _ in range(100)]
        publisher.close()
        publisher.close()
        assert [number for number, _ in received(socket, 100)] == numbers
    assert not publisher._thread.is_alive()
    with pytest.raises(StateError, match="publish: the publisher is closed"):
        publisher.publish([])


def test_an_error_in_the_thread_closes(monkeypatch):
    """Whatever it is: nothing is taken that could not be sent."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    publisher = ZmqEventPublisher(FREE)
    publisher._sockets.publish = lambda frames: 1 / 0
    publisher.publish([])
    publisher._thread.join(60)
    with pytest.raises(StateError, match="closed"):
        publisher.publish([])
    publisher.close()


def test_ports_are_free_again():
    with ZmqEventPublisher(FREE, replay_endpoint=FREE) as one:
        assert one.endpoint != one.replay_endpoint
        with pytest.raises(zmq.ZMQError):
            ZmqEventPublisher(FREE, replay_endpoint=one.endpoint)
        endpoints = one.endpoint, one.replay_endpoint
    with ZmqEventPublisher(endpoints[0], replay_endpoint=endpoints[1]) as two:
        assert (two.endpoint, two.replay_endpoint) == endpoints


def test_wrong_events_take_no_number():
    with ZmqEventPublisher(FREE) as publisher:
        for wrong in (None, 5, [{"type": "BlockRemoved"}], [REMOVED, None]):
            with pytest.raises(TypeError, match=r"^events"):
                publisher.publish(wrong)
        with pytest.raises(OverflowError):
            publisher.publish([BlockRemoved((2**64,), None)])
        with pytest.raises(ValueError, match="ts: expected a finite number"):
            publisher.publish([], ts=float("inf"))
        assert publisher.publish([]) == 0


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"topic": 5}, TypeError),
        ({"encoding": "json"}, ValueError),
        ({"data_parallel_rank": -1}, ValueError),
        ({"buffer_steps": -1}, ValueError),
        ({"buffer_steps": 1 << 30}, ValueError),
        ({"max_queue_size": 0}, ValueError),
        ({"hwm": 0}, ValueError),
        ({"linger_ms": -1}, ValueError),
        ({"replay_endpoint": ""}, ValueError),
    ],
)
def test_wrong_settings(settings, error):
    with pytest.raises(error, match=f"^{next(iter(settings))}: expected"):
        ZmqEventPublisher(FREE, **settings)


CODE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # None: such an import fails
from kvcore.publisher import ZmqEventPublisher
ZmqEventPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*").publish([])
"""


def run(*absent: str) -> subprocess.CompletedProcess[str]:
    """A process that publishes once and ends without closing."""
    command = [sys.executable, "-c", CODE, *absent]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)


def test_a_process_that_forgets_to_close_ends():
    assert run().returncode == 0


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named(package):
    ran = run(package)
    assert ran.returncode == 1
    assert "pip install 'kvcore[events]'" in ran.stderr
