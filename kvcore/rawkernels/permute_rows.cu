// Rows of dense arrays in a new order, in place and without a second buffer: row i of a request
// becomes what row parents[i] was.
//
// A block reads its own columns of all rows that change, each from the row's parent, into shared
// memory before it writes any of them; nobody else ever touches those bytes.
//
// grid.x: any number, shares out a row; grid.y: any number, requests; grid.z: arrays.

#define MAX_ARRAYS 256

struct PermuteArgs {
    const i32* parents;  // [num_rows]: rows of the same request
    const i32* starts;   // [num_requests + 1]: first rows; null: every request has `width` rows
    const i32* tokens;   // [num_requests]: tokens that move; null: everything
    i64 row_stride;      // from row to row
    u32 num_rows;
    u32 num_requests;
    u32 width;           // the most rows of a request
    u32 segments;        // of a row: what the axes before the tokens span
    u32 segment_units;   // units of a segment; segments * segment_units < 2^31
    u32 token_units;     // units of a token; 0 if `tokens` is null
    u32 shift;           // log2 of the columns of a tile
    u32 reserved;
    u8* arrays[MAX_ARRAYS];
};

// The rows of one request, and how much of each of them moves.
struct Rows {
    u32 first;
    u32 width;  // 0 where there is nothing to do
    u32 live;   // units of a segment
};

__device__ __forceinline__ Rows rows_of(const PermuteArgs& a, u32 request) {
    i32 first = static_cast<i32>(request * a.width);
    i32 end = first + static_cast<i32>(a.width);
    if (a.starts != nullptr) {
        first = a.starts[request];
        end = a.starts[request + 1];
    }
    const bool exist = first >= 0 && first < end && static_cast<u32>(end) <= a.num_rows &&
                       static_cast<u32>(end - first) <= a.width;
    if (!exist) return {0, 0, 0};
    u32 live = a.segment_units;
    if (a.tokens != nullptr) {
        const u64 units = static_cast<u64>(max(a.tokens[request], 0)) * a.token_units;
        if (units < live) live = static_cast<u32>(units);
    }
    return {static_cast<u32>(first), static_cast<u32>(end - first), live};
}

__device__ __forceinline__ u32 parent_of(const PermuteArgs& a, const Rows& rows, u32 i) {
    const u32 parent = a.parents[rows.first + i];  // as unsigned numbers, negative ones are too large
    return parent < rows.width ? parent : i;
}

// Where a unit of the request's first row lies, from the start of the array.
template <int BYTES>
__device__ __forceinline__ i64 offset_of(const PermuteArgs& a, const Rows& rows, u32 column) {
    const i64 start = rows.first * a.row_stride;
    if (rows.live != a.segment_units) {
        const u32 segment = column / rows.live;             // range [0, segments)
        column += segment * (a.segment_units - rows.live);  // past what stays of those before
    }
    return start + static_cast<i64>(column) * BYTES;
}

// A plain load: unlike one that streams, it never moves behind the stores that follow.
template <typename T> __device__ __forceinline__ T load_old(const u8* address) {
    return *reinterpret_cast<const T*>(address);
}

template <typename T> __device__ __forceinline__ void store_new(u8* address, const T& value) {
    store(reinterpret_cast<u64>(address), value);
}

// What a block keeps in dynamic shared memory: columns of all rows, then the parents.
template <typename Vector> struct Tile {
    const PermuteArgs& a;
    const Rows& rows;
    Vector* cells;  // [width, 1 << shift]
    u16* from;      // [width]
    u32 columns;    // of a row
    u32 start;      // the tile's first column

    // The row of a cell if it changes, else none.
    __device__ __forceinline__ u32 row(u32 cell) const {
        const u32 i = cell >> a.shift;
        return i < rows.width && column(cell) < columns && from[i] != i ? i : 0xffffffffu;
    }
    __device__ __forceinline__ u32 column(u32 cell) const {
        return start + (cell & ((1u << a.shift) - 1));
    }
    __device__ __forceinline__ u8* address(u32 cell, u32 row) const {
        const i64 offset = offset_of<sizeof(Vector)>(a, rows, column(cell));
        return a.arrays[blockIdx.z] + offset + row * a.row_stride;
    }
    __device__ __forceinline__ void load() const {
        for (u32 cell = threadIdx.x; cell < rows.width << a.shift; cell += CHUNK) {
            Vector data[VECTORS];
#pragma unroll
            for (u32 v = 0; v < VECTORS; ++v) {
                const u32 i = row(cell + v * THREADS);
                if (i < rows.width) data[v] = load_old<Vector>(address(cell + v * THREADS, from[i]));
            }
#pragma unroll
            for (u32 v = 0; v < VECTORS; ++v) {
                if (row(cell + v * THREADS) < rows.width) cells[cell + v * THREADS] = data[v];
            }
        }
    }
    __device__ __forceinline__ void save() const {
        for (u32 cell = threadIdx.x; cell < rows.width << a.shift; cell += THREADS) {
            const u32 i = row(cell);
            if (i < rows.width) store_new(address(cell, i), cells[cell]);
        }
    }
};

template <int BYTES>
__device__ __forceinline__ void permute(const PermuteArgs& a, i32* words) {
    typedef typename Unit<BYTES>::type Vector;
    __shared__ i32 any;
    u16* const from = reinterpret_cast<u16*>(words) + ((a.width << a.shift) * BYTES + 1) / 2;
    for (u32 request = blockIdx.y; request < a.num_requests; request += gridDim.y) {
        const Rows rows = rows_of(a, request);
        __syncthreads();
        if (threadIdx.x == 0) any = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < rows.width; i += THREADS) {
            const u32 parent = parent_of(a, rows, i);
            from[i] = static_cast<u16>(parent);
            if (parent != i) any = 1;
        }
        __syncthreads();
        const u32 columns = any ? a.segments * rows.live : 0;
        const u64 step = static_cast<u64>(gridDim.x) << a.shift;
        for (u64 start = static_cast<u64>(blockIdx.x) << a.shift; start < columns; start += step) {
            const Tile<Vector> tile = {
                a, rows, reinterpret_cast<Vector*>(words), from, columns, static_cast<u32>(start)};
            tile.load();
            __syncthreads();
            tile.save();
            __syncthreads();
        }
    }
}

#define PERMUTE(BYTES)                          \
    KERNEL(permute_rows_##BYTES, PermuteArgs) { \
        DYNAMIC_SHARED(words);                  \
        permute<BYTES>(a, words);               \
    }
PERMUTE(16)
PERMUTE(8)
PERMUTE(4)
PERMUTE(2)
PERMUTE(1)
