"""Continuous batching on a pool that is too small: who gets pages, who waits, who starts over.

Requests of several beam widths share the pages of one manager. Each step admits those at the head
of the queue, computes their prompts, widens them, and gives every running request one more token.
Where pages are short the youngest running request is closed and recomputed later, so the oldest
always gets on; one that is short of pages with the pool to itself never fits, and is told how many
it lacks. Prompts and answers are committed, so that later requests find them.

Run it from the source tree: `python -m examples.serve_loop`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

import kvcore as k
from kvcore.demo.model import Decoder
from kvcore.demo.search import Choice, Hypotheses, expand
from kvcore.demo.stores import TOKENS_PER_BLOCK, cache_config
from kvcore.demo.weights import Shape, load_weights
from kvcore.device.base import Array
from kvcore.errors import wrong
from kvcore.ids import div_ceil

MAX_BEAM_WIDTH = 4


@dataclass(eq=False)
class Request:
    """What is asked for, and how far it is. The best hypothesis is the answer."""

    prompt: bytes
    max_tokens: int
    width: int = 1  # 1 is greedy search
    kv: k.KVCache | None = None
    beams: Hypotheses = field(default_factory=Hypotheses)
    choice: Choice | None = None  # the next token of every beam; its keys are not computed yet
    state: str = "waiting"
    reused: int = 0  # tokens found instead of computed
    preempted: int = 0
    missing: int = 0  # pages it lacks, if it fits not even alone

    @property
    def tokens(self) -> bytes:
        """What to compute before the next choice: a greedy request goes on where it was."""
        return self.prompt + (self.beams.texts[0] if self.width == 1 else b"")

    @property
    def text(self) -> bytes:
        """The best hypothesis so far."""
        return self.beams.texts[0]

    @property
    def cache(self) -> k.KVCache:
        """The cache of a running request."""
        if self.kv is None:
            raise RuntimeError("the request is not running")
        return self.kv


class Pages:
    """The decoder's view of one cache: see `kvcore.demo.model.KVStore`."""

    def __init__(self, kv: k.KVCache, writes: k.Batch, reads: k.Batch) -> None:
        self._kv, self._writes, self._reads = kv, writes, reads

    @property
    def length(self) -> int:
        return self._kv.history_length

    def begin(self, n: int) -> None:
        self._writes.prepare([self._kv], n)  # the loop has made room
        self._reads.prepare([self._kv], self._kv.capacity, start=0)

    def append(self, layer: int, keys: Array, values: Array) -> None:
        new = {"key": keys, "value": values}
        self._writes.append(layer, {r: a.reshape(-1, *a.shape[2:]) for r, a in new.items()})

    def read(self, layer: int) -> tuple[Array, Array]:
        width = self._kv.beam_width
        keys, values = (a.reshape(width, -1, *a.shape[1:]) for a in self._reads.gather(layer))
        return keys, values

    def end(self) -> None:
        self._kv.resize(None, self._kv.capacity)


