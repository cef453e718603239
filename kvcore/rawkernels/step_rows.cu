// Beams of a whole batch continue their parents: rows of the page table, in place, in one launch.
//
// The W beams of a request have W blocks of the grid in every layer group, which share out the
// columns of its rows. A block reads a tile [W][C] of them into shared memory and writes it back
// permuted, so nothing is read after it was written. Every block works out the permutation anew.
//
// grid.x: positions of the batch, grid.y: layer groups, grid.z: more blocks for each position.
// Dynamic shared memory: `cells` words, at least 2 * max_width.

struct StepRowsArgs {
    i32* table;          // [num_rows, num_groups, num_blocks]
    i64 row_stride;      // items from row to row
    i64 group_stride;    // items from group to group
    const i32* rows;     // [num_positions] and so on, see kvcore.device.beams.BeamArrays
    const i32* first;
    const i32* width;
    const i32* shared;
    const i32* blocks;
    const i32* parents;  // [num_parents]
    i32* sources;        // [num_positions]
    u32 num_rows;
    u32 num_blocks;
    u32 num_positions;
    u32 num_parents;
    u32 max_width;       // at most 12,000: beams are numbered with 16 bits
    u32 cells;
};

#define MAX_SHIFT 6  // log2 of the most columns of a tile

// The beams of one request.
struct Beams {
    u32 first;  // position of beam 0
    u32 width;  // 0 where there is nothing to do
};

__device__ __forceinline__ Beams beams_of(const StepRowsArgs& a, u32 position) {
    // As unsigned numbers, negative ones are past every limit.
    const u32 row = a.rows[position];
    const u32 first = a.first[position];
    const u32 width = a.width[position];
    const bool exist = row < a.num_rows && width > 1 && width <= a.max_width &&
                       first <= position && position - first < width &&
                       width <= a.num_positions - first;
    return exist ? Beams{first, width} : Beams{0, 0};
}

__device__ __forceinline__ u32 parent_of(const StepRowsArgs& a, const Beams& b, u32 beam) {
    const u32 at = b.first + beam;
    const u32 parent = at < a.num_parents ? a.parents[at] : beam;
    return parent < b.width ? parent : beam;
}

// How many of the threads before this one said yes, to each of two questions: to the first in the
// low 16 bits, to the second in the high ones. `before` is the sum of earlier calls.
__device__ __forceinline__ u32 ranks(bool one, bool two, u32& before, u32* counts) {
    const u32 ones = __ballot_sync(0xffffffffu, one);
    const u32 twos = __ballot_sync(0xffffffffu, two);
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 lower = (1u << lane) - 1;
    if (lane == 0) counts[warp] = __popc(ones) | __popc(twos) << 16;
    __syncthreads();
    u32 rank = before + (__popc(ones & lower) | __popc(twos & lower) << 16);
    for (u32 w = 0; w < WARPS; ++w) {
        if (w < warp) rank += counts[w];
        before += counts[w];
    }
    __syncthreads();
    return rank;
}

// Fills take[i], the beam whose own blocks beam i gets, and parents[i]; and, where `tells`, the
// sources. `first_child` is scratch, [width].
__device__ __forceinline__ void share_out(
    const StepRowsArgs& a, const Beams& b, i32* first_child, u16* take, u16* parents, bool tells) {
    __shared__ u32 counts[WARPS];
    const i32 width = static_cast<i32>(b.width);
    u16* const spare = parents;  // beams without children, ascending; parents take their place
    for (u32 i = threadIdx.x; i < b.width; i += THREADS) first_child[i] = width;
    __syncthreads();
    for (u32 i = threadIdx.x; i < b.width; i += THREADS) {
        atomicMin(first_child + parent_of(a, b, i), static_cast<i32>(i));
    }
    __syncthreads();
    u32 before = 0;
    for (u32 start = 0; start < b.width; start += THREADS) {
        const u32 i = start + threadIdx.x;  // range [0, width) where it counts
        const bool counts_here = i < b.width;
        const bool further =
            counts_here && first_child[parent_of(a, b, i)] != static_cast<i32>(i);
        const bool childless = counts_here && first_child[i] == width;
        const u32 rank = ranks(further, childless, before, counts);
        if (further) take[i] = static_cast<u16>(rank & 0xffff);  // for now: which of the spare
        if (childless) spare[rank >> 16] = static_cast<u16>(i);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < b.width; i += THREADS) {
        const u32 parent = parent_of(a, b, i);
        const i32 heir = first_child[parent];
        const bool further = heir != static_cast<i32>(i);
        take[i] = further ? spare[take[i]] : static_cast<u16>(parent);
        if (tells) a.sources[b.first + i] = further ? a.rows[b.first + heir] : -1;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < b.width; i += THREADS) {
        parents[i] = static_cast<u16>(parent_of(a, b, i));
    }
    __syncthreads();
}

// Reads the columns [start, start + 2^shift) of all rows, then writes them in their new order.
__device__ __forceinline__ void move_tile(
    const StepRowsArgs& a, const Beams& b, i32* tile, u32 shift, const u16* take,
    const u16* parents, u32 start, u32 shared, u32 blocks) {
    i32* const table = a.table + blockIdx.y * a.group_stride;
    const u32 cells = b.width << shift;
    const u32 mask = (1u << shift) - 1;
    for (u32 cell = threadIdx.x; cell < cells; cell += THREADS) {
        const u32 column = start + (cell & mask);
        const u32 row = a.rows[b.first + (cell >> shift)];
        if (column < blocks && row < a.num_rows) tile[cell] = table[row * a.row_stride + column];
    }
    __syncthreads();
    for (u32 cell = threadIdx.x; cell < cells; cell += THREADS) {
        const u32 column = start + (cell & mask);
        const u32 beam = cell >> shift;                // range [0, width)
        const u32 row = a.rows[b.first + beam];
        if (column >= blocks || row >= a.num_rows) continue;
        const u32 from = column < shared ? parents[beam] : take[beam];  // range [0, width)
        if (from == beam) continue;
        table[row * a.row_stride + column] = tile[from << shift | (cell & mask)];
    }
    __syncthreads();
}

KERNEL(step_rows, StepRowsArgs) {
    DYNAMIC_SHARED(words);
    const u32 position = blockIdx.x;  // range [0, num_positions)
    const Beams b = beams_of(a, position);
    const bool speaks = blockIdx.y == 0 && blockIdx.z == 0;  // of the blocks of this position
    if (b.width == 0) {
        if (speaks && threadIdx.x == 0) a.sources[position] = -1;
        return;
    }
    const bool tells = speaks && position == b.first;
    const u32 blocks = min(max(a.blocks[position], 0), static_cast<i32>(a.num_blocks));
    const u32 shared = min(max(a.shared[position], 0), static_cast<i32>(blocks));
    u32 shift = MAX_SHIFT;
    while (shift > 0 && (b.width << shift) + b.width > a.cells) --shift;
    const u32 slice = (position - b.first) * gridDim.z + blockIdx.z;
    const u32 slices = b.width * gridDim.z;
    if (!tells && slice << shift >= blocks) return;
    u16* const take = reinterpret_cast<u16*>(words + (b.width << shift));
    u16* const parents = take + b.width;
    share_out(a, b, words, take, parents, tells);
    for (u32 start = slice << shift; start < blocks; start += slices << shift) {
        move_tile(a, b, words, shift, take, parents, start, shared, blocks);
    }
}
