"""Attention over pages in place, in TensorFlow: the whole pool through DLPack.

TensorFlow takes no array with gaps, so the pool and page numbers in it rather than one layer's
pages. It takes a capsule and names no stream, which makes no difference on the host.
Run it from the source tree, after `pip install tensorflow`: `python -m examples.pages_tensorflow`.
"""

from __future__ import annotations

import tensorflow as tf

from examples.pages_setup import LENGTH, D, Float32, PagedSequence, query, report, sequence


def run(its: PagedSequence, layer: int) -> Float32:
    """The result for one layer of a sequence."""
    pool = tf.experimental.dlpack.from_dlpack(its.pool().__dlpack__())
    keys, values = (
        tf.reshape(tf.gather(pool, its.numbers(layer, role)), (-1, *pool.shape[2:]))[:LENGTH]
        for role in ("key", "value")
    )
    scores = tf.nn.softmax(tf.einsum("hd,lhd->hl", query(), keys) * D**-0.5)
    mixed: Float32 = tf.einsum("hl,lhd->hd", scores, values).numpy()
    return mixed


def main() -> None:
    """One layer."""
    its = sequence()
    report("tensorflow", run(its, 1), its, 1)


if __name__ == "__main__":
    main()
