// Page indices of K and V for the rows of a batch, for all pools of a block-offset table at once.
//
// grid.x: blocks of THREADS pages of a row, grid.y: any number, rows of the result, grid.z: pools.

#define MAX_TABLE_POOLS 128

// K of page e of a slot is slot * scale + e, V is kv_offset more.
struct TablePool {
    i32 group;          // layer group whose slots it has
    i32 scale;
    i32 kv_offset;
    Divider expansion;  // pages of a block
};

struct OffsetArgs {
    const i32* tables;  // [num_groups, table_rows, table_blocks]
    i64 group_stride;   // items from group to group
    i64 row_stride;     // items from row to row
    const i32* rows;    // [num_rows]
    i32* out;           // [num_pools, out_rows, 2, out_pages]
    u32 table_rows;
    u32 table_blocks;
    u32 num_rows;       // at most out_rows; the rows after have no page
    u32 out_rows;
    u32 out_pages;
    i32 no_page;
    TablePool pools[MAX_TABLE_POOLS];
};

KERNEL(block_offsets, OffsetArgs) {
    const TablePool& pool = a.pools[blockIdx.z];
    const u32 page = blockIdx.x * THREADS + threadIdx.x;   // range [0, out_pages + THREADS)
    if (page >= a.out_pages) return;
    const u32 block = quotient(page, pool.expansion);      // its ordinal
    const u32 within = page - block * pool.expansion.div;  // range [0, pages of a block)
    const i32* const table = a.tables + pool.group * a.group_stride;
    for (u32 i = blockIdx.y; i < a.out_rows; i += gridDim.y) {
        i32 slot = -1;
        if (i < a.num_rows && block < a.table_blocks) {
            const u32 row = a.rows[i];  // as an unsigned number, a negative one is past the limit
            if (row < a.table_rows) slot = table[row * a.row_stride + block];
        }
        const u32 first = static_cast<u32>(slot) * pool.scale + within;
        // range [0, 2 * num_pools * out_rows * out_pages)
        const u64 place =
            2 * (static_cast<u64>(blockIdx.z) * a.out_rows + i) * a.out_pages + page;
        a.out[place] = slot < 0 ? a.no_page : static_cast<i32>(first);
        a.out[place + a.out_pages] =
            slot < 0 ? a.no_page : static_cast<i32>(first + pool.kv_offset);
    }
}
