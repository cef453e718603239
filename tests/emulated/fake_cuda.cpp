// A driver without a GPU, for tests: what kvcore calls of libcuda, on host memory. Work runs at
// once, kernels are functions of the shared library that tests/cpu_kernels.py builds.
//
// It is strict where a real driver is strict or undefined: contexts, handles, sizes, alignments.
// And it fails on demand: fake_fail("cuMemCreate", 3, code) makes the third call from now on fail.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

typedef int Result;
typedef unsigned long long Address;
typedef char* Context;

static const Result SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101;
static const Result INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_SUPPORTED = 801;

static const size_t GRAIN = 2 << 20;
static const size_t TOTAL = 1ull << 36;
static const int USUAL_SHARED = 48 << 10, MOST_SHARED = 99 << 10;
static const int DEVICES = 2;

struct Location { int type, id; };
struct Properties { int type, handle_types; Location location; };
struct Access { Location location; int flags; };
struct Physical { int file; size_t size; int device; int uses; };
struct Mapping { size_t size; Physical* memory; };
struct Block { size_t size; int device; };
typedef void (*Kernel)(const void*, const unsigned*, unsigned, unsigned, unsigned);

static std::recursive_mutex lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

static char contexts[DEVICES];
static thread_local std::vector<Context> stack;
static size_t used[DEVICES];
static std::map<void*, Context> streams, events;
static std::map<Address, Mapping> mappings;
static std::map<Address, size_t> ranges;
static std::map<Address, Block> blocks;
static std::map<void*, size_t> pinned;
static std::map<Kernel, int> shared_limits;
static long handles, launches;
static bool capturing, no_virtual_memory;

struct Failure { std::string call; int countdown, code; };
static Failure failure;
static Result failing(const char* call) {
    LOCKED;
    if (failure.call != call || --failure.countdown != 0) return SUCCESS;
    return failure.code;
}
#define MAY_FAIL if (Result code = failing(__func__)) return code
#define API extern "C" Result

// ---- for the tests ------------------------------------------------------------------------------

extern "C" void fake_fail(const char* call, int countdown, int code) {
    LOCKED;
    failure = {call, countdown, code};
}
extern "C" void fake_counts(long* out) {
    LOCKED;
    const size_t found[] = {streams.size(), events.size(), ranges.size(), mappings.size(),
                            blocks.size(), pinned.size(), used[0], used[1]};
    for (int i = 0; i < 8; ++i) out[i] = static_cast<long>(found[i]);
    out[8] = handles;
    out[9] = launches;
}
extern "C" void fake_capturing(int on) { capturing = on; }
extern "C" void fake_no_virtual_memory(int on) { no_virtual_memory = on; }

// ---- devices and contexts -----------------------------------------------------------------------

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
API cuDeviceGetCount(int* count) { *count = DEVICES; return SUCCESS; }
API cuDeviceGet(int* device, int index) {
    if (index < 0 || index >= DEVICES) return INVALID_DEVICE;
    *device = index;
    return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 102 && no_virtual_memory ? 0 : attribute == 97 ? MOST_SHARED : 1;
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(Context* context, int device) {
    *context = contexts + device;
    return SUCCESS;
}
API cuCtxGetCurrent(Context* context) {
    *context = stack.empty() ? nullptr : stack.back();
    return SUCCESS;
}
API cuCtxSetCurrent(Context context) {
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return SUCCESS;
}
API cuCtxPushCurrent_v2(Context context) { stack.push_back(context); return SUCCESS; }
API cuCtxPopCurrent_v2(Context* context) {
    if (stack.empty()) return INVALID_CONTEXT;
    if (context) *context = stack.back();
    stack.pop_back();
    return SUCCESS;
}
API cuCtxGetDevice(int* device) {
    if (stack.empty()) return INVALID_CONTEXT;
    *device = static_cast<int>(stack.back() - contexts);
    return SUCCESS;
}
API cuCtxSynchronize() { return stack.empty() ? INVALID_CONTEXT : SUCCESS; }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    int device;
    if (Result code = cuCtxGetDevice(&device)) return code;
    *free = TOTAL - used[device];
    *total = TOTAL;
    return SUCCESS;
}

// ---- streams and events -------------------------------------------------------------------------

