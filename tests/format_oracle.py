"""The formats of a step against the tokens of its rows, which are read from raw memory.

The oracle knows the tokens of each beam and how pages are declared, and nothing of their numbers.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

import numpy as np

import kvcore as k
from kvcore import PageIndexMode

MOST_BLOCKS, MOST_ROWS, MOST_TOKENS = 8, 10, 80
REPEATED = 6  # rows of block offsets beside every beam's own
MODES = (None, PageIndexMode.SHARED, PageIndexMode.PER_LAYER)


class Pages:
    """What lies in the pages of each buffer, token by token, read from the bytes."""

    def __init__(self, m: k.KVCacheManager, stream: Any) -> None:
        self.m, self.stream = m, stream
        self.buffers = {
            (layer.layer_id, its.role): its for layer in m.config.layers for its in layer.buffers
        }

    def values(self, key: tuple[int, str], tokens: list[int]) -> np.ndarray:
        """What is written for some tokens, `[tokens, *shape]`: different for every buffer."""
        its = self.buffers[key]
        salt, size = list(self.buffers).index(key), int(np.prod(its.shape))
        mixed = np.array(tokens, np.int64)[:, None] * 97 + salt * 1009 + np.arange(size)
        return (mixed % 65521).astype(its.dtype).reshape(-1, *its.shape)

    def at(self, key: tuple[int, str], address: int) -> np.ndarray:
        """The page that begins at an address, `[tokens, *shape]`."""
        its = self.buffers[key]
        self.m.device.synchronize()
        memory = (ctypes.c_uint8 * its.size).from_address(address)
        return self._by_token(key, np.frombuffer(memory, np.uint8).copy().view(its.dtype))

    def numbered(self, key, mode: PageIndexMode | None, page: int) -> np.ndarray:
        """The page with a number; by default its index in the array of all pages."""
        assert page >= 0
        self.m.device.synchronize()
        if mode is None:
            view = self.m.get_pages(*key)
            assert page < view.shape[0]
            return self._by_token(key, self.m.device.to_host(view[page], stream=self.stream))
        base = self.m.get_mem_pool_base_address(*key, mode)
        return self.at(key, base + page * self.m.get_page_stride(*key))

    def _by_token(self, key: tuple[int, str], page: np.ndarray) -> np.ndarray:
        its = self.buffers[key]
        if its.layout == "HND":
            return page.reshape(its.shape[0], -1, its.shape[1]).swapaxes(0, 1)
        return page.reshape(-1, *its.shape)


class Member(NamedTuple):
    """A cache in a batch, and its tokens in the step."""

    kv: k.KVCache
    start: int
    count: int


class Row(NamedTuple):
    """A row of a batch: all tokens up to the end of the step, and how many are the step's."""

    tokens: list[int]
    count: int


