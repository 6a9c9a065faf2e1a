// How the kernels of select on NVIDIA write what they have chosen. Behind kernel_cuda_parts.cuh.

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

__device__ __forceinline__ void close_row(const Arguments& a, i64 row, int chosen) {
#pragma unroll 1
  for (int place = chosen + threadIdx.x; place < a.k; place += THREADS) {
    a.out[row * a.stride_out + place] = -1;
    if (a.values) a.values[row * a.stride_values + place] = (Raw)MINUS_INFINITY;
  }
  if (a.counts && threadIdx.x == 0) a.counts[row * a.stride_counts] = chosen;
}

// What is written straight: columns, or at once what they shall be. The rest of the row, and what columns turn into
// beyond that, is seen to behind a barrier: so the straight way stays short, and a CTA that runs through code once waits
// for instructions more than for anything else.
struct Out {
  int* row;
  int base;
  bool plain;
  __device__ __forceinline__ Out(const Arguments& a, const Row& r, i64 number)
      : row(a.out + number * a.stride_out), plain(a.pages < 0 && !a.values) {
    base = plain && !a.absolute ? r.lower : 0;
  }
  // Candidates that are among the `need` best of them, from place `first` on.
  __device__ __forceinline__ void put_ranked(const u64* candidates, int inside, int need, int first) const {
    const int rank = rank_of(candidates, inside), i = threadIdx.x / TEAM;
    if (i < inside && rank < need && threadIdx.x % TEAM == 0) row[first + rank] = column_of(candidates[i]) - base;
  }
  __device__ __forceinline__ void close(const Arguments& a, const Row& r, i64 number, int chosen) const {
    if (!plain) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < chosen; i += THREADS) write_one(a, r, number, i, row[i]);
    }
    close_row(a, number, chosen);
  }
};

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

