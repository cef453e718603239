"""Operations on paths of the devices without a GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.device import reference_paths as reference
from kvcore.device.checks import (
    ANY,
    INT32,
    check_array,
    check_map_paths,
    check_paths,
    check_take_paths,
)
from kvcore.device.parts import Array, Stream
from kvcore.device.paths import PathArrays, PathOperations


class HostPaths(PathOperations):
    """The contract on NumPy."""

    @abstractmethod
    def _submit(self, stream: Stream, label: str, work: Callable[..., None], *args: Any) -> None:
        """Enqueues work."""

    def step_paths(
        self, cells: Array, beams: PathArrays, parents: Array, *, stream: Stream
    ) -> None:
        check_paths(cells, beams, np.ndarray)
        check_array("parents", parents, np.ndarray, INT32, (ANY,))
        self._submit(stream, "step_paths", reference.step_paths, cells, beams, parents)

    def take_paths(self, cells: Array, beams: PathArrays, out: Array, *, stream: Stream) -> None:
        check_take_paths(cells, beams, out, np.ndarray)
        self._submit(stream, "take_paths", reference.take_paths, cells, beams, out)

    def map_paths(
        self,
        tables: Array,
        cells: Array,
        beams: PathArrays,
        starts: Array,
        ends: Array,
        out: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        args = tables, cells, beams, starts, ends, out, tokens_per_block
        check_map_paths(*args, np.ndarray)
        self._submit(stream, "map_paths", reference.map_paths, *args)
