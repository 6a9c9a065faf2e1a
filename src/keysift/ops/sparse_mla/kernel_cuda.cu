// sparse_mla on sm_90 with wgmma, for latents of 512 + 64 and queries in bfloat16. FP8, WIDE and SHARED are given where
// it is compiled: e4m3 latents; every row at a multiple of 16 bytes; bytes of shared memory.
//
// 1. A CTA has a token, 64 heads and a part of the token's k indices. It reads the indices once to find the first and the
//    last that is not -1, and walks between them in tiles of 64 keys. Its three warpgroups form a chain.
// 2. The gatherers fetch the selected latents by index into one of two tiles of shared memory: bfloat16 as it is, by
//    cp.async; fp8 through registers, times its scale, rounded to bfloat16. What is masked becomes 0, so no NaN enters.
// 3. The left warpgroup multiplies queries by keys (wgmma, both from shared memory), does the online softmax in base 2,
//    hands p in bfloat16 and the factors of its rows on, and adds p . values for columns 0 to 255.
// 4. The right warpgroup adds p . values for columns 256 to 511, while the left one is at the next tile. A tile is key
//    (rows along k) and value (rows along columns, wgmma's transposed operand), read from the same bytes.
// 5. Parts of k leave float32 outputs and lses, which combine_kernel joins, a row per CTA.
// Cost: 64 * 64 * (576 + 512) products a tile, 2176 clocks of the tensor cores; 217 KB of shared memory reads for
// logits, 144 KB of them, and values; 72 KB (fp8: 41 KB) read from L2. One CTA of 227 KB per processor.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int GROUP = 128;                 // threads of a warpgroup
constexpr int TILE = 64, HEADS = 64;       // keys of a tile, heads of a CTA
constexpr int DIM = 576, VALUES = 512, HALF = 256;
constexpr int BLOCK = 64 * 128;            // bytes of 64 rows of 64 columns
constexpr int BLOCKS = DIM / 64;
constexpr int STAGES = 2;
constexpr int BANDS = 3;                   // of columns, which arrive one after another: 0-255, 256-511, 512-575
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
#define INFINITE __int_as_float(0x7f800000)

// Offsets in shared memory. Blocks of 64 columns are 64 rows of 128 bytes, whose 16-byte pieces lie at place
// (piece ^ row % 8): the 128-byte swizzle of wgmma.
constexpr int QUERIES = 0;
constexpr int LATENTS = QUERIES + BLOCKS * BLOCK;
constexpr int WEIGHTS = LATENTS + STAGES * BLOCKS * BLOCK;
constexpr int FACTORS = WEIGHTS + BLOCK;           // float[64]: what a row's sums are multiplied by before this tile
constexpr int SHARES = FACTORS + 4 * HEADS;        // float[64]: and at the end
constexpr int VALID = SHARES + 4 * HEADS;          // u16[STAGES][4]: a bit per key
constexpr int ENDS = VALID + 8 * STAGES;           // int[2][12]: of the walk, by warp
constexpr int BARRIERS = ENDS + 4 * 24;
// A band of a tile is there; a tile may be written again; p and factors are there; they are read; the shares are there.
constexpr int FULL = BARRIERS, EMPTY = FULL + 8 * STAGES * BANDS, GIVEN = EMPTY + 8 * STAGES, TAKEN = GIVEN + 8,
              ENDED = TAKEN + 8;
static_assert(ENDED + 8 + 1008 <= SHARED, "the launch gives too little shared memory, of which 16 bytes are aligned");
static_assert(BARRIERS % 8 == 0 && VALID % 8 == 0, "barriers and masks are read 8 bytes at a time");

struct Arguments {
  const char* q; i64 stride_q, stride_q_head, stride_q_dim;      // in bytes
  const char* kv; const char* scales; const char* rope;          // fp8: the parts of slot 0
  i64 stride_page, stride_slot, page_size;                       // in bytes
  const int* indices; i64 stride_indices, stride_index;          // in elements
  const void* lengths; i64 stride_lengths, lengths_are_long;
  const float* sink; i64 stride_sink;                            // in elements
  char* out; i64 stride_out_part, stride_out;                    // in bytes; bfloat16, float32 where parts are several
  float* lse; i64 stride_lse_part, stride_lse;                   // in elements
  i64 heads, k, parts;
  i64 scale;                                                     // a float's bits; times log2(e)
};

