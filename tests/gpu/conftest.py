"""One device per test; what it holds is given back and the current device is left alone."""

from __future__ import annotations

import os

import pytest

from tests.device.harness import Rig


@pytest.fixture(scope="session", autouse=True)
def exact_allocations():
    """Under compute-sanitizer every array has its own bounds, not those of a rounded block."""
    if os.environ.get("KVCORE_SANITIZED"):
        from kvcore.device.cuda import blocks

        patch = pytest.MonkeyPatch()
        patch.setattr(blocks, "round_up", lambda nbytes: max(nbytes, 1))
        yield
        patch.undo()
    else:
        yield


@pytest.fixture
def device():
    from cupy.cuda import runtime

    from kvcore.device.cuda import CudaDevice

    before = runtime.getDevice()
    device = CudaDevice(0)
    yield device
    device.close()
    assert runtime.getDevice() == before


@pytest.fixture
def rig(device):
    """The device with a stream of its own; its memory is closed after the test."""
    rig = Rig(device, device.create_stream())
    yield rig
    rig.close()


@pytest.fixture
def few_pages(device, monkeypatch):
    """Pools of the size that is asked for, not of whole grains."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)


@pytest.fixture
def scene(rig, few_pages):
    """Makes managers whose pages are shared; shuts them down in the end."""
    from tests.gpu.sharing import Scene

    made = []

    def make(**settings):
        made.append(Scene(rig, **settings))
        return made[-1]

    yield make
    while made:
        made.pop().close()
