// Pasted in front of every kernel source before it is compiled: CuPy's cache of binaries sees the
// text it compiles, not the contents of our includes. Sizes are bytes unless a name says otherwise.
//
// All kernels are data movers made of independent threads: no shared memory, no barriers, no warp
// votes. So the same text also compiles as plain C++ for the tests (tests/cpu_shim.h).

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
#define VECTORS 2  // units each thread moves; all loads are in flight before the first store
#endif
#ifndef CHUNK
#define CHUNK (THREADS * VECTORS)  // units each block moves
#endif

// ---- vectors ------------------------------------------------------------------------------------

// The widest access that every address, stride and row length of a launch allows; the host picks it.
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

// STREAM_STORES: evict first, for bulk moves. Without it the line stays in L2 for the next reader.
#ifndef STREAM_STORES
#define STREAM_STORES 1
#endif
template <typename T> __device__ __forceinline__ void store(u64 address, const T& value) {
#if STREAM_STORES
    __stcs(reinterpret_cast<T*>(address), value);
#else
    __stwb(reinterpret_cast<T*>(address), value);
#endif
}

// ---- division -----------------------------------------------------------------------------------

// n / div for 0 <= n < 2^31 and 1 <= div < 2^31 without a division; the host chose mul and shift.
struct Divider {
    u32 mul;
    u32 shift;
    u32 div;
};

__device__ __forceinline__ u32 quotient(u32 n, const Divider& by) {
    return (__umulhi(n, by.mul) + n) >> by.shift;  // the sum stays below 2^32 because n < 2^31
}

// ---- tokens in pages ----------------------------------------------------------------------------

#define MAX_ROLES 4

// Where one layer and role of a stack lies. In device memory, so that a pool can grow under a graph.
struct Place {
    u64 base;        // address of the buffer in slot 0
    i64 slot_bytes;  // from slot to slot
    i64 num_slots;   // slots backed by memory now
    i64 reserved;    // keeps an entry at 32 bytes
};

// One caller's array [layer, token, head, dim]: address and byte strides, which may be negative.
struct Strided {
    u64 base;
    i64 layer;
    i64 token;
    i64 head;
    i64 item;
};

// The arguments of append and gather. A token is cut into units of equal size; units of one head
// lie side by side in the page, and in runs of `item_units` in the caller's array.
struct TokenArgs {
    const Place* places;  // [num_layers, num_roles]
    const i32* mapping;   // [num_tokens, 2]: slot, token within the block
    u32 num_units;        // num_tokens * token_units.div, below 2^31
    u32 num_roles;        // roles of the stack
    u32 first_role;       // the role that arrays[0] belongs to
    u32 slot_tokens;      // tokens of a slot
    Divider token_units;  // units of a token
    Divider head_units;   // units of a head
    Divider item_units;   // units of a run in the caller's array
    Divider page_tokens;  // tokens of a sub-page
    i64 page_bytes;       // from sub-page to sub-page
    i64 token_stride;     // from token to token in a sub-page
    i64 head_stride;      // from head to head
    Strided arrays[MAX_ROLES];
};

// Where one unit of the launch lies inside its token, and in the caller's array.
struct TokenUnit {
    u32 token;     // range [0, num_tokens)
    i64 in_token;  // bytes from the token's start in a page
    u64 array;     // address in the caller's array
};

// FLAT: a token is one run of bytes on both sides, the common case, which saves two divisions.
template <int BYTES, bool FLAT>
__device__ __forceinline__ TokenUnit token_unit(const TokenArgs& a, const Strided& array, u32 layer, u32 unit) {
    TokenUnit u;
    u.token = quotient(unit, a.token_units);                    // range [0, num_tokens)
    const u32 in_token = unit - u.token * a.token_units.div;    // range [0, units of a token)
    u.array = array.base + layer * array.layer + u.token * array.token;
    if (FLAT) {
        u.in_token = in_token * BYTES;
        u.array += in_token * BYTES;
        return u;
    }
    const u32 head = quotient(in_token, a.head_units);          // range [0, heads)
    const u32 in_head = in_token - head * a.head_units.div;     // range [0, units of a head)
    const u32 item = quotient(in_head, a.item_units);           // range [0, runs of a head)
    const u32 in_item = in_head - item * a.item_units.div;      // range [0, units of a run)
    u.in_token = head * a.head_stride + in_head * BYTES;
    u.array += head * array.head + item * array.item + in_item * BYTES;
    return u;
}

// Address of token `within` of `slot` in a place; 0 if there is no such token. Without a branch, so
// that the units of a thread do not wait for each other.
__device__ __forceinline__ u64 token_address(const TokenArgs& a, const Place& place, i32 slot, i32 within) {
    // As unsigned numbers, negative ones are past every limit.
    const bool exists = static_cast<u32>(slot) < static_cast<u64>(place.num_slots) &
                        static_cast<u32>(within) < a.slot_tokens;
    const u32 page = quotient(within & 0x7fffffff, a.page_tokens);  // range [0, expansion) if it exists
    const u32 token = within - page * a.page_tokens.div;            // range [0, page_tokens) likewise
    const u64 address =
        place.base + slot * place.slot_bytes + page * a.page_bytes + token * a.token_stride;
    return exists ? address : 0;
}

// ---- whole slots --------------------------------------------------------------------------------

#define MAX_POOLS 8
#define MAX_INLINE 256  // slot pairs that travel in the launch arguments (4 KiB at most in all)

struct Pool {
    u64 base;
    i64 slot_bytes;
    i64 num_slots;     // slots backed by memory
    u32 first_chunk;   // first block of the grid that works on this pool
    Divider chunks;    // blocks of the grid per slot
};

// Which slots to work on: in device memory, or in the arguments where `slots` is null.
struct SlotArgs {
    const i32* slots;  // [2, num_slots]: sources, targets
    u32 num_slots;
    u32 num_pools;
    u32 pattern;       // fill_pages: the byte, four times
    u32 reserved;
    Pool pools[MAX_POOLS];
};

struct InlineSlotArgs {
    SlotArgs args;
    i32 slots[2 * MAX_INLINE];  // [2, MAX_INLINE]
};
