// select on NVIDIA, long rows: one CTA, or one cluster of CTAs, per row. Compiled at run time by NVRTC for the chip at hand,
// behind kernel_cuda_parts.cuh and kernel_cuda_out.cuh.
//
// 1. A sample of 8 values a thread, whole 16-byte granules spread over the row with jitter, gives a cut: the value that a
//    little more than k of the row should reach (mean + 4.5 standard deviations of the sample's rank).
// 2. Every warp reads its chunks of 32 granules once, 16 values a lane at a time, and appends what reaches the cut to a
//    list of its own in shared memory: lanes count, one warp prefix sum, predicated stores. No barrier until the row is
//    read. Consecutive chunks go to different warps, so neither sorted nor clumped scores fill one list.
// 3. In a cluster, each warp of the first CTA takes over the lists of its namesakes through distributed shared memory.
// 4. The lists go to registers as ordered ints. A histogram of 2048 bins between the least and the greatest finds the bin
//    of the k-th; its values, up to 64 or 128, are ranked by value and column. Where it is crowded, finer histograms go
//    on until a bin is one value, and then the same selection over columns finds which of its equals come first.
// 5. If too much or too little reached the cut (values crowd there, or the sample misled), the CTA tries a better cut, and
//    in the end searches the row in memory by counting: slower, never different.
// Cost: each score is read once, at about 14 instructions an element; 8 barriers of the CTA, two of the cluster.

constexpr int LIST = 32 * SLOTS;     // survivors that one warp holds
constexpr int CAPACITY = WARPS * LIST;
constexpr int SAMPLES = 8;           // values a thread
constexpr int GRANULES = 16 / PER;   // granules a lane reads at a time: 16 values

// Brackets of the search in memory: count(low) >= k > count(high), where count(t) is how many keys exceed t.
struct Bracket {
  int low, high, count_low, count_high; bool thirds;
  __device__ __forceinline__ bool open(int k) const { return count_low > k && high - 1 != low; }
  // Where the k-th key lies if keys are spread evenly, a little to both sides; thirds after a round that did not halve.
  __device__ __forceinline__ void probes(int k, int& a, int& b) const {
    u32 width = (u32)high - (u32)low;
    float inside = (float)(count_low - count_high);
    float expected = __fdividef((float)(count_low - k), inside), spread = 0.75f * rsqrtf(inside);
    float left = thirds ? 0.33f : fmaxf(expected - spread, 0.f), right = thirds ? 0.67f : fminf(expected + spread, 1.f);
    float span = (float)width * 0.9999999f;
    u32 step_a = min(max((u32)(span * left), 1u), width - 1), step_b = min(max((u32)(span * right), step_a), width - 1);
    a = low + (int)step_a;
    b = low + (int)step_b;
  }
  __device__ __forceinline__ void narrow(int k, int a, int b, int above_a, int above_b) {
    u32 width = (u32)high - (u32)low;
    if (above_b >= k) { low = b; count_low = above_b; }
    else if (above_a >= k) { low = a; count_low = above_a; high = b; count_high = above_b; }
    else { high = a; count_high = above_a; }
    thirds = (u32)high - (u32)low > width / 2;
  }
  __device__ __forceinline__ Threshold result(int k) const {
    return count_low <= k ? Threshold{low, 0} : Threshold{high, k - count_high};
  }
};

// The key that a little more than k of the row should reach. `more` > 0 asks for that much more of it. Both histograms
// are empty when this begins; that of Shared is when it ends.
__device__ __forceinline__ int sample_cut(const Row& r, int k, int more, int* histogram, Shared& s) {
  constexpr int EACH = SAMPLES / PER > 0 ? SAMPLES / PER : 1;
  float x[EACH * PER];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    u32 step = threadIdx.x + i * THREADS, jitter = (step * 2654435761u) >> 16;
    u32 granule = (u32)(((u64)step * r.granules + (((u64)r.granules * jitter) >> 16)) / (EACH * THREADS));
    float part[PER];
    unpack(__ldg((const uint4*)(r.scores + r.first) + granule), part);
#pragma unroll
    for (int j = 0; j < PER; j++) x[i * PER + j] = part[j];
  }
#pragma unroll
  for (int i = 0; i < EACH * PER; i += 2) {
    Bins bins(x[i], x[i + 1]);
    atomicAdd(&bins.first(histogram), 1);
    atomicAdd(&bins.second(histogram), 1);
  }
  __syncthreads();
  float mean = (float)k * (EACH * PER * THREADS) / (float)(r.upper - r.lower);
  int rank = (int)(mean + 4.5f * sqrtf(mean) + 4.f) << more;
  Found found = find<true>(rank, histogram, s);
  if (found.eligible <= rank) return LOWEST + 1;
  int low = ordered(least_of(found.bin)) - 1;  // its keys are above this
  if (found.before + found.inside <= rank + rank / 8 + 16) return low + 1;
  // Values crowd there: the same, finer.
  float beyond = least_of(found.bin + 1);
  int high = beyond == beyond ? ordered(beyond) - 1 : HIGHEST;
  __syncthreads();
  Threshold t = threshold<EACH * PER>([&](int i) { return ordered(x[i]); }, rank - found.before, rank / 32, low, high, found.inside, s);
  __syncthreads();
  clear(s);
  return t.need ? t.key : t.key + 1;
}

