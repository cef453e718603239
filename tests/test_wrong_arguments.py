"""Arguments of a wrong kind: the argument is named, and what was there stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore as k
from kvcore.testing import check
from tests.helpers import opened, typed_manager, used

POINT = np.array(1)  # no axis, though NumPy calls it iterable
PAIR = np.zeros(2, np.int32)


@pytest.fixture
def m():
    return typed_manager(
        max_beam_width=2, beam_mode="indirection", max_seq_len=64, enable_partial_commit=False
    )


@pytest.mark.parametrize("length", [2**30, 2**31, 2**70])
def test_a_prompt_length_beyond_all_tokens_makes_no_sequence(length):
    """It was noticed behind the sequence's making, which then nobody could close."""
    m = typed_manager(max_sequences=2)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"expected_prompt_length: .* got \d+"):
            m.create_kv_cache(expected_prompt_length=length)
        with pytest.raises(ValueError, match=r"expected_prompt_lengths\[1\]: .* got \d+"):
            m.create_kv_caches([1, length])
    m.close_kv_caches(m.create_kv_caches([1, 2**30 - 1]))
    m.shutdown()


MANAGER = [
    ("expected_prompt_lengths: expected a seq", lambda m: m.create_kv_caches(5)),
    ("ids: expected a sequence", lambda m: m.create_kv_caches([1], 5)),
    ("retention: expected a seq", lambda m: m.create_kv_cache(retention=POINT)),
    ("buffers: expected a sequence", lambda m: m.get_aggregated_pages(5)),
    (r"buffers\[0\]: expected \(layer id", lambda m: m.get_aggregated_pages([5])),
    ("layer_id: expected an int", lambda m: m.get_layer_group_id(PAIR)),
    ("layer, role: expected an int", lambda m: m.get_page_stride([], "key")),
    ("layer, role: expected an int", lambda m: m.get_pages(0, PAIR)),
    ("readonly: expected a bool", lambda m: m.lease(0, "key", readonly=PAIR)),
    ("keys: expected a sequence", lambda m: m.match_block_keys(POINT)),
    ("roles: expected a sequence", lambda m: m.create_batch_tables(POINT)),
    ("max_rows: expected a value in", lambda m: m.create_batch(2**63, 1)),
    ("max_tokens: expected a value in", lambda m: m.create_batch(1, 2**70)),
    ("rows: expected an int", lambda m: m.create_batch_tables().shape("x", 1)),
    ("requests: expected a sequence", lambda m: k.IndexMapper(2, 1).rows(None, 0, 1)),
]


@pytest.mark.parametrize(("words", "call"), MANAGER, ids=[words for words, _ in MANAGER])
def test_of_a_manager(m, words, call):
    with pytest.raises((TypeError, ValueError), match=words):
        call(m)


def test_of_functions_beside_the_manager(m):
    events = k.KVCacheEventManager(8)
    device, arrays, parents = m.device, [np.zeros((2, 1, 3))], np.array([1, 0], np.int32)
    calls = [
        ("width: expected an int", lambda: k.permute_dense(device, arrays, parents, width="2")),
        ("arrays: expected a seq", lambda: k.permute_dense(device, 5, parents, width=2)),
        ("reservations: expected a sequence", lambda: k.reserve_all(POINT)),
        ("num_blocks_per_.*: expected a seq", lambda: events.add_created_event(POINT)),
    ]
    for words, call in calls:
        with pytest.raises(TypeError, match=words):
            call()


def test_a_request_that_is_no_key():
    mapper = k.IndexMapper(2, 1)
    for call in (mapper.add, mapper.index, mapper.remove, lambda one: mapper.rows([one], 0, 1)):
        for request in ([], ([],)):
            with pytest.raises(TypeError, match="request: expected what can be a key"):
                call(request)
    assert mapper.add("a") == 0


def test_waiting_for_events_longer_than_a_lock_can():
    events = k.KVCacheEventManager(8)
    events.close()
    assert events.get_latest_events(2.0**63) == []


def test_tables_beyond_the_address_space_say_what_to_lower():
    """Before anything as large is made."""
    with pytest.raises(k.OutOfMemoryError, match="lower max_rows"):
        typed_manager(max_sequences=2**60)


def test_a_bound_above_all_lengths_is_no_bound(m):
    assert m.clamp_max_seq_len_for_mem(1, 2**70) == m.clamp_max_seq_len_for_mem(1, 2**20)


def test_of_a_sequence(m):
    (kv,) = opened(m, 4)
    calls = [
        ("is_end: expected a bool", lambda: kv.commit([1, 2, 3, 4], PAIR)),
        ("valid_only: expected a bool", lambda: kv.get_aggregated_page_indices(0, 0, PAIR)),
        ("parents: expected a sequence", lambda: kv.reorder_beams(POINT)),
        ("parents: expected a sequence", lambda: kv.set_beam_width(1, "0")),
    ]
    for words, call in calls:
        with pytest.raises(TypeError, match=words):
            call()
    assert (kv.num_committed_tokens, kv.history_length, used(m)) == (0, 0, 1)
    check(m)


