// Rows of a page table as a dense table: row i of the result is row rows[i], and -1 in every cell
// that the table does not have. grid.x: blocks of THREADS units of [rows * units of a row].

struct RowArgs {
    u64 table;
    i64 table_stride;   // bytes from row to row
    u64 out;
    i64 out_stride;     // bytes from row to row
    const i32* rows;    // [num_out]
    u32 table_rows;
    u32 num_units;      // rows of the result * units of a row, below 2^31
    Divider row_units;  // units of a row of the result
    u32 table_units;    // units of a row of the table
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
    if (row >= 0 && static_cast<u32>(row) < a.table_rows && part < a.table_units) {
        data = *reinterpret_cast<const Vector*>(a.table + row * a.table_stride + part * BYTES);
    }
    *reinterpret_cast<Vector*>(a.out + i * a.out_stride + part * BYTES) = data;
}

KERNEL(take_rows_16, RowArgs) { take<16>(a); }
KERNEL(take_rows_8, RowArgs) { take<8>(a); }
KERNEL(take_rows_4, RowArgs) { take<4>(a); }
