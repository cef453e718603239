"""The kernels as C++, in two tunings, and a look at what the sanitizer says."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import build


@pytest.fixture(scope="session")
def compiled() -> dict[tuple[int | None, int | None], build.CpuKernels]:
    """What is compiled so far, by tuning: a run file by file comes back to each of them."""
    return {}


@pytest.fixture(scope="session", params=[(None, None), (32, 3)], ids=["tuned", "odd tuning"])
def kernels(request, compiled, tmp_path_factory):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    if request.param not in compiled:
        sources = build.tuned(*request.param)
        library = build.build(tmp_path_factory.mktemp("kernels"), sources, *build.CHECKS)
        compiled[request.param] = build.CpuKernels(library, sources, seed=5)
    return compiled[request.param]


@pytest.fixture(autouse=True)
def nothing_undefined(capfd):
    """The sanitizer writes to the standard error stream."""
    yield
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture
def rng():
    return np.random.default_rng(11)
