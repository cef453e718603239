"""The common oracle: walks the real structures, counts everything again and compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcore.control.slots import PUBLISHED
from kvcore.errors import KVCoreError
from kvcore.ids import NO_SLOT, div_ceil
from kvcore.testing.check_tree import TreeRules, describe_tree

if TYPE_CHECKING:
    from kvcore.control.plane import ControlPlane
    from kvcore.device.base import Stream
    from kvcore.manager import KVCacheManager
    from kvcore.runtime import Runtime

Int32 = NDArray[np.int32]


class OracleError(KVCoreError, AssertionError):
    """A rule does not hold; the message says which, where, and shows the whole state."""


def check(manager: KVCacheManager, *, device: bool = False) -> None:
    """Proves that the structures of a manager agree with each other.

    The rules: on each pool group the free slots, the held ones and the evictable ones are disjoint
    and together all slots; a slot counts as many holders as table cells and pins name it; unless it
    is published they all belong to one block of one sequence, and behind its final blocks to one
    beam; cells without a page are -1; in indirection mode beam 0 alone has the blocks that all
    share, and paths name live beams; every live beam has its own table row; sizes, limits and
    statistics are what a recount gives; rows bound by the caller show the table; the prefix tree is
    one, its pages are marked, what waits for eviction is what may go next, and every sequence has
    the pages of its path.

    Parameters
    ----------
    manager : KVCacheManager
        Not shut down, and not in use by another thread meanwhile.
    device : bool
        Also sends what is pending to the device page table, waits, and compares it with the host's.
        Needs a device with memory.

    Raises
    ------
    OracleError
        A rule does not hold.

    Notes
    -----
    Begins as every call does: dropped caches are closed, parents that have arrived are taken in.
    Changes nothing else, and with `device=False` enqueues nothing. O(slots + table cells in use).
    """
    runtime = manager._runtime
    with runtime.lock:
        runtime.enter()
        rules = _Rules(runtime)
        rules.sequences()
        rules.rows()
        cells = [cell for sequence in rules.alive for cell in rules.cells_of(sequence)]
        rules.paths()
        published = rules.tree()
        rules.claims()
        rules.slots(cells, published)
        rules.blocks(cells)
        rules.statistics(manager)
        rules.bound_rows()
        if device:
            rules.device_table()


@dataclass(frozen=True)
class _Row:
    """The slots of one beam in one layer group."""

    sequence: int
    beam: int
    group: int
    first: int
    """The ordinal of the first slot."""

    slots: Int32


class _Rules(TreeRules):
    """One method per family of rules; each compares and, where they differ, explains."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.control: ControlPlane = runtime.control
        self.seqs = runtime.control.seqs
        self.alive = [int(sequence) for sequence in np.flatnonzero(self.seqs.width)]

    def same(self, rule: str, expected: object, got: object) -> None:
        """Fails unless both are equal."""
        if expected != got:
            self.fail(f"{rule}: expected {expected}, got {got}")

    def none(self, rule: str, offenders: NDArray[np.intp] | NDArray[np.int32]) -> None:
        """Fails if there is any offender."""
        if offenders.size:
            self.fail(f"{rule}: {offenders.tolist()[:20]}")

    def fail(self, what: str) -> NoReturn:
        raise OracleError(f"{what}\n{describe(self.runtime)}")

    # -- sequences and table rows --------------------------------------------------------------

    def sequences(self) -> None:
        seqs, shape = self.seqs, self.seqs.shape
        self.same("number of sequences", len(self.alive), seqs.num_sequences)
        self.same("sequences with a handle", set(self.alive), set(self.runtime.handles))
        dead = seqs.width == 0
        self.none("closed but active", np.flatnonzero(dead & seqs.active))
        self.none("closed but with table rows", np.flatnonzero(dead & (seqs.rows >= 0).any(axis=1)))
        self.same("parked sequences", set(seqs.parked) - set(self.alive), set())
        for s in self.alive:
            capacity, history = int(seqs.capacity[s]), int(seqs.history[s])
            blocks = div_ceil(capacity, shape.tokens_per_block)
            sizes = f"sequence {s}: 0 <= history {history} <= capacity {capacity} <= max_seq_len"
            self.same(sizes, True, 0 <= history <= capacity <= shape.max_seq_len)
            self.same(f"sequence {s}: blocks", blocks, int(seqs.num_blocks[s]))
            self.same(f"sequence {s}: limit", seqs.limit_of(blocks), int(seqs.limit[s]))
            parked = s in seqs.parked
            self.same(f"sequence {s}: active and parked", False, bool(seqs.active[s]) and parked)
            hidden = not seqs.active[s] and blocks > 0
            self.same(f"sequence {s}: hidden and parked", hidden, hidden and parked)
            width = int(seqs.width[s])
            self.same(f"sequence {s}: width {width}", True, 1 <= width <= shape.max_beam_width)

    def rows(self) -> None:
        seqs, shape = self.seqs, self.seqs.shape
        owned = [row for s in self.alive for row in seqs.rows[s, : seqs.width[s]].tolist()]
        for s in self.alive:
            past = seqs.rows[s, seqs.width[s] :]
            self.none(f"sequence {s}: rows past its width", past[past >= 0])
        free = np.setdiff1d(np.arange(seqs.used_rows), owned)
        self.same("rows of distinct beams", len(owned), len(set(owned)))
        self.same("rows are in use", [], [row for row in owned if not 0 <= row < seqs.used_rows])
        self.same("free rows", shape.max_rows - len(owned), seqs.num_free_rows)
        self.same("rows given back", free.tolist(), sorted(seqs._free_rows))
        self.none("free rows that name slots", free[(seqs.table[free] != NO_SLOT).any(axis=(1, 2))])
        for s in self.alive:
            rows = seqs.rows[s, : seqs.width[s]]
            shown = int(seqs.num_blocks[s]) if seqs.active[s] else 0
            empty = seqs.table[rows, :, shown:] == NO_SLOT
            self.same(f"sequence {s}: cells from {shown} on are {NO_SLOT}", True, bool(empty.all()))

    # -- slots ---------------------------------------------------------------------------------

    def cells_of(self, sequence: int) -> Iterator[_Row]:
        """What each beam of a sequence names, also of a suspended one."""
        pages = self.seqs.page_rows(sequence)
        expected = (int(self.seqs.width[sequence]), self.seqs.shape.num_groups)
        self.same(f"sequence {sequence}: beams and layer groups", expected, pages.shape[:2])
        self.same(
            f"sequence {sequence}: blocks with cells",
            int(self.seqs.num_blocks[sequence]),
            pages.shape[2],
        )
        for beam in range(pages.shape[0]):
            first = int(self.seqs.common[sequence]) if self.control.paths and beam else 0
            empty = pages[beam, :, :first] == NO_SLOT
            self.same(f"sequence {sequence} beam {beam}: only beam 0 has block < {first}", True,
                      bool(empty.all()))  # fmt: skip
            for group in range(pages.shape[1]):
                yield _Row(sequence, beam, group, first, pages[beam, group, first:])

    def paths(self) -> None:
        """In indirection mode every position of a path is a live beam's."""
        paths = self.control.paths
        if paths is None:
            return
        for s in self.alive:
            width, base, end = int(self.seqs.width[s]), int(paths.base[s]), int(paths.end[s])
            if width == 1 or s in self.runtime.parents:  # of the latter nobody knows them yet
                continue
            name, size = f"sequence {s}: paths", self.seqs.shape.tokens_per_block
            common = int(self.seqs.common[s]) * size
            self.same(f"{name} from {base}, blocks from {common}", True, common <= base <= end)
            cells = paths.of(s)
            self.none(f"{name} to no beam", cells[(cells < 0) | (cells >= width)])

    def slots(self, cells: list[_Row], published: list[list[int]]) -> None:
        for number, table in enumerate(self.control.slots):
            name = f"pool group {number}"
            rows = [row.slots for row in cells if self.control.pool_group_of[row.group] == number]
            named = np.concatenate([*rows, np.empty(0, np.int32)])
            outside = named[(named < 0) | (named >= table.capacity)]
            self.none(f"{name}: cells that name no slot", outside)
            holders = np.bincount([*named, *self.pinned(number)], minlength=table.capacity)
            free, kept = table.free_slots(), published[number]
            self.same(f"{name}: distinct free slots", np.unique(free).size, free.size)
            self.same(f"{name}: num_free", free.size, table.num_free)
            self.none(f"{name}: free and held", free[holders[free] > 0])
            self.same(f"{name}: free and in the tree", [], np.intersect1d(free, kept).tolist())
            used = int(np.count_nonzero(holders)) + sum(not holders[slot] for slot in kept)
            self.same(
                f"{name}: free + held + evictable = capacity", table.capacity, free.size + used
            )
            self.marks(name, table, holders, kept)
            wrong = np.flatnonzero(holders != table.refs)
            counts = list(
                zip(wrong.tolist(), holders[wrong].tolist(), table.refs[wrong], strict=True)
            )
            self.same(f"{name}: holders (slot, cells, count)", [], counts)
            self.none(f"{name}: tickets of the future", self._future(table.reusable_after))

    def _future(self, tickets: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.flatnonzero(tickets >= self.runtime.fences._next)

    def blocks(self, cells: list[_Row]) -> None:
        """A slot is one block of one layer group, and one sequence's and beam's unless shared."""
        owner: dict[tuple[int, int], tuple[int, int, int]] = {}
        for row in cells:
            pool_group = self.control.pool_group_of[row.group]
            refs, in_tree = (
                self.control.slots[pool_group].refs,
                self.control.slots[pool_group].in_tree,
            )
            final = int(self.seqs.history[row.sequence]) // self.seqs.shape.tokens_per_block
            for ordinal, slot in enumerate(row.slots.tolist(), row.first):
                shared = bool(in_tree[slot])  # or was published, and somebody may read it still
                here = (-1 if shared else row.sequence, row.group, ordinal)
                before = owner.setdefault((pool_group, slot), here)
                self.same(f"slot {slot} serves one (sequence, layer group, block)", before, here)
                if ordinal >= final and not shared:
                    rule = f"sequence {row.sequence} beam {row.beam}: holders of block {ordinal}"
                    self.same(rule, 1, int(refs[slot]))

    def statistics(self, manager: KVCacheManager) -> None:
        for table, stats in zip(self.control.slots, manager.get_storage_statistics(), strict=True):
            evictable = int(np.count_nonzero((table.in_tree == PUBLISHED) & (table.refs == 0)))
            expected = (table.capacity, table.free_slots().size, evictable)
            self.same("statistics", expected, (stats.total, stats.free, stats.evictable))
            self.same("available", stats.free + stats.evictable, stats.available)
            self.same("unavailable", stats.total - stats.available, stats.unavailable)

    # -- followers of the table ----------------------------------------------------------------

    def bound_rows(self) -> None:
        for sequence, rows in self.runtime.bound_rows._rows.items():
            shortest = min(row.size for row in rows.values())
            self.same(f"sequence {sequence}: bound", shortest, int(self.seqs.block_bound[sequence]))
            for (beam, group), row in rows.items():
                blocks = int(self.seqs.num_blocks[sequence])
                expected = np.full(row.size, NO_SLOT, np.int32)
                cells = self.seqs.table[self.seqs.rows[sequence, beam], group, :blocks]
                expected[:blocks] = cells
                name = f"sequence {sequence}: the row bound to beam {beam}, layer group {group}"
                self.same(name, expected.tolist(), row.tolist())

    def device_table(self) -> None:
        tables = self.runtime.tables
        if tables is None:
            raise ValueError("device: expected a device with memory, got one without")
        device, used = self.runtime.device, self.seqs.used_rows
        stream = self.runtime.streams.default or device.create_stream()
        tables.send(self.seqs.dirty, used, np.empty(0, np.int32), stream)
        tables.seal(stream)
        twin = device.to_host(tables.array[:used], stream=stream)
        different = np.argwhere(twin != self.seqs.table[:used])
        cells = [
            (*cell, int(self.seqs.table[*cell]), int(twin[*cell]))
            for cell in (tuple(map(int, where)) for where in different[:20])
        ]
        self.same("device table (row, layer group, ordinal, host, device)", [], cells)
        self.device_paths(stream)

    def device_paths(self, stream: Stream) -> None:
        """Sends the paths' cells and compares those that mean something."""
        paths, twin = self.control.paths, self.runtime.path_tables
        if paths is None or twin is None:
            return
        twin.send(paths.dirty, self.seqs.used_rows, np.empty(0, np.int32), stream)
        twin.seal(stream)
        on_device = self.runtime.device.to_host(twin.array[: self.seqs.used_rows], stream=stream)
        for s in self.alive:
            if self.seqs.width[s] > 1 and s not in self.runtime.parents:
                rows, part = paths._rows(s), slice(int(paths.base[s]), int(paths.end[s]))
                got = on_device[rows, 0, part].tolist()
                self.same(f"sequence {s}: device paths", paths.of(s).tolist(), got)


def describe(runtime: Runtime) -> str:
    """The whole state as text: slots, then every sequence with its pages, then free table rows."""
    seqs = runtime.control.seqs
    lines = ["state:"]
    for number, table in enumerate(runtime.control.slots):
        held = {slot: int(table.refs[slot]) for slot in np.flatnonzero(table.refs).tolist()}
        free = table.free_slots().tolist()
        lines.append(f"  pool group {number}: {table.capacity} slots, num_free {table.num_free}")
        lines.append(f"    free {_short(free)}")
        lines.append(f"    holders {_short(list(held.items()))}")
        lines.append(f"    in the tree {_short(np.flatnonzero(table.in_tree).tolist())}")
    lines += describe_tree(runtime)
    for s in np.flatnonzero(seqs.width).tolist():
        status = "active" if seqs.active[s] else "suspended"
        lines.append(
            f"  sequence {s}: {status}, history {seqs.history[s]} of {seqs.capacity[s]}, "
            f"{seqs.num_blocks[s]} blocks, table rows {seqs.rows[s, : seqs.width[s]].tolist()}"
        )
        for beam, groups in enumerate(seqs.page_rows(s).tolist()):
            lines.append(f"    beam {beam}: " + "; ".join(_short(slots) for slots in groups))
    lines.append(f"  table rows: {seqs.used_rows} used, free {_short(sorted(seqs._free_rows))}")
    return "\n".join(lines)


def _short(values: list[object] | list[int] | list[tuple[int, int]]) -> str:
    text = " ".join(str(value) for value in values[:64])
    return f"[{text}{' ...' if len(values) > 64 else ''}]"
