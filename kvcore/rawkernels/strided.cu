// One array into another of the same shape and item size, each with strides of its own.
//
// grid.x: blocks of THREADS units of the array in row-major order.

#define MAX_DIMS 9  // NumPy arrays of the library have fewer; the last one cuts an item into units

struct StridedArgs {
    u64 source;
    u64 target;
    i64 source_strides[MAX_DIMS];  // bytes, perhaps negative
    i64 target_strides[MAX_DIMS];
    Divider sizes[MAX_DIMS];
    u32 num_dims;
    u32 num_units;  // below 2^31
    u32 reserved;
};

template <int BYTES> __device__ __forceinline__ void copy_strided(const StridedArgs& a) {
    typedef typename Unit<BYTES>::type Vector;
    u32 rest = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_units + THREADS)
    if (rest >= a.num_units) return;
    u64 source = a.source;
    u64 target = a.target;
    for (u32 d = a.num_dims; d-- > 0;) {
        const u32 outer = quotient(rest, a.sizes[d]);          // index into the dimensions before d
        const u32 index = rest - outer * a.sizes[d].div;       // range [0, size of d)
        source += index * a.source_strides[d];
        target += index * a.target_strides[d];
        rest = outer;
    }
    *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(source);
}

#define COPY_STRIDED(BYTES) \
    KERNEL(copy_strided_##BYTES, StridedArgs) { copy_strided<BYTES>(a); }
COPY_STRIDED(16)
COPY_STRIDED(8)
COPY_STRIDED(4)
COPY_STRIDED(2)
COPY_STRIDED(1)
