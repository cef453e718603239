"""A decode loop in plain CuPy: `examples/decode_numpy.py` on a GPU.

The loop is the same, and so is the way of keys and values: kvcore's arrays on a GPU are CuPy
arrays, at the addresses of the pool. What a GPU adds is a stream. CuPy computes on its current
stream; the caches are bound to the same one, so appending, gathering and attending follow each
other there and nothing waits on the host. The tokens come back once, at the end.

Run it from the source tree: `python -m examples.decode_cupy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy

from examples import decode_numpy
from examples.decode_setup import MAX_TOKENS, PROMPTS, show
from kvcore.device.cuda import device_count


def decode(prompts: Sequence[bytes], max_tokens: int) -> list[bytes]:
    """Completes every prompt by `max_tokens` bytes, greedily, all of them in each step."""
    # Of its own rather than the default one, behind which every other blocking stream would wait.
    with cupy.cuda.Stream(non_blocking=True) as stream:
        return decode_numpy.decode(prompts, max_tokens, xp=cupy, device="cuda", stream=stream)


def main() -> None:
    """Three prompts."""
    if not device_count():
        raise SystemExit("this example needs a GPU; examples.decode_numpy is the same without one")
    show(PROMPTS, decode(PROMPTS, MAX_TOKENS))


if __name__ == "__main__":
    main()
