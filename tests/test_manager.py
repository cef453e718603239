"""Sequences and pages through the public objects, in exact numbers."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvcore as k
from tests.helpers import opaque_manager, opened, row, used


def test_advance_with_counts_and_history():
    m = opaque_manager()
    a, b, c = opened(m, 4, 4, 3)
    assert m.advance([a, b, c], [0, 5, 1], history=[4, 6, 3])
    assert [kv.capacity for kv in (a, b, c)] == [4, 9, 4]
    assert [kv.history_length for kv in (a, b, c)] == [4, 6, 3]
    assert [kv.num_blocks for kv in (a, b, c)] == [1, 3, 1]
    assert used(m) == 5


def test_advance_of_beams_takes_a_page_per_beam():
    m = opaque_manager(slots=16, max_beam_width=4, enable_partial_commit=False)
    a, b = opened(m, 4, 4)
    assert a.resize(None, 4)
    assert a.set_beam_width(3)
    assert used(m) == 2
    assert m.advance([a, b], 1)
    assert used(m) == 2 + 3 + 1
    assert len({row(a, beam)[1] for beam in range(3)} | {row(b)[1]}) == 4


@pytest.mark.parametrize(
    ("n", "history", "error"),
    [
        (-1, None, ValueError),
        ([1, -1], None, ValueError),
        ([1, 1, 1], None, ValueError),
        (1.5, None, TypeError),
        (1, [3, 0], ValueError),  # below the present history
        (1, [4, 6], ValueError),  # past the capacity
        (2**31, None, ValueError),
    ],
)
def test_advance_refuses_wrong_arguments_and_changes_nothing(n, history, error):
    m = opaque_manager()
    a, b = opened(m, 4, 4)
    a.resize(None, 4)
    with pytest.raises(error):
        m.advance([a, b], n, history=history)
    assert [(kv.capacity, kv.history_length) for kv in (a, b)] == [(4, 4), (4, 0)]
    assert used(m) == 2


def test_advance_refuses_duplicates_inactive_closed_and_foreign_members():
    m, other = opaque_manager(), opaque_manager()
    a, b, c = opened(m, 4, 4, 4)
    (d,) = opened(other, 4)
    b.suspend()
    c.close()
    for members in ([a, a], [a, b], [a, c], [a, d], [b], [c], [d]):
        with pytest.raises((ValueError, TypeError)):
            m.advance(members, 1)
    with pytest.raises(TypeError):
        m.advance([a, "b"], 1)
    assert (a.capacity, d.capacity, used(m)) == (4, 4, 2)


def test_the_same_list_with_other_members_is_looked_up_again():
    m = opaque_manager()
    a, b, c = opened(m, 1, 1, 1)
    batch = [a, b]
    assert m.advance(batch, 1)
    batch[1] = c
    assert m.advance(batch, 1)
    assert [kv.capacity for kv in (a, b, c)] == [3, 2, 2]
    a.suspend()
    with pytest.raises(ValueError, match="active"):
        m.advance(batch, 1)


def test_batched_truncate_frees_the_blocks_beyond():
    m = opaque_manager()
    a, b, c = opened(m, 12, 9, 4)
    b.resize(None, 5)
    with pytest.raises(ValueError, match=r"capacities\[1\]"):
        m.truncate([a, b], [3, 4])  # below b's history
    with pytest.raises(ValueError, match=r"capacities\[0\]"):
        m.truncate([a, b], [13, 9])
    assert used(m) == 7
    m.truncate([a, b, c], [0, 5, 4])
    assert [kv.capacity for kv in (a, b, c)] == [0, 5, 4]
    assert [kv.num_blocks for kv in (a, b, c)] == [0, 2, 1]
    assert used(m) == 3


def test_batched_create_is_all_or_nothing():
    m = opaque_manager(max_sequences=4)
    first = m.create_kv_caches([3, None])
    assert [kv.expected_prompt_length for kv in first] == [3, None]
    with pytest.raises(k.CacheCapacityError, match="max_sequences=4"):
        m.create_kv_caches([1, 2, 3])
    second = m.create_kv_caches([1, 2], ids=["x", "y"])
    assert [kv.id for kv in first + second] == [None, None, "x", "y"]
    with pytest.raises(k.CacheCapacityError):
        m.create_kv_cache()


def test_batched_close():
    m = opaque_manager(max_beam_width=2, enable_partial_commit=False)
    a, b, c, d = opened(m, 4, 6, 8, 3)
    b.resize(None, 4)
    b.set_beam_width(2)
    c.suspend()
    d.close()
    m.close_kv_caches([a, b, c, d, a])
    assert [kv.status for kv in (a, b, c, d)] == [k.Status.CLOSED] * 4
    assert used(m) == 0
    m.shutdown()


def test_slot_mapping_of_a_ragged_batch_with_beams():
    m = opaque_manager(max_beam_width=2, enable_partial_commit=False)
    prefill, decode = opened(m, 6, 7)
    decode.resize(None, 5)
    assert decode.set_beam_width(2)
    slots, offsets = m.slot_mapping([prefill, decode], [6, 2])
    p, d0, d1 = row(prefill), row(decode, 0), row(decode, 1)
    assert slots.tolist() == [p[0]] * 4 + [p[1]] * 2 + [d0[1]] * 2 + [d1[1]] * 2
    assert offsets.tolist() == [0, 1, 2, 3, 0, 1, 1, 2, 1, 2]
    slots, offsets = m.slot_mapping([decode], 3, start=[3])
    assert slots.tolist() == [d0[0], d0[1], d0[1], d1[0], d1[1], d1[1]]
    assert d0[0] == d1[0]
    assert offsets.tolist() == [3, 0, 1] * 2
    assert [x.size for x in m.slot_mapping([prefill], 0)] == [0, 0]
    for num_tokens, start, said in ((7, 0, "capacity of 6"), (1, -1, "start"), (1, 6, "capacity")):
        with pytest.raises(ValueError, match=said):
            m.slot_mapping([prefill], num_tokens, start=start)


def test_bound_rows_follow_every_change():
    m = opaque_manager(slots=32, max_beam_width=4, enable_partial_commit=False)
    (kv,) = opened(m, 6)
    mine = np.full(4, 99, np.int32)
    kv.set_base_page_index_buf(0, 0, mine)
    assert mine.tolist() == [*row(kv), -1, -1]
    assert kv.resize(9, 6)
    assert mine.tolist() == [*row(kv), -1]
    assert kv.set_base_page_index_buf(0, 0, mine) is None  # binding the same row again keeps it
    with pytest.raises(ValueError, match="bound page-index buffer"):
        kv.resize(17)
    with pytest.raises(ValueError, match="bound page-index buffer"):
        m.advance([kv], 8)
    assert kv.capacity == 9
    kv.set_beam_width(2)
    second = np.zeros(3, np.int32)
    kv.set_base_page_index_buf(1, 0, second)
    assert second.tolist() == row(kv, 1)
    kv.reorder_beams([1, 1])
    assert (mine[:3].tolist(), second.tolist()) == (row(kv, 0), row(kv, 1))
    kv.set_beam_width(1)
    assert second.tolist() == [-1] * 3
    kv.resize(6)
    assert mine.tolist() == [*row(kv), -1, -1]
    kv.suspend()
    assert mine.tolist() == [-1] * 4
    assert kv.resume()
    assert mine.tolist() == [-1] * 4  # let go of at suspend
    kv.set_base_page_index_buf(0, 0, mine)
    kv.set_base_page_index_buf(0, 0, None)
    assert mine.tolist() == [-1] * 4
    kv.set_base_page_index_buf(0, 0, mine)
    kv.close()
    assert mine.tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("beam", "group", "buffer", "error"),
    [
        (1, 0, np.zeros(4, np.int32), ValueError),  # no such beam
        (0, 1, np.zeros(4, np.int32), ValueError),  # no such layer group
        (0, 0, np.zeros(1, np.int32), ValueError),  # too short
        (0, 0, np.zeros(4, np.int64), TypeError),
        (0, 0, [0, 0, 0, 0], TypeError),
    ],
)
def test_wrong_rows_are_refused(beam, group, buffer, error):
    m = opaque_manager()
    (kv,) = opened(m, 6)
    with pytest.raises(error):
        kv.set_base_page_index_buf(beam, group, buffer)
    assert kv.resize(40)  # nothing is bound


def test_aggregated_indices_are_there_while_suspended():
    m = opaque_manager()
    (kv,) = opened(m, 9)
    before = row(kv)
    kv.suspend()
    assert row(kv) == [-1] * 3
    assert kv.get_aggregated_page_indices(0).tolist() == before
    assert kv.get_aggregated_page_indices(0, valid_only=True).tolist() == before
    with pytest.raises(ValueError, match="beam"):
        kv.get_aggregated_page_indices(0, 1)


def test_wrong_states_are_state_errors():
    m = opaque_manager()
    kv = m.create_kv_cache()
    for call in (kv.suspend, lambda: kv.resize(4), lambda: kv.reorder_beams([0])):
        with pytest.raises(k.StateError, match="suspended"):
            call()
    assert kv.resume()
    with pytest.raises(k.StateError, match="already active"):
        kv.resume()
    kv.close()
    for call in (kv.resume, kv.suspend, lambda: kv.resize(4), lambda: kv.set_beam_width(1)):
        with pytest.raises(k.StateError, match="closed"):
            call()
    assert (kv.capacity, kv.history_length, kv.num_blocks, kv.beam_width) == (0, 0, 0, 0)


def test_resume_leaves_room_for_those_who_run():
    m = opaque_manager(slots=16, max_util_for_resume=0.5)
    (a,) = opened(m, 32)  # 8 of 16 slots
    b = m.create_kv_cache()
    assert b.resume()
    b.suspend()
    assert a.resize(36)
    assert b.resume() is False
    assert b.status is k.Status.SUSPENDED
    a.suspend()
    assert a.resume()  # its own pages do not keep it out


def test_the_longest_sequence_is_the_callers_limit():
    m = opaque_manager(slots=16, max_seq_len=10)
    (kv,) = opened(m, 10)
    assert kv.num_blocks == 3
    for grow in (lambda: kv.resize(11), lambda: m.advance([kv], 1), lambda: m.advance([kv], [7])):
        with pytest.raises(ValueError, match="max_seq_len=10"):
            grow()
    assert m.page_table(0).shape[1] == 3


def test_dropped_handles_are_closed_by_the_next_call():
    m = opaque_manager()
    kept, dropped = opened(m, 8, 8)
    m.advance([kept, dropped], 1)  # the remembered batch must not keep it alive
    del dropped
    gc.collect()
    with pytest.warns(ResourceWarning, match="dropped without close"):
        assert used(m) == 3
    kept.close()
    m.shutdown()


def test_shutdown_refuses_while_caches_are_open_and_is_final():
    m = opaque_manager()
    kv = m.create_kv_cache()
    with pytest.raises(k.StateError, match="1 KV cache"):
        m.shutdown()
    kv.close()
    m.shutdown()
    m.shutdown()
    with pytest.raises(k.StateError, match="shut down"):
        m.create_kv_cache()


def test_a_failing_body_is_not_hidden_by_open_caches():
    def body():
        with opaque_manager() as m:
            m.create_kv_cache()
            raise KeyError("the body's own error")

    with pytest.raises(KeyError):
        body()


@pytest.mark.parametrize(
    "change",
    [
        {"swa_scratch_reuse": k.SwaScratchReuseConfig()},
        {
            "cache_tiers": [
                k.GpuCacheTierConfig(quota=1 << 20),
                k.HostCacheTierConfig(quota=1 << 20),
            ]
        },
        {
            "layers": [
                k.AttentionLayerConfig(
                    layer_id=0,
                    sliding_window_size=8,
                    buffers=[k.BufferConfig(role="key", size=1024)],
                )
            ]
        },
    ],
)
def test_what_is_not_built_says_so(change):
    settings = {
        "tokens_per_block": 4,
        "cache_tiers": [k.GpuCacheTierConfig(quota=1 << 20)],
        "layers": [
            k.AttentionLayerConfig(layer_id=0, buffers=[k.BufferConfig(role="key", size=1024)])
        ],
    }
    with pytest.raises(NotImplementedError, match="not built yet"):
        k.KVCacheManager(k.KVCacheManagerConfig(**{**settings, **change}), device="host")


def test_meta_has_pages_without_memory():
    m = opaque_manager(device="meta")
    (kv,) = opened(m, 9)
    assert used(m) == 3
    with pytest.raises(k.StateError, match="without memory"):
        m.create_batch(1, 1)
    with pytest.raises(k.StateError, match="without memory"):
        m.page_table(0)
    kv.close()
    m.shutdown()


def test_a_million_blocks_and_many_short_lives_leave_nothing():
    """Peers crashed on unbounded chains of freed blocks; here a freed block is a number."""
    m = opaque_manager(slots=1_000_000, device="meta")
    kv = m.create_kv_cache()
    assert kv.resume()
    assert kv.resize(4_000_000)
    assert used(m) == 1_000_000
    assert kv.resize(4_000_001) is False
    kv.close()
    assert used(m) == 0
