"""The `kvcore` command. Needs the `cli` extra and says so if it is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

EXTRA = ("typer", "rich", "safetensors", "matplotlib")
"""Packages of the `cli` extra, without which a command cannot do what it was asked to."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's) and returns its exit status.

    0: done; 1: the demo's check failed, or a benchmark missed its bar; 2: something about the call
    was wrong and one line on standard error says what; 130: interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that lacks a character shows ? instead of a traceback.
            stream.reconfigure(errors="replace")
    try:
        from kvcore.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        sys.stderr.write(f"kvcore: {package} is not installed; run: pip install 'kvcore[cli]'\n")
        return 2
