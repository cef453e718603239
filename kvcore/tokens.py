"""Token ids at the door: any container of integers becomes one little-endian int32 image.

An ordinary token is an id in [0, 2**31 - 1]. A negative token stands for the 32-byte digest of a
multimodal item: `intern_digest` gives equal digests equal negative ids, in this process only. The
caller hashes images, sounds and arrays, with shape and type if they matter; kvcore hashes none.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import as_int, as_text
from kvcore.errors import wrong, wrong_type

TokenIds: TypeAlias = "Sequence[int] | array[int] | NDArray[Any] | memoryview"
"""What a call takes as tokens: a sequence of ints or a one-dimensional array of integers."""

MAX_ID: Final = 2**31 - 1
DIGEST_BYTES: Final = 32
IMAGE: Final = np.dtype("<i4")
_EXPECTED: Final = "a sequence of ints or a one-dimensional array of integers"
_NO_BYTES: Final = "bytes may be ids or their image: give an array with a dtype"


class _DigestPool:
    """Digests by the order in which they came: number n is token -2 - n; -1 stays reserved."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tokens: dict[bytes, int] = {}
        self.digests: list[bytes] = []
        self.uuids: dict[int, str] = {}

    def intern(self, digest: bytes, uuid: str | None) -> int:
        with self.lock:
            token = self.tokens.get(digest)
            if token is None:
                token = -2 - len(self.digests)
                self.digests.append(digest)  # before anyone can learn the token
                self.tokens[digest] = token
            if uuid is not None:
                self.uuids[token] = uuid
            return token


_pool: Final = _DigestPool()


def intern_digest(digest: bytes, uuid: str | None = None) -> int:
    """The token that stands for a digest: negative, equal for equal digests of this process.

    Thread safe. A digest stays known until the process ends (about 200 bytes each).

    Parameters
    ----------
    digest : bytes
        32 bytes that name the content, such as its SHA-256.
    uuid : str, optional
        The caller's name of the item, for events alone: neither equality nor keys see it. The
        latest one given for a digest counts.

    Raises
    ------
    TypeError, ValueError
        If `digest` is no bytes object, or not of 32 bytes.

    Examples
    --------
    >>> intern_digest(bytes(32)) == intern_digest(bytes(32)) < -1
    True
    """
    if not isinstance(digest, bytes | bytearray | memoryview):
        raise wrong_type("digest", "32 bytes", digest)
    digest = bytes(digest)
    if len(digest) != DIGEST_BYTES:
        raise wrong("digest", "32 bytes", f"{len(digest)} bytes", "give a SHA-256 digest")
    return _pool.intern(digest, None if uuid is None else as_text("uuid", uuid))


def digest_of(token: int) -> bytes:
    """The 32 bytes that a negative token stands for. Raises `ValueError` if there are none."""
    if not -2 - len(_pool.digests) < token < -1:
        raise wrong("token", "a digest's token, from intern_digest", token)
    return _pool.digests[-2 - token]


def uuid_of(token: int) -> str | None:
    """The uuid that came with a digest, or None. Raises `ValueError` like `digest_of`."""
    digest_of(token)
    return _pool.uuids.get(token)


def num_digests() -> int:
    """How many different digests this process knows."""
    return len(_pool.digests)


def gen_multimodal_cache_key_tokens(
    id_offset: int, digest: bytes, num_tokens: int, start: int = 0, uuid: str | None = None
) -> list[int]:
    """The tokens that stand for a stretch of one multimodal item in a prompt.

    Position 0 of the item becomes its digest, every later position p the id `id_offset + p`. An
    item that is split over calls gives the same tokens as in one piece. In a cross cache the item
    is the encoder's whole input, so that a part of another input is never found.

    Parameters
    ----------
    id_offset : int
        At least 0; take the vocabulary size, so that these ids are no text.
    digest : bytes
        32 bytes that name the item's content. kvcore hashes no arrays: put shape and type into
        your digest, else a 30x150 and a 150x30 image of the same bytes are one item.
    num_tokens : int
        How many tokens this stretch has, at least 1.
    start : int
        The position in the item of its first token.
    uuid : str, optional
        The caller's name of the item, shown in events.

    Raises
    ------
    TypeError, ValueError
        If a number is out of range, the last id beyond 2**31 - 1, or `digest` not of 32 bytes.

    Examples
    --------
    >>> tokens = gen_multimodal_cache_key_tokens(1000, bytes(32), 3)
    >>> tokens[0] < 0, tokens[1:]
    (True, [1001, 1002])
    >>> gen_multimodal_cache_key_tokens(1000, bytes(32), 2, start=3)
    [1003, 1004]
    """
    id_offset = as_int("id_offset", id_offset, 0, MAX_ID)
    num_tokens = as_int("num_tokens", num_tokens, 1)
    start = as_int("start", start, 0)
    if id_offset + start + num_tokens - 1 > MAX_ID:
        end = f"id_offset + start + num_tokens <= {MAX_ID + 1}"
        raise wrong("num_tokens", end, num_tokens)
    token = intern_digest(digest, uuid)
    ids = list(range(id_offset + start, id_offset + start + num_tokens))
    if start == 0:
        ids[0] = token
    return ids


