// The read floor of select: what any exact selection must at least do. Every element of every window [0, end) is loaded once,
// in 16-byte words, and folded into an unsigned maximum that lives in registers.
//
// Parallel over (row, split): a block of THREADS reads one contiguous share of one row, UNROLL words per thread in flight.
// Bound by bytes. The store is what keeps the loads alive; it needs a word of all ones, which no score but one NaN is.

template <typename ELEMENT, int THREADS, int UNROLL>
__global__ void __launch_bounds__(THREADS) select_floor_kernel(
    const ELEMENT* scores_ptr,       // [rows, columns]
    const int* ends_ptr,             // [rows]
    long long stride_scores_row,     // elements
    long long splits,                // blocks per row; the grid is rows * splits
    unsigned* sink_ptr)              // [rows * splits]
{
    constexpr int WIDTH = 16 / sizeof(ELEMENT);
    const int row = blockIdx.x / (int)splits, split = blockIdx.x % (int)splits;
    const ELEMENT* row_ptr = scores_ptr + row * stride_scores_row;
    const int end = max(ends_ptr[row], 0);

    // head: elements before the first 16-byte boundary; body: whole words; tail: what is left after them
    const int past = (int)((unsigned long long)row_ptr / sizeof(ELEMENT) % WIDTH);
    const int head = min(end, (WIDTH - past) % WIDTH);
    const int words = (end - head) / WIDTH;
    const uint4* body_ptr = (const uint4*)(row_ptr + head);

    const int share = (words + (int)splits - 1) / (int)splits;
    const int last = min(words, (split + 1) * share);
    int word = split * share + threadIdx.x;
    unsigned largest = 0;
    while (word + (UNROLL - 1) * THREADS < last) {
        uint4 loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) loaded[u] = __ldg(body_ptr + word + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            largest = max(largest, max(max(loaded[u].x, loaded[u].y), max(loaded[u].z, loaded[u].w)));
        word += UNROLL * THREADS;
    }
    for (; word < last; word += THREADS) {
        const uint4 loaded = __ldg(body_ptr + word);
        largest = max(largest, max(max(loaded.x, loaded.y), max(loaded.z, loaded.w)));
    }
    if (split == 0) {
        const ELEMENT* rest_ptr = row_ptr + words * WIDTH;  // from `head` on: the tail
        for (int column = threadIdx.x; column < end - words * WIDTH; column += THREADS) {
            const unsigned element = column < head ? row_ptr[column] : rest_ptr[column];
            largest = max(largest, sizeof(ELEMENT) == 4 ? element : element | element << 16);
        }
    }
    if (largest == 0xFFFFFFFFu) sink_ptr[blockIdx.x] = largest;
}
