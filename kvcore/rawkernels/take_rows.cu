// Rows of a page table as a dense table: row i of the result is row rows[i], or -1 where that is
// negative or past the table. grid.x: blocks of THREADS units of [num_rows * units of a row].

struct RowArgs {
    u64 table;
    i64 table_stride;   // bytes from row to row
    u64 out;
    i64 out_stride;     // bytes from row to row
    const i32* rows;    // [num_out]
    u32 table_rows;
    u32 num_units;      // rows of the result * units of a row, below 2^31
    Divider row_units;
    u32 reserved;
};

template <int BYTES> __device__ __forceinline__ void take(const RowArgs& a) {
    typedef typename Unit<BYTES>::type Vector;
    const u32 unit = blockIdx.x * THREADS + threadIdx.x;  // range [0, num_units + THREADS)
    if (unit >= a.num_units) return;
    const u32 i = quotient(unit, a.row_units);            // range [0, rows of the result)
    const u32 part = unit - i * a.row_units.div;          // range [0, units of a row)
    const i32 row = a.rows[i];
    Vector data;
    splat(data, 0xffffffffu);  // -1 in every cell
    if (row >= 0 && static_cast<u32>(row) < a.table_rows) {
        data = *reinterpret_cast<const Vector*>(a.table + row * a.table_stride + part * BYTES);
    }
    *reinterpret_cast<Vector*>(a.out + i * a.out_stride + part * BYTES) = data;
}

extern "C" __global__ void __launch_bounds__(THREADS) take_rows_16(const __grid_constant__ RowArgs a) {
    take<16>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) take_rows_8(const __grid_constant__ RowArgs a) {
    take<8>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) take_rows_4(const __grid_constant__ RowArgs a) {
    take<4>(a);
}
