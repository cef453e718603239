"""Devices on the fake driver."""

from __future__ import annotations

import gc

import pytest

from kvcore.device.cuda import CudaDevice, launch, words
from kvcore.device.cuda.blocks import graveyard_of
from kvcore.device.cuda.streams import CudaStream
from tests.device.harness import Rig
from tests.emulated import driver


class Replayed:
    """In place of a captured graph, which the fake driver lacks: does the work anew each time."""

    def __init__(self, device, work):
        self._work = work

    def __call__(self, stream):
        self._work(stream)


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch):
    monkeypatch.setattr(launch, "load", driver.load)
    monkeypatch.setattr(words, "Graph", Replayed)


@pytest.fixture
def held():
    """Nothing may be held after the test that was not held before, of memory of any kind."""
    for index in (0, 1):
        graveyard_of(index).drain()
    before = driver.counts().held
    yield
    gc.collect()
    for index in (0, 1):
        graveyard_of(index).drain()
    assert driver.counts().held == before


@pytest.fixture
def device(held):
    device = CudaDevice(0)
    yield device
    device.close()


@pytest.fixture
def rig(device):
    rig = Rig(device, device.create_stream())
    yield rig
    rig.close()


@pytest.fixture
def orders(monkeypatch):
    """Pairs (who waits, for whom), as handles, in the order of the calls."""
    found = []
    real = CudaStream.wait

    def wait(self, event):
        found.append((self.handle, event._stream.handle))
        real(self, event)

    def follow(self, other):  # in two steps
        self.wait(other.record())

    monkeypatch.setattr(CudaStream, "wait", wait)
    monkeypatch.setattr(CudaStream, "follow", follow)
    return found


@pytest.fixture
def other(held):
    """A device that is not current in any thread."""
    device = CudaDevice(1)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def no_failure_left():
    yield
    driver.fail("", 0)
    driver.switch("capturing", False)
    driver.switch("no_virtual_memory", False)
