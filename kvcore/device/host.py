"""The devices that need no GPU: `HostDevice` on NumPy, `MetaDevice` with pages but no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvcore.device import reference, reference_paths
from kvcore.device.base import Array, Device, Int32, Int64, Memory, PageGeometry, PageStack, Stream
from kvcore.device.checks import (
    ANY,
    INT32,
    INT64,
    check_array,
    check_copy,
    check_fetch,
    check_foreign,
    check_ids,
    check_places,
    check_tokens,
    not_taken,
)
from kvcore.device.hostbeams import HostBeams, check_apart
from kvcore.device.hostformats import HostFormats
from kvcore.device.hostmemory import (
    POISON,
    HostMemory,
    MetaMemory,
    check_reserve,
    no_memory,
    own_memory,
)
from kvcore.device.hostpaths import HostPaths
from kvcore.device.simulated import SimulatedStream, Simulator
from kvcore.dlpack.importer import from_buffer, from_dlpack
from kvcore.dlpack.structs import HOST_KINDS
from kvcore.dlpack.view import ArrayView, view_of
from kvcore.errors import KVCoreError, wrong, wrong_type
from kvcore.ids import align_up

GRAIN: Final = 4096  # bytes
ALIGNMENT: Final = 64  # bytes


@dataclass(frozen=True, slots=True)
class HostPageStack:
    """The places of a stack."""

    places: tuple[tuple[HostMemory, int, int], ...]
    num_roles: int
    geometry: PageGeometry

    @property
    def num_layers(self) -> int:
        return len(self.places) // self.num_roles


class HostDevice(HostBeams, HostPaths, HostFormats, Device):
    """The contract on NumPy, with simulated streams.

    Parameters
    ----------
    deferred : bool, default False
        Whether work runs at once, or later in a random order that respects only stream order and
        the events waited for (`kvcore.device.simulated`). Deferred devices are for tests: their new
        memory is full of `0xA5`, so that reading too early shows.
    seed : int, default 0
        Decides the order on a deferred device.

    Examples
    --------
    >>> device = HostDevice(deferred=True, seed=1)
    >>> stream, array = device.create_stream(), device.empty((3,), "i4")
    >>> device.fill_words(array, 7, stream=stream)
    >>> array.tolist()
    [-1515870811, -1515870811, -1515870811]
    >>> device.to_host(array, stream=stream).tolist()
    [7, 7, 7]
    """

    kind = "host"
    has_memory = True

    def __init__(self, *, deferred: bool = False, seed: int = 0) -> None:
        self.simulator = Simulator(deferred=deferred, seed=seed)
        self._streams: WeakValueDictionary[int, SimulatedStream] = WeakValueDictionary()
        self._default_stream = self.create_stream()
        self.default_stream = self._default_stream

    @property
    def deferred(self) -> bool:
        """Whether work waits until somebody synchronises."""
        return self.simulator.deferred

    def synchronize(self) -> None:
        self.simulator.drain()

    def drain(self) -> None:
        """Runs everything that was enqueued on any stream."""
        self.simulator.drain()

    def stream(self, stream: object) -> Stream:
        if stream is None:
            return self._default_stream
        if isinstance(stream, SimulatedStream):
            if stream.simulator is not self.simulator:
                raise wrong("stream", "a stream of this device", stream)
            return stream
        if isinstance(stream, int) and not isinstance(stream, bool):
            if (found := self._streams.get(stream)) is None:
                raise wrong("stream", "the handle of a stream of this device", stream)
            return found
        if hasattr(stream, "__cuda_stream__"):
            raise wrong("stream", "a stream of the host device", stream, "open a cuda device")
        raise wrong_type("stream", "a stream of this device, its handle or None", stream)

    def create_stream(self) -> Stream:
        stream = self.simulator.create_stream()
        self._streams[stream.handle] = stream
        return stream

    def grain(self, quota: int) -> int:
        return GRAIN

    def reserve(self, max_bytes: int, nbytes: int, grain: int) -> Memory:
        check_reserve(max_bytes, nbytes, grain)
        return HostMemory(max_bytes, nbytes, grain, poison=self.deferred)

    def empty(
        self, shape: int | tuple[int, ...], dtype: Any, *, stream: Stream | None = None
    ) -> Array:
        shape, dtype = (shape,) if isinstance(shape, int) else shape, np.dtype(dtype)
        return self.pinned(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def as_array(
        self,
        values: Any,
        *,
        stream: Stream | None = None,
        dtype: str | None = None,
        writable: bool = False,
        name: str = "values",
    ) -> Array:
        plain = type(values) is np.ndarray and values.dtype.isnative
        if plain:  # names of types take NumPy longer than everything else here
            array, kind = values, None if values.dtype.isbuiltin == 1 else values.dtype.name
        else:
            array, kind = _taken(values, name)
        check_foreign(name, kind, dtype, array.flags.writeable or not writable)
        return array

    def view(self, view: ArrayView) -> Array:
        return view.numpy()

    def describe(self, array: Array, dtype: str | None = None) -> ArrayView:
        if not isinstance(array, np.ndarray):
            raise wrong_type("array", "a NumPy array", array)
        return view_of(array, dtype)

    def copy(self, source: Array, target: Array, *, stream: Stream) -> None:
        check_copy(source, target, np.ndarray)
        self._submit(stream, "copy", np.copyto, target, source)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        array = whole[start : start + nbytes]
        if self.deferred:
            array[...] = POISON
        return array

    def fill_words(self, target: Array, value: int, *, stream: Stream) -> None:
        _check_words("target", target)
        self._submit(stream, "fill_words", reference.fill_words, target, value)

    def scatter_table(
        self,
        table: Array,
        index: Int64,
        value: Int32,
        target: Array,
        words: Int32,
        *,
        stream: Stream,
    ) -> None:
        _check_words("table", table)
        _check_words("target", target)
        check_array("index", index, np.ndarray, INT64, (ANY,))
        check_array("value", value, np.ndarray, INT32, (len(index),))
        check_array("words", words, np.ndarray, INT32, (ANY,))
        if len(words) > target.size:
            raise wrong("words", f"at most the target's {target.size}", len(words))
        args = table, index, value, target, words
        self._submit(stream, "scatter_table", reference.scatter_table, *args)

    def map_tokens(
        self,
        tables: Array,
        rows: Array,
        starts: Array,
        ends: Array,
        out: Array,
        *,
        tokens_per_block: int,
        stream: Stream,
    ) -> None:
        if tokens_per_block < 1:
            raise wrong("tokens_per_block", "at least 1", tokens_per_block)
        check_array("tables", tables, np.ndarray, INT32, (ANY, ANY, ANY), strided=True)
        check_array("rows", rows, np.ndarray, INT32, (ANY,))
        check_array("starts", starts, np.ndarray, INT32, rows.shape)
        check_array("ends", ends, np.ndarray, INT32, rows.shape)
        check_array("out", out, np.ndarray, INT32, (len(tables), ANY, 2))
        args = tables, rows, starts, ends, out, tokens_per_block
        self._submit(stream, "map_tokens", reference.map_tokens, *args)

    def take_rows(self, table: Array, rows: Array, out: Array, *, stream: Stream) -> None:
        check_array("table", table, np.ndarray, INT32, (ANY, ANY), strided=True)
        check_array("rows", rows, np.ndarray, INT32, (ANY,))
        check_array("out", out, np.ndarray, INT32, (len(rows), ANY))
        self._submit(stream, "take_rows", reference.take_rows, table, rows, out)

    def page_stack(
        self, places: Sequence[tuple[Memory, int, int]], num_roles: int, geometry: PageGeometry
    ) -> PageStack:
        check_places(places, num_roles, geometry)
        own = tuple(
            (own_memory(memory), slot_bytes, offset) for memory, slot_bytes, offset in places
        )
        return HostPageStack(own, num_roles, geometry)

    def append(
        self, stack: PageStack, mapping: Array, sources: Sequence[Array], *, stream: Stream
    ) -> None:
        args = _stack_args(stack, mapping)
        check_tokens("sources", sources, np.ndarray, stack, len(mapping))
        self._submit(stream, "append", reference.append, *args, tuple(sources))

    def gather(
        self, stack: PageStack, mapping: Array, targets: Sequence[Array], *, stream: Stream
    ) -> None:
        args = _stack_args(stack, mapping)
        check_tokens("targets", targets, np.ndarray, stack, len(mapping))
        self._submit(stream, "gather", reference.gather, *args, tuple(targets))

    def move_tokens(self, stack: PageStack, src: Array, dst: Array, *, stream: Stream) -> None:
        args = *_stack_args(stack, src, "src"), dst
        check_array("dst", dst, np.ndarray, INT32, (len(src), 2))
        self._submit(stream, "move_tokens", reference_paths.move_tokens, *args)

    def copy_pages(
        self, pools: Sequence[tuple[Memory, int]], src: Int32, dst: Int32, *, stream: Stream
    ) -> None:
        backed = _backed_pools(pools)
        src, dst = check_ids("src", src), check_ids("dst", dst)
        if len(src) != len(dst):
            raise wrong("dst", f"one slot per source ({len(src)})", len(dst))
        check_apart(reference.num_slots(backed), src, dst)
        self._submit(stream, "copy_pages", reference.copy_pages, backed, src, dst)

    def fill_pages(
        self, pools: Sequence[tuple[Memory, int]], slots: Int32, value: int, *, stream: Stream
    ) -> None:
        if not 0 <= value <= 255:
            raise wrong("value", "a byte, 0 to 255", value)
        args = _backed_pools(pools), check_ids("slots", slots), value
        self._submit(stream, "fill_pages", reference.fill_pages, *args)

    def write_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, *, stream: Stream
    ) -> None:
        args = _stack_args(stack, mapping)
        check_array("keys", keys, np.ndarray, INT64, (len(mapping),))
        self._submit(stream, "write_fingerprints", reference.write_fingerprints, *args, keys)

    def verify_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, bad: Array, *, stream: Stream
    ) -> None:
        args = *_stack_args(stack, mapping), keys, bad
        check_array("keys", keys, np.ndarray, INT64, (len(mapping),))
        check_array("bad", bad, np.ndarray, INT32, (len(mapping),))
        self._submit(stream, "verify_fingerprints", reference.verify_fingerprints, *args)

    def to_host(self, array: Array, *, stream: Stream) -> NDArray[Any]:
        found = np.empty(array.shape, array.dtype)
        self._submit(stream, "to_host", np.copyto, found, array)
        stream.synchronize()
        return found

    def fetch(self, array: Array, target: NDArray[Any], *, stream: Stream) -> None:
        check_fetch(array, target, np.ndarray)
        self._submit(stream, "fetch", np.copyto, target, array)

    def from_host(self, values: NDArray[Any], target: Array, *, stream: Stream) -> None:
        if values.shape != target.shape:
            raise wrong("values", f"the target's shape {target.shape}", values.shape)
        if values.dtype != target.dtype:
            raise wrong("values", f"the target's dtype {target.dtype}", str(values.dtype))
        self._submit(stream, "from_host", np.copyto, target, values.copy())

    def close(self) -> None:
        self.drain()

    def _submit(self, stream: Stream, label: str, work: Callable[..., None], *args: Any) -> None:
        if not isinstance(stream, SimulatedStream) or stream.simulator is not self.simulator:
            raise wrong_type("stream", "a stream of this device", stream)
        stream.submit(label, work, *args)


class MetaDevice(HostDevice):
    """Pages that are counted but not stored: for sizing, replay and control-plane benchmarks.

    Streams, events, `empty` and `pinned` work as on the host; pool memory has addresses only, and
    operations raise `StateError`.
    """

    kind = "meta"
    has_memory = False

    def __init__(self) -> None:
        super().__init__()
        self._next_base = 1 << 40

    def reserve(self, max_bytes: int, nbytes: int, grain: int) -> Memory:
        check_reserve(max_bytes, nbytes, grain)
        reserved = max(align_up(max_bytes, grain), grain)
        memory = MetaMemory(self._next_base, reserved, nbytes, grain)
        self._next_base += align_up(reserved, GRAIN) + GRAIN
        return memory

    def page_stack(
        self, places: Sequence[tuple[Memory, int, int]], num_roles: int, geometry: PageGeometry
    ) -> PageStack:
        raise no_memory()

    def _submit(self, stream: Stream, label: str, work: Callable[..., None], *args: Any) -> None:
        raise no_memory()


def _taken(values: Any, name: str) -> tuple[NDArray[Any], str]:
    """A view of a foreign array in host memory, and the name of its type."""
    text = "a NumPy array, or one with DLPack, an array interface or a buffer, in host memory"
    array = None
    try:
        if isinstance(values, np.ndarray) and hasattr(values, "mask"):
            raise BufferError("a masked array")
        if hasattr(values, "__array_interface__"):
            array = np.asarray(values)  # also of a matrix, which would keep two axes
        elif not hasattr(values, "__dlpack_device__"):
            array = from_buffer(values)
        elif values.__dlpack_device__()[0] in HOST_KINDS:
            view = from_dlpack(values)
            return view.numpy(), view.dtype
    except KVCoreError:  # a lease that is closed
        raise
    except (BufferError, RuntimeError, ValueError) as error:
        raise not_taken(name, text, values, str(error)) from error
    if array is None:
        raise not_taken(name, text, values)
    if not array.dtype.isnative:
        raise not_taken(name, text, values, f"{array.dtype.str} is not this machine's byte order")
    return array, array.dtype.name


def _backed_pools(pools: Sequence[tuple[Memory, int]]) -> list[reference.Pool]:
    return [(own_memory(memory).backed, slot_bytes) for memory, slot_bytes in pools]


def _stack_args(
    stack: PageStack, mapping: Array, name: str = "mapping"
) -> tuple[list[reference.Place], int, PageGeometry, Array]:
    """What the reference needs to know, with the memory that is backed now."""
    if not isinstance(stack, HostPageStack):
        raise wrong_type("stack", "a page stack of a host device", stack)
    check_array(name, mapping, np.ndarray, INT32, (ANY, 2))
    places = [(own_memory(memory).backed, size, offset) for memory, size, offset in stack.places]
    return places, stack.num_roles, stack.geometry, mapping


def _check_words(name: str, array: Array) -> None:
    shape = array.shape if isinstance(array, np.ndarray) else ()
    check_array(name, array, np.ndarray, INT32, shape)
