// Where each token of a ragged batch lies, for every layer group; also through paths.
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

// The arguments of map_paths: `map`, and what stands in paths.cu.
struct MapPathsArgs {
    MapArgs map;
    const i32* cells;  // [num_rows, num_cells]
    i64 cell_stride;   // items from row to row
    const i32* first;  // [num_entries]
    const i32* width;
    const i32* base;
    const i32* own;
    u32 num_cell_rows;
    u32 num_cells;
};

// A token's entry of the batch and its position in the sequence.
struct TokenPlace {
    u32 entry;  // num_entries where there is none
    i64 position;
};

__device__ __forceinline__ TokenPlace place_of(const MapArgs& a, u32 token) {
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
    if (low >= a.num_entries) return TokenPlace{a.num_entries, 0};
    const i32 before = low ? a.ends[low - 1] : 0;  // tokens of earlier entries
    return TokenPlace{low, static_cast<i64>(a.starts[low]) + (static_cast<i32>(token) - before)};
}

__device__ __forceinline__ void write_place(const MapArgs& a, u32 token, i64 position, i32 row) {
    i32 slot = -1;
    i32 within = 0;
    const bool inside = position >= 0 && position <= 0x7fffffff;
    if (inside && row >= 0 && static_cast<u32>(row) < a.num_rows) {
        const u32 block = quotient(static_cast<u32>(position), a.block_tokens);  // its ordinal
        if (block < a.num_blocks) {
            slot = a.tables[blockIdx.y * a.group_stride + row * a.row_stride + block];
            within = static_cast<i32>(position) - block * a.block_tokens.div;  // range [0, T)
        }
    }
    // range [0, 2 * num_groups * num_tokens)
    const u64 place = 2 * (static_cast<u64>(blockIdx.y) * a.num_tokens + token);
    a.out[place] = slot < 0 ? -1 : slot;
    a.out[place + 1] = slot < 0 ? 0 : within;
}

KERNEL(map_tokens, MapArgs) {
    const u32 token = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_tokens + THREADS)
    if (token >= a.num_tokens) return;
    const TokenPlace t = place_of(a, token);
    write_place(a, token, t.position, t.entry < a.num_entries ? a.rows[t.entry] : -1);
}

KERNEL(map_paths, MapPathsArgs) {
    const MapArgs& m = a.map;
    const u32 token = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_tokens + THREADS)
    if (token >= m.num_tokens) return;
    const TokenPlace t = place_of(m, token);
    i32 row = -1;
    if (t.entry < m.num_entries) {
        row = m.rows[t.entry];
        // As unsigned numbers, negative ones are past every limit.
        const u32 first = a.first[t.entry];
        const u32 width = a.width[t.entry];
        const bool beams = static_cast<u32>(row) < a.num_cell_rows && width > 1 &&
                           first <= t.entry && t.entry - first < width &&
                           width <= m.num_entries - first;
        if (beams && t.position < a.base[t.entry]) {
            row = m.rows[first];
        } else if (beams && t.position < min(static_cast<i64>(a.own[t.entry]),
                                             static_cast<i64>(a.num_cells))) {
            const i64 position = t.position > 0 ? t.position : 0;
            const u32 beam = a.cells[row * a.cell_stride + position];
            if (beam < width) row = m.rows[first + beam];
        }
    }
    write_place(m, token, t.position, row);
}
