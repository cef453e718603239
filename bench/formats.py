"""Page tables in the forms that kernels of others read, from the device's own. Needs a GPU.

256 sequences of 8,192 tokens in blocks of 16: 131,072 page indices, rebuilt after one step. Cold
runs have nothing of the table in the cache, and the host far ahead. Times on the host are of whole
calls of a `Batch` that are given their arrays.

    python -m bench kernels --filter tables
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvcore as k
from bench.gpu import Bench, latency

ROWS, TOKENS, T = 256, 8_192, 16
CSR_BAR = 15.0

Results = Iterator[dict[str, Any]]


class Long:
    """256 sequences and a step of one token each, with arrays for every format."""

    def __init__(self, bench: Bench) -> None:
        self.bench, device, blocks = bench, bench.device, ROWS * TOKENS // T
        like = {"size": T * 16, "dtype": "float16", "shape": (1, 8), "layout": "NHD"}
        buffers = [k.BufferConfig(role=role, **like) for role in ("key", "value")]
        config = k.KVCacheManagerConfig(
            tokens_per_block=T,
            # Some more than the pages take: a quota is rounded down.
            cache_tiers=[k.GpuCacheTierConfig(quota=blocks * 2 * T * 16 + (64 << 20))],
            layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
            max_sequences=ROWS,
            max_seq_len=TOKENS,
        )
        self.manager = k.KVCacheManager(config, device=device, stream=bench.stream)
        self.caches = self.manager.create_kv_caches([None] * ROWS)
        order = np.random.default_rng(6).permutation(ROWS * TOKENS // 512) % ROWS
        if not all(kv.resume() for kv in self.caches):
            raise RuntimeError("out of pages")
        for i in order.tolist():  # 32 blocks at a time, so that pages lie scattered
            if not self.manager.advance([self.caches[i]], 512):
                raise RuntimeError("out of pages")
        self.batch = self.manager.create_batch(ROWS, ROWS)
        self.batch.prepare(self.caches, 1, start=[TOKENS - 1] * ROWS)
        self.tables = self.manager.create_batch_tables()

        def new(*shape: int) -> Any:
            return device.empty(shape, np.int32)

        self.offsets = new(*self.tables.shape(ROWS, TOKENS // T))
        self.csr = [new(ROWS + 1), new(blocks), new(ROWS)]
        self.ragged = [new(ROWS, TOKENS // T), new(ROWS + 1), new(ROWS), new(1)]
        self.slots = device.empty((ROWS,), np.int64)
        self.dense = new(ROWS, TOKENS // T)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Every format, by name."""
        batch, nhd, both = self.batch, {"layout": "NHD"}, ("key", "value")
        return {
            "csr_pages": lambda: batch.csr_pages(0, out=self.csr, **nhd),
            "ragged_pages": lambda: batch.ragged_pages(0, both, out=self.ragged, **nhd),
            "block_offsets": lambda: batch.block_offsets(self.tables, out=self.offsets),
            "page_table": lambda: batch.page_table(0, out=self.dense),
            "slot_mapping": lambda: batch.slot_mapping(0, out=self.slots, **nhd),
        }

    def right(self) -> bool:
        """Whether the list of pages is the host's."""
        found = self.batch.csr_pages(0, out=self.csr, layout="NHD")
        indices = self.bench.device.to_host(found.kv_indices, stream=self.bench.stream)
        rows = [kv.get_base_page_indices(0) for kv in self.caches]
        return bool(np.array_equal(indices, np.concatenate(rows)))

    def close(self) -> None:
        self.manager.close_kv_caches(self.caches)
        self.manager.shutdown()


def bench_tables_for_kernels_of_others(device: Any) -> Results:
    with Bench(device) as bench:
        long = Long(bench)
        nbytes = long.csr[1].nbytes
        room = bench.reserve(2 * nbytes)
        base = room.base
        limit = bench.cold(lambda: bench.memcpy(base + nbytes, base, nbytes), 200, lead=True)
        name = f"{ROWS} sequences of {TOKENS:,} tokens, T={T}"
        for call, work in long.calls().items():
            bar = CSR_BAR if call == "csr_pages" else None
            times = bench.cold(work, 200, lead=True)
            against = f"one memcpy of {nbytes >> 10} KiB"
            result = latency(f"device: {call}, {name}", times, against, limit, bar)
            if bar is not None:
                result["ok"] = result["ok"] and long.right()
                result["meta"]["indices"] = int(long.csr[1].size)
            yield result
            yield latency(f"device: {call}, warm", bench.warm(work))
            yield latency(f"host: {call}", bench.host(work))
        long.close()
