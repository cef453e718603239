"""Several threads on one manager: probes, writers and evictions."""

from __future__ import annotations

import threading

import numpy as np

from kvcore.testing import check
from tests.helpers import opaque_manager

BLOCKS = 24


def test_probes_are_right_while_another_thread_evicts():
    """What is found is a whole number of the prompt's blocks at some moment, never more."""
    m = opaque_manager(slots=BLOCKS + 8, enable_partial_reuse=False)
    prompt = np.arange(1_000, 1_000 + 4 * BLOCKS, dtype=np.int32)
    stop, wrong, seen = threading.Event(), [], set()

    def probe():
        while not stop.is_set():
            found = m.probe_reuse(input_tokens=prompt)
            seen.add(found)
            if found % 4 or not 0 <= found <= len(prompt):
                wrong.append(found)
            held = m.create_kv_cache(input_tokens=prompt)
            if held.num_committed_tokens % 4:
                wrong.append(held)
            held.close()

    threads = [threading.Thread(target=probe) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for size in [*range(1, BLOCKS)] * 12:
            kv = m.create_kv_cache(input_tokens=prompt)
            if kv.resume() and kv.resize(len(prompt)):
                kv.commit(prompt[kv.num_committed_tokens :])
            kv.close()
            other = m.create_kv_cache()
            if other.resume():
                other.resize(4 * (8 + size))
            other.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert seen
    check(m)
    m.clear_reusable_blocks()
    assert m.get_storage_statistics()[0].free == BLOCKS + 8


def test_sequences_of_many_threads_share_a_prefix():
    """CN-07's shape: eight threads on one prefix see the same pages all the time."""
    m = opaque_manager(slots=64)
    prompt = list(range(5_000, 5_000 + 4 * BLOCKS))
    kv = m.create_kv_cache()
    kv.resume()
    kv.resize(len(prompt))
    kv.commit(prompt)
    pages = kv.get_base_page_indices(0).tolist()
    kv.close()
    wrong, barrier = [], threading.Barrier(8)

    def read():
        barrier.wait()
        for _ in range(60):
            mine = m.create_kv_cache(input_tokens=prompt)
            if not mine.resume() or mine.get_base_page_indices(0).tolist() != pages:
                wrong.append(mine)
            mine.close()

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    check(m)
