"""What events say of blocks: hashes in every algorithm, tokens, multimodal keys, pickles."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore as k
from kvcore.event_blocks import truncated, v1_hash
from kvcore.event_types import (
    EventTokens,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    MmKey,
    UniqueToken,
)
from kvcore.events import KVCacheEventManager
from kvcore.tokens import intern_digest, token_view
from tests.event_runs import A_DIGEST, B_DIGEST, flushed, keys_of, run_of, shown

ONE_TO_SIX = [1, 2, 3, 4, 5, 6]
V1 = 924206229973855, 6875034662206558884
V1_SALT_123 = 6280297290684427985, 18177682803760873588


def scope(lora: int | None = None, salt: int | None = None) -> k.ReuseScope:
    """A scope in one word."""
    return k.ReuseScope(lora_id=lora, salt=salt)


def hashes_of(m: KVCacheEventManager) -> list[int | str]:
    """The hashes of all stored blocks."""
    return [name for kind, _, named in shown(flushed(m)) if kind == "stored" for name in named]


# -- hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "label"),
    [
        ("v2_sha256", "v2_sha256"),
        ("v2_sha256_64", "v2_sha256_64"),
        ("v1_block_key", "v1_block_key"),
        ("auto", "v1_block_key"),
    ],
)
def test_labels(algo, label):
    m = KVCacheEventManager(8, hash_algo=algo)
    m.stored(run_of(ONE_TO_SIX))
    m.removed(keys_of(ONE_TO_SIX)[1:], None)
    events, keys = flushed(m), keys_of(ONE_TO_SIX)
    expected = {
        "v2_sha256": [key.hex() for key in keys],
        "v2_sha256_64": [int.from_bytes(key[:8], "big") for key in keys],
        "v1_block_key": list(V1),
    }[label]
    assert {event.hash_algo for event in events} == {label} == {m.hash_algo}
    assert shown(events) == [("stored", 0, expected), ("removed", 0, expected[1:])]


def test_truncated():  # E-09
    assert truncated(b"\x80" + bytes(31)) == 2**63
    assert truncated(b"\xff" * 32) == 2**64 - 1


def test_v1_golden_values():  # E-16
    assert v1_hash([1, 2, 3, 4]) == V1[0]
    assert v1_hash([5, 6], parent=V1[0]) == V1[1]


def test_v1_of_a_salted_scope():  # E-17
    m = KVCacheEventManager(8, hash_algo="auto")
    m.stored(run_of(ONE_TO_SIX, scope=scope(salt=123)))
    events = flushed(m)
    assert shown(events) == [("stored", 0, list(V1_SALT_123))]
    assert [block.cache_salt for block in events[0].data.blocks] == ["123", "123"]


def test_v1_reads_the_scope():  # E-18
    scopes = [scope(11, 22), scope(99, 22), scope(11, 23), scope(11), scope(None, 22), scope()]
    found = []
    for each in scopes:
        m = KVCacheEventManager(8, hash_algo="v1_block_key")
        m.stored(run_of(ONE_TO_SIX, scope=each))
        found += hashes_of(m)
    assert len(set(found)) == 2 * len(scopes)
    assert found[-2:] == list(V1)


@pytest.mark.parametrize("told_first", [True, False])
def test_v1_of_a_block_whose_parent_is_gone(told_first):  # E-19
    m = KVCacheEventManager(8, hash_algo="v1_block_key")
    if told_first:
        m.stored(run_of(ONE_TO_SIX, 0, 1))
        m.removed(keys_of(ONE_TO_SIX)[:1], None)
    m.stored(run_of(ONE_TO_SIX, 1))
    stored = flushed(m)[-1]
    assert stored.data.parent_hash == V1[0]
    assert shown([stored]) == [("stored", 0, [V1[1]])]


def older_hasher(ids: list[int], parent: int, lora: int | None, salt: int | None) -> int:
    """The same hash, written down a second time: plain integers, no arrays."""
    full = 2**64 - 1

    def mix64(seed: int, x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & full
        x = (x ^ x >> 27) * 0x94D049BB133111EB & full
        x ^= x >> 31
        return seed ^ (x + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & full

    seed = len(ids) ^ parent * 0xBF58476D1CE4E5B9 & full
    if parent == 0 and salt is not None:
        seed = mix64(seed, salt)
    for x in ids:
        for _ in range(2):
            x = (x ^ x >> 16) * 0x045D9F3B & 0xFFFFFFFF
        x = (x ^ x >> 16) + 0x9E3779B9 & 0xFFFFFFFF
        seed ^= x + (seed << 6) + (seed >> 2) & full
    return seed if lora is None else mix64(seed, lora)


@pytest.mark.parametrize("lora", [None, 0, 123, 2**64 - 1])
@pytest.mark.parametrize("salt", [None, 0, 456, 2**64 - 1])
def test_v1_equals_the_older_hasher(lora, salt):  # E-20, E-21
    ids = [7, 0, 2**31 - 1, *range(151_000, 151_010)]
    m = KVCacheEventManager(8, hash_algo="v1_block_key")
    m.stored(run_of(ids, scope=scope(lora, salt)))
    expected, parent = [], 0
    for begin in range(0, len(ids), 4):
        parent = older_hasher(ids[begin : begin + 4], parent, lora, salt)
        expected.append(parent)
    assert hashes_of(m) == expected


def test_v1_falls_back_from_the_first_digest_on(caplog):
    digest = intern_digest(A_DIGEST)
    ids = [1, 2, 3, 4, digest, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    m = KVCacheEventManager(8, hash_algo="v1_block_key")
    with caplog.at_level(logging.WARNING, "kvcore"):
        m.stored(run_of(ids, 0, 3))
        m.stored(run_of(ids, 3, 4))
        m.removed(keys_of(ids), None)
        m.stored(run_of(ids, 3, 4))  # the chain above is made again
    expected = [V1[0], *(truncated(key) for key in keys_of(ids)[1:])]
    events = flushed(m)
    assert [named for _, _, named in shown(events)] == [expected, expected, expected[3:]]
    assert events[2].data.parent_hash == expected[2]
    assert len(caplog.records) == 1
    assert "first 64 bits of SHA-256" in caplog.text


def test_the_older_manager_told_the_same():  # E-22
    """T = 4, 9 tokens: two full blocks are told, in one event, with what the older one said."""
    ids = list(range(1, 10))
    m = KVCacheEventManager(8, hash_algo="auto", window_size=9)
    m.stored(run_of(ids, 0, 2, priority=35))
    first = older_hasher(ids[:4], 0, None, None)
    second = older_hasher(ids[4:8], first, None, None)
    assert [event.to_dict()["data"] for event in flushed(m)] == [
        {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": block_hash,
                    "tokens": [
                        {"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in block
                    ],
                    "cache_level": 0,
                    "priority": 35,
                    "mm_keys": [],
                    "cache_salt": None,
                }
                for block_hash, block in ((first, ids[:4]), (second, ids[4:8]))
            ],
        }
    ]


# -- tokens and keys of items ----------------------------------------------------------------------


def test_tokens_and_blocks_come_from_one_place():  # G4 without windows
    """Every block with its own tokens, the partial tail too; parents were told before."""
    ids = list(range(10, 21))
    m = KVCacheEventManager(8)
    m.stored(run_of(ids, 0, 1, level=1, priority=80))
    m.stored(run_of(ids, 1))
    known, tokens = {None}, []
    for event in flushed(m):
        assert event.data.parent_hash in known
        known |= {block.block_hash for block in event.data.blocks}
        tokens += [(block.cache_level, block.priority, block.tokens) for block in event.data.blocks]
    assert [(level, priority) for level, priority, _ in tokens] == [(1, 80), (0, 35), (0, 35)]
    assert [t.ids for _, _, t in tokens] == [ids[:4], ids[4:8], ids[8:]]
    assert known - {None} == {key.hex() for key in keys_of(ids)}


def test_a_digest_shows_as_hex():  # E-33
    ids = [intern_digest(A_DIGEST), 1001, 5, 6]
    m = KVCacheEventManager(8)
    m.stored(run_of(ids))
    (block,) = flushed(m)[0].to_dict()["data"]["blocks"]
    assert [token["token_id"] for token in block["tokens"]] == ["aa" * 32, 1001, 5, 6]
    assert block["mm_keys"] == []


def mm_prompt() -> list[int]:
    """Four blocks of two items that start and go on, text between them; offset 1000."""
    a, b = intern_digest(A_DIGEST), intern_digest(B_DIGEST)
    return [1, a, 1001, 1002, 2, 3, 4, 5, 1003, 7, 1004, 1005, 1006, b, 1001, 9]


A, B = A_DIGEST.hex(), B_DIGEST.hex()
MM_KEYS = [[(A, 0)], [], [(A, 3), (A, 4)], [(A, 6), (B, 0)]]


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 2, 3, 4), (0, 2, 4), (2, 4), (2, 3, 4), (3, 4)])
def test_items_go_on_across_blocks_and_runs(cuts):  # E-30, E-31
    """Also across ancestors that were never told (the last three cuts)."""
    m = KVCacheEventManager(8, mm_id_offset=1000)
    for begin, end in itertools.pairwise(cuts):
        m.stored(run_of(mm_prompt(), begin, end))
    blocks = [block for event in flushed(m) for block in event.data.blocks]
    found = [[(key.hash, key.start_offset) for key in block.mm_keys] for block in blocks]
    assert found == MM_KEYS[cuts[0] :]


def test_an_id_beyond_the_offset_without_an_item_is_text():
    m = KVCacheEventManager(8, mm_id_offset=1000)
    m.stored(run_of([1001, 1002, 3, 4, 1005, 6, intern_digest(B_DIGEST), 1001], 0, 2))
    keys = [block.mm_keys for event in flushed(m) for block in event.data.blocks]
    assert keys == [(), (MmKey(B, 0),)]


def test_the_offset_itself_is_text():
    m = KVCacheEventManager(8, mm_id_offset=1000)
    m.stored(run_of([intern_digest(B_DIGEST), 1000, 1001, 5, 6, 1000, 1002, 7]))
    keys = [block.mm_keys for block in flushed(m)[0].data.blocks]
    assert keys == [(MmKey(B, 0), MmKey(B, 1)), (MmKey(B, 2),)]


def test_text_does_not_look_above():
    def never() -> bytes:
        raise AssertionError("asked for everything above the run")

    m = KVCacheEventManager(8, mm_id_offset=1000)
    m.stored(dataclasses.replace(run_of(mm_prompt(), 1, 2), before=never))
    assert flushed(m)[0].data.blocks[0].mm_keys == ()


def test_a_uuid_shows():
    digest = os.urandom(32)
    item = k.gen_multimodal_cache_key_tokens(1000, digest, 4, uuid="photo-1")
    m = KVCacheEventManager(8, mm_id_offset=1000)
    m.stored(run_of(item))
    (block,) = flushed(m)[0].to_dict()["data"]["blocks"]
    assert block["mm_keys"] == [
        {"type": "mm_key", "hash": digest.hex(), "start_offset": 0, "uuid": "photo-1"}
    ]
    assert MmKey("ab", 3).to_dict() == {"type": "mm_key", "hash": "ab", "start_offset": 3}


def test_scopes_show():
    m = KVCacheEventManager(8)
    m.stored(run_of(ONE_TO_SIX, 0, 1, scope=scope(0, 2**64 - 1)))
    (block,) = flushed(m)[0].to_dict()["data"]["blocks"]
    assert (block["lora_id"], block["cache_salt"]) == (0, str(2**64 - 1))


# -- values ----------------------------------------------------------------------------------------

TOKENS = EventTokens(bytes(token_view("tokens", [5, intern_digest(A_DIGEST), 7])))
VALUES = [
    UniqueToken(5),
    TOKENS,
    MmKey("ab", 3, "u"),
    KVCacheCreatedData((1, 2)),
    KVCacheEventDiff(3, 5),
    KVCacheUpdatedData("ab", KVCacheEventDiff(0, 1), None),
    KVCacheRemovedData((1, 2)),
    KVCacheStoredBlockData("ab", TOKENS, 0, 35, (MmKey("ab", 0),), "7", 3),
    KVCacheStoredData(None, (KVCacheStoredBlockData(4, TOKENS, 0, 35),)),
    KVCacheEvent(7, KVCacheCreatedData((1,)), 64, "v2_sha256", 1, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_pickles(value):  # E-47
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert again == value
        assert hash(again) == hash(value)


def test_pickles_go_to_another_process():
    """Where nobody interned these digests."""
    m = KVCacheEventManager(8, mm_id_offset=1000)
    m.stored(run_of(mm_prompt()))
    code = """
import pickle, sys
for event in pickle.loads(sys.stdin.buffer.read()):
    print(event.to_dict())
"""
    events = flushed(m)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(events),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert ran.stdout.decode().splitlines() == [str(event.to_dict()) for event in events]


def test_events_are_frozen():
    for value in VALUES[2:]:
        with pytest.raises(AttributeError):
            setattr(value, next(iter(value.__slots__)), 0)


def test_tokens_are_a_sequence():
    tokens, expected = TOKENS, [UniqueToken(5), UniqueToken(A), UniqueToken(7)]
    assert (len(tokens), list(tokens), tokens.ids) == (3, expected, [5, A, 7])
    assert (tokens[1], tokens[-1], tokens[1:]) == (expected[1], (7, 0), tuple(expected[1:]))
    assert tokens == expected
    assert tokens == tuple(expected)
    assert tokens != expected[:2]
    assert tokens != "abc"
    assert repr(tokens) == f"EventTokens([5, '{A}', 7])"
    assert UniqueToken(5) in tokens
