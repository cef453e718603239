"""Random walks against the model, with content proved by kernels on the device."""

from __future__ import annotations

import numpy as np
import pytest

from tests import stress

HOLDS = 512  # of one walk
LIMIT = 100_000_000  # cycles, about 50 ms: then a stream goes on by itself


def holder(device):
    """Holds streams up with latches in memory that is pinned beforehand."""
    flags = device.pinned(HOLDS * 8).view(np.int32).reshape(HOLDS, 2)
    flags[:] = 0
    latch, unused = device.launch("latch", "latch"), iter(flags)

    def hold(stream):
        flag = next(unused)
        latch(stream, 1, 1, 1, flag.ctypes.data, flag.ctypes.data + 4, LIMIT)
        return lambda: flag.__setitem__(0, 1)

    return hold


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_on_the_device(device, seed, monkeypatch):
    """Streams are held up, also between preparing a step and its work, so that races have time."""
    monkeypatch.setattr(device, "grain", lambda quota: 4096)  # few, small pages
    assert stress.walk_on(device, seed, 200, holder(device)).total() == 200
