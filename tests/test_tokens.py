"""Token ids at the door: containers, ranges, digests."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from array import array
from collections import UserList, deque
from pathlib import Path

import numpy as np
import pytest

import kvcore as k
from kvcore.tokens import (
    MAX_ID,
    digest_of,
    gen_multimodal_cache_key_tokens,
    intern_digest,
    num_digests,
    token_view,
    uuid_of,
)

IDS = [0, 1, 255, 256, 151_643, MAX_ID]
IMAGE = b"".join(i.to_bytes(4, "little") for i in IDS)


def new_digest() -> bytes:
    """A digest that this process has not seen."""
    return os.urandom(32)


# -- containers ------------------------------------------------------------------------------------

CONTAINERS = {
    "list": IDS,
    "tuple": tuple(IDS),
    "deque": deque(IDS),
    "user list": UserList(IDS),
    "list of NumPy ints": [np.int64(i) for i in IDS],
    "array i": array("i", IDS),
    "array q": array("q", IDS),
    "array I": array("I", IDS),
    "int32": np.array(IDS, np.int32),
    "uint32": np.array(IDS, np.uint32),
    "int64": np.array(IDS, np.int64),
    "uint64": np.array(IDS, np.uint64),
    "big-endian": np.array(IDS, ">i4"),
    "strided": np.repeat(np.array(IDS, np.int32), 3)[1::3],
    "reversed": np.array(IDS[::-1], np.int32)[::-1],
    "a column": np.column_stack([IDS, IDS]).astype(np.int32)[:, 1],
    "memoryview of int32": memoryview(np.array(IDS, np.int32)),
    "memoryview of int64": memoryview(array("q", IDS)),
    "strided memoryview": memoryview(np.repeat(np.array(IDS, np.int32), 2))[::2],
    "ctypes": (ctypes.c_int32 * len(IDS))(*IDS),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_has_the_same_image(kind):
    view = token_view("tokens", CONTAINERS[kind])
    assert (view.format, view.ndim, view.c_contiguous) == ("B", 1, True)
    assert view.tobytes() == IMAGE


@pytest.mark.parametrize("kind", [range(2, 5), (2, 3, 4), np.array([2, 3, 4], np.uint8)])
def test_small_ints(kind):
    assert token_view("tokens", kind).tobytes() == np.array([2, 3, 4], "<i4").tobytes()


@pytest.mark.parametrize("empty", [[], (), array("i"), np.array([], np.int32), np.array([], int)])
def test_no_tokens(empty):
    assert token_view("tokens", empty).tobytes() == b""


def test_int32_arrays_are_not_copied():
    for tokens in (np.zeros(4, np.int32), array("i", [0] * 4)):
        view = token_view("tokens", tokens)
        tokens[2] = 7
        assert view.tobytes()[8:12] == b"\x07\0\0\0"


def test_a_read_only_array_is_fine():
    tokens = np.arange(4, dtype=np.int32)
    tokens.flags.writeable = False
    assert token_view("tokens", tokens).readonly


def test_a_bool_in_a_list_is_the_int_it_is():
    assert token_view("tokens", [True, 2]).tobytes() == token_view("tokens", [1, 2]).tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        5,
        None,
        "123",
        b"\1\0\0\0",
        bytearray(4),
        memoryview(bytes(4)),
        token_view("tokens", [1]),  # an image is not taken for ids
        {1, 2},
        {1: 2},
        (i for i in IDS),
        iter(IDS),
        map(int, "12"),
        [1.0],
        [1, "2"],
        [1, None],
        [[1, 2]],
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1, 2], object),
        array("d", [1.0]),
    ],
    ids=lambda tokens: repr(tokens).partition(" at 0x")[0],
)
def test_what_is_no_container_of_ints(tokens):
    with pytest.raises(TypeError, match=r"^prompt(\[\d\])?: expected .*, got "):
        token_view("prompt", tokens)


def test_a_generator_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"sequence of ints.*generator.*list\(tokens\)"):
        token_view("tokens", (i for i in IDS))


def test_messages_name_the_position():
    with pytest.raises(TypeError, match=r"^tokens\[2\]: expected an int, got float \(1\.5\)"):
        token_view("tokens", [1, 2, 1.5])


@pytest.mark.parametrize("shape", [(), (2, 2), (0, 3)])
def test_only_one_dimension(shape):
    with pytest.raises(ValueError, match=r"tokens: expected one dimension, got \("):
        token_view("tokens", np.zeros(shape, np.int32))


# -- ranges ----------------------------------------------------------------------------------------

CASTS = [
    list,
    tuple,
    deque,
    np.array,
    lambda ids: np.array(ids, np.int64)[::1],
    lambda x: UserList(x),
]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "value", [2**31, 2**31 + 5, 2**32 - 1, 2**32, 2**40, -(2**31) - 1, -(2**40)]
)
def test_beyond_32_bits(cast, value):
    with pytest.raises(ValueError, match=rf"^tokens\[1\]: expected an id in .*, got {value}\b"):
        token_view("tokens", cast([7, value, value]))


def test_beyond_64_bits():
    with pytest.raises(ValueError, match=rf"^tokens\[1\]: .*, got {2**70}"):
        token_view("tokens", [0, 2**70])
    with pytest.raises(ValueError, match=rf"^tokens\[0\]: .*, got {2**63}"):
        token_view("tokens", np.array([2**63], np.uint64))


@pytest.mark.parametrize(
    "cast", [*CASTS, lambda ids: np.array(ids, np.int32), lambda x: array("i", x)]
)
@pytest.mark.parametrize("value", [-1, -(2**31), "next"])
def test_negative_but_no_digest(cast, value):
    value = -2 - num_digests() if value == "next" else value
    digest = intern_digest(bytes(32)) if num_digests() else 0
    with pytest.raises(ValueError, match=rf"^tokens\[2\]: .* got {value}; intern_digest"):
        token_view("tokens", cast([7, digest, value]))


def test_text_only_refuses_digests():
    digest = intern_digest(bytes(32))
    assert token_view("tokens", [1, digest, 2], text_only=False).nbytes == 12
    with pytest.raises(ValueError, match=rf"^tokens\[1\]: .*got {digest}; text_only"):
        token_view("tokens", [1, digest, 2], text_only=True)
    assert token_view("tokens", [1, 2], text_only=True).nbytes == 8


# -- digests ---------------------------------------------------------------------------------------


def test_equal_digests_are_one_token():
    a, b, before = new_digest(), new_digest(), num_digests()
    token = intern_digest(a)
    assert intern_digest(bytearray(a)) == intern_digest(memoryview(a)) == token < -1
    assert intern_digest(b) == token - 1
    assert (digest_of(token), digest_of(token - 1)) == (a, b)
    assert num_digests() == before + 2


def test_the_uuid_is_beside_the_digest():
    digest = new_digest()
    token = intern_digest(digest)
    assert uuid_of(token) is None
    assert intern_digest(digest, "photo-1") == token
    assert uuid_of(token) == "photo-1"
    intern_digest(digest)  # without one: what is known stays
    assert uuid_of(token) == "photo-1"
    intern_digest(digest, "photo-2")
    assert uuid_of(token) == "photo-2"


@pytest.mark.parametrize("token", [0, 5, -1, -(2**31)])
def test_a_token_that_is_no_digest(token):
    for ask in (digest_of, uuid_of):
        with pytest.raises(ValueError, match=rf"token: .*got {token}"):
            ask(token)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_digest_has_32_bytes(size):  # K-03
    with pytest.raises(ValueError, match=f"digest: expected 32 bytes, got '{size} bytes'"):
        intern_digest(bytes(size))
    with pytest.raises(ValueError, match="digest: expected 32 bytes"):
        gen_multimodal_cache_key_tokens(100, bytes(size), 1)


@pytest.mark.parametrize("digest", ["0" * 32, 7, None, [0] * 32, np.zeros(32, np.uint8)])
def test_a_digest_is_bytes(digest):
    """Arrays are not hashed, so that their shape and type can't be forgotten: the caller does."""
    with pytest.raises(TypeError, match="digest: expected 32 bytes"):
        intern_digest(digest)


