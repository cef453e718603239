"""What came of a replay: numbers, their course over the trace, and both as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvcore
from kvcore.checks import as_bool, as_int, as_optional_int, as_text
from kvcore.replay.policies import policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to replay."""

    tokens_per_block: int = 16
    capacity_tokens: int | None = None
    """None is a cache so large that it never evicts."""
    policy: str = "lru"
    """A name from `kvcore.replay.policies.POLICIES`."""
    max_running: int = 256
    full_blocks: bool = False
    """Every hash id is a full block that is looked up whole; outputs are not published."""
    device: str = "meta"

    def __post_init__(self) -> None:
        policy_of(self.policy)
        plain = {
            "max_running": as_int("max-running", self.max_running, 1),
            "tokens_per_block": as_int("tokens-per-block", self.tokens_per_block, 1),
            "capacity_tokens": as_optional_int("capacity-tokens", self.capacity_tokens, 1),
            "full_blocks": as_bool("full-blocks", self.full_blocks),
            "device": as_text("device", self.device),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Where a replay stood after the request that came at `time`."""

    time: float
    """Of the trace, in seconds."""
    requests: int
    tokens: int
    """Of their prompts."""
    hit_tokens: int
    running: int
    pages_in_use: int
    """By sequences; shared ones count once."""
    pages_cached: int
    """Kept for reuse alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished replay. Hits count once per request, when it is first admitted."""

    trace: str
    settings: Settings
    capacity_tokens: int
    requests: int
    tokens: int
    """Of all prompts."""
    hit_tokens: int
    """Of those, found in the cache."""
    output_tokens: int
    blocks: int
    """Hash ids of all prompts."""
    hit_blocks: int
    """Of those, found with all that comes before in their prompt, in full."""
    preemptions: int
    """Times that a sequence had to leave and start anew."""
    recomputed_tokens: int
    """What such starts did not find in the cache."""
    pages: int
    """All there are."""
    evicted_pages: int
    seconds: float
    peak_memory_bytes: int | None
    """Of the process so far; None where the system does not tell."""
    samples: tuple[Sample, ...]

    @property
    def hit_share(self) -> float:
        """The part of prompt tokens that was found."""
        return self.hit_tokens / self.tokens

    @property
    def block_hit_share(self) -> float:
        """The part of hash ids that was found."""
        return self.hit_blocks / self.blocks

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens per second of replaying."""
        return self.tokens / self.seconds


def as_json(results: Sequence[Result]) -> str:
    """Replays of one trace as a JSON document."""
    return json.dumps(
        {
            "kvcore": kvcore.__version__,
            "trace": results[0].trace,
            "replays": [_document(result) for result in results],
        },
        indent=1,
    )


def _document(result: Result) -> dict[str, Any]:
    document = asdict(result)
    del document["trace"]
    shares = {name: getattr(result, name) for name in ("hit_share", "block_hit_share")}
    samples = document.pop("samples")
    rates = {"tokens_per_second": result.tokens_per_second}
    return {**document, **shares, **rates, "samples": samples}


def peak_memory() -> int | None:
    """The most memory this process has had so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
