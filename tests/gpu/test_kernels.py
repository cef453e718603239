"""What only a GPU shows: large offsets, many tokens, captured graphs."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.device import reference
from tests.device.harness import Stack, buffer_bytes, geometry
from tests.gpu.tools import Graph

MIB, GIB = 1 << 20, 1 << 30
T, H, D = 32, 8, 128


def model_geometry(layout):
    """Keys or values of a real model: 8 heads of 128 16-bit items, 32 tokens to a page."""
    return geometry(layout, page_tokens=T, heads=H, dim=D, itemsize=2)


def random_mapping(rng, num_slots, tokens):
    """Distinct places in random order; one in ten is nowhere."""
    cells = rng.permutation(num_slots * T)[:tokens]
    mapping = np.stack(np.divmod(cells, T), axis=1).astype(np.int32)
    mapping[rng.random(tokens) < 0.1] = -1, 0
    return mapping


# -- many tokens -----------------------------------------------------------------------------------


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("offset", [0, 2, 8])
def test_thousands_of_tokens(rig, layout, offset):
    """Both ways of cutting a token, and addresses that allow only narrow accesses."""
    g, slots, tokens = model_geometry(layout), 160, 4_500
    size = buffer_bytes(g)
    memory = rig.reserve(slots * (4 * size + 16), slots * (4 * size + 16))
    slot_bytes = 4 * size + 16
    where = [offset + i * size for i in range(4)]
    stack = rig.device.page_stack([(memory, slot_bytes, at) for at in where], 2, g)
    mapping = random_mapping(rig.rng, slots, tokens)
    sources = [rig.random((2, tokens, H, D), 2) for _ in range(2)]
    placed = rig.put(mapping)
    whole = memory.array(np.int32, (memory.nbytes // 4,))
    rig.device.fill_words(whole, 0x5A5A5A5A, stream=rig.stream)
    rig.device.append(stack, placed, [rig.put(s) for s in sources], stream=rig.stream)
    expected = np.full(memory.nbytes, 0x5A, np.uint8)
    places = [(expected, slot_bytes, at) for at in where]
    reference.append(places, 2, g, mapping, sources)
    np.testing.assert_array_equal(rig.get(whole), expected.view(np.int32))
    targets = [rig.put(rig.random(s.shape, 2)) for s in sources]
    rig.device.gather(stack, placed, targets, stream=rig.stream)
    nowhere = mapping[:, 0] < 0
    for source, target in zip(sources, targets, strict=True):
        source[:, nowhere] = 0
        np.testing.assert_array_equal(rig.get(target), source)


@pytest.mark.no_sanitizer
def test_fused_and_transposed_sources(rig):
    """Views of one QKV projection, and arrays with heads before tokens."""
    g, slots, tokens = model_geometry("NHD"), 64, 1_500
    stack = Stack.one_pool(rig, g, num_layers=1, num_roles=2, guard=0)
    slots = stack.num_slots
    mapping = random_mapping(rig.rng, slots, min(tokens, slots * T))
    count = len(mapping)
    fused = rig.random((1, count, 3 * H, D), 2)
    sources = [fused[:, :, H : 2 * H], fused[:, :, 2 * H :]]
    views = rig.put(fused)
    views = [views[:, :, H : 2 * H], views[:, :, 2 * H :]]
    rig.device.append(stack.stack, rig.put(mapping), views, stream=rig.stream)
    stack.expect_append(mapping, sources)
    stack.check()
    sources = [rig.random((1, H, count, D), 2).transpose(0, 2, 1, 3) for _ in range(2)]
    views = [rig.put(s.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for s in sources]
    rig.device.append(stack.stack, rig.put(mapping), views, stream=rig.stream)
    stack.expect_append(mapping, sources)
    stack.check()


@pytest.mark.no_sanitizer
def test_fingerprints_of_thousands_of_tokens(rig):
    g, slots, tokens = model_geometry("HND"), 100, 3_000
    size = buffer_bytes(g)
    memory = rig.reserve(slots * 2 * size, slots * 2 * size)
    stack = rig.device.page_stack([(memory, 2 * size, 0), (memory, 2 * size, size)], 2, g)
    mapping = random_mapping(rig.rng, slots, tokens)
    keys = rig.rng.integers(-(2**63), 2**63 - 1, tokens)
    placed, named = rig.put(mapping), rig.put(keys)
    bad = rig.put(np.full(tokens, -1, np.int32))
    rig.device.write_fingerprints(stack, placed, named, stream=rig.stream)
    rig.device.verify_fingerprints(stack, placed, named, bad, stream=rig.stream)
    assert not rig.get(bad).any()
    first = np.zeros((tokens, H, D), np.uint16)
    outs = [rig.put(first[None]) for _ in range(2)]
    rig.device.gather(stack, placed, outs, stream=rig.stream)
    for role, out in enumerate(outs):
        expected = reference.fingerprint(keys, 0, role, H * D * 2)
        expected[mapping[:, 0] < 0] = 0
        np.testing.assert_array_equal(rig.get(out).view(np.uint8).reshape(tokens, -1), expected)
    keys[::7] += 1
    rig.device.from_host(keys, named, stream=rig.stream)
    rig.device.verify_fingerprints(stack, placed, named, bad, stream=rig.stream)
    found, wrong = rig.get(bad), np.zeros(tokens, bool)
    wrong[::7] = True
    assert (found[wrong & (mapping[:, 0] >= 0)] == 2 * H * D * 2 // 4).all()
    assert not found[~wrong | (mapping[:, 0] < 0)].any()


# -- captured graphs -------------------------------------------------------------------------------


class Decode:
    """A captured step: cells and words up, tokens mapped, appended, gathered and rows taken."""

    def __init__(self, rig, max_tokens=16, num_slots=12):
        self.rig, self.max_tokens = rig, max_tokens
        self.g = geometry(page_tokens=4)
        size = buffer_bytes(self.g)
        grain = rig.device.grain(1)
        self.memory = rig.device.reserve(4 * grain, grain, grain)
        rig.owned.append(self.memory)
        self.slot_bytes = 2 * size + 16
        places = [(self.memory, self.slot_bytes, i * size) for i in range(2)]
        self.stack = rig.device.page_stack(places, 2, self.g)
        self.table = rig.put(np.full((8, 1, 6), -1, np.int32))
        self.staging = rig.put(np.zeros(3 * 4, np.int32))
        self.mapping = rig.put(np.zeros((1, max_tokens, 2), np.int32))
        shape = 1, max_tokens, 2, 8
        self.sources = [rig.put(rig.random(shape, 2)) for _ in range(2)]
        self.targets = [rig.put(rig.random(shape, 2)) for _ in range(2)]
        self.rows_out = rig.put(np.zeros((4, 6), np.int32))
        self.pinned = rig.device.pinned(4096)
        self.index = self.pinned[:32].view(np.int64)
        self.value = self.pinned[64:80].view(np.int32)
        self.words = self.pinned[128:176].view(np.int32)
        self.index[:], self.value[:], self.words[:] = range(4), -1, 0
        rig.stream.synchronize()

    def work(self, stream):
        device, parts = self.rig.device, [self.staging[i * 4 : i * 4 + 4] for i in range(3)]
        device.scatter_table(
            self.table, self.index, self.value, self.staging, self.words, stream=stream
        )
        by_group = self.table.transpose(1, 0, 2)
        device.map_tokens(by_group, *parts, self.mapping, tokens_per_block=4, stream=stream)
        device.append(self.stack, self.mapping[0], self.sources, stream=stream)
        device.gather(self.stack, self.mapping[0], self.targets, stream=stream)
        device.take_rows(by_group[0], parts[0], self.rows_out, stream=stream)

    def set(self, cells, rows, starts, counts):
        """The next step, written into the staging that the captured kernels read."""
        for i, (cell, slot) in enumerate(cells):
            self.index[i], self.value[i] = cell, slot
        padded = 4 - len(rows)
        ends = np.cumsum(counts).tolist()
        self.words[:] = [
            *rows, *[-1] * padded, *starts, *[0] * padded, *ends, *[ends[-1]] * padded
        ]  # fmt: skip
        sources = [self.rig.random((1, self.max_tokens, 2, 8), 2) for _ in range(2)]
        for source, array in zip(sources, self.sources, strict=True):
            self.rig.device.from_host(source, array, stream=self.rig.stream)
        self.rig.stream.synchronize()
        return sources

    def pages(self):
        """The pool's bytes."""
        return self.rig.get(self.memory.array(np.uint8, (self.memory.nbytes,)))


