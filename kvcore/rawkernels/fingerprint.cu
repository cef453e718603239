// The test pattern: writes it into tokens, and counts the words of tokens that differ from it. Byte
// by byte, because a word may span two heads, which may lie anywhere; speed does not matter here.
//
// grid.x: blocks of THREADS words of [num_tokens * words of a token], grid.y: roles, grid.z: layers

struct FingerArgs {
    Pages pages;
    const i32* mapping;    // [num_tokens, 2]: slot, token within the block
    const i64* keys;       // [num_tokens]
    i32* bad;              // [num_tokens], verify only; zeros before the launch
    u32 num_words;         // num_tokens * words of a token, below 2^31
    u32 token_bytes;       // bytes of a token, heads first
    Divider token_words;   // words of a token, the last one perhaps shorter
    Divider head_bytes;    // bytes of a head
};

// SplitMix64's finaliser over (key, layer, role, word); kvcore.device.reference.fingerprint.
__device__ __forceinline__ u32 pattern(i64 key, u32 layer, u32 role, u32 word) {
    u64 z = static_cast<u64>(key) * 0x9E3779B97F4A7C15ull + (static_cast<u64>(layer) << 40) +
            (static_cast<u64>(role) << 32) + word;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<u32>((z ^ (z >> 31)) >> 32);
}

template <bool WRITE> __device__ __forceinline__ void fingerprint(const FingerArgs& a) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_words + THREADS)
    if (index >= a.num_words) return;
    const u32 layer = blockIdx.z;                    // range [0, num_layers)
    const u32 role = blockIdx.y;                     // range [0, num_roles)
    const u32 n = quotient(index, a.token_words);    // range [0, num_tokens)
    const u32 word = index - n * a.token_words.div;  // range [0, words of a token)
    const i32* entry = a.mapping + 2 * static_cast<u64>(n);
    const Place place = a.pages.places[layer * a.pages.num_roles + role];
    const u64 token = token_address(a.pages, place, entry[0], entry[1]);
    if (!token) return;
    const u32 wanted = pattern(a.keys[n], layer, role, word);
    bool differs = false;
    for (u32 k = 0; k < 4; ++k) {       // bytes of the word, lowest first
        const u32 byte = 4 * word + k;  // range [0, token_bytes) where it counts
        if (byte >= a.token_bytes) break;
        const u32 head = quotient(byte, a.head_bytes);       // range [0, heads)
        const u32 in_head = byte - head * a.head_bytes.div;  // range [0, bytes of a head)
        u8* at = reinterpret_cast<u8*>(token + head * a.pages.head_stride + in_head);
        const u8 value = static_cast<u8>(wanted >> (8 * k));
        if (WRITE) {
            *at = value;
        } else {
            differs |= *at != value;
        }
    }
    if (!WRITE && differs) atomicAdd(a.bad + n, 1);
}

KERNEL(write_fingerprints, FingerArgs) { fingerprint<true>(a); }
KERNEL(verify_fingerprints, FingerArgs) { fingerprint<false>(a); }
