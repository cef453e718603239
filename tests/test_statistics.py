"""Statistics: the reference's scenarios (SB-xx), and hits counted once a request."""

from __future__ import annotations

import pytest

import kvcore as k
from tests.helpers import opaque_manager

A = list(range(100, 100 + 16))


def counts(report):
    """(alloc_total, alloc_new, reused, missed)."""
    return report.alloc_total, report.alloc_new, report.reused, report.missed


def begin(manager, tokens, **settings):
    kv = manager.create_kv_cache(input_tokens=tokens, **settings)
    assert kv.resume()
    return kv


def seeded(tokens, **settings):
    """A manager in whose tree `tokens` are, with counters at 0."""
    manager = opaque_manager(**settings)
    kv = begin(manager, tokens)
    assert kv.resize(len(tokens))
    kv.commit(tokens)
    kv.close()
    manager.get_and_reset_iteration_stats()
    return manager


def generated(manager):
    return manager.get_and_reset_iteration_stats()[0].gen_alloc


def test_nothing_is_counted_with_stats_disabled():
    """SB-01."""
    m = opaque_manager(enable_stats=False)
    kv = begin(m, A[:8])
    kv.resize(8, 8)
    assert counts(kv.commit_pending_stats()) == (0, 0, 0, 0)
    assert m.get_committed_stats() == k.KVCacheStats()
    assert m.get_dirty_stats_ids() == set()


def test_context_and_generation():
    """SB-02."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    kv.resize(8, 8)
    assert counts(kv.commit_pending_stats()) == (2, 2, 0, 2)
    assert generated(m) == 0
    kv.resize(9)
    assert counts(kv.commit_pending_stats()) == (1, 1, 0, 0)
    assert generated(m) == 1


def test_a_reverted_generation_counts_nothing():
    """SB-03."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    kv.resize(8, 8)
    kv.commit_pending_stats()
    m.get_and_reset_iteration_stats()
    kv.resize(9)
    kv.resize(8)
    assert counts(kv.commit_pending_stats()) == (0, 0, 0, 0)
    assert m.get_and_reset_iteration_stats()[0] == k.KVCacheIterationStats()


def test_a_reverted_context_chunk_counts_nothing():
    """SB-04."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    kv.resize(4, 4)
    assert counts(kv.commit_pending_stats()) == (1, 1, 0, 1)
    kv.resize(8)
    kv.resize(4)
    assert counts(kv.commit_pending_stats()) == (0, 0, 0, 0)
    assert m.get_committed_stats().alloc_total == 1
    kv.resize(8)
    assert counts(kv.commit_pending_stats()) == (1, 1, 0, 1)


@pytest.mark.parametrize("batched", [False, True])
def test_chunks_of_a_prompt_are_no_generation(batched):
    """SB-07, by `resize` and by `advance`."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    seen = []
    for capacity, history in ((4, 4), (8, 8), (9, 9)):
        if batched:
            m.advance([kv], capacity - kv.capacity, history=[history])
        else:
            kv.resize(capacity, history)
        kv.commit_pending_stats()
        seen.append(generated(m))
    assert seen == [0, 0, 1]


