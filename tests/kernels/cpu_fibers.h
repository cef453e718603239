// Threads of a block that wait for each other, as contexts that take turns: each runs until it
// waits or ends. Where nobody can go on, that is told like undefined behaviour is, and the end.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define START_SWITCH(keep, bottom, size) __sanitizer_start_switch_fiber(keep, bottom, size)
#define FINISH_SWITCH(keep, bottom, size) __sanitizer_finish_switch_fiber(keep, bottom, size)
#else
#define START_SWITCH(keep, bottom, size) (void)0
#define FINISH_SWITCH(keep, bottom, size) (void)0
#endif

enum class Waits { nobody, warp, block, done };

struct Fiber {
    static const size_t SIZE = 128 << 10;
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[SIZE]};
    Waits waits = Waits::nobody;
    uint64_t given = 0;  // to the rest of the warp
    void* kept = nullptr;
};

// The block of the grid that runs now.
struct Turns {
    std::vector<Fiber> fibers;
    ucontext_t home;
    const void* home_bottom = nullptr;
    size_t home_size = 0;
    unsigned running = 0;
    unsigned threads = 0;
    void (*body)(const void*) = nullptr;
    const void* args = nullptr;

    static void begin();
    void enter(unsigned thread) {
        void* kept = nullptr;
        running = thread;
        threadIdx = {thread, 0, 0};
        START_SWITCH(&kept, fibers[thread].stack.get(), Fiber::SIZE);
        swapcontext(&home, &fibers[thread].context);
        FINISH_SWITCH(kept, nullptr, nullptr);
        (void)kept;
    }
    void leave(Waits waits) {
        Fiber& fiber = fibers[running];
        fiber.waits = waits;
        START_SWITCH(waits == Waits::done ? nullptr : &fiber.kept, home_bottom, home_size);
        swapcontext(&fiber.context, &home);
        FINISH_SWITCH(fiber.kept, &home_bottom, &home_size);
    }
    // Lets go those of [first, last) that wait for `what`, if all of them do that are not done.
    bool release(unsigned first, unsigned last, Waits what) {
        bool any = false;
        for (unsigned t = first; t < last; ++t) {
            if (fibers[t].waits == Waits::done) continue;
            if (fibers[t].waits != what) return false;
            any = true;
        }
        for (unsigned t = first; t < last; ++t) {
            if (fibers[t].waits == what) fibers[t].waits = Waits::nobody;
        }
        return any;
    }
    bool release_all() {
        bool any = false;
        for (unsigned t = 0; t < threads; t += 32) any |= release(t, t + 32, Waits::warp);
        return any || release(0, threads, Waits::block);
    }
    void run(unsigned count, bool backwards) {
        threads = count;
        if (fibers.size() < count) fibers = std::vector<Fiber>(count);
        for (unsigned t = 0; t < count; ++t) {
            Fiber& fiber = fibers[t];
            fiber.waits = Waits::nobody;
            fiber.kept = nullptr;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = Fiber::SIZE;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, begin, 0);
        }
        do {
            for (unsigned i = 0; i < count; ++i) {
                const unsigned t = backwards ? count - 1 - i : i;
                if (fibers[t].waits == Waits::nobody) enter(t);
            }
        } while (release_all());
        for (unsigned t = 0; t < count; ++t) {
            if (fibers[t].waits == Waits::done) continue;
            fprintf(stderr, "runtime error: thread %u waits for others that do not come\n", t);
            abort();
        }
    }
};

static thread_local Turns turns;

void Turns::begin() {
    FINISH_SWITCH(nullptr, &turns.home_bottom, &turns.home_size);
    turns.body(turns.args);
    turns.leave(Waits::done);
}

inline void __syncthreads() { turns.leave(Waits::block); }

// Every thread of the warp gives a value and then sees all of them; `mask` must name them all.
template <typename Look> inline auto exchange(unsigned mask, uint64_t value, Look look) {
    if (mask != 0xffffffffu) fprintf(stderr, "runtime error: not the whole warp\n");
    const unsigned self = turns.running;
    turns.fibers[self].given = value;
    turns.leave(Waits::warp);
    const auto found = look(&turns.fibers[self / 32 * 32], self % 32);
    turns.leave(Waits::warp);
    return found;
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    return exchange(mask, vote, [](const Fiber* warp, unsigned) {
        unsigned votes = 0;
        for (unsigned lane = 0; lane < 32; ++lane) votes |= (warp[lane].given & 1) << lane;
        return votes;
    });
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned step) {
    return exchange(mask, static_cast<uint64_t>(value), [=](const Fiber* warp, unsigned lane) {
        return lane < step ? value : static_cast<T>(warp[lane - step].given);
    });
}