// Append what reaches the cut, from the chunks of warp `mine` of `all`, to this warp's list; returns how many there are,
// which may be more than the list holds.
__device__ __forceinline__ int filter(const Row& r, int cut_key, int mine, int all, float* list, bool stop_early) {
  const float cut = from_key(cut_key);
  const int lane = threadIdx.x & 31;
  const uint4* granules = (const uint4*)(r.scores + r.first);
  int kept = 0;
  uint4 next[GRANULES];
  auto fetch = [&](int chunk) {
#pragma unroll
    for (int u = 0; u < GRANULES; u++) {
      int granule = (chunk + u * all) * 32 + lane;
      if (granule < r.granules) next[u] = __ldg(granules + granule);
    }
  };
  fetch(mine);
  for (int chunk = mine; chunk * 32 < r.granules; chunk += GRANULES * all) {
    float x[16];
    u32 hits = 0, inside = 0;  // bit i: x[i]
#pragma unroll
    for (int u = 0; u < GRANULES; u++) {
      float part[PER];
      unpack(next[u], part);
#pragma unroll
      for (int j = 0; j < PER; j++) x[u * PER + j] = part[j];
      if ((chunk + u * all) * 32 + lane < r.granules) inside |= ((1u << PER) - 1) << u * PER;
    }
    fetch(chunk + GRANULES * all);
#pragma unroll
    for (int i = 0; i < 16; i++) hits |= (u32)(x[i] >= cut) << i;
    hits &= inside;
    int end = __popc(hits);
    if (!__any_sync(FULL, hits != 0)) continue;
    const int own = end;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(FULL, end, step);
      if (lane >= step) end += other;
    }
    Place place = place_of(list + kept + end - own);
    kept += __shfl_sync(FULL, end, 31);
    if (kept > LIST) {
      if (stop_early) break;
      continue;
    }
    int column = r.first + (chunk * 32 + lane) * PER;
#pragma unroll
    for (int i = 0; i < 16; i++) append_if(hits & 1u << i, place, x[i], column + i / PER * all * 32 * PER + i % PER);
  }
  if (mine == all - 1) {  // the columns beside the granules, fewer than 2 * PER <= 32
    int head = r.first - r.lower, tail_first = r.first + r.granules * PER;
    int column = lane < head ? r.lower + lane : tail_first + lane - head;
    float x = __int_as_float(0x7fc00000);
    if (column < r.upper) x = widen(r.scores[column]);
    u32 hit = __ballot_sync(FULL, x >= cut);
    int slot = kept + __popc(hit & ((1u << lane) - 1));
    kept += __popc(hit);
    if (x >= cut && slot < LIST) { list[slot] = x; ((int*)list)[CAPACITY + slot] = column; }
  }
  return kept;
}

// Ask for this warp's first eight chunks, so that they are on their way while the sample is read.
__device__ __forceinline__ void prefetch(const Row& r, int mine, int all) {
  int lane = threadIdx.x & 31, granule = (mine + lane / 4 * all) * 32 + lane % 4 * 8;
  if (granule < r.granules) prefetch_line((const uint4*)(r.scores + r.first) + granule);
}

// Two counts over the whole row, in memory.
__device__ __forceinline__ void count_row(const Row& r, int a, int b, int& above_a, int& above_b, Shared& s, int& turn) {
  int count_a = 0, count_b = 0;
  for (int column = r.lower + threadIdx.x; column < r.upper; column += THREADS) {
    int key = ordered(widen(r.scores[column]));
    count_a += key > a;
    count_b += key > b;
  }
  above_a = block_sum(count_a, s, turn);
  above_b = block_sum(count_b, s, turn);
}

