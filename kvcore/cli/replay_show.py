"""Finished replays: a table on the terminal, and a picture of how they went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from kvcore.cli.show import WIDEST, size
from kvcore.replay.report import Result
from kvcore.replay.trace import BLOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATE = 10  # samples that "of late" looks back


def show(results: Sequence[Result], console: Console | None = None) -> None:
    """Prints one column per replay to standard output, or to `console`."""
    out = Console(highlight=False) if console is None else console
    out.width = min(out.width, WIDEST)
    first = results[0]
    table = Table(title=_title(first), title_justify="left", header_style="bold")
    table.add_column("policy")
    for result in results:
        table.add_column(result.settings.policy, justify="right")
    columns = [rows(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    out.print(table)


def _title(result: Result) -> str:
    return f"{Path(result.trace).name}, {result.settings.tokens_per_block} tokens per block"


def rows(result: Result) -> dict[str, str]:
    """What the table says of a replay, by name."""
    bounded = result.settings.capacity_tokens is not None
    memory = result.peak_memory_bytes
    return {
        "requests": f"{result.requests:,}",
        "prompt tokens": f"{result.tokens:,}",
        "found in the cache": f"{result.hit_tokens:,}",
        "share": f"{result.hit_share:.3%}",
        f"blocks of {BLOCK}": f"{result.blocks:,}",
        "found in full": f"{result.hit_blocks:,}",
        "share of blocks": f"{result.block_hit_share:.3%}",
        "capacity, tokens": f"{result.capacity_tokens:,}" if bounded else "never evicts",
        "pages evicted": f"{result.evicted_pages:,}",
        "preemptions": f"{result.preemptions:,}",
        "tokens recomputed": f"{result.recomputed_tokens:,}",
        "time": f"{result.seconds:.2f} s",
        "prompt tokens/s": f"{result.tokens_per_second / 1e6:,.1f} M",
        "requests/s": f"{result.requests / result.seconds:,.0f}",
        "process, at most": "unknown" if memory is None else size(memory),
    }


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws hit rate and occupancy over the time of the trace into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    rate, occupancy = figure.subplots(2, sharex=True)
    for number, result in enumerate(results):
        _draw(result, rate, occupancy, f"C{number}")
    first = results[0]
    rate.set_title(_title(first))
    rate.set_ylabel("prompt tokens found, %\n(thin: of late)")
    occupancy.set_ylabel("tokens with pages, millions\n(dashed: in use)")
    occupancy.set_xlabel("time of the trace, minutes")
    if first.settings.capacity_tokens is not None:
        occupancy.axhline(first.capacity_tokens / 1e6, color="grey", lw=0.8)
    for axes in (rate, occupancy):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    rate.legend(loc="upper left")
    figure.savefig(path, format="png", dpi=120)


def _draw(result: Result, rate: Axes, occupancy: Axes, color: str) -> None:
    """The lines of one replay."""
    samples, name = result.samples, result.settings.policy
    minutes = np.array([sample.time for sample in samples]) / 60
    tokens = np.array([sample.tokens for sample in samples], float)
    hits = np.array([sample.hit_tokens for sample in samples], float)
    label = f"{name}: {result.hit_share:.1%}"
    rate.plot(minutes, 100 * hits / tokens, color=color, label=label, zorder=3)
    late = np.maximum(np.arange(-LATE, len(samples) - LATE), -1)  # the sample before, -1: none
    found = np.append(hits, 0.0)[late], np.append(tokens, 0.0)[late]
    rate.plot(minutes, 100 * (hits - found[0]) / (tokens - found[1]), color=color, lw=0.7)
    used = np.array([sample.pages_in_use for sample in samples])
    kept = np.array([sample.pages_cached for sample in samples])
    scale = result.settings.tokens_per_block / 1e6
    occupancy.plot(minutes, (used + kept) * scale, color=color)
    occupancy.plot(minutes, used * scale, "--", color=color, lw=1)
