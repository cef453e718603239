"""House rules read from the source: who may import whom, sizes, asserts, paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("kvcore/**/*.py"), *ROOT.glob("adapters/kvcore_adapters/**/*.py")])

LAYERS = (
    {"kvcore.ids", "kvcore.errors"},
    {"kvcore.checks"},
    {"kvcore.layer_config", "kvcore.tokens"},
    {"kvcore.config"},
    {"kvcore.layout", "kvcore.keys", "kvcore.retention", "kvcore.dlpack"},
    {"kvcore.plan"},
    {"kvcore.control", "kvcore.device"},
    {"kvcore"},  # the manager, its caches and batches: every module that has no other place
    {"kvcore.testing", "kvcore.demo", "kvcore.replay"},
    {"kvcore.cli", "kvcore_adapters"},
)
"""From the bottom up. A module may import modules of lower layers and of its own package."""

RANKS = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

ALLOWED_PACKAGES = {
    "kvcore.device.cuda": {"numpy", "cupy", "cupyx", "cuda"},
    "kvcore.demo": {"numpy", "safetensors"},
    "kvcore.demo.train": {"numpy", "safetensors", "torch"},
    "kvcore.cli": {"numpy", "typer", "rich", "safetensors", "matplotlib", "bench"},
    "kvcore.publisher": {"numpy", "zmq", "msgspec"},
    "kvcore_adapters": {"numpy", "torch", "jax", "transformers", "cupy"},
}
"""Packages beyond the standard library, by the longest prefix of the module; others have NumPy."""


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    base = ROOT / "adapters" if path.is_relative_to(ROOT / "adapters") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_prefix(module: str, names: object) -> str | None:
    """The longest of `names` that is `module` or a package around it."""
    parts = module.split(".")
    candidates = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in candidates if name in names), None)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every module that a source imports, at its top or inside functions, in absolute names.

    `from a import b` counts as `a.b` where that is a layer or a module of ours, else as `a`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, base]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if is_ours(name) else base for name in names)


def is_ours(name: str) -> bool:
    """Whether `name` is a module of this project (not an attribute of one)."""
    root = ROOT / "adapters" if name.startswith("kvcore_adapters") else ROOT
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a source imports against the rules, as `module -> target`."""
    layer = longest_prefix(module, RANKS)
    allowed = ALLOWED_PACKAGES.get(longest_prefix(module, ALLOWED_PACKAGES), {"numpy"})
    wrong = []
    for target in imports(ast.parse(source), module, is_package):
        top = target.split(".")[0]
        if top not in ("kvcore", "kvcore_adapters"):
            fine = top in sys.stdlib_module_names or top in allowed
        else:
            to = longest_prefix(target, RANKS)
            fine = to == layer or RANKS[to] < RANKS[layer]
            # The CUDA device is opened by its package alone, and by name.
            inside = module == "kvcore.device" or module.startswith("kvcore.device.cuda")
            fine = fine and (inside or not target.startswith("kvcore.device.cuda"))
        if not fine:
            wrong.append(f"{module} -> {target}")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_follow_the_arrows(path):
    module = module_name(path)
    is_package = path.name == "__init__.py"
    assert wrong_arrows(path.read_text("utf-8"), module, is_package=is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcore.control.slots", "from kvcore.device import base"),
        ("kvcore.control.slots", "from ..device.base import Device"),
        ("kvcore.control.slots", "from kvcore.manager import KVCacheManager"),
        ("kvcore.control.slots", "import scipy"),
        ("kvcore.device.host", "from kvcore.control.slots import SlotTable"),
        ("kvcore.device.host", "def f():\n    import cupy"),
        ("kvcore.device.host", "def f():\n    from cuda.core import Device"),
        ("kvcore.manager", "from kvcore.device.cuda.device import CudaDevice"),
        ("kvcore.manager", "from kvcore.testing import check"),
        ("kvcore.config", "from kvcore import layout"),
        ("kvcore.ids", "import kvcore"),
        ("kvcore.testing.check", "import kvcore.cli"),
        ("kvcore.cli", "import torch"),
        ("kvcore.demo.model", "import cupy"),
        ("kvcore.demo.model", "import kvcore_adapters"),
    ],
)
def test_a_wrong_arrow_is_found(module, source):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcore.control.slots", "import bisect\nimport numpy as np\nfrom ..ids import NO_SLOT"),
        ("kvcore.control.slots", "from . import demand\nfrom kvcore.plan import Plan"),
        ("kvcore.device.cuda.device", "import cupy\nfrom cuda.bindings import driver"),
        ("kvcore.batch", "from .kv_cache import KVCache\nfrom .device import open_device"),
        ("kvcore.testing.check", "import kvcore\nfrom kvcore import KVCache"),
        ("kvcore_adapters.torch", "import torch\nimport kvcore"),
    ],
)
def test_a_right_arrow_is_not(module, source):
    assert wrong_arrows(source, module) == []


def test_importing_kvcore_imports_numpy_alone():
    code = """
import sys
before = set(sys.modules)  # path files of installed packages may have imported some
import kvcore
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    installed = set(out.stdout.split()) - set(sys.stdlib_module_names)
    assert installed == {"kvcore", "numpy"}


def test_public_objects_are_documented():
    import kvcore

    public = {name: getattr(kvcore, name) for name in kvcore.__all__}
    public |= {
        f"{name}.{attribute}": member
        for name, value in public.items()
        if isinstance(value, type)
        for attribute, member in vars(value).items()
        if not attribute.startswith("_")
    }
    needs_docs = (type, property, classmethod, staticmethod, FunctionType)
    missing = [n for n, v in public.items() if isinstance(v, needs_docs) and not v.__doc__]
    assert missing == []


# -- sizes, asserts, paths -------------------------------------------------------------------------

SUFFIXES = {".py", ".cu", ".cuh", ".md", ".toml", ".yaml", ".sh", ".svg", ".json", ""}
FOLDERS = ("kvcore", "adapters", "tests", "bench", "examples", "docs", ".ci")
FILES = sorted(
    path
    for path in [*ROOT.glob("*"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
    if path.name != ".git"  # a file in a linked worktree
)


def test_no_code_file_is_longer_than_400_lines():
    code = [path for path in FILES if path.suffix in {".py", ".cu", ".cuh"}]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in code}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert len(lengths) > 10


def test_no_function_is_longer_than_40_lines():
    """Without its docstring, which may be as long as it needs to be."""
    found = {}
    for path in (path for path in FILES if path.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node, clean=False) is not None
                docs = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
                lines = node.end_lineno - node.lineno + 1 - docs
                if lines > 40:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert found == {}


def test_no_bare_assert_guards_the_library():
    """`python -O` removes asserts; only the oracle, which is a test, may use them."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if not module_name(path).startswith("kvcore.testing")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_file_names_a_path_of_somebodys_machine():
    folders = "|".join(("work", "opt", "home", "root", "Users", "tmp", "mnt"))
    path_of_a_machine = re.compile(rf"(?<![\w.:/-])/(?:{folders})/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if path_of_a_machine.search(line)
    ]
    assert found == []
