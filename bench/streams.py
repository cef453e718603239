"""Streams, events and graphs: what runs beside compute, and what ordering costs. Needs a GPU.

Overlap says how long compute and an operation take together, against the longer of the two alone:
1 is free of charge. The compute kernel keeps every multiprocessor busy with a few warps and
touches no memory, so this shows the scheduling, not the contest for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np

from bench.gpu import Bench, Times, latency, model_geometry
from bench.kernels import NAMES, Step

LAYERS = 32
RECORD_BAR, WAIT_BAR = 1.0, 1.0

Results = Iterator[dict[str, Any]]


class Pair:
    """Two streams, and how long what they do takes."""

    def __init__(self, bench: Bench) -> None:
        self.bench, device = bench, bench.device
        self.compute, self.other = device.create_stream(), bench.stream
        self._call = device.context.call
        self._start, self._end = (self._call("cuEventCreate", 0) for _ in range(2))
        self._busy, self._delay = device.launch("latch", "busy"), device.launch("latch", "delay")
        self._blocks = device.context.attribute("MULTIPROCESSOR_COUNT")
        self._out = device.empty(self._blocks * self._busy.threads, np.float32)

    def busy(self, rounds: int) -> None:
        """Arithmetic on the compute stream."""
        self._busy(self.compute, self._blocks, 1, 1, self._out.data.ptr, rounds)

    def time(self, compute: Callable[[], object], other: Callable[[], object]) -> Times:
        """Both at once: from the start of the earlier to the end of the later."""
        found = []
        for repeat in range(-3, 20):
            self._delay(self.compute, 1, 1, 1, 4_000_000)  # the host gets ahead
            self._call("cuEventRecord", self._start, self.compute.native)
            self.other.follow(self.compute)
            compute()
            other()
            self.compute.follow(self.other)
            self._call("cuEventRecord", self._end, self.compute.native)
            self.compute.synchronize()
            if repeat >= 0:
                spent = self._call("cuEventElapsedTime", self._start, self._end)
                found.append(float(spent) * 1000)
        return Times.of(found)

    def rounds_for(self, microseconds: float) -> int:
        """How many rounds take about so long."""
        probe = 100_000
        spent = self.time(lambda: self.busy(probe), lambda: None).median
        return max(int(probe * microseconds / spent), 1)


def bench_overlap(device: Any) -> Results:
    with Bench(device) as bench:
        step, pair = Step(bench), Pair(bench)
        step.scatter(), step.map()
        for name, count in (("scatter", 50), ("map", 50), ("append", 50), ("gather", 50),
                            ("take", 50), ("copy", 50)):  # fmt: skip
            call = getattr(step, name)

            def work(call: Callable[[], None] = call, count: int = count) -> None:
                for _ in range(count):
                    call()

            alone = pair.time(lambda: None, work)
            rounds = pair.rounds_for(alone.median)
            compute = pair.time(lambda rounds=rounds: pair.busy(rounds), lambda: None)
            both = pair.time(lambda rounds=rounds: pair.busy(rounds), work)
            longer = max(alone, compute, key=lambda times: times.median)
            result = latency(f"{count} x {NAMES[name]}, beside compute", both, "", longer)
            result["against"] = "the longer alone"
            result["meta"] |= {"alone_us": alone.median, "compute_us": compute.median}
            yield result


def bench_events(device: Any) -> Results:
    with Bench(device) as bench:
        stream, other = bench.stream, device.create_stream()
        theirs, event = cupy.cuda.Event(disable_timing=True), stream.record()
        taken = cupy.cuda.Stream.from_external(stream)
        record = bench.host(stream.record)
        rival = bench.host(lambda: theirs.record(taken))
        yield latency("host: record", record, "CuPy's Event.record", rival, RECORD_BAR)
        wait = bench.host(lambda: other.wait(fresh(event)))
        rival = bench.host(lambda: taken.wait_event(theirs))
        yield latency("host: wait", wait, "CuPy's wait_event", rival, WAIT_BAR)
        yield latency("host: record and done", bench.host(lambda: stream.record().done()))
        hand_over = bench.warm(lambda: (other.follow(stream), stream.follow(other)))
        yield latency("device: to another stream and back", hand_over)
        cupy_stream = cupy.cuda.Stream(non_blocking=True)
        yield latency("host: stream of CuPy", bench.host(lambda: device.stream(cupy_stream)))
        other.synchronize()


def fresh(event: Any) -> Any:
    """The event as if nobody had asked it yet: events that have passed are not waited for."""
    event._passed = False
    return event


def bench_captured_appends(device: Any) -> Results:
    """One append per layer, as a decode step has them: enqueued one by one and as a graph."""
    with Bench(device) as bench:
        geometry = model_geometry("NHD")
        slot = 2 * geometry.page_bytes * LAYERS
        memory = bench.reserve(64 * slot)
        stacks = [
            device.page_stack(
                [(memory, slot, (2 * i + role) * geometry.page_bytes) for role in range(2)],
                2,
                geometry,
            )
            for i in range(LAYERS)
        ]
        rows = 256
        places = np.random.default_rng(2).permutation(64 * 32)[:rows]
        mapping = bench.put(np.stack(np.divmod(places, 32), axis=1).astype(np.int32))
        arrays = [bench.random((1, rows, 8, 128)) for _ in range(2)]
        captured = cupy.cuda.Stream(non_blocking=True)
        stream = device.stream(captured)

        def step(on: Any) -> None:
            for stack in stacks:
                device.append(stack, mapping, arrays, stream=on)

        step(stream)
        stream.synchronize()
        captured.begin_capture()
        step(stream)
        graph = captured.end_capture()
        eager_host = bench.host(lambda: step(bench.stream), count=10)
        taken = cupy.cuda.Stream.from_external(bench.stream)
        graph_host = bench.host(lambda: graph.launch(taken), count=10)
        name = f"host: {LAYERS} appends"
        yield latency(name, eager_host)
        yield latency(f"{name} as one graph", graph_host, "one by one", eager_host)
        eager = bench.warm(lambda: step(bench.stream), count=5)
        replay = bench.warm(lambda: graph.launch(taken), count=5)
        name = f"device: {LAYERS} appends of {rows} tokens"
        yield latency(name, eager)
        yield latency(f"{name} as one graph", replay, "one by one", eager)
