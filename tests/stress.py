"""Random walks for as long as you like: `python -m tests.stress --steps 10000 --deferred`.

Each walk has its own small configuration and its own seed, counted up from `--seed`. Every step is
compared with the model and checked by the oracle; content is proved on the device; in the end
nothing may be held. A failure names the seed that repeats it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from unittest import mock

from kvcore import runtime
from kvcore.device.base import Device, Stream
from kvcore.device.host import HostDevice
from kvcore.testing.small import RandomDraw, draw_config
from kvcore.testing.walk import Walk

STEPS_OF_A_WALK = 250


def walk(seed: int, steps: int, *, deferred: bool) -> Counter[str]:
    """One walk on the host device; returns how often each action ran."""
    return walk_on(HostDevice(deferred=deferred, seed=seed), seed, steps)


def walk_on(
    device: Device,
    seed: int,
    steps: int,
    hold: Callable[[Stream], Callable[[], object]] | None = None,
) -> Counter[str]:
    """One walk on a device.

    Every other one merges the changes of the page table that wait to be sent all the time.
    """
    draw = RandomDraw(seed)
    with mock.patch.object(runtime, "MOST_CHANGES", 1 if seed % 2 else runtime.MOST_CHANGES):
        steering = Walk(draw_config(draw), device, draw, hold)
        actions = Counter(steering.step() for _ in range(steps))
        steering.finish()
    return actions


def run(steps: int, seed: int, *, deferred: bool) -> Counter[str]:
    """Walks of together `steps` steps."""
    actions: Counter[str] = Counter()
    while actions.total() < steps:
        length = min(STEPS_OF_A_WALK, steps - actions.total())
        try:
            actions += walk(seed, length, deferred=deferred)
        except Exception as error:
            mode = " --deferred" if deferred else ""
            error.add_note(f"again: python -m tests.stress --seed {seed} --steps {length}{mode}")
            raise
        seed += 1
    return actions


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deferred", action="store_true", help="simulated streams, random order")
    args = parser.parse_args()
    actions = run(args.steps, args.seed, deferred=args.deferred)
    lines = [f"{count:8} {name}" for name, count in actions.most_common()]
    sys.stdout.write("\n".join([*lines, f"{actions.total():8} steps, no violation\n"]))


if __name__ == "__main__":
    main()
