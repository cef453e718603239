"""What `.ci/run` asks of its own results: `skips XML`, `summary XML`, `wheel SOURCE WHEEL`."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

REQUIRED = ("tests.test_architecture", "tests.test_kernel_compile", "tests.test_docs")
"""Test files that must have run, without a skip."""

DATA = (".cu", ".cuh", ".safetensors", ".py", ".typed")
EXCUSES = re.compile(
    "needs a (second )?GPU|of free device memory|needs the Mooncake traces"
    "|needs (tensorflow|tinygrad)"
)
"""What a machine may lack. TensorFlow is larger than everything else, and tinygrad needs clang."""


def skips(report: str) -> list[str]:
    """Complains about files of which no test ran, and skips without an excuse."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [
        f"{name}: no test of it ran" for name in REQUIRED if not any(ran(c, name) for c in cases)
    ]
    for case in cases:
        skip = case.find("skipped")
        if skip is not None:
            message = skip.get("message", "")
            if not EXCUSES.search(message):
                wrong.append(f"{case.get('classname')}::{case.get('name')} skipped: {message}")
    return wrong


def ran(case: ElementTree.Element, file: str) -> bool:
    """Whether a case is of this test file and was not skipped."""
    return case.get("classname", "").startswith(file) and case.find("skipped") is None


def summary(report: str) -> list[str]:
    """Prints pytest's counts once more as the closing line."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    print(f"{passed} passed, {bad} failed, {count['skipped']} skipped")
    return [] if passed else ["no test passed"]


def wheel(source: str, path: str) -> list[str]:
    """Complains about library files that did not get into the wheel."""
    root = Path(source)
    packed = set(zipfile.ZipFile(path).namelist())
    folders = ((root, "kvcore"), (root / "adapters", "kvcore_adapters"))
    wanted = {
        file.relative_to(base).as_posix()
        for base, package in folders
        for file in (base / package).rglob("*")
        if file.suffix in DATA
    }
    print(f"{len(packed)} files in {Path(path).name}, {len(wanted)} of them checked")
    return [f"not in the wheel: {name}" for name in sorted(wanted - packed)]


if __name__ == "__main__":
    complaints = {"skips": skips, "summary": summary, "wheel": wheel}[sys.argv[1]](*sys.argv[2:])
    print(*complaints, sep="\n", end="\n" if complaints else "")
    sys.exit(1 if complaints else 0)
