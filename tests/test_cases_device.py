"""How paged caches failed elsewhere: copies, addresses, padding, and memory across streams.

Each test says what it guards and, where the failure is public, whose it was.
"""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.device.simulated import Gate
from kvcore.testing import FakeEngine, check
from kvcore.testing.small import small_config
from tests.helpers import opened, row, typed_manager

# -- copies of pages -------------------------------------------------------------------------------

T = 4
ROLES = {
    "key alone": [("key", "float16", (128,))],
    "key and value": [("key", "float32", (2, 8)), ("value", "float32", (2, 8))],
    "and scales": [
        ("key", "int8", (2, 16)),
        ("value", "int8", (2, 16)),
        ("scale", "float32", (2,)),
    ],
    "opaque": [("key", None, 512), ("value", None, 256)],
}


def pages_of(roles, slots):
    """A manager whose every page of every pool is filled with bytes of its own."""
    buffers = []
    for role, dtype, shape in roles:
        if dtype is None:
            buffers.append(k.BufferConfig(role=role, size=shape))
        else:
            size = T * int(np.prod(shape)) * np.dtype(dtype).itemsize
            buffers.append(k.BufferConfig(role=role, size=size, dtype=dtype, shape=shape))
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=8 * 4096)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
        max_beam_width=2,
        enable_partial_commit=False,
    )
    m = k.KVCacheManager(config, device="host")
    total = m.get_storage_statistics()[0].total
    generator = np.random.default_rng(1)
    pools = [
        memory.array(np.uint8, (total, nbytes)) for memory, nbytes in m._runtime.pool_places[0]
    ]
    for pool in pools:
        pool[:] = generator.integers(0, 256, pool.shape, np.uint8)
    return m, total, pools


