// New tokens into their pages: every layer and role of a stack in one launch.
//
// grid.x: chunks of CHUNK units of [num_tokens * units of a token], grid.y: roles, grid.z: layers.

template <int BYTES, bool FLAT> __device__ __forceinline__ void append(const TokenArgs& a) {
    typedef typename Unit<BYTES>::type Vector;
    const u32 layer = blockIdx.z;                        // range [0, num_layers)
    const u32 role = blockIdx.y;                         // range [0, roles of the launch)
    const u32 first = blockIdx.x * CHUNK + threadIdx.x;  // range [0, num_units + CHUNK)
    const Place place = a.pages.places[layer * a.pages.num_roles + a.pages.first_role + role];
    Vector data[VECTORS];
    i32 slot[VECTORS];
    i32 within[VECTORS];
    i64 in_token[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // The last block reads its last unit again rather than branch around a load.
        const u32 unit = min(first + v * THREADS, a.num_units - 1);  // range [0, num_units)
        const TokenUnit u = token_unit<BYTES, FLAT>(a, layer, role, unit);
        // Rows of skipped tokens exist, so this load need not wait for the mapping.
        data[v] = load_once<Vector>(u.array);
        // One entry serves a whole token, so a warp reads the same two words: one transaction.
        slot[v] = __ldg(a.mapping + 2 * static_cast<u64>(u.token));
        within[v] = __ldg(a.mapping + 2 * static_cast<u64>(u.token) + 1);
        in_token[v] = u.in_token;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u64 token = token_address(a.pages, place, slot[v], within[v]);
        if (token && first + v * THREADS < a.num_units) store(token + in_token[v], data[v]);
    }
}

#define APPEND(NAME, BYTES, FLAT) \
    KERNEL(NAME##_##BYTES, TokenArgs) { append<BYTES, FLAT>(a); }
APPEND(append_flat, 16, true)
APPEND(append, 16, false)
APPEND(append, 8, false)
APPEND(append, 4, false)
APPEND(append, 2, false)
APPEND(append, 1, false)
