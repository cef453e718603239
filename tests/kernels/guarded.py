"""Arrays between guards: whatever a kernel writes beside them shows."""

from __future__ import annotations

import numpy as np

GUARD = 64  # bytes on both sides


class Guarded:
    """An array of unsigned items with random content, `offset` bytes off an aligned address."""

    def __init__(self, rng, shape, itemsize=1, align=16, offset=0):
        count = int(np.prod(shape)) * itemsize
        self.whole = rng.integers(0, 256, count + 2 * GUARD + align + offset, np.uint8)
        start = GUARD + -(self.whole.ctypes.data + GUARD) % align + offset
        kind = {16: "c16"}.get(itemsize, f"u{itemsize}")
        self.bytes = self.whole[start : start + count]
        self.array = self.bytes.view(kind).reshape(shape)

    @property
    def address(self):
        return address(self.array)


def int32(rng, values):
    """A guarded int32 array."""
    found = Guarded(rng, np.shape(values), 4)
    found.array = found.array.view(np.int32)
    found.array[...] = values
    return found


def address(array):
    """The first byte of a NumPy array."""
    return array.ctypes.data


def compare(guarded, kernel, expected):
    """Runs both on the same content of guarded arrays; every byte must come out alike."""
    before = [its.whole.copy() for its in guarded]
    kernel()
    found = [its.whole.copy() for its in guarded]
    for its, content in zip(guarded, before, strict=True):
        its.whole[:] = content
    expected()
    for its, content in zip(guarded, found, strict=True):
        np.testing.assert_array_equal(content, its.whole)