// Votes for all above the threshold and for the first of its equals, by column.
__device__ __forceinline__ void vote_exact(const int (&key)[SLOTS], Threshold t, const int* list_column, int kept, u32 (&vote)[SLOTS], Shared& s, int& turn) {
  const int lane = threadIdx.x & 31;
  int last_column = 0x7fffffff;  // equals beyond it are not needed
  if (t.need) {
    int equals = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) equals += lane + 32 * i < kept && key[i] == t.key;
    equals = block_sum(equals, s, turn);
    if (equals > t.need) {  // lower columns first: the same search over ~column
      int column_key[SLOTS], most = (int)0x80000000, least = 0x7fffffff;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) {
        int slot = lane + 32 * i;
        bool equal = slot < kept && key[i] == t.key;
        column_key[i] = equal ? ~list_column[slot] : (int)0x80000000;
        most = max(most, column_key[i]);
        least = equal ? min(least, column_key[i]) : least;
      }
      block_range(most, least, s);
      Threshold first = threshold<SLOTS>([&](int i) { return column_key[i]; }, t.need, 0, least - 1, most, equals, s);
      last_column = ~(first.key + (first.need ? 0 : 1));
    }
  }
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    int slot = lane + 32 * i;
    bool chosen = key[i] > t.key;
    if (t.need && key[i] == t.key && slot < kept) chosen = list_column[slot] <= last_column;
    vote[i] = __ballot_sync(FULL, chosen);
  }
}

// Choose among the lists, which hold `survivors` >= min(k, eligible) and nothing that is not eligible, and write. s.most,
// s.least and s.count are those of the warps, and the histogram is empty.
__device__ __forceinline__ void choose(const Arguments& a, const Row& r, i64 row, int k, const float* list, int kept, int survivors, u64* candidates, Shared& s, int& turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int* list_column = (const int*)list + CAPACITY;
  int key[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; i++) key[i] = lane + 32 * i < kept ? ordered(list[lane + 32 * i]) : LOWEST;
  const int most = __reduce_max_sync(FULL, s.most[lane % WARPS]), least = __reduce_min_sync(FULL, s.least[lane % WARPS]);
  int low = LOWEST, high = LOWEST, inside = 0, need = 0;  // chosen: above high, and `need` of those in (low, high]
  if (survivors > k) {
    const int shift = max(0, 32 - __clz((int)((u32)most - (u32)least)) - BITS);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
      if (lane + 32 * i < kept) atomicAdd(&s.histogram[((u32)key[i] - (u32)least) >> shift], 1);
    __syncthreads();
    Found found = find<false>(k, s.histogram, s);
    need = k - found.before;
    inside = found.inside;
    low = least + (int)((u32)found.bin << shift) - 1;
    high = (u32)most - (u32)low > 1u << shift ? low + (int)(1u << shift) : most;
    if (inside == need) {
      high = low;
      inside = need = 0;
    }
  }
  Threshold t = {high, 0};
  u32 vote[SLOTS];
  const bool ranked = inside && inside <= CANDIDATES;
  if (!inside || ranked) {
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      vote[i] = __ballot_sync(FULL, key[i] > high);
      if (key[i] > low && key[i] <= high) candidates[atomicAdd(&s.few_count, 1)] = candidate(key[i], list_column[lane + 32 * i]);
    }
  } else {
    __syncthreads();
    t = threshold<SLOTS>([&](int i) { return key[i]; }, need, 0, low, high, inside, s);
    if (!a.sorted) vote_exact(key, t, list_column, kept, vote, s, turn);
  }
  int mine = 0;
  if (!a.sorted) {
#pragma unroll
    for (int i = 0; i < SLOTS; i++) mine += __popc(vote[i]);
  }
  if (lane == 0) s.total[0][warp] = mine;
  __syncthreads();
  if (a.sorted) {
    if (ranked) t = threshold_of(candidates, inside, need, s, turn);
    __syncthreads();
    close_row(a, row, write_ascending(a, r, row, t, s));
    return;
  }
  int others = lane < WARPS ? s.total[0][lane] : 0;
  int place = warp_sum(lane < warp ? others : 0), number = warp_sum(others);
  const Out out(a, r, row);
  const u32 own_bit = 1u << lane;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    store_if(vote[i] & own_bit, out.row, place + __popc(vote[i] & (own_bit - 1)), list_column[lane + 32 * i] - out.base);
    place += __popc(vote[i]);
  }
  if (ranked) out.put_ranked(candidates, inside, need, number);
  out.close(a, r, row, ranked ? number + need : number);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 cluster_size() { u32 n; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); return n; }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 remote(const void* mine, u32 rank) {
  u32 address = (u32)__cvta_generic_to_shared(mine), there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ int remote_load(u32 address) {
  int x;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(address));  // no clobber: loads may overlap
  return x;
}

