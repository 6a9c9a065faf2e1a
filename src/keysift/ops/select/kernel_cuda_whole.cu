// select on NVIDIA, rows that the registers of one CTA hold: read once, kept as floats. Behind kernel_cuda_parts.cuh and kernel_cuda_out.cuh.
//
// 1. Every thread reads SLOTS values, 16-byte granules that neighbours read beside each other.
// 2. A histogram of 2048 bins over the upper bits of the values in half precision, truncated: monotone, and the same
//    for all rows, so nothing need be known of the row before. -inf and NaN have bins of their own, which do not count.
// 3. Every warp sums a part of the bins and, behind a barrier, finds the bin of the k-th value by itself. The ends of
//    that bin as floats tell who is chosen, who is not, and who is a candidate.
// 4. Up to 64 or 128 candidates are ranked directly, value and then lower column first. More of them, a crowd, go on by
//    histograms over their bits, which end at one value; its equals are counted in order of columns.
// 5. The chosen columns are written in order of warps, granules and lanes, by their votes; ranked candidates behind them.
//    Page tables and values are seen to after that, over what was written: the straight way stays short, since a CTA
//    that runs through code once waits for instructions more than for anything else.
// Cost: each score is read once, about 25 instructions an element, 4 barriers where nothing crowds.

constexpr int VALUES = SLOTS + 1;      // the last one beside the granules, in few threads of the first warp
constexpr int SETS = SLOTS / PER;      // granules of a thread
constexpr int TIES = SETS * WARPS + 2; // counts of equals: the columns before the granules, the granules, those behind

__device__ __forceinline__ void read_row(const Row& r, float (&x)[VALUES]) {
  const float none = __int_as_float(0x7fc00000);
#pragma unroll
  for (int i = 0; i < SETS; i++) {
    int granule = threadIdx.x + i * THREADS;
    float part[PER];
#pragma unroll
    for (int j = 0; j < PER; j++) part[j] = none;
    if (granule < r.granules) unpack(__ldg((const uint4*)(r.scores + r.first) + granule), part);
#pragma unroll
    for (int j = 0; j < PER; j++) x[i * PER + j] = part[j];
  }
  x[SLOTS] = none;
  int head = r.first - r.lower, tail_first = r.first + r.granules * PER, thread = threadIdx.x;
  int column = thread < head ? r.lower + thread : tail_first + thread - head;
  if (column < r.upper && thread < 2 * PER) x[SLOTS] = widen(r.scores[column]);
}

__device__ __forceinline__ int column_of(const Row& r, int i) {
  int thread = threadIdx.x, head = r.first - r.lower;
  if (i < SLOTS) return r.first + (thread + i / PER * THREADS) * PER + i % PER;
  return thread < head ? r.lower + thread : r.first + r.granules * PER + thread - head;
}

// True where a warp has no value at this place, nor has any other.
__device__ __forceinline__ bool is_empty(const Row& r, int i) {
  return i < SLOTS ? i / PER * THREADS >= r.granules : threadIdx.x >= 32;
}

// The values of a crowded bin; who takes no part is the least int.
struct Keys {
  const float (&x)[VALUES];
  float low, high;
  __device__ __forceinline__ int operator()(int i) const {
    float one = again(x[i]);
    return one >= low && !(one >= high) ? ordered(one) : (int)0x80000000;
  }
};

// Greatest, least and number of the CTA's keys; one barrier.
__device__ __forceinline__ void survey(int& most, int& least, int& members, Shared& s) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  most = __reduce_max_sync(FULL, most);
  least = __reduce_min_sync(FULL, least);
  members = warp_sum(members);
  if (lane == 0) { s.most[warp] = most; s.least[warp] = least; s.partial[1][warp] = members; }
  __syncthreads();
  most = __reduce_max_sync(FULL, s.most[lane % WARPS]);
  least = __reduce_min_sync(FULL, s.least[lane % WARPS]);
  members = warp_sum(lane < WARPS ? s.partial[1][lane] : 0);
}

// Votes for all above the threshold, and for the first of its equals, by column. One barrier where equals are needed.
__device__ __forceinline__ int vote_exact(const Row& r, const float (&x)[VALUES], Threshold t, u32 (&vote)[VALUES], int* ties) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float equal = from_key(t.key), from = from_key(t.key + 1);  // zeros of both signs are one key, so not always the next
  int mine = 0;
  if (t.need == 0) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      vote[i] = __ballot_sync(FULL, x[i] >= from);
      mine += __popc(vote[i]);
    }
    return mine;
  }
  int head = r.first - r.lower;
  u32 heads = head ? (1u << head) - 1 : 0;  // lanes of the first warp whose last value stands before the granules
