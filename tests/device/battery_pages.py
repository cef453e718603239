"""Battery: whole pages copied and filled, and the fingerprints that prove them right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.battery_base import BatteryBase
from tests.device.battery_stacks import scattered
from tests.device.harness import Pool, Rig, Stack, geometry


def expect_copy(pools: list[Pool], src, dst) -> None:
    """`copy_pages` in the oracle."""
    for pool in pools:
        for a, b in zip(src, dst, strict=True):
            if 0 <= a < pool.num_slots and 0 <= b < pool.num_slots:
                pool.slot(b)[:] = pool.slot(a)


def named(pools: list[Pool]):
    """The pools as the device wants them."""
    return [(pool.memory, pool.slot_bytes) for pool in pools]


def bad_words(rig: Rig, stack: Stack, mapping: np.ndarray, keys: np.ndarray) -> list[int]:
    """What `verify_fingerprints` finds."""
    bad = rig.put(np.full(len(mapping), -9, np.int32))
    rig.device.verify_fingerprints(
        stack.stack, rig.put(mapping), rig.put(keys), bad, stream=rig.stream
    )
    return rig.get(bad).tolist()


class PageTests(BatteryBase):
    """`copy_pages`, `fill_pages`, `write_fingerprints`, `verify_fingerprints`."""

    @pytest.mark.parametrize("slot_bytes", [16, 33, 40, 1024, 4112, 70_000])
    def test_copied_pages_are_exact(self, rig, slot_bytes):
        pools = [rig.pool(slot_bytes, 9), rig.pool(slot_bytes + 16, 9)]
        slots = rig.rng.permutation(min(pool.num_slots for pool in pools)).astype(np.int32)
        half = min(len(slots) // 2, 40)
        src, dst = slots[:half], slots[half : 2 * half]
        rig.device.copy_pages(named(pools), src, dst, stream=rig.stream)
        expect_copy(pools, src, dst)
        for pool in pools:
            pool.check()

    @pytest.mark.parametrize("pairs", [255, 256, 257, 1000])
    def test_many_pages_at_once(self, rig, pairs):
        pool = rig.pool(48, 2 * pairs)
        slots = rig.rng.permutation(pool.num_slots)[: 2 * pairs].astype(np.int32)
        rig.device.copy_pages(named([pool]), slots[:pairs], slots[pairs:], stream=rig.stream)
        expect_copy([pool], slots[:pairs], slots[pairs:])
        pool.check()
        rig.device.fill_pages(named([pool]), slots[:pairs], 7, stream=rig.stream)
        for slot in slots[:pairs]:
            pool.slot(slot)[:] = 7
        pool.check()

    def test_many_pools_at_once(self, rig):
        pools = [rig.pool(16 * (index + 1)) for index in range(11)]
        src, dst = np.array([0, 4], np.int32), np.array([5, 1], np.int32)
        rig.device.copy_pages(named(pools), src, dst, stream=rig.stream)
        expect_copy(pools, src, dst)
        rig.device.fill_pages(named(pools), dst[:1] - 2, 9, stream=rig.stream)
        for pool in pools:
            pool.slot(3)[:] = 9
            pool.check()

    @pytest.mark.parametrize("first", [True, False])
    def test_the_edges_of_the_pool_are_copied(self, rig, first):
        pool = rig.pool(1040)
        edges = [0, pool.num_slots - 1][:: 1 if first else -1]
        src, dst = np.array(edges[:1], np.int32), np.array(edges[1:], np.int32)
        rig.device.copy_pages(named([pool]), src, dst, stream=rig.stream)
        expect_copy([pool], src, dst)
        pool.check()

    def test_one_source_may_have_many_targets(self, rig):
        pool = rig.pool(512)
        src, dst = np.array([2, 2, 2], np.int32), np.array([0, 4, 5], np.int32)
        rig.device.copy_pages(named([pool]), src, dst, stream=rig.stream)
        expect_copy([pool], src, dst)
        pool.check()

    def test_pairs_outside_the_pool_are_skipped(self, rig):
        pool = rig.pool(512)
        end = pool.num_slots
        src = np.array([-1, 0, end, 1, 2, 2**31 - 1], np.int32)
        dst = np.array([3, -1, 4, end, 5, -(2**31)], np.int32)
        rig.device.copy_pages(named([pool]), src, dst, stream=rig.stream)
        expect_copy([pool], [2], [5])
        pool.check()

    def test_ids_may_change_after_the_call(self, rig):
        pool = rig.pool(512)
        src, dst, slots = (np.array([slot], np.int32) for slot in (1, 2, 3))
        rig.device.copy_pages(named([pool]), src, dst, stream=rig.stream)
        rig.device.fill_pages(named([pool]), slots, 0xEE, stream=rig.stream)
        src[:], dst[:], slots[:] = 4, 5, 0
        expect_copy([pool], [1], [2])
        pool.slot(3)[:] = 0xEE
        pool.check()

    def test_copies_of_nothing(self, rig):
        pool, none = rig.pool(512), np.zeros(0, np.int32)
        rig.device.copy_pages(named([pool]), none, none, stream=rig.stream)
        rig.device.copy_pages([], np.zeros(1, np.int32), np.ones(1, np.int32), stream=rig.stream)
        rig.device.fill_pages(named([pool]), none, 1, stream=rig.stream)
        rig.device.fill_pages([], np.zeros(1, np.int32), 1, stream=rig.stream)
        pool.check()

    def test_wrong_copies_are_refused(self, rig):
        pool = rig.pool(512)
        one, two = np.zeros(1, np.int32), np.ones(2, np.int32)
        with pytest.raises(ValueError, match="dst"):
            rig.device.copy_pages(named([pool]), one, two, stream=rig.stream)
        with pytest.raises(ValueError, match="src"):
            rig.device.copy_pages(named([pool]), one.astype(np.float32), one + 1, stream=rig.stream)
        for value in (-1, 256):
            with pytest.raises(ValueError, match="value"):
                rig.device.fill_pages(named([pool]), one, value, stream=rig.stream)
        pool.check()

    @pytest.mark.parametrize("slot_bytes", [16, 33, 4112])
    @pytest.mark.parametrize("value", [0, 0xA5, 255])
    def test_filled_pages_are_exact(self, rig, slot_bytes, value):
        pools = [rig.pool(slot_bytes), rig.pool(2 * slot_bytes)]
        end = min(pool.num_slots for pool in pools)
        slots = np.array([end - 1, -1, 0, 2, 2**31 - 1, -5], np.int32)
        rig.device.fill_pages(named(pools), slots, value, stream=rig.stream)
        for pool in pools:
            for slot in (end - 1, 0, 2):
                pool.slot(slot)[:] = value
            pool.check()

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize(
        ("heads", "dim", "itemsize"),
        [(2, 8, 2), (2, 64, 1), (1, 1, 8), (1, 5, 1), (3, 1, 2), (2, 3, 1), (3, 7, 1), (1, 1, 1)],
    )
    def test_fingerprints_are_exact(self, rig, layout, heads, dim, itemsize):
        """Also where a token's bytes, or a head's, are no multiple of four."""
        g = geometry(layout, expansion=2, heads=heads, dim=dim, itemsize=itemsize)
        stack = Stack.one_pool(rig, g, num_layers=3, num_roles=2)
        mapping = scattered(rig, stack, 21)
        keys = rig.rng.integers(-(2**63), 2**63 - 1, 21)
        keys[:4] = 0, -1, 2**63 - 1, -(2**63)
        rig.device.write_fingerprints(
            stack.stack, rig.put(mapping), rig.put(keys), stream=rig.stream
        )
        stack.expect_fingerprints(mapping, keys)
        stack.check()
        assert bad_words(rig, stack, mapping, keys) == [0] * 21

    @pytest.mark.parametrize(("heads", "dim", "itemsize"), [(2, 8, 2), (3, 7, 1), (1, 1, 1)])
    def test_every_wrong_word_is_counted(self, rig, heads, dim, itemsize):
        stack = Stack.one_pool(rig, geometry(heads=heads, dim=dim, itemsize=itemsize))
        mapping, keys = scattered(rig, stack, 24), np.arange(24, dtype=np.int64) << 33
        rig.device.write_fingerprints(
            stack.stack, rig.put(mapping), rig.put(keys), stream=rig.stream
        )
        stack.expect_fingerprints(mapping, keys)
        pool = stack.pools[0]
        hurt = rig.rng.random(len(pool.expected)) < 0.05
        pool.expected[hurt] ^= 1
        rig.device.from_host(pool.expected, pool.view, stream=rig.stream)
        found = bad_words(rig, stack, mapping, keys)
        assert found == stack.expect_bad(mapping, keys)
        assert sum(found) > 0

    def test_another_key_layer_or_role_is_another_pattern(self, rig):
        """A page that belongs to someone else does not pass, wherever it came from."""
        stack = Stack.one_pool(rig, geometry(), num_layers=2, num_roles=2)
        mapping, keys = np.array([[1, 0], [1, 1], [2, 0]], np.int32), np.array([5, 6, 7])
        placed = rig.put(mapping)
        rig.device.write_fingerprints(stack.stack, placed, rig.put(keys), stream=rig.stream)
        assert bad_words(rig, stack, mapping, keys) == [0, 0, 0]
        words = 4 * 2 * 8 * 2 // 4
        assert bad_words(rig, stack, mapping, keys + 1) == [words] * 3
        assert bad_words(rig, stack, mapping[[1, 0, 2]], keys) == [words, words, 0]
        sides = [rig.put(np.zeros(stack.shape(3), np.uint16)) for _ in range(2)]
        rig.device.gather(stack.stack, placed, sides, stream=rig.stream)
        rig.device.append(stack.stack, placed, sides[::-1], stream=rig.stream)
        assert bad_words(rig, stack, mapping, keys) == [words] * 3

    def test_fingerprints_of_nothing_and_nowhere(self, rig):
        stack = Stack.one_pool(rig, geometry())
        assert bad_words(rig, stack, np.zeros((0, 2), np.int32), np.zeros(0, np.int64)) == []
        mapping = np.array([[-1, 0], [stack.num_slots, 0], [0, 8]], np.int32)
        keys = np.arange(3)
        rig.device.write_fingerprints(
            stack.stack, rig.put(mapping), rig.put(keys), stream=rig.stream
        )
        stack.check()
        assert bad_words(rig, stack, mapping, keys) == [0, 0, 0]

    def test_wrong_keys_are_refused(self, rig):
        stack = Stack.one_pool(rig, geometry())
        mapping = rig.put([[0, 0]], np.int32)
        for keys in (np.zeros(1, np.int32), np.zeros(2, np.int64)):
            with pytest.raises(ValueError, match="keys"):
                rig.device.write_fingerprints(
                    stack.stack, mapping, rig.put(keys), stream=rig.stream
                )
        with pytest.raises(ValueError, match="bad"):
            rig.device.verify_fingerprints(
                stack.stack, mapping, rig.put([0], np.int64), rig.put([0], np.int64),
                stream=rig.stream,
            )  # fmt: skip
        stack.check()