// ---- barriers and memory

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}
// Arrives once all cp.async of this thread so far have landed.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
// What ordinary stores and cp.async have written becomes visible to wgmma.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void synchronize(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void copy_async(u32 to, const void* from, bool real) {  // 16 bytes; zeros, if not real
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// 16 bytes of global memory, which in a cache of odd strides begin at any even address.
__device__ __forceinline__ uint4 load_piece(const char* from, i64 stride = 2) {
#if WIDE
  return __ldg((const uint4*)from);
#else
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    words[i] = __ldg((const u16*)(from + 2 * i * stride)) | (u32)__ldg((const u16*)(from + (2 * i + 1) * stride)) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two e4m3 as bfloat16, times their scale: exact in float32, rounded once.
__device__ __forceinline__ u32 scaled(u32 two, float scale) {
  float low, high;
  asm("{\n\t.reg .b16 codes, none, a, b;\n\t.reg .b32 halves;\n\tmov.b32 {codes, none}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, codes;\n\tmov.b32 {a, b}, halves;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b;\n\t}"
      : "=f"(low), "=f"(high) : "r"(two));
  return pack(low * scale, high * scale);
}

// ---- wgmma

__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {  // 128-byte swizzle
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 62;
}
// Rows along k: 8 of them are 1024 bytes; the leading distance is not used.
__device__ __forceinline__ u64 rows_along_k(u32 address) { return descriptor(address, 16, 1024); }
// Rows along the columns of the result: the next 64 columns are a block away, the next 8 rows (of k) 1024 bytes.
__device__ __forceinline__ u64 rows_along_columns(u32 address) { return descriptor(address, BLOCK, 1024); }

__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Nothing of the sums may be read before this, or written before `begin`; the compiler knows neither by itself.
template <int N> __device__ __forceinline__ void hold(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int N> __device__ __forceinline__ void finish(float (&sums)[N]) {
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold(sums);
}

#define OUT8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                   "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT32(d, i) OUT8(d, i), OUT8(d, i + 8), OUT8(d, i + 16), OUT8(d, i + 24)
#define OUT128(d) OUT32(d, 0), OUT32(d, 32), OUT32(d, 64), OUT32(d, 96)
#define NAMES32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sums [64 x 64] (+)= a . b^T over 16 columns, both with rows along k
__device__ __forceinline__ void multiply_keys(float (&sums)[32], u64 a, u64 b, int add) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, %32, %33, p, 1, 1, 0, 0;\n\t}"
               : OUT32(sums, 0) : "l"(a), "l"(b), "r"(add) : "memory");
}
// sums [64 x 256] += a . b over 16 keys; b with rows along columns
__device__ __forceinline__ void multiply_values(float (&sums)[128], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES128 "}, %128, %129, 1, 1, 1, 0, 1;"
               : OUT128(sums) : "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void multiply_values(float (&sums)[128], const u32* a, u64 b) {  // a in registers
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES128 "}, {%128, %129, %130, %131}, %132, "
               "1, 1, 1, 1;"
               : OUT128(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

// ---- the three warpgroups

struct Walk { int low, high, tiles; };  // places in the token's row of indices

// A thread of the gatherers: warp w has rows 16w to 16w + 15, four at a time; eight lanes have a row's 128 bytes.
struct Gatherer {
  const Arguments& a;
  const int* indices;
  Walk walk;
  u32 shared;
  int warp, lane;

  __device__ __forceinline__ int index(int tile) const {  // of row lane % 16 of the warp, -1 if it takes no part
    int place = walk.low + tile * TILE + warp * 16 + lane % 16;
    return place < walk.high ? __ldg(indices + place * a.stride_index) : -1;
  }
  __device__ __forceinline__ i64 offset(int slot) const {  // in bytes; negative, if it takes no part
    if (slot < 0) return -1;
    int page = slot / (int)a.page_size;
    return page * a.stride_page + (slot - page * (int)a.page_size) * a.stride_slot;
  }
  __device__ __forceinline__ i64 offset_of(i64 mine, int i) const {
    return __shfl_sync(~0u, mine, 4 * i + lane / 8);
  }
  __device__ __forceinline__ u32 latents(int tile) const { return shared + LATENTS + tile % STAGES * (BLOCKS * BLOCK); }
  __device__ __forceinline__ u32 full(int tile, int band) const {
    return shared + FULL + 8 * (tile % STAGES * BANDS + band);
  }
  // Where the thread's piece of row i goes in a block, if it is piece `piece` of the row.
  __device__ __forceinline__ u32 place(int i, int piece) const {
    int row = 4 * i + lane / 8;
    return (warp * 16 + row) * 128 + ((piece ^ row & 7) << 4);
  }
  // The tile's room is free; say which keys are real.
  __device__ __forceinline__ void enter(int tile, i64 mine) const {
    if (tile >= STAGES) wait(shared + EMPTY + 8 * (tile % STAGES), (tile / STAGES - 1) & 1);
    u32 real = __ballot_sync(~0u, mine >= 0);
    if (lane == 0) {
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared + VALID + 8 * (tile % STAGES) + 2 * warp), "h"((u16)real)
                   : "memory");
      arrive(full(tile, 0));
    }
  }
  // Columns 64 * block on of bfloat16 rows; `from` is the column's address in slot 0.
  __device__ __forceinline__ void copy_block(int tile, int block, const char* from, const i64 (&rows)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 to = latents(tile) + block * BLOCK + place(i, lane % 8);
      const char* piece = from + (rows[i] < 0 ? 0 : rows[i]) + lane % 8 * 16;
#if WIDE
      copy_async(to, piece, rows[i] >= 0);
#else
      store_shared(to, rows[i] >= 0 ? load_piece(piece) : make_uint4(0, 0, 0, 0));
#endif
    }
  }
  __device__ __forceinline__ void end_copies(int tile, int band) const {
#if WIDE
    arrive_when_copied(full(tile, band));
#else
    fence_for_wgmma();
    arrive(full(tile, band));
#endif
  }

