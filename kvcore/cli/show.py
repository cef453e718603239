"""The finished demo on the terminal: panels and tables."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kvcore
from kvcore.demo.run import Hypothesis, Report, Search
from kvcore.demo.stores import TOKENS_PER_BLOCK

WIDEST = 100  # columns; wider lines are hard to read
ELLIPSIS = ("…", "dim")
SHARED, PRIVATE = "cyan", "bold yellow"


def printable(text: str) -> str:
    """`text` without characters that would move the terminal's cursor.

    >>> printable("a" + chr(27) + "[2Jb") == "a" + chr(0xFFFD) + "[2Jb"
    True
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def size(count: float) -> str:
    """Bytes for people.

    >>> size(191692800), size(3), size(48 * 1024)
    ('182.8 MiB', '3 B', '48.0 KiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "page"), plural(2, "page")
    ('1 page', '2 pages')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show(report: Report, console: Console | None = None) -> None:
    """Prints the report to standard output, or to `console`."""
    out = Console(highlight=False) if console is None else console
    out.width = min(out.width, WIDEST)
    prompt = printable(report.settings.prompt)
    out.print(_header(report))
    out.print(_greedy(prompt, report.greedy))
    out.print(_hypotheses(prompt, report.beam))
    out.print(_pages(report.beam))
    out.print(_moved(report.beam))
    out.print(_verdict(report))


def _panel(content: RenderableType, title: str, color: str, note: str | None = None) -> Panel:
    return Panel(
        content,
        title=f"[bold]{title}[/]",
        title_align="left",
        subtitle=note,
        subtitle_align="right",
        border_style=color,
        padding=(0, 1),
    )


def _table(*names: str) -> Table:
    """A table whose first column is wide and whose others hold numbers."""
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    for name in names:
        first = not table.columns
        table.add_column(name, ratio=1 if first else None, justify="left" if first else "right")
    return table


def _header(report: Report) -> Panel:
    shape, training = report.weights.shape, report.weights.training
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row(
        "model",
        f"byte-level decoder, {training['parameters'] / 1e6:.2f} M parameters, "
        f"{shape.layers} layers, {shape.heads} query heads on {shape.kv_heads} KV heads",
    )
    bits = training["held_out_bits_per_byte"]
    facts.add_row("text", f"{training['text']}; {bits:.2f} bits per byte on held-out chapters")
    facts.add_row("device", report.device)
    facts.add_row("pages", f"{TOKENS_PER_BLOCK} tokens, {size(report.beam.page_bytes)}")
    facts.columns[0].style = "dim"
    return _panel(facts, f"kvcore {kvcore.__version__} demo", "blue")


def _greedy(prompt: str, search: Search) -> Panel:
    best = search.hypotheses[0]
    text = Text.assemble((prompt, "bold"), printable(best.text), ELLIPSIS)
    return _panel(text, "greedy", "green", f"score {best.score:.3f}")


def _hypotheses(prompt: str, search: Search) -> Panel:
    """The best hypothesis in full colour; the others bright from where they leave it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    texts = [printable(beam.text) for beam in search.hypotheses]
    for number, (beam, text) in enumerate(zip(search.hypotheses, texts, strict=True)):
        score = Text(f"{beam.score:.3f}", "bold")
        if number == 0:
            table.add_row(score, Text.assemble((prompt, "bold"), text, ELLIPSIS))
        else:
            same = _equal(texts[0], text)
            shown = Text.assemble((prompt + text[:same], "dim"), text[same:], ELLIPSIS)
            table.add_row("")
            table.add_row(score, shown)
    title = f"beam search, width {len(texts)}"
    return _panel(table, title, "green", "score: mean log-probability per byte, nats")


def _equal(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _row(beam: Hypothesis) -> Text:
    """The beam's row of the page table, private pages marked."""
    parts = zip(beam.pages, beam.shared, strict=True)
    return Text(" ").join(Text(f"{page}", SHARED if held else PRIVATE) for page, held in parts)


def _pages(search: Search) -> Panel:
    table = _table("slots of each beam's blocks, first to last", "shared", "private")
    table.columns[1].style, table.columns[2].style = SHARED, PRIVATE
    for beam in search.hypotheses:
        table.add_row(_row(beam), f"{beam.shared_pages}", f"{beam.private_pages}")
    used, apart = search.pages_in_use, search.pages_unshared
    saved = f"{plural(used, 'page')} instead of {apart}: {apart / used:.1f}× less memory"
    return _panel(table, "page table", "cyan", saved if apart > used else None)


def _moved(search: Search) -> Panel:
    paged, dense, steps = search.paged_moved, search.dense_moved, search.check.steps
    table = _table("what following the beams moves", "bytes", "per step", "")
    detail = f"{plural(paged.pages, 'page')} copied, {plural(paged.cells, 'table cell')} written"
    for name, count, style in (
        ("dense cache, indexed with the parents", dense.bytes, ""),
        ("dense cache, only rows that change", dense.changed_bytes, ""),
        (f"kvcore: {detail}", paged.bytes, "bold green"),
    ):
        ratio = f"{count / paged.bytes:.0f}×" if paged.bytes and count else ""
        table.add_row(name, size(count), size(count / steps), ratio, style=style)
    return _panel(table, "bytes moved", "cyan")


def _verdict(report: Report) -> Panel:
    checks = (report.greedy.check, report.beam.check)
    steps, worst = sum(c.steps for c in checks), max(c.max_abs_diff for c in checks)
    if report.passed:
        how = "bit for bit" if all(c.bit_equal for c in checks) else f"within {worst:.1e}"
        line = Text(f"✓ the logits of all {steps} steps equal a dense cache's, {how}", "bold green")
    else:
        line = Text(f"✗ logits differ from a dense cache's by up to {worst:.1e}", "bold red")
    table = _table("tokens/s", "kvcore", "dense")
    for name, search in (("greedy", report.greedy), ("beam search, all beams", report.beam)):
        rates = (search.generated / s for s in (search.paged_seconds, search.dense_seconds))
        table.add_row(name, *(f"{rate:,.0f}" for rate in rates))
    remark = Text(
        "The demo's attention is array code, so it gathers the pages first; a paged kernel reads "
        "them in place.",
        "dim",
    )
    note = f"{report.seconds:.1f} s in all"
    return _panel(Group(line, table, remark), "check", "green" if report.passed else "red", note)
