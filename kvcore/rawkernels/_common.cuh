// Pasted in front of every kernel source before it is compiled: CuPy's cache of binaries sees the
// text it compiles, not the contents of our includes. Sizes are bytes unless a name says otherwise.
//
// The same text also compiles as plain C++ for the tests (tests/kernels/cpu_shim.h). Most kernels are
// made of independent threads: no shared memory, no barriers, no warp votes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// ---- tunables, set by the host with -D ----------------------------------------------------------

#ifndef THREADS
#define THREADS 128  // threads of a block
#endif
#ifndef VECTORS
#define VECTORS 2  // units each thread moves; all its loads come before its first store
#endif
#define CHUNK (THREADS * VECTORS)  // units each block moves

#define WARPS (THREADS / 32)  // of a block

#ifndef STREAM_STORES
#define STREAM_STORES 1  // stores evict first, for bulk moves; 0 keeps lines in L2 for readers
#endif

// Every kernel takes one struct by value: the host packs it once and the launch copies it.
#define KERNEL(NAME, ARGS) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ARGS a)

// Shared memory whose size is a parameter of the launch.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) i32 NAME[]
#endif

// ---- vectors ------------------------------------------------------------------------------------

// The widest access that all addresses, strides and row lengths allow; the host picks it.
template <int BYTES> struct Unit;
template <> struct Unit<16> { typedef uint4 type; };
template <> struct Unit<8> { typedef uint2 type; };
template <> struct Unit<4> { typedef u32 type; };
template <> struct Unit<2> { typedef u16 type; };
template <> struct Unit<1> { typedef u8 type; };

// Every byte group of a unit from a pattern of four bytes (all four alike for units below 4).
__device__ __forceinline__ void splat(uint4& v, u32 pattern) { v.x = v.y = v.z = v.w = pattern; }
__device__ __forceinline__ void splat(uint2& v, u32 pattern) { v.x = v.y = pattern; }
__device__ __forceinline__ void splat(u32& v, u32 pattern) { v = pattern; }
__device__ __forceinline__ void splat(u16& v, u32 pattern) { v = static_cast<u16>(pattern); }
__device__ __forceinline__ void splat(u8& v, u32 pattern) { v = static_cast<u8>(pattern); }

// Data is read once, so it should not push anything else out of the caches.
template <typename T> __device__ __forceinline__ T load_once(u64 address) {
    return __ldcs(reinterpret_cast<const T*>(address));
}

template <typename T> __device__ __forceinline__ void store(u64 address, const T& value) {
#if STREAM_STORES
    __stcs(reinterpret_cast<T*>(address), value);
#else
    __stwb(reinterpret_cast<T*>(address), value);
#endif
}

// ---- division -----------------------------------------------------------------------------------

// n / div for 0 <= n < 2^31 and 1 <= div < 2^31 without a division: the host chose mul and shift.
struct Divider {
    u32 mul;
    u32 shift;
    u32 div;
};

__device__ __forceinline__ u32 quotient(u32 n, const Divider& by) {
    return (__umulhi(n, by.mul) + n) >> by.shift;  // the sum stays below 2^32 because n < 2^31
}

// ---- tokens in pages ----------------------------------------------------------------------------

#define MAX_ROLES 4  // roles of one launch; more take several

// Where one layer and role of a stack lies. In device memory, so that pools can grow under a graph.
struct Place {
    u64 base;        // address of the buffer in slot 0
    i64 slot_bytes;  // from slot to slot
    i64 num_slots;   // slots that every pool of the stack has now
    i64 reserved;    // keeps an entry at 32 bytes
};

// How tokens lie in the pages of a stack.
struct Pages {
    const Place* places;  // [num_layers, num_roles]
    i64 page_bytes;       // from sub-page to sub-page of a slot
    i64 token_stride;     // from token to token of a sub-page
    i64 head_stride;      // from head to head of a token
    Divider page_tokens;  // tokens of a sub-page
    u32 slot_tokens;      // tokens of a slot
    u32 num_roles;        // roles of the stack
    u32 first_role;       // the stack's role that grid.y = 0 stands for
};

// The arguments of append and gather. A token is cut into units of equal size: the units of a head
// lie side by side in its page, and in runs of `item_units` in the caller's array.
struct TokenArgs {
    const i32* mapping;     // [num_tokens, 2]: slot, token within the block
    u64 base[MAX_ROLES];    // the callers' arrays [layer, token, head, item], one per role
    i64 layer[MAX_ROLES];   // their strides in bytes, which may be negative
    u32 num_units;          // num_tokens * units of a token, below 2^31
    u32 reserved;
    Pages pages;
    i64 token[MAX_ROLES];
    i64 head[MAX_ROLES];
    i64 item[MAX_ROLES];
    Divider token_units;    // units of a token
    Divider head_units;     // units of a head
    Divider item_units;     // units of a run in the caller's array
    u32 reserved_too;
};