#if FP8
  // Half of the thread's values of a tile: 256 columns of four rows, a piece of 16 from each tile of 128.
  struct Raw { uint4 pieces[2][4]; float scales[2][4]; };

  __device__ __forceinline__ void load(Raw& raw, i64 mine, int half) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      i64 row = offset_of(mine, i);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        raw.pieces[c][i] = make_uint4(0, 0, 0, 0);
        raw.scales[c][i] = 0.0f;
        if (row >= 0) {
          raw.pieces[c][i] = load_piece(a.kv + row + (2 * half + c) * 128 + lane % 8 * 16);
          raw.scales[c][i] = __ldg((const float*)(a.scales + row) + 2 * half + c);
        }
      }
    }
  }
  __device__ __forceinline__ void convert(const Raw& raw, int tile, int half) const {
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // 16 values are two pieces of bfloat16; of the two blocks of the 128, lanes 0-3 of a row have the first.
        u32 to = latents(tile) + (4 * half + 2 * c + lane % 8 / 4) * BLOCK;
        uint4 x = raw.pieces[c][i];
        float s = raw.scales[c][i];
        uint4 first = make_uint4(scaled(x.x, s), scaled(x.x >> 16, s), scaled(x.y, s), scaled(x.y >> 16, s));
        uint4 second = make_uint4(scaled(x.z, s), scaled(x.z >> 16, s), scaled(x.w, s), scaled(x.w >> 16, s));
        // Half of a row's lanes store their second piece first: eight lanes at a time meet no bank twice.
        bool swap = lane & 4;
        store_shared(to + place(i, lane % 4 * 2 + swap), swap ? second : first);
        store_shared(to + place(i, lane % 4 * 2 + !swap), swap ? first : second);
      }
    fence_for_wgmma();
    arrive(full(tile, half));
  }

  __device__ __forceinline__ void run() const {
    if (walk.tiles == 0) return;
    i64 mine = offset(index(0));
    Raw left, right;  // the next half is under way while this one is converted
    load(left, mine, 0);
    for (int tile = 0; tile < walk.tiles; tile++) {
      int next = index(tile + 1);  // beyond the last tile, -1
      load(right, mine, 1);
      enter(tile, mine);
      i64 rows[4];
#pragma unroll
      for (int i = 0; i < 4; i++) rows[i] = offset_of(mine, i);
      copy_block(tile, BLOCKS - 1, a.rope, rows);
      end_copies(tile, 2);
      convert(left, tile, 0);
      mine = offset(next);
      load(left, mine, 0);
      convert(right, tile, 1);
    }
  }
