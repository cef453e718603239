"""Calls that every active cache must refuse, each with the type of its exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.errors import StateError

if TYPE_CHECKING:
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager


def misuses(
    manager: KVCacheManager, kv: KVCache
) -> list[tuple[str, Callable[[], Any], type[Exception]]]:
    """(what is wrong, the call, what it must raise) for an active cache of the manager."""
    m: Any = manager  # the types of the arguments are what is wrong
    cache: Any = kv
    return [
        ("a float", lambda: cache.resize(1.5), TypeError),
        ("a bool", lambda: cache.resize(True), TypeError),
        ("twice", lambda: m.advance([kv, kv], 1), ValueError),
        ("not a cache", lambda: m.advance([kv, None], 1), TypeError),
        ("no sequence", lambda: m.advance(kv, 1), TypeError),
        ("wrong length", lambda: m.advance([kv], [1, 1]), ValueError),
        ("a float n", lambda: m.advance([kv], 0.5), TypeError),
        ("a float question", lambda: m.missing_pages([kv], 0.5), TypeError),
        ("float sizes", lambda: m.truncate([kv], [0.5]), TypeError),
        ("a str", lambda: cache.set_beam_width("2"), TypeError),
        ("float parents", lambda: cache.reorder_beams([0.5] * kv.beam_width), TypeError),
        ("no such beam", lambda: kv.get_base_page_indices(0, kv.beam_width), ValueError),
        ("no such group", lambda: kv.get_base_page_indices(1), ValueError),
        ("past the end", lambda: m.slot_mapping([kv], kv.capacity + 1, start=[0]), ValueError),
        ("before the start", lambda: m.slot_mapping([kv], 1, start=[-1]), ValueError),
        ("float counts", lambda: m.slot_mapping([kv], 0.5, start=[0]), TypeError),
        ("resume twice", kv.resume, StateError),
        ("open caches", m.shutdown, StateError),
        ("a float row", lambda: cache.set_base_page_index_buf(0, 0, np.empty(99)), TypeError),
        ("a row as a list", lambda: cache.set_base_page_index_buf(0, 0, [0] * 99), TypeError),
    ]