BATCH = [
    ("buffers: expected a mapping", lambda b: b.append(0, [PAIR])),
    ("layer, role: expected an int", lambda b: b.append([[1]], {"key": PAIR})),
    ("roles: expected a sequence", lambda b: b.gather(0, "key")),
    (r"roles\[0\]: expected a role", lambda b: b.gather(0, [PAIR])),
    (r"roles\[1\]: expected a role, got int", lambda b: b.gather(0, ("key", 2))),
    (r"roles\[0\]: expected a role, got list", lambda b: b.gather(0, (["key"],))),
    ("out: expected a sequence", lambda b: b.gather(0, out=3)),
    ("out: expected 2 arrays", lambda b: b.gather(0, out=[PAIR])),
    ("layout: expected a str", lambda b: b.csr_pages(0, layout=PAIR)),
    ("no_page: expected an int", lambda b: b.ragged_pages(0, ["key"], layout="NHD", no_page=PAIR)),
    ("no_page: expected an int", lambda b: b.ragged_pages(0, ["key"], layout="NHD", no_page=-1.0)),
    ("no_page: expected a value", lambda b: b.ragged_pages(0, ["key"], layout="NHD", no_page=-2)),
    ("num_pages: ", lambda b: b.ragged_pages(0, ["key"], layout="NHD", num_pages=2**63)),
    (r"rows: expected a value in \[1, 4\]", lambda b: b.host_indptr(rows=5)),
    ("page_tokens: expected a value in", lambda b: b.host_indptr(2**31)),
    ("out: expected a NumPy array", lambda b: b.cache_indirection(out=5)),
    (r"out\[2\]: expected a NumPy", lambda b: b.csr_pages(0, layout="NHD", out=[PAIR, PAIR, 5])),
    (r"out\[0\]: .*C-contiguous", lambda b: b.csr_pages(0, layout="NHD", out=[b.large[0]] * 3)),
    (
        r"out\[3\]: .*C-contiguous",
        lambda b: b.ragged_pages(0, ["key"], layout="NHD", out=[PAIR] * 3 + [b.spread]),
    ),
    (r"buffers\['key'\]: expected a NumPy", lambda b: b.append(0, {"key": [[0.0]]})),
    (r"buffers\['key'\]: .*4 bytes \(float32\)", lambda b: b.append(0, {"key": b.wide})),
    ("out: 'key': expected a NumPy", lambda b: b.gather(0, ["key"], out=[3])),
    ("out: 'key': expected a writable", lambda b: b.gather(0, ["key"], out=[b.fixed])),
    ("parents: expected a NumPy", lambda b: b.step_beams([0])),
    ("resize.. or advance.. first", lambda b: b.prepare(b.caches, 5)),
    (r"out: expected int32 \[1, 4\], got 'int64", lambda b: b.cache_indirection(out=b.large)),
    ("num_positions: expected a value", lambda b: b.cache_indirection(2**63)),
]


@pytest.mark.parametrize("declared", ["bfloat16", "float32", "int16"])
def test_values_of_another_type_are_not_taken_for_bits(declared):
    """Of the same size, they would be read as something else."""
    m = typed_manager(dtype=declared)
    batch, (kv,) = m.create_batch(4, 4), opened(m, 4)
    batch.prepare([kv], 4, start=[0])
    size = k.config.itemsize_bits(declared) // 8
    other = np.zeros((4, 2, 8), f"i{size}" if declared == "float32" else f"f{size}")
    words = f"{declared}, as declared, or its bits"
    with pytest.raises(TypeError, match=r"buffers\['key'\]: expected " + words):
        batch.append(0, {"key": other})
    with pytest.raises(TypeError, match="out: 'key': expected " + words):
        batch.gather(0, ["key"], out=[other])
    batch.append(0, {"key": np.full((4, 2, 8), 7, f"u{size}")})
    batch.gather(0, ["key"], out=[out := np.zeros((4, 2, 8), f"u{size}")])
    assert (out == 7).all()


@pytest.mark.parametrize(("words", "call"), BATCH, ids=range(len(BATCH)))
def test_of_a_batch(m, words, call):
    batch, caches = m.create_batch(4, 4), opened(m, 4)
    batch.prepare(caches, 1)
    batch.caches, batch.large = caches, np.zeros((1, 4), np.int64)
    batch.spread = np.zeros(4, np.int32)[::2]
    batch.wide = np.zeros((1, 2, 8))
    batch.fixed = np.broadcast_to(np.float32(0), (1, 2, 8))
    with pytest.raises((TypeError, ValueError), match=words):
        call(batch)
    check(m)


def test_the_indirection_of_one_beam_says_what_was_asked_for():
    m = typed_manager()
    batch, caches = m.create_batch(1, 1), opened(m, 1)
    batch.prepare(caches, 1)
    with pytest.raises(k.StateError, match=r"cache_indirection: .* max_beam_width=1"):
        batch.cache_indirection()


def test_the_indirection_is_written_into_arrays_of_others(m):
    class Interface:
        def __init__(self, array):
            self.__array_interface__, self.array = array.__array_interface__, array

    batch, caches = m.create_batch(4, 4), opened(m, 4)
    out = Interface(np.full((1, 4), 9, np.int32))
    batch.prepare(caches, 1, start=[0])
    assert batch.cache_indirection(out=out) is out
    assert out.array.tolist() == [[0, 0, 0, 0]]
