"""kvcore: a KV-cache runtime for LLM inference that belongs to no framework.

Paged memory, page tables and beams on a GPU or on the host, for engines written on JAX, CuPy, plain
CUDA, TensorRT or PyTorch. `KVCacheManager` is where to begin.
"""

from kvcore.batch import Batch
from kvcore.batch_tables import BatchTables, IndexMapper, TablePool
from kvcore.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    ReuseScope,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kvcore.control.statistics import KVCacheIterationStats, KVCacheStats
from kvcore.dense import permute_dense
from kvcore.drops import PlannedDrop
from kvcore.errors import (
    CacheCapacityError,
    DriverError,
    InternalError,
    KVCoreError,
    LeaseInUse,
    OutOfMemoryError,
    OutOfPagesError,
    StateError,
)
from kvcore.events import KVCacheEventManager
from kvcore.explanation import Explanation, MissReason
from kvcore.formats import CsrPages, RaggedPages
from kvcore.ids import CacheTier, PageIndexMode, Status
from kvcore.keys import sequence_to_blockchain_keys
from kvcore.kv_cache import KVCache
from kvcore.layout import PageIndexConverter
from kvcore.leases import Lease
from kvcore.manager import KVCacheManager
from kvcore.pins import Pin
from kvcore.pools import AggregatedPageDesc, PoolGroupDesc, StorageStatistics
from kvcore.prefix import KeyMatch
from kvcore.reserve import reserve_all
from kvcore.retention import Retention
from kvcore.tokens import gen_multimodal_cache_key_tokens

__version__ = "0.1.0"

__all__ = [
    "AggregatedPageDesc",
    "AttentionLayerConfig",
    "Batch",
    "BatchDesc",
    "BatchTables",
    "BufferConfig",
    "CacheCapacityError",
    "CacheTier",
    "CsrPages",
    "DiskCacheTierConfig",
    "DriverError",
    "Explanation",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "IndexMapper",
    "InternalError",
    "KVCache",
    "KVCacheDesc",
    "KVCacheEventManager",
    "KVCacheIterationStats",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "KVCacheStats",
    "KVCoreError",
    "KeyMatch",
    "Lease",
    "LeaseInUse",
    "MissReason",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PageIndexConverter",
    "PageIndexMode",
    "Pin",
    "PlannedDrop",
    "PoolGroupDesc",
    "RaggedPages",
    "Retention",
    "ReuseScope",
    "SsmLayerConfig",
    "StateError",
    "Status",
    "StorageStatistics",
    "SwaScratchReuseConfig",
    "TablePool",
    "gen_multimodal_cache_key_tokens",
    "permute_dense",
    "reserve_all",
    "sequence_to_blockchain_keys",
]
