// What the kernels of select on NVIDIA share: how a row is read and written, and the k-th greatest of the keys in registers.
// It stands before each of them when NVRTC compiles it; THREADS, SLOTS and DTYPE are given there.

#define FULL 0xffffffffu
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LOWEST = -2139095041;   // the ordered key of -inf; what is not eligible has it
constexpr int HIGHEST = 2139095040;   // the ordered key of +inf
constexpr int WARPS = THREADS / 32;
constexpr int BITS = 11, BINS = 1 << BITS;
constexpr int CANDIDATES = THREADS < 512 ? 64 : 128;  // that are ranked directly
constexpr int TEAM = THREADS / CANDIDATES;            // threads that rank one of them
constexpr int NOTHING_BINS = 32;       // the last of them is that of -inf, below it negative NaN would be

#ifndef EMULATED  // tests run the kernels on a CPU, with these from elsewhere
#define DYNAMIC_SHARED(name) extern __shared__ char name[]
__device__ __forceinline__ float half_to_float(unsigned short raw) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(raw));
  return wide;
}
// Two numbers in half precision, truncated, the first in the lower half; a negative zero becomes a positive one.
__device__ __forceinline__ u32 halves(float first, float second) {
  u32 both;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  asm("add.rn.f16x2 %0, %0, %1;" : "+r"(both) : "r"(0));
  return both;
}
// All ones in each half whose number is negative.
__device__ __forceinline__ u32 sign_masks(u32 both) {
  u32 masks;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(masks) : "r"(both));
  return masks;
}
// row[place] = x, where wanted, without a branch and with one instruction for the address.
__device__ __forceinline__ void store_if(u32 wanted, int* row, int place, int x) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 at; mad.wide.s32 at, %2, 4, %1; setp.ne.u32 p, %0, 0; @p st.global.b32 [at], %3; }" ::"r"(wanted),
      "l"(row), "r"(place), "r"(x) : "memory");
}
// Value and column to a list in shared memory, without a branch; the place moves on.
typedef u32 Place;
__device__ __forceinline__ Place place_of(const float* list) { return (u32)__cvta_generic_to_shared(list); }
__device__ __forceinline__ void append_if(u32 wanted, Place& place, float x, int column) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %1, 0; @p st.shared.f32 [%0], %2; @p st.shared.b32 [%0 + %4], %3; @p add.u32 %0, %0, 4; }"
      : "+r"(place) : "r"(wanted), "f"(x), "r"(column), "n"(4 * THREADS * SLOTS) : "memory");
}
// x, in a way that keeps the compiler from computing what depends on it once and for all: there are no registers for that.
__device__ __forceinline__ float again(float x) {
  asm volatile("mov.b32 %0, %0;" : "+f"(x));
  return x;
}
__device__ __forceinline__ void prefetch_line(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
#endif

// DTYPE 0: float32, 1: bfloat16, 2: float16
#if DTYPE == 0
typedef float Raw;
#else
typedef unsigned short Raw;
#endif
constexpr int PER = 16 / sizeof(Raw);      // values in a granule

__device__ __forceinline__ float widen(Raw raw) {
#if DTYPE == 0
  return raw;
#elif DTYPE == 1
  return __uint_as_float((u32)raw << 16);
#else
  return half_to_float(raw);
#endif
}

__device__ __forceinline__ int ordered(float x) {  // an int whose order is the float's; NaN is not eligible; -0.0 is 0.0
  int bits = __float_as_int(x);
  int key = bits ^ ((bits >> 31) & 0x7fffffff);
  key = key == -1 ? 0 : key;
  return x > -__int_as_float(0x7f800000) ? key : LOWEST;
}

__device__ __forceinline__ float from_key(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

__device__ __forceinline__ void unpack(const uint4& granule, float (&x)[PER]) {
#if DTYPE == 0
  x[0] = __uint_as_float(granule.x); x[1] = __uint_as_float(granule.y);
  x[2] = __uint_as_float(granule.z); x[3] = __uint_as_float(granule.w);
#else
  u32 words[4] = {granule.x, granule.y, granule.z, granule.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = widen((Raw)(words[i] & 0xffff));
    x[2 * i + 1] = widen((Raw)(words[i] >> 16));
  }
#endif
}

struct Arguments {
  const Raw* scores; i64 stride_scores, columns;
  const void* start; i64 stride_start, start_is_long;
  const void* end; i64 stride_end, end_is_long, next_n;
  const void* table; i64 stride_table, table_is_long, pages, page_size;  // pages < 0: no table; a table may have none
  const void* page_rows; i64 stride_page_rows, page_rows_is_long;
  int* out; i64 stride_out;
  Raw* values; i64 stride_values;
  int* counts; i64 stride_counts;
  i64 k, absolute, sorted;
};

struct Row {
  const Raw* scores; int lower, upper;
  // The granules wholly inside the window: `granules` of them from column `first` on. Single columns lie on both sides.
  int first, granules;
};

struct Shared {
  int partial[2][WARPS];
  int count[WARPS];        // survivors in each warp's list; may exceed its length, then the rest is lost
  int total[2][WARPS];
  int most[WARPS], least[WARPS];
  int bin, before, inside; // where the k-th key lies
  int few_count, few[32];
  int histogram[BINS];
};

__device__ __forceinline__ i64 integer(const void* pointer, i64 index, i64 is_long) {
  return is_long ? ((const i64*)pointer)[index] : (i64)((const int*)pointer)[index];
}

__device__ __forceinline__ Row row_of(const Arguments& a, i64 row) {
  i64 lower = 0, upper = a.columns;
  if (a.start) lower = min(max(integer(a.start, row * a.stride_start, a.start_is_long), 0ll), a.columns);
  if (a.end) {
    u32 request = (u32)row, turn = 0;
    if (a.next_n > 1) {  // a launch has fewer rows than 2^31
      u32 next_n = (u32)min(a.next_n, 1ll << 31);
      request = (u32)row / next_n;
      turn = (u32)row - request * next_n;
    }
    i64 last = max(integer(a.end, request * a.stride_end, a.end_is_long), -(1ll << 40));
    upper = min(max(last - a.next_n + turn + 1, lower), a.columns);
  }
  if (a.pages >= 0) upper = min(upper, lower + a.pages * a.page_size);
  Row r;
  r.scores = a.scores + row * a.stride_scores;
  r.lower = (int)lower;
  r.upper = (int)upper;
  int skew = (int)(((size_t)(r.scores + lower) & 15) / sizeof(Raw));  // columns since the last 16-byte boundary
  r.first = min(r.lower + (skew ? PER - skew : 0), r.upper);
  r.granules = (r.upper - r.first) / PER;
  return r;
}

__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(FULL, x); }

// Sum over the CTA, known to every thread; one barrier. `turn` alternates the scratch.
__device__ __forceinline__ int block_sum(int x, Shared& s, int& turn) {
  int sum = warp_sum(x);
  if ((threadIdx.x & 31) == 0) s.partial[turn][threadIdx.x >> 5] = sum;
  __syncthreads();
  int lane = threadIdx.x & 31;
  sum = warp_sum(lane < WARPS ? s.partial[turn][lane] : 0);
  turn ^= 1;
  return sum;
}

// The greatest key of the CTA, and the least of those that are eligible (or INT_MAX).
__device__ __forceinline__ void block_range(int& most, int& least, Shared& s) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  most = __reduce_max_sync(FULL, most);
  least = __reduce_min_sync(FULL, least);
  if (lane == 0) { s.most[warp] = most; s.least[warp] = least; }
  __syncthreads();
  most = __reduce_max_sync(FULL, s.most[lane % WARPS]);
  least = __reduce_min_sync(FULL, s.least[lane % WARPS]);
}

