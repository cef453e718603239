"""Host time and launches of one decode step on a GPU, from Python. Needs a GPU.

Steps follow each other as in an engine, without a wait in between: what one enqueues runs for
less time than the host needs for the next, so nothing waits for room in the queue. An engine has
the keys of layer l only after layer l - 1 and appends per layer inside a graph: `bench.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.control import closer
from bench.decode import SEQUENCES, WARMUP, Model, Step, manager
from bench.harness import Case, Result, run_case

LARGE = Model(layers=32, heads=8, dim=128, calls=208)
STEP_BAR_US, LAUNCH_BAR = 40.0, 3


def bench_decode_step_on_cuda(device: Any) -> Iterator[Case | Result]:
    yield cuda_case(device, "advance", before="", clocked="a")
    yield cuda_case(device, "prepare", before="a", clocked="p")
    yield cuda_case(device, f"stacked append, {LARGE.layers} layers", before="ap", clocked="w")
    name = f"prepare and stacked append, {LARGE.layers} layers"
    case = cuda_case(device, name, before="a", clocked="pw", bar=STEP_BAR_US)
    yield launches(case)
    yield run_case(case)
    yield cuda_case(device, "all", before="", clocked="apw")


def cuda_case(device: Any, name: str, *, before: str, clocked: str, **more: Any) -> Case:
    """Some parts of the step on the clock, others before it."""
    stream = device.create_stream()
    new = device.empty(LARGE.new, np.float16)
    step = Step(LARGE, manager(LARGE, device, stream), new)

    def ready() -> None:
        step.run(before)

    return Case(
        name=f"host: decode step of {SEQUENCES}, {name}",
        fn=lambda _: step.run(clocked),
        setup=ready,
        calls=LARGE.calls,
        warmup=WARMUP - 4,  # four are taken to count the launches
        meta={"layers": LARGE.layers, "bytes": 2 * new.nbytes},
        close=closer(step.manager, step.caches),
        **more,
    )


def launches(case: Case) -> Result:
    """How many kernels a step enqueues, once the first ones have met every staging buffer."""
    for _ in range(3):
        case.fn(case.setup() if case.setup else None)
    ready = case.setup() if case.setup else None
    count = count_launches(lambda: case.fn(ready))
    return Result(
        name=f"launches: {case.name}",
        value=count,
        unit="",
        bar=LAUNCH_BAR,
        ok=count <= LAUNCH_BAR,
    )


def count_launches(work: Callable[[], object]) -> int:
    """Kernels that `work` asks the driver for: alone, or as the graph of a step, which has two."""
    from kvcore.device.cuda import graphs, launch

    count = 0
    alone, together = launch.cuLaunchKernel, graphs.cuGraphLaunch

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return alone(*args)

    def counted_graph(*args: Any) -> Any:
        nonlocal count
        count += 2
        return together(*args)

    launch.cuLaunchKernel, graphs.cuGraphLaunch = counted, counted_graph
    try:
        work()
    finally:
        launch.cuLaunchKernel, graphs.cuGraphLaunch = alone, together
    return count