@pytest.mark.parametrize("tokens", [1, T // 2, T - 1, T])
@pytest.mark.parametrize("roles", ROLES)
def test_a_copied_page_is_exact_and_its_neighbours_stay(roles, tokens):
    """From the first page and from the last; the tokens that were written and no more.

    A factor of two was built in, so keys alone went elsewhere (NVIDIA/TensorRT-LLM#4943).
    """
    m, total, pools = pages_of(ROLES[roles], 8)
    for source in (0, total - 1):
        everything = m.create_kv_cache()
        kv = m.create_kv_cache(expected_prompt_length=0)
        assert everything.resume()
        assert kv.resume()
        if source:
            assert everything.resize(T * (total - 1))
            assert kv.resize(tokens)
            assert everything.resize(0)
            assert everything.resize(T * (total - 2))
        else:
            assert kv.resize(tokens)
            assert everything.resize(T * (total - 2))
        assert row(kv) == [source]
        before = [pool.copy() for pool in pools]
        assert kv.set_beam_width(2)
        target = row(kv, 1)[0]
        for place in m.layout.places.values():
            written = T if roles == "opaque" else tokens  # what is not declared is copied whole
            old, end = before[place.pool], place.offset + place.stored_bytes * written // T
            old[target, place.offset : end] = old[source, place.offset : end]
        for pool, old in zip(pools, before, strict=True):
            assert (pool == old).all()
        check(m)
        m.close_kv_caches([kv, everything])


@pytest.mark.parametrize("roles", ["key alone", "key and value", "and scales"])
def test_appending_to_the_last_page_touches_nothing_else(roles):
    m, total, pools = pages_of(ROLES[roles], 8)
    (kv,) = opened(m, T * total)
    before = [pool.copy() for pool in pools]
    step = m.create_batch(1, 8)
    step.prepare([kv], 2, start=[T * total - 2])
    for role, dtype, shape in ROLES[roles]:
        values = np.full((2, *shape), 7, dtype)
        step.append(0, {role: values})
        (found,) = step.gather(0, (role,))
        assert found.reshape(values.shape).tobytes() == values.tobytes()
    last = row(kv)[-1]
    for pool, old in zip(pools, before, strict=True):
        assert (np.delete(pool, last, 0) == np.delete(old, last, 0)).all()
        assert (pool[last] != old[last]).any()


# -- what a captured graph relies on ---------------------------------------------------------------


def test_a_replay_with_fewer_rows_writes_no_page_of_others():
    """Padded rows wrote to page 0, and buffers moved (m0at/rvllm#32, kekzl/imp#1709)."""
    m = typed_manager(slots=32, layers=1)
    caches = opened(m, 4, 4, 4, 4)
    step = m.create_batch(4, 4)
    names = ("key", "value")
    fixed = [np.zeros((4, 2, 8), np.float32) for _ in names]

    def addresses():
        arrays = [step.rows, step.mapping, m.page_table(0), *fixed]
        pools = [m.get_mem_pool_base_address(0, role) for role in names]
        return pools + [array.ctypes.data for array in arrays]

    def replay(value):
        """As a graph does: fixed arrays of `max_tokens`, whatever was prepared."""
        for array in fixed:
            array[:] = value
        step.append(0, dict(zip(names, fixed, strict=True)))

    step.prepare(caches, 1)
    replay(1)
    before = addresses()
    assert step.gather(0)[0][:, 0, 0].tolist() == [1, 1, 1, 1]
    caches[0].close()
    caches += opened(m, *[4] * 20)  # in its slot and row; the table grows
    step.prepare(caches[1:3], 1)
    replay(2)
    assert addresses() == before
    pool = m._runtime.pool_places[0][0]
    keys = pool[0].array(np.float32, (32, pool[1] // 4))[:, 0]
    assert keys[[row(kv)[0] for kv in caches[1:4]]].tolist() == [2, 2, 1]
    assert (keys[[row(kv)[0] for kv in caches[5:]]] == 0).all()
    step.prepare([], 0)
    replay(3)
    assert not (keys == 3).any()
    out = tuple(np.full((4, 2, 8), 9, np.float32) for _ in names)
    step.gather(0, out=out)  # padding reads as zeros
    assert not any(array.any() for array in out)


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_new_table_memory_is_cleared_before_anybody_writes_it(seed):
    """A memset on another stream retired after the first write (kekzl/imp#1709)."""
    device = HostDevice(deferred=True, seed=seed)
    m = k.KVCacheManager(small_config(slots=16), device=device)
    streams = [device.create_stream() for _ in range(2)]
    engine = FakeEngine(m)
    first, second = m.create_kv_caches([None, None])
    assert first.resume(streams[0])
    assert second.resume(streams[1])
    gate = Gate()
    streams[0].wait(gate)  # the clearing is slow
    assert first.resize(4)
    engine.write([first], 4)
    assert second.resize(4)
    engine.write([second], 4)  # into rows that the other stream still has to clear
    engine.look([second])
    gate.open()
    engine.verify([first])
    check(m, device=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_page_that_is_still_written_is_not_handed_on(seed):
    """Freed on one stream, used on another (cupy/cupy#5069, #8068)."""
    device = HostDevice(deferred=True, seed=seed)
    m = k.KVCacheManager(small_config(slots=1), device=device)
    slow, quick = device.create_stream(), device.create_stream()
    engine = FakeEngine(m)
    first, second = m.create_kv_caches([None, None])
    assert first.resume(slow)
    assert second.resume(quick)
    gate = Gate()
    assert first.resize(4)
    engine.delay = lambda stream: stream.wait(gate)
    engine.write([first], 4, own_table=True)  # the slow kernel
    engine.delay = None
    engine.look([first], own_table=True)
    engine.close(first)  # its poison comes after
    assert second.resize(4)
    engine.write([second], 4, own_table=True)
    engine.look([second], own_table=True)
    gate.open()
    engine.settle()


@pytest.mark.parametrize("seed", range(12))
def test_a_cache_moves_to_another_stream_behind_its_work(seed):
    device = HostDevice(deferred=True, seed=seed)
    m = k.KVCacheManager(small_config(slots=4), device=device)
    slow, quick = device.create_stream(), device.create_stream()
    engine = FakeEngine(m)
    (kv,) = m.create_kv_caches([None])
    assert kv.resume(slow)
    assert kv.resize(4)
    gate = Gate()
    slow.wait(gate)
    engine.write([kv], 4, own_table=True)
    kv.suspend()
    assert kv.resume(quick)
    engine.look([kv], own_table=True)
    gate.open()
    engine.settle()


@pytest.mark.parametrize("seed", range(12))
def test_a_step_reads_what_a_step_on_another_stream_wrote(seed):
    """No `finish` in between: preparing the second step joins the stream of the first."""
    device = HostDevice(deferred=True, seed=seed)
    m = k.KVCacheManager(small_config(slots=4), device=device)
    own, lent, third = (device.create_stream() for _ in range(3))
    engine = FakeEngine(m)
    (kv,) = m.create_kv_caches([None])
    assert kv.resume(own)
    assert kv.resize(8)
    gate = Gate()
    engine.delay = lambda stream: stream.wait(gate)
    engine.write([kv], 4, stream=lent)
    engine.delay = None
    engine.look([kv])
    engine.look([kv], stream=third)
    gate.open()
    engine.settle()


def test_shutdown_waits_for_streams_of_closed_caches():
    """The number of a stream that no cache uses any more is used again; its work is not over."""
    device = HostDevice(deferred=True)
    m = k.KVCacheManager(small_config(slots=4), device=device)
    engine = FakeEngine(m)
    (kv,) = m.create_kv_caches([None])
    assert kv.resume(device.create_stream())
    assert kv.resize(4)
    gate = Gate()
    engine.delay = lambda stream: stream.wait(gate)
    engine.write([kv], 4)
    engine.close(kv)
    with m.create_kv_cache() as other:
        assert other.resume(device.create_stream())
    with pytest.raises(k.StateError, match="waits for a closed gate"):
        m.shutdown()
    gate.open()
    m.shutdown()


def test_threads_hand_pages_to_each_other():
    """Each on a stream of its own, all out of one small pool."""
    device = HostDevice(deferred=True, seed=5)
    m = k.KVCacheManager(small_config(slots=12), device=device)
    failures = []

    def drive(engine):
        try:
            stream = device.create_stream()
            for tokens in range(1, 40):
                with m.create_kv_cache() as kv:
                    assert kv.resume(stream)
                    if kv.resize(tokens % 13):
                        engine.write([kv], kv.capacity)
                        engine.verify([kv])
                    engine.close(kv)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=drive, args=(FakeEngine(m),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check(m, device=True)