class Formats:
    """The formats of a prepared batch against the tokens of its rows."""

    def __init__(self, life: Any, batch, stream, members, listed) -> None:
        """`listed` says which beam of which member each row of block offsets is."""
        self.rng, self.m, self.pages, self.texts = life.rng, life.m, life.pages, life.texts
        self.batch, self.stream, self.members, self.listed = batch, stream, members, listed
        texts = self.texts
        self.rows = [
            Row(text[: its.start + its.count], its.count)
            for its in members
            for text in texts[its.kv]
        ]
        self.lens = [len(its.tokens) for its in self.rows]
        assert batch.kv_lens.tolist() == self.lens
        self.padded = self.rows + [Row([], 0)] * (MOST_ROWS - len(self.rows))
        wide = len(self.rows) > len(members)
        self.paths = wide and self.m.config.beam_mode == "indirection"

    def check(self, over: bool) -> None:
        """All formats of all buffers, one by one and those of a layer together."""
        picks = [[key] for key in self.pages.buffers]
        for layer in self.m.config.layers:
            picks.append([(layer.layer_id, its.role) for its in layer.buffers])
        for pick in picks:
            for mode in MODES:
                for call in (self.csr, self.ragged, self.slots)[: 2 if over else 3]:
                    self.check_call(call, pick, mode)
        self.check_table(over)
        for roles in (("key", "value"), ("key", "key"), ("kv", "kv"), ("latent", "latent")):
            layers = [layer for layer, role in self.pages.buffers if role == roles[0]]
            if layers and all(self._alike(layer, roles) for layer in layers):
                self.offsets(self.m.create_batch_tables(roles), roles, over)

    def _alike(self, layer: int, roles: tuple[str, str]) -> bool:
        """Whether K and V of a layer can be in one table."""
        key, value = (self.pages.buffers.get((layer, role)) for role in roles)
        block = self.m.config.tokens_per_block
        return (key.size, key.tokens(block)) == (value.size, value.tokens(block))

    def check_call(self, call, pick, mode) -> None:
        """Right pages, or the refusal that is due."""
        some = [self.pages.buffers[key] for key in pick]
        finer = {its.tokens(self.m.config.tokens_per_block) for its in some}
        differ = len({its.layout for its in some}) > 1
        because = None
        if differ or (call == self.csr and some[0].layout == "NH2D"):
            because = "layout: expected"
        elif mode is None and min(finer) < self.m.config.tokens_per_block:
            because = "mode=PageIndexMode.SHARED"
        elif self.paths and call != self.slots:
            because = "beam_mode='fork'|same page numbers"
        elif (
            mode is not None
            and len(pick) > 1
            and (mode is PageIndexMode.PER_LAYER or len({its.size for its in some}) > 1)
        ):
            because = "same page numbers"  # if anything
        how = {"layout": some[0].layout, "mode": mode, "stream": self.stream}
        said = "nothing"
        try:
            call(pick, mode, max(finer), (pick[0][0], [role for _, role in pick]), how)
        except (ValueError, k.StateError) as error:
            said = str(error)
        expected = {None: "nothing", "same page numbers": "nothing|same page numbers"}
        assert re.search(expected.get(because, because), said)

    def same(self, pick, mode, numbers, tokens) -> None:
        """The pages with some numbers, one behind the other, begin with these tokens."""
        for key in pick if tokens else ():
            found = np.concatenate([self.pages.numbered(key, mode, int(n)) for n in numbers])
            np.testing.assert_array_equal(found[: len(tokens)], self.pages.values(key, tokens))

    def host(self, array) -> np.ndarray:
        return self.m.device.to_host(array, stream=self.stream)

    def out(self, *shapes, dtype=np.int32) -> list:
        return [upload(self.m.device, np.full(s, 77, dtype), self.stream) for s in shapes]

    # -- one format each ---------------------------------------------------------------------------

    def csr(self, pick, mode, size, which, how) -> None:
        total, rows, out = sum(-(-n // size) for n in self.lens), self.rows, None
        if self.rng.random() < 0.5:
            rows, most = self.padded, total + int(self.rng.integers(0, 3))
            out = self.out(MOST_ROWS + 1, most, MOST_ROWS)
        found = self.batch.csr_pages(*which, **how, out=out)
        indptr, indices, last = map(self.host, found[:3])
        assert found.host_indptr.tolist() == indptr.tolist()
        assert self.batch.host_indptr(size, rows=len(rows)).tolist() == indptr.tolist()
        assert (indptr[0], indptr[-1], len(last)) == (0, total, len(rows))
        for i, row in enumerate(rows):
            mine = indices[indptr[i] : indptr[i + 1]]
            length = (len(mine) - 1) * size + last[i] if len(mine) else 0
            assert length == len(row.tokens)
            assert 1 <= last[i] <= size or not row.tokens
            self.same(pick, mode, mine, row.tokens)

    def ragged(self, pick, mode, size, which, how) -> None:
        columns, rows, out = max((-(-n // size) for n in self.lens), default=0), self.rows, None
        if self.rng.random() < 0.5:
            rows, columns = self.padded, columns + int(self.rng.integers(0, 3))
            out = self.out((MOST_ROWS, columns), MOST_ROWS + 1, MOST_ROWS, 1)
        no_page = int(self.rng.integers(-1, 1))
        found = self.batch.ragged_pages(*which, **how, no_page=no_page, out=out)
        indices, bounds, lens, count = map(self.host, found)
        assert indices.shape == (len(rows), columns)
        assert bounds.tolist() == np.cumsum([0, *(row.count for row in rows)]).tolist()
        assert lens.tolist() == [len(row.tokens) for row in rows]
        assert count.tolist() == [len(self.rows)]
        for i, row in enumerate(rows):
            used = -(-len(row.tokens) // size)
            assert (indices[i, used:] == no_page).all()
            self.same(pick, mode, indices[i, :used], row.tokens)

    def slots(self, pick, mode, size, which, how) -> None:
        tokens = [t for row in self.rows for t in row.tokens[len(row.tokens) - row.count :]]
        total = int(self.rng.integers(len(tokens), MOST_TOKENS + 1))
        (out,) = self.out(total, dtype=np.int64)
        found = self.host(self.batch.slot_mapping(*which, **how, out=out)).tolist()
        assert found[len(tokens) :] == [-1] * (total - len(tokens))
        for key in pick:
            for place, token in zip(found, tokens, strict=False):
                page = self.pages.numbered(key, mode, place // size)
                np.testing.assert_array_equal(
                    page[place % size], self.pages.values(key, [token])[0]
                )

    def check_table(self, over: bool) -> None:
        """The rows as they are: a slot for every block in fork mode, and nothing behind."""
        table = self.host(self.batch.page_table(0, stream=self.stream))
        owners = [its.kv for its in self.members for _ in self.texts[its.kv]]
        for row, kv in zip(table, owners, strict=False):
            assert (row[kv.num_blocks :] == -1).all()
            assert self.paths or (row[: kv.num_blocks] >= 0).all()

    def offsets(self, tables, roles, over) -> None:
        """Block offsets of the rows that `prepare` listed, which may repeat a cache's only row."""
        no_page, out, listed = int(self.rng.integers(-1, 1)), None, self.listed
        if self.rng.random() < 0.5:
            most = MOST_BLOCKS * max(pool.expansion for pool in tables.pools)
            (out,) = self.out((len(tables.pools), MOST_ROWS + REPEATED, 2, most))
        found = self.host(
            self.batch.block_offsets(tables, no_page=no_page, out=out, stream=self.stream)
        )
        assert self.batch.num_table_rows == len(listed)
        assert (found[:, len(listed) :] == no_page).all()
        paths = None
        if self.paths:
            if over or len(listed) != len(self.rows):
                return  # the index is of the batch's own rows, before they are permuted
            paths = self.host(self.batch.cache_indirection(stream=self.stream))
        for layer, (number, offset) in tables.layer_pools.items():
            pool = tables.pools[number]
            for plane, role in enumerate(roles):
                for i, (at, beam) in enumerate(listed):
                    member = self.members[at]
                    tokens = self.texts[member.kv][beam][: member.start + member.count]
                    pages = found[number, :, plane]
                    assert (pages[i, member.kv.num_blocks * pool.expansion :] == no_page).all()
                    rows = np.full(len(tokens), i) if paths is None else i - beam + paths[i]
                    self.same_offsets(pool, (layer, role), pages, rows, tokens, offset)

    def same_offsets(self, pool, key, pages, rows, tokens, offset) -> None:
        size, known = self.m.config.tokens_per_block // pool.expansion, {}
        for at, token in enumerate(tokens):
            page = int(pages[rows[at], at // size])
            assert page >= 0
            if page not in known:
                known[page] = self.pages.at(key, pool.address + (page + offset) * pool.page_stride)
            value = self.pages.values(key, [token])[0]
            np.testing.assert_array_equal(known[page][at % size], value)


def upload(device, values: np.ndarray, stream) -> Any:
    array = device.empty(values.shape, values.dtype, stream=stream)
    device.from_host(values, array, stream=stream)
    return array
