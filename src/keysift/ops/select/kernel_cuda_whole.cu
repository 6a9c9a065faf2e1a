// select on NVIDIA, rows that the registers of one CTA hold: read once, kept as floats. Behind kernel_cuda_parts.cuh.
//
// 1. Every thread reads SLOTS values, 16-byte granules that neighbours read beside each other; one reduction gives the
//    greatest, the least and the number of eligible values.
// 2. A histogram of 2048 bins, linear between least and greatest (a difference, a product and a truncation, all of them
//    monotone, so the bins are ordered whatever they round to). The lowest bin is not counted, it holds what the others
//    do not: half of a rectified row would queue for one counter.
// 3. A suffix sum from the top finds the bin of the k-th value. Up to 32 values in it are ranked directly; a crowded
//    bin goes on by histograms over the bits of its values, which end at single values.
// 4. Where more values equal the threshold than are needed, the same search over columns finds which come first.
// 5. Chosen columns go to shared memory, and from there to `out`, neighbours beside each other.
// Cost: each score is read once, about 16 instructions an element, 9 barriers where nothing crowds.

// Which bin a value falls into; eligible values only.
struct Linear {
  float low, scale;
  __device__ __forceinline__ int bin(float x) const {
    return (int)fminf(fmaxf((x - low) * scale, 0.f), (float)(BINS - 1));
  }
};

__device__ __forceinline__ Linear linear(int least, int most) {
  const float largest = 3.402823466e38f;
  float low = fmaxf(from_key(least), -largest), high = fminf(from_key(most), largest);
  float scale = (float)(BINS - 1) / (high - low);
  // Too wide or too narrow for a float: all in bin 0, and the bits decide.
  return {low, scale < __int_as_float(0x7f800000) ? scale : 0.f};
}

// Greatest, least and number of the eligible keys of the CTA; one barrier.
__device__ __forceinline__ void survey(int& most, int& least, int& eligible, Shared& s) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  most = __reduce_max_sync(FULL, most);
  least = __reduce_min_sync(FULL, least);
  eligible = warp_sum(eligible);
  if (lane == 0) { s.most[warp] = most; s.least[warp] = least; s.partial[1][warp] = eligible; }
  __syncthreads();
  most = __reduce_max_sync(FULL, s.most[lane % WARPS]);
  least = __reduce_min_sync(FULL, s.least[lane % WARPS]);
  eligible = warp_sum(lane < WARPS ? s.partial[1][lane] : 0);
}

constexpr int VALUES = SLOTS + 1;  // the last one beside the granules, in few threads

__device__ __forceinline__ void read_row(const Row& r, float (&x)[VALUES]) {
#pragma unroll
  for (int i = 0; i < SLOTS / PER; i++) {
    int granule = threadIdx.x + i * THREADS;
    float part[PER];
#pragma unroll
    for (int j = 0; j < PER; j++) part[j] = __int_as_float(0x7fc00000);
    if (granule < r.granules) unpack(__ldg((const uint4*)(r.scores + r.first) + granule), part);
#pragma unroll
    for (int j = 0; j < PER; j++) x[i * PER + j] = part[j];
  }
  x[SLOTS] = __int_as_float(0x7fc00000);
  int head = r.first - r.lower, tail_first = r.first + r.granules * PER, thread = threadIdx.x;
  int column = thread < head ? r.lower + thread : tail_first + thread - head;
  if (column < r.upper && thread < 2 * PER) x[SLOTS] = widen(r.scores[column]);
}

__device__ __forceinline__ int column_of(const Row& r, int i) {
  int thread = threadIdx.x, head = r.first - r.lower;
  if (i < SLOTS) return r.first + (thread + i / PER * THREADS) * PER + i % PER;
  return thread < head ? r.lower + thread : r.first + r.granules * PER + thread - head;
}

