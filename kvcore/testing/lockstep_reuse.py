"""The calls of prefix reuse on a manager and on its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.testing.model import ModelKVCache, ModelManager
from kvcore.testing.model_reuse import ModelPin
from kvcore.testing.model_tree import Node, Page

if TYPE_CHECKING:
    from kvcore.config import ReuseScope
    from kvcore.kv_cache import KVCache
    from kvcore.manager import KVCacheManager
    from kvcore.testing.fake_engine import FakeEngine

Prompt = tuple["ReuseScope | None", tuple[int, ...]]

MOST_PROMPTS = 16
"""Prompts that are remembered, to be asked for again."""


class Pair:
    """One sequence twice: the handle under test and the model's."""

    def __init__(self, real: KVCache, model: ModelKVCache, prompt: Prompt = (None, ())) -> None:
        self.real, self.model = real, model
        self.scope, self.script = prompt[0], list(prompt[1])  # the tokens that it is to compute


class PinPair:
    """One pin twice."""

    def __init__(self, real: Any, model: ModelPin) -> None:
        self.real, self.model = real, model


class ReuseCalls:
    """The part of `Lockstep` that publishes and finds.

    Attributes
    ----------
    prompts : list of (scope, tokens)
        What was asked for or published lately; some of them are probed after every call.
    pins : list of PinPair
    """

    manager: KVCacheManager
    model: ModelManager
    engine: FakeEngine | None
    pairs: list[Pair]
    both: Callable[[Callable[[], Any], Callable[[], Any]], Any]
    _slot_of: dict[Page, int]

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.pins: list[PinPair] = []
        self._asked = 0

    def create_with(
        self, tokens: Sequence[int], scope: ReuseScope | None = None, **wishes: Any
    ) -> Pair | None:
        """`create_kv_cache` with a prompt; None if both refused."""
        owner = self.manager if self.engine is None else self.engine
        made: list[Any] = []

        def real() -> None:
            made.append(owner.create_kv_cache(scope, tokens, **wishes))

        def model() -> None:
            last = made[0].get_aggregated_page_indices(0).tolist()[-1:] if made else []
            cache = self.model.create_kv_cache(
                scope, tokens, choose=lambda nodes: self._chosen(nodes, last), **wishes
            )
            made.append(cache)
            self.pairs.append(Pair(made[0], cache, (scope, tuple(tokens))))

        self._remember(scope, tokens)
        self.both(real, model)
        return self.pairs[-1] if len(made) == 2 else None

    def _chosen(self, nodes: list[Node], last: list[int]) -> Node:
        """Of equally good nodes any will do: the one that the real tree took."""
        slots = [self._slot_of.get(node.page) for node in nodes if node.page is not None]
        unknown = slots.index(None) if None in slots else 0
        return nodes[slots.index(last[0]) if last and last[0] in slots else unknown]

    def commit(self, pair: Pair, tokens: Sequence[int], is_end: bool = False) -> None:
        """`KVCache.commit`."""
        self._remember(pair.scope, [*pair.model.tokens, *tokens])
        self.both(
            lambda: pair.real.commit(tokens, is_end=is_end),
            lambda: pair.model.commit(tokens, is_end),
        )

    def stop(self, pair: Pair) -> None:
        """`KVCache.stop_committing`."""
        self.both(pair.real.stop_committing, pair.model.stop_committing)

    def probe(self, tokens: Sequence[int], scope: ReuseScope | None = None) -> Any:
        """`probe_reuse`."""
        self._remember(scope, tokens)
        return self.both(
            lambda: self.manager.probe_reuse(scope, tokens),
            lambda: self.model.probe_reuse(scope, tokens),
        )

    def pin(self, tokens: Sequence[int], scope: ReuseScope | None = None, **until: Any) -> None:
        """`pin`, unless several blocks would do equally well for its end: it shows no slot."""
        tied: list[Node] = []

        def choose(nodes: list[Node]) -> Node:
            tied.extend(nodes)
            return nodes[0]

        self.model.tree.match(self.model.scope(scope), tokens, choose)
        if tied:
            return
        made: list[Any] = []

        def call(owner: Any) -> int:
            made.append(owner.pin(tokens, scope, **until))
            count: int = made[-1].num_tokens
            return count

        self.both(lambda: call(self.manager), lambda: call(self.model))
        if len(made) == 2:
            self.pins.append(PinPair(*made))

    def unpin(self, pin: PinPair) -> None:
        """`Pin.close`."""
        self.both(pin.real.close, pin.model.close)

    def expire(self, now: float) -> None:
        """`expire`."""
        self.both(lambda: self.manager.expire(now), lambda: self.model.expire(now))

    def set_weights_epoch(self, epoch: int, lora_id: int | None = None) -> None:
        """`set_weights_epoch`."""
        self.both(
            lambda: self.manager.set_weights_epoch(epoch, lora_id),
            lambda: self.model.set_weights_epoch(epoch, lora_id),
        )

    def clear(self) -> None:
        """`clear_reusable_blocks`."""
        self.both(self.manager.clear_reusable_blocks, self.model.clear_reusable_blocks)

    # -- comparison ----------------------------------------------------------------------------

    def _remember(self, scope: ReuseScope | None, tokens: Sequence[int]) -> None:
        prompt = scope, tuple(tokens)
        if prompt not in self.prompts:
            self.prompts = [*self.prompts, prompt][-MOST_PROMPTS:]

    def different_probe(self) -> str | None:
        """Asks for some of the prompts in turn; what is wrong with an answer."""
        for scope, tokens in [*self.prompts, *self.prompts][self._asked :][:3]:
            expected, got = (
                owner.probe_reuse(scope, tokens) for owner in (self.model, self.manager)
            )
            if expected != got:
                return f"probe_reuse({scope}, {list(tokens)}): expected {expected}, got {got}"
        self._asked = (self._asked + 3) % max(1, len(self.prompts))
        return None
