"""Random walks over all public calls of a small manager, in lockstep with the model."""

from __future__ import annotations

from typing import Any, Final

from kvcore.config import KVCacheManagerConfig
from kvcore.device.base import Device
from kvcore.manager import KVCacheManager
from kvcore.testing import walk_reuse
from kvcore.testing.check import OracleError, check
from kvcore.testing.lockstep import Lockstep
from kvcore.testing.lockstep_reuse import Pair
from kvcore.testing.misuse import misuses
from kvcore.testing.small import Draw
from kvcore.testing.walk_reuse import ReuseActions
from kvcore.testing.walk_steps import Hold, StepActions, same


class Walk(ReuseActions, StepActions):
    """One manager, its model, and the actions that may happen to them.

    Every action runs real calls with arguments that are mostly right, sometimes wrong, on caches
    that are mostly in the right state, and compares as `Lockstep` does.

    Parameters
    ----------
    config : KVCacheManagerConfig
        Small, as from `draw_config`, so that pages are often short.
    device : Device
        A new one.
    draw : Draw
        Where the choices come from.
    hold : callable, optional
        Takes a stream, holds it up, and returns what lets it go on: races then have time. Default:
        a `Gate` on a deferred `HostDevice`, nothing elsewhere.

    Examples
    --------
    >>> from kvcore.device.host import HostDevice
    >>> from kvcore.testing.small import RandomDraw, draw_config
    >>> draw = RandomDraw(seed=7)
    >>> walk = Walk(draw_config(draw), HostDevice(deferred=True, seed=7), draw)
    >>> for _ in range(20):
    ...     action = walk.step()
    >>> walk.finish()
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        device: Device,
        draw: Draw,
        hold: Hold | None = None,
    ) -> None:
        self.draw = draw
        self.device = device
        self.streams = [device.create_stream() for _ in range(3)]
        self.default = device.default_stream or self.streams[0]
        self.manager = KVCacheManager(config, device=device, stream=self.default)
        self.lockstep = Lockstep(self.manager)
        self.block = config.tokens_per_block
        self.closed: list[Pair] = []
        StepActions.__init__(self, hold)
        ReuseActions.__init__(self)

    # -- choices -------------------------------------------------------------------------------

    def one_in(self, n: int) -> bool:
        """True once in n times."""
        return self.draw.number(1, n) == n

    def stream(self) -> object:
        """None, or one of the streams."""
        return self.draw.pick([None, *self.streams])

    def pair(self, *, active: bool = True) -> Pair | None:
        """A sequence, usually in the state asked for; None if there is none at all."""
        right = [pair for pair in self.lockstep.pairs if pair.model.is_active == active]
        others = self.lockstep.pairs + self.closed[-1:]
        if right and not self.one_in(12):
            return self.draw.pick(right)
        return self.draw.pick(others) if others else None

    def some(self) -> list[Pair]:
        """Several sequences, usually distinct and active."""
        active = [pair for pair in self.lockstep.pairs if pair.model.is_active]
        chosen = [pair for pair in active if not self.one_in(4)]
        if self.one_in(16) and (extra := self.pair(active=False)):
            chosen.append(extra)
        return chosen

    def batch(self) -> tuple[list[Pair], dict[str, Any]]:
        """Active sequences for a launch, and how it runs: usually all of one stream, on it."""
        active = [pair for pair in self.lockstep.pairs if pair.model.is_active]
        if not active or self.one_in(5):
            return active, {"stream": self.stream()}
        stream = self.draw.pick(active).real.stream
        pairs = [pair for pair in active if pair.real.stream is stream]
        return pairs, {"own_table": self.one_in(3)}

    def size_near(self, pair: Pair, low: int, high: int) -> int:
        """A token count in [low, high] blocks around the capacity, often at an edge."""
        tokens = pair.model.capacity + self.draw.number(low * self.block, high * self.block)
        return max(tokens, -1)

    def parents(self, pair: Pair, count: int) -> list[int]:
        """Parents for `count` rows, now and then wrong."""
        width = max(1, pair.model.beam_width)
        chosen = [self.draw.number(0, width - 1) for _ in range(count)]
        if chosen and self.one_in(12):
            chosen[-1] = self.draw.pick([-1, width])
        if chosen and self.one_in(24):
            chosen.pop()
        return chosen

    # -- actions -------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes one to three sequences."""
        if len(self.lockstep.pairs) < 8:
            lengths = [None, 0, 0, 1, self.block]
            self.lockstep.create([self.draw.pick(lengths) for _ in range(self.draw.number(1, 3))])

    def resume(self) -> None:
        """Resumes one, perhaps on another stream."""
        if pair := self.pair(active=False):
            self.lockstep.resume(pair, self.stream())

    def suspend(self) -> None:
        """Suspends one."""
        if pair := self.pair():
            self.lockstep.suspend(pair)

    def close(self) -> None:
        """Closes one or several."""
        pairs = self.some() if self.one_in(3) else [p for p in [self.pair()] if p]
        self.closed += pairs
        if len(pairs) == 1:
            self.lockstep.close(pairs[0])
        else:
            self.lockstep.close_all(pairs)

    def resize(self) -> None:
        """Grows or shrinks one, with or without its history."""
        if pair := self.pair():
            capacity = self.draw.pick([None, self.size_near(pair, -2, 5)])
            model = pair.model
            top = model.capacity if capacity is None else capacity
            history = self.draw.number(model.history_length - 1, max(model.history_length, top) + 1)
            self.lockstep.resize(pair, capacity, self.draw.pick([None, history]))

    def advance(self) -> None:
        """Grows several, or nobody."""
        pairs = self.some()
        counts: int | list[int] = self.draw.number(0, self.block + 1)
        if self.one_in(2):
            counts = [self.draw.number(0 if i else -1, 2 * self.block) for i in range(len(pairs))]
        history = None
        if self.one_in(2):
            history = [p.model.history_length + self.draw.number(0, 2) for p in pairs]
        self.lockstep.advance(pairs, counts, history)

    def truncate(self) -> None:
        """Cuts several."""
        pairs = self.some()
        sizes = []
        for pair in pairs:
            low, high = pair.model.history_length, pair.model.capacity
            wrong = self.one_in(24)
            sizes.append(
                self.draw.pick([low - 1, high + 1]) if wrong else self.draw.number(low, high)
            )
        self.lockstep.truncate(pairs, sizes)

    def widen(self) -> None:
        """Gives one another width."""
        if pair := self.pair():
            most = self.manager.config.max_beam_width
            width = self.draw.pick([most, most, self.draw.number(1, most)])
            if self.one_in(16):
                width = self.draw.pick([0, most + 1])
            parents = self.parents(pair, width) if self.one_in(3) else None
            self.lockstep.set_beam_width(pair, width, parents)

    def reorder(self) -> None:
        """Reorders the beams of one."""
        wide = [pair for pair in self.lockstep.pairs if pair.model.beam_width > 1]
        if pair := self.draw.pick(wide) if wide and not self.one_in(8) else self.pair():
            low, high = pair.model.history_length, pair.model.capacity
            valid = self.draw.number(low, high) if self.one_in(3) else None
            if self.one_in(24):
                valid = self.draw.pick([low - 1, high + 1])
            self.lockstep.reorder_beams(pair, self.parents(pair, pair.model.beam_width), valid)

    def write(self) -> None:
        """Fills positions behind the final blocks of several, with all their beams."""
        pairs, launch = self.batch()
        starts, counts = [], []
        for pair in pairs:
            own = min(pair.model.first_own, pair.model.capacity)
            starts.append(self.draw.pick([own, self.draw.number(own, pair.model.capacity)]))
            most = pair.model.capacity - starts[-1]
            counts.append(self.draw.pick([most, self.draw.number(0, most)]))
        if pairs:
            self.lockstep.write(
                pairs, starts, counts, self.scripts(pairs, starts, counts), **launch
            )

    def decode(self) -> None:
        """A step of a decoder: room for a token, the token, then perhaps other parents."""
        pairs, launch = self.batch()
        if pairs and self.lockstep.advance(pairs, 1):
            starts = [max(p.model.history_length, p.model.first_own) for p in pairs]
            starts = [min(s, p.model.capacity) for p, s in zip(pairs, starts, strict=True)]
            counts = [p.model.capacity - s for p, s in zip(pairs, starts, strict=True)]
            self.lockstep.write(
                pairs, starts, counts, self.scripts(pairs, starts, counts), **launch
            )
            for pair in pairs:
                self.lockstep.resize(pair, None, pair.model.capacity)
                if pair.model.beam_width > 1:
                    self.lockstep.reorder_beams(pair, self.parents(pair, pair.model.beam_width))

    def look(self) -> None:
        """Enqueues a comparison of several, with all their content."""
        pairs, launch = self.batch()
        self.lockstep.look(pairs, **launch)

    def settle(self) -> None:
        """Compares everything now."""
        self.release()
        self._settling = True
        self.lockstep.look([pair for pair in self.lockstep.pairs if pair.model.is_active])
        self.lockstep.settle()
        self._settling = False
        if self.device.has_memory:
            check(self.manager, device=True)

    def misuse(self) -> None:
        """A call that must be refused by its type, or leave no trace."""
        if pair := self.pair():
            name, call, kind = self.draw.pick(misuses(self.manager, pair.real))
            if pair.model.is_active:
                try:
                    call()
                except kind:
                    pass
                else:
                    raise OracleError(f"{name}: expected {kind.__name__}, got no exception")
            self.lockstep.compare()

    # -- the whole -----------------------------------------------------------------------------

    def step(self, name: str | None = None) -> str:
        """Runs one action, drawn by weight unless named. Returns its name."""
        name = name or self.draw.pick(DECK)
        idle = [pair for pair in self.lockstep.pairs if not pair.model.is_active]
        if len(self.lockstep.pairs) - len(idle) < 3 and not self.one_in(4):
            self.resume() if idle else self.create()
        getattr(self, name)()
        return name

    def finish(self) -> None:
        """Proves all content, closes everything and shuts down; nothing may be left."""
        for pair in self.lockstep.pairs:
            if not pair.model.is_active:
                self.lockstep.resume(pair)
        self.settle()
        while self.lockstep.pairs:
            self.lockstep.close(self.lockstep.pairs[-1])
        self.lockstep.clear()
        free = [(stats.free, stats.total) for stats in self.manager.get_storage_statistics()]
        same("slots free at the end", [(total, total) for _, total in free], free)
        runtime = self.manager._runtime
        memories = [memory for pools in runtime.pools for memory in pools]
        twins = runtime.tables, runtime.path_tables
        memories += [twin.memory for twin in twins if twin is not None]
        self.manager.shutdown()
        same("bytes held after shutdown", [0] * len(memories), [m.nbytes for m in memories])


WEIGHTS: Final = {
    "create": 3,
    "resume": 4,
    "suspend": 3,
    "close": 2,
    "resize": 6,
    "advance": 6,
    "truncate": 2,
    "widen": 6,
    "reorder": 7,
    "write": 7,
    "decode": 6,
    "look": 4,
    "hold": 1,
    "release": 2,
    "settle": 1,
    "map": 1,
    "again": 1,
    "bind": 1,
    "misuse": 1,
    **walk_reuse.WEIGHTS,
}
"""How often each action is drawn."""

DECK: Final = tuple(name for name, weight in WEIGHTS.items() for _ in range(weight))
