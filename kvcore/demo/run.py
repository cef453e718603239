"""Greedy and beam search over kvcore pages, every step checked against a dense cache."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.demo.model import Decoder
from kvcore.demo.search import Hypotheses, expand
from kvcore.demo.stores import TOKENS_PER_BLOCK, DenseStore, Moved, PagedStore
from kvcore.demo.weights import Weights, load_weights
from kvcore.device import open_device
from kvcore.device.base import Array, Device
from kvcore.errors import wrong
from kvcore.ids import div_ceil

TOLERANCE = 1e-5
"""Largest accepted difference of two logits. Both runs do the same arithmetic on the same values,
so in NumPy they are equal to the bit; cuBLAS may choose kernels by the alignment of addresses."""

MAX_BEAM_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run. Raises `ValueError` naming the argument, expected and got."""

    prompt: str = "Let not your heart"
    beam_width: int = 4
    max_tokens: int = 160
    """Bytes to generate; prompt and completion must fit the model's context."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise wrong("prompt", "at least one character", self.prompt)
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise wrong("beam-width", f"a value in [1, {MAX_BEAM_WIDTH}]", self.beam_width)
        if self.max_tokens < 1:
            raise wrong("max-tokens", "at least 1", self.max_tokens)

    @property
    def prompt_bytes(self) -> bytes:
        """The prompt as the model sees it; bytes that are no UTF-8 stay what they were."""
        return self.prompt.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands; given to the caller after every step."""

    width: int
    step: int
    steps: int
    text: str
    """The best hypothesis so far, without the prompt."""
    pages: int
    """Pages in use."""


