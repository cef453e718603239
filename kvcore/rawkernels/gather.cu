// Tokens out of their pages: every layer and role of a stack in one launch; no page gives zeros.
//
// grid.x: chunks of CHUNK units of [num_tokens * units of a token], grid.y: roles, grid.z: layers.

template <int BYTES, bool FLAT> __device__ __forceinline__ void gather(const TokenArgs& a) {
    typedef typename Unit<BYTES>::type Vector;
    const u32 layer = blockIdx.z;                        // range [0, num_layers)
    const u32 role = blockIdx.y;                         // range [0, roles of the launch)
    const u32 first = blockIdx.x * CHUNK + threadIdx.x;  // range [0, num_units + CHUNK)
    const Place place = a.pages.places[layer * a.pages.num_roles + a.pages.first_role + role];
    Vector data[VECTORS];
    u64 target[VECTORS];
    u64 page[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // The last block reads its last unit again rather than branch around a load.
        const u32 unit = min(first + v * THREADS, a.num_units - 1);  // range [0, num_units)
        const TokenUnit u = token_unit<BYTES, FLAT>(a, layer, role, unit);
        // One entry serves a whole token, so a warp reads the same two words: one transaction.
        const i32 slot = __ldg(a.mapping + 2 * static_cast<u64>(u.token));
        const i32 within = __ldg(a.mapping + 2 * static_cast<u64>(u.token) + 1);
        const u64 token = token_address(a.pages, place, slot, within);
        page[v] = token ? token + u.in_token : 0;
        target[v] = u.array;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        // Without a page, any readable address does: the value is replaced below.
        data[v] = load_once<Vector>(page[v] ? page[v] : reinterpret_cast<u64>(a.pages.places));
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (!page[v]) splat(data[v], 0);
        if (first + v * THREADS < a.num_units) store(target[v], data[v]);
    }
}

#define GATHER(NAME, BYTES, FLAT) \
    KERNEL(NAME##_##BYTES, TokenArgs) { gather<BYTES, FLAT>(a); }
GATHER(gather_flat, 16, true)
GATHER(gather, 16, false)
GATHER(gather, 8, false)
GATHER(gather, 4, false)
GATHER(gather, 2, false)
GATHER(gather, 1, false)
