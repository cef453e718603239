"""Attention over pages in place, in tinygrad: the whole pool by its address.

tinygrad takes no array of others but by address, and none with gaps, so it gets the pool and page
numbers in it. It keeps nothing alive: the manager has to outlive what is computed. Its kernels for
the host are compiled by clang. Run it from the source tree, after `pip install tinygrad`:
`python -m examples.pages_tinygrad`.
"""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from examples.pages_setup import LENGTH, D, Float32, PagedSequence, query, report, sequence


def run(its: PagedSequence, layer: int) -> Float32:
    """The result for one layer of a sequence."""
    pages = its.pool()
    pool = Tensor.from_blob(pages.ctypes.data, pages.shape, dtype=dtypes.float32, device="CPU")
    keys, values = (
        pool[Tensor(its.numbers(layer, role), device="CPU")].reshape(-1, *pages.shape[2:])[:LENGTH]
        for role in ("key", "value")
    )
    q = Tensor(query(), device="CPU")
    scores = (Tensor.einsum("hd,lhd->hl", q, keys) * D**-0.5).softmax(axis=1)
    mixed: Float32 = Tensor.einsum("hl,lhd->hd", scores, values).numpy()
    return mixed


def main() -> None:
    """One layer."""
    its = sequence()
    report("tinygrad", run(its, 1), its, 1)


if __name__ == "__main__":
    main()
