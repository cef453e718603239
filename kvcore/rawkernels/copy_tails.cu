// The written part of blocks from slot to slot: in every buffer of a layer group the first tokens.
//
// What there is to copy is only known on the device. So a few blocks of the grid per processor
// count the work in pieces of one warp, and each takes an equal run of them. A piece is a chunk of
// WARP_UNITS units of one buffer of one block of tokens of one position. grid.x: any number.

#define MAX_KINDS 8
#define WARP_UNITS (32 * VECTORS)

// Buffers of equal size, which stand side by side in the table of places.
struct TailKind {
    u32 first;        // place
    u32 count;        // places
    u32 units;        // of a buffer, below 2^31
    u32 token_units;  // of a token; 0: the whole buffer is copied
};

struct TailBuffers {
    const Place* places;
    u32 num_kinds;
    u32 reserved;
    TailKind kinds[MAX_KINDS];
};

// Positions of a batch: blocks from row to row of the page table.
struct TailArgs {
    const i32* table;    // [num_rows, num_blocks]
    i64 row_stride;      // items from row to row
    const i32* rows;     // [num_positions] and so on, see kvcore.device.beams.BeamArrays
    const i32* shared;
    const i32* blocks;
    const i32* valid;
    const i32* sources;  // [num_positions]: rows, or -1
    u32 num_rows;
    u32 num_blocks;
    u32 num_positions;
    u32 block_tokens;
    TailBuffers buffers;
};

// Pairs of slots.
struct PairArgs {
    const i32* lists;  // [3, num_pairs]: sources, targets, tokens
    u32 num_pairs;
    u32 reserved;
    TailBuffers buffers;
};

struct InlinePairArgs {
    PairArgs args;              // with `lists` unused
    i32 lists[3 * MAX_INLINE];  // [3, MAX_INLINE]
};

// The blocks [begin, end) of a position, and the tokens before `valid`; ordinals in the table.
struct Run {
    i32 begin;
    i32 end;
    i64 valid;
};

struct RowWork {
    const TailArgs& a;

    __device__ __forceinline__ u32 count() const { return a.num_positions; }
    __device__ __forceinline__ u32 block_tokens() const { return a.block_tokens; }
    __device__ __forceinline__ Run run(u32 i) const {
        const bool exists = static_cast<u32>(a.sources[i]) < a.num_rows &&
                            static_cast<u32>(a.rows[i]) < a.num_rows;
        if (!exists) return {0, 0, 0};
        const i32 valid = max(a.valid[i], 0);
        const u32 written = (static_cast<u32>(valid) + (a.block_tokens - 1)) / a.block_tokens;
        const i32 blocks = min(a.blocks[i], static_cast<i32>(a.num_blocks));
        return {max(a.shared[i], 0), min(blocks, static_cast<i32>(written)), valid};
    }
    __device__ __forceinline__ u32 source(u32 i, i32 block) const {
        return a.table[a.sources[i] * a.row_stride + block];
    }
    __device__ __forceinline__ u32 target(u32 i, i32 block) const {
        return a.table[a.rows[i] * a.row_stride + block];
    }
};

struct PairWork {
    const i32* lists;
    u32 stride;
    u32 pairs;

    __device__ __forceinline__ u32 count() const { return pairs; }
    __device__ __forceinline__ u32 block_tokens() const { return 0x7fffffff; }
    __device__ __forceinline__ Run run(u32 i) const {
        const i32 tokens = lists[2 * static_cast<u64>(stride) + i];
        return {0, tokens > 0, tokens};
    }
    __device__ __forceinline__ u32 source(u32 i, i32) const { return lists[i]; }
    __device__ __forceinline__ u32 target(u32 i, i32) const { return lists[stride + i]; }
};

// Units of a buffer that hold the first `tokens` tokens, at least 1.
__device__ __forceinline__ u32 units_of(const TailKind& kind, u32 tokens) {
    if (kind.token_units == 0) return kind.units;
    const u64 units = static_cast<u64>(tokens) * kind.token_units;
    return units < kind.units ? static_cast<u32>(units) : kind.units;
}

__device__ __forceinline__ u32 chunks_of(const TailKind& kind, u32 tokens) {
    return (units_of(kind, tokens) + (WARP_UNITS - 1)) / WARP_UNITS;
}

// Pieces of a block that holds `tokens` tokens.
__device__ __forceinline__ u32 pieces_of(const TailBuffers& t, u32 tokens) {
    u32 pieces = 0;
    for (u32 k = 0; k < t.num_kinds; ++k) {
        pieces += t.kinds[k].count * chunks_of(t.kinds[k], tokens);
    }
    return pieces;
}

// Where a warp is: in one block of one position.
struct Cursor {
    u32 position;
    i32 block;
    Run run;
    u32 tokens;  // of the block
    u64 begin;   // its first piece
    u64 end;     // and the piece after its last
};

template <typename Work>
__device__ __forceinline__ u32 tokens_of(const Work& work, const Run& run, i32 block) {
    const i64 rest = run.valid - static_cast<i64>(block) * work.block_tokens();
    return static_cast<u32>(min(rest, static_cast<i64>(work.block_tokens())));
}

