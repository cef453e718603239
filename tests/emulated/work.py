"""What the battery does not reach: many roles, many slots, captures, limits, tunings."""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np
import pytest

from kvcore.device.base import PageGeometry, TailPlace
from kvcore.device.beams import MAX_BEAMS
from kvcore.device.cuda import tokens
from kvcore.device.cuda.arguments import MAX_INLINE, MAX_POOLS
from kvcore.device.cuda.launch import Launch
from kvcore.errors import StateError
from tests.device.battery_beams import Request, batch_of, check_step, numbered, put_beams
from tests.device.harness import Stack, buffer_bytes, geometry
from tests.emulated import driver
from tests.helpers import typed_manager

pytestmark = pytest.mark.usefixtures("held")


def append_and_gather(rig, stack, mapping):
    """Both, compared with the oracle."""
    sources = stack.randoms(len(mapping))
    placed = rig.put(mapping)
    rig.device.append(stack.stack, placed, [rig.put(s) for s in sources], stream=rig.stream)
    stack.expect_append(mapping, sources)
    stack.check()
    targets = [rig.put(s) for s in stack.randoms(len(mapping))]
    rig.device.gather(stack.stack, placed, targets, stream=rig.stream)
    for target, expected in zip(targets, stack.expect_gather(mapping), strict=True):
        found = np.ascontiguousarray(rig.get(target)).view(np.uint8).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)


def places(stack, count):
    mapping = np.array([divmod(i, 8) for i in range(count)], np.int32)
    mapping[3] = -1, 0
    return mapping