#else
  __device__ __forceinline__ void run() const {
    int next = walk.tiles ? index(0) : -1;
    for (int tile = 0; tile < walk.tiles; tile++) {
      i64 mine = offset(next), rows[4];
      next = index(tile + 1);  // beyond the last tile, -1
#pragma unroll
      for (int i = 0; i < 4; i++) rows[i] = offset_of(mine, i);
      enter(tile, mine);
#pragma unroll(WIDE ? BLOCKS : 1)
      for (int block = 0; block < BLOCKS; block++) {
        copy_block(tile, block, a.kv + block * 128, rows);
        if (block % 4 == 3 || block == BLOCKS - 1) end_copies(tile, block / 4);
      }
    }
  }
#endif
};

// Multiply the sums of a thread's two rows.
__device__ __forceinline__ void fade(float (&sums)[128], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    sums[i] *= upper;
    sums[i + 1] *= upper;
    sums[i + 2] *= lower;
    sums[i + 3] *= lower;
  }
}

// A row of a thread's sums, of columns `first` on. Lanes of a quad have pairs of columns of every block of eight; where
// pairs are 4 bytes, two lanes swap, so that a quad writes 32 bytes in a row.
__device__ __forceinline__ void write_row(const float (&sums)[128], int lower, float share, char* row, bool wide, int lane) {
  int at = 2 * lower;
  if (wide) {
#pragma unroll
    for (int j = 0; j < 32; j++)
      *(float2*)(row + (8 * j + lane % 4 * 2) * 4) =
          make_float2(sums[4 * j + at] * share, sums[4 * j + at + 1] * share);
    return;
  }
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    u32 even = pack(sums[4 * j + at] * share, sums[4 * j + at + 1] * share);
    u32 odd = pack(sums[4 * j + 4 + at] * share, sums[4 * j + 5 + at] * share);
    u32 other = __shfl_xor_sync(~0u, lane & 1 ? even : odd, 1);
    u32 x = lane & 1 ? other : even, y = lane & 1 ? odd : other;
    char* to = row + (8 * (j + (lane & 1)) + (lane % 4 / 2) * 4) * 2;
    if (row) {
#if WIDE
      *(uint2*)to = make_uint2(x, y);
#else
      ((u16*)to)[0] = x; ((u16*)to)[1] = x >> 16; ((u16*)to)[2] = y; ((u16*)to)[3] = y >> 16;
#endif
    }
  }
}

struct Place { i64 token; int part, head; };  // of a CTA; its first head

__device__ __forceinline__ void write(
    const Arguments& a, const Place& at, const float (&sums)[128], float upper, float lower, int columns, int row, int lane) {
  bool wide = a.parts > 1;
  char* out = a.out + at.part * a.stride_out_part + at.token * a.stride_out;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int head = at.head + row + 8 * i;
    char* to = out + ((i64)head * VALUES + columns) * (wide ? 4 : 2);
    if (wide && head >= a.heads) continue;
    write_row(sums, i, i ? lower : upper, head < a.heads ? to : nullptr, wide, lane);
  }
}

