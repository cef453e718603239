"""Attention that reads pages in place, in Warp: taken through DLPack, gaps and all.

Run it from the source tree, after `pip install warp-lang`: `python -m examples.pages_warp`.
"""

import warp as wp

from examples.pages_setup import HEADS, LENGTH, D, Float32, PagedSequence, query, report, sequence

# Warp compiles from annotations, so this file has them evaluated.


@wp.kernel
def attend(
    q: wp.array2d(dtype=float),
    keys: wp.array4d(dtype=float),
    values: wp.array4d(dtype=float),
    slots: wp.array(dtype=int),
    length: int,
    mixed: wp.array2d(dtype=float),
):
    """One thread for each item of [H, D]; pages are [slots, T, H, D]."""
    head, item = wp.tid()
    block = keys.shape[1]
    total = float(0.0)  # noqa: UP018 - a variable, not a constant, to Warp
    found = float(0.0)  # noqa: UP018
    for i in range(length):
        slot = slots[i // block]
        score = float(0.0)  # noqa: UP018
        for d in range(q.shape[1]):
            score += q[head, d] * keys[slot, i % block, head, d]
        weight = wp.exp(score / wp.sqrt(float(q.shape[1])))
        total += weight
        found += weight * values[slot, i % block, head, item]
    mixed[head, item] = found / total


def run(its: PagedSequence, layer: int) -> Float32:
    """The result for one layer of a sequence."""
    wp.init()
    keys, values = (wp.from_dlpack(its.pages(layer, role)) for role in ("key", "value"))
    q, slots = wp.from_dlpack(query()), wp.from_dlpack(its.slots)
    mixed = wp.zeros((HEADS, D), dtype=float, device="cpu")
    wp.launch(attend, (HEADS, D), [q, keys, values, slots, LENGTH], [mixed], device="cpu")
    return mixed.numpy()


def main() -> None:
    """One layer."""
    wp.config.quiet = True
    its = sequence()
    report("warp", run(its, 1), its, 1)


if __name__ == "__main__":
    main()
