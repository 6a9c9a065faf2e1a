"""Device functions of kernel_triton_code.py: windows, loads, the search for a threshold, and writing."""

import triton
import triton.language as tl

from keysift.dispatch import TRITON_INTERPRETS

LOWEST = tl.constexpr(-2139095041)  # the ordered key of -inf
HIGHEST = tl.constexpr(2139095040)  # the ordered key of +inf
INTERPRETS = tl.constexpr(TRITON_INTERPRETS)


@triton.jit
def ordered_key(x):
    """Float to an int whose order is the float's."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    """The inverse of `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_window(
    row, start_ptr, end_ptr, stride_start, stride_end, next_n, columns, limit,
    HAS_START: tl.constexpr, HAS_END: tl.constexpr, HAS_TABLE: tl.constexpr,
):  # fmt: skip
    """The clamped window [lower, upper) of a row (CONTRACT.md, select 2), cut to the columns that have pages."""
    lower = columns * 0
    upper = columns
    if HAS_START:
        first = tl.load(start_ptr + row.to(tl.int64) * stride_start).to(tl.int64)
        lower = tl.minimum(tl.maximum(first, 0), columns.to(tl.int64)).to(tl.int32)
    if HAS_END:
        last = tl.load(end_ptr + (row // next_n).to(tl.int64) * stride_end).to(tl.int64)
        last = tl.maximum(last, -(1 << 40)) - next_n + row % next_n + 1
        upper = tl.minimum(tl.maximum(last, lower), columns.to(tl.int64)).to(tl.int32)
    if HAS_TABLE:
        upper = tl.minimum(upper.to(tl.int64), lower + tl.cast(limit, tl.int64)).to(tl.int32)
    return lower, upper


@triton.jit
def as_float(x):
    """Scores as float32; in the interpreter bfloat16 by its bits, since its cast loses denormals."""
    if INTERPRETS and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def load_columns(row_ptr, column, lower, upper, columns, WHOLE: tl.constexpr):
    """Scores at `column` as float32, -inf outside the window; WHOLE: all of them are inside.

    Groups of 16 columns are read whole, so that the compiler may use vector loads whatever the window's ends are.
    """
    if WHOLE:
        return as_float(tl.load(row_ptr + column))
    near = (column >= lower // 16 * 16) & (column < (upper + 15) // 16 * 16) & (column < columns)
    x = as_float(tl.load(row_ptr + column, mask=near, other=-float("inf")))
    return tl.where((column >= lower) & (column < upper), x, -float("inf"))


@triton.jit
def tile_columns(origin, BLOCK: tl.constexpr):
    """BLOCK ascending columns from `origin` as [BLOCK // 32, 32], so that a row of the tile stays within a warp."""
    return origin + tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def count_columns(row_ptr, lower, upper, columns, a, b, BLOCK: tl.constexpr):
    """How many columns of [lower, upper) exceed a, and b."""
    above_a = tl.zeros((BLOCK // 32, 32), tl.int32)
    above_b = tl.zeros((BLOCK // 32, 32), tl.int32)
    for first in range(lower // 16 * 16, upper, BLOCK):
        x = load_columns(row_ptr, tile_columns(first, BLOCK), lower, upper, columns, False)
        above_a += (x > a).to(tl.int32)
        above_b += (x > b).to(tl.int32)
    return tl.sum(above_a), tl.sum(above_b)


@triton.jit
def search_threshold(
    x, row_ptr, lower, upper, columns, k, slack, low, count_low, high, IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr
):
    """(threshold key, need), given keys with count(low) >= k and count(high) = 0, or count(low) < k: then (low, 0).

    Stops early where between k and k + slack values exceed `low`: then nothing equal to the threshold is needed.
    Two probes a round, around where the k-th value lies if keys are spread evenly between the brackets; thirds of the
    bracket after a round that did not halve it, so a round gains at least half a bit.
    """
    low = tl.cast(low, tl.int32)
    high = tl.cast(high, tl.int32)
    count_high = tl.cast(k * 0, tl.int32)
    thirds = high < low
    while (count_low > k + slack) & (high - 1 != low):
        width = (high - low).to(tl.uint32, bitcast=True)
        inside = (count_low - count_high).to(tl.float32)
        expected = tl.fdiv((count_low - k).to(tl.float32), inside)
        spread = 0.75 * tl.rsqrt(inside)
        left = tl.maximum(tl.where(thirds, 0.33, expected - spread), 0.0)
        right = tl.minimum(tl.where(thirds, 0.67, expected + spread), 1.0)
        span = width.to(tl.float32) * 0.9999999  # a float may round up to 2**32, which no uint32 holds
        step_a = tl.minimum(tl.maximum((span * left).to(tl.uint32), 1), width - 1)
        step_b = tl.minimum(tl.maximum((span * right).to(tl.uint32), step_a), width - 1)
        a = low + step_a.to(tl.int32, bitcast=True)
        b = low + step_b.to(tl.int32, bitcast=True)
        if IN_MEMORY:
            above_a, above_b = count_columns(row_ptr, lower, upper, columns, from_key(a), from_key(b), BLOCK)
        else:  # both counts in one reduction: a block has at most 2**14 values
            both = tl.sum((x > from_key(a)).to(tl.int32) + tl.where(x > from_key(b), 65536, 0))
            above_a = both & 65535
            above_b = both >> 16
        # The new bracket is [b, high], [a, b] or [low, a].
        beyond_a = above_a >= k
        beyond_b = above_b >= k
        high = tl.where(beyond_b, high, tl.where(beyond_a, b, a))
        count_high = tl.where(beyond_b, count_high, tl.where(beyond_a, above_b, above_a))
        low = tl.where(beyond_b, b, tl.where(beyond_a, a, low))
        count_low = tl.where(beyond_b, above_b, tl.where(beyond_a, above_a, count_low))
        thirds = (high - low).to(tl.uint32, bitcast=True) > width // 2
    enough = count_low <= k + slack
    return tl.where(enough, low, high), tl.where(enough, 0, k - count_high)


@triton.jit
def sample_cut(row_ptr, lower, upper, k, SAMPLE: tl.constexpr):
    """The key of a value that a little more than k of the window should reach, from SAMPLE of its columns."""
    length = (upper - lower).to(tl.int64)
    step = tile_columns(0, SAMPLE)
    jitter = ((step * 1103515245 + 12345) >> 8) & 0xFFFF  # periodic data must not line up with the strides
    column = lower + (step * length + ((length * jitter) >> 16)) // SAMPLE
    x = as_float(tl.load(row_ptr + column))
    x = tl.where(x > -float("inf"), x, -float("inf"))
    mean = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
    rank = (mean + 4.5 * tl.sqrt(mean) + 4.0).to(tl.int32)
    eligible = tl.sum((x > -float("inf")).to(tl.int32))
    key, need = search_threshold(
        x,
        row_ptr,
        lower,
        upper,
        upper,
        rank,
        rank // 32,
        k * 0 + LOWEST,
        eligible,
        ordered_key(tl.max(x)),
        False,
        SAMPLE,
    )
    return tl.where(eligible <= rank, LOWEST + 1, tl.where(need == 0, key + 1, key))


@triton.jit
def pack_bits(flags):
    """Flags [W, 32] as W words, column j in bit j."""
    return tl.sum(tl.where(flags, 1 << tl.arange(0, 32)[None, :], 0), 1)


@triton.jit
def count_bits(words):
    """How many bits of each word are set."""
    pairs = words.to(tl.uint32, bitcast=True)
    pairs = pairs - ((pairs >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((eights * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def lowest_bit(words):
    """The lowest set bit of each word: (as a word, its number)."""
    lowest = words & -words
    number = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return lowest, number


@triton.jit
def write_chosen(
    x, t, need, base, ties, from_list, kept_column_ptr, first, row, lower,
    out_ptr, values_ptr, scores_ptr, table_ptr, page_rows_ptr,
    stride_scores, stride_out, stride_values, stride_table, stride_page_rows, page_size,
    ABSOLUTE: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the chosen of a tile behind `base`; returns the new base and the ties seen.

    The tile's columns ascend: they are those from `first` on, or the list of survivors from place `first` on.
    """
    chosen = pack_bits(x > t)
    if need > ties:
        equal = pack_bits(x == t)
        number = count_bits(equal)
        ends = tl.cumsum(number, 0)
        quota = tl.minimum(tl.maximum(need - ties - (ends - number), 0), number)
        ties += tl.sum(number, 0)
        for turn in range(tl.max(quota, 0)):
            lowest, bit = lowest_bit(equal)
            chosen = tl.where(turn < quota, chosen | lowest, chosen)
            equal = equal ^ lowest
    word = tl.arange(0, BLOCK // 32)
    words = tl.gather(chosen, word, 0)  # from eight copies to one word a thread
    number = count_bits(words)
    ends = tl.cumsum(number, 0)
    position = base + ends - number
    for turn in range(tl.max(number, 0)):
        lowest, bit = lowest_bit(words)
        words = words ^ lowest
        write = turn < number
        column = first + word * 32 + bit
        if from_list:
            column = tl.load(kept_column_ptr + column, mask=write, other=0)
        index = column
        if not ABSOLUTE:
            index = column - lower
        if HAS_TABLE:
            table_row = row.to(tl.int64)
            if HAS_PAGE_ROWS:
                table_row = tl.load(page_rows_ptr + row.to(tl.int64) * stride_page_rows).to(tl.int64)
            page = tl.load(table_ptr + table_row * stride_table + index // page_size, mask=write, other=0).to(tl.int64)
            index = tl.where(page < 0, -1, page * page_size + index % page_size).to(tl.int32)
        tl.store(out_ptr + row.to(tl.int64) * stride_out + position, index, mask=write)
        if HAS_VALUES:
            value = tl.load(scores_ptr + row.to(tl.int64) * stride_scores + column, mask=write)
            if HAS_TABLE:
                value = tl.where(page < 0, -float("inf"), as_float(value)).to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + row.to(tl.int64) * stride_values + position, value, mask=write)
        position += 1
    return base + tl.sum(number, 0), ties


@triton.jit
def close_row(
    total, row, k, out_ptr, values_ptr, counts_ptr, stride_out, stride_values, stride_counts,
    HAS_VALUES: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """-1 (and -inf) behind the `total` selected; the count."""
    for first in range(total, k, 256):
        slot = first + tl.arange(0, 256)
        tl.store(out_ptr + row.to(tl.int64) * stride_out + slot, -1, mask=slot < k)
        if HAS_VALUES:
            tl.store(values_ptr + row.to(tl.int64) * stride_values + slot, -float("inf"), mask=slot < k)
    if HAS_COUNTS:
        tl.store(counts_ptr + row.to(tl.int64) * stride_counts, total)


@triton.jit
def row_segment(lower, upper, part, SPLITS: tl.constexpr):
    """Segment `part` of the window: [first, last), a multiple of 64 columns but for the ends."""
    origin = lower // 16 * 16
    size = (((upper - origin) + SPLITS - 1) // SPLITS + 63) // 64 * 64
    first = tl.minimum(origin + part * size, upper)
    return tl.maximum(first, lower), tl.minimum(first + size, upper)


@triton.jit
def append_survivors(x, cut, first, kept, row_ptr, kept_ptr, kept_column_ptr, FIT: tl.constexpr, BLOCK: tl.constexpr):
    """Append what reaches the cut in the tile of columns from `first` on; returns the number of survivors."""
    word = tl.arange(0, BLOCK // 32)
    words = tl.gather(pack_bits(x >= cut), word, 0)  # from eight copies to one word a thread
    number = count_bits(words)
    ends = tl.cumsum(number, 0)
    place = kept + ends - number
    turns = tl.max(number, 0)
    if kept >= FIT:  # lost already; only the number counts
        turns = turns * 0
    for turn in range(turns):
        lowest, bit = lowest_bit(words)
        words = words ^ lowest
        write = (turn < number) & (place < FIT)
        column = first + word * 32 + bit
        value = as_float(tl.load(row_ptr + column, mask=write, other=0.0))
        tl.store(kept_ptr + place, value, mask=write)
        tl.store(kept_column_ptr + place, column, mask=write)
        place += 1
    return kept + tl.sum(number, 0)
