"""`permute_dense`: beams of engines without pages."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore
from kvcore.device import open_device
from kvcore.errors import StateError


def test_beams_follow_their_parents_over_many_steps():
    """Against histories: the tokens that a naive beam search would have."""
    rng, device = np.random.default_rng(3), open_device("host")
    keys, values = np.zeros((6, 2, 40, 4)), np.zeros((6, 2, 40, 4))
    histories = [[] for _ in range(6)]
    for step in range(40):
        new = rng.random(6)
        keys[:, :, step], values[:, :, step] = new[:, None, None], -new[:, None, None]
        parents = rng.integers(-1, 4, 6).astype(np.int32)  # -1 and 3 are nobody
        kvcore.permute_dense(
            device, [keys, values], parents, width=3, tokens=np.full(2, step + 1, np.int32)
        )
        histories = [[*histories[i], new[i]] for i in range(6)]
        chosen = [i // 3 * 3 + p if 0 <= p < 3 else i for i, p in enumerate(parents.tolist())]
        histories = [histories[i] for i in chosen]
    np.testing.assert_array_equal(keys, np.broadcast_to(keys[:, :1, :, :1], keys.shape))
    np.testing.assert_array_equal(keys[:, 0, :, 0], histories)
    np.testing.assert_array_equal(values, -keys)


def test_requests_of_different_widths():
    keys = np.arange(5).reshape(5, 1)
    parents = np.array([0, 1, 0, 2, 2], np.int32)
    starts = np.array([0, 1, 2, 5], np.int32)
    kvcore.permute_dense(open_device("host"), [keys], parents, width=3, starts=starts)
    assert keys.ravel().tolist() == [0, 1, 2, 4, 4]


def test_a_wrong_device_is_refused():
    keys, parents = np.zeros((2, 1)), np.zeros(2, np.int32)
    with pytest.raises(TypeError, match="open_device"):
        kvcore.permute_dense("host", [keys], parents, width=2)
    with pytest.raises(StateError, match="meta"):
        kvcore.permute_dense(open_device("meta"), [keys], parents, width=2)
