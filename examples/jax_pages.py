"""Pages and JAX: the same memory, and who waits for whom. See `examples/decode_jax.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import kvcore as k
from kvcore.device.base import Array

Counts = NDArray[np.int32]
LEAST_BLOCKS = 8  # of a page table


class Exchange:
    """Arrays between JAX and kvcore: the same memory, and who waits for whom.

    On a GPU kvcore works on `stream` and JAX on streams of its own. JAX waits for others only at
    the moment when it takes an array, for what their stream holds then; so whatever kvcore has
    written to since is taken anew. The other way round, `stream` waits for JAX to have computed
    what it hands out. All results of a step are ready together, when its inputs are no longer read:
    what kvcore enqueues after taking one of them may overwrite pages that the step has read.

    On the CPU kvcore writes at once, but JAX computes in threads of its own, after the call has
    returned. Nothing but its results tells that it has read its inputs. So these are waited for on
    the host before kvcore writes again to a pool that JAX was given.
    """

    def __init__(self, device: jax.Device) -> None:
        self.device, self.stream = device, None
        self.xp: Any = np
        self.strided: Any = as_strided
        if device.platform != "cpu":
            import cupy

            self.xp, self.strided = cupy, cupy.lib.stride_tricks.as_strided
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def current(self) -> AbstractContextManager[Any]:
        """Makes `stream` the one on which CuPy hands arrays out and takes them."""
        return nullcontext() if self.stream is None else self.stream

    def to_jax(self, array: Array) -> jax.Array:
        """The same memory in JAX, as it is after everything enqueued on `stream` so far."""
        with self.current():
            return jax.dlpack.from_dlpack(array)

    def from_jax(self, array: jax.Array) -> Array:
        """The same memory for kvcore, whose later work comes after JAX's computation of it.

        Hold `array` until JAX has been given something that was written after the last use of it:
        JAX does not know who else reads its memory, and would take it for something new.
        """
        if self.stream is None:
            array.block_until_ready()
        with self.current():
            return self.xp.from_dlpack(array)

    def put(self, values: Any) -> Any:
        """Values from the host, which nobody changes any more, on JAX's device."""
        return jax.device_put(values, self.device)


class Pages:
    """The keys and values of a batch. `counts` are the new tokens of each sequence."""

    def __init__(self, manager: k.KVCacheManager, prompts: Counts, exchange: Exchange) -> None:
        self.manager, self.exchange = manager, exchange
        self.starts, self.lengths = np.zeros_like(prompts), np.zeros_like(prompts)
        self.caches = manager.create_kv_caches(prompts.tolist())
        for kv in self.caches:
            kv.resume(exchange.stream)
        self.batch = manager.create_batch(len(prompts), int(prompts.sum()))
        # JAX takes no array with gaps, so not a layer's pages but the whole pool: [pages, T, K, D].
        # `get_pages` begins with its first page and shows every `scale`-th.
        first, self.scale = manager.get_pages(0, "key"), manager.get_page_index_scale(0, "key")
        shape = len(first) * self.scale, *first.shape[1:]
        strides = manager.get_page_stride(0, "key"), *first.strides[1:]
        self.pool = exchange.strided(first, shape, strides)
        # The page of slot j is number j * scale + offset there, whatever the layer and the role:
        # int32 [layers, 2]. It is what `PageIndexMode.PER_LAYER` counts.
        layers = [layer.layer_id for layer in manager.config.layers]
        of = manager.get_page_index_converter
        offsets = [[of(layer, role).layer_offset for role in ("key", "value")] for layer in layers]
        self.offsets = np.array(offsets, np.int32)
        self.held: object = None

    def begin(self, counts: Counts) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Makes room for a step's tokens; gives the pool, the page table and the starts."""
        self.starts, self.lengths = self.lengths, self.lengths + counts
        if not self.manager.advance(self.caches, counts, history=self.starts):
            raise k.OutOfPagesError(f"no pages for {counts} more tokens")
        self.batch.prepare(self.caches, counts)
        blocks = -(-int(self.starts.max()) // self.manager.config.tokens_per_block)
        table = self.batch.page_table(num_blocks=max(power_of_two(blocks), LEAST_BLOCKS))
        to_jax = self.exchange.to_jax
        return to_jax(self.pool), to_jax(table), self.exchange.put(self.starts)

    def append(self, keys: jax.Array, values: jax.Array) -> None:
        """Writes the first tokens of [layers, padded, K, D]: those that are no padding."""
        new = {"key": keys, "value": values}
        count, layers = self.batch.num_tokens, range(len(keys))
        arrays = {role: self.exchange.from_jax(array)[:, :count] for role, array in new.items()}
        self.batch.append(layers, arrays)
        # What was held is let go when JAX has been given the pool in which it was appended.
        self.held = new


def power_of_two(least: int) -> int:
    """The smallest one that is at least this, and 1."""
    return 1 << max(least - 1, 0).bit_length()
