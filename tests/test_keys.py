"""Keys of blocks: golden values, scopes, digests, other processes."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcore as k
from kvcore.keys import chain_keys, next_key, root_key
from kvcore.tokens import intern_digest, token_view

EMPTY = "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
LORA_7_SALT_11 = "9e22dbfea623bd030eb7ae4a0d71a7a6beb3cbf25797bcc31ddd0acc5513d3a3"
BLOCK_0123 = "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2"


def sha(*parts: bytes) -> bytes:
    """SHA-256 of the parts one after another."""
    return hashlib.sha256(b"".join(parts)).digest()


def le(*ids: int) -> bytes:
    """Ids as they are hashed."""
    return struct.pack(f"<{len(ids)}i", *ids)


def scope(lora: int | None = None, salt: int | None = None) -> k.ReuseScope:
    """A scope in one word."""
    return k.ReuseScope(lora_id=lora, salt=salt)


def keys_of(T: int, tokens: object, within: k.ReuseScope | None = None) -> list[bytes]:
    """The keys of the blocks alone."""
    return [key for _, key in k.sequence_to_blockchain_keys(T, within, tokens)][1:]


# -- roots -----------------------------------------------------------------------------------------


def test_golden_roots():
    assert root_key(scope()).hex() == EMPTY
    assert root_key(scope(7, 11)).hex() == LORA_7_SALT_11


def test_the_bytes_of_a_root():
    def u64(value: int) -> bytes:
        return value.to_bytes(8, "little")

    assert root_key(scope(2**64 - 1)) == sha(b"\1", b"\xff" * 8)
    assert root_key(scope(None, 3)) == sha(b"\2", u64(3))
    assert root_key(scope(), epoch=5) == sha(b"\4", u64(5))
    assert root_key(scope(1), lora_epoch=6) == sha(b"\x09", u64(1), u64(6))
    assert root_key(scope(1, 2), 3, 4) == sha(b"\x0f", u64(1), u64(2), u64(3), u64(4))


def test_scopes_seed_distinct_roots():  # K-04, K-06
    scopes = [(None, None), (0, None), (None, 0), (0, 0), (7, 11), (123, None), (None, 123)]
    scopes += [(123, 456), (456, 123)]
    roots = [root_key(scope(*values)) for values in scopes]
    assert len(set(roots)) == len(scopes)
    assert roots == [root_key(scope(*values)) for values in scopes]


def test_presence_of_four_values_is_typed():  # B2, B4, B12
    values = (None, 0, 1, 256)
    roots = {
        root_key(scope(lora, salt), epoch, lora_epoch)
        for lora, salt, epoch, lora_epoch in itertools.product(values, repeat=4)
    }
    assert len(roots) == len(values) ** 4


@pytest.mark.parametrize("name", ["lora_id", "salt"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (2**64, ValueError), ("", TypeError), ("X", TypeError), (True, TypeError)],
)
def test_names_and_salts_that_are_no_u64(name, value, error):  # B2
    with pytest.raises(error, match=f"^{name}: expected"):
        k.ReuseScope(**{name: value})


# -- chains ----------------------------------------------------------------------------------------


def test_golden_block():
    assert [key.hex() for _, key in k.sequence_to_blockchain_keys(4, scope(), [0, 1, 2, 3])] == [
        EMPTY,
        BLOCK_0123,
    ]


def test_blocks_and_their_keys():
    tokens = [5, 2**31 - 1, 7, 9, 11, 13]
    pairs = list(k.sequence_to_blockchain_keys(4, scope(7, 11), tokens))
    assert [block for block, _ in pairs] == [[], tokens[:4], tokens[4:]]
    root, full, partial = (key for _, key in pairs)
    assert root.hex() == LORA_7_SALT_11
    assert full == sha(root, le(*tokens[:4]))
    assert partial == sha(full, le(*tokens[4:]))


def test_scopes_seed_chains():  # K-05
    ids = [1, 2, 3, 4]
    a, again, other = (keys_of(2, ids, scope(*s)) for s in [(7, 11), (7, 11), (7, 12)])
    assert a == again
    assert not set(a) & set(other)


def test_mixed_digests():  # K-02
    x, y = os.urandom(32), os.urandom(32)
    tokens = [intern_digest(x), 5, 6, intern_digest(y), *range(20)]
    root = bytes.fromhex(EMPTY)
    assert keys_of(24, tokens) == [sha(root, x, le(5, 6), y, le(*range(20)))]
    first = sha(root, x, le(5, 6), y)
    assert keys_of(4, tokens)[:2] == [first, sha(first, le(0, 1, 2, 3))]
    assert keys_of(4, [1, tokens[0], 2, 3, 4]) == [
        middle := sha(root, le(1), x, le(2, 3)),
        sha(middle, le(4)),
    ]


def test_a_digest_is_hashed_by_content():
    """Not by its number, which is this process's own: interned in another order, the same key."""
    code = """
import sys
from kvcore import gen_multimodal_cache_key_tokens as gen, sequence_to_blockchain_keys as keys
for first in map(int, sys.argv[1]):
    gen(9, bytes([first]) * 32, 1)
print([key.hex() for _, key in keys(4, None, gen(9, b"b" * 32, 3) + gen(9, b"a" * 32, 3))])
"""
    runs = [run(code, order, "0") for order in ("", "1", "12")]
    assert runs[0] == runs[1] == runs[2]