struct Threshold { int key, need; };  // all above the key are chosen, and `need` of those that equal it

// The bins of two values.
struct Bins {
  u32 ordered;  // two half-precision numbers, so that their bits are ordered as they are
  __device__ __forceinline__ Bins(float first, float second) {
    u32 both = halves(first, second);
    ordered = both ^ (sign_masks(both) | 0x80008000u);
  }
  __device__ __forceinline__ int& first(int* histogram) const { return *(int*)((char*)histogram + (ordered >> 3 & 0x1ffcu)); }
  __device__ __forceinline__ int& second(int* histogram) const { return *(int*)((char*)histogram + (ordered >> 19 & 0x1ffcu)); }
};

// The least float that lies in `bin` or above it; NaN, which nothing reaches, above the bin of +inf.
__device__ __forceinline__ float least_of(int bin) {
  int magnitude = (bin << (16 - BITS)) - 0x8000;
  if (magnitude > 0) return half_to_float((unsigned short)magnitude);
  // Truncated towards zero: a negative value belongs to the bin until its magnitude is that of the next half.
  float beyond = half_to_float((unsigned short)max(-magnitude, 1));
  return -__int_as_float(__float_as_int(beyond) - 1);
}

struct Found { int bin, before, inside, eligible; };  // of the k-th value: its bin, how many lie above, how many in it

