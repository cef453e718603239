"""Where and when a number was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "cuda-core", "cuda-bindings")
GPU_QUERY = "name,driver_version,memory.total"


def environment(command: str) -> dict[str, object]:
    """The stamp of a run of `command`. Names no host, user or path."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "gpus": gpus(),
    }


def commit() -> str:
    """The source's commit, `-dirty` with changes; `KVCORE_COMMIT` where there is no repository."""
    named = os.environ.get("KVCORE_COMMIT")
    return named or _output("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def cpu() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Name, driver and memory of each GPU, as `nvidia-smi` tells them."""
    found = _output("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    return found.splitlines()


def installed(package: str) -> str:
    """The version of a package, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """What a command prints, or nothing where it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    json.dump(environment("python -m bench.environment"), sys.stdout, indent=1)
    print()
