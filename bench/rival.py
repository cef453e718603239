"""The rival on the control plane: the same contract as plain Python objects, one loop per sequence.

`advance` gives what kvcore's gives: all or nobody, duplicates and unknown members refused before
anything changes, an int32 page table kept current. It has nothing else (no streams, beams, layer
groups, locks), so it is a lower bound for that design. Managers of the field do more per sequence:
vLLM 0.33's `KVCacheManager` took 1,410 µs for 256 sequences by one token (block size 16, two CPU
cores, median).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VLLM_ADVANCE_256_US = 1_410.0
"""vLLM 0.33, 256 sequences by one token each; not measured in the run it is quoted in."""


class PlainSequence:
    """One sequence: its row, how many tokens it has room for, and the pages that hold them."""

    __slots__ = ("capacity", "pages", "row")

    def __init__(self, row: int) -> None:
        self.row = row
        self.capacity = 0
        self.pages: list[int] = []


class PlainManager:
    """A free list, a dictionary of sequences and a page table."""

    def __init__(self, *, pages: int, tokens_per_block: int, rows: int, blocks: int) -> None:
        self.free = list(range(pages))
        self.tokens_per_block = tokens_per_block
        self.sequences: dict[int, PlainSequence] = {}
        self.table = np.full((rows, blocks), -1, np.int32)

    def create(self, key: int) -> None:
        """Adds an empty sequence."""
        self.sequences[key] = PlainSequence(len(self.sequences))

    def advance(self, keys: Sequence[int], n: int) -> bool:
        """Gives each sequence room for `n` more tokens, all of them or none."""
        if len(set(keys)) < len(keys):
            raise ValueError("a sequence occurs twice")
        block = self.tokens_per_block
        needs = []
        total = 0
        for key in keys:
            sequence = self.sequences[key]
            missing = -(-(sequence.capacity + n) // block) - len(sequence.pages)
            needs.append((sequence, missing))
            total += missing
        if total > len(self.free):
            return False
        for sequence, missing in needs:
            if missing:
                self._grow(sequence, missing)
            sequence.capacity += n
        return True

    def _grow(self, sequence: PlainSequence, count: int) -> None:
        taken = self.free[-count:]
        del self.free[-count:]
        first = len(sequence.pages)
        sequence.pages += taken
        self.table[sequence.row, first : first + count] = taken

    def truncate(self, keys: Sequence[int], capacity: int) -> None:
        """Takes back the pages past `capacity`."""
        keep = -(-capacity // self.tokens_per_block)
        for key in keys:
            sequence = self.sequences[key]
            self.free += sequence.pages[keep:]
            self.table[sequence.row, keep : len(sequence.pages)] = -1
            del sequence.pages[keep:]
            sequence.capacity = capacity
