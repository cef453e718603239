"""Runs suites: `python -m bench [SUITE ...] [--json FILE] [--filter TEXT]`; none named is all."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.harness import Case, Result, run_case, save, table

SUITES = {
    "control": ("bench.control", "bench.decode"),
    "prefix": ("bench.prefix",),
    "import": ("bench.imports",),
    "replay": ("bench.replay",),
    "kernels": ("bench.kernels", "bench.formats"),
    "streams": ("bench.streams", "bench.decode_cuda"),
    "beams": ("bench.beams",),
    "interop": ("bench.interop",),
}
NEED_GPU = {"kernels", "streams", "beams"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suites, prints a table of each and returns the exit status.

    A benchmark that raises is told at the end and does not stop the others; the status is then 1.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    device = gpu() if NEED_GPU & set(options.suites) else None
    results: list[Result] = []
    errors: dict[str, str] = {}
    for suite in options.suites:
        if suite in NEED_GPU and device is None:
            print(f"\n{suite}: left out, needs a GPU")
            continue
        print(f"\n{suite}: ", end="", flush=True)
        found = []
        for result in run_suite(suite, device, options.filter, errors):
            found.append(result)
            print(".", end="", flush=True)
        nothing = f"nothing to show for {options.filter!r}" if options.filter else "nothing here"
        print(f"\n{table(found)}" if found else nothing)
        results += found
    if options.json:
        command = " ".join(["python -m bench", *given])
        save(options.json, results, environment(command), errors)
    return verdict(results, errors, check=options.check)


def verdict(results: Iterable[Result], errors: Mapping[str, str], *, check: bool) -> int:
    """Prints the bars missed and the errors; the exit status."""
    missed = [result.name for result in results if result.ok is False]
    if missed:
        print(f"\nbars missed: {', '.join(missed)}")
    for name, error in errors.items():
        print(f"\n{name} failed:\n{error}")
    return int(bool(errors) or (check and bool(missed)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("kvcore bench", description="Benchmarks of kvcore.")
    choices = [*SUITES, "all"]
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"{', '.join(choices)}; all by default"
    )
    parser.add_argument("--json", type=Path, help="also write the results and the environment")
    parser.add_argument("--filter", default="", help="only benchmarks whose name contains this")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar was missed")
    options = parser.parse_args(arguments)
    unknown = set(options.suites) - set(choices)
    if unknown:
        parser.error(f"unknown suite {sorted(unknown)[0]!r}, expected one of {', '.join(choices)}")
    if not options.suites or "all" in options.suites:
        options.suites = list(SUITES)
    return options


def gpu() -> object | None:
    """The CUDA device, or None where there is none."""
    from kvcore.device import open_device

    device = open_device("auto")
    if device.kind == "cuda":
        return device
    device.close()
    return None


def run_suite(
    suite: str, device: object | None, wanted: str, errors: dict[str, str]
) -> Iterator[Result]:
    """The results of every `bench_*` function of a suite's modules whose name contains `wanted`.

    Such a function takes the device if it has a parameter, and returns one or many of `Case`,
    `Result` and dictionaries with the fields of `Result`. What one raises goes to `errors`.
    """
    for function in functions(suite):
        if wanted in function.__name__:
            try:
                yield from run_function(function, device)
            except Exception:
                errors[function.__name__] = traceback.format_exc()


def run_function(function: Callable[..., Any], device: object | None) -> Iterator[Result]:
    """The results of one benchmark."""
    found = function(device) if inspect.signature(function).parameters else function()
    for item in [found] if isinstance(found, Case | Result | Mapping) else found:
        yield as_result(item)


def functions(suite: str) -> Iterable[Callable[..., Any]]:
    """The benchmarks of a suite, in the order of the source."""
    modules = map(importlib.import_module, SUITES[suite])
    return [v for m in modules for name, v in vars(m).items() if name.startswith("bench_")]


def as_result(item: Case | Result | Mapping[str, Any]) -> Result:
    """Runs a case; turns a dictionary into a result."""
    if isinstance(item, Case):
        return run_case(item)
    return item if isinstance(item, Result) else Result.of(item)


if __name__ == "__main__":
    sys.exit(main())
