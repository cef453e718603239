"""Drives a manager with a trace, as a serving engine would.

Requests come in the order of their time, as many at once as may run; what a model would compute is
there at once. Time passes in steps to the next end: all running sequences grow together by the
fewest tokens that any of them still has to generate.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import kvcore as k
from kvcore.device import open_device
from kvcore.errors import InternalError, wrong
from kvcore.ids import align_up, div_ceil
from kvcore.replay.policies import policy_of
from kvcore.replay.report import Result, Sample, Settings, peak_memory
from kvcore.replay.trace import BLOCK, Trace

PAGE_BYTES = 4096  # a grain on the host, so that there are exactly the pages that were asked for
SAMPLES = 250

OpenManager = Callable[[k.KVCacheManagerConfig, str], AbstractContextManager[k.KVCacheManager]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a replay is."""

    requests: int
    tokens: int
    """Of the prompts of these requests."""


def replay(
    trace: Trace,
    settings: Settings,
    on_progress: Callable[[Progress], None] = lambda _: None,
    open_manager: OpenManager | None = None,
) -> Result:
    """Replays a trace.

    Parameters
    ----------
    trace : Trace
        From `read_trace`.
    settings : Settings
        Cache and engine.
    on_progress : callable
        Called some 250 times.
    open_manager : callable, optional
        Gives a context manager around what takes the calls, from a configuration and the name of a
        device. Default: a `KVCacheManager`.

    Raises
    ------
    ValueError
        A setting is out of range, or the longest request does not fit the capacity.
    """
    if settings.full_blocks:
        trace = trace.in_full_blocks()
    pages = _pages(trace, settings)
    config = _configuration(trace, settings, pages)
    with (open_manager or _open_manager)(config, settings.device) as manager:
        return _Engine(trace, settings, config, manager, on_progress).run()


@contextmanager
def _open_manager(config: k.KVCacheManagerConfig, spec: str) -> Iterator[k.KVCacheManager]:
    """On a GPU there are a few pages more, up to its own grain."""
    device = open_device(spec)
    try:
        quota = config.cache_tiers[0].quota
        quota = align_up(quota, device.grain(quota))
        config = replace(config, cache_tiers=[k.GpuCacheTierConfig(quota=quota)])
        with k.KVCacheManager(config, device=device, stream=device.create_stream()) as manager:
            yield manager
    finally:
        device.close()


