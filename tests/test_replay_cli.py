"""`kvcore replay`: what it prints, what it writes, how it complains."""

from __future__ import annotations

import builtins
import io
import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from kvcore.cli import main
from tests.test_replay import line


@pytest.fixture
def trace(tmp_path):
    """Two turns of a chat, and one that shares its system prompt: 512 tokens found twice."""
    file = tmp_path / "chat.jsonl"
    file.write_bytes(
        line(0, 513, 8, [0, 1])
        + line(1000, 1200, 8, [0, 1, 2])
        + line(2000, 1024, 8, [0, 3])
        + line(60_000, 100, 8, [4])
    )
    return str(file)


def test_the_table_shows_what_was_found(trace, capsys):
    assert main(["replay", trace, "--tokens-per-block", "64"]) == 0
    out, err = capsys.readouterr()
    rows = [row.split("│") for row in out.splitlines()]
    cells = {row[1].strip(): row[2].strip() for row in rows if len(row) > 2}
    assert out.startswith("chat.jsonl, 64 tokens per block")
    assert cells["requests"] == "4"
    assert cells["prompt tokens"] == "2,837"
    assert cells["found in the cache"] == "1,024"
    assert cells["share"] == "36.094%"
    assert (cells["blocks of 512"], cells["found in full"]) == ("8", "2")
    assert cells["capacity, tokens"] == "never evicts"
    assert err == ""


def test_a_comparison_has_a_column_each_and_the_document_a_replay_each(trace, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--compare", "heads-first, none", "--capacity-tokens", "2048", "--limit", "3"]
    assert main(["replay", trace, *options, "--json", str(out)]) == 0
    heads = capsys.readouterr().out.splitlines()[2]
    assert heads.index("heads-first") < heads.index("none")
    document = json.loads(out.read_text())
    first, second = document["replays"]
    assert document["trace"] == trace
    assert [r["settings"]["policy"] for r in document["replays"]] == ["heads-first", "none"]
    assert (first["requests"], first["tokens"], first["hit_tokens"]) == (3, 2737, 1024)
    assert (second["hit_tokens"], second["capacity_tokens"]) == (0, 2048)
    assert [sample["time"] for sample in second["samples"]] == [0, 1, 2]


def test_full_blocks_are_counted_whole(trace, tmp_path):
    out = tmp_path / "out.json"
    options = ["--full-blocks", "--tokens-per-block", "512", "--max-running", "1"]
    assert main(["replay", trace, *options, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["replays"][0]
    assert (found["blocks"], found["hit_blocks"], found["tokens"]) == (8, 3, 8 * 512)


@pytest.mark.parametrize("capacity", [[], ["--capacity-tokens", "2048"]])
def test_the_picture_is_a_png(trace, tmp_path, capacity):
    file = tmp_path / "picture"
    assert main(["replay", trace, "--compare", "lru,none", *capacity, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_terminal_sees_a_bar_with_rate_and_remaining_time(trace, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["replay", trace, "--policy", "prompts-first"]) == 0
    shown = screen.getvalue()
    assert "prompts-first" in shown
    assert "M tokens/s" in shown
    assert "requests/s" in shown
    assert "100%" in shown
    assert "0:00:00" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "fifo"], ["policy", "lru, prompts-first", "fifo"]),
        (["--compare", "lru,fifo"], ["compare", "fifo"]),
        (["--compare", "lru,lru"], ["compare", "once"]),
        (["--capacity-tokens", "1024"], ["capacity-tokens", "at least 1232", "line 2", "1024"]),
        (["--capacity-tokens", "0"], ["capacity-tokens", "at least 1"]),
        (["--max-running", "0"], ["max-running", "at least 1"]),
        (["--tokens-per-block", "0"], ["tokens-per-block", "at least 1"]),
        (["--limit", "0"], ["limit", "at least 1"]),
        (["--device", "tpu"], ["device", "tpu"]),
        (["--json", "no/such/folder/file"], ["json", "a folder that exists", "no/such/folder"]),
        (["--plot", "."], ["plot", "a file"]),
        (["--limit", "many"], ["--limit", "integer"]),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(trace, options, words, capsys):
    assert main(["replay", trace, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcore: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words)


def test_a_wrong_line_is_named_with_file_and_field(tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(line(0, 513, 8, [0, 1]) + line(1, 513, 8, [0]))
    assert main(["replay", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"{file}, line 2, hash_ids: expected 2 ids" in err


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["replay", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_after_the_table(
    trace, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert main(["replay", trace, "--json", str(tmp_path / "out.json")]) == 2
    out, err = capsys.readouterr()
    assert "requests" in out
    assert err == f"kvcore: {tmp_path}/out.json: cannot be written: No space left on device\n"


def test_missing_matplotlib_is_said_before_the_work(trace, tmp_path, monkeypatch, capsys):
    def without(name, *rest, **named):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["replay", trace]) == 0
    capsys.readouterr()
    assert main(["replay", trace, "--plot", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvcore: matplotlib is not installed; run: pip install 'kvcore[cli]'\n"


@pytest.mark.parametrize("device", ["host", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_devices_agree(trace, device, tmp_path):
    out = tmp_path / "out.json"
    assert main(["replay", trace, "--device", device, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["replays"][0]["hit_tokens"] == 1024