@pytest.mark.parametrize("num_roles", [4, 5, 9])
def test_more_roles_than_one_launch_takes(rig, num_roles):
    stack = Stack.one_pool(rig, geometry(), num_layers=2, num_roles=num_roles)
    launches = driver.counts().launches
    append_and_gather(rig, stack, places(stack, 11))
    assert driver.counts().launches - launches == 2 * -(-num_roles // 4)
    keys = rig.put(np.arange(11))
    rig.device.write_fingerprints(stack.stack, rig.put(places(stack, 11)), keys, stream=rig.stream)
    stack.expect_fingerprints(places(stack, 11), np.arange(11))
    stack.check()


def test_more_units_than_one_launch_takes(rig, monkeypatch):
    stack = Stack.one_pool(rig, geometry(heads=3, dim=5))
    monkeypatch.setattr(tokens, "MAX_UNITS", 100)
    append_and_gather(rig, stack, places(stack, 29))
    keys = np.arange(29) + 7
    mapping, bad = rig.put(places(stack, 29)), rig.put(np.full(29, 4, np.int32))
    rig.device.write_fingerprints(stack.stack, mapping, rig.put(keys), stream=rig.stream)
    stack.expect_fingerprints(places(stack, 29), keys)
    stack.check()
    keys[20:] += 1
    rig.device.verify_fingerprints(stack.stack, mapping, rig.put(keys), bad, stream=rig.stream)
    assert rig.get(bad).tolist() == [0] * 20 + [4 * 15 * 2 // 4 + 2] * 9


def test_plans_are_made_once(rig):
    stack = Stack.one_pool(rig, geometry())
    for _ in range(3):
        append_and_gather(rig, stack, places(stack, 16))
    assert len(stack.stack._plans) <= 4
    monkey = [rig.put(s)[:, :, :, ::-1] for s in stack.randoms(16)]
    rig.device.append(stack.stack, rig.put(places(stack, 16)), monkey, stream=rig.stream)
    assert {plan.cut.suffix for plan in stack.stack._plans.values()} == {"_flat_16", "_2"}


@pytest.mark.parametrize("count", [MAX_INLINE, MAX_INLINE + 1])
def test_long_lists_are_sent_before_they_are_read(rig, orders, count):
    """On a stream of the device's own, for which the work's stream waits."""
    pool = rig.pool(48, 2 * count)
    src, dst = np.arange(2 * count, dtype=np.int32).reshape(2, count)
    orders.clear()
    rig.device.copy_pages([(pool.memory, 48)], src, dst, stream=rig.stream)
    sent = [(rig.stream.handle, rig.device.own_stream().handle)]
    assert orders == (sent if count > MAX_INLINE else [])


@pytest.mark.parametrize("count", [MAX_INLINE, MAX_INLINE + 1, 700])
@pytest.mark.parametrize("capturing", [False, True])
def test_many_slots(rig, count, capturing):
    pools = [rig.pool(48, 2 * count) for _ in range(2)]
    order = rig.rng.permutation(2 * count).astype(np.int32)
    src, dst = order[:count], order[count:]
    named = [(pool.memory, pool.slot_bytes) for pool in pools]
    driver.switch("capturing", capturing)
    launches = driver.counts().launches
    rig.device.copy_pages(named, src, dst, stream=rig.stream)
    rig.device.fill_pages(named, src[::2], 3, stream=rig.stream)
    many = [count, -(-count // 2)]
    expected = sum(-(-n // MAX_INLINE) if capturing else 1 for n in many)
    assert driver.counts().launches - launches == expected
    driver.switch("capturing", False)
    for pool in pools:
        for a, b in zip(src, dst, strict=True):
            pool.slot(b)[:] = pool.slot(a)
        for slot in src[::2]:
            pool.slot(slot)[:] = 3
        pool.check()


def test_more_pools_than_one_launch_takes(rig):
    pools = [rig.pool(16 * (i + 1), 8) for i in range(MAX_POOLS + 3)]
    src, dst = np.array([0, 5], np.int32), np.array([7, 2], np.int32)
    named = [(pool.memory, pool.slot_bytes) for pool in pools]
    rig.device.copy_pages(named, src, dst, stream=rig.stream)
    for pool in pools:
        for a, b in zip(src, dst, strict=True):
            pool.slot(b)[:] = pool.slot(a)
        pool.check()


def test_the_widest_requests(rig):
    """They take more shared memory than a launch has without asking; then again fewer."""
    width = 6_500
    parents = rig.rng.integers(-1, width, width).tolist()
    requests = [Request(list(range(width))[::-1], parents, 1, 2)]
    check_step(rig, numbered((width, 1, 2)), requests, padding=0)
    check_step(rig, numbered((4, 1, 2)), [Request([1, 0, 3], [2, 2, 2], 1, 2)])
    beams = put_beams(rig, batch_of([]), max_width=MAX_BEAMS + 1)
    table, none = rig.put(numbered((2, 1, 2))), rig.put([], np.int32)
    with pytest.raises(ValueError, match="max_width"):
        rig.device.step_rows(table, beams, none, none, stream=rig.stream)


def test_uploads_refuse_a_capture(rig):
    words = rig.put(np.zeros(4, np.int32))
    driver.switch("capturing", True)
    with pytest.raises(StateError, match="captured"):
        rig.device.from_host(np.ones(4, np.int32), words, stream=rig.stream)
    driver.switch("capturing", False)
    assert rig.get(words).tolist() == [0] * 4


def test_another_tuning_is_used_from_then_on(rig):
    slots = rig.pool(5000, 8)
    source = rig.device.source("copy_pages")
    named = [(slots.memory, slots.slot_bytes)]
    assert rig.device.launch("copy_pages", "copy_pages_8").threads == source.threads
    with pytest.raises(ValueError, match="source"):
        rig.device.retune(replace(source, name="nothing"))
    rig.device.retune(replace(source, threads=2 * source.threads, vectors=2))
    assert rig.device.launch("copy_pages", "copy_pages_8").threads == 2 * source.threads
    rig.device.retune(source)
    rig.device.copy_pages(named, np.array([1], np.int32), np.array([2], np.int32),
                          stream=rig.stream)  # fmt: skip
    slots.slot(2)[:] = slots.slot(1)
    slots.check()


class Interface:
    """An array of another library, by the CUDA array interface."""

    def __init__(self, array, **changes):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.data.ptr, False), "strides": None, **changes,
        }  # fmt: skip


def test_foreign_arrays_are_views(rig):
    array = rig.put(np.arange(24, dtype=np.int32).reshape(4, 6))
    taken = rig.device.as_array(Interface(array))
    assert isinstance(taken, cupy.ndarray)
    assert (taken.data.ptr, taken.shape, taken.dtype) == (array.data.ptr, (4, 6), np.int32)
    flipped = array.T[::-1]
    taken = rig.device.as_array(Interface(flipped, strides=flipped.strides))
    np.testing.assert_array_equal(rig.get(taken), np.arange(24).reshape(4, 6).T[::-1])
    empty = rig.device.as_array(Interface(array[:0], strides=array.strides))
    assert empty.shape == (0, 6)
    assert rig.device.as_array(Interface(array, typestr="<V2", shape=(4, 12))).dtype.itemsize == 2


def test_arrays_of_another_device_are_refused(rig, other):
    array = other.empty(4, np.int32)
    with pytest.raises(TypeError, match="cuda:0"):
        rig.device.as_array(array)
    for thing in (np.zeros(3), memoryview(b"abc"), 3):
        with pytest.raises(TypeError, match="values"):
            rig.device.as_array(thing)


def test_parts_of_another_device_are_refused(rig, other):
    memory = other.reserve(1 << 21, 1 << 21, 1 << 21)
    with pytest.raises(ValueError, match="cuda:0"):
        rig.device.page_stack([(memory, 4096, 0)], 1, geometry())
    ids = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="cuda:0"):
        rig.device.fill_pages([(memory, 4096)], ids, 0, stream=rig.stream)
    with pytest.raises(TypeError, match="memory"):
        rig.device.fill_pages([(object(), 4096)], ids, 0, stream=rig.stream)
    stack = other.page_stack([(memory, buffer_bytes(geometry()), 0)], 1, geometry())
    mapping = rig.put(np.zeros((1, 2), np.int32))
    tails = other.tail_buffers([TailPlace(memory, 4096, 0, 64, 16)])
    with pytest.raises(ValueError, match="buffers"):
        rig.device.copy_tokens(tails, np.stack([ids, ids + 1, ids]), stream=rig.stream)
    with pytest.raises(ValueError, match="stack"):
        rig.device.append(stack, mapping, [], stream=rig.stream)
    with pytest.raises(TypeError, match="stack"):
        rig.device.append(object(), mapping, [], stream=rig.stream)
    memory.close()
    with pytest.raises(StateError, match="closed"):
        other.fill_pages([(memory, 4096)], ids, 0, stream=other.create_stream())


def test_the_latch_and_the_delay_run(rig):
    flag, gave_up = rig.pinned([1], np.int32), rig.pinned([0], np.int32)
    latch = rig.device.launch("latch", "latch")
    latch(rig.stream, 1, 1, 1, flag.ctypes.data, gave_up.ctypes.data, 1_000_000)
    assert gave_up[0] == 0
    flag[0] = 0
    latch(rig.stream, 1, 1, 1, flag.ctypes.data, gave_up.ctypes.data, 1_000_000)
    assert gave_up[0] == 1
    rig.device.launch("latch", "delay")(rig.stream, 1, 1, 1, 1_000_000)
    out = rig.put(np.zeros(128, np.float32))
    rig.device.launch("latch", "busy")(rig.stream, 1, 1, 1, out.data.ptr, 3)
    assert rig.get(out)[0] > 0


def count_launches_made(monkeypatch) -> list[str]:
    made: list[str] = []
    init = Launch.__init__

    def counted(self, context, name, *rest):
        made.append(name)
        init(self, context, name, *rest)

    monkeypatch.setattr(Launch, "__init__", counted)
    return made


def test_launches_are_bound_to_arrays_that_come_again_and_to_no_others(rig, monkeypatch):
    geometry = PageGeometry(
        page_tokens=4, page_bytes=128, expansion=1, heads=2, dim=4, itemsize=4, token_stride=32,
        head_stride=16,
    )  # fmt: skip
    pool = rig.pool(256, 8)
    places = [(pool.memory, 256, 128 * role) for role in range(2)]
    stack = rig.device.page_stack(places, 2, geometry)
    mapping = rig.put(np.array([[1, 0], [2, 3]], np.int32))
    same = [rig.put(np.ones((1, 2, 2, 4), np.float32)) for _ in range(2)]
    rig.device.append(stack, mapping, same, stream=rig.stream)
    made = count_launches_made(monkeypatch)
    for _ in range(20):
        rig.device.append(stack, mapping, same, stream=rig.stream)
    assert len(made) == 1
    for _ in range(20):
        views = [array[0][None] for array in same]  # new objects, perhaps at old places
        rig.device.append(stack, mapping, views, stream=rig.stream)
        del views
    assert len(made) <= 2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_a_view_of_the_pool(rig, layout):
    manager = typed_manager(
        slots=4096, layers=2, layout=layout, device=rig.device, stream=rig.stream
    )
    pages = manager.get_pages(1, "value")
    slots = manager.pool_group_descs[0].num_slots
    shape = (4, 2, 8) if layout == "NHD" else (2, 4, 8)
    assert isinstance(pages, cupy.ndarray)
    assert pages.shape == (slots, *shape)
    assert pages.data.ptr == manager.get_mem_pool_base_address(1, "value")
    assert pages.strides[0] == 4 * manager.get_page_stride(1, "value")
    del pages
    manager.shutdown()


def test_tokens_of_another_device_are_refused_also_after_usual_ones(rig, other):
    manager = typed_manager(slots=4096, layers=2, device=rig.device, stream=rig.stream)
    (kv,) = manager.create_kv_caches([None])
    assert kv.resume()
    assert kv.resize(3)
    step = manager.create_batch(1, 4)
    step.prepare([kv], 3)
    mine, theirs = (d.empty((2, 3, 2, 8), np.float32) for d in (rig.device, other))
    for _ in range(3):
        step.append([0, 1], {"key": mine, "value": mine})
        with pytest.raises((TypeError, ValueError), match="cuda:0"):
            step.append([0, 1], {"key": mine, "value": theirs})
    kv.close()
    del mine, theirs, step
    manager.shutdown()
