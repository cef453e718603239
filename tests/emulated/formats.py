"""The GPU's tests of tables for kernels of others, without a GPU, and what they launch."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import kvcore as k
from tests.emulated import driver
from tests.emulated.beams import graphs  # noqa: F401 - fixture
from tests.emulated.work import Interface
from tests.gpu.test_formats import *  # noqa: F403
from tests.helpers import opened
from tests.test_batch_tables import mixed_config
from tests.test_formats_property import run

pytestmark = pytest.mark.usefixtures("held")


def launches_of(call):
    """How many kernels a call launches."""
    before = driver.counts().launches
    call()
    return driver.counts().launches - before


@contextmanager
def prepared(device, monkeypatch):
    """A manager with pools of three kinds, and a batch with a step."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    m = k.KVCacheManager(mixed_config(), device=device, stream=device.create_stream())
    caches = opened(m, 5, 9)
    batch = m.create_batch(4, 8)
    batch.prepare(caches, 2, start=[0, 0])
    yield m, batch
    m.close_kv_caches(caches)
    m.shutdown()


def test_every_format_is_one_launch(device, monkeypatch):
    with prepared(device, monkeypatch) as (m, batch):
        tables = m.create_batch_tables()
        assert len(tables.pools) == 3
        assert launches_of(lambda: batch.block_offsets(tables)) == 1
        nhd = {"layout": "NHD"}
        assert launches_of(lambda: batch.csr_pages(0, **nhd)) == 1
        assert launches_of(lambda: batch.ragged_pages(0, ["key"], **nhd)) == 1
        assert launches_of(lambda: batch.slot_mapping(0, **nhd)) == 1


def test_arrays_of_others_are_written_in_place(device, monkeypatch):
    """By the CUDA array interface; the very object comes back."""
    with prepared(device, monkeypatch) as (m, batch):
        tables, stream = m.create_batch_tables(), batch._step.stream
        array = device.empty(tables.shape(2, 3), np.int32)
        out = Interface(array)
        assert batch.block_offsets(tables, out=out) is out
        expected = device.to_host(batch.block_offsets(tables), stream=stream)
        np.testing.assert_array_equal(device.to_host(array, stream=stream), expected)


@pytest.mark.parametrize("mode", ["fork", "indirection"])
def test_formats_name_the_pages_of_the_tokens(device, monkeypatch, mode):
    """A random life, as `tests/test_formats_property.py` has more of."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)
    run(11, mode, device)