// Where one unit of the launch lies inside its token, and in the caller's array.
struct TokenUnit {
    u32 token;     // range [0, num_tokens)
    i64 in_token;  // bytes from the token's start in a page
    u64 array;     // address in the caller's array
};

// FLAT: a token is one run of bytes on both sides, the common case, which saves two divisions.
template <int BYTES, bool FLAT>
__device__ __forceinline__ TokenUnit token_unit(
    const TokenArgs& a, u32 layer, u32 role, u32 unit) {
    TokenUnit u;
    u.token = quotient(unit, a.token_units);                  // range [0, num_tokens)
    const u32 in_token = unit - u.token * a.token_units.div;  // range [0, units of a token)
    u.array = a.base[role] + layer * a.layer[role] + u.token * a.token[role];
    if (FLAT) {
        u.in_token = in_token * BYTES;
        u.array += in_token * BYTES;
        return u;
    }
    const u32 head = quotient(in_token, a.head_units);       // range [0, heads)
    const u32 in_head = in_token - head * a.head_units.div;  // range [0, units of a head)
    const u32 item = quotient(in_head, a.item_units);        // range [0, runs of a head)
    const u32 in_item = in_head - item * a.item_units.div;   // range [0, units of a run)
    u.in_token = head * a.pages.head_stride + in_head * BYTES;
    u.array += head * a.head[role] + item * a.item[role] + in_item * BYTES;
    return u;
}

// Address of token `within` of `slot` in a place; 0 if there is no such token. Without a branch, so
// that the units of a thread do not wait for each other.
__device__ __forceinline__ u64 token_address(
    const Pages& p, const Place& place, i32 slot, i32 within) {
    // As unsigned numbers, negative ones are past every limit.
    const bool exists = (static_cast<u32>(slot) < static_cast<u64>(place.num_slots)) &
                        (static_cast<u32>(within) < p.slot_tokens);
    const u32 in_slot = within & 0x7fffffff;               // range [0, slot_tokens) if it exists
    const u32 page = quotient(in_slot, p.page_tokens);     // range [0, expansion)
    const u32 token = in_slot - page * p.page_tokens.div;  // range [0, page_tokens)
    const u64 address =
        place.base + slot * place.slot_bytes + page * p.page_bytes + token * p.token_stride;
    return exists ? address : 0;
}

// ---- whole slots --------------------------------------------------------------------------------

#define MAX_POOLS 8
#define MAX_INLINE 256  // slot pairs that travel in the launch arguments (4 KiB at most in all)

struct Pool {
    u64 base;
    i64 slot_bytes;
    u32 before;      // chunks of one slot in all pools before this one
    Divider chunks;  // chunks of one slot in this pool
};

struct SlotArgs {
    const i32* slots;  // [2, num_slots]: sources, targets
    u32 num_slots;     // slots to work on
    u32 limit;         // slots that every pool has
    u32 pattern;       // fill_pages: the byte, four times
    u32 num_pools;
    Pool pools[MAX_POOLS];
};

struct InlineSlotArgs {
    SlotArgs args;              // with `slots` unused
    i32 slots[2 * MAX_INLINE];  // [2, MAX_INLINE]
};

// What a block of the grid works on: one chunk of one slot of one pool. Blocks go pool by pool,
// slot by slot, chunk by chunk.
struct Chunk {
    u32 pool;   // range [0, num_pools)
    u32 entry;  // which of the slots to work on, range [0, num_slots)
    i64 first;  // this thread's first unit of the slot, range [0, units of a slot + CHUNK)
};

__device__ __forceinline__ Chunk chunk_of(const SlotArgs& a) {
    Chunk c;
    c.pool = 0;
    while (c.pool + 1 < a.num_pools && blockIdx.x >= a.pools[c.pool + 1].before * a.num_slots) {
        ++c.pool;
    }
    const Pool& pool = a.pools[c.pool];
    const u32 chunk = blockIdx.x - pool.before * a.num_slots;  // range [0, num_slots * chunks)
    c.entry = quotient(chunk, pool.chunks);
    const u32 part = chunk - c.entry * pool.chunks.div;        // range [0, chunks of a slot)
    c.first = static_cast<i64>(part) * CHUNK + threadIdx.x;
    return c;
}