// Logits, softmax, and columns 0 to 255.
__device__ __forceinline__ void left(const Arguments& a, const Place& at, int tiles, char* memory, u32 shared, int thread) {
  int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  float scale = __int_as_float((int)a.scale);
  float sums[128];
#pragma unroll
  for (int i = 0; i < 128; i++) sums[i] = 0.0f;
  float highest[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};  // total: of this thread's keys
  float* factors = (float*)(memory + FACTORS);

  for (int tile = 0; tile < tiles; tile++) {
    int stage = tile % STAGES;
    u32 parity = tile / STAGES & 1, latents = shared + LATENTS + stage * (BLOCKS * BLOCK);
    float s[32];
    u64 query = rows_along_k(shared + QUERIES), key = rows_along_k(latents);
    hold(s);
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
      if (step % 16 == 0) {
        wait(shared + FULL + 8 * (stage * BANDS + step / 16), parity);
        fence_for_wgmma();  // cp.async has no fence of its own
      }
      if (step == 0) begin();
      int to = (step / 4 * BLOCK + step % 4 * 32) >> 4;
      multiply_keys(s, query + to, key + to, step > 0);
    }
    finish(s);

    // Key 8j + lane % 4 * 2 + e of row `row` is s[4j + e], and of row + 8 s[4j + 2 + e].
    u64 valid = *(const volatile u64*)(memory + VALID + 8 * stage);
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] *= scale;
    if (~valid) {
      u64 mine = valid >> (lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (!(mine >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITE;
    }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float above = highest[i];
#pragma unroll
      for (int j = 0; j < 8; j++) above = fmaxf(above, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      above = fmaxf(above, __shfl_xor_sync(~0u, above, 1));
      above = fmaxf(above, __shfl_xor_sync(~0u, above, 2));
      float shift = above == -INFINITE ? 0.0f : above;  // nothing is finite yet: every exponential is 0
      factor[i] = exp2_(highest[i] - shift);
      highest[i] = above;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * i + e];
          x = exp2_(x - shift);
          sum += x;
        }
      total[i] = total[i] * factor[i] + sum;
    }
    u32 p[16];  // p[2j] of row `row`, p[2j + 1] of row + 8: by four, wgmma's operand in registers
#pragma unroll
    for (int j = 0; j < 16; j++) p[j] = pack(s[2 * j], s[2 * j + 1]);

    if (tile > 0) wait(shared + TAKEN, (tile - 1) & 1);  // the right warpgroup has done with the tile before
#pragma unroll
    for (int j = 0; j < 16; j++)
      store_shared(shared + WEIGHTS + (row + j % 2 * 8) * 128 + ((j / 2 ^ row & 7) << 4) + lane % 4 * 4, p[j]);
    if (lane % 4 == 0) {
      factors[row] = factor[0];
      factors[row + 8] = factor[1];
    }
    fence_for_wgmma();
    arrive(shared + GIVEN);

    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) fade(sums, factor[0], factor[1]);
    u64 value = rows_along_columns(latents);
    hold(sums);
    begin();
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_values(sums, p + 4 * step, value + (step * 2048 >> 4));
    finish(sums);
    if (lane == 0) arrive(shared + EMPTY + 8 * stage);
  }

  float* shares = (float*)(memory + SHARES);
  float share[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    total[i] += __shfl_xor_sync(~0u, total[i], 1);
    total[i] += __shfl_xor_sync(~0u, total[i], 2);
    float sum = total[i] == 0.0f ? 1.0f : total[i];
    float lse = total[i] == 0.0f ? -INFINITE : highest[i] + log2_(sum);
    share[i] = 1.0f / sum;
    int head = at.head + row + 8 * i;
    if (a.sink && a.parts == 1 && head < a.heads)  // its share of the sum is lost; nothing is lost of nothing
      share[i] *= total[i] == 0.0f ? 0.0f : 1.0f / (1.0f + exp2_(__ldg(a.sink + head * a.stride_sink) * LOG2_E - lse));
    if (lane % 4 == 0) {
      shares[row + 8 * i] = share[i];
      if (head < a.heads) a.lse[at.part * a.stride_lse_part + at.token * a.stride_lse + head] = lse * LN_2;
    }
  }
  arrive(shared + ENDED);
  write(a, at, sums, share[0], share[1], 0, row, lane);
}

