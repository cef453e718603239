// Beams of a batch follow their parents through an indirection: for each position, which beam has it.
//
// A block reads some positions of all beams of a request that change, each from the beam's parent,
// into shared memory, and writes them back: nobody else touches those positions.
//
// grid.x: any number, shares out the positions; grid.y: any number, requests.
// Dynamic shared memory: num_beams << shift words, then the parents, 16 bits each.

struct IndirectionArgs {
    i32* cells;           // [num_requests, num_beams, num_positions]
    i64 request_stride;   // items from request to request
    i64 beam_stride;      // items from beam to beam
    const i32* parents;   // [num_requests, num_beams]
    const i32* starts;    // [num_requests]: the first position that beams do not share
    const i32* ends;      // [num_requests]: the position of this step; negative: nothing to do
    const i32* widths;    // [num_requests]; null: all beams
    u32 num_requests;
    u32 num_beams;
    u32 num_positions;
    u32 shift;            // log2 of the positions of a tile
};

KERNEL(step_indirection, IndirectionArgs) {
    DYNAMIC_SHARED(tile);
    u16* const from = reinterpret_cast<u16*>(tile + (a.num_beams << a.shift));
    const u32 mask = (1u << a.shift) - 1;
    for (u32 request = blockIdx.y; request < a.num_requests; request += gridDim.y) {
        i32* const cells = a.cells + request * a.request_stride;
        const i32 end = a.ends[request];
        u32 width = a.num_beams;
        if (a.widths != nullptr) {
            width = min(max(a.widths[request], 0), static_cast<i32>(a.num_beams));
        }
        if (end < 0) continue;
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += THREADS) {
            // As unsigned numbers, negative ones are too large.
            const u32 parent = a.parents[static_cast<u64>(request) * a.num_beams + i];
            from[i] = static_cast<u16>(parent < width ? parent : i);
        }
        __syncthreads();
        const u32 last = min(static_cast<u32>(end), a.num_positions);
        const u64 step = static_cast<u64>(gridDim.x) << a.shift;
        u64 start = static_cast<u64>(max(a.starts[request], 0));
        for (start += static_cast<u64>(blockIdx.x) << a.shift; start < last; start += step) {
            for (u32 cell = threadIdx.x; cell < width << a.shift; cell += THREADS) {
                const u32 beam = cell >> a.shift;  // range [0, width)
                const u64 position = start + (cell & mask);
                if (position >= last || from[beam] == beam) continue;
                tile[cell] = cells[from[beam] * a.beam_stride + position];
            }
            __syncthreads();
            for (u32 cell = threadIdx.x; cell < width << a.shift; cell += THREADS) {
                const u32 beam = cell >> a.shift;
                const u64 position = start + (cell & mask);
                if (position >= last || from[beam] == beam) continue;
                cells[beam * a.beam_stride + position] = tile[cell];
            }
            __syncthreads();
        }
        if (blockIdx.x != 0 || static_cast<u32>(end) >= a.num_positions) continue;
        for (u32 i = threadIdx.x; i < width; i += THREADS) {
            cells[i * a.beam_stride + end] = from[i];
        }
    }
}
