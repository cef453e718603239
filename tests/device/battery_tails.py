"""Battery: the written tails of blocks, copied behind reordered beams or from slot to slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvcore.device.base import TailPlace
from tests.device.battery_base import BatteryBase
from tests.device.battery_beams import (
    PARENTS,
    Request,
    batch_of,
    expect_step,
    numbered,
    put_beams,
    random_requests,
)
from tests.device.harness import Pool, Rig


@dataclass
class Tails:
    """Tail buffers and the pools they lie in, as the oracle needs them."""

    pools: list[Pool]
    places: list[TailPlace]
    buffers: Any

    @classmethod
    def make(cls, rig: Rig, shapes: list[list[tuple[int, int]]], num_slots: int, gap: int) -> Tails:
        """A pool per list of (bytes, bytes of a token), each buffer behind a gap."""
        pools, places = [], []
        for buffers in shapes:
            slot_bytes = sum(nbytes + gap for nbytes, _ in buffers)
            pool = rig.pool(slot_bytes, num_slots)
            pools.append(pool)
            offset = 0
            for nbytes, token_bytes in buffers:
                offset += gap
                places.append(TailPlace(pool.memory, slot_bytes, offset, nbytes, token_bytes))
                offset += nbytes
        return cls(pools, places, rig.device.tail_buffers(places))

    @property
    def num_slots(self) -> int:
        return min(pool.num_slots for pool in self.pools)

    def expect(self, src: int, dst: int, tokens: int) -> None:
        """Copies the first tokens of a slot in the expected pools."""
        if tokens <= 0 or not (0 <= src < self.num_slots and 0 <= dst < self.num_slots):
            return
        for place in self.places:
            pool = next(pool for pool in self.pools if pool.memory is place.memory)
            size = place.nbytes
            if place.token_bytes:
                size = min(size, tokens * place.token_bytes)
            part = slice(place.offset, place.offset + size)
            pool.slot(dst)[part] = pool.slot(src)[part]

    def check(self) -> None:
        """Every byte of every pool is as expected."""
        for pool in self.pools:
            pool.check()


T = 4
SHAPES = {
    "keys and values": ([[(64 * T, 64), (64 * T, 64)]], 32),
    "two pools": ([[(256 * T, 256)], [(16 * T, 16)] * 3], 16),
    "odd": ([[(3 * T, 3), (5 * T, 5)], [(7 * T, 7)]], 1),
    "two-byte": ([[(6 * T, 6)] * 2], 2),
    "four-byte": ([[(20 * T, 20), (4 * T, 4)]], 4),
    "eight-byte": ([[(24 * T, 24)]], 8),
    "whole slots": ([[(1040, 0)], [(5008, 0)]], 0),
    "long tokens": ([[(4112 * T, 4112), (10_000 * T, 10_000)]], 16),
    "states beside tokens": ([[(128 * T, 128), (2032, 0)]], 16),
    "many kinds": ([[(16 * T * n, 16 * n) for n in range(1, 12)]], 16),
}


class TailTests(BatteryBase):
    """`tail_buffers`, `copy_tails`, `copy_tokens`."""

    @pytest.mark.parametrize("kind", SHAPES)
    def test_first_tokens_are_copied(self, rig, kind):
        shapes, gap = SHAPES[kind]
        tails = Tails.make(rig, shapes, 30, gap)
        slots = rig.rng.permutation(30).astype(np.int32)
        tokens = np.array([4, 1, 2, 3, 0, -5, 4, 9, 2**31 - 1], np.int32)
        src, dst = slots[:9].copy(), slots[9:18].copy()
        src[6], dst[7] = -1, tails.num_slots
        rig.device.copy_tokens(tails.buffers, np.stack([src, dst, tokens]), stream=rig.stream)
        for pair in zip(src, dst, tokens.tolist(), strict=True):
            tails.expect(*pair)
        tails.check()

    @pytest.mark.parametrize("pairs", [255, 256, 257, 600])
    def test_many_pairs_at_once(self, rig, pairs):
        tails = Tails.make(rig, [[(32 * T, 32)]], 2 * pairs, 16)
        slots = rig.rng.permutation(2 * pairs).astype(np.int32)
        src, dst = slots[:pairs], slots[pairs:]
        tokens = rig.rng.integers(0, T + 1, pairs).astype(np.int32)
        rig.device.copy_tokens(tails.buffers, np.stack([src, dst, tokens]), stream=rig.stream)
        for pair in zip(src, dst, tokens.tolist(), strict=True):
            tails.expect(*pair)
        tails.check()

    def test_pairs_may_change_after_the_call(self, rig):
        tails = Tails.make(rig, [[(32 * T, 32)]], 8, 16)
        pairs = np.array([[1], [2], [3]], np.int32)
        rig.device.copy_tokens(tails.buffers, pairs, stream=rig.stream)
        pairs[:, 0] = 4, 5, 1
        tails.expect(1, 2, 3)
        tails.check()

    @pytest.mark.parametrize("kind", SHAPES)
    def test_tails_follow_their_rows(self, rig, kind):
        """A step's rows, then its tails, as the two are used."""
        shapes, gap = SHAPES[kind]
        widths = [4, 1, 7, 2]
        tails = Tails.make(rig, shapes, 17 * 6, gap)
        for _ in range(3):
            requests = random_requests(rig, widths, 17, 6, T)
            table = rig.rng.permutation(17 * 2 * 6).astype(np.int32).reshape(17, 2, 6) // 2
            table[:, 0] = rig.rng.permutation(17 * 6).reshape(17, 6)
            table[rig.rng.random(table.shape) < 0.1] = -1
            run_tails(rig, tails, table, requests)
            tails.check()

    def test_full_and_empty_tails(self, rig):
        tails = Tails.make(rig, [[(16 * T, 16)] * 4], 24, 16)
        for shared, valid in ((0, 4 * T), (3, 4 * T), (3, 3 * T), (2, 2 * T + 1), (4, 99), (2, -1)):
            rows = rig.rng.permutation(6)[:4].tolist()
            request = Request(rows, [2, 2, 2, 2], shared, 4, valid)
            table = rig.rng.permutation(24).astype(np.int32).reshape(6, 1, 4)
            run_tails(rig, tails, table, [request])
            tails.check()

    def test_wide_requests_copy_their_tails(self, rig):
        width = 300
        tails = Tails.make(rig, [[(8 * T, 8)]], 2 * width, 0)
        for kind in ("all equal", "two of each", "one cycle"):
            request = Request(list(range(width)), PARENTS[kind](width), 0, 2, T + 2)
            table = rig.rng.permutation(2 * width).astype(np.int32).reshape(width, 1, 2)
            run_tails(rig, tails, table, [request])
            tails.check()

    def test_sources_and_rows_outside_the_table_copy_nothing(self, rig):
        tails = Tails.make(rig, [[(16 * T, 16)]], 8, 0)
        batch = batch_of([Request([0, 1, 2, 3], [0] * 4, 0, 2, 2 * T)])
        batch["rows"][2:] = 4, -3
        table = rig.put(numbered((4, 2)))
        beams, sources = put_beams(rig, batch), rig.put([-1, 7, 0, 1], np.int32)
        rig.device.copy_tails(
            tails.buffers, table, beams, sources, tokens_per_block=T, stream=rig.stream
        )
        tails.check()

    def test_slots_beyond_the_pools_are_skipped(self, rig):
        tails = Tails.make(rig, [[(16 * T, 16)], [(48 * T, 48)]], 8, 0)
        table = np.array([[0, tails.num_slots, 5, -1], [1, 2, 2**31 - 1, 3]], np.int32)
        run_tails(rig, tails, table[:, None], [Request([0, 1], [0, 0], 0, 4, 4 * T)])
        tails.check()

    def test_buffers_follow_pools_that_grow(self, rig):
        grain = rig.device.grain(0)
        memory = rig.reserve(2 * grain, grain)
        places = [TailPlace(memory, grain // 2, 0, 64, 16)]
        buffers = rig.device.tail_buffers(places)
        pair = np.array([[0], [3], [2]], np.int32)
        memory.resize(2 * grain)
        words = memory.array(np.int32, (grain // 2,))
        rig.device.fill_words(words, 5, stream=rig.stream)
        rig.device.fill_words(words[:16], 9, stream=rig.stream)
        rig.device.copy_tokens(buffers, pair, stream=rig.stream)
        found = rig.get(words[3 * grain // 8 :][:16])
        assert found.tolist() == [9] * 8 + [5] * 8

    def test_copies_of_no_tails(self, rig):
        tails, none = Tails.make(rig, [[(16 * T, 16)]], 8, 0), np.zeros((3, 0), np.int32)
        rig.device.copy_tokens(tails.buffers, none, stream=rig.stream)
        empty = rig.device.tail_buffers([])
        assert (empty.num_places, tails.buffers.num_places) == (0, 1)
        one = np.array([[1], [2], [1]], np.int32)
        rig.device.copy_tokens(empty, one, stream=rig.stream)
        for requests in ([], [Request([0, 1], [0, 0], 0, 2, 8)]):
            batch = batch_of(requests)
            beams, sources = put_beams(rig, batch), rig.put(batch["parents"])
            table = rig.put(np.full((2, 0 if requests else 2), -1, np.int32))
            for buffers in (empty, tails.buffers):
                rig.device.copy_tails(
                    buffers, table, beams, sources, tokens_per_block=T, stream=rig.stream
                )
        tails.check()

    def test_wrong_tails_are_refused(self, rig):
        tails = Tails.make(rig, [[(16 * T, 16)]], 8, 0)
        memory = tails.pools[0].memory
        for place in (
            (1024, -16, 64, 16),
            (1024, 1000, 64, 16),
            (1024, 0, 0, 0),
            (1024, 0, 64, 24),
            (1024, 0, 64, -1),
        ):
            with pytest.raises(ValueError, match="places"):
                rig.device.tail_buffers([TailPlace(memory, *place)])
        two = np.array([[0, 2], [1, 3], [1, 1]], np.int32)
        for pairs in (two[:2], two[0], two.astype(np.int64)):
            with pytest.raises(ValueError, match="pairs"):
                rig.device.copy_tokens(tails.buffers, pairs, stream=rig.stream)
        for buffers, pairs, name in ((None, two, "buffers"), (tails.buffers, [[0]] * 3, "pairs")):
            with pytest.raises(TypeError, match=name):
                rig.device.copy_tokens(buffers, pairs, stream=rig.stream)
        table, batch = rig.put(numbered((2, 3))), batch_of([Request([0, 1], [0, 0], 0, 2, 8)])
        beams, sources = put_beams(rig, batch), rig.put(batch["parents"])
        for wrong in ({"table": table[0]}, {"sources": rig.put(two.astype(np.int64))}, {"t": 0}):
            args = {"table": table, "sources": sources, "t": T} | wrong
            with pytest.raises(ValueError, match=r".*: expected"):
                rig.device.copy_tails(
                    tails.buffers, args["table"], beams, args["sources"],
                    tokens_per_block=args["t"], stream=rig.stream,
                )  # fmt: skip
        tails.check()


def run_tails(rig: Rig, tails: Tails, table: np.ndarray, requests: list[Request]) -> None:
    """`step_rows` and then `copy_tails` of group 0, on the device and in the oracle."""
    batch = batch_of(requests, padding=2)
    on_device, sources = rig.put(table), rig.put(np.zeros_like(batch["rows"]))
    beams, parents = put_beams(rig, batch), rig.put(batch["parents"])
    rig.device.step_rows(on_device, beams, parents, sources, stream=rig.stream)
    rig.device.copy_tails(
        tails.buffers, on_device[:, 0], beams, sources, tokens_per_block=T, stream=rig.stream
    )
    new, copied = expect_step(table, requests, len(batch["rows"]))
    position = 0
    for request in requests:
        for i, row in enumerate(request.rows):
            donor = copied[position + i]
            for ordinal in range(request.shared, request.blocks if donor >= 0 else 0):
                tokens = min(request.valid - ordinal * T, T)
                tails.expect(new[donor, 0, ordinal], new[row, 0, ordinal], tokens)
        position += len(request.rows)