@pytest.mark.parametrize(("uuid", "error"), [(3, TypeError), ("", ValueError)])
def test_a_uuid_is_a_text(uuid, error):
    with pytest.raises(error, match="uuid"):
        intern_digest(bytes(32), uuid)


@pytest.fixture
def hasty_threads():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_agree_on_tokens():
    digests = [new_digest() for _ in range(2_000)]
    before, seen, start = num_digests(), [], threading.Barrier(8)

    def intern():
        start.wait()
        seen.append({digest: intern_digest(digest) for digest in digests})

    threads = [threading.Thread(target=intern) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tokens == seen[0] for tokens in seen)
    assert len(set(seen[0].values())) == 2_000 == num_digests() - before
    assert all(digest_of(token) == digest for digest, token in seen[0].items())


# -- tokens of an item -----------------------------------------------------------------------------


def test_the_first_token_of_an_item_is_its_digest():
    digest = new_digest()
    tokens = k.gen_multimodal_cache_key_tokens(1000, digest, 4, uuid="clip")
    assert (digest_of(tokens[0]), uuid_of(tokens[0])) == (digest, "clip")
    assert tokens[1:] == [1001, 1002, 1003]


@pytest.mark.parametrize("cut", [1, 2, 5, 6])
def test_positions_count_from_the_start_of_the_item(cut):
    whole = gen_multimodal_cache_key_tokens(1000, bytes(32), 7)
    first = gen_multimodal_cache_key_tokens(1000, bytes(32), cut)
    rest = gen_multimodal_cache_key_tokens(1000, bytes(32), 7 - cut, start=cut)
    assert first + rest == whole


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1, bytes(32), 1), "id_offset"),
        ((MAX_ID + 1, bytes(32), 1), "id_offset"),
        ((100, bytes(32), 0), "num_tokens"),
        ((100, bytes(32), 1, -1), "start"),
        ((MAX_ID, bytes(32), 2), "num_tokens"),
        ((MAX_ID - 10, bytes(32), 1, 11), "num_tokens"),
    ],
)
def test_wrong_arguments_of_an_item(arguments, name):
    before = num_digests()
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        gen_multimodal_cache_key_tokens(*arguments)
    assert num_digests() == before
    for position in (0, 2, 3):
        wrong = [100, bytes(32), 1, 0]
        wrong[position] = 1.5
        with pytest.raises(TypeError):
            gen_multimodal_cache_key_tokens(*wrong)


def test_the_last_id_of_all_is_reached():
    assert gen_multimodal_cache_key_tokens(MAX_ID - 1, bytes(32), 2)[1] == MAX_ID


def test_wrong_ids_are_found_without_asserts():
    code = "from kvcore.tokens import token_view\ntoken_view('tokens', [1, -5])"
    command = [sys.executable, "-O", "-c", code]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert "ValueError: tokens[1]: expected an id in" in run.stderr
