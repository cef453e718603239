"""The host takes over what a beam step did to the device's rows, for all its sequences at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.control.plane import ControlPlane
from kvcore.ids import NO_TICKET

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]


def follow(
    control: ControlPlane, sequences: Index, parents: Index, low: Int32, high: Int32
) -> Int32:
    """Takes over what a beam step did, as it was described when the step was prepared.

    Parameters
    ----------
    sequences : intp array [n]
        Distinct, of one width W.
    parents : intp array [n, W]
        The old beam each beam goes on from; an entry out of range means the beam itself.
    low, high : int32 arrays [n]
        Fork mode: blocks before `low` were passed by reference, those from there to `high` copied
        for further children. Indirection mode: see `Paths.follow`.

    Returns
    -------
    int32 array [n]
        How many beams got copies of a tail.

    Notes
    -----
    Cannot fail. Enqueues nothing.
    """
    beams = np.arange(parents.shape[1])
    parents = np.where((parents < 0) | (parents >= beams.size), beams, parents)
    if control.paths is None:
        return _reorder(control, sequences, parents, low, high)
    control.paths.follow(sequences, parents, low, high)
    return np.zeros(sequences.shape, np.int32)


def _reorder(
    control: ControlPlane, sequences: Index, parents: Index, shared: Int32, blocks: Int32
) -> Int32:
    """Reorders rows of sequences whose parents are in range; see `follow`.

    What no row reaches any more is free at once: the step has run, and whoever read those pages
    came before it. A few dozen vector operations over the blocks in which rows may differ, so
    O(n W (blocks - common)).
    """
    seqs = control.seqs
    width = parents.shape[1]
    beams = np.arange(width)
    ordered = np.sort(parents, axis=1)
    further: Int32 = (ordered[:, 1:] == ordered[:, :-1]).sum(axis=1, dtype=np.int32)
    some = np.flatnonzero((parents != beams).any(axis=1))
    if not some.size:
        return further
    sequences, parents, shared, blocks = sequences[some], parents[some], shared[some], blocks[some]
    rows, first = seqs.rows[sequences, :width, None], seqs.common[sequences]
    columns = first[:, None] + np.arange(int((blocks - first).max(initial=0)))
    inside = (columns < blocks[:, None])[:, None, :]
    columns = np.minimum(columns, seqs.shape.max_blocks - 1)[:, None, :]
    passed = columns < shared[:, None, None]
    source = np.where(passed, parents[:, :, None], private_sources(parents)[:, :, None])
    for group, slots in enumerate(control.slots_of):
        old = seqs.table[rows, group, columns]
        new = np.take_along_axis(old, source, axis=1)
        changed = (old != new) & inside
        moved = changed & passed
        if np.count_nonzero(moved):
            slots.hold(new[moved])
            slots.release(old[moved], NO_TICKET, distinct=False)
        request, beam, column = np.nonzero(changed)
        where = rows[request, beam, 0], group, columns[request, 0, column]
        seqs.table[where] = new[changed]
    return further


def private_sources(parents: Index) -> Index:
    """The old beam whose private slots each beam gets, `[n, W]`.

    The first child of a parent takes the parent's over; every further one takes those of the next
    beam without children.

    >>> private_sources(np.array([[2, 2, 0, 2]]))
    array([[2, 1, 0, 3]])
    """
    width = parents.shape[1]
    order = np.argsort(parents, axis=1, kind="stable")  # children of one parent lie together
    sorted_parents = np.take_along_axis(parents, order, axis=1)
    repeats = np.zeros(parents.shape, np.bool_)
    repeats[:, 1:] = sorted_parents[:, 1:] == sorted_parents[:, :-1]
    further = np.zeros(parents.shape, np.bool_)
    np.put_along_axis(further, order, repeats, axis=1)
    childless = np.ones(parents.shape, np.bool_)
    np.put_along_axis(childless, parents, False, axis=1)
    spare = np.argsort(~childless, axis=1, kind="stable")  # beams without children come first
    rank = np.minimum(np.cumsum(further, axis=1) - further, width - 1)
    return np.where(further, np.take_along_axis(spare, rank, axis=1), parents)