def test_generation_counts_for_the_request():
    """SB-10."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    kv.resize(8, 8)
    kv.resize(9)
    assert counts(kv.commit_pending_stats()) == (3, 3, 0, 2)


def test_a_partly_matched_block_is_reused_and_copied():
    """SB-11: 12 tokens, then 10 of them."""
    m = seeded(A[:12])
    kv = begin(m, A[:10])
    assert kv.num_committed_tokens == 10
    assert counts(kv.commit_pending_stats()) == (1, 1, 3, 0)
    (seen,) = m.get_and_reset_iteration_stats()
    assert (seen.full_reused, seen.partial_reused) == (2, 1)
    slot = sum(m.get_storage_statistics()[0].slot_sizes)
    assert (seen.intra_device_copy_blocks, seen.intra_device_copy_bytes) == (1, slot)


def test_without_anything_to_reuse():
    """SB-12."""
    m = opaque_manager()
    kv = begin(m, A[:8])
    kv.resize(8, 8)
    assert counts(kv.commit_pending_stats()) == (2, 2, 0, 2)
    kv.resize(9)
    kv.commit_pending_stats()
    assert generated(m) == 1


def test_a_partial_leaf_is_reused():
    """SB-13: 9 tokens, then a prompt of 10 looked up without its last."""
    m = seeded(A[:9])
    kv = begin(m, A[:9], expected_prompt_length=10)
    assert kv.num_committed_tokens == 9
    kv.resize(10, 10)
    assert counts(kv.commit_pending_stats()) == (1, 1, 3, 0)
    assert m.get_and_reset_iteration_stats()[0].intra_device_copy_blocks == 1


def test_a_source_that_left_the_tree_counts_as_missed():
    """A longer block has taken the partial one's place before the first resume."""
    m = seeded(A[:9])
    late = m.create_kv_cache(input_tokens=A[:9])
    other = begin(m, A[:9])
    other.resize(12)
    other.commit(A[9:12])
    assert late.resume()
    assert counts(late.commit_pending_stats()) == (1, 1, 3, 1)


def test_pending_is_dirty_and_closing_discards_it():
    m = opaque_manager()
    kv = begin(m, A[:8], id=101)
    assert m.get_dirty_stats_ids() == set()
    kv.resize(8)
    assert m.get_dirty_stats_ids() == {101}
    kv.discard_pending_stats()
    assert m.get_dirty_stats_ids() == set()
    kv.resize(12)
    kv.close()
    assert counts(m.get_committed_stats()) == (0, 0, 0, 0)


def test_excluded_sequences_count_nothing():
    m = seeded(A[:12])
    before = m.get_committed_stats()
    kv = begin(m, A[:12], stats_excluded=True)
    kv.resize(16)
    assert counts(kv.commit_pending_stats()) == (0, 0, 0, 0)
    assert m.get_committed_stats() == before


def test_evicted_pages_are_dropped_from_the_last_level():
    m = seeded(A, slots=4)
    kv = begin(m, None)
    kv.resize(12)
    (seen,) = m.get_and_reset_iteration_stats()
    slot = sum(m.get_storage_statistics()[0].slot_sizes)
    assert (seen.host_dropped_blocks, seen.host_dropped_bytes) == (3, 3 * slot)
    assert m.get_and_reset_iteration_stats() == (k.KVCacheIterationStats(),)


def test_hits_are_counted_once_a_request():
    """Case G7: three failed admissions, then success; a probe alone counts nothing."""
    m = seeded(A[:4], slots=4, max_util_for_resume=0.5)
    before = m.get_committed_stats()
    blocker = begin(m, None)
    assert blocker.resize(12)
    for _ in range(3):
        kv = m.create_kv_cache(input_tokens=A[:8])
        assert not kv.resume()
        kv.close()
    m.probe_reuse(input_tokens=A[:8])
    with pytest.raises(ValueError, match="input_tokens"):
        m.create_kv_cache(input_tokens=[-1])
    blocker.close()
    kv = begin(m, A[:8])
    kv.suspend()
    assert kv.resume()
    after = m.get_committed_stats()
    # the blocker is a request too, with no tokens
    assert after.requests - before.requests == 2
    assert after.queried_tokens - before.queried_tokens == 8
    assert after.hit_tokens - before.hit_tokens == 4
    kv.resize(8, 8)
    kv.commit_pending_stats()
    assert m.get_committed_stats().hit_rate == 0.5


def test_beams_count_their_copies_and_give_them_back():
    m = opaque_manager(max_beam_width=4, enable_partial_commit=False)
    kv = begin(m, A[:6])
    kv.resize(8, 6)
    kv.commit_pending_stats()
    m.get_and_reset_iteration_stats()
    assert kv.set_beam_width(4)
    (seen,) = m.get_and_reset_iteration_stats()
    assert seen.intra_device_copy_blocks == 3
    kv.resize(12)
    kv.set_beam_width(2)
    assert counts(kv.commit_pending_stats()) == (3, 3, 0, 0)  # 1 copy, and 2 of the third block
    assert generated(m) == 3
