"""`CudaDevice`: the contract on one GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, Final
from weakref import WeakSet

import cupy
import numpy as np
from numpy.typing import NDArray

from kvcore.device.base import (
    Array,
    Device,
    Int32,
    Int64,
    Memory,
    PageGeometry,
    PageStack,
    StepArrays,
    StepLaunch,
    Stream,
)
from kvcore.device.checks import check_fetch, check_ids, check_places
from kvcore.device.cuda import launch as launching
from kvcore.device.cuda.beams import CudaBeams
from kvcore.device.cuda.blocks import (
    Block,
    address,
    allocate,
    graveyard_of,
    pinned,
    trusts_header,
    view,
)
from kvcore.device.cuda.driver import context_of, current_device
from kvcore.device.cuda.foreign import ForeignArrays
from kvcore.device.cuda.formats import CudaFormats
from kvcore.device.cuda.kernels import SOURCES, Source, packing
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.lists import SentLists
from kvcore.device.cuda.memory import CudaMemory, Mapper, own_memory
from kvcore.device.cuda.seen import Seen
from kvcore.device.cuda.slots import SlotWork
from kvcore.device.cuda.streams import CudaStream, KnownStreams, as_own
from kvcore.device.cuda.tokens import TokenStack
from kvcore.device.cuda.uploads import Uploads
from kvcore.device.cuda.words import CudaStepLaunch, WordWork
from kvcore.errors import StateError, wrong, wrong_type

SMALLEST_GRAIN: Final = 2 << 20  # bytes
GIB: Final = 1 << 30
MANY: Final = 64
"""Dropped objects from which on `empty` frees them, although that waits for the device."""
FOR_TESTS: Final = frozenset({"fingerprint", "latch"})
"""Sources that are compiled when they are first used."""


class CudaDevice(CudaBeams, CudaFormats, ForeignArrays, Device):
    """One GPU: pools in CUDA virtual memory, arrays of CuPy, work on the callers' streams.

    Nothing here has a default stream, and the caller's current device stays what it was. Several
    threads may call at once.

    Parameters
    ----------
    index : int, optional
        Which GPU. Default: the one whose context is current, else the first.

    Raises
    ------
    ValueError
        There is no such GPU.
    DriverError
        The driver cannot be used.

    Notes
    -----
    Opening compiles the kernels, once per machine and CuPy version: about a second, then some
    milliseconds. They are loaded at once, so that no first call happens during a graph capture.
    """

    kind = "cuda"
    has_memory = True
    default_stream = None

    def __init__(self, index: int | None = None) -> None:
        self.index = current_device() if index is None else index
        self.context = context_of(self.index)
        if not trusts_header():
            raise StateError("this Python keeps NumPy arrays in a way that kvcore does not know")
        self.graveyard = graveyard_of(self.index)
        self.mappings = Seen()
        self._streams = KnownStreams(self.context, self.graveyard)
        self._lock = threading.RLock()
        self._mapper = Mapper(self.context, self.graveyard)
        self._sources: dict[str, Source] = dict(SOURCES)
        self._launches: dict[str, Launch] = {}
        self._stacks: WeakSet[Any] = WeakSet()  # what has launches of its own
        self._uploads = Uploads(self)
        self._own_stream: Stream | None = None
        with self.context.current():
            for source in self._sources.values():
                if source.name not in FOR_TESTS:
                    launching.load(self.index, source)
        self.lists = SentLists(self)
        self._prepare()

    def __repr__(self) -> str:
        return f"CudaDevice({self.index})"

    # -- streams -----------------------------------------------------------------------------------

    def stream(self, stream: object) -> Stream:
        if type(stream) is int:
            known = self._streams.recent.get(stream)
            if known is not None:
                return known
        return self._streams.find(stream)

    def create_stream(self) -> Stream:
        return self._streams.create()

    # -- memory ------------------------------------------------------------------------------------

    def grain(self, quota: int) -> int:
        """2 MiB below a quota of 1 GiB, doubled for each power of two up to 32 MiB from 16 GiB."""
        doublings = min(4, max(quota // GIB, 1).bit_length() - 1)
        return max(SMALLEST_GRAIN << doublings, self._mapper.granularity)

    def reserve(self, max_bytes: int, nbytes: int, grain: int) -> Memory:
        if grain < 1:
            raise wrong("grain", "at least 1", grain)
        if max_bytes < 0:
            raise wrong("max_bytes", "at least 0", max_bytes)
        if not 0 <= nbytes <= max_bytes:
            raise wrong("nbytes", f"0 to max_bytes={max_bytes}", nbytes)
        return CudaMemory(self._mapper, max_bytes, nbytes, grain)

    def empty(
        self, shape: int | tuple[int, ...], dtype: Any, *, stream: Stream | None = None
    ) -> Array:
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        blocks = stream.blocks if isinstance(stream, CudaStream) else None
        if blocks is None:
            if len(self.graveyard) > MANY:
                self.graveyard.drain()
            size = max(nbytes, 1)
            block = Block(allocate(size, self.graveyard), size, self.graveyard)
        else:
            block = blocks.take(nbytes)
        return view(block.pointer, nbytes, block, self.index, shape, dtype)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self.graveyard.drain()
        return pinned(nbytes, self.graveyard)

    def collect(self) -> None:
        """Frees what dropped objects left behind. BLOCKS until the device is idle.

        `reserve`, `pinned` and `close` do the same, and every call that finds no memory.
        """
        self.graveyard.drain()

    # -- operations --------------------------------------------------------------------------------

    def fill_words(self, target: Array, value: int, *, stream: Stream) -> None:
        self._words.fill(target, value, stream)

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
        self._words.scatter(table, index, value, target, words, stream)

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
        self._words.map_tokens(tables, rows, starts, ends, out, tokens_per_block, stream)

    def step_launch(self, arrays: StepArrays) -> StepLaunch:
        return CudaStepLaunch(self, arrays, self._words)

    def take_rows(self, table: Array, rows: Array, out: Array, *, stream: Stream) -> None:
        self._words.take_rows(table, rows, out, stream)

    def page_stack(
        self, places: Sequence[tuple[Memory, int, int]], num_roles: int, geometry: PageGeometry
    ) -> PageStack:
        check_places(places, num_roles, geometry)
        own = [(own_memory(memory, self.context), size, offset) for memory, size, offset in places]
        stack = TokenStack(self, own, num_roles, geometry)
        self._stacks.add(stack)
        return stack

    def append(
        self, stack: PageStack, mapping: Array, sources: Sequence[Array], *, stream: Stream
    ) -> None:
        self._stack(stack).move("append", "sources", mapping, sources, stream)

    def gather(
        self, stack: PageStack, mapping: Array, targets: Sequence[Array], *, stream: Stream
    ) -> None:
        self._stack(stack).move("gather", "targets", mapping, targets, stream)

    def move_tokens(self, stack: PageStack, src: Array, dst: Array, *, stream: Stream) -> None:
        self._stack(stack).move_within(src, dst, stream)

    def copy_pages(
        self, pools: Sequence[tuple[Memory, int]], src: Int32, dst: Int32, *, stream: Stream
    ) -> None:
        src, dst = check_ids("src", src), check_ids("dst", dst)
        if len(src) != len(dst):
            raise wrong("dst", f"one slot per source ({len(src)})", len(dst))
        self._copies(self._pools(pools), np.stack((src, dst)), 0, as_own(stream))

    def fill_pages(
        self, pools: Sequence[tuple[Memory, int]], slots: Int32, value: int, *, stream: Stream
    ) -> None:
        if not 0 <= value <= 255:
            raise wrong("value", "a byte, 0 to 255", value)
        ids = check_ids("slots", slots)
        self._fills(self._pools(pools), ids[None], value * 0x01010101, as_own(stream))

    def write_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, *, stream: Stream
    ) -> None:
        self._stack(stack).write_fingerprints(mapping, keys, stream)

    def verify_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, bad: Array, *, stream: Stream
    ) -> None:
        self._stack(stack).verify_fingerprints(mapping, keys, bad, stream)

    def to_host(self, array: Array, *, stream: Stream) -> NDArray[Any]:
        on, found = as_own(stream), np.empty(array.shape, array.dtype)
        if array.size:
            if not array.flags.c_contiguous:
                dense = self.empty(array.shape, array.dtype, stream=stream)
                self._words.copy(array, dense, on)
                array = dense
            copy = address(found), array.data.ptr, found.nbytes, on.native
            self.context.call("cuMemcpyDtoHAsync", *copy)
        on.synchronize()
        return found

    def fetch(self, array: Array, target: NDArray[Any], *, stream: Stream) -> None:
        check_fetch(array, target, cupy.ndarray)
        if array.size:
            copy = address(target), array.data.ptr, target.nbytes, as_own(stream).native
            self.context.call("cuMemcpyDtoHAsync", *copy)

    def from_host(self, values: NDArray[Any], target: Array, *, stream: Stream) -> None:
        on = as_own(stream)
        if values.shape != target.shape:
            raise wrong("values", f"the target's shape {target.shape}", values.shape)
        if values.dtype != target.dtype:
            raise wrong("values", f"the target's dtype {target.dtype}", str(values.dtype))
        if on.is_capturing():
            raise StateError(
                "from_host cannot be captured in a graph: a replay would read staging that by then "
                "belongs to somebody else; call it before the capture"
            )
        if not values.size:
            return
        dense = target
        if not target.flags.c_contiguous:
            dense = self.empty(target.shape, target.dtype, stream=stream)
        self._uploads.send(values, dense.data.ptr, on)
        if dense is not target:
            self._words.copy(dense, target, on)

    def synchronize(self) -> None:
        self.context.synchronize()
        self.graveyard.drain()

    def close(self) -> None:
        with self._lock:
            self._uploads.close()
            self._own_stream = None
            self._streams.clear()
            self.lists.clear()
        self.graveyard.drain()

    # -- for the parts of this package -------------------------------------------------------------

    def source(self, name: str) -> Source:
        """A kernel source with its tunables."""
        return self._sources[name]

    def retune(self, source: Source) -> None:
        """Uses another tuning of a source for everything that is prepared from now on."""
        if source.name not in self._sources:
            raise wrong("source", f"one of {', '.join(self._sources)}", source.name)
        self._sources[source.name] = source
        self._launches.clear()
        for stack in self._stacks:
            stack.forget_plans()
        self._prepare()

    def _prepare(self) -> None:
        """Launches of the present tunings."""
        self._words = WordWork(self)
        self._copies = SlotWork(self, "copy_pages", "copy_pages")
        self._fills = SlotWork(self, "fill", "fill_pages")
        self._prepare_beams(self, self._words)
        self._prepare_formats(self)

    def new_launch(self, source: Source, entry: str, head: str, shared: int = 0) -> Launch:
        """A launch of an entry point that packs `head` in each call."""
        function = launching.load(self.index, source)[entry]
        fields = source.entries[entry]
        return Launch(self.context, entry, function, fields, source.threads, head, shared)

    def launch(self, name: str, entry: str) -> Launch:
        """The shared launch of an entry point that packs its whole argument block in each call."""
        launch = self._launches.get(entry)
        if launch is None:
            source = self.source(name)
            launch = self.new_launch(source, entry, packing(source.entries[entry]))
            self._launches[entry] = launch
        return launch

    def own_stream(self) -> Stream:
        """A stream that only this device's own small copies use."""
        with self._lock:
            if self._own_stream is None:
                self._own_stream = self.create_stream()
            return self._own_stream

    def upload(self, target: Array, values: NDArray[Any]) -> None:
        """Copies into a dense array of equal size. BLOCKS for as long as that takes."""
        stream = as_own(self.own_stream())
        self._uploads.send(values, target.data.ptr, stream)
        stream.synchronize()

    def _pools(self, pools: Sequence[tuple[Memory, int]]) -> list[tuple[CudaMemory, int]]:
        return [(own_memory(memory, self.context), slot_bytes) for memory, slot_bytes in pools]

    def _stack(self, stack: PageStack) -> TokenStack:
        if isinstance(stack, TokenStack) and stack.device is self:
            return stack
        if isinstance(stack, TokenStack):
            raise wrong("stack", f"a page stack of cuda:{self.index}", stack)
        raise wrong_type("stack", "a page stack of a cuda device", stack)
