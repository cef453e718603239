"""Leases beyond 2**31 elements and 2**32 bytes: address space, most of which is never touched."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvcore as k
from tests.helpers import typed_manager

T, H, D = 256, 8, 128  # a page of one buffer: 2**18 elements
SLOTS = (1 << 14) + 8  # of a pool of one buffer more than 2**32 elements of two bytes
LAST = SLOTS - 8


@pytest.fixture(scope="module")
def manager():
    m = typed_manager(slots=SLOTS, T=T, layers=1, heads=H, dim=D, dtype="float16")
    if m.pool_group_descs[0].num_slots <= LAST:
        pytest.fail("the pool is too small for what the tests are about")
    yield m
    gc.collect()
    m.shutdown()


def taken(name, lease):
    """The lease as an array of a framework on the host, and that array as bits of NumPy."""
    if name == "numpy":
        found = np.from_dlpack(lease)
        return found, found.view(np.uint16)
    if name == "torch":
        torch = pytest.importorskip("torch")
        from kvcore_adapters import for_torch

        found = for_torch.tensor(lease)
        return found, found.view(torch.int16).numpy().view(np.uint16)
    pytest.importorskip("jax")
    from kvcore_adapters import for_jax

    found = for_jax.array(lease)
    return found, np.from_dlpack(found).view(np.uint16)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_pool_beyond_2_to_the_32_elements(manager, name):
    """The last page index's last element, where its number needs 33 bits and its offset 34."""
    convert = manager.get_page_index_converter(0, "value")
    places = convert(np.array([LAST], np.int32), k.PageIndexMode.PER_LAYER)
    index = int(places.reshape(-1)[0])
    inside = manager.get_pages(0, "value")[LAST].view(np.uint16)
    inside[-1, -1, -1] = 4711
    lease = manager.lease(layer_group=0)
    assert lease.shape[0] * T * H * D > 1 << 32
    theirs, bits = taken(name, lease)
    assert tuple(theirs.shape) == lease.shape
    assert bits[index, -1, -1, -1] == 4711
    at = lease.address + 2 * ((index + 1) * T * H * D - 1)
    assert at - lease.address > 1 << 33
    assert inside[-1:, -1:, -1:].__array_interface__["data"][0] == at


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_strides_and_offsets_beyond_2_to_the_31_elements(manager, name):
    """Pages of one buffer lie apart: both ways, at the far end of the pool, and one range."""
    inside = manager.get_pages(0, "value")[LAST].view(np.uint16)
    with manager.lease(0, "value") as lease:
        theirs, bits = taken(name, lease)
        inside[0, 0, 0] = 17
        assert bits[LAST, 0, 0, 0] == 17
        bits[LAST, 3, 2, 1] = 18
        assert inside[3, 2, 1] == 18
        del theirs, bits
    with manager.lease(0, "value", pages=range(LAST, SLOTS)) as lease:
        theirs, bits = taken(name, lease)
        assert (bits[0, 3, 2, 1], tuple(theirs.shape)) == (18, (8, T, H, D))
        bits[0, 3, 2, 1] = 19
        assert inside[3, 2, 1] == 19
        del theirs, bits