@dataclass(slots=True)
class Check:
    """How the paged logits compare with the dense ones, over all steps."""

    steps: int = 0
    max_abs_diff: float = 0.0
    bit_equal: bool = True

    def compare(self, paged: NDArray[np.float32], dense: NDArray[np.float32]) -> None:
        """Takes in one step's [R, V] logits of both runs."""
        self.steps += 1
        self.bit_equal = self.bit_equal and np.array_equal(paged, dense)
        # NaN must fail the check, and max() would lose it.
        self.max_abs_diff = float(np.fmax(self.max_abs_diff, _distance(paged, dense)))

    @property
    def passed(self) -> bool:
        """Whether every logit of every step agreed within `TOLERANCE`."""
        return self.steps > 0 and self.max_abs_diff <= TOLERANCE


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    difference = float(np.abs(a - b).max())
    return difference if np.isfinite(difference) else np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One beam at the end."""

    text: str
    """The completion without the prompt."""
    score: float
    """Mean log-probability per byte, in nats."""
    log_prob: float
    """Summed log-probability, in nats."""
    pages: tuple[int, ...]
    """Its row of the page table: the slot of each block."""
    shared: tuple[bool, ...]
    """For each of those whether another beam holds it too."""

    @property
    def shared_pages(self) -> int:
        """Pages other beams hold too."""
        return sum(self.shared)

    @property
    def private_pages(self) -> int:
        """Pages of this beam alone."""
        return len(self.pages) - self.shared_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One finished search, hypotheses best first."""

    hypotheses: tuple[Hypothesis, ...]
    tokens: int
    """Tokens computed: prompt and, in all beams, completion."""
    generated: int
    """Tokens generated, in all beams."""
    check: Check
    paged_moved: Moved
    dense_moved: Moved
    paged_seconds: float
    dense_seconds: float
    page_bytes: int
    pages_in_use: int
    """Distinct pages at the end."""
    pages_unshared: int
    """Pages the same beams would hold if nothing were shared."""
    peak_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that `kvcore demo` shows."""

    settings: Settings
    weights: Weights
    device: str
    """The kind, and the GPU's name."""
    greedy: Search
    beam: Search
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all logits agreed with the dense runs."""
        return self.greedy.check.passed and self.beam.check.passed


class Session:
    """A decoder on an open device, with one stream for everything.

    Parameters
    ----------
    device : Device
        Has memory.
    xp : module
        The array module of its arrays.
    stream : object
        A stream to bind; None on the host.
    """

    def __init__(self, device: Device, xp: Any, stream: object) -> None:
        self.device, self.xp, self.bound = device, xp, stream
        self._stream = device.stream(stream)
        self.weights = load_weights(xp)
        self.decoder = Decoder(self.weights, xp)

    def to_host(self, array: Array) -> NDArray[Any]:
        """A copy on the host. Blocks."""
        return self.device.to_host(array, stream=self._stream)

    @contextmanager
    def clocked(self, seconds: list[float]) -> Iterator[None]:
        """Appends how long the block and the work it enqueued took. Blocks at its end."""
        begun = time.perf_counter()
        yield
        self._stream.synchronize()
        seconds.append(time.perf_counter() - begun)


@contextmanager
def open_session(spec: str) -> Iterator[Session]:
    """A session on a new device, closed at the end. `ValueError` for a device without memory."""
    device = open_device(spec)
    try:
        if not device.has_memory:
            raise wrong("device", "a device with memory", spec, "use auto, host, cuda or cuda:1")
        # NumPy or CuPy, whichever the device's arrays are made of: this package imports no CuPy.
        xp: Any = importlib.import_module(type(device.empty(1, np.int32)).__module__.split(".")[0])
        if xp is np:
            yield Session(device, xp, None)
            return
        number = spec.partition(":")[2]
        gpu = xp.cuda.Device(int(number)) if number else xp.cuda.Device()
        with gpu, xp.cuda.Stream(non_blocking=True) as stream:
            yield Session(device, xp, stream)
            stream.synchronize()
    finally:
        device.close()


def device_name(session: Session) -> str:
    """The kind of device and, on CUDA, what the GPU is called."""
    if session.xp is np:
        return f"{session.device.kind} (NumPy)"
    number = session.xp.cuda.runtime.getDevice()
    properties = session.xp.cuda.runtime.getDeviceProperties(number)
    return f"{session.device.kind} ({properties['name'].decode()}, CuPy)"


def run_demo(settings: Settings, on_step: Callable[[Progress], None] = lambda _: None) -> Report:
    """Completes the prompt greedily and by beam search.

    Parameters
    ----------
    settings : Settings
        Prompt, width, length, device.
    on_step : callable
        Called after every step of either search.

    Raises
    ------
    ValueError
        Prompt and completion do not fit the context, or the device has no memory.
    ImportError, DriverError
        No such GPU, or no CuPy.
    """
    begun = time.perf_counter()
    prompt = settings.prompt_bytes
    with open_session(settings.device) as session:
        context = session.weights.shape.context
        if len(prompt) + settings.max_tokens > context:
            expected = f"at most {context} bytes together with max-tokens={settings.max_tokens}"
            raise wrong("prompt", expected, f"{len(prompt)} bytes")
        greedy = complete(session, prompt, 1, settings.max_tokens, on_step)
        beam = complete(session, prompt, settings.beam_width, settings.max_tokens, on_step)
        return Report(
            settings=settings,
            weights=session.weights,
            device=device_name(session),
            greedy=greedy,
            beam=beam,
            seconds=time.perf_counter() - begun,
        )


def complete(
    session: Session,
    prompt: bytes,
    width: int,
    max_tokens: int,
    on_step: Callable[[Progress], None] = lambda _: None,
) -> Search:
    """One search, the decoder running on both stores in step. Raises `OutOfPagesError`."""
    shape, capacity = session.weights.shape, len(prompt) + max_tokens - 1
    dense = DenseStore(shape, capacity, session.xp)
    paged = PagedStore(
        shape,
        prompt_length=len(prompt),
        capacity=capacity,
        width=width,
        device=session.device,
        stream=session.bound,
    )
    try:
        duel = _Duel(session, paged, dense)
        tokens = np.array([list(prompt)])
        for step in range(1, max_tokens + 1):
            tokens = duel.step(tokens, width)
            text = duel.beams.texts[0].decode("utf-8", "replace")
            pages = len(_distinct(paged))
            on_step(Progress(width=width, step=step, steps=max_tokens, text=text, pages=pages))
        return duel.result(len(prompt))
    finally:
        paged.close()
        dense.close()


def _distinct(store: PagedStore) -> set[int]:
    return {int(page) for row in store.rows() for page in row}


class _Duel:
    """The same search on two stores: the paged logits decide, the dense ones check them."""

    def __init__(self, session: Session, paged: PagedStore, dense: DenseStore) -> None:
        self.session, self.paged, self.dense = session, paged, dense
        self.beams, self.check = Hypotheses(), Check()
        self.paged_seconds: list[float] = []
        self.dense_seconds: list[float] = []

    def step(self, tokens: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Computes `tokens` [R, n], chooses the beams' next bytes and follows them: [W, 1]."""
        session, decoder = self.session, self.session.decoder
        given = session.xp.asarray(tokens)
        with session.clocked(self.paged_seconds):
            logits = session.to_host(decoder.step(given, self.paged))
        with session.clocked(self.dense_seconds):
            expected = session.to_host(decoder.step(given, self.dense))
        self.check.compare(logits, expected)
        choice = expand(self.beams.log_probs, logits, width)
        self.beams.follow(choice)
        with session.clocked(self.paged_seconds):
            self.paged.follow(choice.parents)
        with session.clocked(self.dense_seconds):
            self.dense.follow(choice.parents)
        return choice.tokens[:, None]

    def result(self, prompt_length: int) -> Search:
        """What the search found and what it cost."""
        rows, texts = self.paged.rows(), self.beams.texts
        holders = np.bincount(np.concatenate(rows))
        hypotheses = tuple(
            Hypothesis(
                text=text.decode("utf-8", "replace"),
                score=score,
                log_prob=float(log_prob),
                pages=tuple(row.tolist()),
                shared=tuple((holders[row] > 1).tolist()),
            )
            for row, text, score, log_prob in zip(
                rows, texts, self.beams.scores, self.beams.log_probs, strict=True
            )
        )
        generated = len(texts) * len(texts[0])
        return Search(
            hypotheses=hypotheses,
            tokens=prompt_length + generated,
            generated=generated,
            check=self.check,
            paged_moved=self.paged.moved,
            dense_moved=self.dense.moved,
            paged_seconds=sum(self.paged_seconds),
            dense_seconds=sum(self.dense_seconds),
            page_bytes=self.paged.page_bytes,
            pages_in_use=len(_distinct(self.paged)),
            pages_unshared=len(rows) * div_ceil(self.paged.length, TOKENS_PER_BLOCK),
            peak_pages=self.paged.peak_pages,
        )
