// Beams that find their history through paths: for each position, the beam whose page has it.

// A batch: arrays of [num_positions], see kvcore.device.paths.PathArrays.
struct Paths {
    i32* cells;        // [num_rows, num_cells]
    i64 row_stride;    // items from row to row
    const i32* rows;
    const i32* first;
    const i32* width;
    const i32* base;
    const i32* own;
    u32 num_rows;
    u32 num_cells;
    u32 num_positions;
    u32 reserved;
};

struct StepPathsArgs {
    Paths paths;
    const i32* valid;
    const i32* parents;  // [num_parents]
    u32 num_parents;
    u32 max_width;       // at most 12,000: beams are numbered with 16 bits
    u32 shift;           // log2 of the positions of a tile
    u32 reserved;
};

struct TakePathsArgs {
    Paths paths;
    i32* out;          // [rows of the result, columns]
    u32 num_units;     // rows of the result * columns, below 2^31
    Divider columns;
};

// Beams of one request: where they stand in the batch, and how many. Width 0: none, or one only.
struct Beams {
    u32 first;
    u32 width;
};

__device__ __forceinline__ Beams beams_of(const Paths& p, u32 position) {
    // As unsigned numbers, negative ones are past every limit.
    const u32 row = p.rows[position];
    const u32 first = p.first[position];
    const u32 width = p.width[position];
    const bool exist = row < p.num_rows && width > 1 && first <= position &&
                       position - first < width && first < p.num_positions &&
                       width <= p.num_positions - first;
    return exist ? Beams{first, width} : Beams{0, 0};
}

// What beam `beam` of a request, with this table row, finds at a position of the sequence.
__device__ __forceinline__ u32 beam_at(
    const Paths& p, u32 width, u32 beam, u32 row, i64 base, i64 own, i64 position) {
    if (position < base) return 0;
    if (position >= own || position >= p.num_cells) return beam;
    const u32 found = p.cells[row * p.row_stride + position];
    return found < width ? found : beam;
}

// Every beam continues its parent's path, in place. A block reads a tile of positions of all beams
// of a request, each from its parent, into shared memory, and writes it back: nobody else touches
// those positions.
//
// grid.x: any number, shares out the positions; grid.y: any number, positions of the batch.
// Dynamic shared memory: max_width << shift words, then the parents, 16 bits each.
KERNEL(step_paths, StepPathsArgs) {
    DYNAMIC_SHARED(tile);
    __shared__ u32 missing;
    const Paths& p = a.paths;
    u16* const parents = reinterpret_cast<u16*>(tile + (a.max_width << a.shift));
    const u32 mask = (1u << a.shift) - 1;
    for (u32 i = blockIdx.y; i < p.num_positions; i += gridDim.y) {
        const Beams b = beams_of(p, i);
        if (b.width == 0 || b.first != i || b.width > a.max_width) continue;
        const i64 base = max(p.base[i], 0);
        const i64 own = p.own[i];
        const i64 last = min(static_cast<i64>(a.valid[i]), static_cast<i64>(p.num_cells));
        const i64 step = static_cast<i64>(gridDim.x) << a.shift;
        i64 start = base + (static_cast<i64>(blockIdx.x) << a.shift);
        if (start >= last) continue;
        __syncthreads();
        if (threadIdx.x == 0) missing = 0;
        __syncthreads();
        for (u32 beam = threadIdx.x; beam < b.width; beam += THREADS) {
            const u32 at = i + beam;
            const u32 parent = at < a.num_parents ? a.parents[at] : beam;
            parents[beam] = static_cast<u16>(parent < b.width ? parent : beam);
            if (static_cast<u32>(p.rows[at]) >= p.num_rows) missing = 1;
        }
        __syncthreads();
        if (missing) continue;
        for (; start < last; start += step) {
            for (u32 cell = threadIdx.x; cell < b.width << a.shift; cell += THREADS) {
                const u32 parent = parents[cell >> a.shift];  // range [0, width)
                const i64 position = start + (cell & mask);
                if (position >= last) continue;
                const u32 row = p.rows[i + parent];
                tile[cell] = beam_at(p, b.width, parent, row, base, own, position);
            }
            __syncthreads();
            for (u32 cell = threadIdx.x; cell < b.width << a.shift; cell += THREADS) {
                const u32 beam = cell >> a.shift;  // range [0, width)
                const i64 position = start + (cell & mask);
                if (position >= last) continue;
                p.cells[p.rows[i + beam] * p.row_stride + position] = tile[cell];
            }
            __syncthreads();
        }
    }
}

// The paths of the first rows of a batch as a dense array. grid.x: blocks of THREADS cells of it.
KERNEL(take_paths, TakePathsArgs) {
    const u32 unit = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_units + THREADS)
    if (unit >= a.num_units) return;
    const u32 i = quotient(unit, a.columns);              // range [0, rows of the result)
    const u32 position = unit - i * a.columns.div;        // range [0, columns)
    const Beams b = beams_of(a.paths, i);
    u32 found = 0;
    if (b.width != 0) {
        const Paths& p = a.paths;
        found = beam_at(p, b.width, i - b.first, p.rows[i], p.base[i], p.own[i], position);
    }
    a.out[unit] = found;
}
