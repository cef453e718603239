"""kvcore's pools as JAX arrays: written by kvcore between calls, read inside `jit`.

JAX knows dense arrays only, and orders itself behind the work of others at one moment: when it
takes an array. So it gets whole pools without gaps, indexed by PER_LAYER page indices, and takes
them anew for every piece of work::

    pools = JaxPools(manager)
    convert = manager.get_page_index_converter(layer, "key")
    ...
    step.append(...)                                  # kvcore writes
    logits = pools.read(decode, tokens, page_indices) # decode(pages, tokens, page_indices), jitted

`read` takes the pools, calls the function with them as its first argument, and puts kvcore's later
work behind what it returns. On a GPU all of that are events; JAX's CPU backend has no streams, so
there `read` BLOCKS until the results are ready.

JAX arrays are immutable and the pools are not: an array from here shows other values after kvcore
has written, and must not outlive the call. It can't be donated to a computation while `read` runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import jax
import numpy as np

import kvcore as k
from kvcore.dlpack.exporter import Exporter, check_lease
from kvcore.dlpack.structs import CUDA, HOST_KINDS
from kvcore.dlpack.view import ArrayView
from kvcore.errors import wrong, wrong_type

__all__ = ["JaxPools", "array"]

ALIGNMENT: Final = 64  # bytes: JAX's CPU backend copies what is not
WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
"""Types that JAX makes narrower, unless it is told otherwise."""
OUTSIDE: Final = "call read() outside of jit, vmap and grad, with a function that has them"
PATIENCE: Final = 1.0
"""Seconds that JAX has, after its results are ready, to let go of arrays that were dropped."""


class _Given:
    """A lease as JAX asks for it: a capsule from before version 1, though with newer types."""

    def __init__(self, lease: Exporter) -> None:
        self._lease = lease

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._lease.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        capsule = self._lease.old_capsule(stream=stream)
        reason = _why_copied(self._lease.view)
        if reason is not None:
            del capsule  # which whoever keeps the error would keep
            raise BufferError(reason)
        return capsule


def array(lease: Exporter) -> Any:
    """A lease as a JAX array of the same memory, ordered behind kvcore's work so far.

    Parameters
    ----------
    lease : Lease
        Of whole pools, `manager.lease(layer_group=...)`, or any other without gaps. Not read-only:
        JAX can't be told.

    Returns
    -------
    jax.Array
        On the device of the pages. On the host device it is for the time until kvcore writes.

    Raises
    ------
    BufferError
        JAX would copy: the lease has gaps, 64-bit types while JAX has them off, memory that is not
        aligned; or has no such layout: float4 (take `lease.bits()`).
    StateError
        The lease is closed.
    """
    check_lease(lease)
    view = lease.view
    try:
        found = jax.numpy.from_dlpack(_Given(lease))
    except k.KVCoreError:  # closed, or a captured graph
        raise
    except Exception as error:
        reason = _refusal(view)
        if reason is None:
            raise
        raise BufferError(reason) from error
    converted = found.dtype.name != view.dtype
    if converted or (view.size and found.unsafe_buffer_pointer() != view.address):
        raise BufferError("JAX made a copy, which would never see what kvcore writes")
    return found


def _why_copied(view: ArrayView) -> str | None:
    """Why JAX would convert or copy a view: a whole pool, and with a thread of its own.

    Done with a conversion, the thread needs Python's lock to let go of the lease. Who asks for the
    address of the result meanwhile has the lock and waits for the thread, for ever.
    """
    if view.dtype in WIDE and not jax.config.jax_enable_x64:
        return f"JAX would convert {view.dtype} unless jax_enable_x64 is on"
    if view.device[0] in HOST_KINDS and view.address % ALIGNMENT and view.size:
        return f"JAX would copy: {view.address:#x} is no multiple of {ALIGNMENT}"
    return None


def _refusal(view: ArrayView) -> str | None:
    """Why JAX did not take a view. Asked when it did not: the answer takes longer than a lease."""
    if not view.is_contiguous:
        text = f"shape {view.shape} with strides {view.strides}"
        return f"JAX takes no gaps: {text}; lease the pool with layer_group="
    if view.dtype.startswith("float4"):
        return "JAX has no packed float4; take lease.bits() and unpack inside jit"
    return None


class JaxPools:
    """Every pool of a manager, for computations that read them. A context manager.

    Parameters
    ----------
    manager : KVCacheManager
        With memory. Pools of float4 are given as uint8, two elements each.

    Attributes
    ----------
    keys : tuple of (layer group, pool)
        Of the arrays that `read` passes, in this order.
    """

    def __init__(self, manager: k.KVCacheManager) -> None:
        if not isinstance(manager, k.KVCacheManager):
            raise wrong_type("manager", "a KVCacheManager", manager)
        self._device = manager.device
        places = manager.layout.places.values()
        self.keys = tuple(dict.fromkeys((int(p.layer_group), p.pool) for p in places))
        self._leases = [manager.lease(layer_group=group, pool=pool) for group, pool in self.keys]
        on_gpu = self._leases[0].__dlpack_device__()[0] == CUDA
        self._stream = manager.device.create_stream() if on_gpu else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except k.LeaseInUse:
            if kind is None:
                raise

    def read(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What `function(pages, *arguments, **named)` returns.

        Parameters
        ----------
        function : callable
            Usually jitted. Reads the arrays in the tuple `pages`, one per pool: `[page indices,
            ...]`. Must return all that it computes from them, as arrays in any tree. BLOCKS where
            one of them has a type that DLPack lacks, such as int4 or random keys.

        Raises
        ------
        ValueError
            It returns no array, so that nothing tells when it is done; one of `pages` itself, also
            as NumPy's, which would change with the pool; or tracers, because `read` is being traced
            itself, which happens once and not for each piece of work.
        StateError
            It donated a pool to a computation.
        """
        if any(isinstance(its, jax.core.Tracer) for its in jax.tree.leaves((arguments, named))):
            raise wrong("arguments", "arrays", "tracers", OUTSIDE)
        if self._stream is None:
            for lease in self._leases:
                lease.synchronize()  # nothing to wait for, but on deferred streams
        pages = tuple(map(self._taken, self._leases))
        guards = [self._guard(its) for its in pages]
        results = function(pages, *arguments, **named)
        self._hand_back(results)
        donated = [key for key, its in zip(self.keys, pages, strict=True) if its.is_deleted()]
        del guards
        if donated:
            raise k.StateError(f"pool {donated[0]} was donated: leased memory can't be given away")
        return results

    def _taken(self, lease: k.Lease) -> Any:
        return array(lease.bits() if lease.dtype.startswith("float4") else lease)

    def _guard(self, pages: Any) -> Any:
        """Somebody else who uses an array: as long as there is one, JAX does not donate it."""
        if self._stream is None:
            return np.asarray(pages)  # shares
        return pages.__dlpack__(stream=self._stream.handle)

    def _is_within(self, leaf: Any) -> bool:
        """Whether an array that was returned lies in a pool."""
        if isinstance(leaf, np.ndarray):
            place = leaf.ctypes.data
        elif isinstance(leaf, jax.Array) and leaf.size and len(leaf.devices()) == 1:
            if self._stream is None:
                leaf.block_until_ready()  # see `_why_copied`
            place = leaf.unsafe_buffer_pointer()
        else:
            return False
        return any(lease.address <= place < lease.view.end for lease in self._leases)

    def _hand_back(self, results: Any) -> None:
        found = jax.tree.leaves(results)
        leaves = [leaf for leaf in found if isinstance(leaf, jax.Array)]
        got = "" if leaves else "none"
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            got = f"tracers: {OUTSIDE}"
        elif any(map(self._is_within, found)):
            got = "pages"
        if got:
            text = "a function that returns arrays which it computes from the pages"
            raise wrong("function", text, f"one that returns {got}")
        if self._stream is None:
            jax.block_until_ready(leaves)
            return
        for leaf in leaves:
            _order_behind(leaf, self._stream.handle)
        for lease in self._leases:
            lease.release(self._stream)

    def close(self) -> None:
        """Ends the leases. BLOCKS until JAX has let go of what it used.

        Raises `LeaseInUse` while somebody holds an array of a pool. Idempotent.
        """
        gc.collect()  # JAX keeps what it is asked to drop until then
        end = time.monotonic() + PATIENCE
        while any(lease.num_arrays for lease in self._leases) and time.monotonic() < end:
            time.sleep(1e-3)
        busy = []
        for lease in self._leases:
            try:
                lease.close()
            except k.LeaseInUse as error:
                busy.append(error)
        if busy:
            raise busy[0]


def _order_behind(leaf: Any, stream: int | None) -> None:
    """Puts a stream behind the work that makes an array."""
    try:
        leaf.__dlpack__(stream=stream)
    except (AttributeError, RuntimeError):  # random keys, int4: DLPack has no such type
        jax.block_until_ready(leaf)