// What is searched once the histogram has spoken: the values of a crowded bin, or the columns of those that equal the
// threshold, lower ones first. One piece of code for both; who takes no part is the least int.
struct Keys {
  const float (&x)[VALUES];
  const Row& r;
  Linear line;
  int bin;
  bool columns;
  float value;
  __device__ __forceinline__ int operator()(int i) const {
    float one = again(x[i]);
    bool member = columns ? one == value : one > from_key(LOWEST) && line.bin(one) == bin;
    return member ? (columns ? ~column_of(r, i) : ordered(one)) : (int)0x80000000;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) select_kernel(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(memory);
  __shared__ Shared s;
  int* chosen_column = (int*)memory;  // min(k, THREADS * SLOTS) of them
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 row = blockIdx.x;
  const Row r = row_of(a, row);
  const int k = (int)min(a.k, (i64)0x7fffffff);
  float x[VALUES];
  read_row(r, x);
#pragma unroll
  for (int i = 0; i < BINS / THREADS; i++) s.histogram[threadIdx.x + i * THREADS] = 0;
  if (threadIdx.x == 0) s.few_count = 0;
  const float lowest = from_key(LOWEST);
  int most = LOWEST, least = 0x7fffffff, eligible = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int key = ordered(x[i]);
    most = max(most, key);
    least = x[i] > lowest ? min(least, key) : least;
    eligible += x[i] > lowest;
  }
  survey(most, least, eligible, s);
  Threshold t = {LOWEST, 0};
  int last_column = -1;  // the last one that may be chosen among the threshold's equals
  if (eligible > k) {
    const Linear line = linear(least, most);
    Keys keys = {x, r, line, 0, false, 0.f};
    int need = k;
    bool crowded = false;
    if (least == most) {
      t = {most, k};
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        int bin = line.bin(x[i]);
        if (x[i] > lowest && bin > 0) atomicAdd(&s.histogram[bin], 1);
      }
      __syncthreads();
      find_bin(k, 0, eligible, s);
      keys.bin = s.bin;
      need = k - s.before;
      const int inside = s.inside;
      crowded = inside > 32;
      if (!crowded) {
#pragma unroll
        for (int i = 0; i < VALUES; i++)
          if (x[i] > lowest && line.bin(again(x[i])) == keys.bin) s.few[atomicAdd(&s.few_count, 1)] = ordered(x[i]);
        __syncthreads();
        t = rank_few(inside, need, s);
      }
    }
#pragma unroll 1
    for (int turn = crowded ? 0 : 1; turn < 2; turn++) {
      if (turn == 1) {
        if (t.need == 0 || a.sorted) break;
        keys.columns = true;
        keys.value = from_key(t.key);
        need = t.need;
      }
      int greatest = (int)0x80000000, smallest = 0x7fffffff, members = 0;
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        int key = keys(i);
        greatest = max(greatest, key);
        if (key != (int)0x80000000) { smallest = min(smallest, key); members++; }
      }
      __syncthreads();
      survey(greatest, smallest, members, s);
      if (turn == 1 && members <= need) {
        last_column = 0x7fffffff;
        break;
      }
      Threshold found = threshold<VALUES>(keys, need, 0, smallest - 1, greatest, members, s);
      if (turn == 0) t = found;
      else last_column = ~(found.key + (found.need ? 0 : 1));
    }
  }
  if (a.sorted) {
    __syncthreads();
    close_row(a, row, write_ascending(a, r, row, t, s));
    return;
  }
  // The least float above the threshold; zeros of both signs are one key, so this is not always the next one.
  const float from = from_key(t.key + 1), equal = from_key(t.key);
  u32 chosen[(VALUES + 31) / 32] = {};
  int mine = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    bool is_chosen = x[i] >= from || (x[i] == equal && t.need && column_of(r, i) <= last_column);
    chosen[i / 32] |= (u32)is_chosen << i % 32;
    mine += is_chosen;
  }
  int end = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(FULL, end, step);
    if (lane >= step) end += other;
  }
  if (lane == 31) s.total[0][warp] = end;
  __syncthreads();
  int others = lane < WARPS ? s.total[0][lane] : 0;
  int place = warp_sum(lane < warp ? others : 0) + end - mine, number = warp_sum(others);
#pragma unroll
  for (int i = 0; i < VALUES; i++)
    if (chosen[i / 32] >> i % 32 & 1) chosen_column[place++] = column_of(r, i);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < number; i += THREADS) write_one(a, r, row, i, chosen_column[i]);
  close_row(a, row, number);
}
