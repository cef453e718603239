"""Recorded traffic in the Mooncake format, and the tokens it stands for.

One JSON object per line: `timestamp` in ms, `input_length` and `output_length` in tokens, and
`hash_ids`, one per block of 512 tokens of the prompt, the last of which may be partly filled. Equal
ids mean equal tokens, which is all that a prefix cache asks, so the tokens are made up from them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from os import PathLike, fspath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.checks import LONGEST, as_int
from kvcore.errors import wrong
from kvcore.ids import div_ceil

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

BLOCK: Final = 512
"""Tokens that one hash id stands for."""

FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")

PRIME: Final = 2**29 - 3
SPREAD: Final = 331_804_469  # PRIME over the golden ratio: successive multiples keep apart
OUTPUTS: Final = 2**30  # above every token of a prompt
LONGEST_OUTPUT: Final = 2**31 - OUTPUTS - PRIME  # tokens: the last one is an int32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Requests in the order of their time. Number r is the r-th of them.

    The i-th token of block `id` is `id * SPREAD % PRIME + i`: no two blocks begin alike, and blocks
    whose ids differ by less than 469,458 have no token in common. Outputs follow the same rule
    above `OUTPUTS`, with the request's number as the id, so nothing else is ever equal to them.
    """

    name: str
    """Where it was read."""
    timestamps: NDArray[np.float64]
    """[R] milliseconds."""
    input_lengths: Int64
    """[R] tokens."""
    output_lengths: Int64
    """[R] tokens."""
    lines: Int64
    """[R] line of the file, from 1."""
    first: Int64
    """[R] where a request's blocks begin in `starts`."""
    counts: Int64
    """[R] how many there are."""
    starts: Int32
    """First token of every block of every request."""
    _positions: Int32 = field(default_factory=lambda: np.arange(BLOCK, dtype=np.int32))

    def __len__(self) -> int:
        return self.input_lengths.size

    def prompt(self, number: int) -> Int32:
        """The prompt of a request, int32 `[input_length]`, contiguous."""
        begin = self.first.item(number)
        starts = self.starts[begin : begin + self.counts.item(number)]
        tokens = np.add(starts[:, None], self._positions)
        flat: Int32 = tokens.reshape(-1)[: self.input_lengths.item(number)]
        return flat

    def output(self, number: int) -> Int32:
        """What a request generated, int32 `[output_length]`."""
        begin = OUTPUTS + number * SPREAD % PRIME
        return np.arange(begin, begin + self.output_lengths.item(number), dtype=np.int32)

    def head(self, requests: int) -> Trace:
        """The first `requests` of them, at least one; all where there are no more."""
        return self._changed(slice(None, as_int("requests", requests, 1)))

    def in_full_blocks(self) -> Trace:
        """The same with every block full, also the last of each prompt."""
        return self._changed(slice(None), input_lengths=self.counts * BLOCK)

    def _changed(self, rows: slice | Int64, **fields: Int64) -> Trace:
        columns = ("timestamps", "input_lengths", "output_lengths", "lines", "first", "counts")
        kept: dict[str, Any] = {c: fields.get(c, getattr(self, c))[rows] for c in columns}
        return Trace(name=self.name, starts=self.starts, **kept)


def read_trace(path: str | PathLike[str]) -> Trace:
    """Reads a trace. About 0.2 s for 12,000 requests of 25 blocks.

    Raises
    ------
    ValueError
        A line is not what it should be: the message names the file, the line and the field. Empty
        lines and further fields are skipped.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as file:
        return parse_trace(file, fspath(path))


def parse_trace(file: Iterable[bytes], name: str = "trace") -> Trace:
    """The trace that the lines of `file` make. See `read_trace`."""
    times, columns, ids = array("d"), array("q"), array("q")
    for line, text in enumerate(file, 1):
        if text.isspace():
            continue
        timestamp, input_length, output_length, hash_ids = _request(text, f"{name}, line {line}")
        times.append(timestamp)
        columns.extend((input_length, output_length, line, len(ids), len(hash_ids)))
        ids.extend(hash_ids)
    if not times:
        raise wrong(name, "at least one request", "none")
    table = np.frombuffer(columns, np.int64).reshape(-1, 5)
    lengths, outputs, lines, first, counts = (np.ascontiguousarray(column) for column in table.T)
    trace = Trace(
        name=name,
        timestamps=np.frombuffer(times, np.float64),
        input_lengths=lengths,
        output_lengths=outputs,
        lines=lines,
        first=first,
        counts=counts,
        starts=_first_tokens(np.frombuffer(ids, np.int64)),
    )
    if (np.diff(trace.timestamps) >= 0).all():
        return trace
    return trace._changed(np.argsort(trace.timestamps, kind="stable"))


def _first_tokens(ids: Int64) -> Int32:
    """The first token of each block. Ids too large for the rule are numbered by rank."""
    if ids.max() >= PRIME:
        ids = np.unique(ids, return_inverse=True)[1]
    return (ids * SPREAD % PRIME).astype(np.int32)


_fields: Final = itemgetter(*FIELDS)


def _request(text: bytes, where: str) -> tuple[float, int, int, list[int]]:
    """The fields of one line, checked."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(where, "a JSON object", text[:40], str(error)) from None
    if type(record) is not dict:
        raise wrong(where, "a JSON object", record)
    try:
        timestamp, input_length, output_length, hash_ids = _fields(record)
    except KeyError as error:
        raise wrong(f"{where}, {error.args[0]}", "a value", "none") from None
    if type(timestamp) not in (int, float) or not 0 <= timestamp < 2**53:
        raise wrong(f"{where}, timestamp", "milliseconds in [0, 2**53)", timestamp)
    if type(input_length) is not int or not 1 <= input_length <= LONGEST:
        raise wrong(f"{where}, input_length", f"tokens, 1 to {LONGEST}", input_length)
    if type(output_length) is not int or not 0 <= output_length <= LONGEST_OUTPUT:
        raise wrong(f"{where}, output_length", f"tokens, 0 to {LONGEST_OUTPUT}", output_length)
    if type(hash_ids) is not list:
        raise wrong(f"{where}, hash_ids", "a list of ints", hash_ids)
    expected = div_ceil(input_length, BLOCK)
    if len(hash_ids) != expected:
        blocks = f"{expected} ids, one per {BLOCK} of {input_length} tokens"
        raise wrong(f"{where}, hash_ids", blocks, len(hash_ids))
    if set(map(type, hash_ids)) != {int} or min(hash_ids) < 0 or max(hash_ids) >= 2**63:
        raise _wrong_id(hash_ids, where)
    return timestamp, input_length, output_length, hash_ids


def _wrong_id(hash_ids: list[Any], where: str) -> ValueError:
    fine = (type(value) is int and 0 <= value < 2**63 for value in hash_ids)
    place = list(fine).index(False)
    return wrong(f"{where}, hash_ids[{place}]", "an int in [0, 2**63)", hash_ids[place])
