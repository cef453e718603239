"""Encoder-decoder: cross pages are written once, read by all beams, and found by the same input.

An encoder looks both ways: what it computes of equal leading tokens differs where the rest does. So
what is looked up stands for the whole input: its first token is a digest of all of it.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.testing import check
from kvcore.tokens import intern_digest
from tests.helpers import opaque_manager, row, typed_manager, used

T, LAYERS, TOKEN = 4, 2, (2, 8)


def key_tokens(ids):
    """What stands for the whole of an encoder's input of token ids."""
    digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()
    return k.gen_multimodal_cache_key_tokens(0, digest, len(ids))


def states(ids, layer):
    """Keys of an encoder that looks both ways; the values are their negatives."""
    return np.random.default_rng([layer, *ids]).standard_normal((len(ids), *TOKEN), np.float32)


@dataclass(eq=False)
class Request:
    ids: list
    decoder: k.KVCache
    encoder: k.KVCache

    def close(self):
        self.decoder.close()
        self.encoder.close()


class Service:
    """Two managers on one device; requests with an encoder input, a prompt and a beam width."""

    def __init__(self, device="host", cross_slots=64):
        beams = {"max_beam_width": 4, "enable_partial_commit": False}
        self.own = typed_manager(128, layers=1, device=device, **beams)
        self.cross = typed_manager(cross_slots, layers=LAYERS, device=self.own.device)
        self.tables = self.cross.create_batch_tables()
        self.writes = self.cross.create_batch(8, 64)
        self.computed = 0  # positions of encoder inputs

    def admit(self, ids, prompt, width, stream=None):
        tokens = key_tokens(ids)
        decoder = self.own.create_kv_cache(expected_prompt_length=prompt)
        encoder = self.cross.create_kv_cache(input_tokens=tokens)
        assert decoder.resume(stream)
        assert encoder.resume(stream)
        found = encoder.num_committed_tokens
        assert k.reserve_all([(decoder, prompt), (encoder, len(ids))])
        if found < len(ids):
            self.writes.prepare([encoder], len(ids) - found, start=[found])
            for layer in range(LAYERS):
                new = states(ids, layer)[found:]
                self.writes.append(layer, {"key": new, "value": -new})
            encoder.commit(tokens[found:], is_end=True)
            self.computed += len(ids) - found
        assert decoder.resize(None, prompt)
        assert decoder.set_beam_width(width)
        return Request(ids, decoder, encoder)

    def verify(self, requests):
        """Every beam of every request reads all of its own encoder input, as a kernel finds it."""
        widths = [request.decoder.beam_width for request in requests]
        offsets = self.tables.offsets([request.encoder for request in requests], 0, widths)
        assert offsets.shape[1] == sum(widths)
        owners = [request for request, width in zip(requests, widths, strict=True)
                  for _ in range(width)]  # fmt: skip
        for at, request in enumerate(owners):
            for layer in range(LAYERS):
                expected = states(request.ids, layer)
                for plane, right in enumerate((expected, -expected)):
                    got = self.read(offsets[:, at, plane], layer, len(request.ids))
                    np.testing.assert_array_equal(got, right)
        return offsets

    def read(self, cells, layer, length):
        number, offset = self.tables.layer_pools[layer]
        pool, blocks = self.tables.pools[number], -(-length // T)
        pages = [
            (ctypes.c_uint8 * pool.page_stride).from_address(
                pool.address + (cell + offset) * pool.page_stride
            )
            for cell in cells[number, :blocks].tolist()
        ]
        return np.concatenate(pages).view(np.float32).reshape(-1, *TOKEN)[:length]


@pytest.mark.parametrize("length", [8, 11, 3])
def test_the_same_input_is_encoded_once_for_all_requests_and_beams(length):
    s, ids = Service(), list(range(100, 100 + length))
    first = s.admit(ids, 5, 3)
    second = s.admit(ids, 9, 2)
    third = s.admit(ids, 1, 1)
    assert s.computed == length
    full, tail = length // T, int(length % T > 0)
    rows = [row(request.encoder) for request in (first, second, third)]
    assert [cells[:full] for cells in rows] == [rows[0][:full]] * 3
    assert used(s.cross) == full + 3 * tail  # a partly filled last page is everybody's own
    s.verify([first, second, third])
    first.decoder.reorder_beams([2, 2, 0])
    first.close()
    s.verify([third, second])
    check(s.cross, device=True)
    second.close()
    third.close()
    assert used(s.cross) == 0
    assert s.cross.probe_reuse(None, key_tokens(ids)) == length
    s.verify([s.admit(ids, 7, 4)])
    assert s.computed == length


def test_inputs_that_begin_alike_share_nothing():
    s, ids = Service(), list(range(1, 13))
    others = [[*ids[:8], 99, *ids[9:]], ids[:8], [*ids, 13], ids[:11]]
    requests = [s.admit(each, 4, 2) for each in (ids, *others)]
    assert s.computed == sum(len(request.ids) for request in requests)
    s.verify(requests)


def test_sounds_are_known_by_their_digests():
    """Whisper: features, not tokens; the shape is part of the digest."""
    cross = opaque_manager(16)

    def tokens(features, positions=6):
        header = f"{features.dtype.str}{features.shape}".encode()
        digest = hashlib.sha256(header + features.tobytes()).digest()
        return k.gen_multimodal_cache_key_tokens(0, digest, positions, uuid="a sound")

    sound = np.random.default_rng(0).standard_normal((4, 12), np.float32)
    kv = cross.create_kv_cache(input_tokens=tokens(sound))
    assert kv.resume()
    assert kv.resize(6)
    kv.commit(tokens(sound), is_end=True)
    again, reshaped, other = sound.copy(), sound.reshape(12, 4), -sound
    assert [cross.probe_reuse(None, tokens(f)) for f in (again, reshaped, other)] == [6, 0, 0]
    kv.close()


def test_what_was_evicted_of_an_input_is_encoded_again():
    s, ids = Service(cross_slots=8), list(range(50, 70))
    s.admit(ids, 3, 2).close()
    filler = s.cross.create_kv_cache()
    assert filler.resume()
    assert filler.resize((8 - 2) * T)  # leaves two of the five pages
    filler.close()
    assert s.cross.probe_reuse(None, key_tokens(ids)) == 2 * T
    request = s.admit(ids, 3, 2)
    assert s.computed == 20 + 12
    s.verify([request])
    check(s.cross, device=True)


def test_no_pages_for_the_decoder_leave_what_was_found_as_it_is():
    s, ids = Service(), list(range(20, 29))
    first = s.admit(ids, 4, 4)
    encoder = s.cross.create_kv_cache(input_tokens=key_tokens(ids))
    decoder = s.own.create_kv_cache()
    assert encoder.resume()
    assert decoder.resume()
    before = (row(encoder), encoder.capacity, used(s.cross), used(s.own))
    assert not k.reserve_all([(encoder, 9), (decoder, 4 * 1000)])
    assert (row(encoder), encoder.capacity, used(s.cross), used(s.own)) == before
    assert k.reserve_all([(encoder, 9), (decoder, 4)])
    encoder.close()
    s.verify([first])


INPUTS = [list(range(first, first + length)) for first, length in
          ((0, 3), (100, 5), (200, 8), (300, 11), (400, 5))]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_requests_come_go_and_change_their_places(seed):
    """A request's rows are found by identity, also in a table that the engine keeps itself."""
    s, random = Service(), np.random.default_rng(seed)
    mapper = k.IndexMapper(6, max_beam_width=1, max_copy_width=4)
    kept = np.full((len(s.tables.pools), 6, 2, 4), -1, np.int32)
    requests, hits = [], 0
    for _ in range(60):
        if requests and (len(requests) == 6 or random.integers(2)):
            gone = requests.pop(random.integers(len(requests)))
            gone.close()
            mapper.remove(gone)
        else:
            ids = INPUTS[random.integers(len(INPUTS))]
            known = any(request.ids is ids for request in requests)
            before = s.computed
            requests.append(s.admit(ids, int(random.integers(1, 9)), int(random.integers(1, 5))))
            hits += known
            assert not known or s.computed == before
            index = mapper.add(requests[-1])
            s.tables.offsets([requests[-1].encoder], out=kept[:, index : index + 1])
        random.shuffle(requests)
        for request in requests:
            width = request.decoder.beam_width
            request.decoder.reorder_beams(random.integers(0, width, width).tolist())
        offsets = s.verify(requests)
        widths = [request.decoder.beam_width for request in requests]
        rows = mapper.rows(requests, 0, widths, replicate_beam_zero=True)
        blocks = offsets.shape[3]
        np.testing.assert_array_equal(kept[:, rows][..., :blocks], offsets)
        held = {tuple(request.ids) for request in requests}
        tails = sum(len(request.ids) % T > 0 for request in requests)
        assert used(s.cross) == sum(len(ids) // T for ids in held) + tails
    assert hits > 5
    for manager in (s.own, s.cross):
        check(manager, device=True)


@pytest.mark.parametrize("seed", range(4))
def test_readers_on_other_streams_wait_for_the_writer(seed):
    """Two batches at once, one metadata upload behind the other, in any order the device likes."""
    device = HostDevice(deferred=True, seed=seed)
    s = Service(device)
    streams = [device.create_stream() for _ in range(3)]
    requests = [
        s.admit(INPUTS[which], 4, width, stream)
        for which, width, stream in ((0, 2, streams[0]), (1, 1, streams[1]), (1, 3, streams[2]))
    ]
    assert s.computed == 3 + 5
    seen = []
    batches = [s.cross.create_batch(4, 64) for _ in range(2)]
    for turn, order in enumerate(([0, 1, 2], [2, 0], [1], [1, 2])):
        step, some = batches[turn % 2], [requests[i] for i in order]
        lengths = [len(request.ids) for request in some]
        on, start = streams[turn % 3], [0] * len(some)
        step.prepare([request.encoder for request in some], lengths, start=start, stream=on)
        for layer in range(LAYERS):
            seen.append((some, layer, step.gather(layer)))
    requests[1].close()  # its pages stay, for the third request and for the tree
    later = s.admit(INPUTS[1], 4, 2, streams[0])
    assert s.computed == 3 + 5
    device.drain()
    for some, layer, (keys, values) in seen:
        expected = np.concatenate([states(request.ids, layer) for request in some])
        np.testing.assert_array_equal(keys, expected)
        np.testing.assert_array_equal(values, -expected)
    s.verify([later, requests[2], requests[0]])


def test_prompts_of_the_decoder_are_kept_apart_by_the_encoders_input():
    """What the decoder computes of its prompt depends on the encoder's input as well."""
    own, prompt = opaque_manager(16), list(range(8))

    def scope(ids):
        digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()
        return k.ReuseScope(salt=-intern_digest(digest))

    kv = own.create_kv_cache(scope([1, 2, 3]), prompt)
    assert kv.resume()
    assert kv.resize(8)
    kv.commit(prompt)
    kv.close()
    assert [own.probe_reuse(scope(ids), prompt) for ids in ([1, 2, 3], [1, 2, 4])] == [8, 0]