// Columns 256 to 511.
__device__ __forceinline__ void right(const Arguments& a, const Place& at, int tiles, char* memory, u32 shared, int thread) {
  int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  float sums[128];
#pragma unroll
  for (int i = 0; i < 128; i++) sums[i] = 0.0f;
  const volatile float* factors = (const volatile float*)(memory + FACTORS);
  for (int tile = 0; tile < tiles; tile++) {
    int stage = tile % STAGES;
    u32 latents = shared + LATENTS + stage * (BLOCKS * BLOCK);
    wait(shared + FULL + 8 * (stage * BANDS + 1), tile / STAGES & 1);
    wait(shared + GIVEN, tile & 1);
    fence_for_wgmma();
    float upper = factors[row], lower = factors[row + 8];
    if (__any_sync(~0u, upper != 1.0f || lower != 1.0f)) fade(sums, upper, lower);
    u64 weight = rows_along_k(shared + WEIGHTS), value = rows_along_columns(latents + 4 * BLOCK);
    hold(sums);
    begin();
#pragma unroll
    for (int step = 0; step < 4; step++)
      multiply_values(sums, weight + (step * 32 >> 4), value + (step * 2048 >> 4));
    finish(sums);
    if (lane == 0) {
      arrive(shared + EMPTY + 8 * stage);
      arrive(shared + TAKEN);
    }
  }
  wait(shared + ENDED, 0);
  const volatile float* shares = (const volatile float*)(memory + SHARES);
  write(a, at, sums, shares[row], shares[row + 8], HALF, row, lane);
}

// CTA (block of heads, part, token), the first fastest: they share latents in L2.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) sparse_mla_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char given[];
  char* memory = given + (-shared_address(given) & 1023);  // the swizzle counts from multiples of 1024 bytes
  u32 shared = shared_address(memory);
  asm volatile("griddepcontrol.launch_dependents;");  // what joins the parts may start, and waits for their end itself
  int thread = threadIdx.x, group = __shfl_sync(~0u, thread / GROUP, 0);  // the same in a warp, and the compiler sees it
  int blocks = ((int)a.heads + HEADS - 1) / HEADS, parts = (int)a.parts;
  Place at;
  at.head = blockIdx.x % blocks * HEADS;
  at.part = blockIdx.x / blocks % parts;
  at.token = blockIdx.x / blocks / parts;

  if (thread == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      for (int band = 0; band < BANDS; band++)  // the first band comes with the masks of four warps
        make_barrier(shared + FULL + 8 * (stage * BANDS + band), GROUP + (band == 0 ? 4 : 0));
      make_barrier(shared + EMPTY + 8 * stage, 8);
    }
    make_barrier(shared + GIVEN, GROUP);
    make_barrier(shared + TAKEN, 4);
    make_barrier(shared + ENDED, GROUP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (group > 0) {  // the queries: 32 rows at a time, eight lanes for 128 bytes of a row; rows beyond the heads are 0
    int piece = thread % 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = (thread - GROUP) / 8 + 32 * i, head = at.head + row;
      bool real = head < a.heads;
      const char* from = a.q + at.token * a.stride_q + (real ? head : 0) * a.stride_q_head;
      u32 to = shared + QUERIES + row * 128 + ((piece ^ row & 7) << 4);
#pragma unroll(WIDE ? BLOCKS : 1)
      for (int block = 0; block < BLOCKS; block++) {
        const char* column = from + (block * 64 + piece * 8) * a.stride_q_dim;
#if WIDE
        copy_async(to + block * BLOCK, column, real);
#else
        store_shared(to + block * BLOCK, real ? load_piece(column, a.stride_q_dim) : make_uint4(0, 0, 0, 0));
#endif
      }
    }
  }

  // The places of this part, without the -1 at both of its ends.
  const int* indices = a.indices + at.token * a.stride_indices;
  int k = (int)a.k, each = ((k + TILE - 1) / TILE + parts - 1) / parts * TILE;
  int first = min(at.part * each, k), last = min(first + each, k);
  if (a.lengths) {
    i64 length = a.lengths_are_long ? ((const i64*)a.lengths)[at.token * a.stride_lengths]
                                    : ((const int*)a.lengths)[at.token * a.stride_lengths];
    last = (int)min((i64)last, max(length, (i64)0));
  }
  int low = 0x7fffffff, high = 0;
  for (int place = first + thread; place < last; place += 3 * GROUP)
    if (__ldg(indices + place * a.stride_index) >= 0) {
      low = min(low, place);
      high = max(high, place + 1);
    }
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  volatile int* ends = (volatile int*)(memory + ENDS);
  if (thread % 32 == 0) {
    ends[thread / 32] = low;
    ends[12 + thread / 32] = high;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < 12; warp++) {
    low = min(low, ends[warp]);
    high = max(high, ends[12 + warp]);
  }
  Walk walk;
  walk.low = low < high ? first + (low - first) / TILE * TILE : 0;
  walk.high = low < high ? high : 0;
  walk.tiles = (walk.high - walk.low + TILE - 1) / TILE;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 128;");
    Gatherer{a, indices, walk, shared, thread / 32, thread % 32}.run();
    asm volatile("cp.async.wait_all;" ::: "memory");  // nothing may be under way when the CTA ends
    return;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_for_wgmma();
  if (group == 1) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    synchronize(1, 2 * GROUP);  // the queries are there
    left(a, at, walk.tiles, memory, shared, thread - GROUP);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 160;");
    synchronize(1, 2 * GROUP);
    right(a, at, walk.tiles, memory, shared, thread - 2 * GROUP);
  }
}

