"""Sequences live at random in pages of every kind; each format names the pages of their tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.testing import check
from tests.format_oracle import (
    MOST_BLOCKS,
    MOST_ROWS,
    MOST_TOKENS,
    REPEATED,
    Formats,
    Member,
    Pages,
    upload,
)

SEEDS = (1, 2, 3, 5, 18, 21)  # with pages of each kind, alone in a pool and together with others


def draw_layer(rng: np.random.Generator, T: int, number: int) -> k.AttentionLayerConfig:
    """Keys and values apart, in finer pages, of unlike sizes, or in one buffer; or latents."""
    heads, dim = (int(its) for its in rng.integers(1, 4, 2))
    finer = int(rng.choice([n for n in range(1, T + 1) if T % n == 0]))
    dtype, order = str(rng.choice(["int32", "uint16"])), str(rng.choice(["NHD", "HND"]))

    def buffer(role, shape=(heads, dim), layout=order, page=None):
        size = (page or T) * int(np.prod(shape)) * np.dtype(dtype).itemsize
        declared = {"dtype": dtype, "shape": shape, "layout": layout}
        return k.BufferConfig(role=role, size=size, tokens_per_block_override=page, **declared)

    kinds = [
        [buffer("key"), buffer("value")],
        [buffer("key", page=finer), buffer("value", page=finer)],
        [buffer("key"), buffer("value", page=finer)],
        [buffer("key"), buffer("value", (heads, 2 * dim))],
        [buffer("kv", (2 * heads, dim), "NH2D", rng.choice([None, finer]))],
        [buffer("latent", (dim,), "NHD")],
    ]
    return k.AttentionLayerConfig(layer_id=number, buffers=kinds[rng.integers(len(kinds))])


def draw_config(rng: np.random.Generator, mode: str) -> k.KVCacheManagerConfig:
    T = int(rng.choice([1, 2, 3, 4, 6, 8]))
    ids = np.cumsum(rng.integers(1, 4, rng.integers(1, 5))).tolist()
    layers = [draw_layer(rng, T, number) for number in ids]
    if rng.random() < 0.5:  # one pool
        like = layers[0].buffers
        layers = [k.AttentionLayerConfig(layer_id=number, buffers=like) for number in ids]
    slot = sum(its.size * (T // its.tokens(T)) for layer in layers for its in layer.buffers)
    return k.KVCacheManagerConfig(
        tokens_per_block=T,
        layers=layers,
        cache_tiers=[k.GpuCacheTierConfig(quota=max(slot * int(rng.integers(50, 200)), 1 << 16))],
        max_beam_width=int(rng.choice([1, 2, 4, 5])),
        beam_mode=mode,
        enable_partial_commit=False,
        max_seq_len=MOST_BLOCKS * T,
        max_sequences=40,
        max_util_for_resume=1.0,
    )


class Life:
    """Sequences that come, grow, branch and go; what each of their beams has written."""

    def __init__(self, seed: int, mode: str, device: Any) -> None:
        self.rng = np.random.default_rng(seed)
        config = draw_config(self.rng, mode)
        self.streams = [device.create_stream() for _ in range(2)]
        self.m = k.KVCacheManager(config, device=device, stream=self.streams[0])
        self.T, self.paths = config.tokens_per_block, mode == "indirection"
        self.most = MOST_BLOCKS * self.T
        self.pages = Pages(self.m, self.streams[0])
        most_rows = MOST_ROWS + REPEATED
        self.batches = [
            self.m.create_batch(MOST_ROWS, MOST_TOKENS, max_table_rows=most_rows) for _ in range(2)
        ]
        self.texts: dict[k.KVCache, list[list[int]]] = {}
        self.next_token = 1

    def new(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def drawn(self) -> list[k.KVCache]:
        """Some active caches, whose rows a batch holds."""
        chosen, rows = [], 0
        for kv in self.rng.permutation(np.array(list(self.texts), object)).tolist():
            rows += len(self.texts[kv])
            if rows > MOST_ROWS or (chosen and self.rng.random() < 0.15):
                break
            chosen.append(kv)
        return chosen

    def prepare(self, members: list[Member]) -> tuple[k.Batch, list[tuple[int, int]]]:
        """A batch of these, and which beam of which member each row of block offsets is.

        Some are contexts, of one row; some caches of one beam repeat it.
        """
        contexts = int(self.rng.choice([0, self.rng.integers(0, len(members) + 1)]))
        widths, spare = [len(self.texts[its.kv]) for its in members], REPEATED
        listed = [(i, 0) for i in range(contexts)]
        for i in range(contexts, len(members)):
            more = int(self.rng.integers(0, 3)) if widths[i] == 1 and spare > 2 else 0
            spare -= more
            beams = list(range(widths[i])) + [0] * more
            widths[i] = len(beams)
            listed += [(i, beam) for beam in beams]
        batch = self.batches[self.rng.integers(2)]
        kvs, starts, counts = ([its[i] for its in members] for i in range(3))
        how = {"num_contexts": contexts, "beam_width": widths[contexts:]}
        batch.prepare(kvs, counts, start=starts, stream=self.streams[self.rng.integers(2)], **how)
        return batch, listed

    def write(self, kvs: list[k.KVCache], counts: list[int]):
        """Grows some caches and writes new tokens of each beam; the formats of that step."""
        members = [
            Member(kv, len(self.texts[kv][0]), count) for kv, count in zip(kvs, counts, strict=True)
        ]
        short = [max(0, its.start + its.count - its.kv.capacity) for its in members]
        if not self.m.advance(kvs, short):
            return None
        batch, listed = self.prepare(members)
        for its in members:
            for text in self.texts[its.kv]:
                text += self.new(its.count)
        formats = Formats(self, batch, self.streams[self.rng.integers(2)], members, listed)
        new = [t for row in formats.rows for t in row.tokens[len(row.tokens) - row.count :]]
        for layer, role in self.pages.buffers:
            values = upload(self.m.device, self.pages.values((layer, role), new), formats.stream)
            batch.append(layer, {role: values}, stream=formats.stream)
        return formats

    # -- what happens ------------------------------------------------------------------------------

    def admit(self) -> None:
        """A prompt, often one that begins as another sequence does: what is published is found."""
        if len(self.texts) > 6:
            return
        texts = [[], *(text for beams in self.texts.values() for text in beams)]
        known = texts[self.rng.integers(len(texts))]
        prompt = known[: self.rng.integers(0, len(known) + 1)]
        prompt = prompt + self.new(int(self.rng.integers(0, 2 * self.T + 1)))
        kv = self.m.create_kv_cache(input_tokens=prompt[: self.most])
        if not kv.resume():
            kv.close()
            return
        found = kv.num_committed_tokens
        self.texts[kv] = [prompt[:found]]
        if self.write([kv], [max(0, min(len(prompt), self.most) - found)]) is None:
            self.close(kv)
        else:
            kv.resize(None, kv.capacity)

    def grow(self) -> None:
        kvs, counts, room = self.drawn(), [], MOST_TOKENS
        for kv in kvs:
            beams = self.texts[kv]
            count = int(self.rng.choice([0, 1, 1, 2, self.T]))
            count = min(count, self.most - len(beams[0]), room // len(beams))
            room -= count * len(beams)
            counts.append(count)
        formats = self.write(kvs, counts)
        if formats is not None:
            formats.check(over=False)
            self.finish(kvs)

    def finish(self, kvs: list[k.KVCache]) -> None:
        """What most of them wrote is final; the others have drafts."""
        for kv in kvs:
            if self.rng.random() < 0.8:
                kv.resize(None, len(self.texts[kv][0]))

    def step(self) -> None:
        """One more token for each beam, and parents that the host learns of later."""
        kvs = [kv for kv in self.drawn() if len(self.texts[kv][0]) < self.most]
        formats = self.write(kvs, [1] * len(kvs)) if self.m.config.max_beam_width > 1 else None
        if formats is None:
            return
        parents = [self.rng.integers(0, len(self.texts[kv]), len(self.texts[kv])) for kv in kvs]
        flat = np.concatenate([np.zeros(0, np.int32), *parents]).astype(np.int32)
        on = formats.stream
        self.m.step_beams(formats.batch, upload(self.m.device, flat, on), stream=on)
        for kv, chosen in zip(kvs, parents, strict=True):
            self.follow(kv, chosen)
        Formats(self, formats.batch, on, formats.members, formats.listed).check(over=True)
        self.finish(kvs)
        for kv in kvs:
            kv.settle()

    def follow(self, kv: k.KVCache, parents: Any) -> None:
        self.texts[kv] = [list(self.texts[kv][parent]) for parent in parents]

    def new_beams(self, kv: k.KVCache) -> None:
        """Wider, narrower or in another order."""
        old, most = len(self.texts[kv]), self.m.config.max_beam_width
        width = old if self.rng.random() < 0.4 else int(self.rng.integers(1, most + 1))
        parents = self.rng.integers(0, old, width).tolist()
        if width > old and kv.history_length < kv.expected_prompt_length:
            return
        if width == 1 and width > old:
            return
        if kv.set_beam_width(width, parents):
            self.follow(kv, parents)

    def fork(self, kv: k.KVCache) -> None:
        if len(self.texts[kv]) == 1 and len(self.texts) < 7:
            try:
                (other,) = kv.fork(1)
            except k.OutOfPagesError:
                return
            self.texts[other] = [list(self.texts[kv][0])]

    def publish(self, kv: k.KVCache) -> None:
        """Blocks in which all beams agree."""
        first, texts = kv.num_committed_tokens, self.texts[kv]
        last = int(self.rng.integers(first, len(texts[0]) + 1))
        if any(text[:last] != texts[0][:last] for text in texts):
            return
        if len(texts) == 1:
            kv.commit(texts[0][first:last])
        else:  # pages of each beam's own may have equal tokens
            with suppress(k.StateError):
                kv.commit(texts[0][first:last])

    def cut(self, kv: k.KVCache) -> None:
        length = int(self.rng.integers(kv.history_length, kv.capacity + 1))
        self.m.truncate([kv], [length])
        self.texts[kv] = [text[:length] for text in self.texts[kv]]

    def pause(self, kv: k.KVCache) -> None:
        kv.suspend()
        if not kv.resume(self.streams[self.rng.integers(2)]):
            self.close(kv)

    def close(self, kv: k.KVCache) -> None:
        del self.texts[kv]
        kv.close()

    def look(self) -> None:
        """A step that reads: it ends anywhere, also on and behind the end of a block."""
        members, room = [], MOST_TOKENS
        for kv in self.drawn():
            beams, length = self.texts[kv], len(self.texts[kv][0])
            end = int(self.rng.integers(0, length + 1))
            if self.rng.random() < 0.4:
                end = min(length, end // self.T * self.T + int(self.rng.integers(0, 2)))
            count = min(int(self.rng.integers(0, 5)), end, room // len(beams))
            if self.paths and len(beams) > 1 and end - count >= kv.history_length:
                continue  # from the history on a step is for writing
            room -= count * len(beams)
            members.append(Member(kv, end - count, count))
        batch, listed = self.prepare(members)
        on = self.streams[self.rng.integers(2)]
        Formats(self, batch, on, members, listed).check(over=False)

    def live(self) -> None:
        """One random event."""
        whole = [self.admit, self.grow, self.grow, self.step, self.step, self.look, self.look]
        single = [self.new_beams, self.new_beams, self.fork, self.publish, self.publish]
        single += [self.cut, self.pause, self.close]
        which = int(self.rng.integers(len(whole) + len(single)))
        if which < len(whole):
            whole[which]()
        elif self.texts:
            kvs = list(self.texts)
            single[which - len(whole)](kvs[self.rng.integers(len(kvs))])

    def end(self) -> None:
        check(self.m)
        self.m.close_kv_caches(list(self.texts))
        self.m.shutdown()


def run(seed: int, mode: str, device: Any, steps: int = 25) -> None:
    life = Life(seed, mode, device)
    for _ in range(steps):
        life.live()
    life.end()


@pytest.mark.parametrize("mode", ["fork", "indirection"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("seed", SEEDS)
def test_formats_name_the_pages_of_the_tokens(seed, deferred, mode):
    run(seed, mode, HostDevice(deferred=deferred, seed=seed))
