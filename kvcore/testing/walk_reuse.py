"""The actions of a random walk that publish prefixes and find them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvcore.config import ReuseScope
from kvcore.retention import Retention
from kvcore.testing.lockstep import Lockstep
from kvcore.testing.lockstep_reuse import Pair, Prompt

if TYPE_CHECKING:
    from kvcore.testing.small import Draw

SCOPES: Final = (None, None, None, ReuseScope(lora_id=7), ReuseScope(lora_id=7, salt=1))
TOKENS: Final = (1, 2, 2**31 - 1)
"""So few that prompts meet by chance."""


class ReuseActions:
    """The part of `Walk` that works on the prefix tree.

    `script` of a pair is what it computes, made up as it goes on; what is written elsewhere has
    keys of its own and is not committed.
    """

    draw: Draw
    lockstep: Lockstep
    block: int
    one_in: Callable[[int], bool]
    pair: Callable[..., Pair | None]

    def __init__(self) -> None:
        self.now = 0
        self.epochs: dict[int | None, int] = {}

    # -- choices -------------------------------------------------------------------------------

    def tokens(self, low: int, high: int) -> list[int]:
        """Some tokens."""
        return [self.draw.pick(TOKENS) for _ in range(self.draw.number(low, high))]

    def prompt(self) -> Prompt:
        """A prompt that is new, or goes on from a known one, perhaps in another scope."""
        scope, known = self.draw.pick(SCOPES), list(self.lockstep.prompts)
        if not known or self.one_in(5):
            return scope, tuple(self.tokens(0, 4 * self.block))
        of, start = self.draw.pick(known)
        cut = self.draw.pick([len(start), self.draw.number(0, len(start))])
        more = self.tokens(0, self.draw.pick([0, 1, 2 * self.block]))
        return (scope if self.one_in(8) else of), (*start[:cut], *more)[: 8 * self.block]

    def wishes(self) -> dict[str, Any]:
        """Retention, now and then."""
        if not self.one_in(3):
            return {}
        entries = []
        for _ in range(self.draw.number(0, 2)):
            start = self.draw.number(0, 2 * self.block)
            end = self.draw.pick([None, start + self.draw.number(1, 2 * self.block)])
            ttl = self.draw.pick([None, self.draw.number(1, 5)])
            priority = self.draw.pick([0, 34, 36, 100])
            entries.append(Retention(start=start, end=end, priority=priority, ttl=ttl))
        now = None if self.one_in(12) else self.now
        asked: dict[str, Any] = {"retention": entries, "now": now}
        if self.one_in(2):
            odd = self.draw.pick([0, 50])
            asked["custom_priority_callback"] = lambda ordinal, group: odd if ordinal % 2 else 35
        return asked

    def script(self, pair: Pair, start: int, count: int) -> list[int]:
        """The tokens that a sequence computes at some positions."""
        missing = start + count - len(pair.script)
        pair.script += self.tokens(missing, missing) if missing > 0 else []
        return pair.script[start : start + count]

    def scripts(
        self, pairs: list[Pair], starts: list[int], counts: list[int]
    ) -> list[list[int] | None]:
        """The scripts of several; None is something of their own, mostly so for several beams."""
        return [
            None
            if self.one_in(2) or (pair.model.beam_width > 1 and not self.one_in(4))
            else self.script(pair, start, count)
            for pair, start, count in zip(pairs, starts, counts, strict=True)
        ]

    # -- actions -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A sequence with a prompt."""
        if len(self.lockstep.pairs) < 8:
            scope, tokens = self.prompt()
            self.lockstep.create_with(tokens, scope, **self.wishes())

    def compute(self, pair: Pair, count: int) -> int:
        """Writes the script from where it was left; how many tokens can be committed then."""
        model, engine = pair.model, self.lockstep.engine
        if engine is None:
            return 0
        if model.is_active:
            start = max(model.first_own, min(len(model.tokens), model.capacity))
            start = min(start, model.capacity)
            end = min(model.capacity, max(start, len(model.tokens) + count))
            tokens = self.script(pair, start, end - start)
            self.lockstep.write([pair], [start], [end - start], [tokens])
        spelled = [engine.spelled(pair.real, beam) for beam in range(model.beam_width)]
        agreed = next(
            (i for i, keys in enumerate(zip(*spelled, strict=False)) if len({*keys}) > 1), None
        )
        longest = min(map(len, spelled), default=0) if agreed is None else agreed
        return max(0, longest - len(model.tokens))

    def commit(self) -> None:
        """Commits what was computed; now and then more than there is room for."""
        if pair := self.pair():
            model = pair.model
            count = self.draw.number(0, 3 * self.block)
            most = self.compute(pair, count)
            if self.one_in(16):
                count = model.capacity - len(model.tokens) + 1
                self.lockstep.commit(pair, self.tokens(count, count))
                return
            engine = self.lockstep.engine
            spelled = [] if engine is None or not model.is_active else engine.spelled(pair.real)
            done = len(model.tokens)
            if self.lockstep.model.commit_min_snapshot and not self.one_in(8):
                history = self.draw.pick([done, done + min(count, most)])
                self.lockstep.resize(pair, None, max(history, model.history_length))
            tokens = spelled[done : done + min(count, most)]
            self.lockstep.commit(pair, tokens, is_end=self.one_in(8))

    def stop(self) -> None:
        """Ends committing."""
        if pair := self.pair(active=not self.one_in(8)):
            self.lockstep.stop(pair)

    def turn(self) -> None:
        """A whole life: a prompt, its answer, and the end."""
        scope, tokens = self.prompt()
        pair = self.lockstep.create_with(tokens, scope, **self.wishes())
        if pair is None:
            return
        size = len(tokens) + self.draw.number(0, self.block)
        if self.lockstep.resume(pair) and self.lockstep.resize(
            pair, max(size, pair.model.capacity)
        ):
            most = self.compute(pair, size)
            done = len(pair.model.tokens)
            engine = self.lockstep.engine
            spelled = [] if engine is None else engine.spelled(pair.real)
            self.lockstep.commit(pair, spelled[done : done + most], is_end=self.one_in(2))
        if not self.one_in(6):
            self.lockstep.close(pair)

    def probe(self) -> None:
        """Asks what a prompt would find."""
        scope, tokens = self.prompt()
        self.lockstep.probe(tokens, scope)

    def pin(self) -> None:
        """Pins what a prompt finds, or unpins."""
        if self.lockstep.pins and self.one_in(2):
            self.lockstep.unpin(self.draw.pick(self.lockstep.pins))
        elif len(self.lockstep.model.pins) < 3:
            scope, tokens = self.prompt()
            ttl = self.draw.pick([None, self.draw.number(1, 9)])
            now = None if self.one_in(12) else self.now
            self.lockstep.pin(tokens, scope, ttl=ttl, now=now)

    def expire(self) -> None:
        """Time passes."""
        self.now += self.draw.number(0, 4)
        self.lockstep.expire(self.now)

    def weights(self) -> None:
        """New weights, of the model or an adapter; now and then the same or earlier ones."""
        lora = self.draw.pick([None, 7, 8])
        newest = self.epochs.get(lora, 0)
        epoch = self.draw.number(0, newest) if self.one_in(4) else newest + 1
        self.epochs[lora] = max(newest, epoch)
        self.lockstep.set_weights_epoch(epoch, lora)

    def clear(self) -> None:
        """Forgets all prefixes, if nothing is open."""
        self.lockstep.clear()


WEIGHTS: Final = {
    "begin": 6,
    "commit": 8,
    "stop": 2,
    "turn": 7,
    "probe": 2,
    "pin": 3,
    "expire": 3,
    "weights": 1,
    "clear": 1,
}
"""How often each action is drawn."""
