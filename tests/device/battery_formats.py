"""Battery: page tables in other forms. The oracle goes row by row and page by page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import IndexMapper
from kvcore.device.base import PageNumbers, PoolNumbers, RowRanges
from tests.device.battery_base import BatteryBase
from tests.device.harness import Rig

GUARD = 16  # items on both sides


def guarded(rig: Rig, shape: tuple[int, ...], dtype: Any = np.int32) -> tuple[Any, Any]:
    """A device array between guards: the whole and the part, all 77."""
    size = int(np.prod(shape))
    whole = rig.put(np.full(size + 2 * GUARD, 77, dtype))
    return whole, whole[GUARD : GUARD + size].reshape(shape)


def found(rig: Rig, whole: Any, shape: tuple[int, ...]) -> np.ndarray:
    """What lies between the guards, which nobody touched."""
    values = rig.get(whole)
    assert set(values[:GUARD]) | set(values[-GUARD:]) == {77}
    return values[GUARD:-GUARD].reshape(shape)


def holey(rig: Rig, shape: tuple[int, int, int]) -> tuple[Any, np.ndarray]:
    """Tables `[G, R, B]` with empty cells, as a view with strides of its own."""
    rows, groups, blocks = shape[1], shape[0], shape[2]
    whole = rig.rng.integers(0, 200, (rows, groups, blocks + 3)).astype(np.int32)
    whole[rig.rng.random(whole.shape) < 0.2] = -1
    return rig.put(whole).transpose(1, 0, 2)[:, :, 1:-2], whole.transpose(1, 0, 2)[:, :, 1:-2]


def expect_offsets(
    tables: np.ndarray,
    rows: list[int],
    shape: tuple[int, ...],
    pools: list[PoolNumbers],
    no_page: int,
) -> np.ndarray:
    """A block-offset table."""
    out = np.full(shape, no_page)
    for p, pool in enumerate(pools):
        table = tables[pool.layer_group]
        for i, row in enumerate(rows):
            for page in range(shape[3]) if 0 <= row < len(table) else ():
                block, within = divmod(page, pool.expansion)
                if block < table.shape[1] and table[row, block] >= 0:
                    out[p, i, 0, page] = table[row, block] * pool.scale + within
                    out[p, i, 1, page] = out[p, i, 0, page] + pool.kv_offset
    return out


def check_offsets(
    rig: Rig,
    tables: tuple[Any, np.ndarray],
    rows: list[int],
    pools: list[PoolNumbers],
    spare: int,
    pages: int,
    no_page: int,
) -> None:
    """`block_offsets` against the oracle."""
    shape = len(pools), len(rows) + spare, 2, pages
    whole, out = guarded(rig, shape)
    listed = rig.put(rows, np.int32)
    rig.device.block_offsets(tables[0], listed, out, pools, no_page=no_page, stream=rig.stream)
    expected = expect_offsets(tables[1], rows, shape, pools, no_page)
    np.testing.assert_array_equal(found(rig, whole, shape), expected)


class Rows:
    """Batch rows on the device and on the host."""

    def __init__(self, rig: Rig, rows: Any, starts: Any, ends: Any) -> None:
        self.host = [np.asarray(its, np.int32).tolist() for its in (rows, starts, ends)]
        self.ranges = RowRanges(*(rig.put(its, np.int32) for its in self.host))

    def tokens(self, table: np.ndarray, numbers: PageNumbers, page_tokens: int) -> list[int]:
        """Tokens of each row."""
        most, before, tokens = table.shape[1] * numbers.expansion * page_tokens, 0, []
        for row, start, end in zip(*self.host, strict=True):
            real = 0 <= row < len(table)
            tokens.append(min(max(start + end - before, 0), most) if real else 0)
            before = end
        return tokens

    def pages(
        self, table: np.ndarray, numbers: PageNumbers, page_tokens: int, no_page: int
    ) -> list[list[int]]:
        """Page indices of each row."""
        lists: list[list[int]] = []
        tokens = self.tokens(table, numbers, page_tokens)
        for row, count in zip(self.host[0], tokens, strict=True):
            lists.append([])
            for page in range(-(-count // page_tokens)):
                block, within = divmod(page, numbers.expansion)
                slot = int(table[row, block])
                index = slot * numbers.scale + numbers.offset + within
                lists[-1].append(no_page if slot < 0 else index)
        return lists


def random_rows(rig: Rig, count: int, num_rows: int, most: int) -> Rows:
    """Rows of up to `most` tokens, and some that are no rows, or out of any bounds."""
    starts = rig.rng.integers(-2, most + 2, count)
    starts[rig.rng.random(count) < 0.05] = 2**31 - 1
    ends = np.cumsum(rig.rng.integers(0, 5, count))
    return Rows(rig, rig.rng.integers(-1, num_rows + 1, count), starts, ends)


def check_csr(
    rig: Rig,
    table: tuple[Any, np.ndarray],
    rows: Rows,
    numbers: PageNumbers,
    page_tokens: int,
    room: int | None = None,
) -> None:
    """`csr_pages` against the oracle; `room` for so many indices, else for all of them."""
    lists = rows.pages(table[1], numbers, page_tokens, -1)
    count, flat = len(lists), [index for row in lists for index in row]
    room = len(flat) if room is None else room
    shapes = (count + 1,), (room,), (count,)
    arrays = [guarded(rig, shape) for shape in shapes]
    rig.device.csr_pages(
        table[0],
        rows.ranges,
        *(part for _, part in arrays),
        numbers=numbers,
        page_tokens=page_tokens,
        stream=rig.stream,
    )
    indptr, indices, last = (
        found(rig, whole, shape).tolist() for (whole, _), shape in zip(arrays, shapes, strict=True)
    )
    assert indptr == np.cumsum([0, *map(len, lists)]).tolist()
    assert indices == (flat + [77] * room)[:room]
    tokens = rows.tokens(table[1], numbers, page_tokens)
    assert last == [n - (len(its) - 1) * page_tokens if its else 0
                    for n, its in zip(tokens, lists, strict=True)]  # fmt: skip


def check_ragged(
    rig: Rig,
    table: tuple[Any, np.ndarray],
    rows: Rows,
    numbers: PageNumbers,
    page_tokens: int,
    columns: int,
    no_page: int,
) -> None:
    """`ragged_pages` against the oracle."""
    lists = rows.pages(table[1], numbers, page_tokens, no_page)
    count = len(lists)
    shapes = (count, columns), (count + 1,), (count,), (1,)
    arrays = [guarded(rig, shape) for shape in shapes]
    rig.device.ragged_pages(
        table[0],
        rows.ranges,
        *(part for _, part in arrays),
        numbers=numbers,
        page_tokens=page_tokens,
        no_page=no_page,
        stream=rig.stream,
    )
    pages, cu_q_lens, kv_lens, num_seqs = (
        found(rig, whole, shape).tolist() for (whole, _), shape in zip(arrays, shapes, strict=True)
    )
    assert pages == [(row + [no_page] * columns)[:columns] for row in lists]
    assert cu_q_lens == [0, *rows.host[2]]
    assert kv_lens == rows.tokens(table[1], numbers, page_tokens)
    assert num_seqs == [sum(0 <= row < len(table[1]) for row in rows.host[0])]


POOLS = {
    "one": [PoolNumbers(0, 6, 1, 1)],
    "finer pages": [PoolNumbers(1, 2, 1, 1), PoolNumbers(0, 12, 3, 3), PoolNumbers(2, 8, -4, 4)],
    "many": [PoolNumbers(i % 3, 2 * (1 + i % 5), 1, 1 + i % 2) for i in range(130)],
}
NUMBERS = {
    "slots": PageNumbers(),
    "one of four": PageNumbers(4, 3),
    "finer": PageNumbers(12, 0, 3),
    "finer, one of four": PageNumbers(8, 6, 2),
}


class FormatTests(BatteryBase):
    """`block_offsets`, `csr_pages`, `ragged_pages`, `token_slots`."""

    @pytest.mark.parametrize("pools", POOLS)
    @pytest.mark.parametrize("no_page", [-1, 0])
    def test_block_offsets_of_any_rows(self, rig, pools, no_page):
        tables = holey(rig, (3, 7, 5))
        for count, spare, pages in ((0, 2, 4), (1, 0, 8), (9, 3, 20), (30, 1, 3)):
            rows = rig.rng.integers(-1, 8, count).tolist()
            check_offsets(rig, tables, rows, POOLS[pools], spare, pages, no_page)

    @pytest.mark.parametrize(
        ("widths", "beam_width", "replicate"),
        [((4, None), 3, False), ((4, None), 3, True), ((1, 3), 3, True)],
    )
    def test_block_offsets_of_rows_by_index(self, rig, widths, beam_width, replicate):
        """Contexts have one row, generations one for each beam; those of a cross cache repeat."""
        mapper = IndexMapper(3, *widths)
        assert [mapper.add(name) for name in "BCA"] == [0, 1, 2]
        rows = mapper.rows("ABC", 1, beam_width, replicate_beam_zero=replicate).tolist()
        lists = {(4, False): [8, 0, 1, 2, 4, 5, 6], (4, True): [8, 0, 0, 0, 4, 4, 4],
                 (1, True): [2, 0, 0, 0, 1, 1, 1]}  # fmt: skip
        assert rows == lists[widths[0], replicate]
        check_offsets(rig, holey(rig, (1, 12, 5)), rows, [PoolNumbers(0, 2, 1, 1)], 2, 8, -1)

    def test_absent_blocks_are_absent_in_both_planes(self, rig):
        """K is slot times scale, V the offset more; what is no slot stays none."""
        table = np.array([[[5, -1, 2, -9]]], np.int32)
        shape = (2, 2, 2, 8)
        whole, out = guarded(rig, shape)
        pools = [PoolNumbers(0, 10, 4, 1), PoolNumbers(0, 10, 4, 2)]
        rows = rig.put([0], np.int32)
        rig.device.block_offsets(rig.put(table), rows, out, pools, stream=rig.stream)
        plain, finer = found(rig, whole, shape).tolist()
        absent = [[-1] * 8] * 2
        assert plain == [[[50, -1, 20, -1] + [-1] * 4, [54, -1, 24, -1] + [-1] * 4], absent]
        assert finer == [
            [[50, 51, -1, -1, 20, 21, -1, -1], [54, 55, -1, -1, 24, 25, -1, -1]], absent
        ]  # fmt: skip

    @pytest.mark.parametrize("numbers", NUMBERS)
    @pytest.mark.parametrize("page_tokens", [1, 4, 16])
    def test_csr_pages_of_ragged_rows(self, rig, numbers, page_tokens):
        device, host = holey(rig, (2, 9, 7))
        numbers = NUMBERS[numbers]
        for count in (0, 1, 5, 40):
            rows = random_rows(rig, count, 9, 7 * numbers.expansion * page_tokens)
            check_csr(rig, (device[1], host[1]), rows, numbers, page_tokens)

    def test_csr_pages_end_with_their_array(self, rig):
        table = holey(rig, (1, 3, 6))
        rows = Rows(rig, [2, 0, -1, 1], [7, 0, 9, 12], [1, 1, 2, 3])
        for room in (0, 3, 5, 6, 60):
            check_csr(rig, (table[0][0], table[1][0]), rows, PageNumbers(2, 1), 3, room)

    @pytest.mark.parametrize("numbers", NUMBERS)
    @pytest.mark.parametrize("page_tokens", [1, 4, 16])
    def test_ragged_pages_of_ragged_rows(self, rig, numbers, page_tokens):
        device, host = holey(rig, (2, 9, 7))
        table, numbers = (device[1], host[1]), NUMBERS[numbers]
        for count, columns, no_page in ((0, 4, 0), (1, 30, -1), (5, 0, 0), (40, 11, 0)):
            rows = random_rows(rig, count, 9, 7 * numbers.expansion * page_tokens)
            check_ragged(rig, table, rows, numbers, page_tokens, columns, no_page)

    def test_rows_of_one_long_sequence(self, rig):
        """More pages than a block of threads has threads."""
        table = np.arange(5_000, dtype=np.int32).reshape(1, 1, 5_000)
        tables = rig.put(table)[0], table[0]
        rows = Rows(rig, [0], [9_990], [7])
        check_csr(rig, tables, rows, PageNumbers(), 2)
        check_ragged(rig, tables, rows, PageNumbers(3, 1), 2, 5_001, 0)

    def test_more_rows_than_blocks_of_a_grid(self, rig):
        table = holey(rig, (1, 9, 4))
        tables = table[0][0], table[1][0]
        rows = random_rows(rig, 2_500, 9, 8)
        check_csr(rig, tables, rows, PageNumbers(), 2)
        check_ragged(rig, tables, rows, PageNumbers(), 2, 4, -1)
        listed = rig.rng.integers(-1, 10, 2_500).tolist()
        check_offsets(rig, table, listed, [PoolNumbers(0, 2, 1, 1)], 2, 4, -1)

    def test_lengths_do_not_overflow(self, rig):
        """A table row with room for more tokens than can be counted."""
        table = np.zeros((1, 1, 3), np.int32)
        rows = Rows(rig, [0, 0], [2**31 - 1, -(2**31)], [2**31 - 1, 2**31 - 1])
        check_ragged(rig, (rig.put(table)[0], table[0]), rows, PageNumbers(), 2**29, 5, 0)

    @pytest.mark.parametrize("size", [0, 1, 128, 1000])
    def test_token_slots(self, rig, size):
        mapping = rig.rng.integers(0, 2**31 - 1, (size, 2)).astype(np.int32)
        mapping[rig.rng.random(size) < 0.3, 0] = -1
        whole, out = guarded(rig, (size,), np.int64)
        rig.device.token_slots(rig.put(mapping), out, scale=96, offset=32, stream=rig.stream)
        expected = [-1 if s < 0 else s * 96 + 32 + t for s, t in mapping.tolist()]
        assert found(rig, whole, (size,)).tolist() == expected

    def test_wrong_formats_are_refused(self, rig):
        device, on = rig.device, rig.stream
        tables = rig.put(np.zeros((2, 3, 4), np.int32))
        ids, wide = rig.put([0, 0], np.int32), rig.put([0, 0], np.int64)
        out, pools = rig.put(np.full((1, 2, 2, 4), 5, np.int32)), [PoolNumbers(0, 2, 1, 1)]
        usual = {"tables": tables, "rows": ids, "out": out, "pools": pools}
        for wrong in (
            {"tables": tables[0]},
            {"tables": tables[:, :, ::2]},
            {"rows": wide},
            {"out": out[:, :1]},
            {"out": out[:, :, :1]},
            {"pools": pools * 2},
            {"pools": [PoolNumbers(2, 2, 1, 1)]},
            {"pools": [PoolNumbers(0, 2, 1, 0)]},
            {"pools": [PoolNumbers(0, 2**31, 1, 1)]},
            {"no_page": 2**31},
        ):
            with pytest.raises(ValueError, match=r".*: expected"):
                device.block_offsets(**usual | wrong, stream=on)
        with pytest.raises(TypeError):
            device.block_offsets(**usual | {"rows": [0, 0]}, stream=on)
        assert (rig.get(out) == 5).all()
        mapping, flat = rig.put(np.zeros((2, 2), np.int32)), rig.put(np.zeros(2, np.int64))
        for args in ((mapping, flat[:1]), (mapping, ids), (ids, flat)):
            with pytest.raises(ValueError, match=r".*: expected"):
                device.token_slots(*args, scale=4, stream=on)
        with pytest.raises(ValueError, match="scale"):
            device.token_slots(mapping, flat, scale=2**31, stream=on)

    def test_wrong_row_pages_are_refused(self, rig):
        device, on = rig.device, rig.stream
        table = rig.put(np.zeros((3, 4), np.int32))
        ids, three = rig.put([0, 0], np.int32), rig.put([0, 0, 0], np.int32)
        one, wide = rig.put([0], np.int32), rig.put([0, 0], np.int64)
        ranges = RowRanges(ids, ids, ids)
        both = {"table": table, "ranges": ranges, "numbers": PageNumbers(), "page_tokens": 2}
        csr = {"indptr": three, "indices": ids, "last_page_len": ids}
        ragged = {
            "page_indices": table[:2], "cu_q_lens": three, "kv_lens": ids, "num_seqs": one
        }  # fmt: skip
        common = (
            {"table": table[0]},
            {"table": table[:, ::2]},
            {"ranges": RowRanges(wide, ids, ids)},
            {"ranges": RowRanges(ids, one, ids)},
            {"ranges": RowRanges(ids, ids, three)},
            {"numbers": PageNumbers(1, 0, 0)},
            {"numbers": PageNumbers(-(2**31) - 1)},
            {"page_tokens": 0},
        )
        own = ({"indptr": ids}, {"indices": wide}, {"indices": table}, {"last_page_len": one})
        for wrong in (*common, *own):
            with pytest.raises(ValueError, match=r".*: expected"):
                device.csr_pages(**both | csr | wrong, stream=on)
        own = ({"page_indices": table}, {"page_indices": table[:2, :3]}, {"cu_q_lens": ids},
               {"kv_lens": one}, {"num_seqs": ids}, {"no_page": -(2**31) - 1})  # fmt: skip
        for wrong in (*common, *own):
            with pytest.raises(ValueError, match=r".*: expected"):
                device.ragged_pages(**both | ragged | wrong, stream=on)
        for call, args in ((device.csr_pages, csr), (device.ragged_pages, ragged)):
            for name in args:
                with pytest.raises(TypeError):
                    call(**both | args | {name: [0, 0]}, stream=on)