def test_a_captured_step_replays_with_new_staging(rig):
    """Also after the pool has grown, with fewer rows, and with padding that touches no page."""
    step = Decode(rig)
    before = step.pages()
    graph = Graph(rig.device, step.work)
    np.testing.assert_array_equal(step.pages(), before)  # a capture runs nothing
    grown = step.memory.nbytes // step.slot_bytes + 3  # a slot that is not there yet
    steps = [
        ([(0, 3), (1, 5), (6, 7), (7, 0)], [0, 1], [2, 0], [5, 6]),
        ([(12, 9), (12, 9), (12, 9), (12, 9)], [2], [3], [1]),
        ([(18, grown), (19, 2), (18, grown), (19, 2)], [3, 0], [0, 7], [7, 1]),
    ]
    expected = before.copy()
    table = np.full((8, 1, 6), -1, np.int32)
    for number, (cells, rows, starts, counts) in enumerate(steps):
        if number == 2:
            step.memory.resize(3 * rig.device.grain(1))
            expected = step.pages()
        sources = step.set(cells, rows, starts, counts)
        for cell, slot in cells:
            table.reshape(-1)[cell] = slot
        graph.replay()
        mapping = np.zeros((1, step.max_tokens, 2), np.int32)
        numbers = [np.array(values, np.int32) for values in (rows, starts, np.cumsum(counts))]
        reference.map_tokens(table.transpose(1, 0, 2), *numbers, mapping, 4)
        np.testing.assert_array_equal(rig.get(step.mapping), mapping)
        places = [(expected, step.slot_bytes, i * buffer_bytes(step.g)) for i in range(2)]
        reference.append(places, 2, step.g, mapping[0], sources)
        np.testing.assert_array_equal(step.pages(), expected)
        for source, target in zip(sources, step.targets, strict=True):
            source[:, mapping[0, :, 0] < 0] = 0
            np.testing.assert_array_equal(rig.get(target), source)
        padded = np.array([*rows, *[-1] * (4 - len(rows))], np.int32)
        rows_out = np.zeros((4, 6), np.int32)
        reference.take_rows(table[:, 0], padded, rows_out)
        np.testing.assert_array_equal(rig.get(step.rows_out), rows_out)