class Server:
    """A queue, the running requests and one pool. Both lists are in the order of arrival."""

    def __init__(self, requests: Iterable[Request], pages: int) -> None:
        weights = load_weights()
        self.decoder = Decoder(weights, np)
        self.longest = weights.shape.context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        for request in requests:
            self.add(request)
        self.manager = k.KVCacheManager(pool_of(weights.shape, pages), device="host")
        self.writes = self.manager.create_batch(MAX_BEAM_WIDTH, self.longest)
        self.reads = self.manager.create_batch(MAX_BEAM_WIDTH, MAX_BEAM_WIDTH * self.longest)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises `ValueError` for one that no pool could serve: it must not stop all the others later.
        """
        most = self.longest + 1 - len(request.prompt)  # the last token is chosen, not computed
        for name, value, high in (
            ("prompt", len(request.prompt), self.longest),
            ("max_tokens", request.max_tokens, most),
            ("width", request.width, MAX_BEAM_WIDTH),
        ):
            if not 1 <= value <= high:
                raise wrong(name, f"1 to {high}", value)
        self.waiting.append(request)

    def run(self, show: Callable[[], None] = lambda: None) -> None:
        """Steps until every request is done or known not to fit."""
        while self.waiting or self.running:
            self.step()
            show()

    def step(self) -> None:
        """Admits, computes prompts, widens; then one token for everybody who runs."""
        for request in self.admit():  # one by one: the next may find what this one commits
            self.choose(request, request.tokens[request.cache.history_length :])
            self.commit(request, request.tokens)
        for request in list(self.running):
            self.follow(request)
        self.grow()
        for request in self.running:
            self.choose(request, request.beams.texts)

    # -- room: every call that may be short of pages answers False and has changed nothing ---------

    def admit(self) -> Iterator[Request]:
        """Starts requests from the head of the queue while their prompts fit."""
        while self.waiting:
            request = self.waiting[0]
            kv, missing = self.open(request)
            if kv is None and self.running:
                break
            self.waiting.popleft()
            if kv is None:
                request.state, request.missing = "does not fit", missing
                continue
            request.kv, request.state = kv, "running"
            request.reused += kv.num_committed_tokens
            self.running.append(request)
            yield request

    def open(self, request: Request) -> tuple[k.KVCache | None, int]:
        """A cache with pages for the prompt, or None and how many of them are missing."""
        tokens, missing = request.tokens, 0
        # At least one token has to be computed, for logits. Holding what was found may take a page
        # more than finding nothing: who has the pool to itself tries that too.
        for known in (tokens[:-1],) if self.running else (tokens[:-1], b""):
            kv = self.manager.create_kv_cache(
                input_tokens=list(known), expected_prompt_length=len(tokens), id=request
            )
            if kv.resume() and kv.resize(len(tokens)) and self.has_headroom(request):
                return kv, 0
            missing = div_ceil(len(tokens), TOKENS_PER_BLOCK) - kv.num_blocks - self.available
            kv.close()
        return None, missing

    def has_headroom(self, request: Request) -> bool:
        """Whether its beams would get a page each: else admitting is likely in vain."""
        return not self.running or self.available >= request.width

    def follow(self, request: Request) -> None:
        """Beams become what the last choice made of them; the first one widens the request."""
        choice = request.choice
        if choice is None:
            return  # preempted by an older one a moment ago
        kv, parents = request.cache, choice.parents.tolist()
        if len(parents) == kv.beam_width:
            kv.reorder_beams(parents)  # takes no page
        else:
            private = kv.num_blocks - kv.history_length // TOKENS_PER_BLOCK
            needed = (len(parents) - kv.beam_width) * private
            while request in self.running and not kv.set_beam_width(len(parents), parents):
                self.preempt_youngest(needed)
        if request.kv is None:
            return  # it was the youngest itself
        request.beams.follow(choice)
        request.choice = None
        if len(request.text) >= request.max_tokens:
            self.finish(request)

    def grow(self) -> None:
        """Room for one more token of all beams of all who run."""
        while self.running and not self.manager.advance([r.cache for r in self.running], 1):
            self.preempt_youngest(self.running[-1].cache.beam_width)

    def preempt_youngest(self, needed: int) -> None:
        """Closes the youngest running request; the last one left needs more than there is."""
        request = self.running.pop()
        missing = needed - self.available
        if request.width == 1:  # goes on where it was, and finds what it had if that is still there
            self.commit(request, request.tokens)
        request.cache.close()
        request.kv = request.choice = None
        if not self.running:
            request.state, request.missing = "does not fit", missing
            return
        if request.width > 1:
            request.beams = Hypotheses()  # from the prompt again
        request.state, request.preempted = "waiting", request.preempted + 1
        self.waiting.appendleft(request)

    @property
    def available(self) -> int:
        """Pages that are free or that only the prefix cache holds."""
        return self.manager.get_storage_statistics()[0].available

    # -- computing ---------------------------------------------------------------------------------

    def choose(self, request: Request, given: bytes | list[bytes]) -> None:
        """Computes a prompt, or the last token of every beam, and chooses the next tokens."""
        rows = [given] if isinstance(given, bytes) else [text[-1:] for text in given]
        tokens: NDArray[np.int64] = np.array([list(row) for row in rows])
        logits = self.decoder.step(tokens, Pages(request.cache, self.writes, self.reads))
        request.choice = expand(request.beams.log_probs, logits, request.width)

    def finish(self, request: Request) -> None:
        """Commits prompt and winner for others to find, and closes."""
        winner = int(np.argmax(request.beams.scores))
        request.cache.set_beam_width(1, parents=[winner])
        self.commit(request, request.prompt + request.beams.texts[winner])
        request.cache.close()
        self.running.remove(request)
        request.kv, request.state = None, "done"

    def commit(self, request: Request, tokens: bytes) -> None:
        """Publishes what is computed of `tokens`; the one beam there is has these."""
        kv = request.cache
        kv.commit(list(tokens[kv.num_committed_tokens : kv.history_length]))

    def close(self) -> None:
        """Gives the memory back."""
        self.manager.close_kv_caches([request.cache for request in self.running])
        self.manager.shutdown()


def pool_of(shape: Shape, pages: int) -> k.KVCacheManagerConfig:
    """The demo's configuration with exactly so many pages."""
    config = cache_config(shape, shape.context, MAX_BEAM_WIDTH)
    quota = pages * TOKENS_PER_BLOCK * shape.token_bytes
    tiers = (k.GpuCacheTierConfig(quota=quota),)
    return replace(config, cache_tiers=tiers, max_sequences=64)


def table(server: Server, requests: list[Request]) -> str:
    """One line a request."""
    pool = server.manager.get_storage_statistics()[0]
    lines = [f"{pool.unavailable:3} of {pool.total} pages held, {pool.evictable} only cached"]
    for number, request in enumerate(requests):
        state = f"lacks {request.missing} pages" if request.missing else request.state
        lines.append(
            f"{number:2} W={request.width} {state:14} {len(request.text):3}/{request.max_tokens:<3}"
            f" reused {request.reused:3} preempted {request.preempted} "
            f" {request.text[-40:].decode('latin-1')!r:42}"
        )
    return "\n".join(lines)


def main() -> None:
    """Six requests on 28 pages."""
    start = b"And God said unto Moses, Speak unto the children of Israel, "
    requests = [
        Request(start + b"saying, ", 60),
        Request(start + b"and say unto them, ", 40, width=4),
        Request(b"Blessed are the poor in spirit: for theirs", 50, width=2),
        Request(start + b"When ye come ", 40, width=4),
        Request(b"In the beginning " * 20, 150, width=4),  # more than the pool
        Request(start + b"and say unto Aaron, ", 40),
    ]
    server, live = Server(requests, pages=28), sys.stdout.isatty()

    def show() -> None:
        if live:
            print(table(server, requests) + f"\x1b[{len(requests)}F", end="", flush=True)

    server.run(show)
    print(table(server, requests))
    server.close()


if __name__ == "__main__":
    main()