// The first CTA's warps append their namesakes' lists to their own; how many there are then. More than LIST: all is lost.
__device__ __forceinline__ int gather(int ctas, float* list, int* list_column, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int count = lane < ctas ? remote_load(remote(&s.count[warp], lane)) : 0;
  int end = count;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    int other = __shfl_up_sync(FULL, end, step);
    if (lane >= step) end += other;
  }
  int total = __shfl_sync(FULL, end, ctas - 1);
  bool lost = __any_sync(FULL, count > LIST) || total > LIST;
  if (!lost) {
    int value[SLOTS], column[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {  // all loads before the first store: one latency for all
      int slot = lane + 32 * i, owner = 0;
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {  // how many CTAs' lists end at or before this place
        int past = __shfl_sync(FULL, end, (owner + step - 1) & 31);
        if (owner + step <= ctas && past <= slot) owner += step;
      }
      owner = min(owner, ctas - 1);
      int offset = slot - __shfl_sync(FULL, end - count, owner);
      value[i] = column[i] = 0;
      if (slot < total) {
        value[i] = remote_load(remote(list + offset, owner));
        column[i] = remote_load(remote(list_column + offset, owner));
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      int slot = lane + 32 * i;
      if (slot < total) { ((int*)list)[slot] = value[i]; list_column[slot] = column[i]; }
    }
  }
  return lost ? max(total, LIST + 1) : total;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_kernel(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(memory);
  __shared__ Shared s;
  __shared__ int sampled[BINS];
  __shared__ u64 candidates[CANDIDATES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* list = (float*)memory + warp * LIST;
  int turn = 0, rank = 0, ctas = 1;
#if __CUDA_ARCH__ >= 900
  rank = cluster_rank();
  ctas = cluster_size();
#endif
  const i64 row = blockIdx.x / ctas;
  const Row r = row_of(a, row);
  const int length = r.upper - r.lower, k = (int)min(a.k, (i64)0x7fffffff);
  prefetch(r, warp + rank * WARPS, WARPS * ctas);
  int cut = LOWEST + 1;
  const bool listed = length <= CAPACITY || k <= CAPACITY * 2 / 3;
  bool found = false, complete = false, crowded = false;
  int reach = 0, kept = 0, survivors = 0;
  for (int attempt = 0; attempt < 4 && listed && !found; attempt++) {
    if (attempt) __syncthreads();
    clear(s);
#pragma unroll
    for (int i = 0; i < BINS / THREADS; i++) sampled[threadIdx.x + i * THREADS] = 0;
    __syncthreads();
    // 0: a sampled cut; then one lower, where too little reached it; or what exceeds it, where values crowd there.
    if (attempt == 0 ? length > CAPACITY : !crowded && survivors < k) cut = sample_cut(r, k, attempt, sampled, s);
    kept = filter(r, cut, warp + rank * WARPS, WARPS * ctas, list, !crowded);
#if __CUDA_ARCH__ >= 900
    if (ctas > 1) {
      if (lane == 0) s.count[warp] = kept;
      cluster_arrive();
      cluster_wait();
      if (rank == 0) kept = gather(ctas, list, (int*)list + CAPACITY, s);
      cluster_arrive();
      if (rank != 0) {  // the first CTA goes on alone; its namesakes stay until it has read their lists
        cluster_wait();
        return;
      }
      rank = 0;
      ctas = 1;
    }
#endif
    __syncwarp();
    int most = LOWEST, least = 0x7fffffff;
    for (int slot = lane; slot < min(kept, LIST); slot += 32) {
      int key = ordered(list[slot]);
      most = max(most, key);
      least = min(least, key);
    }
    most = __reduce_max_sync(FULL, most);
    least = __reduce_min_sync(FULL, least);
    if (lane == 0) { s.most[warp] = most; s.least[warp] = least; s.count[warp] = kept; }
    __syncthreads();
    int longest = __reduce_max_sync(FULL, lane < WARPS ? s.count[lane] : 0);
    survivors = warp_sum(lane < WARPS ? s.count[lane] : 0);
    complete = longest <= LIST;  // no list lost anything
    found = complete && (survivors >= k || cut == LOWEST + 1);
    if (found || crowded) break;
    if (!complete) {
      crowded = true;
      reach = survivors;
      cut++;
    }
  }
  if (found) {
    choose(a, r, row, k, list, kept, survivors, candidates, s, turn);
    return;
  }
  Threshold t = {LOWEST, 0};
  int eligible = 0, none;
  if (complete && survivors < k && reach >= k) {  // `cut` is the key above the crowd's, which completes the set
    t.key = cut - 1;
    t.need = k - survivors;
  } else {
    count_row(r, LOWEST, HIGHEST, eligible, none, s, turn);
  }
  if (eligible > k) {
    Bracket bracket = {LOWEST, HIGHEST, eligible, 0, false};
    while (bracket.open(k)) {
      int low_probe, high_probe, above_a, above_b;
      bracket.probes(k, low_probe, high_probe);
      count_row(r, low_probe, high_probe, above_a, above_b, s, turn);
      bracket.narrow(k, low_probe, high_probe, above_a, above_b);
    }
    t = bracket.result(k);
  }
  __syncthreads();
  close_row(a, row, write_ascending(a, r, row, t, s));
}
