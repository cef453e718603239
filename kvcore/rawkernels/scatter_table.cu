// Changed cells of a page table and the words that describe a batch, in one launch.
//
// Index, values and words lie in pinned host memory and are read from there: a few KiB over the bus
// cost less than a copy that has to be enqueued first. grid.x: blocks of THREADS items.

struct ScatterArgs {
    i32* table;
    const i64* index;  // [num_cells], host memory
    const i32* value;  // [num_cells], host memory
    i32* target;
    const i32* words;  // [num_words], host memory
    i64 table_cells;
    u32 num_cells;
    u32 num_words;
};

// The same with its counts in the staging, so that the launch itself never changes and can lie in a
// graph: `staged` holds the number of cells, their indices, their values, and the words. grid.x:
// blocks enough for the words and for as many cells as the host ever stages for it.
struct StagedArgs {
    i32* table;
    const i64* staged;  // host memory
    i32* target;
    i64 table_cells;
    u32 num_words;
    u32 reserved;
};

KERNEL(scatter_staged, StagedArgs) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;  // range [0, max(cells, num_words) + THREADS)
    const i64 cells = __ldcv(a.staged);
    const i64* index = a.staged + 1;
    const i32* value = reinterpret_cast<const i32*>(index + cells);
    const i32* words = value + cells;
    if (i < a.num_words) a.target[i] = __ldcv(words + i);
    if (i < cells) {
        const i64 cell = __ldcv(index + i);  // range [0, table_cells)
        if (cell >= 0 && cell < a.table_cells) a.table[cell] = __ldcv(value + i);
    }
}

KERNEL(scatter_table, ScatterArgs) {
    // range [0, max(num_cells, num_words) + THREADS)
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    // Volatile reads (__ldcv): the host writes this memory, so no cache may answer.
    if (i < a.num_words) a.target[i] = __ldcv(a.words + i);
    if (i < a.num_cells) {
        const i64 cell = __ldcv(a.index + i);  // range [0, table_cells)
        if (cell >= 0 && cell < a.table_cells) a.table[cell] = __ldcv(a.value + i);
    }
}
