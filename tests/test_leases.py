"""Leases: typed views of pool memory in place, and memory that stays as long as they are used."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading

import numpy as np
import pytest

import kvcore as k
from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.dlpack.exports import exports
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.helpers import mixed_manager, opaque_manager, opened, row, typed_manager

H, D = 2, 8
T = 4


@pytest.fixture(autouse=True)
def nothing_stays_out():
    gc.collect()
    before = len(exports())
    yield
    gc.collect()
    assert len(exports()) == before


def filled(m: k.KVCacheManager, layers: int, dtype: str = "float32"):
    """A sequence of seven tokens; its keys and values, as bits."""
    (kv,) = opened(m, 7)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7)
    bits = array_type(dtype)
    dim = D * DTYPE_BITS[dtype] // 8 // bits.itemsize
    new = np.arange(layers * 7 * H * dim).reshape(layers, 7, H, dim).astype(bits)
    step.append(range(layers), {"key": new, "value": new[:, ::-1]})
    return kv, new


# -- what a lease shows ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_pages_are_seen_in_place(layout, dtype):
    m = typed_manager(slots=64, layers=3, layout=layout, dtype=dtype)
    kv, new = filled(m, 3, dtype)
    with m.lease(2, "value") as lease:
        slots = m.pool_group_descs[0].num_slots
        assert lease.shape == ((slots, T, H, D) if layout == "NHD" else (slots, H, T, D))
        page = T * H * D
        assert lease.strides == (6 * page, *lease.view.strides[1:])
        assert lease.strides[1:] == ((H * D, D, 1) if layout == "NHD" else (T * D, D, 1))
        assert (lease.dtype, lease.address) == (dtype, m.get_mem_pool_base_address(2, "value"))
        pages = np.from_dlpack(lease.bits() if dtype in UNKNOWN_TO_NUMPY else lease)
        first, second = (pages[slot].view(array_type(dtype)) for slot in row(kv))
        if layout == "HND":
            first, second = first.swapaxes(0, 1), second.swapaxes(0, 1)
        np.testing.assert_array_equal(np.concatenate((first, second[:3])), new[2, ::-1])
        del pages, first, second
    kv.close()
    m.shutdown()


def test_a_lease_shows_what_get_pages_shows():
    m = opaque_manager(slots=16, layers=2)
    for manager in (m, typed_manager(slots=64, layers=3, dim=6)):
        mine, lease = manager.get_pages(1, "value"), manager.lease(1, "value")
        seen = np.asarray(lease)
        assert (seen.ctypes.data, seen.shape, seen.strides, seen.dtype) == (
            mine.ctypes.data, mine.shape, mine.strides, mine.dtype)  # fmt: skip
        del seen


@pytest.mark.parametrize("pages", [range(3, 9), range(0, 16, 5), range(7, 8), range(4, 4)])
def test_a_range_of_pages(pages):
    m = typed_manager(slots=16)
    whole = m.get_pages(1, "key")
    whole[...] = np.arange(whole.size).reshape(whole.shape)
    lease = m.lease(1, "key", pages=pages)
    assert lease.shape == (len(pages), T, H, D)
    np.testing.assert_array_equal(np.from_dlpack(lease), whole[list(pages)])
    if pages:
        assert lease.address == whole[pages[0]].ctypes.data


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("override", [None, 2])
def test_a_whole_pool_has_no_gaps_and_is_indexed_per_layer(layout, override):
    buffers = [
        k.BufferConfig(role=r, size=(override or T) * H * D * 4, dtype="float32", shape=(H, D),
                       layout=layout, tokens_per_block_override=override) for r in ("key", "value")
    ]  # fmt: skip
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=8 * 4096)],
        layers=[k.AttentionLayerConfig(layer_id=i, buffers=buffers) for i in range(2)],
    )
    m = k.KVCacheManager(config, device="host")
    kv, new = filled(m, 2)
    lease = m.lease(layer_group=0)
    tokens = override or T
    page = (tokens, H, D) if layout == "NHD" else (H, tokens, D)
    slots = m.pool_group_descs[0].num_slots
    assert lease.shape == (slots * 4 * T // tokens, *page)
    assert lease.view.is_contiguous
    assert lease.address == m.pool_group_descs[0].pool_addresses[0]
    convert = m.get_page_index_converter(1, "value")
    indices = convert(row(kv), k.PageIndexMode.PER_LAYER)
    pages = np.from_dlpack(lease)[indices]
    if layout == "HND":
        pages = pages.swapaxes(1, 2)
    np.testing.assert_array_equal(pages.reshape(-1, H, D)[:7], new[1, ::-1])


def test_buffers_of_several_kinds_share_a_pool_as_bytes():
    kinds = {"key": ("float16", (2, 8)), "value": ("float32", (2, 4)), "scales": (None, None)}
    m = mixed_manager(kinds)
    lease = m.lease(layer_group=0)
    assert (lease.dtype, lease.shape) == ("uint8", (m.pool_group_descs[0].num_slots, 384))
    assert m.lease(0, "scales").shape[1:] == (128,)


def test_the_page_table_is_leased_for_reading():
    m = typed_manager(slots=64)
    kv, _ = filled(m, 2)
    with m.lease_page_table() as lease:
        table = np.from_dlpack(lease)
        assert table.ctypes.data == m.page_table(0).ctypes.data
        assert table[0, :2].tolist() == row(kv)
        assert not table.flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            lease.__dlpack__()
        del table


def test_what_is_refused_changes_nothing():
    m = typed_manager(slots=16)
    slots = m.pool_group_descs[0].num_slots
    for arguments, text in (
        ({"layer": 0, "role": "kez"}, "role"),
        ({"layer": 9, "role": "key"}, "layer"),
        ({"layer": 0}, "layer, role"),
        ({}, "layer, role"),
        ({"layer_group": 1}, "layer_group"),
        ({"layer_group": 0, "pool": 1}, "pool"),
        ({"layer_group": 0, "layer": 0}, "layer_group"),
        ({"layer": 0, "role": "key", "pool": 1}, "pool"),
        ({"layer": 0, "role": "key", "pool": [0]}, "pool"),
        ({"layer": 0, "role": "key", "pages": range(slots + 1)}, "pages"),
        ({"layer": 0, "role": "key", "pages": range(-1, 2)}, "pages"),
        ({"layer": 0, "role": "key", "pages": range(3, 0, -1)}, "pages"),
    ):
        with pytest.raises(ValueError, match=text):
            m.lease(**arguments)
    for arguments in ({"pages": [1, 2]}, {"pages": 3}, {"stream": 1.5}):
        with pytest.raises(TypeError, match=r"pages|stream"):
            m.lease(0, "key", **arguments)
    for layer in ([0], 0.0, True, "0"):
        with pytest.raises(TypeError, match="layer: expected"):
            m.lease(layer, "key")
    m.lease(layer_group=0, pool=0).close()
    for arguments in ({"layer_group": 0, "pool": False}, {"layer_group": 0.0}):  # equal to those
        with pytest.raises(TypeError, match=r"pool|layer_group"):
            m.lease(**arguments)
    with pytest.raises(k.StateError, match="without memory"):
        opaque_manager(device="meta").lease(0, "key")
    m.shutdown()
    with pytest.raises(k.StateError, match="shut down"):
        m.lease(0, "key")


# -- how long it lasts -----------------------------------------------------------------------------

TAKE = {"dlpack": np.from_dlpack, "array interface": np.asarray}


@pytest.mark.parametrize("take", TAKE)
def test_leaving_the_block_while_an_array_is_held(take):
    m = typed_manager()
    lease = m.lease(1, "key")
    held = TAKE[take](lease)
    with pytest.raises(k.LeaseInUse, match=r"1 array\(s\) of lease 1 of layer 1, buffer"), lease:
        held[...] = 2
    assert not lease.is_open
    held[...] = 3  # still mapped
    with pytest.raises(k.LeaseInUse, match="shutdown: lease 1 of layer 1, buffer 'key'"):
        m.shutdown()
    for give in (np.from_dlpack, np.asarray, lambda its: its.acquire(None)):
        with pytest.raises(k.StateError, match=r"lease 1 .* is closed; take another one"):
            give(lease)
    assert m.get_pages(1, "key").min() == 3
    held = None
    lease.close()  # nobody holds it any more
    m.shutdown()


def test_an_error_inside_the_block_is_not_hidden():
    m = typed_manager()
    lease = m.lease(0, "key")
    held = np.from_dlpack(lease)
    with pytest.raises(KeyError), lease:
        {}["nothing"]
    assert not lease.is_open
    assert held.size
    with pytest.raises(k.LeaseInUse):
        m.shutdown()
    del held
    m.shutdown()


@pytest.mark.parametrize("take", TAKE)
def test_a_lease_ends_with_its_last_array(take):
    m = typed_manager()
    one = TAKE[take](m.lease(0, "key"))
    two = one[2:, 1]
    del one
    gc.collect()
    with pytest.raises(k.LeaseInUse, match="buffer 'key'"):
        m.shutdown()
    two[...] = 1
    del two
    m.shutdown()


def test_a_lease_that_nobody_took_ends_when_it_is_dropped():
    m = typed_manager()
    lease = m.lease(0, "key")
    with pytest.raises(k.LeaseInUse, match="shutdown: lease 1 of layer 0"):
        m.shutdown()
    del lease
    m.shutdown()


def test_bits_keep_the_lease():
    m = typed_manager(dtype="bfloat16")
    bits = m.lease(0, "key").bits()
    taken = np.from_dlpack(bits)
    assert taken.dtype == np.uint16
    del taken
    with pytest.raises(k.LeaseInUse):
        m.shutdown()
    again = np.asarray(bits)
    del bits
    with pytest.raises(k.LeaseInUse):
        m.shutdown()
    del again
    m.shutdown()


def test_capsules_count_until_they_are_dropped():
    m = typed_manager()
    with m.lease(0, "key") as lease:
        capsule = lease.__dlpack__()
        assert lease.num_arrays == 1
        assert "1 arrays are out" in repr(lease)
        del capsule
        assert lease.num_arrays == 0
        copy = np.from_dlpack(lease, copy=True)
        assert lease.num_arrays == 0
    copy[...] = 0
    m.shutdown()


def test_the_first_of_several_leases_is_named_and_the_rest_counted():
    m = typed_manager(slots=64)
    filled(m, 2)[0].close()
    leases = [m.lease(0, "key"), m.lease(1, "value"), m.lease(layer_group=0)]
    with pytest.raises(k.LeaseInUse, match=r"lease 1 of layer 0, buffer 'key'.*and 2 more"):
        m.shutdown()
    for lease in leases:
        lease.close()
    table = m.lease_page_table()
    with pytest.raises(k.LeaseInUse, match="lease 4 of page table of layer group 0"):
        m.shutdown()
    table.close()
    m.shutdown()


def test_memory_is_not_resized_or_closed_below_a_lease():
    m = typed_manager(slots=64)
    memory = m._runtime.pools[0][0]
    lease = m.lease(0, "key", pages=range(2))
    nbytes, end = memory.nbytes, lease.view.end - memory.base
    assert nbytes > 4096 * 4
    with pytest.raises(k.LeaseInUse, match="resize: lease 1"):
        memory.resize(0)
    with pytest.raises(k.LeaseInUse, match="close: lease 1"):
        memory.close()
    assert memory.nbytes == nbytes
    memory.resize(end)  # rounded up; behind the lease there is nothing to keep
    assert end <= memory.nbytes < nbytes
    lease.close()
    memory.resize(0)


def test_the_memory_outlives_its_manager():
    m = typed_manager()
    m.get_pages(0, "key")[...] = 5
    held = np.from_dlpack(m.lease(0, "key"))
    del m
    gc.collect()
    assert set(np.unique(held).tolist()) == {5}


def test_the_manager_leaves_its_block_with_a_lease():
    m = typed_manager()
    lease = m.lease(0, "key")
    with pytest.raises(k.LeaseInUse), m:
        pass
    with pytest.raises(KeyError), m:
        {}["nothing"]
    lease.close()
    m.shutdown()


def test_arrays_are_dropped_in_another_thread():
    m = typed_manager()
    held = [np.from_dlpack(m.lease(0, "key")) for _ in range(8)]
    errors = []

    def drop():
        try:
            while held:
                held.pop()
        except IndexError:
            pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    m.shutdown()


def test_a_read_only_lease_is_for_reading():
    m = typed_manager()
    with m.lease(0, "key", readonly=True) as lease:
        for take in TAKE.values():
            array = take(lease)
            assert not array.flags.writeable
            del array
        with pytest.raises(BufferError, match="read-only"):
            lease.__dlpack__()


def test_kvcore_takes_its_own_leases():
    """A gather writes straight into pages of another manager."""
    m, other = typed_manager(slots=64), typed_manager(slots=16, T=7, layers=1)
    kv, new = filled(m, 2)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7, start=0)
    page = other.lease(0, "key", pages=range(3, 4))
    step.gather(0, ["key"], out=[np.from_dlpack(page)[0]])
    np.testing.assert_array_equal(other.get_pages(0, "key")[3], new[0])
    with pytest.raises(TypeError, match="writable"):
        step.gather(0, ["key"], out=[np.from_dlpack(other.lease(0, "key", readonly=True))[0]])


def test_many_leases_leave_nothing():
    m = typed_manager()
    for take in TAKE.values():
        take(m.lease(0, "key")), take(m.lease(0, "value"))
    gc.collect()
    memory = m._runtime.pools[0][0]
    before = sys.getrefcount(memory), sys.getallocatedblocks()
    for _ in range(10_000):
        with m.lease(0, "key") as lease:
            np.from_dlpack(lease)
            np.asarray(lease)
        np.from_dlpack(m.lease(0, "value"))
    del lease
    gc.collect()
    assert sys.getrefcount(memory) == before[0]
    assert sys.getallocatedblocks() - before[1] < 500
    assert not memory.holds
    m.shutdown()


def test_a_lease_is_neither_copied_nor_pickled():
    """The copy would end the lease when it is dropped, and count for nobody."""
    lease = typed_manager().lease(0, "key")
    for its in (lease, lease.bits()):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"lease 1 .* cannot be copied or pickled"):
                call(its)
    assert lease.is_open
