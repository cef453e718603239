"""Attention that reads pages in place, in Numba: pages on the host are NumPy arrays.

Gaps between slots are strides, which Numba knows, and the page table is one more array.
Run it from the source tree, after `pip install numba`: `python -m examples.pages_numba`.
"""

from __future__ import annotations

import numba
import numpy as np

from examples.pages_setup import LENGTH, Float32, Int32, PagedSequence, query, report, sequence


@numba.njit
def attend(q: Float32, keys: Float32, values: Float32, slots: Int32, length: int) -> Float32:
    """Attention of [H, D] to the first tokens of [slots, T, H, D], page by page."""
    heads, dim = q.shape
    block = keys.shape[1]
    mixed = np.zeros((heads, dim), np.float32)
    for head in range(heads):
        total = np.float32(0)
        for i in range(length):
            slot, token = slots[i // block], i % block
            score = np.float32(0)
            for d in range(dim):
                score += q[head, d] * keys[slot, token, head, d]
            weight = np.exp(score / np.sqrt(np.float32(dim)))
            total += weight
            for d in range(dim):
                mixed[head, d] += weight * values[slot, token, head, d]
        mixed[head] /= total
    return mixed


def run(its: PagedSequence, layer: int) -> Float32:
    """The result for one layer of a sequence."""
    keys, values = its.pages(layer, "key"), its.pages(layer, "value")
    mixed: Float32 = attend(query(), keys, values, its.slots, LENGTH)
    return mixed


def main() -> None:
    """One layer."""
    its = sequence()
    report("numba", run(its, 1), its, 1)


if __name__ == "__main__":
    main()
