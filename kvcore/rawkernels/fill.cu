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
    const Chunk c = chunk_of(a);
    const u32 slot = slots[c.entry];  // as an unsigned number, a negative one is past the limit
    if (slot >= a.limit) return;
    const Pool& pool = a.pools[c.pool];
    const i64 units = pool.slot_bytes / BYTES;
    const u64 base = pool.base + slot * pool.slot_bytes;
    Vector data;
    splat(data, a.pattern);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 unit = c.first + v * THREADS;  // range [0, units) where it counts
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
