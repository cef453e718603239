"""What `import kvcore` costs a fresh process, bytecode warm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from bench.harness import Result, measure, timed

BAR_US = 300_000.0
CALLS = 10


def bench_import() -> Iterator[Result]:
    """Whole processes: interpreter start, import, exit. The rival imports NumPy alone."""
    ours = measure(_process("import kvcore"), calls=CALLS, warmup=2)
    rival = measure(_process("import numpy"), calls=CALLS, warmup=2)
    yield timed("import kvcore", ours, rival, against="import numpy", bar=BAR_US)


def _process(code: str):
    def run() -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    return run