def _pages(trace: Trace, settings: Settings) -> int:
    """How many pages the cache has: what was asked for, or enough for everything at once."""
    size = settings.tokens_per_block
    # One more than its tokens take: a match inside a block is copied before it is let go of.
    needs = -(-(trace.input_lengths + trace.output_lengths) // size) + 1
    if settings.capacity_tokens is None:
        return int(needs.sum())
    pages = settings.capacity_tokens // size
    longest = int(needs.argmax())
    if needs[longest] > pages:
        at_least = f"at least {needs[longest] * size} for the request of line"
        raise wrong(
            "capacity-tokens", f"{at_least} {trace.lines[longest]}", settings.capacity_tokens
        )
    return pages


def _configuration(trace: Trace, settings: Settings, pages: int) -> k.KVCacheManagerConfig:
    size = settings.tokens_per_block
    longest = int((trace.input_lengths + trace.output_lengths).max())
    return k.KVCacheManagerConfig(
        tokens_per_block=size,
        cache_tiers=[k.GpuCacheTierConfig(quota=pages * PAGE_BYTES)],
        layers=[
            k.AttentionLayerConfig(
                layer_id=0, buffers=[k.BufferConfig(role="key", size=PAGE_BYTES)]
            )
        ],
        max_sequences=settings.max_running,
        max_seq_len=div_ceil(longest, size) * size,
        text_only=True,
    )


class _Engine:
    """The scheduler of an engine that computes in no time."""

    def __init__(
        self,
        trace: Trace,
        settings: Settings,
        config: k.KVCacheManagerConfig,
        manager: k.KVCacheManager,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.trace, self.settings = trace, settings
        self.config, self.manager = config, manager
        self.policy, self.on_progress = policy_of(settings.policy), on_progress
        self.publishes_outputs = self.policy.reuse and not settings.full_blocks
        self.waiting = deque(range(len(trace)))
        self.running: dict[int, k.KVCache] = {}  # by request, the youngest last
        self.ends: list[tuple[int, int]] = []  # (when, request), a heap; some may have left
        self.end_of: dict[int, int] = {}  # of the running, when they will end
        self.generated: dict[int, int] = {}  # tokens of requests that had to leave
        self.now = 0  # in tokens of each running sequence
        self.full = False  # wait for an end before admitting more
        self.short = 0  # pages that the head of the queue found too few of
        self.hits: NDArray[np.int64] = np.full(len(trace), -1, np.int64)
        self.admitted = self.tokens = self.hit_tokens = 0
        self.preemptions = self.recomputed = 0
        self.samples: list[Sample] = []
        self.sample_every = div_ceil(len(trace), SAMPLES)

    def run(self) -> Result:
        begun = time.perf_counter()
        while self.waiting or self.running:
            self._admit()
            self._decode()
        return self._result(time.perf_counter() - begun)

    def _admit(self) -> None:
        while self.waiting and not self.full and len(self.running) < self.settings.max_running:
            if self._may_fit() and self._start(self.waiting[0]):
                self.waiting.popleft()
                self.short = 0
            else:
                self.full = True
        if not self.running:
            raise InternalError(f"request {self.waiting[0]} has the cache for itself and no room")

    def _may_fit(self) -> bool:
        """Whether to look the head of the queue up: its last try told what room it takes."""
        if not self.running:
            return True
        pages = self.manager.get_storage_statistics(0)[0]
        in_use = pages.unavailable / pages.total
        return in_use <= self.config.max_util_for_resume and pages.available >= self.short

    def _start(self, number: int) -> bool:
        """Looks a prompt up and makes room for the rest of it. False if there is none."""
        trace, settings, policy = self.trace, self.settings, self.policy
        prompt, length = trace.prompt(number), trace.input_lengths.item(number)
        done = self.generated.get(number, 0)
        if done and self.publishes_outputs:
            prompt = np.concatenate((prompt, trace.output(number)[:done]))
        total = length + done
        # At least one token is left to compute: the step that gives the next one needs a query.
        known = prompt if settings.full_blocks else prompt[:-1]
        kv = self.manager.create_kv_cache(
            input_tokens=known if policy.reuse else None,
            expected_prompt_length=total,
            retention=policy.retention(length),
        )
        hit = kv.num_committed_tokens
        if not (kv.resume() and kv.resize(total)):
            kv.close()
            size = settings.tokens_per_block
            self.short = div_ceil(total, size) - hit // size
            return False
        if policy.reuse and hit < prompt.size:
            kv.commit(prompt[hit:])
        self.running[number] = kv
        end = self.now + trace.output_lengths.item(number) - done
        self.end_of[number] = end
        heapq.heappush(self.ends, (end, number))
        if self.hits[number] < 0:
            self._count(number, hit)
        else:
            self.recomputed += total - hit
        return True

    def _count(self, number: int, hit: int) -> None:
        """Notes what a request found when it came first."""
        self.hits[number] = hit
        self.admitted += 1
        self.hit_tokens += hit
        self.tokens += self.trace.input_lengths.item(number)
        if self.admitted % self.sample_every and self.admitted < len(self.trace):
            return
        pages = self.manager.get_storage_statistics(0)[0]
        self.samples.append(
            Sample(
                time=self.trace.timestamps.item(number) / 1000,
                requests=self.admitted,
                tokens=self.tokens,
                hit_tokens=self.hit_tokens,
                running=len(self.running),
                pages_in_use=int(pages.unavailable),
                pages_cached=int(pages.evictable),
            )
        )
        self.on_progress(Progress(requests=self.admitted, tokens=self.tokens))

    def _decode(self) -> None:
        """Generates until the next request ends."""
        step = self._next_end() - self.now
        while step and not self.manager.advance(list(self.running.values()), step):
            self._preempt()
            step = self._next_end() - self.now
        self.now += step
        while self.ends and self.ends[0][0] == self.now:
            self._finish(heapq.heappop(self.ends)[1])

    def _next_end(self) -> int:
        """When the next of the running will end."""
        while self.end_of.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)  # it had to leave
        return self.ends[0][0]

    def _finish(self, number: int) -> None:
        if self.end_of.get(number) == self.now:
            self._leave(number, self.trace.output_lengths.item(number))
            self.full = False

    def _preempt(self) -> None:
        """Sends the youngest back to the head of the queue; what it has computed is published."""
        number = next(reversed(self.running))
        if len(self.running) == 1:
            raise InternalError(f"request {number} has the cache for itself and no room")
        left = self.end_of[number] - self.now
        self._leave(number, self.trace.output_lengths.item(number) - left)
        self.waiting.appendleft(number)
        self.preemptions += 1
        self.full, self.short = True, 0

    def _leave(self, number: int, generated: int) -> None:
        kv = self.running.pop(number)
        del self.end_of[number]
        before = self.generated.get(number, 0)
        self.generated[number] = generated
        if self.publishes_outputs and generated > before:
            kv.commit(self.trace.output(number)[before:generated], is_end=True)
        kv.close()

    def _result(self, seconds: float) -> Result:
        trace, pages = self.trace, self.manager.get_storage_statistics(0)[0].total
        counts = self.manager.get_and_reset_iteration_stats()
        return Result(
            trace=trace.name,
            settings=self.settings,
            capacity_tokens=pages * self.settings.tokens_per_block,
            requests=len(trace),
            tokens=self.tokens,
            hit_tokens=self.hit_tokens,
            output_tokens=int(trace.output_lengths.sum()),
            blocks=int(trace.counts.sum()),
            hit_blocks=int((self.hits // BLOCK).sum()),
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            pages=pages,
            evicted_pages=sum(group.host_dropped_blocks for group in counts),
            seconds=seconds,
            peak_memory_bytes=peak_memory(),
            samples=tuple(self.samples),
        )
