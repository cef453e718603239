"""The contract between the planes: what a device must do. `cuda` and `host` implement it.

Every method that enqueues work takes `stream`, returns at once and never waits for the device,
unless it says so. Arrays are the device's own: `numpy.ndarray` on the host, `cupy.ndarray` on CUDA.
Shapes use `R` rows of a page table, `B` blocks per row, `N` tokens, `L` stacked layers, `H` heads,
`D` head dimension, `P` pages, `T` tokens per block. Ids are int32, byte offsets are 64-bit.

Device arrays are C-contiguous unless a method says otherwise. Kernels never leave their memory: a
slot outside `[0, num_slots)`, where `num_slots` is the smallest `memory.nbytes // slot_bytes` of
the pools named at the time of the call, counts as -1, and so does a token outside its slot's
buffer. Calls with nothing to do (no tokens, no slots, no rows) are allowed and enqueue nothing that
could fail. Arrays of a wrong type raise `TypeError`, wrong dtypes, shapes or strides `ValueError`,
before anything is enqueued.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.device.beams import BeamArrays as BeamArrays
from kvcore.device.beams import BeamOperations
from kvcore.device.beams import TailBuffers as TailBuffers
from kvcore.device.beams import TailPlace as TailPlace
from kvcore.device.formats import FormatOperations
from kvcore.device.formats import PageNumbers as PageNumbers
from kvcore.device.formats import PoolNumbers as PoolNumbers
from kvcore.device.formats import RowRanges as RowRanges
from kvcore.device.parts import Array as Array
from kvcore.device.parts import Event as Event
from kvcore.device.parts import Int32 as Int32
from kvcore.device.parts import Int64 as Int64
from kvcore.device.parts import Memory as Memory
from kvcore.device.parts import PageStack as PageStack
from kvcore.device.parts import Stream as Stream
from kvcore.device.paths import PathArrays as PathArrays
from kvcore.device.paths import PathOperations
from kvcore.dlpack.structs import CPU
from kvcore.dlpack.view import ArrayView
from kvcore.layout import PageGeometry as PageGeometry


class Device(BeamOperations, PathOperations, FormatOperations):
    """Memory, streams and the operations of the cache, on one device.

    Those of beams stand in `kvcore.device.beams` and `kvcore.device.paths`, page tables in other
    forms in `kvcore.device.formats`.
    """

    kind: str
    """"cuda", "host" or "meta"."""

    has_memory: bool
    """False for `meta`: pages are counted, nothing is stored, operations raise `StateError`."""

    default_stream: Stream | None
    """The stream used where none was bound: the host's own; None on CUDA."""

    @abstractmethod
    def stream(self, stream: object) -> Stream:
        """The `Stream` for a foreign stream object or raw handle; keeps its owner alive.

        The same handle gives the same object. Accepts this device's own `Stream`, anything with
        `__cuda_stream__`, a CuPy or torch stream, or an int handle. Raises `TypeError` for anything
        else, `ValueError` for a stream of another device. None is a `ValueError` on CUDA and the
        device's own stream on the host.
        """

    @abstractmethod
    def create_stream(self) -> Stream:
        """A new stream that does not synchronise with the legacy default stream."""

    @abstractmethod
    def grain(self, quota: int) -> int:
        """The unit of pool memory in bytes for a level of `quota` bytes (4096 on the host)."""

    @abstractmethod
    def reserve(self, max_bytes: int, nbytes: int, grain: int) -> Memory:
        """Reserves `max_bytes` of addresses and backs the first `nbytes` with memory.

        Both are rounded up to `grain`; at least one grain is reserved. `nbytes` may be 0.
        """

    @abstractmethod
    def empty(
        self, shape: int | tuple[int, ...], dtype: Any, *, stream: Stream | None = None
    ) -> Array:
        """A device array with undefined content.

        With `stream` its memory may be reused, once the array is gone, by later arrays made for the
        same stream, in stream order. Without, it belongs to the caller until the device is idle.
        """

    @abstractmethod
    def as_array(
        self,
        values: object,
        *,
        stream: Stream | None = None,
        dtype: str | None = None,
        writable: bool = False,
        name: str = "values",
    ) -> Array:
        """A view of a foreign array on this device, without a copy, whatever its strides.

        Takes the device's own arrays as they are, and anything with DLPack, the array interface
        (CUDA's on CUDA) or, on the host, a buffer. Of types that NumPy lacks (bfloat16, float8,
        float4) the bits come, as unsigned integers, as they stand in pages; `dtype` names the one
        that such values must be. With `stream` later work on it comes after the work that the
        producer has enqueued on the array, unless `stream` is being captured; without, and for the
        device's own arrays, the caller sees to that. Raises `TypeError` for anything else, for
        another device's memory, for another type than `dtype`, and where `writable` is asked of a
        read-only array; `name` is the caller's own for `values`.
        """

    @abstractmethod
    def view(self, view: ArrayView) -> Array:
        """The array of this device that a view of its memory describes, bits as in `as_array`."""

    @abstractmethod
    def describe(self, array: Array, dtype: str | None = None) -> ArrayView:
        """The inverse of `view`: where an array of this device lies.

        `dtype` says what its bits are, where NumPy lacks that type.
        """

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """Kind and number of the device in DLPack's terms."""
        return CPU, 0

    @abstractmethod
    def copy(self, source: Array, target: Array, *, stream: Stream) -> None:
        """Copies between device arrays of equal shape and dtype, whatever their strides."""

    def copied_to(
        self, place: tuple[int, int], source: Array, *, stream: Stream, consumer: int
    ) -> ArrayView:
        """A dense copy on another device, made on `stream`, which is one of this device.

        The stream there whose handle is `consumer` waits for it, so that the copy's memory is not
        freed before, either. Raises `BufferError` where no such copy can be made.
        """
        own = self.dlpack_device
        raise BufferError(f"memory of device {own} cannot be copied to {place} here")

    @abstractmethod
    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that kernels of this device can read directly. Blocks; not for hot paths."""

    # -- operations: all enqueue on `stream` and return at once ------------------------------------

    @abstractmethod
    def fill_words(self, target: Array, value: int, *, stream: Stream) -> None:
        """Sets every int32 of the contiguous array `target` to `value`."""

    @abstractmethod
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
        """`table.ravel()[index[i]] = value[i]` and `target[:len(words)] = words`, in one launch.

        `index` (int64, distinct, in range), `value` and `words` lie in memory from `pinned`, which
        is read when the work runs: the caller keeps it unchanged until an event recorded after this
        call. `target` is an int32 device array; `words` may be empty.
        """

    @abstractmethod
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
        """Where each token of a ragged batch lies, for all `G` layer groups, in one launch.

        `tables` is an int32 view `[G, R, B]` whose last axis is contiguous and whose first two
        strides are arbitrary; `rows`, `starts`, `ends` int32 `[M]`: batch row i covers the tokens
        `[ends[i-1], ends[i])` of the batch (`ends[-1] = 0`), which are the positions `starts[i]+k`
        of the sequence in table row `rows[i]`. `out` int32 `[G, N, 2]` gets (slot, token within
        the block) and (-1, 0) where the row or the position is outside the table, the cell is
        negative or the token is at or after `ends[M-1]`. `ends` does not decrease; its values may
        exceed N.
        """

    def step_launch(self, arrays: StepArrays) -> StepLaunch:
        """`scatter_table` and `map_tokens` of a batch as one call that binds their arrays.

        May block; made once. A device overrides this where it can do with less work in each call.
        """
        return StepLaunch(self, arrays)

    @abstractmethod
    def take_rows(self, table: Array, rows: Array, out: Array, *, stream: Stream) -> None:
        """`out[i, b] = table[rows[i], b]` for `out` int32 `[M, b]`; -1 where there is no cell.

        That is: row negative or at or after R, column at or after B (`b` may be below or above B).
        The rows of `table` `[R, B]` may lie apart (any row stride, contiguous last axis).
        """

    @abstractmethod
    def page_stack(
        self, places: Sequence[tuple[Memory, int, int]], num_roles: int, geometry: PageGeometry
    ) -> PageStack:
        """Prepares kernel addressing of L * K buffers, layer-major (layer 0 role 0, role 1, ...).

        Each place is (pool memory, bytes of a slot in that pool, byte offset of the buffer in a
        slot). May block; made once; stays right when a pool is resized. Raises `ValueError` where a
        buffer would leave its slot or a token its page.
        """

    @abstractmethod
    def append(
        self, stack: PageStack, mapping: Array, sources: Sequence[Array], *, stream: Stream
    ) -> None:
        """Writes new tokens into their pages, all layers and roles in one launch.

        `mapping` int32 `[N, 2]` as from `map_tokens`; negative slots are skipped. `sources`: one
        array `[L, N, H, D]` per role, any strides, items of `geometry.itemsize` bytes. Two tokens
        of one call must not have the same place.
        """

    @abstractmethod
    def gather(
        self, stack: PageStack, mapping: Array, targets: Sequence[Array], *, stream: Stream
    ) -> None:
        """The inverse of `append`: reads tokens into `targets` `[L, N, H, D]`, any strides.

        Negative slots give zeros.
        """

    @abstractmethod
    def copy_pages(
        self, pools: Sequence[tuple[Memory, int]], src: Int32, dst: Int32, *, stream: Stream
    ) -> None:
        """Copies slot `src[i]` to slot `dst[i]` in every pool, in one launch.

        Each pool is (memory, bytes of a slot). `src` and `dst` are host arrays, copied before the
        call returns. No slot may be both a source and a target, or a target twice. A pair with a
        negative or too large slot is skipped.
        """

    @abstractmethod
    def fill_pages(
        self, pools: Sequence[tuple[Memory, int]], slots: Int32, value: int, *, stream: Stream
    ) -> None:
        """Sets every byte of the given slots to `value`, in every pool, in one launch.

        `value` is 0 to 255. `slots` is a host array, copied before the call returns; slots outside
        the pool are skipped.
        """

    @abstractmethod
    def write_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, *, stream: Stream
    ) -> None:
        """Fills tokens with a pattern of (keys[n], layer, role, byte position). For tests.

        `keys` int64 `[N]` on the device names what the token is (lineage, position, beam). The
        pattern is `kvcore.device.reference.fingerprint`, bit for bit.
        """

    @abstractmethod
    def verify_fingerprints(
        self, stack: PageStack, mapping: Array, keys: Array, bad: Array, *, stream: Stream
    ) -> None:
        """Writes into `bad` int32 `[N]` how many 4-byte words of each token are not the pattern's.

        Summed over the stack's layers and roles. Trailing bytes of a token count as one word. 0
        where the slot is negative.
        """

    @abstractmethod
    def to_host(self, array: Array, *, stream: Stream) -> NDArray[Any]:
        """Copies a device array (any strides) to the host. BLOCKS until `stream` has done it."""

    @abstractmethod
    def fetch(self, array: Array, target: NDArray[Any], *, stream: Stream) -> None:
        """Copies a contiguous device array into host memory from `pinned`, of equal shape, dtype.

        `target` holds the values once an event recorded after this call has passed; the caller
        keeps it until then.
        """

    @abstractmethod
    def from_host(self, values: NDArray[Any], target: Array, *, stream: Stream) -> None:
        """Copies a small host array into a device array of equal shape and dtype.

        Any strides on both sides; `values` may be changed as soon as the call returns.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """BLOCKS until all work enqueued on this device is done, on any stream."""

    @abstractmethod
    def close(self) -> None:
        """Gives back everything the device holds for itself. Idempotent."""


