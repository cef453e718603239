"""Battery: memory that never moves, streams and events, arrays in and out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvcore.errors import StateError
from tests.device.battery_base import BatteryBase
from tests.device.harness import Rig, Stack, geometry


def grains(rig: Rig, reserved: int, backed: int):
    """(memory, grain): `reserved` grains of addresses, the first `backed` with memory."""
    grain = rig.device.grain(1)
    memory = rig.device.reserve(reserved * grain, backed * grain, grain)
    rig.owned.append(memory)
    return memory, grain


def words(memory, first: int, count: int):
    """The `count` int32 words from word `first` on."""
    return memory.array(np.int32, (count,), first * 4)


class MemoryTests(BatteryBase):
    """`reserve`, `Memory`, `Stream`, `Event`, `to_host`, `from_host`, `as_array`."""

    def test_memory_is_rounded_up_to_the_grain(self, rig):
        grain = rig.device.grain(1)
        memory = rig.device.reserve(2 * grain - 1, 1, grain)
        rig.owned.append(memory)
        assert memory.nbytes == grain
        memory.resize(grain + 1)
        assert memory.nbytes == 2 * grain

    def test_memory_may_start_empty(self, rig):
        memory, grain = grains(rig, 2, 0)
        assert (memory.nbytes, memory.base > 0) == (0, True)
        assert memory.array(np.int32, (0, 4)).shape == (0, 4)
        memory.resize(grain)
        view = words(memory, 0, 8)
        rig.device.fill_words(view, 5, stream=rig.stream)
        assert rig.get(view).tolist() == [5] * 8

    def test_resize_keeps_base_and_content(self, rig):
        memory, grain = grains(rig, 8, 2)
        base, edge = memory.base, 2 * grain // 4
        first, last = rig.random((64,), 4).view(np.int32), rig.random((64,), 4).view(np.int32)
        rig.device.from_host(first, words(memory, 0, 64), stream=rig.stream)
        rig.device.from_host(last, words(memory, edge - 64, 64), stream=rig.stream)
        rig.stream.synchronize()
        for size in (8, 3, 2, 5):
            memory.resize(size * grain)
            assert (memory.base, memory.nbytes) == (base, size * grain)
            np.testing.assert_array_equal(rig.get(words(memory, 0, 64)), first)
            np.testing.assert_array_equal(rig.get(words(memory, edge - 64, 64)), last)
        memory.resize(grain)
        np.testing.assert_array_equal(rig.get(words(memory, 0, 64)), first)

    def test_memory_grown_under_work_is_usable_at_once(self, rig):
        """What prepares new memory must not come after the first user's writes."""
        memory, grain = grains(rig, 8, 1)
        other = rig.device.create_stream()
        for size in range(2, 8):
            rig.device.fill_words(words(memory, 0, grain // 4), size, stream=rig.stream)
            memory.resize(size * grain)
            new = words(memory, (size - 1) * grain // 4, grain // 4)
            rig.device.fill_words(new, -size, stream=other)
            found = rig.device.to_host(new, stream=other)
            assert found.min() == found.max() == -size
        rig.stream.synchronize()
        assert rig.get(words(memory, grain // 4 - 1, 1)).tolist() == [7]

    def test_resize_refuses_more_than_reserved(self, rig):
        memory, grain = grains(rig, 2, 1)
        with pytest.raises(ValueError, match="nbytes"):
            memory.resize(2 * grain + 1)
        with pytest.raises(ValueError, match="nbytes"):
            memory.resize(-1)
        assert memory.nbytes == grain

    def test_views_share_the_bytes(self, rig):
        memory, _ = grains(rig, 1, 1)
        values = np.arange(64, dtype=np.uint8)
        rig.device.from_host(
            values.reshape(8, 8), memory.array(np.uint8, (8, 8), 128), stream=rig.stream
        )
        half = memory.array(np.dtype("u2"), (4,), 130)
        np.testing.assert_array_equal(rig.get(half), values[2:10].view("u2"))

    def test_views_stay_in_the_reserved_range(self, rig):
        memory, grain = grains(rig, 2, 1)
        assert memory.array(np.int32, (2 * grain // 4,)).shape == (2 * grain // 4,)
        with pytest.raises(ValueError, match="range"):
            memory.array(np.int32, (2 * grain // 4,), 4)
        with pytest.raises(ValueError, match="offset"):
            memory.array(np.int32, (1,), 2)
        with pytest.raises(ValueError, match="offset"):
            memory.array(np.int32, (1,), -4)

    def test_ranges_do_not_overlap(self, rig):
        ranges = []
        for _ in range(4):
            memory, grain = grains(rig, 3, 1)
            ranges.append((memory.base, memory.base + 3 * grain))
        ranges.sort()
        assert all(low[1] <= high[0] for low, high in pairwise(ranges))
        assert all(base % 64 == 0 for base, _ in ranges)

    def test_close_is_idempotent_and_final(self, rig):
        memory, grain = grains(rig, 2, 1)
        memory.close()
        memory.close()
        with pytest.raises(StateError, match="closed"):
            memory.array(np.int32, (1,))
        with pytest.raises(StateError, match="closed"):
            memory.resize(grain)

    def test_a_stream_has_one_object_per_handle(self, rig):
        streams = [rig.device.create_stream() for _ in range(3)]
        assert len({stream.handle for stream in streams}) == 3
        for stream in streams:
            assert rig.device.stream(stream) is stream
            assert rig.device.stream(stream.handle) is stream

    def test_what_is_no_stream_is_refused(self, rig):
        for thing in (object(), "stream", 1.5):
            with pytest.raises(TypeError, match="stream"):
                rig.device.stream(thing)

    def test_no_stream_means_the_default_stream_or_an_error(self, rig):
        if rig.device.default_stream is None:
            with pytest.raises(ValueError, match="stream"):
                rig.device.stream(None)
        else:
            assert rig.device.stream(None) is rig.device.default_stream

    def test_events_have_passed_after_synchronizing(self, rig):
        idle = rig.stream.record()
        idle.synchronize()
        assert idle.done()
        rig.device.fill_words(rig.put(np.zeros(8, np.int32)), 1, stream=rig.stream)
        event = rig.stream.record()
        rig.stream.synchronize()
        assert event.done()

    def test_streams_are_idle_after_synchronizing(self, rig):
        words = rig.device.empty(4, np.int32)
        rig.device.fill_words(words, 1, stream=rig.stream)
        rig.stream.synchronize()
        assert rig.stream.is_idle()

    def test_work_of_a_stream_runs_in_order(self, rig):
        target = rig.put(np.zeros(4096, np.int32))
        for value in range(20):
            rig.device.fill_words(target, value, stream=rig.stream)
        assert set(rig.get(target).tolist()) == {19}

    def test_events_order_streams(self, rig):
        """Three streams pass one array on; each waits for the one before."""
        streams = [rig.device.create_stream() for _ in range(3)]
        target = rig.put(np.zeros(1 << 16, np.int32))
        event = rig.stream.record()
        for value in range(30):
            stream = streams[value % 3]
            stream.wait(event)
            rig.device.fill_words(target, value, stream=stream)
            event = stream.record()
        event.synchronize()
        assert set(rig.get(target).tolist()) == {29}

    def test_a_slot_goes_to_another_stream_behind_an_event(self, rig):
        """Freed on one stream, reused on a second: the first owner's late write must not win."""
        stack = Stack.one_pool(rig, geometry())
        last = stack.num_slots - 1
        mapping = np.array([[last, t] for t in range(8)], np.int32)
        placed, second = rig.put(mapping), rig.device.create_stream()
        for _ in range(8):
            old, new = stack.randoms(8), stack.randoms(8)
            sources = [[rig.put(a) for a in arrays] for arrays in (old, new)]
            rig.device.append(stack.stack, placed, sources[0], stream=rig.stream)
            second.wait(rig.stream.record())
            rig.device.append(stack.stack, placed, sources[1], stream=second)
            rig.stream.wait(second.record())
            stack.expect_append(mapping, new)
            stack.check()

    @pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f8", "c16"])
    def test_arrays_go_in_and_out(self, rig, dtype):
        values = rig.random((5, 3), np.dtype(dtype).itemsize).view(dtype)
        found = rig.get(rig.put(values))
        assert (found.dtype, found.shape) == (values.dtype, (5, 3))
        assert found.tobytes() == values.tobytes()

    def test_host_values_may_change_after_the_call(self, rig):
        values = np.arange(1000, dtype=np.int32)
        target = rig.device.empty((1000,), np.int32)
        rig.device.from_host(values, target, stream=rig.stream)
        values[:] = -1
        np.testing.assert_array_equal(rig.get(target), np.arange(1000))

    def test_strided_arrays_go_in_and_out(self, rig):
        whole = rig.put(np.zeros((6, 8), np.int32))
        values = np.arange(12, dtype=np.int32).reshape(3, 4).T
        rig.device.from_host(values, whole[1:5, 1:7:2], stream=rig.stream)
        expected = np.zeros((6, 8), np.int32)
        expected[1:5, 1:7:2] = values
        np.testing.assert_array_equal(rig.get(whole), expected)
        np.testing.assert_array_equal(rig.get(whole.T[::-1]), expected.T[::-1])

    def test_shapes_must_agree(self, rig):
        target = rig.put(np.zeros(4, np.int32))
        with pytest.raises(ValueError, match="shape"):
            rig.device.from_host(np.ones(3, np.int32), target, stream=rig.stream)
        assert rig.get(target).tolist() == [0] * 4

    def test_empty_arrays(self, rig):
        found = rig.get(rig.put(np.zeros((1, 8, 0, 128), np.float32)))
        assert found.shape == (1, 8, 0, 128)

    def test_pinned_memory_is_writable_bytes(self, rig):
        lease = rig.device.pinned(1000)
        lease[:] = np.arange(1000) % 251
        assert (lease.dtype, lease.shape, lease.ctypes.data % 64) == (np.uint8, (1000,), 0)
        assert int(lease.sum()) == int((np.arange(1000) % 251).sum())

    def test_own_arrays_are_taken_as_they_are(self, rig):
        array = rig.put(np.zeros(8, np.int32))
        rig.device.fill_words(rig.device.as_array(array), 3, stream=rig.stream)
        assert rig.get(array).tolist() == [3] * 8
        for thing in (object(), [1, 2], None):
            with pytest.raises(TypeError):
                rig.device.as_array(thing)
