// Where each token of a ragged batch lies, for every layer group.
//
// The grid covers the output whatever the batch holds, so a captured launch stays valid: lengths
// are read here, tokens past the last row give (-1, 0). grid.x: blocks of tokens, grid.y: groups.

struct MapArgs {
    const i32* tables;  // [num_groups, num_rows, num_blocks]
    i64 group_stride;   // items from group to group
    i64 row_stride;     // items from row to row
    const i32* rows;    // [num_entries]
    const i32* starts;  // [num_entries]
    const i32* ends;    // [num_entries], not falling
    i32* out;           // [num_groups, num_tokens, 2]
    u32 num_rows;
    u32 num_blocks;
    u32 num_entries;
    u32 num_tokens;
    Divider block_tokens;
    u32 reserved;
};

KERNEL(map_tokens, MapArgs) {
    const u32 token = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_tokens + THREADS)
    if (token >= a.num_tokens) return;
    // The first entry that ends after this token lies in [low, high], where high may be "none".
    // Seven probes divide the range by eight: their loads overlap, a binary search's do not.
    u32 low = 0;
    u32 high = a.num_entries;
    while (low < high) {
        const u32 stride = (high - low + 7) / 8;  // range [1, (num_entries + 7) / 8]
        u32 passed = 0;                           // range [0, 7]
#pragma unroll
        for (u32 p = 1; p < 8; ++p) {
            const u32 probe = low + p * stride - 1;  // range [low, high) where it counts
            const i32 end = a.ends[min(probe, high - 1)];
            passed += (probe < high) & (end <= static_cast<i32>(token));
        }
        low += passed * stride;
        // The next probe, if there was one, said no: the entry is not after it.
        if (passed < 7) high = min(high, low + stride - 1);
    }
    i32 slot = -1;
    i32 within = 0;
    if (low < a.num_entries) {
        const i32 before = low ? a.ends[low - 1] : 0;  // tokens of earlier entries
        const i64 position = static_cast<i64>(a.starts[low]) + (static_cast<i32>(token) - before);
        const i32 row = a.rows[low];
        const bool inside = position >= 0 && position <= 0x7fffffff;
        if (inside && row >= 0 && static_cast<u32>(row) < a.num_rows) {
            const u32 block = quotient(static_cast<u32>(position), a.block_tokens);  // its ordinal
            if (block < a.num_blocks) {
                slot = a.tables[blockIdx.y * a.group_stride + row * a.row_stride + block];
                within = static_cast<i32>(position) - block * a.block_tokens.div;  // range [0, T)
            }
        }
    }
    // range [0, 2 * num_groups * num_tokens)
    const u64 place = 2 * (static_cast<u64>(blockIdx.y) * a.num_tokens + token);
    a.out[place] = slot < 0 ? -1 : slot;
    a.out[place + 1] = slot < 0 ? 0 : within;
}