// Of a histogram of halves or of anything; one barrier, in its middle. Every warp learns the same, and may still be
// reading the histogram when others go on.
template <bool HALVES>
__device__ __forceinline__ Found find(int k, const int* histogram, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int EACH = BINS / THREADS;  // bins of a lane; warp 0 has the uppermost
  auto bins_of = [&](int thread, int (&count)[EACH]) {
    int first = BINS - (thread + 1) * EACH, sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      bool counts = !HALVES || (first >= NOTHING_BINS && (i > 0 || thread > 0));  // the uppermost is that of NaN
      count[i] = counts ? histogram[first + EACH - 1 - i] : 0;
      sum += count[i];
    }
    return sum;
  };
  auto scan = [&](int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(FULL, x, step);
      if (lane >= step) x += other;
    }
    return x;
  };
  int count[EACH];
  int sum = warp_sum(bins_of(threadIdx.x, count));
  if (lane == 0) s.partial[0][warp] = sum;
  __syncthreads();
  sum = lane < WARPS ? s.partial[0][lane] : 0;
  int end = scan(sum), eligible = __shfl_sync(FULL, end, 31);
  if (eligible <= k) return {0, eligible, 0, eligible};
  int owner = __ffs(__ballot_sync(FULL, end >= k)) - 1;
  int before = __shfl_sync(FULL, end - sum, owner);
  sum = bins_of(owner * 32 + lane, count);
  end = before + scan(sum);
  int lane_of = __ffs(__ballot_sync(FULL, end >= k)) - 1, bin = 0, inside = 0;
  before = end - sum;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (inside == 0) {
      if (before + count[i] >= k) {
        bin = BINS - 1 - (owner * 32 + lane) * EACH - i;
        inside = count[i];
      } else {
        before += count[i];
      }
    }
  }
  return {__shfl_sync(FULL, bin, lane_of), __shfl_sync(FULL, before, lane_of), __shfl_sync(FULL, inside, lane_of), eligible};
}

// How many candidates go before one, by value and then column; TEAM threads each look at their part of them.
__device__ __forceinline__ int rank_of(const u64* candidates, int inside) {
  const int i = threadIdx.x / TEAM;
  if ((threadIdx.x & ~31) / TEAM >= inside) return 0;  // nothing for this warp
  const u64 own = i < inside ? candidates[i] : 0;
  int rank = 0;
#pragma unroll 2
  for (int j = threadIdx.x % TEAM; j < inside; j += TEAM) rank += candidates[j] > own;
#pragma unroll
  for (int step = 1; step < TEAM; step *= 2) rank += __shfl_xor_sync(FULL, rank, step);
  return rank;
}

// A candidate, ordered by value and then lower column.
__device__ __forceinline__ u64 candidate(int key, int column) { return (u64)((u32)key ^ 0x80000000u) << 32 | (u32)~column; }
__device__ __forceinline__ int key_of(u64 candidate) { return (int)((u32)(candidate >> 32) ^ 0x80000000u); }
__device__ __forceinline__ int column_of(u64 candidate) { return (int)~(u32)candidate; }

// The threshold of the need-th candidate, as write_ascending wants it; two barriers.
__device__ __forceinline__ Threshold threshold_of(const u64* candidates, int inside, int need, Shared& s, int& turn) {
  const int rank = rank_of(candidates, inside), i = threadIdx.x / TEAM;
  if (i < inside && rank == need - 1) s.bin = key_of(candidates[i]);
  __syncthreads();
  const int key = s.bin;
  bool is_chosen_equal = i < inside && threadIdx.x % TEAM == 0 && rank < need && key_of(candidates[i]) == key;
  return {key, block_sum(is_chosen_equal, s, turn)};
}

