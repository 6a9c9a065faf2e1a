// Enough of CUDA C++ for a CPU to run the kernels of select, one CTA after another: what they compute can be tested
// without a GPU; how long they take and what memory outside their arrays holds cannot.
//
// Every thread of a CTA is a fiber. A fiber runs until it has to wait: at __syncthreads for all threads of the CTA, at a
// warp's operation for the 32 of its warp. Then the next one runs. A warp's operation puts each lane's value down, waits,
// and reads what it needs; values lie in two places in turns, so that a fast lane cannot write over a slow one's. Threads
// take turns in ascending order in one CTA and in descending order in the next, and each goes as far as it can: who relies
// on a barrier that is not there reads what is not yet written in one of the two.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATED 1
#define __CUDA_ARCH__ 800
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
#define __grid_constant__
#define __shared__ static
#define DYNAMIC_SHARED(name) char* name = emulator::dynamic_memory.data()

struct uint4 { uint32_t x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx;

namespace emulator {
constexpr int STACK = 1 << 16;
struct Fiber { ucontext_t context; std::vector<char> stack; int waits_for = 0; bool done = false; int turn = 0; };
static std::vector<Fiber> fibers;
static std::vector<char> dynamic_memory;
static ucontext_t scheduler;
static int64_t lanes[2][32][32];  // [turn][warp][lane]
static int at_barrier, at_warp[32];

enum { NOTHING, BARRIER, WARP };

static Fiber& self() { return fibers[threadIdx.x]; }

static void wait(int what) {
  Fiber& fiber = self();
  fiber.waits_for = what;
  swapcontext(&fiber.context, &scheduler);
}

static void barrier() {
  if (++at_barrier < (int)fibers.size()) return wait(BARRIER);
  at_barrier = 0;
  for (Fiber& fiber : fibers) if (fiber.waits_for == BARRIER) fiber.waits_for = NOTHING;
}

static void meet_warp() {
  const unsigned warp = threadIdx.x / 32;
  if (++at_warp[warp] < 32) return wait(WARP);
  at_warp[warp] = 0;
  for (unsigned lane = 0; lane < 32; lane++) fibers[warp * 32 + lane].waits_for = NOTHING;
}

// Every lane's value, in order.
static const int64_t* exchange(int64_t mine) {
  const unsigned warp = threadIdx.x / 32;
  const int turn = self().turn ^= 1;
  lanes[turn][warp][threadIdx.x % 32] = mine;
  meet_warp();
  return lanes[turn][warp];
}

static void (*body)();
static void run_fiber() {
  body();
  self().done = true;
  swapcontext(&self().context, &scheduler);
}

// One CTA of `threads`. Exits the process where threads wait for each other in vain: a kernel that would hang.
static void run(int threads, void (*kernel)()) {
  body = kernel;
  fibers.resize(threads);
  at_barrier = 0;
  std::fill(at_warp, at_warp + 32, 0);
  std::fill(dynamic_memory.begin(), dynamic_memory.end(), 0x7f);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(STACK);
    fiber.waits_for = NOTHING;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (int left = threads; left > 0;) {
    bool moved = false;
    for (int place = 0; place < threads; place++) {
      const int thread = blockIdx.x % 2 ? threads - 1 - place : place;
      Fiber& fiber = fibers[thread];
      if (fiber.done || fiber.waits_for != NOTHING) continue;
      moved = true;
      threadIdx.x = thread;
      swapcontext(&scheduler, &fiber.context);
      left -= fiber.done;
    }
    if (!moved) {
      std::fprintf(stderr, "the kernel hangs: some threads wait for others that do not come\n");
      std::abort();
    }
  }
}
}  // namespace emulator

template <class To, class From> static inline To same_bits(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <class T> static inline T __ldg(const T* pointer) { return *pointer; }
static inline int atomicAdd(int* pointer, int x) { int old = *pointer; *pointer += x; return old; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

static inline void __syncthreads() { emulator::barrier(); }
static inline void __syncwarp() { emulator::exchange(0); }
static inline int __shfl_sync(uint32_t, int x, int lane) { return (int)emulator::exchange(x)[lane & 31]; }
static inline int __shfl_up_sync(uint32_t, int x, int step) {
  int lane = threadIdx.x % 32;
  return (int)emulator::exchange(x)[lane >= step ? lane - step : lane];
}
static inline int __shfl_xor_sync(uint32_t, int x, int step) { return (int)emulator::exchange(x)[threadIdx.x % 32 ^ step]; }
static inline uint32_t __ballot_sync(uint32_t, bool flag) {
  const int64_t* all = emulator::exchange(flag);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (uint32_t)all[lane] << lane;
  return bits;
}
static inline bool __any_sync(uint32_t mask, bool flag) { return __ballot_sync(mask, flag) != 0; }
static inline int __reduce_add_sync(uint32_t, int x) {
  const int64_t* all = emulator::exchange(x);
  int64_t sum = 0;
  for (int lane = 0; lane < 32; lane++) sum += all[lane];
  return (int)sum;
}
static inline int __reduce_max_sync(uint32_t, int x) { const int64_t* all = emulator::exchange(x); return (int)*std::max_element(all, all + 32); }
static inline int __reduce_min_sync(uint32_t, int x) { const int64_t* all = emulator::exchange(x); return (int)*std::min_element(all, all + 32); }

// What the kernels do by PTX.
static inline float half_to_float(unsigned short raw) { return (float)same_bits<_Float16>(raw); }
static inline uint32_t half_toward_zero(float x) {
  if (x != x) return 0x7fff;
  uint16_t bits = same_bits<uint16_t>((_Float16)x);
  if (std::fabs(half_to_float(bits)) > std::fabs(x)) bits--;  // rounded up, to infinity too
  return bits == 0x8000 ? 0 : bits;
}
static inline uint32_t halves(float first, float second) { return half_toward_zero(second) << 16 | half_toward_zero(first); }
static inline uint32_t sign_masks(uint32_t both) { return (both >> 15 & 0x10001) * 0xffff; }
static inline void store_if(uint32_t wanted, int* row, int place, int x) { if (wanted) row[place] = x; }
typedef float* Place;
static inline Place place_of(float* list) { return list; }
#define append_if(wanted, place, x, column) \
  if (wanted) { *(place) = (x); ((int*)(place))[THREADS * SLOTS] = (column); (place)++; }
static inline float again(float x) { return x; }
static inline void prefetch_line(const void*) {}
