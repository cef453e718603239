"""Frameworks on the GPU, and a manager whose pages they share."""

from __future__ import annotations

import gc
from importlib import import_module

import cupy
import numpy as np
import pytest

from tests.helpers import opened, row, typed_manager

H, D, T = 2, 64, 4


def framework(name: str):
    """The module of a framework that sees the GPU; skips where there is none."""
    if name == "cupy":
        return cupy
    module = pytest.importorskip(name)
    if name == "torch" and not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if name == "jax":
        try:
            module.devices("cuda")
        except RuntimeError:
            pytest.skip("JAX sees no GPU")
    return module


def adapter(name: str):
    """What makes an array of a lease."""
    framework(name)
    module = import_module(f"kvcore_adapters.for_{name}")
    return module.tensor if name == "torch" else module.array


def pointer(its) -> int:
    if isinstance(its, cupy.ndarray):
        return its.data.ptr
    return its.data_ptr() if hasattr(its, "data_ptr") else its.unsafe_buffer_pointer()


def raw(its) -> np.ndarray:
    """The elements of an array of a framework as bytes on the host. Waits for the device."""
    cupy.cuda.runtime.deviceSynchronize()
    if isinstance(its, cupy.ndarray):
        found = its.get()
    elif hasattr(its, "data_ptr"):
        import torch

        its = its.view(torch.uint8) if its.element_size() == 1 else its.contiguous()
        found = its.reshape(-1).view(torch.uint8).cpu().numpy()
    else:
        found = np.asarray(its)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


class Scene:
    """A manager with a cache of four tokens on the rig's stream."""

    def __init__(self, rig, dtype="float32", **settings):
        self.rig, self.device = rig, rig.device
        self.m = typed_manager(slots=16, layers=2, heads=H, dim=D, dtype=dtype, device=rig.device,
                               stream=rig.stream, **settings)  # fmt: skip
        (self.kv,) = opened(self.m, 4)
        (self.slot,) = row(self.kv)
        self.places = self.m._runtime.pool_places[0]

    def fill(self, value, stream=None):
        """kvcore fills the page with a byte."""  # noqa: D403
        slots = np.array([self.slot], np.int32)
        self.device.fill_pages(self.places, slots, value, stream=stream or self.rig.stream)

    def close(self):
        self.kv.close()
        gc.collect()
        self.m.shutdown()
