"""Beam steps in indirection mode: pages stay, and the device's paths follow the parents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.beam_steps import BeamSteps, ForkSteps
from kvcore.device.base import PathArrays
from kvcore.errors import StateError
from kvcore.ids import NO_TICKET
from kvcore.layout import PageGeometry, page_geometry

if TYPE_CHECKING:
    from kvcore.control.paths import Paths
    from kvcore.device.base import Array, PageStack, Stream
    from kvcore.device.tables import DeviceTables
    from kvcore.parents import Members
    from kvcore.plan import TokenMoves
    from kvcore.runtime import Runtime
    from kvcore.steps import Step

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]

BASE, OWN, VALID = 2, 3, 4


class PathSteps(BeamSteps):
    """Steps that change who has which position, and nothing else."""

    def __init__(
        self,
        runtime: Runtime,
        paths: Paths,
        twin: DeviceTables,
        words: Int32,
        rows: Array,
        parts: list[Array],
    ) -> None:
        super().__init__(runtime, words, rows, parts)
        self._paths, self._twin = paths, twin
        self.cells: Array = twin.by_group[0]
        first, width, base, own, valid = parts
        most = runtime.config.max_beam_width
        self.arrays = PathArrays(rows, first, width, base, own, valid, most)

    def describe_tokens(self, step: Step, starts: Int32, counts: int | Int32) -> None:
        owner, size, paths = step.owner, step.owner.size, self._paths
        own = paths.own_from(step.sequences, starts, counts)
        valid = np.maximum(starts + counts, self._runtime.control.seqs.history[step.sequences])
        for word, values in (BASE, paths.base[step.sequences]), (OWN, own), (VALID, valid):
            self._words[word, :size] = values[owner]

    def _changes(self, first: Index) -> tuple[Int32, Int32, Int32]:
        words = self._words
        return words[OWN, first], words[VALID, first], np.zeros(first.shape, np.int32)

    def map_tokens(self, step: Step, starts: Array, ends: Array, out: Array, on: Stream) -> None:
        """The twin's new cells, and a mapping that reads through them."""
        device, seqs, owner = self._runtime.device, self._runtime.control.seqs, step.owner
        if owner.size == step.sequences.size:
            return  # nobody has beams
        try:
            self._twin.send(self._paths.dirty, seqs.used_rows, np.empty(0, np.int32), on)
            device.map_paths(
                self._runtime.device_tables().by_group,
                self.cells,
                self.arrays,
                starts,
                ends,
                out,
                tokens_per_block=seqs.shape.tokens_per_block,
                stream=on,
            )
        finally:
            self._twin.seal(on)
        self._paths.end[step.sequences[owner]] = self._words[OWN, : owner.size]

    def noted(self, members: Members) -> None:
        self._paths.end[members.sequences] = members.high

    def _resend(self, sequence: int) -> None:
        self._paths.resend(sequence, NO_TICKET)

    def enqueue(self, parents: Array, stream: Stream) -> None:
        self._runtime.device.step_paths(self.cells, self.arrays, parents, stream=stream)

    def take_indirection(self, out: Array, stream: Stream) -> None:
        self._runtime.device.take_paths(self.cells, self.arrays, out, stream=stream)


def beam_steps(runtime: Runtime, words: Int32, rows: Array, parts: list[Array]) -> BeamSteps:
    """The beam steps of a batch, in the manager's mode."""
    paths, twin = runtime.control.paths, runtime.path_tables
    if paths is None or twin is None:
        return ForkSteps(runtime, words, rows, parts)
    return PathSteps(runtime, paths, twin, words, rows, parts)


class TokenMover:
    """Moves tokens from page to page, all layers and roles of one layout in one launch."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stacks: dict[int, list[PageStack]] = {}  # by layer group

    def check(self) -> None:
        """Raises `StateError` unless every buffer is declared, so that tokens can be found."""
        layout = self._runtime.layout
        opaque = [place.buffer for place in layout.places.values() if place.buffer.shape is None]
        if opaque:
            raise StateError(
                f"beams in indirection mode: tokens of {len(opaque)} buffers would have to move, "
                "and where a token lies in them is not declared; give their BufferConfig a shape, "
                "dtype and layout"
            )

    def enqueue(self, moves: tuple[TokenMoves, ...], stream: Stream) -> None:
        """Enqueues the moves. The caller has checked."""
        device = self._runtime.device
        if not device.has_memory:
            return
        for move in moves:
            pairs = np.stack([move.src, move.dst])
            sent = device.empty(pairs.shape, np.int32, stream=stream)
            device.from_host(pairs, sent, stream=stream)
            for stack in self._of(move.layer_group):
                device.move_tokens(stack, sent[0], sent[1], stream=stream)

    def _of(self, group: int) -> list[PageStack]:
        made = self._stacks.get(group)
        if made is None:
            made = self._stacks[group] = self._make(group)
        return made

    def _make(self, group: int) -> list[PageStack]:
        runtime = self._runtime
        tokens, alike = runtime.layout.tokens_per_block, dict[PageGeometry, list[Any]]()
        for place in runtime.layout.places.values():
            if place.layer_group == group:
                memory = runtime.pool_places[place.pool_group][place.pool]
                geometry = page_geometry(place, tokens)
                alike.setdefault(geometry, []).append((*memory, place.offset))
        return [
            runtime.device.page_stack(places, 1, geometry) for geometry, places in alike.items()
        ]