def token_view(name: str, tokens: TokenIds, *, text_only: bool = False) -> memoryview:
    """The little-endian int32 image of tokens, as bytes; O(n).

    A contiguous int32 array is looked at in place, without a copy: its owner must not change it
    while the view is in use. In a list a bool counts as the int it is.

    Parameters
    ----------
    name : str
        The argument, for messages.
    tokens : TokenIds
        A sequence of ints, or a one-dimensional array or buffer of integers.
    text_only : bool
        Refuse digests.

    Returns
    -------
    memoryview
        Format "B", 4 bytes a token.

    Raises
    ------
    TypeError
        If `tokens` is no such container (an iterator is none), or its items are no integers.
    ValueError
        If an id exceeds 2**31 - 1, or is negative and no digest of this process.

    Examples
    --------
    >>> token_view("tokens", [1, 256]).hex(" ", 4)
    '01000000 00010000'
    """
    ids = tokens if isinstance(tokens, np.ndarray) else _as_array(name, tokens)
    if ids.dtype != IMAGE or not ids.flags.c_contiguous or ids.ndim != 1:
        ids = _as_image(name, ids)
    if not ids.size:
        return memoryview(b"")
    low = ids.min()
    if low < 0 and (text_only or low < -1 - len(_pool.digests) or (ids == -1).any()):
        raise _wrong_id(name, ids, text_only)
    return memoryview(ids).cast("B")  # type: ignore[arg-type]


def _as_array(name: str, tokens: object) -> NDArray[Any]:
    """A sequence or a buffer as an array of its own integer type."""
    if isinstance(tokens, list | tuple):
        return _of_sequence(name, tokens)
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(tokens, Sequence) and not isinstance(tokens, str):
            return _of_sequence(name, tokens)
        raise wrong_type(name, _EXPECTED, tokens, "list(tokens) makes one") from None
    if isinstance(tokens, bytes | bytearray | memoryview) and view.itemsize == 1:
        raise wrong_type(name, _EXPECTED, tokens, _NO_BYTES)
    return np.asarray(view)


def _of_sequence(name: str, tokens: Sequence[int]) -> NDArray[Any]:
    try:
        ids = np.frombuffer(array("I", tokens), np.uintc)  # twice as fast as anything signed
    except (OverflowError, TypeError):  # digests, or a mistake to be named
        try:
            return np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), IMAGE)
        except struct.error:
            raise _wrong_item(name, tokens) from None
    # Values beyond 2**31 - 1 would be negative in the view.
    return ids if ids.size and ids.max() > MAX_ID else ids.view(np.intc)


def _wrong_item(name: str, tokens: Sequence[int]) -> Exception:
    """The error for the first item of a sequence that is no int32."""
    for position, token in enumerate(tokens):
        try:
            as_int(f"{name}[{position}]", int(token) if isinstance(token, bool) else token)
            array("i", [token])
        except TypeError as error:
            return error
        except OverflowError:
            return _wrong_value(f"{name}[{position}]", token)
    return wrong(name, _EXPECTED, tokens)  # it changed under our hands


def _as_image(name: str, ids: NDArray[Any]) -> NDArray[np.int32]:
    """An array of any integer type and stride as a contiguous int32 image, checked for range."""
    if ids.dtype.kind not in "iu":
        raise wrong_type(name, _EXPECTED, ids.dtype, "ids are integers")
    if ids.ndim != 1:
        raise wrong(name, "one dimension", ids.shape, "flatten it")
    if ids.dtype.itemsize >= 4 and ids.size:
        outside = (ids > MAX_ID) | (ids < -MAX_ID - 1)
        if outside.any():
            position = int(outside.argmax())
            raise _wrong_value(f"{name}[{position}]", int(ids[position]))
    return np.ascontiguousarray(ids, IMAGE)


def _wrong_id(name: str, ids: NDArray[Any], text_only: bool) -> ValueError:
    bad = ids < 0
    if not text_only:
        bad &= (ids >= -1) | (ids < -1 - len(_pool.digests))
    position = int(bad.argmax())
    if text_only:
        remedy = "text_only says that there are no digests"
        return wrong(f"{name}[{position}]", f"an id in [0, {MAX_ID}]", int(ids[position]), remedy)
    return _wrong_value(f"{name}[{position}]", int(ids[position]))


def _wrong_value(name: str, token: int) -> ValueError:
    expected = f"an id in [0, {MAX_ID}] or a digest's token"
    return wrong(name, expected, token, "intern_digest gives the latter" if token < 0 else "")
