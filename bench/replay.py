"""`kvcore replay` of recorded traffic as whole processes, from start to exit.

The traces are Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST'25 release); they lie beside
a checkout or in the folder that `KVCORE_TRACES` names. No rival replays them through its manager
here. What is quoted is the time that vLLM 0.33 takes to hash as many tokens (blocks of 16, SHA-256,
15.9 ms for 128k tokens on two CPU cores), which comes before each of its look-ups.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.harness import Result

VLLM_HASH_SECONDS_PER_TOKEN = 15.9e-3 / 131_072
"""vLLM 0.33, median at 128k tokens; not measured in the run it is quoted in."""

MEMORY_BAR_GIB = 1.5


def find_trace(name: str) -> Path | None:
    """The file of a Mooncake trace, or None where it is not."""
    folder = Path(os.environ.get("KVCORE_TRACES") or ROOT.parent / "shared" / "data")
    path = folder / f"mooncake_{name}_trace.jsonl"
    return path if path.is_file() else None


def bench_conversation() -> Iterator[Result]:
    """12,031 requests, 145M prompt tokens, T=16, 256 at a time."""
    yield from whole_process("conversation", "never evicts", bar=12.0)
    yield from whole_process("conversation", "2M tokens", "--capacity-tokens", "2000000", bar=15.0)


def bench_synthetic() -> Iterator[Result]:
    """3,993 requests, 61M prompt tokens, T=16, 256 at a time."""
    yield from whole_process("synthetic", "never evicts")


def whole_process(
    trace: str, title: str, *options: str, bar: float | None = None
) -> Iterator[Result]:
    """The wall clock and the memory of one process. Nothing where the trace is not there."""
    path = find_trace(trace)
    if path is None:
        print(f"\n{trace}: left out, needs the Mooncake traces (KVCORE_TRACES=FOLDER)")
        return
    seconds, document = run(path, "--tokens-per-block", "16", "--max-running", "256", *options)
    replay, name = document["replays"][0], f"replay {trace}, {title}"
    facts = ("requests", "tokens", "hit_share", "preemptions", "evicted_pages")
    hashing = VLLM_HASH_SECONDS_PER_TOKEN * replay["tokens"]
    yield Result(
        name=f"{name}: {replay['tokens'] / seconds / 1e6:.1f} M tokens/s",
        value=seconds,
        unit="s",
        ratio=hashing / seconds,
        against="vLLM 0.33 hashing the prompts, quoted",
        bar=bar,
        ok=None if bar is None else seconds <= bar,
        meta={
            "tokens_per_second": replay["tokens"] / seconds,
            "replay_seconds": replay["seconds"],
            **{fact: replay[fact] for fact in facts},
        },
    )
    memory = replay["peak_memory_bytes"] / 2**30
    limit = None if bar is None else MEMORY_BAR_GIB
    yield Result(
        name=f"{name}: memory",
        value=memory,
        unit="GiB",
        bar=limit,
        ok=None if limit is None else memory <= limit,
    )


def run(path: Path, *options: str) -> tuple[float, Any]:
    """Seconds of `kvcore replay` as a process of its own, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "replay.json")
        command = [sys.executable, "-m", "kvcore.cli", "replay", path, *options, "--json", out]
        begun = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
        return seconds, json.loads(out.read_text("utf-8"))
