"""The serving loop of `examples/`: whatever waits, widens or starts over, no text changes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("safetensors")

from examples import serve_loop
from examples.serve_loop import Request, Server, main
from kvcore.demo.model import Decoder
from kvcore.demo.search import Hypotheses, expand
from kvcore.demo.stores import DenseStore
from kvcore.demo.weights import load_weights
from kvcore.testing import check

START = b"And God said unto Moses, Speak unto the children of Israel, "


@cache
def decoder():
    return Decoder(load_weights(), np)


@cache
def text_alone(prompt, max_tokens, width):
    """The best of a plain search on dense arrays, without a page."""
    dense = DenseStore(decoder().shape, len(prompt) + max_tokens, np)
    beams, tokens = Hypotheses(), np.array([list(prompt)])
    for _ in range(max_tokens):
        choice = expand(beams.log_probs, decoder().step(tokens, dense), width)
        beams.follow(choice)
        dense.follow(choice.parents)
        tokens = choice.tokens[:, None]
    return beams.texts[0]


def serve(requests, pages):
    """Runs the requests; every structure is right after every step, and no page is left."""
    server = Server(requests, pages)
    server.run(lambda: check(server.manager, device=True))
    pool = server.manager.get_storage_statistics()[0]
    assert (pool.total, pool.unavailable) == (pages, 0)
    server.close()
    return server


def mixed():
    return [
        Request(START + b"saying, ", 60),
        Request(START + b"and say unto them, ", 40, width=4),
        Request(b"Blessed are the poor in spirit: for theirs", 50, width=2),
        Request(START + b"When ye come ", 40, width=4),
        Request(b"In the beg", 70),
        Request(b"x", 35, width=2),
        Request(START + b"and say unto Aaron, ", 1, width=4),
    ]


@pytest.mark.parametrize("pages", [14, 18, 28])
def test_every_request_ends_with_the_text_it_gets_when_run_alone(pages):
    requests = mixed()
    serve(requests, pages)
    for request in requests:
        assert request.state == "done"
        assert request.text == text_alone(request.prompt, request.max_tokens, request.width)
    assert sum(request.preempted for request in requests) > 0
    assert sum(request.reused > 0 for request in requests) >= 4


def test_in_a_pool_of_plenty_nobody_is_preempted_and_the_texts_are_the_same():
    requests = mixed()
    serve(requests, 400)
    assert [request.preempted for request in requests] == [0] * 7
    for request in requests:
        assert request.text == text_alone(request.prompt, request.max_tokens, request.width)


def test_the_oldest_is_never_preempted():
    requests = mixed()
    server = Server(requests, 18)
    while server.running or server.waiting:
        oldest = next(request for request in requests if request.state in ("waiting", "running"))
        before = oldest.preempted
        server.step()
        assert oldest.preempted == before
        order = [requests.index(request) for request in [*server.running, *server.waiting]]
        assert order == sorted(order)
    server.close()


def test_widening_preempts_a_younger_request(monkeypatch):
    monkeypatch.setattr(Server, "has_headroom", lambda self, request: True)
    old, young = Request(b"a" * 20, 3, width=4), Request(b"b" * 40, 3)
    server = Server([old, young], 6)  # 2 pages, then 3 more for beams; 3 pages
    server.step()
    assert (old.cache.beam_width, old.preempted, young.preempted) == (4, 0, 1)
    assert (young.state, young.kv) == ("waiting", None)
    server.run()
    server.close()
    for request in (old, young):
        assert request.text == text_alone(request.prompt, 3, request.width)


def test_a_preempted_greedy_request_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr(Server, "has_headroom", lambda self, request: True)
    old, young = Request(b"a" * 10, 50), Request(b"b" * 10, 60)
    server = Server([old, young], 6)
    while not young.preempted:
        server.step()
    assert len(young.text) > 20
    assert young.tokens == b"b" * 10 + young.text
    server.run()
    assert (young.preempted, young.reused) == (1, 32)  # the third block's page went to the old one
    server.close()
    assert young.text == text_alone(young.prompt, 60, 1)


def test_a_later_turn_finds_prompt_and_answer():
    first = Request(START, 40, width=4)
    server = Server([first], 40)
    server.run()
    computed = len(START) + 39  # the last token was chosen, not computed
    turn = Request(START + first.text + b" And he said, ", 10, width=2)
    server.add(turn)
    server.run()
    server.close()
    assert turn.reused == computed // 16 * 16
    assert turn.text == text_alone(turn.prompt, 10, 2)


@pytest.mark.parametrize(
    ("request_", "pages", "missing"),
    [
        (Request(b"a" * 100, 1), 5, 2),  # 7 blocks of prompt
        (Request(b"a" * 20, 5, width=4), 4, 1),  # 2 blocks, 3 copies of the second
        (Request(b"a" * 60, 10), 4, 1),  # a 5th block
        (Request(b"a" * 16, 5, width=4), 3, 2),  # 1 block, 4 new ones
    ],
)
def test_a_request_that_fits_not_even_alone_is_told_how_many_pages_it_lacks(
    request_, pages, missing
):
    before, after = Request(b"b" * 10, 12), Request(b"c" * 10, 12)
    serve([before, request_, after], pages)
    assert (request_.state, request_.missing) == ("does not fit", missing)
    for request in (before, after):
        assert request.text == text_alone(request.prompt, 12, 1)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(b"", 5), "prompt"),
        (Request(b"x" * 10_000, 5), "prompt"),
        (Request(b"x", 0), "max_tokens"),
        (Request(b"x" * 10, decoder().shape.context - 8), "max_tokens"),
        (Request(b"x", 5, width=5), "width"),
        (Request(b"x", 5, width=0), "width"),
    ],
)
def test_a_request_that_nobody_could_serve_is_refused_at_the_door(request_, name):
    with pytest.raises(ValueError, match=f"^{name}: expected 1 to"):
        Server([Request(b"x", 5), request_], 4)
    good = Request(b"x", 5)
    server = Server([good], 4)
    with pytest.raises(ValueError, match=f"^{name}: expected 1 to"):
        server.add(request_)
    server.run()
    server.close()
    assert good.state == "done"


def test_the_longest_request_there_is():
    """The last token is chosen and not computed."""
    longest = decoder().shape.context
    request = Request(b"x" * (longest - 3), 4)
    serve([request], longest // 16)
    assert request.text == text_alone(request.prompt, 4, 1)


def test_one_that_fits_only_without_reuse_is_admitted():
    """Reading a page that is found in part takes a page more than computing it."""
    first = Request(b"a" * 48, 1)
    second = Request(b"a" * 40 + b"b" * 8, 1)
    serve([first, second], 3)
    assert (second.state, second.reused) == ("done", 0)
    assert second.text == text_alone(second.prompt, 1, 1)


def test_the_program_prints_a_table(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["0", "of", "28", "pages", "held,"]
    assert [line.split()[2] for line in lines[1:]] == ["done"] * 4 + ["lacks", "done"]
    assert serve_loop.__doc__