static Context of_stream(void* stream) {
    if (reinterpret_cast<size_t>(stream) <= 2) return stack.empty() ? nullptr : stack.back();
    LOCKED;
    const auto found = streams.find(stream);
    return found == streams.end() ? nullptr : found->second;
}
static Result make(std::map<void*, Context>& all, void** handle) {
    if (stack.empty()) return INVALID_CONTEXT;
    LOCKED;
    *handle = malloc(64);
    all[*handle] = stack.back();
    return SUCCESS;
}
static Result destroy(std::map<void*, Context>& all, void* handle) {
    LOCKED;
    if (!all.erase(handle)) return INVALID_HANDLE;
    free(handle);
    return SUCCESS;
}
API cuStreamCreate(void** stream, unsigned) { MAY_FAIL; return make(streams, stream); }
API cuStreamDestroy_v2(void* stream) { return destroy(streams, stream); }
API cuStreamGetCtx(void* stream, Context* context) {
    *context = of_stream(stream);
    return *context ? SUCCESS : INVALID_HANDLE;
}
API cuStreamSynchronize(void* stream) { return of_stream(stream) ? SUCCESS : INVALID_HANDLE; }
API cuStreamQuery(void* stream) {
    MAY_FAIL;
    return of_stream(stream) ? SUCCESS : INVALID_HANDLE;
}
API cuStreamIsCapturing(void* stream, int* status) {
    MAY_FAIL;
    *status = capturing;
    return of_stream(stream) ? SUCCESS : INVALID_HANDLE;
}
API cuEventCreate(void** event, unsigned) { MAY_FAIL; return make(events, event); }
API cuEventDestroy_v2(void* event) { return destroy(events, event); }
API cuEventRecord(void* event, void* stream) {
    MAY_FAIL;
    LOCKED;
    const auto found = events.find(event);
    const Context its = of_stream(stream);
    return found != events.end() && its && its == found->second ? SUCCESS : INVALID_HANDLE;
}
API cuEventQuery(void* event) {
    MAY_FAIL;
    LOCKED;
    return events.count(event) ? SUCCESS : INVALID_HANDLE;
}
API cuEventSynchronize(void* event) { return cuEventQuery(event); }
API cuStreamWaitEvent(void* stream, void* event, unsigned) {
    MAY_FAIL;
    return of_stream(stream) ? cuEventQuery(event) : INVALID_HANDLE;
}

// ---- virtual memory -----------------------------------------------------------------------------

