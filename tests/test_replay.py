"""Replay: what a trace stands for, and how the engine that it drives uses the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcore as k
from kvcore.replay.policies import POLICIES, policy_of
from kvcore.replay.report import Result, Settings, as_json
from kvcore.replay.simulate import replay
from kvcore.replay.trace import BLOCK, OUTPUTS, PRIME, SPREAD, Trace, parse_trace, read_trace
from kvcore.retention import Retention
from tests.replay_model import ModelManager, ModelSequence

# -- traces ----------------------------------------------------------------------------------------


def line(time: float, length: int, output: int, ids: Sequence[int], **more: Any) -> bytes:
    fields = {"timestamp": time, "input_length": length, "output_length": output}
    return json.dumps({**fields, "hash_ids": list(ids), **more}).encode() + b"\n"


def trace_of(*requests: tuple[float, int, int, Sequence[int]]) -> Trace:
    return parse_trace([line(*request) for request in requests])


def test_a_trace_is_read_in_the_order_of_its_time(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_bytes(
        line(20.5, 700, 3, [4, 5])
        + b"  \n"
        + line(10, 512, 0, [7], chat=1)
        + line(20.5, 1, 9, [0]).rstrip()
    )
    trace = read_trace(file)
    assert trace.name == str(file)
    assert trace.timestamps.tolist() == [10, 20.5, 20.5]
    assert trace.input_lengths.tolist() == [512, 700, 1]
    assert trace.output_lengths.tolist() == [0, 3, 9]
    assert trace.lines.tolist() == [3, 1, 4]
    assert [trace.prompt(r)[0].item() for r in range(3)] == [
        (i * SPREAD) % PRIME for i in (7, 4, 0)
    ]
    assert len(trace.head(2)) == 2
    assert trace.head(2).prompt(1).tolist() == trace.prompt(1).tolist()


def test_tokens_follow_from_ids():
    trace = trace_of((0, 1000, 5, [3, 1]), (0, 1024, 7, [3, 2]), (0, 513, 0, [9, 1]))
    a, b, c = (trace.prompt(r) for r in range(3))
    assert (a.dtype, a.size, b.size, c.size) == (np.int32, 1000, 1024, 513)
    assert a.flags.c_contiguous
    assert a.tolist() == [
        *range(3 * SPREAD % PRIME, 3 * SPREAD % PRIME + 512),
        *range(SPREAD, SPREAD + 488),
    ]
    assert a[:512].tolist() == b[:512].tolist()
    assert c[512] == a[512]
    outputs = [trace.output(r) for r in range(3)]
    assert [o.size for o in outputs] == [5, 7, 0]
    assert outputs[1].tolist() == list(range(OUTPUTS + SPREAD, OUTPUTS + SPREAD + 7))


def test_blocks_of_different_ids_have_no_token_in_common():
    """At every distance of up to 469,457; so parts of blocks are told apart as well."""
    apart = np.arange(1, 469_458, dtype=np.int64) * SPREAD % PRIME
    assert np.minimum(apart, PRIME - apart).min() >= BLOCK
    apart = 469_458 * SPREAD % PRIME
    assert min(apart, PRIME - apart) < BLOCK


def test_every_token_is_an_id_and_outputs_are_like_no_prompt():
    assert PRIME - 1 + BLOCK - 1 < OUTPUTS
    longest = 2**29
    assert OUTPUTS + PRIME - 1 + longest - 1 <= 2**31 - 1


def test_ids_of_any_size_are_told_apart():
    big = 2**63 - 1
    trace = trace_of((0, 1024, 1, [big, 5]), (0, 1024, 1, [5 + PRIME, big]))
    a, b = trace.prompt(0), trace.prompt(1)
    assert a[:512].tolist() == b[512:].tolist()
    assert len({*a[512:].tolist()} & {*b[:512].tolist()}) == 0


def test_full_blocks_ignore_the_length():
    trace = trace_of((0, 513, 1, [3, 4]), (0, 5, 1, [3])).in_full_blocks()
    assert trace.input_lengths.tolist() == [1024, 512]
    assert trace.prompt(1).tolist() == trace.prompt(0)[:512].tolist()


WRONG = {
    "no JSON": (b"{timestamp", ["a JSON object", "timestamp"]),
    "no UTF-8": (b'"\xff"', ["a JSON object"]),
    "too deep": (b"[" * 100_000, ["a JSON object"]),
    "a list": (b"[1, 2]", ["a JSON object", "[1, 2]"]),
    "a field is missing": (b'{"timestamp": 1, "input_length": 3}', ["output_length", "none"]),
    "a negative time": (line(-1, 3, 1, [0]), ["timestamp", "-1"]),
    "no time": (line(float("nan"), 3, 1, [0]), ["timestamp", "nan"]),
    "a huge time": (line(10**400, 3, 1, [0]), ["timestamp"]),
    "a time in words": (line("noon", 3, 1, [0]), ["timestamp", "noon"]),
    "an empty prompt": (line(0, 0, 1, []), ["input_length", "0"]),
    "a true length": (line(0, True, 1, [0]), ["input_length", "True"]),
    "half a token": (line(0, 3, 1.5, [0]), ["output_length", "1.5"]),
    "a negative output": (line(0, 3, -1, [0]), ["output_length", "-1"]),
    "an output of more tokens than there are": (
        line(0, 3, 2**29 + 4, [0]),
        ["output_length", "536870915"],
    ),
    "ids that are no list": (
        b'{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": {"0": 1}}',
        ["hash_ids", "a list"],
    ),
    "too few ids": (line(0, 513, 1, [0]), ["hash_ids", "2 ids", "513", "got 1"]),
    "too many ids": (line(0, 512, 1, [0, 1]), ["hash_ids", "1 ids", "got 2"]),
    "a negative id": (line(0, 1025, 1, [0, 1, -5]), ["hash_ids[2]", "-5"]),
    "an id in words": (line(0, 600, 1, [0, "1"]), ["hash_ids[1]", "'1'"]),
    "an id that is true": (line(0, 600, 1, [True, 1]), ["hash_ids[0]", "True"]),
    "an id too large": (line(0, 600, 1, [1, 2**63]), ["hash_ids[1]", str(2**63)]),
}


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_named_with_its_field(text, words):
    with pytest.raises(ValueError, match=r"^a\.jsonl, line 3(, \w+(\[\d\])?)?: expected ") as error:
        parse_trace([line(0, 3, 1, [0]), b"\n", text], "a.jsonl")
    assert all(word in str(error.value) for word in words)


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="at least one request"):
        parse_trace([b"\n"])


# -- policies --------------------------------------------------------------------------------------


def test_what_the_policies_ask_for():
    said = {policy.name: policy.retention(700) for policy in POLICIES}
    assert said["lru"] is None
    assert said["none"] is None
    assert said["prompts-first"] == (Retention(start=700, priority=20),)
    heads = [(entry.start, entry.end, entry.priority) for entry in said["heads-first"]]
    assert heads[:3] == [(0, None, 90), (1024, None, 80), (2048, None, 70)]
    assert heads[-1] == (131_072, None, 10)
    with pytest.raises(
        ValueError, match=r"compare: expected one of lru, prompts-first.*got 'fifo'"
    ):
        policy_of("fifo", "compare")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"tokens_per_block": 0}, "tokens-per-block"),
        ({"capacity_tokens": 0}, "capacity-tokens"),
        ({"max_running": 0}, "max-running"),
        ({"policy": "fifo"}, "policy"),
        ({"policy": 3}, "policy"),
        ({"full_blocks": "no"}, "full-blocks"),
        ({"device": None}, "device"),
        ({"device": ""}, "device"),
    ],
)
def test_wrong_settings_are_named(wrong, name):
    with pytest.raises((ValueError, TypeError), match=f"^{name}: expected"):
        Settings(**wrong)


def test_settings_are_plain_numbers():
    """What came of them is written as JSON."""
    size = np.int64(64)
    settings = Settings(tokens_per_block=size, capacity_tokens=size * 64, max_running=np.int32(3))
    result = replay(trace_of((0, 600, 4, [1, 2])), settings, open_manager=Recorder)
    assert json.loads(as_json([result]))["replays"][0]["settings"]["max_running"] == 3


@pytest.mark.parametrize("requests", [0, -1, 1.0, True])
def test_a_head_of_no_requests(requests):
    with pytest.raises((ValueError, TypeError), match=r"^requests: expected"):
        trace_of((0, 600, 4, [1, 2]), (1, 600, 4, [1, 2])).head(requests)


# -- the engine ------------------------------------------------------------------------------------


class Recorder(ModelManager):
    """The slow model, which also notes what it is asked."""

    def __init__(self, config, device="meta"):
        super().__init__(config, device)
        self.calls: list[tuple] = []
        self.most = 0

    def create_kv_cache(self, input_tokens=None, **hints):
        kv = RecordedSequence(self, input_tokens, hints.get("retention") or ())
        given = None if input_tokens is None else len(input_tokens)
        self.calls.append(("create", given, hints["expected_prompt_length"]))
        return kv

    def advance(self, sequences, n):
        done = super().advance(sequences, n)
        self.most = max(self.most, len(sequences))
        self.calls.append(("advance", len(sequences), n, done))
        return done


class RecordedSequence(ModelSequence):
    def commit(self, tokens, is_end=False):
        super().commit(tokens, is_end)
        self.manager.calls.append(("commit", len(tokens), is_end, int(tokens[0])))

    def close(self):
        super().close()
        self.manager.calls.append(("close", self.num_committed_tokens))


def run(trace: Trace, kind=Recorder, **settings) -> tuple[Result, Any]:
    made = []

    def open_manager(config, device):
        made.append(kind(config, device))
        return made[0]

    result = replay(trace, Settings(**settings), open_manager=open_manager)
    return result, made[0]


def test_a_request_is_looked_up_grown_published_advanced_and_closed():
    trace = trace_of((0, 600, 40, [1, 2]), (5, 700, 30, [1, 3]))
    result, manager = run(trace, tokens_per_block=64)
    first, second = OUTPUTS, OUTPUTS + SPREAD
    assert manager.calls == [
        ("create", 599, 600),
        ("commit", 600, False, SPREAD),
        ("create", 699, 700),
        ("commit", 700 - 512, False, 3 * SPREAD % PRIME),
        ("advance", 2, 30, True),
        ("commit", 30, True, second),
        ("close", 730),
        ("advance", 1, 10, True),
        ("commit", 40, True, first),
        ("close", 640),
    ]
    assert (result.requests, result.tokens, result.hit_tokens) == (2, 1300, 512)
    assert (result.blocks, result.hit_blocks, result.output_tokens) == (4, 1, 70)
    assert (result.preemptions, result.recomputed_tokens) == (0, 0)
    assert manager.free + manager.evictable == manager.total
    assert result.capacity_tokens == (12 + 11 + 1 - 1 + 1) * 64  # ceil(640/64) + ceil(730/64) + 2


def test_at_least_one_token_of_a_prompt_is_computed_unless_blocks_are_counted():
    trace = trace_of((0, 512, 2, [1]), (1, 512, 2, [1]))
    assert run(trace, tokens_per_block=512)[0].hit_tokens == 511
    result, manager = run(trace, tokens_per_block=512, full_blocks=True)
    assert (result.hit_tokens, result.hit_blocks, result.block_hit_share) == (512, 1, 0.5)
    assert [call for call in manager.calls if call[0] == "commit"] == [
        ("commit", 512, False, SPREAD)
    ]


def test_no_more_run_than_may():
    trace = trace_of(*((r, 100, 1 + r, [r]) for r in range(9)))
    _, manager = run(trace, tokens_per_block=16, max_running=3)
    assert manager.most == 3
    lengths = [call[2] for call in manager.calls if call[0] == "create"]
    assert lengths == [100] * 9


def test_without_reuse_nothing_is_looked_up_or_published():
    trace = trace_of((0, 600, 4, [1, 2]), (1, 600, 4, [1, 2]))
    result, manager = run(trace, tokens_per_block=64, policy="none")
    assert result.hit_tokens == 0
    assert {call[0] for call in manager.calls} == {"create", "advance", "close"}
    assert ("create", None, 600) in manager.calls
    assert not manager.blocks


def test_a_request_without_output_is_prefilled_only():
    result, manager = run(trace_of((0, 64, 0, [1]), (0, 65, 3, [1])), tokens_per_block=64)
    assert result.hit_tokens == 64
    assert [call[0] for call in manager.calls] == [
        *("create", "commit", "create", "commit"),
        *("close", "advance", "commit", "close"),
    ]


def test_where_room_is_short_the_youngest_starts_anew_and_nothing_is_lost():
    """Two of 10 pages each and 4 more to generate, in 22 pages: the second must leave."""
    trace = trace_of((0, 160, 64, [1]), (1, 160, 64, [2]))
    result, manager = run(trace, tokens_per_block=16, capacity_tokens=22 * 16)
    assert result.preemptions == 1
    assert ("advance", 2, 64, False) in manager.calls
    # All is in the cache again but what makes room for the first, and one token to compute.
    assert result.recomputed_tokens >= 1
    assert result.hit_tokens == 0  # starting anew is no hit
    again = [call for call in manager.calls if call[0] == "close"]
    assert again == [("close", 160), ("close", 224), ("close", 224)]


def test_generated_tokens_are_not_generated_again():
    """Of 26 pages the first and the third need 30 when the small one between them has ended."""
    trace = trace_of((0, 160, 80, [1]), (1, 16, 16, [2]), (2, 160, 80, [3]))
    result, manager = run(trace, tokens_per_block=16, capacity_tokens=26 * 16)
    assert (result.preemptions, result.recomputed_tokens) == (1, 1)
    first, small, third = (OUTPUTS + r * SPREAD % PRIME for r in range(3))
    assert [call for call in manager.calls if call[0] == "close" or call[2:3] == (True,)] == [
        *(("commit", 16, True, small), ("close", 32)),
        *(("commit", 16, True, third), ("close", 176)),
        *(("commit", 80, True, first), ("close", 240)),
        *(("commit", 64, True, third + 16), ("close", 240)),
    ]
    assert ("create", 175, 176) in manager.calls


def test_a_request_that_can_never_fit_is_named_before_the_work():
    trace = trace_of((0, 100, 1, [1]), (1, 1000, 24, [2, 3]))
    with pytest.raises(
        ValueError, match=r"capacity-tokens: expected at least 1040.*line 2, got 1039"
    ):
        run(trace, tokens_per_block=16, capacity_tokens=1039)
    assert run(trace, tokens_per_block=16, capacity_tokens=1040)[0].requests == 2


def test_samples_and_progress_follow_the_trace():
    trace = trace_of(*((1000 * r, 128, 2, [r % 2]) for r in range(600)))
    seen = []
    result = replay(trace, Settings(max_running=4), seen.append, open_manager=Recorder)
    assert [p.requests for p in seen] == [*range(3, 601, 3)]
    assert seen[-1].tokens == 600 * 128
    assert [s.requests for s in result.samples] == [p.requests for p in seen]
    last = result.samples[-1]
    assert (last.time, last.tokens, last.hit_tokens) == (599, 600 * 128, 598 * 127)
    assert 0 < last.running <= 4
    assert last.pages_cached > 0


def test_the_document_holds_every_number():
    result, _ = run(trace_of((0, 600, 4, [1, 2])), tokens_per_block=64)
    document = json.loads(as_json([result, result]))
    assert document["kvcore"] == k.__version__
    first, second = document["replays"]
    assert first == second
    assert first["settings"]["tokens_per_block"] == 64
    assert (first["tokens"], first["hit_share"], first["requests"]) == (600, 0.0, 1)
    assert first["samples"][0]["requests"] == 1
