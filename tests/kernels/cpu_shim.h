// What the kernel sources need of CUDA, as plain C++: the grid is a loop, the intrinsics are what
// they stand for. Kernels are made of independent threads, so one after another is exact.

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { unsigned x, y, z; };

static thread_local Index blockIdx;
static thread_local Index threadIdx;

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
inline long long clock64() {
    static thread_local long long ticks = 0;
    return ticks += 1000;
}
template <typename T> inline T min(T a, T b) { return b < a ? b : a; }

// Runs every thread of a grid. Blocks go in an order that depends on `seed`, threads backwards
// where it is odd: a kernel that relies on either is wrong.
template <typename Args, typename Kernel>
void run_grid(
    Kernel kernel, const void* packed, const unsigned* grid, unsigned threads, unsigned seed) {
    Args args;
    std::memcpy(&args, packed, sizeof args);
    const uint64_t blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
    for (uint64_t i = 0; i < blocks; ++i) {
        const uint64_t block = (i + seed) % blocks;
        blockIdx = {static_cast<unsigned>(block % grid[0]),
                    static_cast<unsigned>(block / grid[0] % grid[1]),
                    static_cast<unsigned>(block / grid[0] / grid[1])};
        for (unsigned t = 0; t < threads; ++t) {
            threadIdx = {seed % 2 ? threads - 1 - t : t, 0, 0};
            kernel(args);
        }
    }
}
