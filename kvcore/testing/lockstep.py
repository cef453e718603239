"""A manager and its model driven by the same calls; the first difference is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import CacheCapacityError, OutOfPagesError, StateError
from kvcore.ids import NO_SLOT
from kvcore.testing.check import OracleError, check, describe
from kvcore.testing.fake_engine import FakeEngine
from kvcore.testing.lockstep_reuse import Pair, ReuseCalls
from kvcore.testing.model import ModelManager
from kvcore.testing.model_tree import Page

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager

REFUSALS = (OutOfPagesError, CacheCapacityError, StateError, ValueError, TypeError)
"""Exceptions that both sides may raise, the narrower first."""


class Lockstep(ReuseCalls):
    """Runs every call on a manager and on its model and compares the answers and all that shows.

    Compared after each call: its value or the type of its exception, every public property of every
    sequence, free and evictable slots, which table cells name the same page, that pages keep their
    slots as long as they can be found, what some prompts find, and that the model's pages hold what
    the engine's histories say; then `check` runs.

    Parameters
    ----------
    manager : KVCacheManager
        New, with nothing open. With memory there is an engine too, and content is compared.

    Examples
    --------
    >>> import kvcore as k
    >>> config = k.KVCacheManagerConfig(
    ...     tokens_per_block=4,
    ...     cache_tiers=[k.GpuCacheTierConfig(quota=1 << 16)],
    ...     layers=[
    ...         k.AttentionLayerConfig(layer_id=0, buffers=[k.BufferConfig(role="key", size=4096)])
    ...     ],
    ... )
    >>> pair = Lockstep(k.KVCacheManager(config, device="meta"))
    >>> kv = pair.create([None])[0]
    >>> pair.resume(kv), pair.resize(kv, 70, 3), pair.resize(kv, 9)
    (True, False, True)
    """

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__()
        self.manager = manager
        self.model = ModelManager.of(manager)
        self.engine = FakeEngine(manager) if manager.device.has_memory else None
        self.pairs: list[Pair] = []
        self.calls = 0
        self._slot_of: dict[Page, int] = {}

    # -- calls ---------------------------------------------------------------------------------

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """Runs one call on both sides; returns the value they agree on, None if both refused."""
        self.calls += 1
        got, expected = _outcome(real), _outcome(model)
        same = got[0] == expected[0] and (got[0] != "value" or got[1] == expected[1])
        if not same:
            self._fail(f"the call: expected {expected}, got {got}")
        self.compare()
        return got[1] if got[0] == "value" else None

    def create(self, prompts: Sequence[int | None]) -> list[Pair]:
        """`create_kv_caches`; an empty list if both refused."""
        made: list[Pair] = []

        def real() -> None:
            made.extend(Pair(kv, None) for kv in self.manager.create_kv_caches(prompts))  # type: ignore[arg-type]

        def model() -> None:
            for pair, cache in zip(made, self.model.create_kv_caches(prompts), strict=True):
                pair.model = cache
                if self.engine is not None:
                    self.engine.follow(pair.real)
            self.pairs.extend(made)

        self.both(real, model)
        return made

    def resume(self, pair: Pair, stream: object = None) -> Any:
        """`KVCache.resume`."""
        return self.both(lambda: pair.real.resume(stream), pair.model.resume)

    def suspend(self, pair: Pair) -> None:
        """`KVCache.suspend`."""
        self.both(pair.real.suspend, pair.model.suspend)

    def close(self, pair: Pair) -> None:
        """`KVCache.close`. The pair stays usable for calls on a closed cache."""
        owner: Any = pair.real if self.engine is None else self.engine
        arguments = () if self.engine is None else (pair.real,)
        self._forget([pair])
        self.both(lambda: owner.close(*arguments), pair.model.close)

    def close_all(self, pairs: Sequence[Pair]) -> None:
        """`close_kv_caches`."""
        self._forget(pairs)
        self.both(
            lambda: self.manager.close_kv_caches([pair.real for pair in pairs]),
            lambda: self.model.close_kv_caches([pair.model for pair in pairs]),
        )

    def _forget(self, pairs: Sequence[Pair]) -> None:
        self.pairs = [pair for pair in self.pairs if pair not in pairs]

    def resize(self, pair: Pair, capacity: int | None = None, history: int | None = None) -> Any:
        """`KVCache.resize`."""
        real = self._engine_or(pair, "resize")
        return self.both(
            lambda: real(capacity, history), lambda: pair.model.resize(capacity, history)
        )

    def advance(self, pairs: Sequence[Pair], n: int | list[int], history: Any = None) -> Any:
        """`advance`."""
        owner: Any = self.manager if self.engine is None else self.engine
        return self.both(
            lambda: owner.advance([pair.real for pair in pairs], n, history=history),
            lambda: self.model.advance([pair.model for pair in pairs], n, history),
        )

    def truncate(self, pairs: Sequence[Pair], capacities: list[int]) -> None:
        """`truncate`."""
        owner: Any = self.manager if self.engine is None else self.engine
        self.both(
            lambda: owner.truncate([pair.real for pair in pairs], capacities),
            lambda: self.model.truncate([pair.model for pair in pairs], capacities),
        )

    def set_beam_width(self, pair: Pair, width: int, parents: list[int] | None = None) -> Any:
        """`KVCache.set_beam_width`."""
        real = self._engine_or(pair, "set_beam_width")
        return self.both(
            lambda: real(width, parents), lambda: pair.model.set_beam_width(width, parents)
        )

    def reorder_beams(self, pair: Pair, parents: list[int], valid: int | None = None) -> None:
        """`KVCache.reorder_beams`."""
        real = self._engine_or(pair, "reorder_beams")
        named = {"valid_tokens": valid}
        self.both(lambda: real(parents, **named), lambda: pair.model.reorder_beams(parents, valid))

    def _engine_or(self, pair: Pair, name: str) -> Callable[..., Any]:
        if self.engine is None:
            method: Callable[..., Any] = getattr(pair.real, name)
            return method
        follow = getattr(self.engine, name)
        return lambda *args, **kwargs: follow(pair.real, *args, **kwargs)

    def write(
        self,
        pairs: Sequence[Pair],
        starts: list[int],
        counts: list[int],
        tokens: list[list[int] | None] | None = None,
        **launch: Any,
    ) -> None:
        """Fills positions of all beams, on the device and in the model."""
        if self.engine is None:
            return
        reals = [pair.real for pair in pairs]
        self.engine.write(reals, counts, start=starts, tokens=tokens, **launch)
        for pair, start, count in zip(pairs, starts, counts, strict=True):
            for beam in range(pair.model.beam_width):
                keys = self.engine.lineage(pair.real, beam)
                for position in range(start, start + count):
                    key = keys[position]
                    if key is not None:
                        pair.model.write(beam, position, key)

    def look(self, pairs: Sequence[Pair], **launch: Any) -> None:
        """Enqueues a comparison of all content of active sequences."""
        if self.engine is not None:
            self.engine.look([pair.real for pair in pairs], **launch)

    def settle(self) -> None:
        """Waits for the comparisons."""
        if self.engine is not None:
            self.engine.settle()

    # -- comparison ----------------------------------------------------------------------------

    def compare(self) -> None:
        """Everything that shows, then `check`. Raises `OracleError`."""
        for index, pair in enumerate(self.pairs):
            self._compare_properties(index, pair)
            self._compare_content(index, pair)
        self._compare_pages()
        found = [(s.free, s.evictable) for s in self.manager.get_storage_statistics()]
        expected = self.model.free, self.model.evictable
        if found != [expected] * len(found):
            self._fail(f"free and evictable slots: expected {expected}, got {found}")
        if wrong := self.different_probe():
            self._fail(wrong)
        check(self.manager)

    def _compare_properties(self, index: int, pair: Pair) -> None:
        for name in (
            "status",
            "is_active",
            "capacity",
            "history_length",
            "num_blocks",
            "num_committed_tokens",
            "beam_width",
        ):
            expected, got = getattr(pair.model, name), getattr(pair.real, name)
            if expected != got:
                self._fail(f"cache {index}: {name}: expected {expected}, got {got}")
        for beam in range(pair.real.beam_width):
            row = pair.real.get_base_page_indices(0, beam).tolist()
            if len(row) != pair.model.num_blocks or (NO_SLOT in row and pair.model.is_active):
                self._fail(f"cache {index} beam {beam}: page indices {row}")
            if not pair.model.is_active and set(row) - {NO_SLOT}:
                self._fail(f"cache {index} beam {beam}: suspended, but shows {row}")

    def _compare_content(self, index: int, pair: Pair) -> None:
        if self.engine is None:
            return
        for beam in range(pair.real.beam_width):
            expected, got = pair.model.content(beam), self.engine.lineage(pair.real, beam)
            if expected != got:
                self._fail(f"cache {index} beam {beam}: histories: pages {expected}, beam {got}")

    def _compare_pages(self) -> None:
        """Equal pages of the model are equal slots, different ones different, and they stay."""
        kept = {*self.model.tree.pages(), *self.model.held}
        slot_of = {page: slot for page, slot in self._slot_of.items() if page in kept}
        for index, pair in enumerate(self.pairs):
            for beam, row in enumerate(pair.model.rows):
                slots = pair.real.get_aggregated_page_indices(0, beam).tolist()
                for ordinal, (page, slot) in enumerate(zip(row, slots, strict=True)):
                    before = slot_of.setdefault(page, slot)
                    if before != slot:
                        where = f"cache {index} beam {beam} block {ordinal}"
                        self._fail(f"{where}: expected the page in slot {before}, got slot {slot}")
        if len(set(slot_of.values())) != len(slot_of):
            taken = [slot for slot in slot_of.values() if [*slot_of.values()].count(slot) > 1]
            self._fail(f"different pages share slots {sorted(set(taken))}")
        self._slot_of = slot_of

    def _fail(self, what: str) -> None:
        raise OracleError(f"{what}\n{describe(self.manager._runtime)}")


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """("value", it) or (name of the exception, its text)."""
    try:
        return "value", call()
    except REFUSALS as error:
        if isinstance(error, OracleError):
            raise
        kind = next(kind for kind in REFUSALS if isinstance(error, kind))
        return kind.__name__, str(error)
