"""The demo: a real decoder whose K/V lie in pages, against the same decoder on dense arrays."""

from __future__ import annotations

import ctypes
import json
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("safetensors")

from kvcore.demo.model import Decoder
from kvcore.demo.report import as_json
from kvcore.demo.run import Settings, complete, open_session, run_demo
from kvcore.demo.search import expand, log_softmax
from kvcore.demo.stores import TOKENS_PER_BLOCK, DenseStore, PagedStore
from kvcore.demo.weights import load_weights

TWENTY = b"And the king said un"
PAGE_BYTES = 6 * 2 * 16 * 2 * 32 * 4  # layers, key and value, tokens, KV heads, dim, float32


@pytest.fixture(scope="module")
def session():
    with open_session("host") as session:
        yield session


@pytest.fixture(scope="module")
def report():
    return run_demo(Settings(device="host", prompt="And God said", max_tokens=40))


@pytest.fixture
def store(session):
    made = []

    def make(prompt_length, capacity, width):
        made.append(
            PagedStore(
                session.weights.shape,
                prompt_length=prompt_length,
                capacity=capacity,
                width=width,
                device=session.device,
                stream=None,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- the report ------------------------------------------------------------------------------------


def test_every_step_equals_the_dense_run_to_the_bit(report):
    for search in (report.greedy, report.beam):
        assert search.check.steps == 40
        assert search.check.bit_equal
        assert search.check.max_abs_diff == 0.0
    assert report.passed


def test_the_text_reads_like_text(report):
    words = {"and", "the", "of", "lord", "unto", "to", "he", "said", "shall", "in", "them", "god"}
    for search in (report.greedy, report.beam):
        for beam in search.hypotheses:
            assert len(beam.text) == 40
            assert all(c.isascii() and (c.isprintable() or c == "\n") for c in beam.text)
            assert len(words & set(beam.text.lower().replace(",", " ").split())) >= 1
            assert any(word in search.hypotheses[0].text for word in ("LORD", "unto", "the"))


def test_beam_search_finds_a_better_text_than_greedy(report):
    scores = [beam.score for beam in report.beam.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > report.greedy.hypotheses[0].score
    assert len({beam.text for beam in report.beam.hypotheses}) == 4


def test_the_json_document(report):
    document = json.loads(as_json(report))
    assert document["device"] == "host (NumPy)"
    assert document["prompt_tokens"] == 12
    assert document["tokens_per_block"] == 16
    assert document["page_bytes"] == PAGE_BYTES
    assert document["check"] == {
        "passed": True,
        "steps": 80,
        "max_abs_diff": 0.0,
        "bit_equal": True,
        "tolerance": 1e-5,
    }
    beam = document["beam"]
    assert [set(h) for h in beam["hypotheses"]] == [
        {"text", "score", "log_prob", "pages", "shared_pages", "private_pages"}
    ] * 4
    assert beam["tokens_generated"] == 160
    assert beam["moved"]["dense_bytes"] > beam["moved"]["dense_changed_rows_bytes"]
    assert beam["moved"]["dense_changed_rows_bytes"] > beam["moved"]["kvcore_bytes"] > 0
    assert beam["tokens_per_second"] > 0
    assert document["greedy"]["moved"] == {
        "kvcore_bytes": 0,
        "kvcore_pages": 0,
        "kvcore_table_cells": 0,
        "dense_bytes": 0,
        "dense_changed_rows_bytes": 0,
    }
    assert document["model"]["training_parameters"] == 1_968_576


def test_a_prompt_is_any_bytes():
    report = run_demo(Settings(device="host", prompt="\udcff\x00é", max_tokens=2, beam_width=2))
    assert report.passed
    assert json.loads(as_json(report))["prompt_tokens"] == 4


def test_progress_is_told_after_every_step(session):
    seen = []
    complete(session, b"Behold", 2, 3, seen.append)
    assert [(p.width, p.step, p.steps, len(p.text)) for p in seen] == [
        (2, 1, 3, 1),
        (2, 2, 3, 2),
        (2, 3, 3, 3),
    ]
    assert [p.pages for p in seen] == [2, 2, 2]


@pytest.mark.gpu
def test_a_gpu_finds_what_the_host_finds(report):
    on_gpu = run_demo(Settings(device="cuda", prompt="And God said", max_tokens=40))
    assert on_gpu.passed
    for search, expected in ((on_gpu.greedy, report.greedy), (on_gpu.beam, report.beam)):
        assert [b.text for b in search.hypotheses] == [b.text for b in expected.hypotheses]
        assert search.paged_moved == expected.paged_moved


# -- pages, in numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_prompt_of_20_bytes_shares_one_page_and_has_a_private_tail(session, width):
    search = complete(session, TWENTY, width, 1)
    assert search.pages_in_use == (1 + width if width > 1 else 2)
    assert search.pages_unshared == 2 * width
    rows = [beam.pages for beam in search.hypotheses]
    assert {row[0] for row in rows} == {rows[0][0]}
    assert len({row[1] for row in rows}) == width
    if width > 1:
        assert [(b.shared_pages, b.private_pages) for b in search.hypotheses] == [(1, 1)] * width


def test_widening_moves_only_the_tail(session):
    search = complete(session, TWENTY, 4, 1)
    token = session.weights.shape.token_bytes
    assert search.page_bytes == PAGE_BYTES == 16 * token
    # The first child keeps the prompt's tail page; three others get copies, and two cells each.
    assert (search.paged_moved.pages, search.paged_moved.cells) == (3, 6)
    assert search.paged_moved.bytes == 3 * 4 * token + 6 * 4  # the 4 tokens of the tail
    assert search.dense_moved.bytes == 4 * 20 * token
    assert search.dense_moved.changed_bytes == 3 * 20 * token


@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_full_last_block_is_shared_without_a_copy(session, length):
    search = complete(session, TWENTY[:1] * length, 3, 1)
    full, tail = divmod(length, TOKENS_PER_BLOCK)
    assert search.pages_in_use == full + 3 * (tail > 0)
    assert search.paged_moved.pages == (2 if tail else 0)


def test_counted_copies_are_the_copies_the_device_made(session, monkeypatch):
    copied = []
    copy_tokens = session.device.copy_tokens

    def counting(buffers, pairs, *, stream):
        copied.extend(pairs[2].tolist())
        copy_tokens(buffers, pairs, stream=stream)

    monkeypatch.setattr(session.device, "copy_tokens", counting)
    moved = complete(session, b"And it came to pass in", 4, 24).paged_moved
    assert moved.pages == len(copied) > 3
    assert moved.bytes == sum(copied) * PAGE_BYTES // 16 + moved.cells * 4


def test_reading_goes_through_the_page_table(session, store):
    """What lies in the first two pages is swapped in memory, and so is what the decoder reads."""
    paged = store(40, 40, 1)
    session.decoder.step(np.array([list(b"x" * 40)]), paged)
    rows = paged.rows()
    assert len(set(rows[0].tolist())) == 3
    paged.begin(0)
    before = paged.read(0)[0].copy()
    first, second = (key_page(paged._manager, int(page)) for page in rows[0][:2])
    first[:], second[:] = second.copy(), first.copy()
    after = paged.read(0)[0]
    assert np.array_equal(after[:, :16], before[:, 16:32])
    assert np.array_equal(after[:, 16:32], before[:, :16])
    assert np.array_equal(after[:, 32:], before[:, 32:])


def key_page(manager, page):
    """The bytes of layer 0's keys in one page, at the address the manager names."""
    stride = manager.get_page_stride(0, "key")
    address = manager.get_mem_pool_base_address(0, "key")
    address += stride * manager.get_page_index_scale(0, "key") * page
    return np.ctypeslib.as_array((ctypes.c_uint8 * stride).from_address(address))


def test_nothing_is_left_when_a_search_ends_or_fails(session, monkeypatch):
    closed = []
    close = PagedStore.close
    monkeypatch.setattr(PagedStore, "close", lambda self: (close(self), closed.append(self)))

    def fail(progress):
        raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        complete(session, TWENTY, 2, 4, fail)
    complete(session, TWENTY, 2, 2)
    assert len(closed) == 2  # shutdown() would have raised with a cache still open


# -- search ----------------------------------------------------------------------------------------


def test_greedy_is_beam_search_of_width_1(session):
    report = run_demo(Settings(device="host", beam_width=1, max_tokens=12))
    assert report.greedy.hypotheses == report.beam.hypotheses
    text = b""
    tokens = Settings().prompt.encode()
    for _ in range(12):  # by hand, without a cache: the whole text every time
        dense = DenseStore(session.weights.shape, 64, np)
        logits = session.decoder.step(np.array([list(tokens + text)]), dense)
        text += bytes([int(logits[0].argmax())])
    assert report.greedy.hypotheses[0].text.encode() == text


def test_hypotheses_on_pages_are_those_of_a_plain_search(session):
    prompt, width, steps = b"Blessed are ", 3, 20
    found = complete(session, prompt, width, steps).hypotheses
    beams = [(b"", 0.0)]
    for _ in range(steps):  # no cache, no page, no reordering
        grown = []
        for text, score in beams:
            dense = DenseStore(session.weights.shape, 64, np)
            logits = session.decoder.step(np.array([list(prompt + text)]), dense)
            log_probs = log_softmax(logits)[0]
            best = np.argsort(-log_probs, kind="stable")[:width]
            grown += [(text + bytes([byte]), score + log_probs[byte]) for byte in best.tolist()]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    assert [beam.text.encode() for beam in found] == [text for text, _ in beams]
    expected = [score for _, score in beams]
    np.testing.assert_allclose([beam.log_prob for beam in found], expected, atol=1e-4)
    assert [beam.score * steps for beam in found] == pytest.approx(expected, abs=1e-4)


def test_ties_go_to_the_lower_beam_and_byte():
    choice = expand(np.zeros(2), np.zeros((2, 3), np.float32), 4)
    assert choice.parents.tolist() == [0, 0, 0, 1]
    assert choice.tokens.tolist() == [0, 1, 2, 0]
    np.testing.assert_allclose(choice.log_probs, [-np.log(3)] * 4)


# -- model -----------------------------------------------------------------------------------------


def test_one_prefill_equals_single_steps(session):
    text = b"And the LORD said"
    dense = DenseStore(session.weights.shape, 32, np)
    for byte in text:
        single = session.decoder.step(np.array([[byte]]), dense)
    whole = session.decoder.step(np.array([list(text)]), DenseStore(session.weights.shape, 32, np))
    np.testing.assert_allclose(single, whole, atol=1e-4)


def test_the_model_knows_its_text(session):
    """Bits per byte on a sentence of the Bible, far below the 8 of a model that knows nothing."""
    text = b"And God said, Let there be light: and there was light."
    dense = DenseStore(session.weights.shape, 64, np)
    bits = []
    for byte, follower in pairwise(text):
        log_probs = log_softmax(session.decoder.step(np.array([[byte]]), dense))[0]
        bits.append(-log_probs[follower] / np.log(2))
    assert np.mean(bits) < 1.8


def test_weights_are_small_and_complete(session):
    from importlib import resources

    file = resources.files("kvcore.demo") / "weights.safetensors"
    assert len(file.read_bytes()) <= 4_000_000
    weights = load_weights()
    shape = weights.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (6, 6, 2, 32)
    assert len(weights.tensors) == 2 + 6 * shape.layers
    assert {str(t.dtype) for t in weights.tensors.values()} == {"float32"}
    assert sum(t.size for t in weights.tensors.values()) == weights.training["parameters"]
    assert 1.0 < weights.training["held_out_bits_per_byte"] < 1.3


def test_query_heads_read_their_groups_kv_head(session):
    """Attention by `_mix` equals a loop over query heads, H / K of which read one KV head."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, h, 32)).astype("f4") for n, h in ((3, 6), (5, 2), (5, 2)))
    mixed = Decoder(session.weights, np)._mix(q, k, v)
    for row, head, new in np.ndindex(2, 6, 3):
        seen = 5 - 3 + new + 1
        scores = k[row, :seen, head // 3] @ q[row, new, head] / np.sqrt(32)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(
            mixed[row, new, head], weights @ v[row, :seen, head // 3], atol=1e-5
        )
