"""`open_device` finds devices by name and says what to do where it can't."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import kvcore.device
from kvcore.device import open_device
from kvcore.device.host import HostDevice, MetaDevice


@pytest.fixture
def fake_cuda(monkeypatch):
    """A CUDA package with many GPUs that only says which one was opened."""
    module = ModuleType("kvcore.device.cuda")
    module.device_count = lambda: 16
    module.CudaDevice = lambda index: ("cuda", index)
    monkeypatch.setitem(sys.modules, "kvcore.device.cuda", module)
    monkeypatch.setattr(kvcore.device, "find_spec", lambda name: name)
    return module


class Unimportable(ModuleType):
    """A CUDA package that fails to import what it needs."""

    def __init__(self, missing):
        super().__init__("kvcore.device.cuda")
        self.missing = missing

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(f"No module named {self.missing!r}", name=self.missing)


@pytest.mark.parametrize(
    ("count", "spec", "said"),
    [
        (0, "cuda", "'cuda'; there is none, or no driver"),
        (0, "cuda:0", "'cuda:0'; there is none, or no driver"),
        (2, "cuda:2", "'cuda:2'; the driver shows 2 of them"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_clear_error(fake_cuda, count, spec, said):
    fake_cuda.device_count = lambda: count
    with pytest.raises(ValueError, match=said):
        open_device(spec)
    assert open_device("cuda:1" if count else "auto")


@pytest.fixture
def no_cuda(monkeypatch):
    """CuPy is there but can't be imported."""
    monkeypatch.setitem(sys.modules, "kvcore.device.cuda", Unimportable("cupy"))
    monkeypatch.setattr(kvcore.device, "find_spec", lambda name: name)


@pytest.mark.parametrize("spec", ["auto", "cuda"])
def test_a_broken_installation_is_not_hidden(monkeypatch, spec):
    missing = "kvcore.device.cuda.device"
    monkeypatch.setitem(sys.modules, "kvcore.device.cuda", Unimportable(missing))
    monkeypatch.setattr(kvcore.device, "find_spec", lambda name: name)
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{missing}'"):
        open_device(spec)


def test_host_and_meta_by_name():
    assert type(open_device("host")) is HostDevice
    assert type(open_device("meta")) is MetaDevice
    assert not open_device("host").deferred


def test_a_device_is_returned_as_it_is():
    device = HostDevice(deferred=True)
    assert open_device(device) is device


def test_gpus_by_name(fake_cuda):
    assert open_device("cuda") == ("cuda", None)
    assert open_device("cuda:0") == ("cuda", 0)
    assert open_device("cuda:12") == ("cuda", 12)


def test_auto_is_the_gpu_if_there_is_one(fake_cuda, monkeypatch):
    assert open_device("auto") == ("cuda", None)
    monkeypatch.setattr(fake_cuda, "device_count", lambda: 0)
    assert type(open_device()) is HostDevice
    monkeypatch.setattr(fake_cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kvcore.device, "find_spec", lambda name: None if name == "cuda" else name)
    assert type(open_device()) is HostDevice


def test_auto_without_cupy_is_the_host(no_cuda):
    assert type(open_device("auto")) is HostDevice


@pytest.mark.parametrize("spec", ["cuda", "cuda:1"])
def test_a_gpu_without_cupy_names_the_extra(no_cuda, spec):
    with pytest.raises(ImportError, match=r'pip install "kvcore\[cuda12\]"'):
        open_device(spec)


@pytest.mark.parametrize(
    "spec", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²", "host:0", "CUDA"]
)
def test_unknown_names_are_refused(spec):
    with pytest.raises(ValueError, match='device: expected "auto", "host", "meta", "cuda"'):
        open_device(spec)


@pytest.mark.parametrize("spec", [None, 0, HostDevice])
def test_what_is_no_name_is_refused(spec):
    with pytest.raises(TypeError, match='device: expected "auto", "host", "meta", "cuda"'):
        open_device(spec)
