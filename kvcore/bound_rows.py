"""Rows of the caller's own page table that follow a beam's page indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.control.sequences import NO_LIMIT, SequenceTable
from kvcore.errors import wrong
from kvcore.ids import NO_SLOT

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]


class BoundRows:
    """Caller's int32 arrays by sequence, beam and layer group, rewritten at every change.

    The shortest row of a sequence bounds its blocks (`SequenceTable.block_bound`), so that growing
    past it is refused before anything changes.
    """

    def __init__(self, seqs: SequenceTable) -> None:
        self._seqs = seqs
        self._rows: dict[int, dict[tuple[int, int], Int32]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def bind(self, sequence: int, beam: int, layer_group: int, row: Int32) -> None:
        """Lets `row` follow from now on, instead of the one bound before."""
        self.unbind(sequence, beam, layer_group, keep=row)
        self._rows.setdefault(sequence, {})[beam, layer_group] = row
        self._bound(sequence)
        self.refresh(sequence)

    def unbind(self, sequence: int, beam: int, layer_group: int, keep: Int32 | None = None) -> None:
        """Fills the bound row with `NO_SLOT`, unless it is `keep`, and lets go of it.

        A row that its owner made read-only meanwhile stays as it is.
        """
        row = self._rows.get(sequence, {}).pop((beam, layer_group), None)
        self._bound(sequence)
        if row is not None and row is not keep and row.flags.writeable:
            row[:] = NO_SLOT

    def release(self, sequence: int, first_beam: int = 0) -> None:
        """Unbinds every row of beams from `first_beam` on."""
        for beam, group in [key for key in self._rows.get(sequence, {}) if key[0] >= first_beam]:
            self.unbind(sequence, beam, group)

    def check(self, sequences: Index, blocks: Int32) -> None:
        """Raises `ValueError` if a bound row is too short for `blocks[i]` blocks or read-only."""
        bound = self._seqs.block_bound[sequences]
        for i in np.flatnonzero(bound < NO_LIMIT).tolist():
            if blocks[i] > bound[i]:
                raise wrong(
                    "capacity",
                    f"at most the {bound[i]} blocks of the bound page-index buffer",
                    f"{blocks[i]} blocks",
                    "bind a longer buffer first",
                )
            if not all(row.flags.writeable for row in self._rows[int(sequences[i])].values()):
                raise wrong(
                    "buffer", "bound page-index buffers that stay writable", "a read-only one"
                )

    def refresh(self, sequence: int) -> None:
        """Writes the present page indices of a sequence into its bound rows.

        A row that its owner made read-only meanwhile stays as it is.
        """
        for (beam, group), row in self._rows.get(sequence, {}).items():
            if not row.flags.writeable:
                continue
            indices = self._seqs.cells_of(sequence, group, beam)
            row[: indices.size] = indices
            row[indices.size :] = NO_SLOT

    def refresh_all(self, sequences: Index) -> None:
        """`refresh` of those sequences that have bound rows."""
        for sequence in self._rows.keys() & set(sequences.tolist()):
            self.refresh(sequence)

    def _bound(self, sequence: int) -> None:
        rows = self._rows.get(sequence)
        if not rows:
            self._rows.pop(sequence, None)
        sizes = (row.size for row in rows.values()) if rows else ()
        self._seqs.block_bound[sequence] = min(sizes, default=NO_LIMIT)
