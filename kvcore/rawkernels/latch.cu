// For tests and benches only: work that holds a stream until told, for a time, or the whole chip.

struct LatchArgs {
    const volatile i32* flag;  // host memory; nonzero opens the latch
    i32* gave_up;              // host memory; set to 1 if max_cycles passed first
    i64 max_cycles;            // bail-out, so that a failed test cannot hang the device
};

KERNEL(latch, LatchArgs) {
    const i64 start = clock64();
    while (*a.flag == 0) {
        if (clock64() - start > a.max_cycles) {
            *a.gave_up = 1;
            return;
        }
    }
}

struct DelayArgs {
    i64 cycles;
};

KERNEL(delay, DelayArgs) {
    const i64 start = clock64();
    while (clock64() - start < a.cycles) {
    }
}

struct BusyArgs {
    float* out;  // [grid * THREADS]
    i64 rounds;
};

// Arithmetic without memory traffic, to see what runs beside it.
KERNEL(busy, BusyArgs) {
    float x = threadIdx.x * 1.0f;
    for (i64 i = 0; i < a.rounds; ++i) x = x * 0.999f + 1.0f;
    a.out[blockIdx.x * THREADS + threadIdx.x] = x;  // range [0, grid * THREADS)
}
