// A constant into words of one array, or into every byte of some slots of a pool group.

struct WordArgs {
    u64 target;  // a multiple of 4
    i64 count;   // words
    u32 value;
    u32 reserved;
};

// grid.x: chunks of CHUNK words.
KERNEL(fill_words, WordArgs) {
    // range [0, count + CHUNK)
    const i64 first = static_cast<i64>(blockIdx.x) * CHUNK + threadIdx.x;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 word = first + v * THREADS;  // range [0, count) where it counts
        if (word < a.count) store(a.target + 4 * word, a.value);
    }
}

// grid.x: all chunks of all slots of all pools, as in copy_pages.
template <int BYTES>
__device__ __forceinline__ void fill_chunk(const SlotArgs& a, const i32* slots) {
    typedef typename Unit<BYTES>::type Vector;
    u32 which = 0;  // range [0, num_pools)
    while (which + 1 < a.num_pools && blockIdx.x >= a.pools[which + 1].first_chunk) ++which;
    const Pool& pool = a.pools[which];
    const u32 chunk = blockIdx.x - pool.first_chunk;   // range [0, num_slots * chunks of a slot)
    const u32 entry = quotient(chunk, pool.chunks);    // range [0, num_slots)
    const u32 part = chunk - entry * pool.chunks.div;  // range [0, chunks of a slot)
    const i32 slot = slots[entry];
    if (slot < 0 || slot >= pool.num_slots) return;
    // range [0, units of a slot + CHUNK)
    const i64 first = static_cast<i64>(part) * CHUNK + threadIdx.x;
    const i64 units = pool.slot_bytes / BYTES;
    const u64 base = pool.base + slot * pool.slot_bytes;
    Vector data;
    splat(data, a.pattern);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 unit = first + v * THREADS;  // range [0, units) where it counts
        if (unit < units) store(base + unit * BYTES, data);
    }
}

#define FILL_PAGES(BYTES)                                                            \
    KERNEL(fill_pages_##BYTES, SlotArgs) { fill_chunk<BYTES>(a, a.slots); }          \
    KERNEL(fill_pages_inline_##BYTES, InlineSlotArgs) { fill_chunk<BYTES>(a.args, a.slots); }
FILL_PAGES(16)
FILL_PAGES(8)
FILL_PAGES(4)
FILL_PAGES(2)
FILL_PAGES(1)