static void close_if_unused(Physical* memory) {
    if (--memory->uses) return;
    used[memory->device] -= memory->size;
    delete memory;
}
static void* nothing_at(Address address, size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(reinterpret_cast<void*>(address), size, PROT_NONE, flags, -1, 0);
}
API cuMemGetAllocationGranularity(size_t* grain, const Properties*, int) {
    *grain = GRAIN;
    return SUCCESS;
}
API cuMemAddressReserve(Address* address, size_t size, size_t, Address, unsigned long long) {
    MAY_FAIL;
    if (!size || size % GRAIN) return INVALID_VALUE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* found = mmap(nullptr, size + GRAIN, PROT_NONE, flags, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    const Address start = reinterpret_cast<Address>(found);
    *address = (start + GRAIN - 1) / GRAIN * GRAIN;
    if (*address > start) munmap(found, *address - start);
    const Address rest = start + GRAIN - *address;
    if (rest) munmap(reinterpret_cast<void*>(*address + size), rest);
    LOCKED;
    ranges[*address] = size;
    return SUCCESS;
}
API cuMemAddressFree(Address address, size_t size) {
    LOCKED;
    const auto found = ranges.find(address);
    if (found == ranges.end() || found->second != size) return INVALID_VALUE;
    const auto next = mappings.lower_bound(address);
    if (next != mappings.end() && next->first < address + size) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), size);
    ranges.erase(found);
    return SUCCESS;
}
API cuMemCreate(void** handle, size_t size, const Properties* p, unsigned long long) {
    MAY_FAIL;
    const bool right = p->type == 1 && p->location.type == 1 && p->location.id < DEVICES;
    if (!size || size % GRAIN || !right) return INVALID_VALUE;
    LOCKED;
    if (used[p->location.id] + size > TOTAL) return OUT_OF_MEMORY;
    Physical* memory = new Physical{memfd_create("fake", 0), size, p->location.id, 1};
    if (ftruncate(memory->file, static_cast<off_t>(size))) return OUT_OF_MEMORY;
    used[memory->device] += size;
    *handle = memory;
    ++handles;
    return SUCCESS;
}
API cuMemRelease(void* handle) {
    LOCKED;
    --handles;
    close(static_cast<Physical*>(handle)->file);  // what is mapped stays
    close_if_unused(static_cast<Physical*>(handle));
    return SUCCESS;
}
API cuMemMap(Address address, size_t size, size_t offset, void* handle, unsigned long long) {
    MAY_FAIL;
    Physical* memory = static_cast<Physical*>(handle);
    if (address % GRAIN || size != memory->size || offset) return INVALID_VALUE;
    LOCKED;
    const auto next = mappings.lower_bound(address);
    if (next != mappings.end() && next->first < address + size) return INVALID_VALUE;
    void* at = reinterpret_cast<void*>(address);
    if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    ++memory->uses;
    mappings[address] = {size, memory};
    return SUCCESS;
}
API cuMemUnmap(Address address, size_t size) {
    MAY_FAIL;
    LOCKED;
    for (const Address end = address + size; address < end;) {
        const auto found = mappings.find(address);
        if (found == mappings.end()) return INVALID_VALUE;
        const Mapping mapping = found->second;
        nothing_at(address, mapping.size);
        mappings.erase(found);
        close_if_unused(mapping.memory);
        address += mapping.size;
    }
    return SUCCESS;
}
API cuMemSetAccess(Address address, size_t size, const Access* access, size_t count) {
    MAY_FAIL;
    if (count != 1 || access->flags != 3 || access->location.type != 1) return INVALID_VALUE;
    void* at = reinterpret_cast<void*>(address);
    return mprotect(at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}

// ---- plain memory and copies --------------------------------------------------------------------

API cuMemAlloc_v2(Address* address, size_t size) {
    MAY_FAIL;
    int device;
    if (Result code = cuCtxGetDevice(&device)) return code;
    if (!size) return INVALID_VALUE;
    LOCKED;
    if (used[device] + size > TOTAL) return OUT_OF_MEMORY;
    void* found = aligned_alloc(512, (size + 511) / 512 * 512);
    memset(found, 0xCD, size);
    *address = reinterpret_cast<Address>(found);
    blocks[*address] = {size, device};
    used[device] += size;
    return SUCCESS;
}
API cuMemFree_v2(Address address) {
    LOCKED;
    const auto found = blocks.find(address);
    if (found == blocks.end()) return INVALID_VALUE;
    used[found->second.device] -= found->second.size;
    free(reinterpret_cast<void*>(address));
    blocks.erase(found);
    return SUCCESS;
}
API cuMemHostAlloc(void** address, size_t size, unsigned flags) {
    MAY_FAIL;
    if (stack.empty()) return INVALID_CONTEXT;
    if (!size || flags > 7) return INVALID_VALUE;
    *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    memset(*address, 0xCD, size);
    LOCKED;
    pinned[*address] = size;
    return SUCCESS;
}
API cuMemFreeHost(void* address) {
    LOCKED;
    if (!pinned.erase(address)) return INVALID_VALUE;
    free(address);
    return SUCCESS;
}
static Result copy(void* to, const void* from, size_t size, void* stream) {
    const Context its = of_stream(stream);
    if (!its || stack.empty() || its != stack.back()) return INVALID_HANDLE;
    memcpy(to, from, size);
    return SUCCESS;
}
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, void* stream) {
    MAY_FAIL;
    return copy(reinterpret_cast<void*>(to), from, size, stream);
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, void* stream) {
    MAY_FAIL;
    return copy(to, reinterpret_cast<void*>(from), size, stream);
}
API cuMemcpyPeerAsync(Address to, Context there, Address from, Context here, size_t size,
                      void* stream) {
    MAY_FAIL;
    LOCKED;
    const auto target = blocks.find(to), source = blocks.find(from);
    if (target == blocks.end() || source == blocks.end()) return INVALID_VALUE;
    if (target->second.size < size || source->second.size < size) return INVALID_VALUE;
    if (there != contexts + target->second.device || here != contexts + source->second.device)
        return INVALID_CONTEXT;
    return copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size, stream);
}

// ---- launches, errors, look-up ------------------------------------------------------------------

API cuFuncSetAttribute(Kernel kernel, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > MOST_SHARED) return INVALID_VALUE;
    LOCKED;
    shared_limits[kernel] = value;
    return SUCCESS;
}
API cuLaunchKernel(Kernel kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned shared, void* stream, void** params, void**) {
    MAY_FAIL;
    const Context its = of_stream(stream);
    if (!its || stack.empty() || its != stack.back()) return INVALID_HANDLE;
    if (!x || !y || !z || !threads || y > 65535 || z > 65535) return INVALID_VALUE;
    const auto limit = shared_limits.find(kernel);
    const int most = limit == shared_limits.end() ? USUAL_SHARED : limit->second;
    if (shared > static_cast<unsigned>(most)) return INVALID_VALUE;
    const unsigned grid[3] = {x, y, z};
    kernel(params[0], grid, threads, shared, static_cast<unsigned>(++launches));
    return SUCCESS;
}
API cuGetErrorName(int code, const char** name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
    return SUCCESS;
}
API cuGetErrorString(int, const char** text) { *text = "as the test wanted"; return SUCCESS; }

static Result unsupported() { return NOT_SUPPORTED; }

API cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
    void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *found = dlsym(self, (std::string(name) + "_v2").c_str());
    if (!*found) *found = dlsym(self, name);
    if (!*found) *found = reinterpret_cast<void*>(unsupported);
    if (status) *status = 0;
    return SUCCESS;
}
