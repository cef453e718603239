"""The control-plane cases under pytest-benchmark: `pytest bench --benchmark-only`."""

from __future__ import annotations

import pytest

from bench.__main__ import functions
from bench.harness import Case


@pytest.mark.parametrize("make", functions("control"), ids=lambda make: make.__name__)
def test_control(benchmark, make):
    """Of a function with several cases, the last and largest."""
    made = make()
    *others, case = [made] if isinstance(made, Case) else made
    for other in others:
        other.close()
    benchmark.extra_info.update(case.meta, bar_us=case.bar, case=case.name)
    try:
        benchmark.pedantic(case.fn, setup=arguments(case), rounds=case.calls)
    finally:
        case.close()


def arguments(case: Case):
    """The case's set-up as pytest-benchmark wants it."""
    if case.setup is None:
        return lambda: ((), {})
    return lambda: ((case.setup(),), {})
