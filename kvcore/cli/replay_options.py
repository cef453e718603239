"""The options of `kvcore replay`, with what help says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvcore.replay.policies import POLICIES

POLICY_HELP = "What the cache keeps. " + ". ".join(f"{p.name}: {p.help}" for p in POLICIES) + "."

TraceFile: TypeAlias = Annotated[
    Path,
    typer.Argument(
        exists=True,
        dir_okay=False,
        readable=True,
        metavar="TRACE.jsonl",
        help="One JSON object per line: timestamp (ms), input_length, output_length, hash_ids "
        "(one per block of 512 tokens).",
    ),
]
CapacityTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Tokens the cache holds (on a GPU rounded up to the grain of its memory). "
        "Default: so many that none leave."
    ),
]
TokensPerBlock: TypeAlias = Annotated[int, typer.Option(help="Tokens of a page.")]
PolicyName: TypeAlias = Annotated[str, typer.Option(help=POLICY_HELP)]
Compare: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="POLICY,POLICY", help="Replay with each of these, in one table."),
]
MaxRunning: TypeAlias = Annotated[int, typer.Option(help="Sequences at the same time.")]
FullBlocks: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--full-blocks",
        help="Take every hash id for a full block of 512 tokens, look prompts up whole and publish "
        "no outputs: counts hits as papers on such traces do.",
    ),
]
Limit: TypeAlias = Annotated[int | None, typer.Option(help="Only so many requests.")]
DeviceName: TypeAlias = Annotated[
    str, typer.Option(help="meta (pages without memory), host, cuda or cuda:N.")
]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")
]
PlotFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw hit rate and occupancy over time."),
]
