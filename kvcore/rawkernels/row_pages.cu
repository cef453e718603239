// The pages of a batch's rows, each up to the end of its tokens, for kernels that read pages alone:
// as lists one behind the other (csr_pages), or row by row in a dense table (ragged_pages).
//
// Lengths are read here, and the grid depends on shapes only, so a captured launch stays valid.
// grid.x: any number, shares out the pages of a row; grid.y: enough for num_rows at block_rows each.

struct RowPagesArgs {
    const i32* table;   // [table_rows, its blocks]
    i64 row_stride;     // items from row to row
    const i32* rows;    // [num_rows]: of the table; others are padding, which has no tokens
    const i32* starts;  // [num_rows]: position of a row's first token of this step
    const i32* ends;    // [num_rows]: tokens of this step in a row and all before it
    i32* pages;         // csr [num_pages], ragged [num_rows, num_pages]
    i32* bounds;        // [num_rows + 1]: csr: where the pages of a row begin; ragged: its tokens
    i32* lens;          // [num_rows]: csr: tokens in the last page of a row; ragged: of a row
    i32* count;         // ragged [1]: rows that are not padding
    u32 num_rows;
    u32 num_pages;
    u32 table_rows;
    u32 max_tokens;     // of a row of the table, below 2^31
    i32 scale;          // page e of a slot is slot * scale + offset + e
    i32 offset;
    i32 no_page;
    u32 block_rows;     // rows of a block of the grid
    Divider page_tokens;
    Divider expansion;  // pages of a block of tokens
};

struct RowSpan {
    u32 row;     // of the table; not below table_rows for padding
    u32 tokens;  // range [0, max_tokens]
    u32 pages;   // that hold them
};

__device__ __forceinline__ RowSpan span_of(const RowPagesArgs& a, u32 i) {
    RowSpan s{static_cast<u32>(a.rows[i]), 0, 0};  // a negative one is past every limit
    const i64 before = i ? a.ends[i - 1] : 0;
    const i64 tokens = a.starts[i] + (a.ends[i] - before);
    if (s.row >= a.table_rows || tokens <= 0) return s;
    s.tokens = static_cast<u32>(min(tokens, static_cast<i64>(a.max_tokens)));
    if (s.tokens != 0) s.pages = quotient(s.tokens - 1, a.page_tokens) + 1;
    return s;
}

// The index of a page of a row, range [0, pages of the row).
__device__ __forceinline__ i32 page_of(const RowPagesArgs& a, u32 row, u32 page) {
    const u32 block = quotient(page, a.expansion);  // its ordinal
    const i32 slot = a.table[row * a.row_stride + block];
    const u32 within = page - block * a.expansion.div;  // range [0, pages of a block)
    const u32 index = static_cast<u32>(slot) * a.scale + a.offset + within;
    return slot < 0 ? a.no_page : static_cast<i32>(index);
}

// The sum over all threads of the block, which all of them get.
__device__ __forceinline__ i32 sum_of_block(i32 value) {
    __shared__ i32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const i32 other = __shfl_up_sync(0xffffffffu, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    if (threadIdx.x % 32 == 31) atomicAdd(&total, value);  // the last of a warp has its sum
    __syncthreads();
    return total;
}

KERNEL(csr_pages, RowPagesArgs) {
    const u32 first = blockIdx.y * a.block_rows;  // range [0, num_rows + block_rows)
    i32 mine = 0;
    for (u32 i = threadIdx.x; i < min(first, a.num_rows); i += THREADS) mine += span_of(a, i).pages;
    u32 before = sum_of_block(mine);  // pages of the rows before
    const bool speaks = blockIdx.x == 0 && threadIdx.x == 0;
    if (speaks && first == 0) a.bounds[0] = 0;
    const u32 last = min(first + a.block_rows, a.num_rows);
    for (u32 i = first; i < last; ++i) {
        const RowSpan s = span_of(a, i);
        if (speaks) {
            a.bounds[i + 1] = before + s.pages;
            a.lens[i] = s.pages ? s.tokens - (s.pages - 1) * a.page_tokens.div : 0;
        }
        u32 page = blockIdx.x * THREADS + threadIdx.x;
        for (; page < s.pages; page += gridDim.x * THREADS) {
            if (before + page < a.num_pages) a.pages[before + page] = page_of(a, s.row, page);
        }
        before += s.pages;
    }
}

KERNEL(ragged_pages, RowPagesArgs) {
    const bool speaks = blockIdx.x == 0 && threadIdx.x == 0;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        i32 mine = 0;
        for (u32 i = threadIdx.x; i < a.num_rows; i += THREADS) {
            mine += static_cast<u32>(a.rows[i]) < a.table_rows;
        }
        const i32 real = sum_of_block(mine);
        if (threadIdx.x == 0) a.count[0] = real;
        if (threadIdx.x == 0) a.bounds[0] = 0;
    }
    const u32 first = blockIdx.y * a.block_rows;  // range [0, num_rows + block_rows)
    const u32 last = min(first + a.block_rows, a.num_rows);
    for (u32 i = first; i < last; ++i) {
        const RowSpan s = span_of(a, i);
        if (speaks) {
            a.bounds[i + 1] = a.ends[i];
            a.lens[i] = s.tokens;
        }
        i32* const pages = a.pages + static_cast<u64>(i) * a.num_pages;
        u32 page = blockIdx.x * THREADS + threadIdx.x;
        for (; page < a.num_pages; page += gridDim.x * THREADS) {
            pages[page] = page < s.pages ? page_of(a, s.row, page) : a.no_page;
        }
    }
}