struct Combination {
  const float* outs; const float* lses;  // [parts][rows][512], [parts][rows]; a row is a head of a token
  const float* sink; i64 stride_sink;
  char* out; i64 stride_out;             // in bytes
  float* lse; i64 stride_lse;
  i64 parts, rows, heads;
};

// CTA r joins the parts of row r in their order; a thread has four columns.
extern "C" __global__ void __launch_bounds__(GROUP) combine_kernel(const __grid_constant__ Combination a) {
  u32 heads = (u32)a.heads;
  i64 row = blockIdx.x, token = blockIdx.x / heads, head = blockIdx.x % heads;
  int thread = threadIdx.x, parts = (int)a.parts;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the parts are written; so no load may go by another cache
  float highest = -INFINITE;
  for (int part = thread % 32; part < parts; part += 32) highest = fmaxf(highest, a.lses[part * a.rows + row]);
#pragma unroll
  for (int step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  float shift = highest == -INFINITE ? 0.0f : highest;
  float total = 0.0f;
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int part = 0; part < parts; part++) {
    float weight = exp2_((a.lses[part * a.rows + row] - shift) * LOG2_E);
    float4 x = *(const float4*)(a.outs + (part * a.rows + row) * VALUES + 4 * thread);
    sums.x += weight * x.x;
    sums.y += weight * x.y;
    sums.z += weight * x.z;
    sums.w += weight * x.w;
    total += weight;
  }
  float sum = total == 0.0f ? 1.0f : total, share = 1.0f / sum;
  float lse = total == 0.0f ? -INFINITE : shift + log2_(sum) * LN_2;
  if (a.sink) share *= total == 0.0f ? 0.0f : 1.0f / (1.0f + exp2_((a.sink[head * a.stride_sink] - lse) * LOG2_E));
  if (thread == 0) a.lse[token * a.stride_lse + head] = lse;
  u32 low = pack(sums.x * share, sums.y * share), high = pack(sums.z * share, sums.w * share);
  char* to = a.out + token * a.stride_out + (head * VALUES + 4 * thread) * 2;
#if WIDE
  *(uint2*)to = make_uint2(low, high);
#else
  ((u16*)to)[0] = low; ((u16*)to)[1] = low >> 16; ((u16*)to)[2] = high; ((u16*)to)[3] = high >> 16;
#endif
}
