"""What a manager answers about prefixes, and what keeps or drops them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.checks import as_int, as_items, as_optional_int
from kvcore.config import ReuseScope
from kvcore.control.ghosts import Pressure
from kvcore.errors import StateError, wrong, wrong_type
from kvcore.explanation import Explanation, explain
from kvcore.pins import Pin
from kvcore.retention import as_time
from kvcore.tokens import TokenIds, token_view

if TYPE_CHECKING:
    from kvcore.runtime import Runtime

NO_SCOPE = ReuseScope()


class KeyMatch(NamedTuple):
    """What `match_block_keys` found."""

    blocks: int
    tokens: int


class PrefixCalls:
    """The part of a `KVCacheManager` that deals with published prefixes."""

    _runtime: Runtime

    # -- questions ---------------------------------------------------------------------------------

    def probe_reuse(
        self, reuse_scope: ReuseScope | None = None, input_tokens: TokenIds = ()
    ) -> int:
        """How many leading tokens a sequence created now would reuse. Changes nothing.

        Raises `TypeError` or `ValueError` for wrong ids. O(n) of comparing, about 50 us for 128k
        tokens in an int32 array.

        Notes
        -----
        Computing logits takes at least one token that is not reused: ask for `prompt[:-1]`.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return runtime.control.reuse.look_up(*self._query(reuse_scope, input_tokens))[1]

    def probe_first_new_block_key(
        self, reuse_scope: ReuseScope | None = None, input_tokens: TokenIds = ()
    ) -> bytes | None:
        """The key of the first block that would have to be computed, 32 bytes.

        None if that block is partial or everything is found. Two requests with the same answer
        would compute the same block: start one, and the other finds it. O(n), plus SHA-256 over
        blocks whose keys nobody asked for before.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return runtime.control.reuse.first_new_key(*self._query(reuse_scope, input_tokens))

    def match_block_keys(
        self, keys: Iterable[bytes], reuse_scope: ReuseScope | None = None
    ) -> KeyMatch:
        """The blocks and tokens of the longest known prefix with these block keys.

        Takes the keys of `sequence_to_blockchain_keys` without the root's. Hashes nothing but the
        tree's own blocks, each once.
        """
        wanted = as_items("keys", keys, "bytes of a block")
        for key in wanted:
            if not isinstance(key, bytes):
                raise wrong_type("keys", "a sequence of bytes, one per block", key)
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            reuse = runtime.control.reuse
            root = reuse.root(checked_scope(reuse_scope))
            return KeyMatch(*reuse.tree.keys.match(root, wanted))

    def explain(self, input_tokens: TokenIds, reuse_scope: ReuseScope | None = None) -> Explanation:
        """Where the match of a prompt ends, and why. Changes nothing.

        For people and logs: it also looks through every other scope, O(scopes * n). Evictions are
        remembered by run, the latest 65,536 of them.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            return explain(runtime.control.reuse, *self._query(reuse_scope, input_tokens))

    def snapshot_events(self) -> list[Any]:
        """Every block that can be reused now as a stored event, parents first.

        For a consumer that starts late or lost events: what it knows afterwards, and all later
        events, is what one knows that was there from the start. O(blocks).

        Raises
        ------
        StateError
            The manager was made without an `event_manager`.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            reuse = runtime.control.reuse
            listener = reuse.tree.listener
            if listener is None:
                raise StateError("snapshot_events: the manager was made without an event_manager")
            runs = (reuse.tree.keys.run(n, 0, reuse.slots_of) for n in reuse.tree.walk())
            return listener.snapshot(runs)

    def _query(
        self, reuse_scope: ReuseScope | None, input_tokens: TokenIds
    ) -> tuple[ReuseScope, memoryview]:
        text_only = self._runtime.config.text_only
        return checked_scope(reuse_scope), token_view(
            "input_tokens", input_tokens, text_only=text_only
        )

    # -- keeping -----------------------------------------------------------------------------------

    def pin(
        self,
        input_tokens: TokenIds,
        reuse_scope: ReuseScope | None = None,
        *,
        ttl: float | None = None,
        now: float | None = None,
    ) -> Pin:
        """Keeps the pages of the known prefix of some tokens from being evicted.

        Parameters
        ----------
        input_tokens : sequence or array of int [n]
        reuse_scope : ReuseScope, optional
        ttl, now : float, optional
            The first `expire` at or after `now + ttl` ends the pin. Default: only `close` does.

        Raises
        ------
        ValueError
            `ttl` without `now`, or not above 0.
        """
        deadline = None
        if now is not None:
            as_time("now", now)
        if ttl is not None:
            if not as_time("ttl", ttl) > 0:
                raise wrong("ttl", "a time above 0", ttl)
            deadline = as_time("now", now) + ttl
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            match, length = runtime.control.reuse.look_up(*self._query(reuse_scope, input_tokens))
            held = runtime.control.reuse.pin(match, length) if length else None
            pin = Pin(runtime, length, deadline, held)
            if held is not None:
                runtime.pins[pin] = None
            return pin

    def expire(self, now: float) -> None:
        """Ends the pins and the priorities whose time has come. Time passes in no other way.

        Call it at the same points on every rank of a group, and all decide alike.
        """
        moment = as_time("now", now)
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            timed = [(p.deadline, p) for p in runtime.pins if p.deadline is not None]
            for deadline, pin in sorted(timed, key=lambda item: item[0]):  # equal: as created
                if deadline <= moment:
                    pin.close()
            runtime.control.reuse.expire(moment)

    # -- dropping ----------------------------------------------------------------------------------

    def weights_epoch(self, lora_id: int | None = None) -> int | None:
        """The epoch of the base weights, or of a LoRA id's; None if none was ever set."""
        lora_id = as_optional_int("lora_id", lora_id, 0, 2**64 - 1)
        with self._runtime.lock:
            self._runtime.enter()
            return self._runtime.control.reuse.epoch(lora_id)

    def set_weights_epoch(self, epoch: int, lora_id: int | None = None) -> None:
        """Declares that the weights are others now: nothing computed before is found again.

        Parameters
        ----------
        epoch : int
            Unsigned 64-bit, higher than before; part of all keys from now on.
        lora_id : int, optional
            Whose weights. Default: the base's, which all scopes depend on.

        Raises
        ------
        ValueError
            The epoch is lower than the present one. An equal one does nothing.

        Notes
        -----
        Events announce the removal of all blocks of the scopes concerned at once; their pages are
        used first when room is needed. An open sequence of these scopes goes on with its pages and
        publishes nothing more. O(blocks) with events, else O(nodes).
        """
        epoch = as_int("epoch", epoch, 0, 2**64 - 1)
        lora_id = as_optional_int("lora_id", lora_id, 0, 2**64 - 1)
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            runtime.control.reuse.set_epoch(epoch, lora_id)

    def clear_reusable_blocks(self) -> None:
        """Frees every published page. Ends pins.

        Raises `StateError`, with nothing changed, while caches are open.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            refuse_while_open(runtime, "clear_reusable_blocks")
            end_pins(runtime)
            runtime.control.reuse.tree.clear(Pressure("clear_reusable_blocks", 0, 0))


def refuse_while_open(runtime: Runtime, call: str) -> None:
    """Raises `StateError` if caches are open."""
    if runtime.handles:
        raise StateError(f"{call}: {len(runtime.handles)} KV cache(s) still open; close first")


def end_pins(runtime: Runtime) -> None:
    """Lets go of everything that is pinned."""
    for pin in list(runtime.pins):
        pin.close()


def checked_scope(reuse_scope: ReuseScope | None) -> ReuseScope:
    """The scope of an argument: none given is the scope without LoRA and salt."""
    if reuse_scope is None:
        return NO_SCOPE
    if not isinstance(reuse_scope, ReuseScope):
        raise wrong_type("reuse_scope", "a ReuseScope", reuse_scope)
    return reuse_scope