@pytest.mark.parametrize("count", [3, 300])
def test_captured_copies_replay_with_their_own_ids(rig, count):
    pool = rig.pool(80, 2 * count + 2)
    order = rig.rng.permutation(2 * count).astype(np.int32)
    src, dst = order[:count].copy(), order[count:].copy()
    pools = [(pool.memory, pool.slot_bytes)]

    def work(stream):
        rig.device.copy_pages(pools, src, dst, stream=stream)
        rig.device.fill_pages(pools, src[:1], 0xC3, stream=stream)

    graph = Graph(rig.device, work)
    kept = src.copy(), dst.copy()
    src[:], dst[:] = 0, 1
    for _ in range(2):
        graph.replay()
        for a, b in zip(*kept, strict=True):
            pool.slot(b)[:] = pool.slot(a)
        pool.slot(kept[0][0])[:] = 0xC3
        pool.check()


def test_captured_fingerprints_replay_with_new_keys(rig):
    """Written and checked in the graph: keys and places changed in place are the next replay's."""
    g = geometry(page_tokens=4)
    stack = Stack.one_pool(rig, g, num_layers=1, num_roles=2, guard=0)
    tokens, slots = 9, stack.num_slots
    keys, mapping = rig.put(np.zeros(tokens, np.int64)), rig.put(np.zeros((tokens, 2), np.int32))
    checked, bad = rig.put(np.zeros(tokens, np.int64)), rig.put(np.zeros(tokens, np.int32))

    def work(stream):
        rig.device.write_fingerprints(stack.stack, mapping, keys, stream=stream)
        rig.device.verify_fingerprints(stack.stack, mapping, checked, bad, stream=stream)

    graph = Graph(rig.device, work)
    for wrong in (0, 4):
        values = rig.rng.integers(-(2**63), 2**63 - 1, tokens)
        cells = rig.rng.permutation(slots * 4)[:tokens]
        places = np.stack(np.divmod(cells, 4), axis=1).astype(np.int32)
        others = values.copy()
        others[:wrong] ^= 1
        for array, filled in ((keys, values), (mapping, places), (checked, others)):
            rig.device.from_host(filled, array, stream=rig.stream)
        rig.stream.synchronize()  # the graph runs on a stream of its own
        graph.replay()
        found = rig.get(bad)
        assert (found[:wrong] > 0).all()
        assert not found[wrong:].any()


