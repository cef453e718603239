"""Timing on the GPU: events around the work, caches cold, data random, the host far ahead."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.device.base import Memory, PageGeometry

MIB, GIB = 1 << 20, 1 << 30
FLUSH = 256 * MIB
"""Bytes written before each cold run: several times the second-level cache."""

LEAD_CYCLES = 4_000_000
"""Length of the delay, about 2 ms, behind which the host enqueues a warm run."""


@dataclass(frozen=True, slots=True)
class Times:
    """Quantiles in microseconds."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: list[float]) -> Times:
        p10, median, p90 = np.percentile(values, (10, 50, 90))
        return Times(float(median), float(p10), float(p90))

    def facts(self, **more: Any) -> dict[str, Any]:
        """For the `meta` of a result."""
        return {"us": self.median, "p10_us": self.p10, "p90_us": self.p90, **more}


class Bench:
    """A stream of the device, the cache's flusher, and pools that are closed at the end."""

    def __init__(self, device: Any) -> None:
        self.device, self.stream = device, device.create_stream()
        self._flush = device.empty(FLUSH // 4, np.int32)
        self._delay = device.launch("latch", "delay")
        self._memories: list[Memory] = []
        self._rng = np.random.default_rng(1)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *args: object) -> None:
        self.stream.synchronize()
        for memory in self._memories:
            memory.close()
        self._flush = None
        self.device.collect()

    def reserve(self, nbytes: int) -> Memory:
        """Backed memory full of random bytes."""
        memory = self.device.reserve(nbytes, nbytes, self.device.grain(nbytes))
        self._memories.append(memory)
        self.fill(memory, nbytes)
        return memory

    def fill(self, memory: Memory, nbytes: int) -> None:
        """Writes random bytes to the first `nbytes` of a memory."""
        part = min(16 * MIB, nbytes)
        values = self._rng.integers(0, 256, part, np.uint8)
        self.device.from_host(values, memory.array(np.uint8, (part,)), stream=self.stream)
        for start in range(part, nbytes, part):
            self.memcpy(memory.base + start, memory.base, min(part, nbytes - start))
        self.stream.synchronize()

    def random(self, shape: tuple[int, ...]) -> Any:
        """A device array of random 16-bit items."""
        return self.put(self._rng.integers(0, 1 << 16, shape, np.uint16))

    def put(self, values: Any) -> Any:
        """A device array with these values."""
        values = np.ascontiguousarray(values)
        array = self.device.empty(values.shape, values.dtype)
        self.device.from_host(values, array, stream=self.stream)
        return array

    def memcpy(self, target: int, source: int, nbytes: int) -> None:
        """The driver's own copy."""
        self.device.context.call("cuMemcpyDtoDAsync", target, source, nbytes, self.stream.native)

    def cold(
        self,
        work: Callable[[], object],
        repeats: int = 50,
        warmup: int = 5,
        before: Callable[[], object] = lambda: None,
        lead: bool = False,
    ) -> Times:
        """Times of single runs, each after `before` and with nothing of its data in the cache.

        With `lead` the device is held up as well, for work whose launch takes the host long.
        """

        def prepare() -> None:
            before()
            self._scrub()
            if lead:
                self._lead()

        return self._time(work, prepare, repeats, warmup, 1)

    def behind(self, work: Callable[[], object], repeats: int = 50) -> Times:
        """Times of single runs that were enqueued while the device was busy with something else.

        For more data than any cache holds: nothing is scrubbed, and no host time is in between.
        """
        return self._time(work, self._lead, repeats, 5, 1)

    def warm(self, work: Callable[[], object], count: int = 50, repeats: int = 20) -> Times:
        """Time of one of `count` runs in a row, with the data in the cache."""
        return self._time(work, self._lead, repeats, 3, count)

    def host(self, work: Callable[[], object], count: int = 200, repeats: int = 20) -> Times:
        """Time of the host in one of `count` calls, while the device keeps up."""
        found = []
        for repeat in range(-3, repeats):
            self.stream.synchronize()
            start = time.perf_counter_ns()
            for _ in range(count):
                work()
            spent = time.perf_counter_ns() - start
            if repeat >= 0:
                found.append(spent / 1000 / count)
        self.stream.synchronize()
        return Times.of(found)

    def _time(
        self,
        work: Callable[[], object],
        before: Callable[[], None],
        repeats: int,
        warmup: int,
        count: int,
    ) -> Times:
        call = self.device.context.call
        events = [[call("cuEventCreate", 0) for _ in range(2)] for _ in range(repeats)]
        for repeat in range(-warmup, repeats):
            before()
            start, end = events[max(repeat, 0)]
            call("cuEventRecord", start, self.stream.native)
            for _ in range(count):
                work()
            call("cuEventRecord", end, self.stream.native)
        self.stream.synchronize()
        found = []
        for start, end in events:
            found.append(float(call("cuEventElapsedTime", start, end)) * 1000 / count)
            call("cuEventDestroy", start)
            call("cuEventDestroy", end)
        return Times.of(found)

    def _scrub(self) -> None:
        self.device.fill_words(self._flush, 1, stream=self.stream)

    def _lead(self) -> None:
        self._delay(self.stream, 1, 1, 1, LEAD_CYCLES)


def model_geometry(layout: str, tokens: int = 32, heads: int = 8, dim: int = 128) -> PageGeometry:
    """16-bit keys or values of a real model."""
    item = 2 * dim
    token, head = (heads * item, item) if layout == "NHD" else (item, tokens * item)
    return PageGeometry(
        page_tokens=tokens, page_bytes=tokens * heads * item, expansion=1, heads=heads, dim=dim,
        itemsize=2, token_stride=token, head_stride=head,
    )  # fmt: skip


def bandwidth(
    name: str, times: Times, nbytes: int, limit: Times, limit_bytes: int, bar: float | None
) -> dict[str, Any]:
    """A result in GB/s, reading plus writing, against the limit measured in the same run."""
    value = 2 * nbytes / times.median / 1000
    ratio = value / (2 * limit_bytes / limit.median / 1000)
    return {
        "name": name,
        "value": value,
        "unit": "GB/s",
        "ratio": ratio,
        "against": f"memcpy of {limit_bytes >> 20} MiB",
        "bar": bar,
        "ok": None if bar is None else ratio >= bar,
        "meta": times.facts(bar_on="ratio", bytes=nbytes, limit_us=limit.median),
    }


def latency(
    name: str, times: Times, against: str = "", other: Times | None = None, bar: float | None = None
) -> dict[str, Any]:
    """A result in microseconds; `bar` is the most that is allowed."""
    return {
        "name": name,
        "value": times.median,
        "unit": "µs",
        "ratio": None if other is None else other.median / times.median,
        "against": against,
        "bar": bar,
        "ok": None if bar is None else times.median <= bar,
        "meta": {"p10": times.p10, "p90": times.p90},
    }


# -- sweeps of a kernel's tuning -------------------------------------------------------------------


def tuning_label(source: Any) -> str:
    return f"{source.threads} x {source.vectors}, stream_stores={source.stream_stores}"


def sweep_main(name: str, sweep: Callable[[Any, str], None]) -> int:
    """The command `python -m NAME --sweep [--filter TEXT]`."""
    parser = argparse.ArgumentParser(name)
    parser.add_argument("--sweep", action="store_true", required=True)
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    from kvcore.device import open_device

    sweep(open_device("cuda"), options.filter)
    return 0
