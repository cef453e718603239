// Tokens from page to page: every layer and role of a stack in one launch.
//
// grid.x: chunks of CHUNK units of [num_tokens * units of a token], grid.y: roles, grid.z: layers.

struct MoveArgs {
    const i32* src;       // [num_tokens, 2]: slot, token within the block
    const i32* dst;       // [num_tokens, 2]
    u32 num_units;        // num_tokens * units of a token, below 2^31
    Divider token_units;  // units of a token
    Divider head_units;   // units of a run that lies side by side
    u32 reserved;
    Pages pages;
};

template <int BYTES> __device__ __forceinline__ void move(const MoveArgs& a) {
    typedef typename Unit<BYTES>::type Vector;
    const u32 first = blockIdx.x * CHUNK + threadIdx.x;  // range [0, num_units + CHUNK)
    const Place place =
        a.pages.places[blockIdx.z * a.pages.num_roles + a.pages.first_role + blockIdx.y];
    Vector data[VECTORS];
    u64 target[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        target[v] = 0;
        const u32 unit = first + v * THREADS;
        if (unit >= a.num_units) continue;
        const u32 token = quotient(unit, a.token_units);        // range [0, num_tokens)
        const u32 in_token = unit - token * a.token_units.div;  // range [0, units of a token)
        const u32 head = quotient(in_token, a.head_units);
        const i64 offset =
            head * a.pages.head_stride + (in_token - head * a.head_units.div) * BYTES;
        const i32* const src = a.src + 2 * static_cast<u64>(token);
        const i32* const dst = a.dst + 2 * static_cast<u64>(token);
        const u64 from = token_address(a.pages, place, __ldg(src), __ldg(src + 1));
        const u64 to = token_address(a.pages, place, __ldg(dst), __ldg(dst + 1));
        if (from == 0 || to == 0) continue;
        data[v] = load_once<Vector>(from + offset);
        target[v] = to + offset;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (target[v]) store(target[v], data[v]);
    }
}

#define MOVE(BYTES) \
    KERNEL(move_tokens_##BYTES, MoveArgs) { move<BYTES>(a); }
MOVE(16)
MOVE(8)
MOVE(4)
MOVE(2)
MOVE(1)
