// Slot to slot, in every pool of a group, in one launch.
//
// A slot is cut into chunks of CHUNK units and every block copies one chunk, so that eight pages of
// 1 MiB use the whole chip. grid.x: all chunks of all slots of all pools.

template <int BYTES>
__device__ __forceinline__ void copy_chunk(
    const SlotArgs& a, const i32* sources, const i32* targets) {
    typedef typename Unit<BYTES>::type Vector;
    u32 which = 0;  // range [0, num_pools)
    while (which + 1 < a.num_pools && blockIdx.x >= a.pools[which + 1].first_chunk) ++which;
    const Pool& pool = a.pools[which];
    const u32 chunk = blockIdx.x - pool.first_chunk;  // range [0, num_slots * chunks of a slot)
    const u32 pair = quotient(chunk, pool.chunks);    // range [0, num_slots)
    const u32 part = chunk - pair * pool.chunks.div;  // range [0, chunks of a slot)
    const i32 source = sources[pair];
    const i32 target = targets[pair];
    if (source < 0 || source >= pool.num_slots || target < 0 || target >= pool.num_slots) return;
    // range [0, units of a slot + CHUNK)
    const i64 first = static_cast<i64>(part) * CHUNK + threadIdx.x;
    const i64 units = pool.slot_bytes / BYTES;
    const u64 from = pool.base + source * pool.slot_bytes;
    const u64 to = pool.base + target * pool.slot_bytes;
    Vector data[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // The last block of a slot reads its last unit again rather than branch around a load.
        const i64 unit = min(first + v * THREADS, units - 1);  // range [0, units)
        data[v] = load_once<Vector>(from + unit * BYTES);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 unit = first + v * THREADS;  // range [0, units) where it counts
        if (unit < units) store(to + unit * BYTES, data[v]);
    }
}

#define COPY_PAGES(BYTES)                                         \
    KERNEL(copy_pages_##BYTES, SlotArgs) {                        \
        copy_chunk<BYTES>(a, a.slots, a.slots + a.num_slots);     \
    }                                                             \
    KERNEL(copy_pages_inline_##BYTES, InlineSlotArgs) {           \
        copy_chunk<BYTES>(a.args, a.slots, a.slots + MAX_INLINE); \
    }
COPY_PAGES(16)
COPY_PAGES(8)
COPY_PAGES(4)
COPY_PAGES(2)
COPY_PAGES(1)
