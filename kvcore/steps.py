"""What a `Batch` remembers of its present step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import Array, PageStack, Stream


@dataclass(slots=True)
class Step:
    """What `Batch.prepare` prepared."""

    sequences: NDArray[np.intp]
    owner: NDArray[np.intp]  # position in `sequences` of each row
    num_tokens: int
    count: int  # tokens per row; -1: they differ
    versions: NDArray[np.int64]  # of the sequences
    changes: int = 0  # of any sequence, when last compared
    loans: int = 0  # changes of loans, when last compared
    stream: Stream = None  # type: ignore[assignment]  # where it was prepared
    last: Stream = None  # type: ignore[assignment]  # where its newest work runs
    over: bool = False  # a beam step has ended it


class UsualAppend(NamedTuple):
    """An append of stacked layers that was checked: what another one must be to need no checks."""

    layers: Sequence[int]
    roles: list[str]
    num_tokens: int
    stack: PageStack
    mapping: Array
    kind: Any  # the class of the arrays
    shape: tuple[int, ...]
    dtype: Any  # theirs: one object for every type in this machine's byte order

    def fits(
        self, layers: int | Sequence[int], buffers: Mapping[str, Any], num_tokens: int
    ) -> bool:
        """Whether that append is of this kind."""
        if layers.__class__ is not self.layers.__class__ or layers != self.layers:
            return False
        if num_tokens != self.num_tokens or list(buffers) != self.roles:
            return False
        for array in buffers.values():
            if array.__class__ is not self.kind or array.shape != self.shape:
                return False
            if array.dtype is not self.dtype:
                return False
        return True
