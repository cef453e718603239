"""The command line: exit statuses, one-line errors, what reaches which stream."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("safetensors")

import kvcore
from kvcore.cli import app, main

ROOT = Path(__file__).parents[1]
SHORT = ["demo", "--device", "host", "--max-tokens", "5"]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcore {kvcore.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "bench" in out


def test_json_is_the_only_thing_on_standard_output(capsys):
    assert main([*SHORT, "--json", "--beam-width", "2"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert out.count("\n") == len(out.splitlines())
    assert document["settings"] == {
        "prompt": "Let not your heart",
        "beam_width": 2,
        "max_tokens": 5,
        "device": "host",
    }
    assert document["check"]["passed"] is True
    assert err == ""


def test_the_report_for_people_shows_every_part(capsys):
    assert main([*SHORT, "--prompt", "In the beginning God "]) == 0
    out, err = capsys.readouterr()
    for part in ("greedy", "beam search, width 4", "page table", "bytes moved", "tokens/s"):
        assert part in out
    assert out.count("In the beginning God") == 5
    assert "✓ the logits of all 10 steps equal a dense cache's" in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["demo", "--device", "tpu"], ["device", "tpu"]),
        (["demo", "--device", "meta"], ["device", "memory", "meta"]),
        (["demo", "--device", "host", "--beam-width", "0"], ["beam-width", "[1, 32]", "0"]),
        (["demo", "--device", "host", "--beam-width", "33"], ["beam-width", "33"]),
        (["demo", "--device", "host", "--max-tokens", "0"], ["max-tokens", "at least 1"]),
        (["demo", "--device", "host", "--max-tokens", "500"], ["prompt", "512", "18 bytes"]),
        (["demo", "--device", "host", "--prompt", ""], ["prompt", "at least one character"]),
        (["demo", "--beam-width", "many"], ["--beam-width"]),
        (["demo", "--nope"], ["--nope"]),
        (["frobnicate"], ["frobnicate"]),
        (["bench", "frobnicate"], ["frobnicate"]),
    ],
)
def test_a_wrong_call_is_one_clear_line_and_status_2(arguments, names, capsys):
    status = exit_status(arguments)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert arguments[0] == "bench" or (err.count("\n") == 1 and err.startswith("kvcore: "))
    assert all(name in last for name in names)


def exit_status(arguments):
    """The benchmarks' own parser leaves by `SystemExit`, as parsers do."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("package", ["typer", "rich", "safetensors"])
def test_a_missing_package_is_named_with_the_remedy(package, monkeypatch, capsys):
    def without(name, *rest, **named):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest, **named)

    real = builtins.__import__
    for module in [m for m in sys.modules if m.startswith(("kvcore.cli.", "kvcore.demo."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(SHORT) == 2
    assert capsys.readouterr().err == (
        f"kvcore: {package} is not installed; run: pip install 'kvcore[cli]'\n"
    )


def test_bench_passes_its_arguments_and_status_on(monkeypatch):
    import bench.__main__

    seen = []
    monkeypatch.setattr(bench.__main__, "main", lambda given: seen.append(given) or 1)
    assert main(["bench", "control", "--json", "x.json", "--help"]) == 1
    assert seen == [["control", "--json", "x.json", "--help"]]


def test_bench_without_a_source_tree_says_where_it_lives(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kvcore, "__file__", str(tmp_path / "kvcore" / "__init__.py"))
    assert main(["bench"]) == 2
    assert "source tree" in capsys.readouterr().err


def test_a_failed_check_is_status_1(monkeypatch, capsys):
    from kvcore.demo.model import Decoder

    right = Decoder.step

    def wrong(self, tokens, store):
        logits = right(self, tokens, store)
        return logits if type(store).__name__ == "PagedStore" else logits + 1e-3

    monkeypatch.setattr(Decoder, "step", wrong)
    assert main(SHORT) == 1
    assert "✗ logits differ from a dense cache's by up to 1.0e-03" in capsys.readouterr().out


def test_an_interrupt_is_status_130(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvcore.demo.run, "run_demo", interrupt)
    assert main(SHORT) == 130


def test_a_terminal_without_the_characters_gets_replacements():
    done = subprocess.run(
        [sys.executable, "-m", "kvcore.cli", *SHORT],
        capture_output=True,
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert b"? the logits of all 10 steps" in done.stdout
    assert done.stderr == b""


def test_help_is_fast_because_it_imports_little():
    code = """
import sys
before = set(sys.modules)  # path files of installed packages may have imported some
from kvcore.cli import main
main(["--version"])
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert loaded.isdisjoint({"cupy", "cuda", "safetensors", "matplotlib", "torch"})


def test_control_characters_do_not_reach_the_terminal():
    from kvcore.cli.show import printable

    assert printable("In\x1b[31m the\r\nbeginning\x07é") == "In�[31m the�\nbeginning�é"


def test_the_default_prompt_is_written_down_once():
    from inspect import signature

    from kvcore.demo.run import Settings

    options = {name: p.default for name, p in signature(app.demo).parameters.items()}
    del options["as_json"]
    assert Settings(**options) == Settings()
