// Slot to slot, in every pool of a group, in one launch.
//
// A slot is cut into chunks of CHUNK units and every block copies one chunk, so that eight pages of
// 1 MiB use the whole chip. grid.x: all chunks of all slots of all pools.

// WHOLE: slots are whole numbers of chunks, the common case, which needs no look at their end.
template <int BYTES, bool WHOLE>
__device__ __forceinline__ void copy_chunk(
    const SlotArgs& a, const i32* sources, const i32* targets) {
    typedef typename Unit<BYTES>::type Vector;
    const Chunk c = chunk_of(a);
    const u32 source = sources[c.entry];  // as unsigned numbers, negative ones are past the limit
    const u32 target = targets[c.entry];
    if (source >= a.limit || target >= a.limit) return;
    const Pool& pool = a.pools[c.pool];
    const i64 units = pool.slot_bytes / BYTES;
    const u64 from = pool.base + source * pool.slot_bytes;
    const u64 to = pool.base + target * pool.slot_bytes;
    Vector data[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // The last block of a slot reads its last unit again rather than branch around a load.
        const i64 next = c.first + v * THREADS;
        const i64 unit = WHOLE ? next : min(next, units - 1);  // range [0, units)
        data[v] = load_once<Vector>(from + unit * BYTES);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const i64 unit = c.first + v * THREADS;  // range [0, units) where it counts
        if (WHOLE || unit < units) store(to + unit * BYTES, data[v]);
    }
}

#define COPY_PAGES(BYTES)                                                \
    KERNEL(copy_pages_##BYTES, SlotArgs) {                               \
        copy_chunk<BYTES, false>(a, a.slots, a.slots + a.num_slots);     \
    }                                                                    \
    KERNEL(copy_pages_inline_##BYTES, InlineSlotArgs) {                  \
        copy_chunk<BYTES, false>(a.args, a.slots, a.slots + MAX_INLINE); \
    }
KERNEL(copy_pages_whole_16, SlotArgs) {
    copy_chunk<16, true>(a, a.slots, a.slots + a.num_slots);
}
COPY_PAGES(16)
COPY_PAGES(8)
COPY_PAGES(4)
COPY_PAGES(2)
COPY_PAGES(1)
