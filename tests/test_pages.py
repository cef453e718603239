"""Typed views of the pools: the very bytes that append writes and addresses name."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from tests.helpers import opaque_manager, opened, row, typed_manager

H, D = 2, 8


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_a_page_holds_what_was_appended(layout, dtype):
    m = typed_manager(slots=64, layers=3, layout=layout, dtype=dtype)
    (kv,) = opened(m, 7)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7)
    pages = m.get_pages(2, "value")
    new = np.arange(7 * H * D).reshape(7, H, D).astype(pages.dtype)
    step.append(2, {"key": new, "value": new[::-1]})
    slots = m.pool_group_descs[0].num_slots
    assert pages.shape == ((slots, 4, H, D) if layout == "NHD" else (slots, H, 4, D))
    first, second = (pages[slot] for slot in row(kv))
    if layout == "HND":
        first, second = first.swapaxes(0, 1), second.swapaxes(0, 1)
    np.testing.assert_array_equal(np.concatenate((first, second[:3])), new[::-1])


def test_the_view_lies_where_the_addresses_say():
    m = typed_manager(layers=3)
    pages = m.get_pages(1, "value")
    base = m.get_mem_pool_base_address(1, "value")
    stride = m.get_page_stride(1, "value") * m.get_page_index_scale(1, "value")
    assert (pages.ctypes.data, pages.strides[0]) == (base, stride)
    pages[3] = 7
    assert m.get_pages(1, "value")[3].min() == 7


def test_opaque_and_finer_pages():
    m = opaque_manager(slots=16, layers=2)
    assert (m.get_pages(1, "key").shape, m.get_pages(1, "key").dtype) == ((16, 1024), np.uint8)
    shapes = {}
    for layout in ("NHD", "HND"):
        buffer = k.BufferConfig(
            role="key", size=2 * H * D * 4, tokens_per_block_override=2, dtype="float32",
            shape=(H, D), layout=layout,
        )  # fmt: skip
        config = k.KVCacheManagerConfig(
            tokens_per_block=8,
            cache_tiers=[k.GpuCacheTierConfig(quota=4096)],
            layers=[k.AttentionLayerConfig(layer_id=0, buffers=[buffer])],
        )
        shapes[layout] = k.KVCacheManager(config, device="host").get_pages(0, "key").shape[1:]
    assert shapes == {"NHD": (8, H, D), "HND": (4, H, 2, D)}


def test_what_is_refused():
    m = typed_manager()
    with pytest.raises(ValueError, match="role"):
        m.get_pages(0, "kez")
    with pytest.raises(k.StateError, match="without memory"):
        opaque_manager(device="meta").get_pages(0, "key")
    m.shutdown()
    with pytest.raises(k.StateError, match="shut down"):
        m.get_pages(0, "key")
