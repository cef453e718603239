"""The keys of blocks: a SHA-256 chain from a scope's root, the same in every process.

    root = SHA-256(mask byte, then 8 little-endian bytes for each value that is present)
    key  = SHA-256(key of the block before, then the block's tokens)

An ordinary token gives its 4 little-endian bytes, a digest its 32 bytes. Bits of the mask, and the
order of the values: 0 LoRA id, 1 salt, 2 epoch of the base weights, 3 epoch of the LoRA's weights.
A partial block is hashed like a full one. Any other process can compute these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Final

import numpy as np

from kvcore.checks import as_int
from kvcore.config import ReuseScope
from kvcore.errors import wrong_type
from kvcore.tokens import IMAGE, TokenIds, digest_of, token_view

TOKEN_BYTES: Final = IMAGE.itemsize
KEY_BYTES: Final = 32


def root_key(scope: ReuseScope, epoch: int | None = None, lora_epoch: int | None = None) -> bytes:
    """The key of a scope's root: what the key of its first block is chained to.

    Parameters
    ----------
    scope : ReuseScope
        A value that is absent and one that is 0 make different roots.
    epoch : int, optional
        Of the base weights, once they were replaced; unsigned 64-bit.
    lora_epoch : int, optional
        Of the weights of the scope's LoRA id; unsigned 64-bit.

    Examples
    --------
    >>> root_key(ReuseScope()).hex()[:16]
    '6e340b9cffb37a98'
    """
    values = (scope.lora_id, scope.salt, epoch, lora_epoch)
    mask = sum(1 << bit for bit, value in enumerate(values) if value is not None)
    present = [value.to_bytes(8, "little") for value in values if value is not None]
    return sha256(b"".join((bytes((mask,)), *present))).digest()


def next_key(previous: bytes, block: memoryview | bytes) -> bytes:
    """The key of one block, from the key before it and the image of its tokens.

    >>> next_key(root_key(ReuseScope()), token_view("block", [0, 1, 2, 3])).hex()[:16]
    '7b894451a88bc030'
    """
    raw = bytes(block)
    return sha256(previous + (_with_digests(raw) if _has_digests(raw) else raw)).digest()


def chain_keys(
    previous: bytes, tokens: memoryview | bytes, tokens_per_block: int, start: int = 0
) -> list[bytes]:
    """The keys of the blocks of a token image, the last of which may be partial; O(n).

    `start` skips that many bytes of the image. About 0.7 us a block of 32 tokens.

    >>> image = token_view("tokens", range(6))
    >>> keys = chain_keys(bytes(32), image, 4)
    >>> keys == [next_key(bytes(32), image[:16]), next_key(keys[0], image[16:])]
    True
    """
    keys = []
    raw = bytes(tokens)  # slices of bytes are cheaper than those of a memoryview
    digests = _has_digests(raw)
    step = TOKEN_BYTES * tokens_per_block
    for begin in range(start, len(raw), step):
        block = raw[begin : begin + step]
        previous = sha256(previous + (_with_digests(block) if digests else block)).digest()
        keys.append(previous)
    return keys


def _has_digests(raw: bytes) -> bool:
    return not raw[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()  # a sign bit among the top bytes


def _with_digests(block: bytes) -> bytes:
    """The bytes that are hashed for a block: digests in the place of their tokens."""
    ids = np.frombuffer(block, IMAGE)
    parts: list[bytes] = []
    begin = 0
    for position in np.flatnonzero(ids < 0).tolist():
        parts += [block[begin : TOKEN_BYTES * position], digest_of(int(ids[position]))]
        begin = TOKEN_BYTES * (position + 1)
    return b"".join((*parts, block[begin:]))


def sequence_to_blockchain_keys(
    tokens_per_block: int, scope: ReuseScope | None, tokens: TokenIds
) -> Iterator[tuple[list[int], bytes]]:
    """The keys of a prompt's blocks, for whoever routes or indexes by them.

    Lazy: what is not asked for is not hashed. Arguments are checked at the call.

    Parameters
    ----------
    tokens_per_block : int
        Tokens of a block, as in the manager's configuration.
    scope : ReuseScope or None
        The boundary of reuse; None is the empty scope.
    tokens : TokenIds
        Token ids, and tokens of digests.

    Yields
    ------
    tuple of list of int and bytes
        The tokens of a block and its 32-byte key: first the root with no tokens, then every block,
        the partial one at the end too.

    Raises
    ------
    TypeError, ValueError
        As for the tokens of a cache, or if `tokens_per_block` is below 1.

    Examples
    --------
    >>> for block, key in sequence_to_blockchain_keys(4, ReuseScope(), [0, 1, 2, 3, 4]):
    ...     print(block, key.hex()[:16])
    [] 6e340b9cffb37a98
    [0, 1, 2, 3] 7b894451a88bc030
    [4] ...
    """
    tokens_per_block = as_int("tokens_per_block", tokens_per_block, 1)
    if scope is not None and not isinstance(scope, ReuseScope):
        raise wrong_type("scope", "a ReuseScope or None", scope)
    image = bytes(token_view("tokens", tokens))  # the caller may change the tokens meanwhile
    return _blocks(tokens_per_block, scope or ReuseScope(), image)


def _blocks(T: int, scope: ReuseScope, image: bytes) -> Iterator[tuple[list[int], bytes]]:  # noqa: N803
    key = root_key(scope)
    yield [], key
    for begin in range(0, len(image), TOKEN_BYTES * T):
        block = image[begin : begin + TOKEN_BYTES * T]
        key = next_key(key, block)
        yield np.frombuffer(block, IMAGE).tolist(), key
