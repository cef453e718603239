"""Leases: pool memory as typed arrays for other libraries, ordered by events, never pulled away."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvcore.checks import as_bool, as_int
from kvcore.errors import StateError, wrong
from kvcore.leased import LeasedArray
from kvcore.page_views import Leasable, buffer_view, pool_view, table_view

if TYPE_CHECKING:
    from kvcore.runtime import Runtime


class Lease(LeasedArray):
    """Pool memory as one typed array, for as long as anybody uses it. A context manager.

    Give it to any library: `torch.from_dlpack(lease)`, `jax.numpy.from_dlpack(lease)`,
    `cupy.from_dlpack(lease)`, `numpy.asarray(lease)`. All see the pages in place. While the lease
    is open, or one of these arrays is alive, the memory stays where it is, and a `shutdown` of the
    manager raises `LeaseInUse`.

    Made by `KVCacheManager.lease` and `lease_page_table`.

    Notes
    -----
    What orders the consumer's work and kvcore's are events, on the device; nothing here waits on
    the host. A consumer's stream is *handed over* the pages: its later work sees everything that
    kvcore has enqueued until then. That happens at `stream=`, where a library takes the array by
    DLPack and names its stream, and at `acquire(stream)`. The pages are *handed back* by
    `release(stream)`: whatever kvcore enqueues later, on any stream, comes after the consumer's
    work until then, its reads as well as its writes. `close` does so, too, and after the last array
    was dropped the manager's next call that is not another lease. Whoever is handed pages before
    that comes after the earlier consumer as well. So an engine that keeps an array for long calls
    `acquire` before and `release` after each piece of work on a stream that kvcore does not use
    itself; on a stream that the sequences are bound to it needs neither.

    A stream that was handed something must exist until it is handed back; one that
    `acquire` named is the caller's until `release`, one that `stream=` named until `close`,
    whatever arrays are dropped in between. On the host device
    library calls run at once, as does kvcore's work; with deferred streams, call `synchronize`
    before the host looks.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcore as k
    >>> from kvcore.testing.small import small_config
    >>> manager = k.KVCacheManager(small_config(), device="host")
    >>> with manager.lease(0, "key") as lease:
    ...     pages = np.from_dlpack(lease)
    ...     pages[3] = 1
    ...     del pages  # else leaving the block raises LeaseInUse
    >>> manager.shutdown()
    """

    __slots__ = ()

    def __del__(self) -> None:
        entry = self._entry  # as its `close` does; most leases end here
        entry.closed = True
        entry.settle()

    def __repr__(self) -> str:
        state = "closed" if self._entry.closed else f"{self._entry.num_uses} arrays are out"
        return f"<{self._entry.name}: {self.dtype} {list(self.shape)}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # whose traceback may well hold arrays
            try:
                self._end(None)
            except StateError:  # a graph is being captured: the error of the block says more
                self._entry.close()
                self._entry.wait()

    @property
    def name(self) -> str:
        """What errors call it."""
        return self._entry.name

    @property
    def address(self) -> int:
        """Of the first element."""
        return self._view.address

    @property
    def is_open(self) -> bool:
        """Whether it can still be given to anybody."""
        return not self._entry.closed

    @property
    def num_arrays(self) -> int:
        """How many arrays of it are alive, other than by the CUDA array interface."""
        return self._entry.num_uses

    def acquire(self, stream: object) -> None:
        """Later work of `stream` comes after everything kvcore has enqueued so far.

        Enqueues a wait per stream that kvcore works on. Raises `StateError` once closed, and while
        a graph is being captured from one of these streams.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            self._entry.refuse_closed()
            runtime.leases.hand_over(self._entry, runtime.device.stream(stream), named=True)

    def release(self, stream: object = None) -> None:
        """Later work of kvcore comes after everything `stream` has enqueued so far.

        Default: every stream that the lease was handed over to since it was last handed back.
        Enqueues a wait on each stream that kvcore works on. Raises `StateError` while a graph is
        being captured from one of these streams.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.enter()
            some = self._entry.streams if stream is None else [runtime.device.stream(stream)]
            runtime.leases.hand_back(self._entry, list(some))

    def synchronize(self) -> None:
        """BLOCKS until everything enqueued on the device is done.

        For host code without a stream that reads the pages of a deferred device, or pinned ones.
        """
        self._entry.refuse_closed()
        self._runtime.device.synchronize()

    def close(self, stream: object = None) -> None:
        """Gives nothing more away, and hands the pages back from all consumers' streams.

        Parameters
        ----------
        stream : optional
            One more stream whose work so far comes before kvcore's later work.

        Raises
        ------
        StateError
            A graph is being captured from a stream to be handed back: the lease is still open.
        LeaseInUse
            A consumer still holds an array. The lease is closed nevertheless: the memory stays
            mapped until the last array is dropped, and whatever was enqueued until then on the
            streams it was handed over to comes before kvcore's next work.

        Notes
        -----
        Idempotent. A lease that nobody refers to any more is closed as well, without an error.
        """
        self._end(stream)
        self._entry.refuse_use("close")

    def _end(self, stream: object) -> None:
        runtime, entry = self._runtime, self._entry
        with runtime.lock:
            runtime.leases.end(entry, None if stream is None else runtime.device.stream(stream))


class LeaseCalls:
    """The part of a `KVCacheManager` that leases memory."""

    _runtime: Runtime

    def lease(
        self,
        layer: int | None = None,
        role: str | None = None,
        *,
        layer_group: int | None = None,
        pool: int = 0,
        pages: range | None = None,
        stream: object = None,
        readonly: bool = False,
    ) -> Lease:
        """Pool memory as a typed array that other libraries share, without a copy.

        Parameters
        ----------
        layer, role : int and str
            The pages of one buffer: `[slots, T, H, D]` for NHD, `[slots, H, T, D]` for HND (with an
            axis for the expansion before H where pages are finer than the block), of the declared
            type; uint8 `[slots, bytes]` of an opaque buffer. Index it with a slot. Slots lie apart,
            the rest is contiguous.
        layer_group, pool : int
            Instead of a buffer: one pool of a layer group as a whole and without gaps, for
            libraries that refuse such strides: `[page indices, ...]`, one page of one buffer after
            the other. Index it with the PER_LAYER page indices of `get_page_index_converter`. uint8
            `[slots, bytes]` where its buffers differ in type or shape.
        pages : range, optional
            Only these slots of a buffer. Default: all.
        stream : optional
            The consumer's stream: is handed the pages at once. Default: consumers name theirs when
            they take the array.
        readonly : bool
            Nobody may write through it, which consumers are told: those that can't be, because they
            know nothing but DLPack before 1.0 (JAX), are refused.

        Returns
        -------
        Lease
            Open. It ends when it is closed or dropped, and its last array is gone.

        Raises
        ------
        ValueError, TypeError
            Unknown layer, role, group or pool; a slot out of range; a layer that is no int.
        StateError
            The device has no memory, or the manager was shut down.

        Notes
        -----
        O(1). Enqueues nothing without `stream`.
        """
        runtime = self._runtime
        if layer is not None and layer.__class__ is not int:
            layer = as_int("layer", layer)
        if readonly is not False:
            readonly = as_bool("readonly", readonly)
        with runtime.lock:
            runtime.refuse_closed()
            kinds = layer_group.__class__, pool.__class__  # 0 is False is no pool
            key = layer, role, layer_group, pool, kinds, pages, readonly
            part = runtime.leases.known_part(key)
            if part is None:
                part = self._part(layer, role, layer_group, pool, pages)
                part = runtime.leases.remember(key, part.read_only() if readonly else part)
            return self._leased(part, stream)

    def _part(
        self,
        layer: int | None,
        role: str | None,
        layer_group: int | None,
        pool: int,
        pages: range | None,
    ) -> Leasable:
        """What the arguments of `lease` name."""
        if layer_group is None:
            if layer is None or role is None:
                raise wrong("layer, role", "a buffer, or layer_group=", (layer, role))
            if type(pool) is not int or pool:
                raise wrong("pool", "none with a buffer, which lies in one", pool)
            return buffer_view(self._runtime, layer, role, pages)
        if layer is None and role is None and pages is None:
            return pool_view(self._runtime, layer_group, pool)
        text = "no layer, role or pages with layer_group"
        raise wrong("layer_group", text, (layer, role, pages))

    def lease_page_table(self, layer_group: int = 0, *, stream: object = None) -> Lease:
        """The device's page table of a layer group as a read-only array, int32 `[rows, blocks]`.

        In place, like `page_table`: cells are current after `Batch.prepare`, and rows that were
        never used are addresses without memory, which must not be touched. Parameters, errors and
        order are those of `lease`.
        """
        runtime = self._runtime
        with runtime.lock:
            runtime.refuse_closed()
            return self._leased(table_view(runtime, layer_group), stream)

    def _leased(self, part: Leasable, stream: object) -> Lease:
        runtime = self._runtime
        on = None if stream is None else runtime.device.stream(stream)
        entry = runtime.leases.new(part.name, part.memory, part.end)
        lease = Lease(runtime, entry, part.view, part.patterns)
        if on is not None:
            try:
                runtime.leases.hand_over(entry, on, named=True)
            except BaseException:  # whose traceback may well hold the lease
                entry.close()
                raise
            entry.given = on.deputy or on
        return lease
