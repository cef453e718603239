"""The commands and their options. What they need is imported as they run: help is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import kvcore
from kvcore.cli import EXTRA
from kvcore.cli.replay import command as replay
from kvcore.errors import KVCoreError

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; an error is one line on standard error."""
    given = None if arguments is None else list(arguments)
    try:
        status = typer.main.get_command(make_app()).main(
            given, prog_name="kvcore", standalone_mode=False
        )
    except (ValueError, ImportError, KVCoreError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in EXTRA:
            raise
        return complain(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("kvcore: interrupted\n")
        return 130
    except Exception as error:
        # Typer's usage errors: their class moved between releases, their `format_message` did not.
        if not hasattr(error, "format_message"):
            raise
        return complain(error.format_message())
    return status if isinstance(status, int) else 0


def complain(error: object) -> int:
    """Writes one line about `error` to standard error. The exit status of a wrong call."""
    sys.stderr.write(f"kvcore: {' '.join(str(error).split())}\n")
    return 2


def make_app() -> typer.Typer:
    """The command line."""
    app = typer.Typer(
        name="kvcore",
        help="Paged KV caches for LLM inference.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(top)
    app.command("demo")(demo)
    app.command("replay")(replay)
    app.command("bench", context_settings=PASS_ON, add_help_option=False)(bench)
    return app


def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Paged KV caches for LLM inference, on a GPU or on the host."""
    if version:
        typer.echo(f"kvcore {kvcore.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def demo(
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "Let not your heart",
    beam_width: Annotated[int, typer.Option(help="Hypotheses the beam search follows.")] = 4,
    device: Annotated[str, typer.Option(help="auto, host, cuda or cuda:N.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Bytes to generate.")] = 160,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Completes a prompt with a small decoder whose K/V live in kvcore pages.

    Greedily and by beam search, in NumPy or CuPy, every step checked against a dense cache.
    """
    from kvcore.cli.live import watching
    from kvcore.cli.show import show
    from kvcore.demo.report import as_json as document
    from kvcore.demo.run import Settings, run_demo

    settings = Settings(prompt=prompt, beam_width=beam_width, max_tokens=max_tokens, device=device)
    with watching(settings) as on_step:
        report = run_demo(settings, on_step)
    if as_json:
        typer.echo(document(report))
    else:
        show(report)
    return 0 if report.passed else 1


def bench(context: typer.Context) -> int:
    """Runs the benchmarks of a source checkout: `kvcore bench --help` lists them."""
    root = Path(kvcore.__file__).parents[1]
    if not (root / "bench" / "__main__.py").is_file():
        raise KVCoreError(
            "bench: the benchmarks are not installed, they live in the source tree; clone the "
            "repository and run `pip install -e .` there"
        )
    sys.path.insert(0, str(root))
    try:
        status = importlib.import_module("bench.__main__").main(context.args)
    finally:
        sys.path.remove(str(root))
    return int(status)