// All pieces of a position: all its blocks but the last are full.
template <typename Work>
__device__ __forceinline__ u64 pieces_at(const Work& work, const TailBuffers& t, u32 position) {
    const Run run = work.run(position);
    if (run.begin >= run.end) return 0;
    u64 pieces = pieces_of(t, tokens_of(work, run, run.end - 1));
    if (run.end - run.begin > 1) {
        pieces += static_cast<u64>(run.end - run.begin - 1) * pieces_of(t, work.block_tokens());
    }
    return pieces;
}

// To the next block that holds tokens; there must be one.
template <typename Work>
__device__ __forceinline__ void advance(const Work& work, const TailBuffers& t, Cursor& c) {
    ++c.block;
    while (c.block >= c.run.end) {
        ++c.position;
        c.run = work.run(c.position);
        c.block = c.run.begin;
    }
    c.tokens = tokens_of(work, c.run, c.block);
    c.begin = c.end;
    c.end += pieces_of(t, c.tokens);
}

// Sums up what the threads have: `before[i]` becomes the sum over the threads before i, and
// `before[THREADS]` that over all.
__device__ __forceinline__ void sum_up(u64 mine, u64* before) {
    __shared__ u64 sums[WARPS];
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    u64 sum = mine;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u64 lower = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += lower;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) sum += sums[w];
    before[threadIdx.x] = sum - mine;
    if (threadIdx.x == THREADS - 1) before[THREADS] = sum;
    __syncthreads();
}

// The last i of [0, THREADS) with before[i] <= piece.
__device__ __forceinline__ u32 find(const u64* before, u64 piece) {
    u32 low = 0;
    u32 high = THREADS;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (before[middle] <= piece) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <int BYTES>
__device__ __forceinline__ void copy_piece(
    const TailBuffers& t, u32 piece, u32 tokens, u32 source, u32 target) {
    typedef typename Unit<BYTES>::type Vector;
    u32 k = 0;
    u32 chunks = chunks_of(t.kinds[0], tokens);
    while (piece >= t.kinds[k].count * chunks) {
        piece -= t.kinds[k].count * chunks;
        chunks = chunks_of(t.kinds[++k], tokens);
    }
    const u32 index = piece / chunks;  // range [0, count)
    const u32 units = units_of(t.kinds[k], tokens);
    const u32 first = (piece - index * chunks) * WARP_UNITS + threadIdx.x % 32;
    const Place place = t.places[t.kinds[k].first + index];
    // As unsigned numbers, negative ones are past the limit.
    if (source >= place.num_slots || target >= place.num_slots) return;
    const u64 from = place.base + source * place.slot_bytes;
    const u64 to = place.base + target * place.slot_bytes;
    Vector data[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // The last chunk reads its last unit again rather than branch around a load.
        const u32 unit = min(first + v * 32, units - 1);  // range [0, units)
        data[v] = load_once<Vector>(from + static_cast<u64>(unit) * BYTES);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 unit = first + v * 32;  // range [0, units) where it counts
        if (unit < units) store(to + static_cast<u64>(unit) * BYTES, data[v]);
    }
}

template <int BYTES, typename Work>
__device__ __forceinline__ void copy_tails(const Work& work, const TailBuffers& t) {
    __shared__ u64 before[THREADS + 1];
    const u32 each = (work.count() + (THREADS - 1)) / THREADS;  // positions of a thread
    const u32 last = min((threadIdx.x + 1) * each, work.count());
    u64 mine = 0;
    for (u32 i = threadIdx.x * each; i < last; ++i) mine += pieces_at(work, t, i);
    sum_up(mine, before);
    const u64 total = before[THREADS];
    const u64 end = total * (blockIdx.x + 1) / gridDim.x;
    u64 piece = total * blockIdx.x / gridDim.x + threadIdx.x / 32;
    if (piece >= end) return;
    const u32 thread = find(before, piece);
    // Before the first block of that thread's first position; never read until `advance`.
    Cursor c = {thread * each - 1, 0, {0, 0, 0}, 0, before[thread], before[thread]};
    for (u32 source = 0, target = 0; piece < end; piece += WARPS) {
        if (piece >= c.end) {
            while (piece >= c.end) advance(work, t, c);
            source = work.source(c.position, c.block);
            target = work.target(c.position, c.block);
        }
        copy_piece<BYTES>(t, static_cast<u32>(piece - c.begin), c.tokens, source, target);
    }
}

#define COPY_TAILS(BYTES)                                                                   \
    KERNEL(copy_tails_##BYTES, TailArgs) { copy_tails<BYTES>(RowWork{a}, a.buffers); }      \
    KERNEL(copy_tokens_##BYTES, PairArgs) {                                                 \
        copy_tails<BYTES>(PairWork{a.lists, a.num_pairs, a.num_pairs}, a.buffers);          \
    }                                                                                       \
    KERNEL(copy_tokens_inline_##BYTES, InlinePairArgs) {                                    \
        copy_tails<BYTES>(PairWork{a.lists, MAX_INLINE, a.args.num_pairs}, a.args.buffers); \
    }
COPY_TAILS(16)
COPY_TAILS(8)
COPY_TAILS(4)
COPY_TAILS(2)
COPY_TAILS(1)
