"""What the public objects of one manager share: both planes, the lock, streams and handles."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.bound_rows import BoundRows
from kvcore.checks import token_counts
from kvcore.control.plane import ControlPlane
from kvcore.control.sequences import NO_LIMIT
from kvcore.device.base import Device, Memory, Stream
from kvcore.device.fences import Fences
from kvcore.device.tables import DeviceTables
from kvcore.errors import StateError, wrong, wrong_type
from kvcore.ids import NO_TICKET, Ticket
from kvcore.plan import PageCopies
from kvcore.stacks import PageStacks

if TYPE_CHECKING:
    from kvcore.config import KVCacheManagerConfig
    from kvcore.kv_cache import KVCache
    from kvcore.layout import Layout

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MOST_CHANGES = 1024  # noted one by one until the device table takes them over

_sequence_of = attrgetter("_sequence")
_runtime_of = attrgetter("_runtime")


class Runtime:
    """The inside of a `KVCacheManager`. Its methods expect the lock to be held.

    Streams: a sequence's pages are used in the order of the stream it is bound to. Work of a batch
    that runs on another stream is lent to it and joined back before anything of the sequence
    changes hands.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        layout: Layout,
        device: Device,
        control: ControlPlane,
        pools: list[list[Memory]],
        default_stream: Stream | None,
    ) -> None:
        self.config, self.layout, self.device, self.control = config, layout, device, control
        self.pools = pools
        self.pool_places = [
            list(zip(memories, group.slot_bytes, strict=True))
            for memories, group in zip(pools, layout.pool_groups, strict=True)
        ]
        self.stacks = PageStacks(layout, device, self.pool_places)
        shape, groups = control.seqs.shape, control.pool_group_of
        holds = min(s.capacity // groups.count(i) for i, s in enumerate(control.slots))
        bounded = config.max_seq_len is not None or shape.max_blocks < holds
        self.longest = shape.max_seq_len if bounded else None  # None: pages run out first
        self.default_stream = default_stream
        self.lock = threading.RLock()
        self.fences = Fences()
        self.tables = (
            DeviceTables(device, control.seqs.table, self.fences) if device.has_memory else None
        )
        self.bound_rows = BoundRows(control.seqs)
        self.handles: dict[int, weakref.ref[KVCache]] = {}
        self.closed = False
        self._streams: list[Stream | None] = [None]
        self._lent: dict[int, list[Stream]] = {}
        self._dropped: list[int] = []
        self._batch: list[KVCache] = []
        self._batch_sequences: Index = np.empty(0, np.intp)

    # -- handles -----------------------------------------------------------------------------------

    def enter(self, *, keep_batch: bool = True) -> None:
        """Refuses a shut-down manager and closes sequences whose handles were dropped.

        Without `keep_batch` the handles of the last batch are let go first.
        """
        if self.closed:
            raise StateError("the manager was shut down; create a new one")
        if not keep_batch:
            self.forget_batch()
        if len(self.control.seqs.dirty) > MOST_CHANGES and self.tables is not None:
            self.tables.compact(self.control.seqs.dirty)
        while self._dropped:
            sequence = self._dropped.pop()
            self.destroy(sequence)  # first: the warning may be turned into an error
            warnings.warn(
                f"a KVCache (sequence {sequence}) was dropped without close(); freeing its pages",
                ResourceWarning,
                stacklevel=4,
            )

    def register(self, sequence: int, handle: KVCache) -> None:
        """Remembers whose handle `sequence` has, and notices when it is dropped."""
        dropped = self._dropped

        def gone(_: object) -> None:
            dropped.append(sequence)

        self.handles[sequence] = weakref.ref(handle, gone)

    def resolve(self, kv_caches: Sequence[KVCache]) -> Index:
        """The sequence numbers of distinct active handles of this manager.

        The same handles as last time cost one comparison of lists.
        """
        if kv_caches == self._batch:  # handles have no __eq__: this compares identities
            return self._batch_sequences
        sequences = self.numbers_of(kv_caches)
        active = self.control.seqs.active[sequences]
        if np.count_nonzero(active) != active.size:
            bad = int(np.argmin(active))
            raise wrong(
                f"kv_caches[{bad}]", "an active KVCache", kv_caches[bad], "resume() or leave it out"
            )
        self._batch, self._batch_sequences = list(kv_caches), sequences
        return sequences

    def numbers_of(self, kv_caches: Sequence[KVCache]) -> Index:
        """The sequence numbers of distinct open handles of this manager."""
        try:
            sequences = np.fromiter(map(_sequence_of, kv_caches), np.intp, len(kv_caches))
            owners = list(map(_runtime_of, kv_caches))
        except (AttributeError, TypeError):
            raise wrong_type("kv_caches", "a sequence of KVCache", kv_caches) from None
        if owners.count(self) != len(owners):
            raise wrong("kv_caches", "caches of this manager", "a cache of another manager")
        if sequences.size and sequences.min() < 0:
            bad = int(np.argmin(sequences))
            raise wrong(f"kv_caches[{bad}]", "an open KVCache", kv_caches[bad])
        twice = self.control.seqs.first_duplicate(sequences)
        if twice is not None:
            raise wrong("kv_caches", "distinct caches", f"sequence {twice} more than once")
        return sequences

    def forget_batch(self) -> None:
        """Lets go of the last batch, since a handle closed, changed its status or was dropped."""
        self._batch, self._batch_sequences = [], np.empty(0, np.intp)

    # -- streams -----------------------------------------------------------------------------------

    def bind(self, sequence: int, stream: Stream) -> None:
        """Moves a sequence to `stream`, which waits for all earlier work on its pages."""
        before = self.stream_of(sequence)
        if before is stream:
            return
        if before is not None:
            self.come_home(sequence)
            stream.wait(before.record())
        self.control.seqs.stream[sequence] = self._number_of(stream)

    def _number_of(self, stream: Stream) -> int:
        if stream in self._streams:
            return self._streams.index(stream)
        used = set(np.unique(self.control.seqs.stream).tolist())
        for number in range(1, len(self._streams)):
            if number not in used:
                self._streams[number] = stream
                return number
        self._streams.append(stream)
        return len(self._streams) - 1

    def stream_of(self, sequence: int) -> Stream | None:
        """The stream a sequence is bound to; None before the first resume."""
        return self._streams[self.control.seqs.stream.item(sequence)]

    def streams_of(self, sequences: Index) -> list[Stream]:
        """The distinct streams of resumed sequences."""
        if len(self._streams) == 2 and sequences.size:  # the usual case: everyone on one stream
            return self._streams[1:]  # type: ignore[return-value]
        numbers = self.control.seqs.stream[sequences]
        if numbers.size and numbers.min() == numbers.max():
            distinct = [int(numbers[0])]
        else:
            distinct = np.unique(numbers).tolist()
        return [stream for n in distinct if (stream := self._streams[n]) is not None]

    def choose_stream(self, stream: object, bound: Iterable[Stream]) -> Stream:
        """The stream a call runs on: the one given, else the one all its sequences share."""
        if stream is not None:
            return self.device.stream(stream)
        distinct = list(bound)
        if len(distinct) == 1:
            return distinct[0]
        if self.default_stream is not None:
            return self.default_stream
        raise wrong(
            "stream", "a stream, since the sequences share none", None, "pass stream= to this call"
        )

    def lend(self, sequences: Index, stream: Stream, owners: list[Stream]) -> None:
        """Lets `stream` use pages of sequences bound to `owners`, after earlier work on them."""
        if self._lent:
            for sequence in sequences.tolist():
                if any(other is not stream for other in self._lent.get(sequence, ())):
                    self.come_home(sequence)
        if owners == [stream]:
            return
        for owner in owners:
            if owner is not stream:
                stream.wait(owner.record())
        for sequence in sequences.tolist():
            if self.stream_of(sequence) is not stream:
                lent = self._lent.setdefault(sequence, [])
                if stream not in lent:
                    lent.append(stream)

    def come_home(self, sequence: int) -> None:
        """Makes a sequence's own stream wait for the streams its pages were lent to."""
        lent = self._lent.get(sequence) if self._lent else None
        owner = self.stream_of(sequence)
        if lent and owner is not None:
            for stream in lent:
                owner.wait(stream.record())
            del self._lent[sequence]

    def moment(self, sequence: int) -> Ticket:
        """A ticket for the end of everything enqueued so far on a sequence's pages."""
        self.come_home(sequence)
        stream = self.stream_of(sequence)
        return NO_TICKET if stream is None else self.fences.record(stream)

    def wait(self, sequences: Index, tickets: tuple[Int64, ...]) -> None:
        """Makes the streams of `sequences` wait for `tickets`."""
        for stream in self.streams_of(sequences):
            for some in tickets:
                self.fences.wait(stream, some)

    # -- transactions ------------------------------------------------------------------------------

    def grow(self, sequences: Index, capacity: Int32) -> bool:
        """Pages for `capacity[i]` tokens, each above the sequence's limit.

        False: nothing changed.
        """
        seqs = self.control.seqs
        shape = seqs.shape
        blocks = -(-capacity // shape.tokens_per_block)
        self._check_reach(sequences, capacity, blocks)
        # No row can outgrow the table: it has a block for every slot, or the reach was checked.
        if not self.control.grow(sequences, blocks, self.wait):
            return False
        if self.bound_rows:
            self.bound_rows.refresh_all(sequences)
        return True

    def grow_one(self, sequence: int, capacity: int) -> bool:
        """`grow` of one sequence."""
        seqs = self.control.seqs
        blocks = -(-capacity // seqs.shape.tokens_per_block)
        plain = not self.bound_rows and self.longest is None
        if plain and blocks == seqs.num_blocks[sequence] + 1 and seqs.width[sequence] == 1:
            return self.control.grow_by_one(sequence, self.wait)
        # NO_LIMIT is above any reach, so larger wishes are refused like it
        return self.grow(np.array([sequence]), np.array([min(capacity, NO_LIMIT)], np.int32))

    def _check_reach(self, sequences: Index, capacity: Int32, blocks: Int32) -> None:
        longest = self.longest
        if longest is not None and int(capacity.max()) > longest:
            raise wrong("capacity", f"at most max_seq_len={longest}", int(capacity.max()))
        if self.bound_rows:
            bound = self.control.seqs.block_bound[sequences]
            if np.count_nonzero(blocks > bound):
                bad = int(np.argmax(blocks > bound))
                raise wrong(
                    "capacity",
                    f"at most the {int(bound[bad])} blocks of the bound page-index buffer",
                    f"{int(capacity[bad])} tokens = {int(blocks[bad])} blocks",
                    "bind a longer buffer first",
                )

    def shrink(self, sequences: Index, blocks: Int32) -> None:
        """Frees the blocks from `blocks[i]` on; later owners wait for each sequence's stream."""
        parts = []
        for stream, part in self._by_stream(sequences):  # what can fail comes first
            for sequence in sequences[part].tolist():
                self.come_home(sequence)
            parts.append((part, NO_TICKET if stream is None else self.fences.record(stream)))
        for part, ticket in parts:
            self.control.shrink(sequences[part], blocks[part], ticket)
        if self.bound_rows:
            self.bound_rows.refresh_all(sequences)

    def _by_stream(self, sequences: Index) -> list[tuple[Stream | None, Index]]:
        numbers = self.control.seqs.stream[sequences]
        return [
            (self._streams[number], np.flatnonzero(numbers == number))
            for number in np.unique(numbers).tolist()
        ]

    def destroy(self, sequence: int) -> None:
        """Frees everything of a sequence and forgets its handle."""
        ticket = self.moment(sequence) if self.control.seqs.num_blocks[sequence] else NO_TICKET
        self.bound_rows.release(sequence)
        self.control.destroy(sequence, ticket)
        self.control.seqs.stream[sequence] = 0
        self._lent.pop(sequence, None)
        self.handles.pop(sequence, None)
        self.forget_batch()

    def copy_pages(self, copies: tuple[PageCopies, ...], stream: Stream) -> None:
        """Enqueues page copies, one launch per pool group."""
        if not self.device.has_memory:
            return
        for copy in copies:
            if copy.src.size:
                self.device.copy_pages(
                    self.pool_places[copy.pool_group], copy.src, copy.dst, stream=stream
                )

    # -- questions ---------------------------------------------------------------------------------

    def is_open(self, kv_cache: KVCache) -> bool:
        """Whether a handle is open; raises for anything that is not a handle of this manager."""
        if getattr(kv_cache, "_runtime", None) is not self:
            raise wrong_type("kv_caches", "caches of this manager", kv_cache)
        return kv_cache._sequence >= 0

    def active_sequence(self, kv_cache: KVCache) -> int:
        """The sequence number of one active handle."""
        if getattr(kv_cache, "_runtime", None) is not self:
            raise wrong_type("kv_caches", "caches of this manager", kv_cache)
        sequence = kv_cache._sequence
        if sequence < 0 or not self.control.seqs.active.item(sequence):
            raise wrong(
                "kv_caches[0]", "an active KVCache", kv_cache, "resume() it or leave it out"
            )
        return sequence

    def ranges(
        self, sequences: Index, num_tokens: int | ArrayLike, start: ArrayLike | None
    ) -> tuple[Int32, int | Int32]:
        """First position of each sequence, and the number of positions, inside its capacity."""
        seqs = self.control.seqs
        counts = token_counts("num_tokens", num_tokens, sequences.size)
        if start is None:
            starts: Int32 = seqs.history[sequences]
        else:
            first = token_counts("start", start, sequences.size)
            starts = np.broadcast_to(np.asarray(first, np.int32), sequences.shape)
        bad = starts + counts > seqs.capacity[sequences]
        if np.count_nonzero(bad):
            i = int(np.argmax(bad))
            raise wrong(
                f"start[{i}] + num_tokens[{i}]",
                f"at most the capacity of {seqs.capacity[sequences[i]]} tokens",
                int((starts + counts)[i]),
            )
        return starts, counts

    def device_tables(self) -> DeviceTables:
        """The device's page tables; refuses a device without memory."""
        if self.tables is None:
            raise StateError(f"the {self.device.kind} device has pages without memory")
        return self.tables

    def close(self) -> None:
        """Waits for the known streams and gives the memory back."""
        for stream in filter(None, {*self._streams, self.default_stream}):
            stream.synchronize()
        if self.tables is not None:
            self.tables.close()
        for memory in (memory for group in self.pools for memory in group):
            memory.close()
        self.closed = True
