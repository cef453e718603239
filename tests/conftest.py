"""Shared set-up: what needs a GPU says so, and hypothesis draws the same examples every time."""

from __future__ import annotations

import gc
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with others
GPU_TESTS = Path(__file__).parent / "gpu"
# `KVCORE_GPU=required`: where no GPU can be used, its tests fail instead of being skipped.
REQUIRED = os.environ.get("KVCORE_GPU") == "required"

# Fixed seeds: a red run is red again. `HYPOTHESIS_PROFILE=explore` looks for new examples instead.
# Without the phase that explains a failure line by line: it takes minutes on a state machine.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@cache
def has_gpu() -> bool:
    """Whether CuPy is installed and sees a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


class NeedsGpu(pytest.Module):
    """A file of GPU tests on a machine where it can't even be imported: no CuPy."""

    def collect(self):
        pytest.skip("needs a GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Keeps files under `tests/gpu`, which import CuPy, from failing where it isn't installed."""
    if module_path.is_relative_to(GPU_TESTS) and find_spec("cupy") is None and not REQUIRED:
        return NeedsGpu.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items):
    """Marks everything under `tests/gpu` with `gpu` and skips what bears it without one."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not (REQUIRED or has_gpu()):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """What is alive between files stays alive: `gc.collect` in a test need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def allocation_without_a_pool():
    """Under compute-sanitizer every CuPy array is an allocation of its own, with its own bounds."""
    if os.environ.get("KVCORE_SANITIZED") and has_gpu():
        import cupy

        cupy.cuda.set_allocator(None)
