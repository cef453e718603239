"""The benchmark harness: what is on the clock, how it is judged, what is written down."""

from __future__ import annotations

import gc
import itertools
import json
import sys

import pytest

import bench.__main__ as program
from bench.environment import environment
from bench.harness import Case, Result, measure, number, report, run_case, table, timed
from bench.rival import PlainManager


class Clock:
    """A clock of nanoseconds that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_only_the_function_is_on_the_clock():
    clock = Clock()
    steps = itertools.count(1)

    def setup() -> int:
        clock.now += 1_000_000
        return next(steps)

    def fn(step: int) -> None:
        clock.now += step * 1_000

    stats = measure(fn, calls=11, warmup=4, setup=setup, clock=clock)
    assert (stats.p10, stats.median, stats.p90, stats.n) == (6.0, 10.0, 14.0, 11)  # of 5 to 15 µs


def test_garbage_collection_is_off_while_measuring_and_back_on_after_an_error():
    seen = []

    def fn() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise KeyError

    with pytest.raises(KeyError):
        measure(fn, calls=5, warmup=0)
    assert seen == [False] * 3
    assert gc.isenabled()


def test_a_call_that_did_not_do_its_work_is_not_timed():
    with pytest.raises(RuntimeError, match="call 0: the timed function returned False"):
        measure(lambda: False, calls=1, warmup=0)


def test_a_case_is_compared_with_its_rival_and_closed():
    closed = []
    case = Case(
        name="x",
        fn=lambda value: value,
        setup=lambda: 7,
        rival=lambda: None,
        against="nothing",
        bar=1e9,
        calls=3,
        warmup=0,
        meta={"size": 4},
        close=lambda: closed.append(True),
    )
    result = run_case(case)
    assert closed == [True]
    assert (result.name, result.unit, result.against, result.ok) == ("x", "µs", "nothing", True)
    assert result.ratio == pytest.approx(result.meta["rival_us"] / result.value)
    assert (result.meta["size"], result.meta["calls"]) == (4, 3)


def test_a_missed_bar_is_said():
    clock = Clock()

    def fn() -> None:
        clock.now += 60_000

    stats = measure(fn, calls=3, warmup=0, clock=clock)
    results = [timed("slow", stats, bar=50.0), timed("fine", stats, bar=60.0), timed("free", stats)]
    assert [result.ok for result in results] == [False, True, None]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table(results).splitlines()
    ]
    assert cells[0] == ["benchmark", "value", "p10 to p90", "ratio", "against", "bar", ""]
    assert cells[2] == ["slow", "60.0 µs", "60.0 to 60.0", "", "", "50.0", "MISSED"]
    assert cells[3] == ["fine", "60.0 µs", "60.0 to 60.0", "", "", "60.0", "ok"]
    assert cells[4] == ["free", "60.0 µs", "60.0 to 60.0", "", "", "", ""]
    assert len({len(line) for line in table(results).splitlines()}) == 1


def test_a_dictionary_becomes_a_result_and_keeps_what_it_does_not_know():
    given = {"name": "copy", "value": 3.9, "unit": "TB/s", "ratio": 0.94, "bar": 0.93, "sms": 132}
    result = Result.of({**given, "ok": True, "meta": {"bar_on": "ratio"}})
    assert (result.name, result.ratio, result.ok) == ("copy", 0.94, True)
    assert result.meta == {"bar_on": "ratio", "sms": 132}
    assert "0.930×" in table([result])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (5.678, "5.68"),
        (9.999, "10.0"),
        (99.96, "100"),
        (1410, "1410"),
    ],
)
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text


def test_the_environment_is_stamped():
    stamp = environment("python -m bench control")
    assert stamp["command"] == "python -m bench control"
    assert stamp["python"].split()[1] == sys.version.split()[0]
    assert stamp["packages"]["numpy"].count(".") >= 1
    assert {"date", "commit", "cpu", "cores", "system", "gpus"} <= stamp.keys()
    assert all(value for key, value in stamp.items() if key != "gpus")
    json.dumps(stamp)


def test_the_commit_can_be_named_where_there_is_no_repository(monkeypatch):
    monkeypatch.setenv("KVCORE_COMMIT", "abc123")
    assert environment("")["commit"] == "abc123"


@pytest.fixture
def suite(monkeypatch):
    """Replaces the benchmarks by one of each kind; returns the names of those that ran."""
    ran = []

    def bench_case() -> Case:
        ran.append("case")
        return Case(name="a case", fn=lambda: None, calls=2, warmup=0, bar=0.0)

    def bench_many():
        ran.append("many")
        yield {"name": "a dictionary", "value": 1.0, "unit": "GB/s"}
        yield Result(name="a result", value=2.0, unit="GB/s")

    monkeypatch.setattr(program, "functions", lambda name: [bench_case, bench_many])
    return ran


def test_the_program_prints_a_table_and_writes_json(suite, tmp_path, capsys):
    path = tmp_path / "new" / "run.json"
    assert program.main(["control", "--json", str(path)]) == 0
    assert suite == ["case", "many"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("| a case", "| a dictionary", "| a result"))
    assert "bars missed: a case" in printed
    stored = json.loads(path.read_text("utf-8"))
    assert [result["name"] for result in stored["results"]] == [
        "a case",
        "a dictionary",
        "a result",
    ]
    assert stored["environment"]["command"].startswith("python -m bench control --json")


def test_a_missed_bar_fails_a_checked_run(suite):
    assert program.main(["control", "--check"]) == 1
    assert program.main(["control", "--check", "--filter", "many"]) == 0
    assert suite == ["case", "many", "many"]


def test_a_benchmark_that_raises_is_told_and_stops_no_other(suite, monkeypatch, tmp_path, capsys):
    fine = program.functions("")

    def bench_broken():
        raise ValueError("no pages")

    monkeypatch.setattr(program, "functions", lambda name: [bench_broken, *fine])
    path = tmp_path / "run.json"
    assert program.main(["control", "--json", str(path)]) == 1
    assert suite == ["case", "many"]
    assert "bench_broken failed:\nTraceback" in capsys.readouterr().out
    stored = json.loads(path.read_text("utf-8"))
    assert stored["errors"] == {"bench_broken": "ValueError: no pages"}
    assert len(stored["results"]) == 3


def test_what_needs_a_gpu_says_so(suite, monkeypatch, capsys):
    monkeypatch.setattr(program, "gpu", lambda: None)
    assert program.main(["kernels", "streams"]) == 0
    assert suite == []
    assert capsys.readouterr().out.count("left out, needs a GPU") == 2


def test_an_unknown_suite_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(["everything"])
    assert caught.value.code == 2
    assert "unknown suite 'everything'" in capsys.readouterr().err


def test_a_device_is_passed_to_benchmarks_that_take_one(monkeypatch):
    monkeypatch.setattr(
        program, "functions", lambda name: [lambda device: {"name": device, "value": 1, "unit": ""}]
    )
    for function in program.functions(""):
        function.__name__ = "bench_x"
    (result,) = program.run_suite("kernels", "the device", "", {})
    assert result.name == "the device"


def test_the_report_holds_plain_values():
    text = json.dumps(
        report([Result(name="x", value=1.0, unit="µs", meta={"n": 1})], {"cpu": "y"}, {})
    )
    assert json.loads(text)["results"][0]["meta"] == {"n": 1}


def test_the_rival_keeps_the_contract():
    rival = PlainManager(pages=4, tokens_per_block=4, rows=2, blocks=3)
    for key in (0, 1):
        rival.create(key)
    assert rival.advance([0, 1], 4)
    assert rival.table.tolist() == [[3, -1, -1], [2, -1, -1]]
    assert rival.advance([0, 1], 1)
    assert rival.table.tolist() == [[3, 1, -1], [2, 0, -1]]
    assert not rival.advance([0, 1], 4)
    with pytest.raises(ValueError, match="twice"):
        rival.advance([0, 0], 1)
    assert [rival.sequences[key].capacity for key in (0, 1)] == [5, 5]
    rival.truncate([0, 1], 4)
    assert sorted(rival.free) == [0, 1]
    assert rival.table.tolist() == [[3, -1, -1], [2, -1, -1]]
    assert rival.advance([0], 8)
    assert sorted(rival.sequences[0].pages) == [0, 1, 3]
