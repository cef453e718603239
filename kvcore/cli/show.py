"""The finished demo on the terminal: panels and tables."""

from __future__ import annotations

from os.path import commonprefix

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kvcore
from kvcore.demo.run import Hypothesis, Report, Search
from kvcore.demo.stores import TOKENS_PER_BLOCK

SHARED, PRIVATE = "cyan", "bold yellow"


def printable(text: str) -> str:
    """`text` without characters that would move the terminal's cursor.

    >>> printable("a\\x1b[2Jb")
    'a\\ufffd[2Jb'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def size(count: float) -> str:
    """Bytes for people.

    >>> size(191692800), size(3), size(48 * 1024)
    ('182.8 MiB', '3 B', '48.0 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show(report: Report, console: Console | None = None) -> None:
    """Prints the report to standard output, or to `console`."""
    out = Console(highlight=False) if console is None else console
    prompt = printable(report.settings.prompt)
    out.print(_header(report))
    out.print(_greedy(prompt, report.greedy))
    out.print(_hypotheses(prompt, report.beam))
    out.print(_pages(report.beam))
    out.print(_moved(report.beam))
    out.print(_verdict(report))


def _header(report: Report) -> Panel:
    shape, training = report.weights.shape, report.weights.training
    return Panel(
        Group(
            Text.assemble(
                (f"{training['parameters'] / 1e6:.2f} M", "bold"),
                f" parameter byte-level decoder: {shape.layers} layers, {shape.heads} query heads on "
                f"{shape.kv_heads} KV heads, RoPE",
            ),
            Text(
                f"{training['text']}; {training['held_out_bits_per_byte']:.2f} bits per byte on "
                "held-out chapters",
                style="dim",
            ),
            Text.assemble(
                (report.device, "bold"),
                f", pages of {TOKENS_PER_BLOCK} tokens and {size(report.beam.page_bytes)}",
            ),
        ),
        title=f"[bold]kvcore {kvcore.__version__}[/] demo",
        title_align="left",
        border_style="blue",
    )


def _greedy(prompt: str, search: Search) -> Panel:
    best = search.hypotheses[0]
    return Panel(
        Text.assemble((prompt, "bold"), printable(best.text)),
        title="[bold]greedy[/]",
        title_align="left",
        subtitle=f"score {best.score:.3f}",
        subtitle_align="right",
        border_style="green",
    )


def _hypotheses(prompt: str, search: Search) -> Panel:
    table = Table(box=None, expand=True, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    texts = [printable(beam.text) for beam in search.hypotheses]
    common = len(commonprefix(texts)) if len(texts) > 1 else 0
    for beam, text in zip(search.hypotheses, texts, strict=True):
        first = table.row_count == 0
        shown = Text.assemble(
            (prompt, "bold" if first else "dim"),
            (text[:common], "" if first else "dim"),
            (text[common:], "yellow" if common else ""),
        )
        table.add_row(Text(f"{beam.score:.3f}", style="bold"), shown)
        if table.row_count < len(texts):
            table.add_row("", "")
    return Panel(
        table,
        title=f"[bold]beam search, width {len(texts)}[/]",
        title_align="left",
        subtitle="score: mean log-probability per byte",
        subtitle_align="right",
        border_style="green",
    )


def _row(beam: Hypothesis) -> Text:
    """The beam's row of the page table, private pages marked."""
    parts = zip(beam.pages, beam.shared, strict=True)
    return Text(" ").join(Text(f"{page}", SHARED if held else PRIVATE) for page, held in parts)


def _pages(search: Search) -> Table:
    saved = search.pages_unshared / search.pages_in_use
    table = Table(
        title="Page table: slots of every beam's blocks",
        title_justify="left",
        title_style="bold",
        caption=f"{search.pages_in_use} pages hold what separate beams would keep in "
        f"{search.pages_unshared} ({saved:.1f}× less memory)",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        expand=True,
    )
    table.add_column("beam", justify="right")
    table.add_column(
        Text.assemble(("shared", SHARED), " and ", ("private", PRIVATE), " pages"), ratio=1
    )
    table.add_column("shared", justify="right", style=SHARED)
    table.add_column("private", justify="right", style=PRIVATE)
    for number, beam in enumerate(search.hypotheses):
        table.add_row(f"{number}", _row(beam), f"{beam.shared_pages}", f"{beam.private_pages}")
    return table


def _moved(search: Search) -> Table:
    paged, dense = search.paged_moved, search.dense_moved
    table = Table(
        title="Following the beams: bytes moved",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        expand=True,
    )
    table.add_column("cache", ratio=1)
    table.add_column("moved", justify="right")
    table.add_column("per step", justify="right")
    table.add_column("", justify="right")
    detail = f"kvcore: {paged.pages} page copies, {paged.cells} table cells"
    for name, count, style in (
        ("dense, all rows indexed with the parents", dense.bytes, ""),
        ("dense, only rows that change", dense.changed_bytes, ""),
        (detail, paged.bytes, "bold green"),
    ):
        ratio = f"{count / paged.bytes:.0f}×" if paged.bytes and count else ""
        table.add_row(name, size(count), size(count / search.check.steps), ratio, style=style)
    return table


def _verdict(report: Report) -> Panel:
    checks = (report.greedy.check, report.beam.check)
    steps, worst = sum(c.steps for c in checks), max(c.max_abs_diff for c in checks)
    if report.passed:
        exact = all(c.bit_equal for c in checks)
        how = "bit for bit" if exact else f"within {worst:.1e}"
        line = Text(f"✓ logits of all {steps} steps equal a dense cache's, {how}", style="bold green")
    else:
        line = Text(f"✗ logits differ from a dense cache's by up to {worst:.1e}", style="bold red")
    return Panel(
        Group(line, Text(f"{_speed(report)}; {report.seconds:.1f} s in all, dense runs included")),
        border_style="green" if report.passed else "red",
    )


def _speed(report: Report) -> str:
    searches = (report.greedy, report.beam)
    rates = [f"{s.generated / s.paged_seconds:,.0f}" for s in searches]
    dense = [f"{s.generated / s.dense_seconds:,.0f}" for s in searches]
    return (
        f"tokens/s: greedy {rates[0]} (dense {dense[0]}), "
        f"beam search {rates[1]} in all beams (dense {dense[1]})"
    )