class StepArrays(NamedTuple):
    """What `scatter_table` and `map_tokens` of a step work on: always the same arrays."""

    table: Array
    tables: Array
    target: Array
    rows: Array
    starts: Array
    ends: Array
    out: Array
    tokens_per_block: int


def staged_parts(
    staged: NDArray[np.uint8], cells: int, words: int
) -> tuple[Int64, Int64, Int32, Int32]:
    """Views of a step's staging: the number of cells, their indices, their values, the words."""
    index_end, value_end = 8 + 8 * cells, 8 + 12 * cells
    return (
        staged[:8].view(np.int64),
        staged[8:index_end].view(np.int64),
        staged[index_end:value_end].view(np.int32),
        staged[value_end : value_end + 4 * words].view(np.int32),
    )


class StepLaunch:
    """`scatter_table`, then `map_tokens`, with everything bound but the staged data.

    A device may inherit and do the same with less work in each call.
    """

    def __init__(self, device: Device, arrays: StepArrays) -> None:
        self._device, self._arrays = device, arrays

    def __call__(self, staged: NDArray[np.uint8], cells: int, words: int, stream: Stream) -> None:
        """Enqueues both.

        `staged` is pinned; `staged_parts` says what lies where in it.
        """
        a = self._arrays
        _, index, value, given = staged_parts(staged, cells, words)
        self._device.scatter_table(a.table, index, value, a.target, given, stream=stream)
        self._device.map_tokens(
            a.tables,
            a.rows,
            a.starts,
            a.ends,
            a.out,
            tokens_per_block=a.tokens_per_block,
            stream=stream,
        )
