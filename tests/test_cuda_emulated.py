"""The CUDA device on a driver that needs no GPU: the battery, and what the driver can do to it.

Runs in processes of their own, which load the fake driver instead of a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.kernels import build

HERE = Path(__file__).parent
ROOT = HERE.parent
FAKE = HERE / "emulated" / "fake_cuda.cpp"


@cache
def address_sanitizer() -> str:
    """The library that has to be loaded first for `-fsanitize=address`, if there is one."""
    query = [str(build.compiler()), "-print-file-name=libasan.so"]
    found = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else ""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that finds the fake driver."""
    libraries = os.pathsep.join([str(folder), *os.environ.get("LD_LIBRARY_PATH", "").split(":")])
    found = {**os.environ, "LD_LIBRARY_PATH": libraries.rstrip(":")}
    found |= {"KVCORE_EMULATED": str(folder), **more}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> dict[str, str]:
    """Builds driver and kernels, with every sanitizer that works here; gives the environment."""
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    if find_spec("cupy") is None or find_spec("cuda") is None:
        pytest.skip("needs CuPy and cuda-python")
    folder = tmp_path_factory.mktemp("emulated")
    driver = [str(build.compiler()), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    driver += ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(FAKE), "-ldl"]
    subprocess.run([*driver, "-o", str(folder / "libcuda.so.1")], check=True)
    probe = [
        sys.executable,
        "-c",
        "from tests.emulated import driver; driver.shared_object('kernels.so')",
    ]
    if address_sanitizer():
        build.build(folder, build.tuned(), *build.CHECKS, "-fsanitize=address")
        options = {"LD_PRELOAD": address_sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
        variables = environment(folder, **options)
        if subprocess.run(probe, env=variables, cwd=ROOT, capture_output=True).returncode == 0:
            return variables
    build.build(folder, build.tuned(), *build.CHECKS)
    return environment(folder)


@pytest.fixture(scope="module")
def runs(request, emulated) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """The suites that are asked for, on their way in as many processes as there are cores."""
    here = [item for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        suites = [item.callspec.params["suite"] for item in here]
        yield {suite: pool.submit(run, suite, emulated) for suite in suites}


def run(suite: str, variables: dict[str, str]) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command.append(str(HERE / "emulated" / f"{suite}.py"))
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "suite",
    ["beams", "battery", "formats", "work", "interop", "leases", "memory", "streams", "walks"],
)
def test_on_the_fake_driver(runs, suite):
    done = runs[suite].result()
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "runtime error" not in text, text  # of the sanitizer for undefined behaviour
    assert " passed" in text
    assert "skipped" not in text
