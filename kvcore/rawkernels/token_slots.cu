// The number of each token's place in a pool, counted in tokens. grid.x: blocks of THREADS tokens.

struct TokenSlotArgs {
    const i32* mapping;  // [num_tokens, 2]: slot, token within the block
    i64* out;            // [num_tokens]
    i64 scale;           // tokens from slot to slot
    i64 offset;          // tokens before slot 0
    i64 num_tokens;
};

KERNEL(token_slots, TokenSlotArgs) {
    const i64 token = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (token >= a.num_tokens) return;  // range [0, num_tokens + THREADS)
    const i64 slot = a.mapping[2 * token];
    const i64 within = a.mapping[2 * token + 1];
    a.out[token] = slot < 0 ? -1 : slot * a.scale + a.offset + within;
}
