"""Operations on beams of the devices without a GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.device import reference_beams as reference
from kvcore.device.beams import BeamArrays, BeamOperations, TailBuffers, TailPlace
from kvcore.device.checks import (
    check_copy_tails,
    check_distinct,
    check_pairs,
    check_permute_rows,
    check_step_rows,
    check_tails,
)
from kvcore.device.hostmemory import HostMemory, own_memory
from kvcore.device.parts import Array, Int32, Stream
from kvcore.device.reference import num_slots
from kvcore.errors import wrong, wrong_type


@dataclass(frozen=True, slots=True)
class HostTailBuffers:
    """The places of tails."""

    places: tuple[tuple[HostMemory, int, int, int, int], ...]

    @property
    def num_places(self) -> int:
        return len(self.places)


class HostBeams(BeamOperations):
    """The contract on NumPy."""

    @abstractmethod
    def _submit(self, stream: Stream, label: str, work: Callable[..., None], *args: Any) -> None:
        """Enqueues work."""

    def step_rows(
        self,
        table: Array,
        beams: BeamArrays,
        parents: Array,
        sources: Array,
        *,
        stream: Stream,
    ) -> None:
        check_step_rows(table, beams, parents, sources, np.ndarray)
        self._submit(stream, "step_rows", reference.step_rows, table, beams, parents, sources)

    def tail_buffers(self, places: Sequence[TailPlace]) -> TailBuffers:
        check_tails(places)
        return HostTailBuffers(tuple((own_memory(place[0]), *place[1:]) for place in places))

    def copy_tails(
        self,
        buffers: TailBuffers,
        table: Array,
        beams: BeamArrays,
        sources: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        places = _backed(buffers)
        check_copy_tails(table, beams, sources, tokens_per_block, np.ndarray)
        args = places, table, beams, sources, tokens_per_block
        self._submit(stream, "copy_tails", reference.copy_tails, *args)

    def copy_tokens(self, buffers: TailBuffers, pairs: Int32, *, stream: Stream) -> None:
        places, lists = _backed(buffers), check_pairs(pairs)
        check_apart(num_slots([place[:2] for place in places]), *lists[:2])
        self._submit(stream, "copy_tokens", reference.copy_tokens, places, *lists)

    def permute_rows(
        self,
        arrays: Sequence[Array],
        parents: Array,
        *,
        width: int,
        starts: Array | None = None,
        tokens: Array | None = None,
        token_axis: int = 2,
        stream: Stream,
    ) -> None:
        args = tuple(arrays), parents, width, starts, tokens, token_axis
        check_permute_rows(*args, np.ndarray)
        check_distinct([array.ctypes.data for array in arrays if array.size])
        self._submit(stream, "permute_rows", reference.permute_rows, *args)


def _backed(buffers: TailBuffers) -> list[reference.Place]:
    """What the reference needs to know, with the memory that is backed now."""
    if not isinstance(buffers, HostTailBuffers):
        raise wrong_type("buffers", "tail buffers of a host device", buffers)
    return [(own_memory(place[0]).backed, *place[1:]) for place in buffers.places]


def check_apart(end: int, src: Int32, dst: Int32) -> None:
    """On a GPU the order of such copies is undefined; here it is an error."""
    real = (src >= 0) & (src < end) & (dst >= 0) & (dst < end)
    sources, targets = src[real], dst[real]
    if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
        raise wrong("dst", "distinct slots that are no source", dst.tolist())