#pragma unroll
  for (int i = 0; i < SETS; i++) {
    int equals = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) equals += __popc(__ballot_sync(FULL, x[i * PER + j] == equal));
    if (lane == 0) ties[1 + i * WARPS + warp] = equals;
  }
  u32 beside = __ballot_sync(FULL, x[SLOTS] == equal);
  if (threadIdx.x == 0) { ties[0] = __popc(beside & heads); ties[TIES - 1] = __popc(beside & ~heads); }
  __syncthreads();
  auto earlier = [&](int count) {  // equals in the first `count` of the counts
    int sum = 0;
#pragma unroll
    for (int i = 0; i < (TIES + 31) / 32; i++) {
      int place = lane + 32 * i;
      if (place < count) sum += ties[place];
    }
    return warp_sum(sum);
  };
  const u32 below = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < SETS; i++) {
    int rank = earlier(1 + i * WARPS + warp), own = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) rank += __popc(__ballot_sync(FULL, x[i * PER + j] == equal) & below);
#pragma unroll
    for (int j = 0; j < PER; j++) {
      float one = x[i * PER + j];
      bool is_equal = one == equal;
      vote[i * PER + j] = __ballot_sync(FULL, one >= from || (is_equal && rank + own < t.need));
      own += is_equal;
      mine += __popc(vote[i * PER + j]);
    }
  }
  vote[SLOTS] = 0;
  if (warp == 0) {
    int granules = earlier(TIES - 1) - __popc(beside & heads);
    int rank = __popc(beside & below) + (heads >> lane & 1 ? 0 : granules);
    vote[SLOTS] = __ballot_sync(FULL, x[SLOTS] >= from || (x[SLOTS] == equal && rank < t.need));
    mine += __popc(vote[SLOTS]);
  }
  return mine;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_kernel(const __grid_constant__ Arguments a) {
  __shared__ Shared s;
  __shared__ u64 candidates[CANDIDATES];
  __shared__ int ties[TIES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 row = blockIdx.x;
  const Row r = row_of(a, row);
  const int k = (int)min(a.k, (i64)0x7fffffff);
  float x[VALUES];
  read_row(r, x);
  clear(s);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < VALUES; i += 2) {
    if (is_empty(r, i)) continue;
    Bins bins(x[i], i + 1 < VALUES ? x[i + 1] : x[i]);
    atomicAdd(&bins.first(s.histogram), 1);
    if (i + 1 < VALUES) atomicAdd(&bins.second(s.histogram), 1);
  }
  __syncthreads();
  Found found = find<true>(k, s.histogram, s);
  const bool all = found.eligible <= k;
  const int need = k - found.before;
  float low = all ? -3.402823466e38f : least_of(found.bin), high = all ? low : least_of(found.bin + 1);
  if (found.inside == need) high = low;  // the whole bin is chosen
  const int inside = low == high ? 0 : found.inside;
  const bool ranked = inside && inside <= CANDIDATES;
  u32 vote[VALUES];
  int mine = 0, turn = 0;
  Threshold t = {ordered(low) - 1, 0};
  if (inside <= CANDIDATES) {
    u32 reaches[(VALUES + 31) / 32] = {};  // this thread's candidates
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      bool is_above = x[i] >= high, is_candidate = x[i] >= low && !is_above;
      vote[i] = __ballot_sync(FULL, is_above);
      mine += __popc(vote[i]);
      reaches[i / 32] |= (u32)is_candidate << i % 32;
    }
#pragma unroll
    for (int word = 0; word < (VALUES + 31) / 32; word++) {
      for (u32 rest = inside ? reaches[word] : 0; rest; rest &= rest - 1) {
        int column = column_of(r, 32 * word + __ffs(rest) - 1);  // its value is read again: registers have no index
        candidates[atomicAdd(&s.few_count, 1)] = candidate(ordered(widen(r.scores[column])), column);
      }
    }
  } else {
    Keys keys = {x, low, high};
    int greatest = (int)0x80000000, smallest = 0x7fffffff, members = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      int key = keys(i);
      greatest = max(greatest, key);
      if (key != (int)0x80000000) { smallest = min(smallest, key); members++; }
    }
    survey(greatest, smallest, members, s);
    t = threshold<VALUES>(keys, need, 0, smallest - 1, greatest, members, s);
    if (!a.sorted) mine = vote_exact(r, x, t, vote, ties);
  }
  if (lane == 0) s.total[0][warp] = mine;
  __syncthreads();
  int others = lane < WARPS ? s.total[0][lane] : 0;
  int place = warp_sum(lane < warp ? others : 0), number = warp_sum(others);
  if (a.sorted) {
    if (ranked) t = threshold_of(candidates, inside, need, s, turn);
    close_row(a, row, write_ascending(a, r, row, t, s));
    return;
  }
  const Out out(a, r, row);
  const int first = r.first + threadIdx.x * PER - out.base;
  const u32 own_bit = 1u << lane;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int column = i < SLOTS ? first + i / PER * THREADS * PER + i % PER : column_of(r, SLOTS) - out.base;
    store_if(vote[i] & own_bit, out.row, place + __popc(vote[i] & (own_bit - 1)), column);
    place += __popc(vote[i]);
  }
  if (ranked) out.put_ranked(candidates, inside, need, number);
  out.close(a, r, row, ranked ? number + need : number);
}