// An empty histogram and an empty list of few.
__device__ __forceinline__ void clear(Shared& s) {
#pragma unroll
  for (int i = 0; i < BINS / THREADS; i++) s.histogram[threadIdx.x + i * THREADS] = 0;
  if (threadIdx.x == 0) s.few_count = 0;
}

// Where the k-th of a histogram lies, counted from the top, `above` keys beyond it: s.bin, s.before, s.inside. Keys that were
// not counted, of `all`, are in bin 0. Two barriers.
__device__ __forceinline__ void find_bin(int k, int above, int all, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int EACH = BINS / THREADS;
  int count[EACH], mine = 0;  // the bins of a thread, top first
#pragma unroll
  for (int i = 0; i < EACH; i++) { count[i] = s.histogram[BINS - 1 - threadIdx.x * EACH - i]; mine += count[i]; }
  int end = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(FULL, end, step);
    if (lane >= step) end += other;
  }
  if (lane == 31) s.partial[0][warp] = end;
  __syncthreads();
  int before = above + end - mine + warp_sum(lane < warp ? s.partial[0][lane % WARPS] : 0);
  if (threadIdx.x == THREADS - 1 && before + mine < k) {
    s.bin = 0;
    s.before = before + mine;
    s.inside = all - before - mine;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (before < k && before + count[i] >= k) {
      s.bin = BINS - 1 - threadIdx.x * EACH - i;
      s.before = before;
      s.inside = count[i];
    }
    before += count[i];
  }
  __syncthreads();
}

// The threshold among s.few[inside], at most 32 keys, of which `need` are chosen. Every warp finds it by itself; one barrier.
__device__ __forceinline__ Threshold rank_few(int inside, int need, Shared& s) {
  const int lane = threadIdx.x & 31;
  int one = s.few[lane], greater = 0, equal = 0;
  for (int i = 0; i < inside; i++) {
    int other = __shfl_sync(FULL, one, i);
    greater += other > one;
    equal += other == one;
  }
  int owner = __ffs(__ballot_sync(FULL, lane < inside && greater < need && need <= greater + equal)) - 1;
  int key = __shfl_sync(FULL, one, owner);
  need -= __shfl_sync(FULL, greater, owner);
  bool all = need == __shfl_sync(FULL, equal, owner);  // of its equals: no tie to settle
  __syncthreads();
  return {all ? key - 1 : key, all ? 0 : need};
}

// The k-th greatest of the CTA's keys, key(0 .. N - 1) of each thread, of which count_low >= k lie in (low, high] and the
// others do not matter. Stops where at most k + slack keys exceed a bin's lower end: then nothing equal is needed.
template <int N, class Keys>
__device__ __forceinline__ Threshold threshold(const Keys& key, int k, int slack, int low, int high, int count_low, Shared& s) {
  int above = 0;  // keys beyond `high`
  while (true) {
    if (count_low <= k + slack) return {low, 0};
    u32 width = (u32)high - (u32)low;  // keys low + 1 .. high
    if (width == 1) return {high, k - above};
    int shift = max(0, 32 - __clz((int)(width - 1)) - BITS);
    clear(s);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
      int one = key(i);
      if (one > low && one <= high) atomicAdd(&s.histogram[((u32)one - (u32)low - 1) >> shift], 1);
    }
    __syncthreads();
    find_bin(k, above, count_low, s);
    int inside = s.inside;
    above = s.before;
    count_low = above + inside;
    low += (int)((u32)s.bin << shift);
    high = (u32)high - (u32)low > (1u << shift) ? low + (int)(1u << shift) : high;
    if (inside <= 32 && count_low > k + slack && shift > 0) {  // rank the few directly
#pragma unroll
      for (int i = 0; i < N; i++) {
        int one = key(i);
        if (one > low && one <= high) s.few[atomicAdd(&s.few_count, 1)] = one;
      }
      __syncthreads();
      return rank_few(inside, k - above, s);
    }
  }
}
