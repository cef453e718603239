"""Battery: tokens into pages and out of them, exact to the byte, guard bytes included."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device.base import PageGeometry
from tests.device.battery_base import BatteryBase
from tests.device.harness import Rig, Stack, buffer_bytes, geometry

T = 8
SIZES = [1, T // 2, T - 1, T]
BIG = (1 << 30) + 4096  # bytes: the third slot of this size starts beyond 2**31


def places(slots: list[int], tokens: int) -> np.ndarray:
    """The first `tokens` tokens of each slot, as a mapping."""
    return np.array([[slot, t] for slot in slots for t in range(tokens)], np.int32).reshape(-1, 2)


def scattered(rig: Rig, stack: Stack, count: int) -> np.ndarray:
    """A mapping of `count` distinct random places, about one in five of them nowhere."""
    tokens = stack.geometry.expansion * stack.geometry.page_tokens
    cells = rig.rng.permutation(stack.num_slots * tokens)[:count]
    mapping = np.stack(np.divmod(cells, tokens), axis=1).astype(np.int32)
    mapping[rig.rng.random(len(mapping)) < 0.2] = -1, 0
    return mapping


def run_append(rig: Rig, stack: Stack, mapping: np.ndarray, sources: list[np.ndarray]) -> None:
    """Appends on the device and in the oracle."""
    arrays = [rig.put(source) for source in sources]
    rig.device.append(stack.stack, rig.put(mapping), arrays, stream=rig.stream)
    stack.expect_append(mapping, sources)


def run_gather(rig: Rig, stack: Stack, mapping: np.ndarray) -> list[np.ndarray]:
    """The bytes `[L, N, H, D * itemsize]` per role that the device reads."""
    targets = [rig.put(target) for target in stack.randoms(len(mapping))]
    rig.device.gather(stack.stack, rig.put(mapping), targets, stream=rig.stream)
    return [np.ascontiguousarray(rig.get(target)).view(np.uint8) for target in targets]


def check_gather(rig: Rig, stack: Stack, mapping: np.ndarray) -> None:
    """The device reads what the oracle reads."""
    for found, expected in zip(
        run_gather(rig, stack, mapping), stack.expect_gather(mapping), strict=True
    ):
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


class StackTests(BatteryBase):
    """`page_stack`, `append`, `gather` and the fingerprints."""

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("num_roles", [1, 2])
    @pytest.mark.parametrize("tokens", SIZES)
    def test_first_and_last_page(self, rig, layout, num_roles, tokens):
        """The edges of the pool: exact bytes, and nothing around them changes."""
        stack = Stack.one_pool(rig, geometry(layout, page_tokens=T), 2, num_roles)
        for slots in ([stack.num_slots - 1], [0], [0, stack.num_slots - 1]):
            mapping = places(slots, tokens)
            run_append(rig, stack, mapping, stack.randoms(len(mapping)))
            stack.check()
            check_gather(rig, stack, mapping)
        stack.check()

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
    @pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 16), (1, 72)])
    def test_any_item_and_shape(self, rig, layout, itemsize, heads, dim):
        g = geometry(layout, page_tokens=4, expansion=2, heads=heads, dim=dim, itemsize=itemsize)
        stack = Stack.one_pool(rig, g, num_layers=3)
        mapping = scattered(rig, stack, 19)
        run_append(rig, stack, mapping, stack.randoms(19))
        stack.check()
        check_gather(rig, stack, scattered(rig, stack, 19))

    @pytest.mark.parametrize("tokens", SIZES)
    def test_a_role_of_another_geometry(self, rig, tokens):
        """Keys and values as bytes, scales as one float per head, side by side in a slot."""
        g, scale = geometry(page_tokens=T, itemsize=1), geometry(page_tokens=T, dim=1, itemsize=4)
        step = buffer_bytes(g)
        pool = rig.pool(2 * (2 * step + buffer_bytes(scale)))
        layer = pool.slot_bytes // 2
        pairs = Stack(rig, [pool] * 4, [0, step, layer, layer + step], 2, g)
        scales = Stack(rig, [pool] * 2, [2 * step, layer + 2 * step], 1, scale)
        for slot in (pool.num_slots - 1, 0):
            mapping = places([slot], tokens)
            for stack in (pairs, scales):
                run_append(rig, stack, mapping, stack.randoms(tokens))
                pool.check()
                check_gather(rig, stack, mapping)

    def test_roles_and_layers_in_pools_of_their_own(self, rig):
        g = geometry(heads=2, dim=4)
        size = buffer_bytes(g)
        pools = [rig.pool(2 * size + 16, 9), rig.pool(3 * size, 5)]
        stack = Stack(rig, [pools[0], pools[1], pools[1], pools[0]], [16, size, 0, 16 + size], 2, g)
        assert stack.num_slots == min(pool.num_slots for pool in pools)
        mapping = np.concatenate([scattered(rig, stack, 23), places([stack.num_slots], 2)])
        run_append(rig, stack, mapping, stack.randoms(len(mapping)))
        stack.check()
        check_gather(rig, stack, mapping)

    def test_more_tokens_than_one_thread_block(self, rig):
        g = geometry(page_tokens=32, heads=2, dim=32)
        pool_slots = 40
        pool = rig.pool(2 * buffer_bytes(g), pool_slots)
        stack = Stack(rig, [pool] * 2, [0, buffer_bytes(g)], 2, g)
        mapping = scattered(rig, stack, 1100)
        run_append(rig, stack, mapping, stack.randoms(1100))
        stack.check()
        check_gather(rig, stack, mapping)

    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a[:, ::2],
            lambda a: a[:, 11::-1],
            lambda a: a.transpose(0, 2, 1, 3)[:, :12, :, :].transpose(0, 1, 2, 3)[:, :, :2],
            lambda a: a[..., ::-1][:, 3:15],
            lambda a: np.broadcast_to(a[:, :1], (2, 12, 2, 8)),
            lambda a: np.broadcast_to(a[:1, 2:14, 1:, 3:4], (2, 12, 2, 8)),
        ],
        ids=["sliced", "reversed", "heads", "backwards", "one token", "one item"],
    )
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_sources_of_any_strides(self, rig, layout, view):
        stack = Stack.one_pool(rig, geometry(layout), num_roles=1)
        whole = rig.random((2, 24, 2, 8), 2)
        if view(whole).shape[1] != 12:
            whole = rig.random((2, 12, 12, 8), 2)
        mapping = scattered(rig, stack, 12)
        source = view(rig.put(whole))
        rig.device.append(stack.stack, rig.put(mapping), [source], stream=rig.stream)
        stack.expect_append(mapping, [view(whole)])
        stack.check()

    @pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (2, 3, 0, 1)])
    def test_transposed_sources_and_targets(self, rig, axes):
        """`[L, N, H, D]` views of arrays that lie in another order."""
        stack = Stack.one_pool(rig, geometry("HND", dim=4))
        mapping, back = scattered(rig, stack, 9), np.argsort(axes)
        sources = [a.transpose(axes) for a in stack.randoms(9)]
        views = [rig.put(a).transpose(back) for a in sources]
        rig.device.append(stack.stack, rig.put(mapping), views, stream=rig.stream)
        stack.expect_append(mapping, [a.transpose(back) for a in sources])
        stack.check()
        targets = [rig.put(rig.random(a.shape, 2)) for a in sources]
        views = [a.transpose(back) for a in targets]
        rig.device.gather(stack.stack, rig.put(mapping), views, stream=rig.stream)
        for target, expected in zip(targets, stack.expect_gather(mapping), strict=True):
            found = np.ascontiguousarray(rig.get(target).transpose(back)).view(np.uint8)
            np.testing.assert_array_equal(found, expected)

    def test_targets_keep_what_lies_between(self, rig):
        stack = Stack.one_pool(rig, geometry(), num_roles=1)
        mapping = scattered(rig, stack, 6)
        whole = rig.put(np.full((2, 12, 2, 16), 0xABAB, np.uint16))
        view = whole[:, 1::2, :, ::2]
        rig.device.gather(stack.stack, rig.put(mapping), [view], stream=rig.stream)
        expected = np.full((2, 12, 2, 16), 0xABAB, np.uint16)
        expected[:, 1::2, :, ::2] = stack.expect_gather(mapping)[0].view(np.uint16)
        np.testing.assert_array_equal(rig.get(whole), expected)

    @pytest.mark.parametrize("itemsize", [1, 2, 4])
    def test_roles_whose_addresses_are_aligned_differently(self, rig, itemsize):
        """The widest access that serves one role's array may not serve another's."""
        stack = Stack.one_pool(rig, geometry(dim=16, itemsize=itemsize), num_roles=3)
        mapping = scattered(rig, stack, 10)
        wholes = [rig.random((2, 12, 2, 24), itemsize) for _ in range(3)]

        def views(arrays):
            cuts = (slice(0, 16), slice(1, 17), slice(8, 24))
            return [a[:, 1:11, :, cut] for a, cut in zip(arrays, cuts, strict=True)]

        arrays = [rig.put(whole) for whole in wholes]
        rig.device.append(stack.stack, rig.put(mapping), views(arrays), stream=rig.stream)
        stack.expect_append(mapping, views(wholes))
        stack.check()
        rig.device.gather(stack.stack, rig.put(mapping), views(arrays), stream=rig.stream)
        for view, part in zip(views(wholes), stack.expect_gather(mapping), strict=True):
            view[...] = part.view(view.dtype)
        for array, whole in zip(arrays, wholes, strict=True):
            np.testing.assert_array_equal(rig.get(array), whole)

    def test_many_roles(self, rig):
        stack = Stack.one_pool(rig, geometry(dim=4), num_layers=2, num_roles=9)
        mapping = scattered(rig, stack, 7)
        run_append(rig, stack, mapping, stack.randoms(7))
        stack.check()
        check_gather(rig, stack, mapping)

    def test_no_tokens(self, rig):
        stack = Stack.one_pool(rig, geometry())
        run_append(rig, stack, np.zeros((0, 2), np.int32), stack.randoms(0))
        stack.check()
        assert [a.size for a in run_gather(rig, stack, np.zeros((0, 2), np.int32))] == [0, 0]

    def test_tokens_that_are_nowhere(self, rig):
        stack = Stack.one_pool(rig, geometry())
        mapping = np.array([[-1, 0], [-7, 3], [-(2**31), 5]], np.int32)
        run_append(rig, stack, mapping, stack.randoms(3))
        stack.check()
        assert not any(found.any() for found in run_gather(rig, stack, mapping))

    def test_places_outside_the_pool_are_skipped(self, rig):
        stack = Stack.one_pool(rig, geometry())
        last = stack.num_slots - 1
        mapping = np.array(
            [[last + 1, 0], [2**31 - 1, 0], [last, T], [last, -1], [0, 2**31 - 1], [last, T - 1]],
            np.int32,
        )
        run_append(rig, stack, mapping, stack.randoms(6))
        stack.check()
        found = run_gather(rig, stack, mapping)
        assert not any(array[:, :5].any() for array in found)
        check_gather(rig, stack, mapping)

    def test_gather_may_read_a_place_twice(self, rig):
        stack = Stack.one_pool(rig, geometry())
        check_gather(rig, stack, np.array([[3, 1], [3, 1], [0, 7], [3, 1]], np.int32))

    def test_stacks_follow_their_pool_when_it_is_resized(self, rig):
        g = geometry()
        grain = rig.device.grain(1)
        memory = rig.device.reserve(4 * grain, grain, grain)
        rig.owned.append(memory)
        stack = rig.device.page_stack([(memory, buffer_bytes(g), 0)], 1, g)
        slots = [grain // buffer_bytes(g) - 1, 2 * grain // buffer_bytes(g) - 1]
        mapping = rig.put([[slots[0], 2], [slots[1], 5]], np.int32)
        source = rig.random((1, 2, 2, 8), 2) | 1
        for backed, seen in ((1, [True, False]), (4, [True, True]), (1, [True, False])):
            memory.resize(backed * grain)
            rig.device.append(stack, mapping, [rig.put(source)], stream=rig.stream)
            target = rig.put(np.full((1, 2, 2, 8), 7, np.uint16))
            rig.device.gather(stack, mapping, [target], stream=rig.stream)
            expected = np.where(np.reshape(seen, (1, 2, 1, 1)), source, 0)
            np.testing.assert_array_equal(rig.get(target), expected)

    @pytest.mark.no_sanitizer
    def test_offsets_beyond_31_bits(self, rig):
        g = geometry()
        grain = rig.device.grain(3 * BIG)
        memory = rig.device.reserve(3 * BIG, 3 * BIG, grain)
        rig.owned.append(memory)
        offset = BIG - buffer_bytes(g)
        stack = rig.device.page_stack([(memory, BIG, offset)], 1, g)
        mapping = rig.put(places([2, 0], T))
        source = rig.random((1, 2 * T, 2, 8), 2)
        rig.device.append(stack, mapping, [rig.put(source)], stream=rig.stream)
        target = rig.put(np.zeros_like(source))
        rig.device.gather(stack, mapping, [target], stream=rig.stream)
        np.testing.assert_array_equal(rig.get(target), source)
        view = memory.array(np.uint16, (T, 2, 8), 2 * BIG + offset)
        np.testing.assert_array_equal(rig.get(view), source[0, :T])

    def test_wrong_arrays_are_refused(self, rig):
        stack = Stack.one_pool(rig, geometry(), num_roles=1)
        good, mapping = np.zeros((2, 2, 2, 8), np.uint16), rig.put(places([1], 2))
        for call in (rig.device.append, rig.device.gather):
            for wrong in (good[:1], good[:, :1], good[..., :4], good[0], good.astype(np.uint32)):
                with pytest.raises(ValueError, match=r".*: expected"):
                    call(stack.stack, mapping, [rig.put(wrong)], stream=rig.stream)
            with pytest.raises(ValueError, match=r".*: expected"):
                call(stack.stack, mapping, [rig.put(good)] * 2, stream=rig.stream)
            wide = rig.put(places([1], 2), np.int64)
            with pytest.raises(ValueError, match="mapping"):
                call(stack.stack, wide, [rig.put(good)], stream=rig.stream)
            with pytest.raises(TypeError):
                call(stack.stack, mapping, [good.tolist()], stream=rig.stream)
        stack.check()

    def test_buffers_outside_their_slot_are_refused(self, rig):
        g, pool = geometry(), rig.pool(1024)
        size = buffer_bytes(g)
        for offset in (-16, 1024 - size + 16):
            with pytest.raises(ValueError, match="places"):
                rig.device.page_stack([(pool.memory, 1024, offset)], 1, g)
        with pytest.raises(ValueError, match="places"):
            rig.device.page_stack([], 1, g)
        with pytest.raises(ValueError, match="places"):
            rig.device.page_stack([(pool.memory, 1024, 0)] * 3, 2, g)
        fields = {name: getattr(g, name) for name in PageGeometry.__dataclass_fields__}
        for name, value in (("page_bytes", g.page_bytes - 1), ("dim", 0), ("head_stride", size)):
            wrong = PageGeometry(**{**fields, name: value})
            with pytest.raises(ValueError, match="geometry"):
                rig.device.page_stack([(pool.memory, 1024, 0)], 1, wrong)
