"""Faults on demand: the k-th allocation, launch or event of a manager fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvcore.checks import as_int
from kvcore.control.slots import SlotTable
from kvcore.device.base import Device
from kvcore.errors import KVCoreError, wrong, wrong_type

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager
    from kvcore.runtime import Runtime

MEMORY: Final = ("reserve", "empty", "pinned")
COPY: Final = ("copy_pages", "copy_tokens", "copy_tails")
LAUNCH: Final = (
    "fill_words",
    "scatter_table",
    "map_tokens",
    "take_rows",
    "append",
    "gather",
    "copy",
    "copy_pages",
    "copy_tokens",
    "copy_tails",
    "step_rows",
    "permute_rows",
    "step_paths",
    "take_paths",
    "map_paths",
    "move_tokens",
    "block_offsets",
    "csr_pages",
    "ragged_pages",
    "token_slots",
    "fetch",
    "fill_pages",
    "from_host",
    "write_fingerprints",
    "verify_fingerprints",
)
KINDS: Final = ("take", "copy", "launch", "memory", "record", "wait")


class FaultError(KVCoreError, RuntimeError):
    """The failure that `fail_at` was asked for. Nothing of the failing operation was done."""


class Fault:
    """Counts operations and makes one of them fail.

    Attributes
    ----------
    calls : int
        Operations of the kind so far, the failing one included.
    fired : bool
        Whether it failed yet. If a run ends with False, it has fewer operations than `k`.
    """

    def __init__(self, what: str, k: int) -> None:
        self.what, self.k = what, k
        self.calls = 0

    @property
    def fired(self) -> bool:
        """Whether the k-th operation was reached."""
        return self.calls >= self.k

    def count(self) -> None:
        """Called before each operation; raises `FaultError` at the k-th."""
        self.calls += 1
        if self.calls == self.k:
            raise FaultError(f"{self.what} number {self.k} fails, as the test asked")

    def guard(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """`operation` with a count before it."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return operation(*args, **kwargs)

        return guarded


@contextmanager
def fail_at(target: KVCacheManager | Device, what: str, k: int = 1) -> Iterator[Fault]:
    """Makes the k-th operation of a kind fail inside the block, once.

    Parameters
    ----------
    target : KVCacheManager or Device
        Whose operations. A device will do for "copy", "launch" and "memory", also while a manager
        is being built on it.
    what : str
        "take": slots are taken. "copy": pages are copied. "launch": any operation is enqueued,
        copies included; on a GPU all but those of `Batch.prepare`. "memory": memory is reserved,
        resized or allocated. "record", "wait": an event is recorded for freed slots, or waited for.
    k : int
        Which one, from 1.

    Yields
    ------
    Fault
        How often the operation was reached.

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
    >>> manager = k.KVCacheManager(config, device="host")
    >>> kv = manager.create_kv_cache()
    >>> with fail_at(manager, "take"):
    ...     kv.resume() and kv.resize(9)
    Traceback (most recent call last):
    kvcore.testing.faults.FaultError: take number 1 fails, as the test asked
    >>> kv.capacity, kv.resize(9)
    (0, True)
    """
    if what not in KINDS:
        raise wrong("what", f"one of {KINDS}", what)
    runtime: Runtime | None = getattr(target, "_runtime", None)
    device: Any = target if runtime is None else runtime.device
    if not isinstance(device, Device):
        raise wrong_type("target", "a KVCacheManager or a Device", target)
    fault = Fault(what, as_int("k", k, 1))
    with ExitStack() as undo:
        if what in ("copy", "launch"):
            for name in COPY if what == "copy" else LAUNCH:
                _shadow(undo, device, name, fault.guard(getattr(device, name)))
        elif what == "memory":
            _guard_memory(undo, device, runtime, fault)
        elif runtime is None:
            raise wrong("target", "a KVCacheManager", target, f"{what!r} is no device operation")
        elif what == "take":
            for slots in runtime.control.slots:
                _guard_slots(undo, slots, fault)
        else:
            name = "record" if what == "record" else "wait_one"
            _shadow(undo, runtime.fences, name, fault.guard(getattr(runtime.fences, name)))
        yield fault


def _shadow(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    """Puts an attribute of the object before the method of its class."""
    setattr(owner, name, value)
    undo.callback(delattr, owner, name)


def _guard_memory(undo: ExitStack, device: Any, runtime: Runtime | None, fault: Fault) -> None:
    def guarded(memory: Any) -> Any:
        _shadow(undo, memory, "resize", fault.guard(memory.resize))
        return memory

    for name in MEMORY[1:]:
        _shadow(undo, device, name, fault.guard(getattr(device, name)))
    reserve = fault.guard(device.reserve)
    _shadow(undo, device, "reserve", lambda *args, **kwargs: guarded(reserve(*args, **kwargs)))
    if runtime is not None:
        memories = [memory for group in runtime.pools for memory in group]
        twins = runtime.tables, runtime.path_tables
        memories += [twin.memory for twin in twins if twin is not None]
        for memory in memories:
            guarded(memory)


def _guard_slots(undo: ExitStack, slots: SlotTable, fault: Fault) -> None:
    class Guarded(SlotTable):
        """The same table for as long as the block lasts; it has no room for attributes."""

        __slots__ = ()
        take = fault.guard(SlotTable.take)
        take_one = fault.guard(SlotTable.take_one)

    slots.__class__ = Guarded
    undo.callback(setattr, slots, "__class__", SlotTable)
