"""Random walks against the model, over the whole CUDA device on the fake driver."""

from __future__ import annotations

import pytest

from tests import stress


@pytest.mark.parametrize("seed", range(3))
def test_random_walks_on_the_device(device, seed, monkeypatch):
    monkeypatch.setattr(device, "grain", lambda quota: 4096)  # few, small pages
    assert stress.walk_on(device, seed, 60).total() == 60
