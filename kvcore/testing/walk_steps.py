"""The actions of a random walk that prepare steps, and what delays its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.errors import StateError
from kvcore.testing.check import OracleError

if TYPE_CHECKING:
    from kvcore.batch import Batch
    from kvcore.device.base import Device, Stream
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager
    from kvcore.testing.lockstep import Lockstep
    from kvcore.testing.lockstep_reuse import Pair
    from kvcore.testing.small import Draw

LONG: Final = 16
"""Blocks beyond what the pool holds: no walk asks for more."""

Hold = Callable[["Stream"], Callable[[], object]]
"""Takes a stream, holds it up, and returns what lets it go on."""


class StepActions:
    """The part of `Walk` that looks at steps, streams and the tables of callers."""

    draw: Draw
    device: Device
    manager: KVCacheManager
    lockstep: Lockstep
    block: int
    default: Stream
    streams: list[Stream]
    one_in: Callable[[int], bool]
    pair: Callable[..., Pair | None]
    stream: Callable[[], object]

    def __init__(self, hold: Hold | None) -> None:
        self._held: list[Callable[[], object]] = []  # what lets held streams go on
        self._hold = hold
        if hold is None and isinstance(self.device, HostDevice) and self.device.deferred:
            self._hold = _gate
        self._settling = False
        if self.lockstep.engine is not None and self._hold is not None:
            self.lockstep.engine.delay = self._delay
        self._step: tuple[list[KVCache], list[list[int]], int] | None = None
        self._batch: Batch | None = None
        if self.device.has_memory:
            self._batch = self.manager.create_batch(64, 256)

    def hold(self) -> None:
        """Delays a stream: what is enqueued from now on stays there until `release`."""
        if self._hold is not None:
            self._held.append(self._hold(self.draw.pick([self.default, *self.streams])))

    def _delay(self, stream: Stream) -> None:
        if self._hold is not None and not self._settling and self.one_in(3):
            self._held.append(self._hold(stream))

    def release(self) -> None:
        """Lets all streams go on."""
        for open_ in self._held:
            open_()
        self._held.clear()

    def map(self) -> None:
        """Compares the mapping on the host and on the device with the table."""
        pairs = [pair for pair in self.lockstep.pairs if pair.model.is_active]
        starts = [self.draw.number(0, pair.model.capacity) for pair in pairs]
        counts = [p.model.capacity - start for p, start in zip(pairs, starts, strict=True)]
        reals = [pair.real for pair in pairs]
        expected = [
            (row[position // self.block], position % self.block)
            for kv, start, count in zip(reals, starts, counts, strict=True)
            for row in self._rows([kv])
            for position in range(start, start + count)
        ]
        slots, offsets = self.manager.slot_mapping(reals, counts, start=starts)
        same("slot_mapping", expected, list(zip(slots.tolist(), offsets.tolist(), strict=True)))
        if self._batch is not None and len(expected) <= 256:
            self.release()
            self._batch.prepare(reals, counts, start=starts, stream=self.stream())
            found = self.device.to_host(self._batch.mapping[0], stream=self._batch._on(None))
            padding = [(-1, 0)] * (256 - len(expected))
            same("Batch.mapping", expected + padding, list(map(tuple, found.tolist())))
            self._step = (reals, self._rows(reals), self.lockstep.calls)

    def _rows(self, kv_caches: Sequence[KVCache]) -> list[list[int]]:
        return [
            kv.get_base_page_indices(0, beam).tolist()
            for kv in kv_caches
            for beam in range(kv.beam_width)
        ]

    def again(self) -> None:
        """Asks the step that was prepared some time ago: it refuses, or still knows its rows."""
        if self._batch is None or self._step is None:
            return
        reals, rows, calls = self._step
        self.release()
        try:
            table = self._batch.page_table(0)
        except StateError:
            if calls == self.lockstep.calls:
                raise
        else:
            found = self.device.to_host(table, stream=self._batch._on(None)).tolist()
            for name, current in (("device", found), ("host", self._rows(reals))):
                cut = [row[: len(own)] for row, own in zip(current, rows, strict=True)]
                same(f"rows of a step that was not refused, {name}", rows, cut)

    def bind(self) -> None:
        """Binds or unbinds a row of the caller's."""
        pair = self.pair()
        if pair and pair.model.is_active:
            beam = self.draw.number(0, pair.model.beam_width - 1)
            row = np.empty(self.manager.get_storage_statistics()[0].total + LONG, np.int32)
            pair.real.set_base_page_index_buf(beam, 0, None if self.one_in(3) else row)
            self.lockstep.compare()


def _gate(stream: Stream) -> Callable[[], object]:
    gate = Gate()
    stream.wait(gate)
    return gate.open


def same(what: str, expected: object, got: object) -> None:
    """Fails unless both are equal."""
    if expected != got:
        raise OracleError(f"{what}: expected {expected}, got {got}")
