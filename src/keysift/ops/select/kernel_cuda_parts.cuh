// What the kernels of select on NVIDIA share: how a row is read and written, and the k-th greatest of the keys in registers.
// It stands before each of them when NVRTC compiles it; THREADS, SLOTS and DTYPE are given there.

#define FULL 0xffffffffu
typedef long long i64;
typedef unsigned int u32;

constexpr int LOWEST = -2139095041;   // the ordered key of -inf; what is not eligible has it
constexpr int HIGHEST = 2139095040;   // the ordered key of +inf
constexpr int WARPS = THREADS / 32;
constexpr int BITS = 11, BINS = 1 << BITS;

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
// A store without a branch.
__device__ __forceinline__ void store_if(u32 wanted, int* place, int x) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.b32 [%1], %2; }" ::"r"(wanted), "l"(place), "r"(x) : "memory");
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
  constexpr int EACH = BINS / THREADS;
  int above = 0;  // keys beyond `high`
  while (true) {
    if (count_low <= k + slack) return {low, 0};
    u32 width = (u32)high - (u32)low;  // keys low + 1 .. high
    if (width == 1) return {high, k - above};
    int shift = max(0, 32 - __clz((int)(width - 1)) - BITS);
#pragma unroll
    for (int i = 0; i < EACH; i++) s.histogram[threadIdx.x + i * THREADS] = 0;
    if (threadIdx.x == 0) s.few_count = 0;
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

__device__ __forceinline__ void write_one(const Arguments& a, const Row& r, i64 row, int place, int column) {
  int index = a.absolute ? column : column - r.lower;
  if (a.pages >= 0) {
    i64 table_row = a.page_rows ? integer(a.page_rows, row * a.stride_page_rows, a.page_rows_is_long) : row;
    u32 size = (u32)min(a.page_size, 1ll << 31), number = (u32)index / size;  // no index is larger
    i64 page = integer(a.table, table_row * a.stride_table + number, a.table_is_long);
    index = page < 0 ? -1 : (int)(page * a.page_size) + (int)((u32)index - number * size);
  }
  a.out[row * a.stride_out + place] = index;
  if (a.values) a.values[row * a.stride_values + place] = index < 0 ? (Raw)MINUS_INFINITY : r.scores[column];
}

// Write the chosen in ascending order of columns, reading the row again; returns how many.
__device__ __forceinline__ int write_ascending(const Arguments& a, const Row& r, i64 row, Threshold t, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int EACH = 8;
  int base = 0, ties = 0;
  for (int first = r.lower; first < r.upper && base < a.k; first += THREADS * EACH) {
    int begin = first + threadIdx.x * EACH, key[EACH], both = 0;  // two counts in one sum: above, equal
#pragma unroll
    for (int i = 0; i < EACH; i++) key[i] = begin + i < r.upper ? ordered(widen(r.scores[begin + i])) : LOWEST;
#pragma unroll
    for (int i = 0; i < EACH; i++) both += (key[i] > t.key ? 1 : 0) + (key[i] == t.key && t.need ? 65536 : 0);
    int end = both;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(FULL, end, step);
      if (lane >= step) end += other;
    }
    __syncthreads();
    if (lane == 31) s.total[0][warp] = end;
    __syncthreads();
    int others = lane < WARPS ? s.total[0][lane] : 0;
    int before = warp_sum(lane < warp ? others : 0) + end - both, all = warp_sum(others);
    int rank = ties + (before >> 16);  // among the equals
    int place = base + (before & 65535) + min(rank, t.need) - min(ties, t.need);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      bool equal = key[i] == t.key && t.need;
      if (key[i] > t.key || (equal && rank < t.need)) write_one(a, r, row, place++, begin + i);
      rank += equal;
    }
    int seen = ties + (all >> 16);
    base += (all & 65535) + min(seen, t.need) - min(ties, t.need);
    ties = seen;
  }
  return base;
}

__device__ __forceinline__ void close_row(const Arguments& a, i64 row, int chosen) {
#pragma unroll 1
  for (int place = chosen + threadIdx.x; place < a.k; place += THREADS) {
    a.out[row * a.stride_out + place] = -1;
    if (a.values) a.values[row * a.stride_values + place] = (Raw)MINUS_INFINITY;
  }
  if (a.counts && threadIdx.x == 0) a.counts[row * a.stride_counts] = chosen;
}
