"""Sequences that begin as another one: full blocks are shared, the rest is copied."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.control.plane import ControlPlane
from kvcore.ids import NO_TICKET

Int32 = NDArray[np.int32]


def shared_blocks(control: ControlPlane, sequence: int) -> tuple[int, int]:
    """Blocks that a fork shares, the full ones of the history, and blocks in all."""
    seqs = control.seqs
    blocks = int(seqs.num_blocks[sequence])
    return min(int(seqs.history[sequence]) // seqs.shape.tokens_per_block, blocks), blocks


def take_private(control: ControlPlane, count: int) -> Int32:
    """Slots `[layer groups, count]`. The caller has made room."""
    return np.stack([slots.take(count) for slots in control.slots_of])


def write_fork(
    control: ControlPlane, sequence: int, fork: int, private: Int32, shared: int
) -> None:
    """Makes empty `fork` what `sequence` is, with `private` pages from block `shared` on."""
    seqs = control.seqs
    row = seqs.page_rows(sequence)[0]
    for group, slots in enumerate(control.slots_of):
        slots.share(row[group, :shared], 1)
    target = seqs.rows[[fork], 0]
    blocks = row.shape[1]
    seqs.table[target[0], :, :shared] = row[:, :shared]
    seqs.table[target[0], :, shared:blocks] = private
    for column in (seqs.capacity, seqs.history, seqs.num_blocks, seqs.limit):
        column[fork] = column[sequence]
    seqs.active[fork] = True
    seqs.mark_blocks(target, blocks, NO_TICKET)
