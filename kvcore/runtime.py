"""What the public objects of one manager share: both planes, the lock, streams and handles."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.beam_steps import Tails
from kvcore.bound_rows import BoundRows
from kvcore.checks import token_counts
from kvcore.control.commit import CommitPlan, plan_commit, publish
from kvcore.control.fork import shared_blocks, take_private, write_fork
from kvcore.control.plane import ControlPlane
from kvcore.control.rebinding import written_tokens
from kvcore.control.sequences import NO_LIMIT
from kvcore.device.base import Device, Memory, Stream
from kvcore.device.fences import Fences
from kvcore.device.tables import DeviceTables
from kvcore.errors import InternalError, ParentsPending, StateError, wrong
from kvcore.ids import NO_TICKET, Ticket
from kvcore.indirect_steps import TokenMover
from kvcore.lease_book import LeaseBook
from kvcore.parents import PendingParents
from kvcore.plan import PageCopies
from kvcore.registry import Registry
from kvcore.stacks import PageStacks
from kvcore.streams import Streams

if TYPE_CHECKING:
    from kvcore.config import KVCacheManagerConfig
    from kvcore.kv_cache import KVCache
    from kvcore.layout import Layout
    from kvcore.pins import Pin

Index = NDArray[np.intp]
Int32 = NDArray[np.int32]

MOST_CHANGES = 1024  # noted one by one until the device table takes them over


class Runtime:
    """The inside of a `KVCacheManager`. Its methods expect the lock to be held."""

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
        self.lock = threading.RLock()
        self.fences = Fences()
        for slots in control.slots:
            slots.join = self.fences.join
        control.reuse.layer_groups = tuple(layout.layer_groups)
        self.streams = Streams(device, control.seqs, self.fences, default_stream)
        self.tables = (
            DeviceTables(device, control.seqs.table, self.fences) if device.has_memory else None
        )
        self.path_tables = None  # the twin of the paths, in indirection mode
        if control.paths is not None and device.has_memory:
            self.path_tables = DeviceTables(device, control.paths.table, self.fences)
        self.token_mover = TokenMover(self)
        self.bound_rows = BoundRows(control.seqs)
        self.handles = Registry(self, control.seqs)
        self.leases = LeaseBook(self)
        self.pins: dict[Pin, None] = {}  # in the order of their creation
        self.parents = PendingParents(self)
        self.tails = Tails(self)
        self.closed = False

    def refuse_closed(self) -> None:
        """Raises `StateError` where no call is allowed: the whole door of those that only look."""
        if self.closed:
            raise StateError("the manager was shut down; create a new one")
        if self.control.reuse.calling:
            self.refuse_reentry()

    def enter(self) -> None:
        """The door of every call: refuses a shut-down manager, closes what was dropped.

        Also lets go of the last batch, hands back what leases that are over leave, and keeps
        changes that nobody sends from piling up.
        """
        self.refuse_closed()
        self.handles.forget_batch()
        if self.leases.idle or self.leases.owed:
            self.leases.take_back()
        if self.parents:
            self.parents.take_arrived()
        if len(self.control.seqs.dirty) > MOST_CHANGES and self.tables is not None:
            self.tables.compact(self.control.seqs.dirty)
        paths = self.control.paths
        if paths is not None and self.path_tables and len(paths.dirty) > MOST_CHANGES:
            self.path_tables.compact(paths.dirty)
        while (sequence := self.handles.sweep(self.destroy)) is not None:
            warnings.warn(
                f"a KVCache (sequence {sequence}) was dropped without close(); freed its pages",
                ResourceWarning,
                stacklevel=4,
            )

    def refuse_reentry(self) -> None:
        """Raises `StateError` inside a priority callback, which must not call the manager."""
        if self.control.reuse.calling:
            raise StateError("custom_priority_callback must not call the manager or its caches")

    def enter_with(self, kv_caches: Iterable[KVCache]) -> Index:
        """The door of calls on a batch: the sequence numbers of its distinct active handles."""
        if self.parents:
            self.parents.take_arrived()
        if self.leases.idle or self.leases.owed:
            self.leases.take_back()
        sequences = self.handles.remembered(kv_caches)
        if sequences is None or len(self.control.seqs.dirty) > MOST_CHANGES:
            self.enter()
            sequences = self.handles.resolve(kv_caches)
        return sequences

    # -- transactions ------------------------------------------------------------------------------

    def grow(self, sequences: Index, capacity: Int32) -> bool:
        """Pages for `capacity[i]` tokens, each above the sequence's limit.

        False: nothing changed.
        """
        blocks = -(-capacity // self.control.seqs.shape.tokens_per_block)
        self._check_reach(sequences, capacity, blocks)
        # No row can outgrow the table: it has a block for every slot, or the reach was checked.
        if not self.control.grow(sequences, blocks, self.streams.wait):
            return False
        if self.bound_rows:
            self.bound_rows.refresh_all(sequences)
        return True

    def missing_to_grow(self, sequences: Index, capacity: Int32) -> int:
        """Pages that `grow` would be short of; raises as it does."""
        seqs = self.control.seqs
        blocks = -(-capacity // seqs.shape.tokens_per_block)
        self._check_reach(sequences, capacity, blocks)
        more = blocks - seqs.num_blocks[sequences]
        pages = np.multiply(more, seqs.width[sequences], dtype=np.int64).sum()
        return self.control.missing(int(pages))

    def grow_one(self, sequence: int, capacity: int) -> bool:
        """`grow` of one sequence."""
        seqs = self.control.seqs
        blocks = -(-capacity // seqs.shape.tokens_per_block)
        plain = not self.bound_rows and self.longest is None
        if plain and blocks == seqs.num_blocks[sequence] + 1 and seqs.width[sequence] == 1:
            return self.control.grow_by_one(sequence, self.streams.wait)
        # NO_LIMIT is above any reach, so larger wishes are refused like it
        return self.grow(np.array([sequence]), np.array([min(capacity, NO_LIMIT)], np.int32))

    def retry(self, attempt: Callable[[], bool], block: bool) -> bool:
        """Whether `attempt` succeeds, with `block` after waiting for parents that free pages."""
        while not attempt():
            if not (block and self.parents):
                return False
            self.parents.wait_for_one()
        return True

    def refuse_pending(self, sequences: Iterable[int], call: str) -> None:
        """Raises `ParentsPending` if the host does not know the rows of one of `sequences`."""
        if self.parents and any(sequence in self.parents for sequence in sequences):
            raise ParentsPending(
                f"{call}: the parents of a beam step have not arrived yet; call settle() to wait "
                "for them, or come back a step later"
            )

    def _check_reach(self, sequences: Index, capacity: Int32, blocks: Int32) -> None:
        longest = self.longest
        if longest is not None and int(capacity.max()) > longest:
            raise wrong("capacity", f"at most max_seq_len={longest} tokens", int(capacity.max()))
        if self.bound_rows:
            self.bound_rows.check(sequences, blocks)

    def shrink(self, sequences: Index, blocks: Int32) -> None:
        """Frees the blocks from `blocks[i]` on; later owners wait for each sequence's stream."""
        if self.bound_rows:
            self.bound_rows.check(sequences, blocks)
        for part, ticket in self.streams.moments(sequences):  # all recorded before the first cut
            self.control.shrink(sequences[part], blocks[part], ticket)
        if self.bound_rows:
            self.bound_rows.refresh_all(sequences)

    def destroy(self, sequence: int) -> None:
        """Frees everything of a sequence and forgets its handle."""
        self.refuse_reentry()
        self.end_publishing(sequence)
        some = self.control.seqs.num_blocks[sequence]
        ticket = self.streams.moment(sequence) if some else NO_TICKET
        self.parents.forget(sequence)
        self.bound_rows.release(sequence)
        self.control.destroy(sequence, ticket)
        self.streams.forget(sequence)
        self.handles.remove(sequence)

    def ready_to_publish(self, plan: CommitPlan) -> Ticket:
        """The moment after which a sequence's pages may be read; its stream may read known ones."""
        if not plan.publishes:
            return NO_TICKET
        known = plan.found.pages
        ready = (s.ready(row) for s, row in zip(self.control.slots_of, known, strict=True))
        self.streams.wait_for(plan.sequence, [after for after in ready if after is not None])
        return self.streams.moment(plan.sequence)

    def end_publishing(self, sequence: int) -> None:
        """A sequence is about to close: its partial last block is published if that is allowed.

        An error of the caller's priority callback is told as a warning: closing goes on.
        """
        reuse = self.control.reuse
        if not reuse.rules.partial_commit or reuse.claims[sequence].stopped:
            return
        try:
            plan = plan_commit(reuse, sequence, memoryview(b""), with_tail=True)
        except Exception as error:
            if reuse.claims[sequence].priority_of is None:
                raise  # ours, not the callback's
            warnings.warn(
                f"custom_priority_callback failed as a cache was closed, whose last block is not "
                f"published: {error!r}",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            if plan.publishes:
                publish(reuse, plan, self.ready_to_publish(plan), None)
        reuse.claims[sequence].stopped = True

    def first_resume(self, sequence: int) -> bool:
        """Gives a sequence that resumes for the first time a last block of its own.

        What it matched may be read from here on in the order of its stream. False, with nothing
        changed, if there is no slot.
        """
        control, claim = self.control, self.control.reuse.claims[sequence]
        shared = control.seqs.page_rows(sequence)[0]
        if claim.borrowed and not control.make_room(1, "resume"):
            return False
        ready = (s.ready(row) for s, row in zip(control.slots_of, shared, strict=True))
        self.streams.wait_for(sequence, [after for after in ready if after is not None])
        if claim.borrowed:
            self._copy_loan(sequence, shared[:, -1:])
        return True

    def _copy_loan(self, sequence: int, source: Int32) -> None:
        control = self.control
        target, after = control.take_block()
        with self.given_back_on_failure(sequence, target, after):
            size = control.seqs.shape.tokens_per_block
            used = control.reuse.claims[sequence].committed % size
            self.copy_blocks(sequence, source, target, np.array([used], np.int32))
            ticket = self.streams.moment(sequence)
        control.seqs.parked[sequence][0, :, -1:] = target
        for slots, page in zip(control.slots_of, source, strict=True):
            slots.release(page, ticket, distinct=True)
        control.stats.copied_loan(sequence, control.reuse.return_loan(sequence))

    def fork(self, sequence: int, count: int, block: bool) -> list[int]:
        """`KVCache.fork`: new sequences that are active and bound like `sequence`."""
        control, seqs = self.control, self.control.seqs
        shared, blocks = shared_blocks(control, sequence)
        private = blocks - shared
        forks = seqs.create(count)
        try:
            room = partial(control.make_room, count * private, "fork")
            if not self.retry(room, block):
                raise control.refusal(f"fork: {count} forks", count * private)
            fresh = take_private(control, count * private)
            stream = self.streams.of(sequence)
            after = [s.tickets(row) for s, row in zip(control.slots_of, fresh, strict=True)]
            tickets = tuple(some for some in after if some is not None)
            with self.given_back_on_failure(sequence, fresh, tickets):
                own = seqs.page_rows(sequence)[0, :, shared:]
                size, capacity = seqs.shape.tokens_per_block, int(seqs.capacity[sequence])
                tokens = np.tile(written_tokens(shared, blocks, capacity, size), count)
                self.copy_blocks(sequence, np.tile(own, count), fresh, tokens)
        except BaseException:
            for fork in forks:
                seqs.destroy(fork)
            raise
        for fork, pages in zip(forks, np.split(fresh, count, axis=1), strict=True):
            write_fork(control, sequence, fork, pages, shared)
            control.reuse.share_claim(sequence, fork, shared)
            control.stats.forked(sequence, fork, shared)
            if stream is not None:
                self.streams.bind(fork, stream)
        return forks

    @contextmanager
    def given_back_on_failure(
        self, sequence: int, taken: Int32, after: tuple[NDArray[np.int64], ...]
    ) -> Iterator[None]:
        """The sequence's stream waits for the tickets of slots that were taken, to write them.

        If that or the block fails they are free again: untouched as long as nothing has waited.
        """
        waited = False
        try:
            self.streams.wait_for(sequence, after)
            waited = True
            yield
        except BaseException:
            ticket = self.streams.moment(sequence) if waited else None
            self.control.give_back(taken, ticket)
            raise

    def copy_blocks(self, sequence: int, src: Int32, dst: Int32, tokens: Int32) -> None:
        """Enqueues copies of pages `[layer groups, n]` on a sequence's stream.

        `tokens[i]` of block i hold data.
        """
        stream = self.streams.of(sequence)
        if stream is None:
            raise InternalError("pages were copied for a sequence that was never resumed")
        self.streams.come_home(sequence)
        pairs = enumerate(zip(src, dst, strict=True))
        copies = (PageCopies(group, np.stack([*pair, tokens])) for group, pair in pairs)
        self.copy_pages(tuple(copies), stream)

    def copy_pages(self, copies: tuple[PageCopies, ...], stream: Stream) -> None:
        """Enqueues page copies, one launch per layer group."""
        if not self.device.has_memory:
            return
        for copy in copies:
            if copy.pairs.size:
                buffers = self.tails.by_layer_group[copy.layer_group]
                self.device.copy_tokens(buffers, copy.pairs, stream=stream)

    # -- questions ---------------------------------------------------------------------------------

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
                "resize() or advance() first",
            )
        return starts, counts

    def device_tables(self) -> DeviceTables:
        """The device's page tables; refuses a device without memory."""
        if self.tables is None:
            raise StateError(f"the {self.device.kind} device has pages without memory")
        return self.tables

    def close(self) -> None:
        """Waits for the device and gives the memory back, whatever of it fails."""
        self.closed = True
        self.handles.forget_batch()
        with ExitStack() as stack:
            for memory in (memory for group in self.pools for memory in group):
                stack.callback(memory.close)
            for tables in (self.tables, self.path_tables):
                if tables is not None:
                    stack.callback(tables.close)
            stack.callback(self.parents.close)
            self.device.synchronize()
