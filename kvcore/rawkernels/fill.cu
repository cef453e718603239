// A constant into words of one array, or into every byte of some slots of a pool group.

struct WordArgs {
    u64 target;  // a multiple of 4
    i64 count;   // words
    u32 value;
    u32 reserved;
};

// grid.x: chunks of CHUNK words.
extern "C" __global__ void __launch_bounds__(THREADS) fill_words(const __grid_constant__ WordArgs a) {
    const i64 first = static_cast<i64>(blockIdx.x) * CHUNK + threadIdx.x;  // range [0, count + CHUNK)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 word = first + v * THREADS;  // range [0, count) where it counts
        if (word < a.count) store(a.target + 4 * word, a.value);
    }
}

// grid.x: all chunks of all slots of all pools, as in copy_pages.
template <int BYTES> __device__ __forceinline__ void fill_chunk(const SlotArgs& a, const i32* slots) {
    typedef typename Unit<BYTES>::type Vector;
    u32 which = 0;  // range [0, num_pools)
    while (which + 1 < a.num_pools && blockIdx.x >= a.pools[which + 1].first_chunk) ++which;
    const Pool& pool = a.pools[which];
    const u32 chunk = blockIdx.x - pool.first_chunk;     // range [0, num_slots * chunks of a slot)
    const u32 entry = quotient(chunk, pool.chunks);      // range [0, num_slots)
    const u32 part = chunk - entry * pool.chunks.div;    // range [0, chunks of a slot)
    const i32 slot = slots[entry];
    if (slot < 0 || slot >= pool.num_slots) return;
    const i64 first = static_cast<i64>(part) * CHUNK + threadIdx.x;  // range [0, units of a slot + CHUNK)
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

#define FILL_PAGES(BYTES)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                          \
        fill_pages_##BYTES(const __grid_constant__ SlotArgs a) {                   \
        fill_chunk<BYTES>(a, a.slots);                                             \
    }                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                          \
        fill_pages_inline_##BYTES(const __grid_constant__ InlineSlotArgs a) {      \
        fill_chunk<BYTES>(a.args, a.slots);                                        \
    }
FILL_PAGES(16)
FILL_PAGES(8)
FILL_PAGES(4)
FILL_PAGES(2)
FILL_PAGES(1)