def test_different_media_with_equal_placeholders():  # B7
    def prompt(digest: bytes, *text: int) -> list[int]:
        return [*text, *k.gen_multimodal_cache_key_tokens(1000, digest, 4), 7, 9]

    one, two = os.urandom(32), os.urandom(32)
    assert not set(keys_of(4, prompt(one, 1, 2))) & set(keys_of(4, prompt(two, 1, 2)))
    a, b = keys_of(4, prompt(one, 1, 2, 3, 4)), keys_of(4, prompt(two, 1, 2, 3, 4))
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])


def test_the_uuid_is_not_hashed():
    digest = os.urandom(32)
    before = keys_of(4, k.gen_multimodal_cache_key_tokens(9, digest, 4))
    assert keys_of(4, k.gen_multimodal_cache_key_tokens(9, digest, 4, uuid="name")) == before


@pytest.mark.parametrize("T", [1, 3, 4, 32])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 31, 32, 33, 97])
def test_three_ways_to_a_chain(T, n):
    tokens = [intern_digest(bytes(32)) if i % 10 == 9 else i for i in range(n)]
    image, key, one_by_one = token_view("tokens", tokens), root_key(scope()), []
    for begin in range(0, n, T):
        key = next_key(key, image[4 * begin : 4 * (begin + T)])
        one_by_one.append(key)
    assert keys_of(T, tokens) == one_by_one == chain_keys(root_key(scope()), image, T)
    assert len(one_by_one) == -(-n // T)


def test_a_chain_can_be_taken_up():
    image = token_view("tokens", range(10))
    root = root_key(scope())
    keys = chain_keys(root, image, 4)
    assert chain_keys(keys[0], image[16:], 4) == keys[1:]
    assert chain_keys(keys[0], image, 4, start=16) == keys[1:]


def test_a_list_and_an_array_have_the_same_keys():  # K-09 without a manager
    ids = list(range(24))
    assert keys_of(8, np.array(ids, np.int32)) == keys_of(8, ids) == keys_of(8, tuple(ids))


def test_an_early_miss_hashes_nothing_more(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "kvcore.keys.sha256", lambda data: hashed.append(data) or hashlib.sha256(data)
    )
    pairs = k.sequence_to_blockchain_keys(2, None, list(range(1000)))
    assert hashed == []
    next(pairs), next(pairs)
    assert len(hashed) == 2


def test_tokens_may_change_after_the_call():
    tokens = np.arange(8, dtype=np.int32)
    pairs = k.sequence_to_blockchain_keys(4, None, tokens)
    tokens[:] = 0
    assert [block for block, _ in pairs] == [[], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((0, None, [1]), ValueError, "tokens_per_block"),
        ((4.0, None, [1]), TypeError, "tokens_per_block"),
        ((4, 7, [1]), TypeError, "scope"),
        ((4, None, iter([1])), TypeError, "tokens"),
        ((4, None, [-1]), ValueError, r"tokens\[0\]"),
    ],
)
def test_wrong_arguments_are_found_at_the_call(arguments, error, name):
    with pytest.raises(error, match=f"^{name}: expected"):
        k.sequence_to_blockchain_keys(*arguments)


def run(code: str, argument: str, seed: str) -> str:
    """What a new process prints."""
    env = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", code, argument],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=Path(__file__).parents[1],
    ).stdout


def test_keys_are_the_same_in_every_process():  # B9
    code = """
import kvcore as k
for lora, salt in (None, None), (0, None), (None, 0), (7, 11):
    scope = k.ReuseScope(lora_id=lora, salt=salt)
    tokens = list(range(8)) + k.gen_multimodal_cache_key_tokens(100, bytes(32), 3)
    print(*(key.hex() for _, key in k.sequence_to_blockchain_keys(4, scope, tokens)))
"""
    one, two = run(code, "", "1"), run(code, "", "2")
    assert one == two
    keys = [line.split() for line in one.splitlines()]
    assert [len(line) for line in keys] == [4] * 4
    assert len(set(itertools.chain(*keys))) == 16  # absent and 0 differ, whatever the block
