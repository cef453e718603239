"""Battery: page tables and where tokens lie."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device.base import StepArrays, staged_parts
from tests.device.battery_base import BatteryBase
from tests.device.harness import Rig, naive_map


def run_map(rig: Rig, tables, rows, starts, ends, num_tokens: int, t: int) -> np.ndarray:
    """`map_tokens` on the device; `tables` may be a device array already."""
    tables = rig.put(tables) if isinstance(tables, list) else tables
    batch = [rig.put(values, np.int32) for values in (rows, starts, ends)]
    out = rig.put(np.full((tables.shape[0], num_tokens, 2), -77, np.int32))
    rig.device.map_tokens(tables, *batch, out, tokens_per_block=t, stream=rig.stream)
    return rig.get(out)


def random_tables(rig: Rig, shape: tuple[int, int, int]) -> np.ndarray:
    """Page tables with every slot number different and one cell in four empty."""
    tables = rig.rng.permutation(int(np.prod(shape))).astype(np.int32).reshape(shape)
    tables[rig.rng.random(shape) < 0.25] = -1
    tables[rig.rng.random(shape) < 0.05] = -9  # no slot either
    return tables


class TableTests(BatteryBase):
    """`fill_words`, `scatter_table`, `map_tokens`, `take_rows`."""

    @pytest.mark.parametrize("size", [0, 1, 5, 1000, 70_000])
    def test_fill_words_touches_its_words_only(self, rig, size):
        whole = rig.put(np.full(size + 2, 9, np.int32))
        rig.device.fill_words(whole[1 : size + 1], -123_456, stream=rig.stream)
        found = rig.get(whole)
        assert (found[0], found[-1]) == (9, 9)
        assert (found[1:-1] == -123_456).all()

    def test_scatter_table_writes_cells_and_words(self, rig):
        table = rig.put(np.arange(60, dtype=np.int32).reshape(3, 4, 5))
        target = rig.put(np.full(10, 7, np.int32))
        index = rig.pinned([59, 0, 22], np.int64)
        value, words = rig.pinned([-1, 500, 600], np.int32), rig.pinned([1, 2, 3], np.int32)
        rig.device.scatter_table(table, index, value, target, words, stream=rig.stream)
        expected = np.arange(60)
        expected[[59, 0, 22]] = -1, 500, 600
        np.testing.assert_array_equal(rig.get(table), expected.reshape(3, 4, 5))
        assert rig.get(target).tolist() == [1, 2, 3] + [7] * 7

    @pytest.mark.parametrize(("cells", "num_words"), [(0, 0), (0, 3), (3, 0), (2000, 2500)])
    def test_scatter_table_of_any_size(self, rig, cells, num_words):
        table = rig.put(np.full(4001, -5, np.int32))
        target = rig.put(np.full(2501, -6, np.int32))
        index = rig.pinned(rig.rng.permutation(4001)[:cells], np.int64)
        value = rig.pinned(np.arange(cells), np.int32)
        words = rig.pinned(np.arange(num_words), np.int32)
        rig.device.scatter_table(table, index, value, target, words, stream=rig.stream)
        expected = np.full(4001, -5)
        expected[index] = np.arange(cells)
        np.testing.assert_array_equal(rig.get(table), expected)
        found = rig.get(target)
        np.testing.assert_array_equal(found[:num_words], np.arange(num_words))
        assert (found[num_words:] == -6).all()

    def test_map_tokens_of_one_row(self, rig):
        tables = np.array([[[4, 9, -1]], [[1, -1, 2]]], np.int32)
        found = run_map(rig, [*tables], [0], [2], [8], 9, 3)
        assert found[0].tolist() == [
            [4, 2], [9, 0], [9, 1], [9, 2], [-1, 0], [-1, 0], [-1, 0], [-1, 0], [-1, 0]
        ]  # fmt: skip
        assert found[1].tolist() == [
            [1, 2], [-1, 0], [-1, 0], [-1, 0], [2, 0], [2, 1], [2, 2], [-1, 0], [-1, 0]
        ]  # fmt: skip

    @pytest.mark.parametrize("t", [1, 3, 4, 32])
    def test_map_tokens_of_ragged_batches(self, rig, t):
        tables = random_tables(rig, (3, 7, 6))
        for num_rows in (1, 2, 5, 40):
            rows = rig.rng.integers(-1, 8, num_rows)
            starts = rig.rng.integers(-2, 6 * t + 2, num_rows)
            ends = np.cumsum(rig.rng.integers(0, 3 * t + 1, num_rows))
            for num_tokens in (0, max(int(ends[-1]) - 3, 0), int(ends[-1]), int(ends[-1]) + 5):
                found = run_map(rig, rig.put(tables), rows, starts, ends, num_tokens, t)
                batch = rows.tolist(), starts.tolist(), ends.tolist()
                expected = naive_map(tables, *batch, num_tokens, t)
                np.testing.assert_array_equal(found, expected)

    def test_map_tokens_of_no_rows_and_no_groups(self, rig):
        tables = random_tables(rig, (2, 3, 4))
        assert (run_map(rig, rig.put(tables), [], [], [], 4, 2) == [-1, 0]).all()
        assert run_map(rig, rig.put(tables[:0]), [0], [0], [4], 4, 2).shape == (0, 4, 2)
        assert (run_map(rig, rig.put(tables[:, :, :0]), [0], [0], [4], 4, 2) == [-1, 0]).all()

    def test_map_tokens_reads_tables_with_strides(self, rig):
        whole = random_tables(rig, (4, 9, 8))
        view = rig.put(whole)[::2, 1:8:3, :5]
        found = run_map(rig, view, [2, 0, 1], [0, 3, 7], [9, 14, 20], 20, 2)
        expected = naive_map(whole[::2, 1:8:3, :5], [2, 0, 1], [0, 3, 7], [9, 14, 20], 20, 2)
        np.testing.assert_array_equal(found, expected)

    def test_map_tokens_does_not_overflow(self, rig):
        tables = rig.put(np.zeros((1, 1, 4), np.int32))
        found = run_map(rig, tables, [0, 0], [2**31 - 2, 0], [4, 6], 6, 32)
        assert found[0].tolist() == [[-1, 0]] * 4 + [[0, 0], [0, 1]]

    def test_take_rows(self, rig):
        table = np.arange(35, dtype=np.int32).reshape(5, 7)
        rows = [4, -1, 0, 4, 5, -(2**31)]
        for width in (0, 1, 6, 7, 9):
            out = rig.put(np.full((6, width), -77, np.int32))
            rig.device.take_rows(rig.put(table), rig.put(rows, np.int32), out, stream=rig.stream)
            expected = np.full((6, width), -1)
            for i, row in enumerate(rows):
                if 0 <= row < 5:
                    expected[i, :7] = table[row, :width]
            np.testing.assert_array_equal(rig.get(out), expected)

    def test_take_rows_reads_tables_with_strides(self, rig):
        table = np.arange(60, dtype=np.int32).reshape(6, 10)
        out = rig.put(np.zeros((2, 4), np.int32))
        rows = rig.put([2, 0], np.int32)
        rig.device.take_rows(rig.put(table)[1::2, 2:7], rows, out, stream=rig.stream)
        np.testing.assert_array_equal(rig.get(out), table[1::2, 2:6][[2, 0]])

    def test_take_rows_of_nothing(self, rig):
        table = rig.put(np.zeros((0, 4), np.int32))
        out = rig.put(np.zeros((2, 3), np.int32))
        rig.device.take_rows(table, rig.put([0, 1], np.int32), out, stream=rig.stream)
        assert (rig.get(out) == -1).all()
        none = rig.put(np.zeros((0, 3), np.int32))
        rig.device.take_rows(table, rig.put([], np.int32), none, stream=rig.stream)
        assert rig.get(none).shape == (0, 3)

    def test_arrays_are_fetched_in_order(self, rig):
        """Into pinned memory; the values are there once a later event has passed."""
        array = rig.put(np.arange(12, dtype=np.int32))
        target = rig.pinned(np.zeros(8), np.int32)
        rig.device.fetch(array[4:], target, stream=rig.stream)
        event = rig.stream.record()
        rig.device.fill_words(array, -1, stream=rig.stream)
        event.synchronize()
        assert target.tolist() == list(range(4, 12))
        rig.device.fetch(array[:0], target[:0], stream=rig.stream)
        for wrong in (target[:7], target.view(np.uint32), target[::-1]):
            with pytest.raises(ValueError, match="target"):
                rig.device.fetch(array[4:], wrong, stream=rig.stream)
        with pytest.raises(ValueError, match="array"):
            rig.device.fetch(array[::2], target[:6], stream=rig.stream)
        assert not rig.stream.is_capturing()

    def test_wrong_tables_are_refused(self, rig):
        good, wide = rig.put(np.zeros((1, 2, 4), np.int32)), rig.put(np.zeros((1, 2, 4), np.int64))
        ids, out = rig.put([0], np.int32), rig.put(np.full((1, 4, 2), 5, np.int32))

        def call(tables=good, rows=ids, starts=ids, ends=ids, target=out, t=2):
            rig.device.map_tokens(
                tables, rows, starts, ends, target, tokens_per_block=t, stream=rig.stream
            )

        for wrong in (
            {"tables": wide},
            {"tables": good[0]},
            {"rows": rig.put([0], np.int64)},
            {"starts": rig.put([0, 0], np.int32)},
            {"target": rig.put(np.zeros((2, 4, 2), np.int32))},
            {"target": rig.put(np.zeros((1, 4, 3), np.int32))},
            {"t": 0},
        ):
            with pytest.raises(ValueError, match=r".*: expected"):
                call(**wrong)
        with pytest.raises(TypeError):
            call(tables=[[[0]]])
        assert (rig.get(out) == 5).all()

    def test_a_step_sends_its_cells_and_maps_its_tokens(self, rig):
        """Again and again from the same two stagings, with few changed cells and with many."""
        device, t = rig.device, 4
        host = random_tables(rig, (40, 2, 60))
        table, words = rig.put(host), np.zeros((3, 8), np.int32)
        target, out = rig.put(np.zeros(24, np.int32)), rig.put(np.zeros((2, 50, 2), np.int32))
        parts = [target[8 * i : 8 * i + 8] for i in range(3)]
        tables = table.transpose(1, 0, 2)
        launch = device.step_launch(StepArrays(table, tables, target, *parts, out, t))
        stagings = [device.pinned(64 << 10) for _ in range(2)]
        for step, cells in enumerate([0, 1, 300, 3000, 7, 0, 1024, 1025]):
            index = rig.rng.permutation(host.size)[:cells]
            host.reshape(-1)[index] = rig.rng.integers(-1, 900, cells)
            words[0] = rig.rng.permutation(40)[:8]
            words[1], words[2] = rig.rng.integers(0, 99, 8), np.cumsum(rig.rng.integers(0, 7, 8))
            staged = stagings[step % 2]
            count, at, value, sent = staged_parts(staged, cells, 24)
            count[0], at[:], sent[:] = cells, index, words.reshape(-1)
            value[:] = host.reshape(-1)[index]
            launch(staged, cells, 24, rig.stream)
            np.testing.assert_array_equal(rig.get(table), host)
            np.testing.assert_array_equal(rig.get(target), words.reshape(-1))
            expected = naive_map(host.transpose(1, 0, 2), *words, 50, t)
            np.testing.assert_array_equal(rig.get(out), expected)
