"""What `kvcore demo` shows while it works: two progress bars and the text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from kvcore.cli.show import printable
from kvcore.demo.run import Progress, Settings


@contextmanager
def watching(settings: Settings) -> Iterator[Callable[[Progress], None]]:
    """Gives what to call after every step; draws on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    view = _View(settings)
    with Live(console=console, get_renderable=view.render, refresh_per_second=15, transient=True):
        yield view.take


class _View:
    """The state behind the moving picture. `take` writes it, the drawing thread reads it."""

    def __init__(self, settings: Settings) -> None:
        self._prompt = printable(settings.prompt)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pages]} pages", style="cyan"),
            expand=True,
        )
        names = ("greedy", f"beam search, width {settings.beam_width}")
        self._tasks: list[TaskID] = [
            self._bars.add_task(name, total=settings.max_tokens, pages=0) for name in names
        ]
        self._current = 0
        self._text = ""

    def take(self, progress: Progress) -> None:
        """Takes in a step. The second search begins where the step number starts anew."""
        if progress.step == 1 and self._text:
            self._current = 1
        self._text = printable(progress.text)
        self._bars.update(self._tasks[self._current], completed=progress.step, pages=progress.pages)

    def render(self) -> Group:
        """The present picture."""
        text = Text.assemble((self._prompt, "bold"), self._text, ("▌", "cyan"))
        return Group(self._bars, Panel(text, border_style="dim", padding=(0, 1)))
