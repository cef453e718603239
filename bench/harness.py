"""One harness for every benchmark: how it is timed, judged, printed and stored.

Times are microseconds of the wall clock around one call, taken with garbage collection off. A
result names what it is compared with; the rival or limit is measured in the same run.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

Setup = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Quantiles over `n` calls, in microseconds."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured number.

    `ratio` says how many times better than `against` it is: the rival's time over ours, or our
    bandwidth over the limit's. `bar` is the bound on `value` or, where `meta["bar_on"]` is
    "ratio", on the ratio; `ok` whether it was kept.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    bar: float | None = None
    ok: bool | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Result:
        """A result from a plain dictionary; keys that are no fields go to `meta`."""
        names = {f.name for f in fields(Result)}
        known = {key: value for key, value in values.items() if key in names}
        extra = {key: value for key, value in values.items() if key not in names}
        return Result(**{**known, "meta": {**known.get("meta", {}), **extra}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time: `fn(setup())`, or `fn()` without a set-up, with only `fn` on the clock."""

    name: str
    fn: Callable[..., Any]
    setup: Setup | None = None
    rival: Callable[..., Any] | None = None
    rival_setup: Setup | None = None
    against: str = ""
    bar: float | None = None  # microseconds
    calls: int = 1_008  # over 1,000, and a multiple of the 16 phases of a block
    warmup: int = 32
    meta: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


def measure(
    fn: Callable[..., Any],
    *,
    calls: int,
    warmup: int,
    setup: Setup | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Stats:
    """Times `calls` calls of `fn` after `warmup` untimed ones.

    `setup` runs before every call, off the clock, and what it returns is passed to `fn`. A call
    that returns False did not do its work (kvcore says so when pages run out): `RuntimeError`.
    """
    times = np.empty(calls, np.int64)
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for call in range(-warmup, calls):
            args = () if setup is None else (setup(),)
            start = clock()
            done = fn(*args)
            end = clock()
            if done is False:
                raise RuntimeError(f"call {call}: the timed function returned False")
            if call >= 0:
                times[call] = end - start
    finally:
        if enabled:
            gc.enable()
    p10, median, p90 = np.percentile(times, (10, 50, 90)) / 1_000
    return Stats(median=float(median), p10=float(p10), p90=float(p90), n=calls)


def run_case(case: Case) -> Result:
    """Measures a case and its rival, and closes it."""
    try:
        ours = measure(case.fn, calls=case.calls, warmup=case.warmup, setup=case.setup)
        rival = None
        if case.rival is not None:
            rival = measure(
                case.rival, calls=case.calls, warmup=case.warmup, setup=case.rival_setup
            )
    finally:
        case.close()
    return timed(case.name, ours, rival, against=case.against, bar=case.bar, meta=case.meta)


def timed(
    name: str,
    ours: Stats,
    rival: Stats | None = None,
    *,
    against: str = "",
    bar: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Result:
    """The result of a timing: medians, with the spread in `meta`."""
    facts = {"p10": ours.p10, "p90": ours.p90, "calls": ours.n, **(meta or {})}
    if rival is not None:
        facts["rival_us"] = rival.median
    return Result(
        name=name,
        value=ours.median,
        unit="µs",
        ratio=None if rival is None else rival.median / ours.median,
        against=against,
        bar=bar,
        ok=None if bar is None else ours.median <= bar,
        meta=facts,
    )


HEADINGS = ("benchmark", "value", "p10 to p90", "ratio", "against", "bar", "")


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table that is aligned for a terminal."""
    rows = [HEADINGS, *(_cells(result) for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    left = {0, 4, 6}

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])


def _cells(result: Result) -> tuple[str, ...]:
    spread = ""
    if {"p10", "p90"} <= result.meta.keys():
        spread = f"{number(result.meta['p10'])} to {number(result.meta['p90'])}"
    on_ratio = result.meta.get("bar_on") == "ratio"
    return (
        result.name,
        f"{number(result.value)} {result.unit}",
        spread,
        "" if result.ratio is None else f"{number(result.ratio)}×",
        result.against,
        "" if result.bar is None else number(result.bar) + ("×" if on_ratio else ""),
        {None: "", True: "ok", False: "MISSED"}[result.ok],
    )


def number(value: float) -> str:
    """Three digits that count, without an exponent.

    >>> [number(x) for x in (0.01234, 5.678, 56.78, 567.8, 5678.0, 0)]
    ['0.0123', '5.68', '56.8', '568', '5678', '0']
    """
    rounded = float(f"{value:.3g}")
    if rounded == 0 or abs(rounded) >= 100:
        return f"{value:.0f}"
    return f"{rounded:.{2 - int(np.floor(np.log10(abs(rounded))))}f}"


def report(
    results: Iterable[Result], environment: Mapping[str, Any], errors: Mapping[str, str]
) -> dict[str, Any]:
    """What goes into a JSON file: plain values only. Of an error, its last line."""
    return {
        "environment": dict(environment),
        "results": [asdict(result) for result in results],
        "errors": {name: error.strip().rpartition("\n")[2] for name, error in errors.items()},
    }


def save(
    path: Path,
    results: Iterable[Result],
    environment: Mapping[str, Any],
    errors: Mapping[str, str],
) -> None:
    """Writes the report; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report(results, environment, errors), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")
