"""What the documentation shows is run: code blocks of Markdown files, doctests of every module."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.glob("kvcore/**/*.py")
    if path.name != "__main__.py"
)
OPTIONAL = (
    "cupy",
    "cuda",
    "torch",
    "jax",
    "typer",
    "rich",
    "safetensors",
    "matplotlib",
    "hypothesis",
)

NEEDS = {"transformers.md": {"torch": None, "transformers": "5.24"}}
"""What the code of a page imports besides kvcore and its dependencies, at least of a version."""

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_blocks_of_a_page_run(page, capsys):
    """All blocks of one page share their names, as a reader who types them in would."""
    for package, version in NEEDS.get(page.name, {}).items():
        reason = f"needs {package} {version or ''} (the interop extra)"
        pytest.importorskip(package, minversion=version, reason=reason)
    text = page.read_text("utf-8")
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1  # of the fence, so that tracebacks fit
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)
        check_shown_output(block.group(1), capsys.readouterr().out)


def check_shown_output(block: str, printed: str) -> None:
    """Compares what a block prints with the comments `# -> ...` at the end of its print lines."""
    shown = re.findall(r"^\s*print\(.*#\s*->\s*(.*?)\s*$", block, re.MULTILINE)
    assert not shown or [line.rstrip() for line in printed.splitlines()] == shown


def test_the_readme_has_code_that_shows_output():
    blocks = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    assert any("# ->" in block for block in blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(page):
    text = page.read_text("utf-8")
    targets = [*LINK.findall(text), *re.findall(r'src="([^":]+)"', text)]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of_a_module(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs the package {error.name}")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0
