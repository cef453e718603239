"""`kvcore replay`: its options, the moving bar, the table, and the files it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.cli import replay_options as options
from kvcore.errors import KVCoreError, wrong
from kvcore.replay.policies import policy_of
from kvcore.replay.report import Result, Settings, as_json
from kvcore.replay.simulate import Progress, replay
from kvcore.replay.trace import Trace, read_trace

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars


def command(
    trace: options.TraceFile,
    capacity_tokens: options.CapacityTokens = None,
    tokens_per_block: options.TokensPerBlock = 16,
    policy: options.PolicyName = "lru",
    compare: options.Compare = None,
    max_running: options.MaxRunning = 256,
    full_blocks: options.FullBlocks = False,
    limit: options.Limit = None,
    device: options.DeviceName = "meta",
    json_file: options.JsonFile = None,
    plot_file: options.PlotFile = None,
) -> int:
    """Replays recorded traffic on the real cache manager, without a model.

    Requests come in the order of their time, as many at once as may run, and are looked up, grown,
    published and closed as a serving engine does it. Where room is short they wait, and the
    youngest that runs starts anew.
    """
    from kvcore.cli.replay_show import plot, show

    settings = Settings(
        tokens_per_block=tokens_per_block,
        capacity_tokens=capacity_tokens,
        policy=policy,
        max_running=max_running,
        full_blocks=full_blocks,
        device=device,
    )
    policies = [policy] if compare is None else _policies(compare)
    _check_file("json", json_file)
    _check_file("plot", plot_file)
    if plot_file is not None:
        import matplotlib  # noqa: F401 - better missed now than after the work
    requests = _read(trace, limit)
    results = _run(requests, [replace(settings, policy=name) for name in policies])
    show(results)
    _write(json_file, lambda path: path.write_text(as_json(results) + "\n", "utf-8"))
    _write(plot_file, lambda path: plot(results, path))
    return 0


def _policies(compare: str) -> list[str]:
    names = [name.strip() for name in compare.split(",")]
    for name in names:
        policy_of(name, "compare")
    if len(set(names)) < len(names):
        raise wrong("compare", "each policy once", compare)
    return names


def _check_file(option: str, path: Path | None) -> None:
    """Says before the work that its result could not be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise wrong(option, "a file in a folder that exists", str(path))


def _read(path: Path, limit: int | None) -> Trace:
    if limit is not None and limit < 1:
        raise wrong("limit", "at least 1", limit)
    trace = read_trace(path)
    return trace if limit is None else trace.head(limit)


def _run(trace: Trace, runs: Sequence[Settings]) -> list[Result]:
    with watching(trace, [settings.policy for settings in runs]) as watch:
        return [replay(trace, settings, watch(settings.policy)) for settings in runs]


@contextmanager
def watching(
    trace: Trace, names: Sequence[str]
) -> Iterator[Callable[[str], Callable[[Progress], None]]]:
    """Gives what to call for each replay; draws on standard error if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: lambda progress: None
        return
    bars = _bars(console)
    total = int(trace.input_lengths.sum())
    tasks = {name: bars.add_task(name, total=total, start=False, rate="") for name in names}

    def watch(name: str) -> Callable[[Progress], None]:
        begun = time.perf_counter()
        bars.start_task(tasks[name])

        def take(progress: Progress) -> None:
            seconds = time.perf_counter() - begun
            share = progress.requests / len(trace)
            rate = rates(progress.tokens, progress.requests, seconds)
            bars.update(tasks[name], completed=share * total, rate=rate)

        return take

    with bars:
        yield watch


def _bars(console: Console) -> Bars:
    from rich import progress

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[rate]}", style="cyan"),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
    )


def rates(tokens: int, requests: int, seconds: float) -> str:
    """How fast, for people.

    >>> rates(145_000_000, 12_031, 4.0)
    '36.2 M tokens/s, 3,008 requests/s'
    """
    return f"{tokens / seconds / 1e6:.1f} M tokens/s, {requests / seconds:,.0f} requests/s"


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise KVCoreError(f"{path}: cannot be written: {error.strerror}") from error
