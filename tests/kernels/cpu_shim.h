// What the kernel sources need of CUDA, as plain C++: the grid is a loop, the intrinsics are what
// they stand for. Where threads are independent, one after another is exact; the others take turns.

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define __shared__ static thread_local
#define DYNAMIC_SHARED(NAME) int* const NAME = reinterpret_cast<int*>(dynamic_shared)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { unsigned x, y, z; };

static thread_local Index blockIdx;
static thread_local Index threadIdx;
static thread_local Index gridDim;
static thread_local unsigned char* dynamic_shared;

#include "cpu_fibers.h"

template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcv(const T* p) { return *p; }
template <typename T> inline void __stcs(T* p, const T& v) { *p = v; }
template <typename T> inline void __stwb(T* p, const T& v) { *p = v; }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int atomicAdd(int* p, int v) {
    const int old = *p;
    *p += v;
    return old;
}
inline int atomicMin(int* p, int v) {
    const int old = *p;
    *p = v < old ? v : old;
    return old;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline long long clock64() {
    static thread_local long long ticks = 0;
    return ticks += 1000;
}
template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }

// Runs every thread of a grid. Blocks go in an order that depends on `seed`, threads backwards
// where it is odd: a kernel that relies on either is wrong. Shared memory has exactly `shared`
// bytes, with undefined content in each block. TURNS: threads wait for each other.
template <typename Args, bool TURNS, void (*KERNEL)(Args)>
void run_grid(
    const void* packed, const unsigned* grid, unsigned threads, unsigned shared, unsigned seed) {
    Args args;
    std::memcpy(&args, packed, sizeof args);
    const std::unique_ptr<unsigned char[]> room(new unsigned char[shared]);
    dynamic_shared = room.get();
    gridDim = {grid[0], grid[1], grid[2]};
    turns.args = &args;
    turns.body = [](const void* its) { KERNEL(*static_cast<const Args*>(its)); };
    const uint64_t blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
    for (uint64_t i = 0; i < blocks; ++i) {
        const uint64_t block = (i + seed) % blocks;
        blockIdx = {static_cast<unsigned>(block % grid[0]),
                    static_cast<unsigned>(block / grid[0] % grid[1]),
                    static_cast<unsigned>(block / grid[0] / grid[1])};
        if (shared) std::memset(dynamic_shared, 0xa5, shared);
        if (TURNS) {
            turns.run(threads, seed % 2);
            continue;
        }
        for (unsigned t = 0; t < threads; ++t) {
            threadIdx = {seed % 2 ? threads - 1 - t : t, 0, 0};
            KERNEL(args);
        }
    }
}