def test_uploads_cannot_be_captured(rig):
    from kvcore.errors import StateError

    words = rig.put(np.zeros(4, np.int32))
    caught = []

    def work(stream):
        rig.device.fill_words(words, 5, stream=stream)
        try:
            rig.device.from_host(np.ones(4, np.int32), words, stream=stream)
        except StateError as error:
            caught.append(str(error))

    graph = Graph(rig.device, work)
    assert "captured" in caught[0]
    graph.replay()
    assert rig.get(words).tolist() == [5] * 4


def test_tunings_agree(rig):
    """The kernels do the same whatever the sweep of the benchmark makes of them."""
    from dataclasses import replace

    g = model_geometry("NHD")
    pool = rig.pool(2 * buffer_bytes(g), 6)
    for threads, vectors in ((64, 1), (256, 4), (512, 2)):
        for name in ("append", "gather", "copy_pages", "fill"):
            source = rig.device.source(name)
            rig.device.retune(
                replace(source, threads=threads, vectors=vectors, stream_stores=vectors > 1)
            )
        stack = Stack(rig, [pool, pool], [0, buffer_bytes(g)], 2, g)
        mapping = random_mapping(rig.rng, stack.num_slots, 100)
        sources = stack.randoms(100)
        placed = rig.put(mapping)
        rig.device.append(stack.stack, placed, [rig.put(s) for s in sources], stream=rig.stream)
        stack.expect_append(mapping, sources)
        slots = rig.rng.permutation(6).astype(np.int32)
        pools = [(pool.memory, pool.slot_bytes)]
        rig.device.copy_pages(pools, slots[:2], slots[2:4], stream=rig.stream)
        for a, b in zip(slots[:2], slots[2:4], strict=True):
            pool.slot(b)[:] = pool.slot(a)
        rig.device.fill_pages(pools, slots[4:5], vectors, stream=rig.stream)
        pool.slot(slots[4])[:] = vectors
        pool.check()
        targets = [rig.put(s) for s in stack.randoms(100)]
        rig.device.gather(stack.stack, placed, targets, stream=rig.stream)
        for target, expected in zip(targets, stack.expect_gather(mapping), strict=True):
            np.testing.assert_array_equal(rig.get(target).view(np.uint8), expected)
