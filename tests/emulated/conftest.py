"""Devices on the fake driver."""

from __future__ import annotations

import gc

import pytest

from kvcore.device.cuda import CudaDevice, launch
from kvcore.device.cuda.blocks import graveyard_of
from kvcore.device.cuda.words import CudaStepLaunch
from tests.emulated import driver


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch):
    monkeypatch.setattr(launch, "load", driver.load)
    monkeypatch.setattr(CudaStepLaunch, "by_graph", False)  # the fake driver has no graphs


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
