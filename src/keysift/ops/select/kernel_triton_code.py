"""select in Triton, for AMD and NVIDIA alike.

1. A row of at most FIT columns is read once into registers (`select_whole_kernel`).
2. A longer row is sampled at jittered strides; the sample gives a cut that a little more than k values should reach.
3. `select_scan_kernel` reads each segment of the row once and appends what reaches the cut to a list, in column order:
   the compares of 32 columns become one word, a prefix sum over words gives places, and set bits are stored one a turn.
4. `select_finish_kernel` reads the row's lists into registers. The threshold t is found by counting: two probes a round
   placed where the counts so far say the k-th value lies, until exactly k values exceed t, or t is the k-th value and
   `need` of its equals, lowest columns first, complete the set. Compares are of floats: NaN never counts, -0.0 is 0.0.
5. If the cut was unlucky, or values crowd at it, the same search counts over the row in memory: slower, not different.
6. The chosen columns are written in ascending order, so every run gives the same bits. No program waits for another.
Cost: one read of the row, two launches for long rows; about 15 instructions an element in 3, 6 a round in 4.
"""

import triton
import triton.language as tl

from .kernel_triton_parts import (
    HIGHEST,
    LOWEST,
    append_survivors,
    close_row,
    count_columns,
    from_key,
    load_columns,
    ordered_key,
    row_segment,
    row_window,
    sample_cut,
    search_threshold,
    tile_columns,
    write_chosen,
)


@triton.jit(do_not_specialize=["k", "next_n", "limit", "page_size"])
def select_whole_kernel(
    scores_ptr, start_ptr, end_ptr, table_ptr, page_rows_ptr, out_ptr, values_ptr, counts_ptr,
    columns, k, next_n, limit, page_size,
    stride_scores, stride_start, stride_end, stride_table, stride_page_rows, stride_out, stride_values, stride_counts,
    HAS_START: tl.constexpr, HAS_END: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_PAGE_ROWS: tl.constexpr,
    HAS_VALUES: tl.constexpr, HAS_COUNTS: tl.constexpr, ABSOLUTE: tl.constexpr, FIT: tl.constexpr,
):  # fmt: skip
    """One program per row of at most FIT columns."""
    row = tl.program_id(0)
    columns = tl.cast(columns, tl.int32)  # it may come as a constant 1
    lower, upper = row_window(
        row, start_ptr, end_ptr, stride_start, stride_end, next_n, columns, limit, HAS_START, HAS_END, HAS_TABLE
    )
    row_ptr = scores_ptr + row.to(tl.int64) * stride_scores
    origin = lower // 16 * 16
    x = load_columns(row_ptr, tile_columns(origin, FIT), lower, upper, columns, False)
    x = tl.where(x > -float("inf"), x, -float("inf"))  # NaN out
    eligible = tl.sum((x > -float("inf")).to(tl.int32))
    t, need = search_threshold(
        x, row_ptr, lower, upper, columns, k, 0, k * 0 + LOWEST, eligible, ordered_key(tl.max(x)), False, FIT
    )
    total, _ = write_chosen(
        x, from_key(t), need, k * 0, k * 0, False, scores_ptr, origin, row, lower,
        out_ptr, values_ptr, scores_ptr, table_ptr, page_rows_ptr,
        stride_scores, stride_out, stride_values, stride_table, stride_page_rows, page_size,
        ABSOLUTE, HAS_VALUES, HAS_TABLE, HAS_PAGE_ROWS, FIT,
    )  # fmt: skip
    close_row(
        total, row, k, out_ptr, values_ptr, counts_ptr, stride_out, stride_values, stride_counts, HAS_VALUES, HAS_COUNTS
    )


@triton.jit(do_not_specialize=["k", "next_n", "limit", "first_row"])
def select_scan_kernel(
    scores_ptr, start_ptr, end_ptr, kept_ptr, kept_column_ptr, header_ptr,
    columns, k, next_n, limit, first_row, stride_scores, stride_start, stride_end,
    HAS_START: tl.constexpr, HAS_END: tl.constexpr, HAS_TABLE: tl.constexpr,
    SPLITS: tl.constexpr, FIT: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Keep what reaches the cut in a segment of a row.

    header [rows, 3, SPLITS]: how many, the cut's key, and how many the key before it kept, if that was tried.
    """
    part = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.program_id(1) + first_row
    columns = tl.cast(columns, tl.int32)
    lower, upper = row_window(
        row, start_ptr, end_ptr, stride_start, stride_end, next_n, columns, limit, HAS_START, HAS_END, HAS_TABLE
    )
    row_ptr = scores_ptr + row.to(tl.int64) * stride_scores
    key = k * 0 + LOWEST + 1
    kept = k * 0
    reach = k * 0
    if LISTED | (upper - lower <= FIT):
        if upper - lower > FIT:
            key = sample_cut(row_ptr, lower, upper, k, SAMPLE)
        first, last = row_segment(lower, upper, part, SPLITS)
        kept_ptr += (place * SPLITS + part) * FIT
        kept_column_ptr += (place * SPLITS + part) * FIT
        again = True
        while again:
            reach = kept
            kept = k * 0
            for block in range(first // 16 * 16, last, BLOCK):
                column = tile_columns(block, BLOCK)
                if (block >= first) & (block + BLOCK <= last):
                    x = load_columns(row_ptr, column, first, last, columns, True)
                else:
                    x = load_columns(row_ptr, column, first, last, columns, False)
                kept = append_survivors(x, from_key(key), block, kept, row_ptr, kept_ptr, kept_column_ptr, FIT, BLOCK)
            # Too many: values crowd at the cut, so keep what exceeds it. Segments cannot tell what others do.
            again = (SPLITS == 1) & (kept > FIT) & (reach == 0)
            if again:
                key += 1
    else:
        kept += FIT + 1
    header_ptr += place * (3 * SPLITS) + part
    tl.store(header_ptr, kept)
    tl.store(header_ptr + SPLITS, key)
    tl.store(header_ptr + 2 * SPLITS, reach)


@triton.jit(do_not_specialize=["k", "next_n", "limit", "page_size", "first_row"])
def select_finish_kernel(
    scores_ptr, start_ptr, end_ptr, table_ptr, page_rows_ptr, out_ptr, values_ptr, counts_ptr,
    kept_ptr, kept_column_ptr, header_ptr,
    columns, k, next_n, limit, page_size, first_row,
    stride_scores, stride_start, stride_end, stride_table, stride_page_rows, stride_out, stride_values, stride_counts,
    HAS_START: tl.constexpr, HAS_END: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_PAGE_ROWS: tl.constexpr,
    HAS_VALUES: tl.constexpr, HAS_COUNTS: tl.constexpr, ABSOLUTE: tl.constexpr,
    SPLITS: tl.constexpr, FIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the row's threshold from the survivors of all its segments; write the chosen of one segment."""
    part = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.program_id(1) + first_row
    columns = tl.cast(columns, tl.int32)
    lower, upper = row_window(
        row, start_ptr, end_ptr, stride_start, stride_end, next_n, columns, limit, HAS_START, HAS_END, HAS_TABLE
    )
    row_ptr = scores_ptr + row.to(tl.int64) * stride_scores
    first, last = row_segment(lower, upper, part, SPLITS)
    parts = tl.arange(0, SPLITS)
    header_ptr += place * (3 * SPLITS)
    kept = tl.load(header_ptr + parts)
    cut = tl.load(header_ptr + SPLITS + part)
    reach = tl.load(header_ptr + 2 * SPLITS + part)
    below = tl.where(cut == 0, -2, cut - 1)  # the key before the cut's value; -1 is -0.0, which equals 0.0
    survivors = tl.sum(kept, 0)
    begin = place * SPLITS * FIT
    ties = k * 0
    from_list = (survivors <= FIT) & ((survivors >= k) | (cut == LOWEST + 1))
    if from_list:
        ends = tl.cumsum(kept, 0)
        slot = tl.arange(0, FIT)
        # The segment that holds survivor `slot`: how many segments end at or before it, by bisection.
        owner = tl.zeros((FIT,), tl.int32)
        for halving in tl.static_range(1, 8):
            if SPLITS >> halving > 0:
                past = tl.gather(ends, owner + ((SPLITS >> halving) - 1), 0) <= slot
                owner = tl.where(past, owner + (SPLITS >> halving), owner)
        source = slot
        if SPLITS > 1:
            source = owner * FIT + slot - tl.gather(ends - kept, owner, 0)
        x = tl.load(kept_ptr + begin + source, mask=slot < survivors, other=-float("inf"))
        t, need = search_threshold(
            x, row_ptr, lower, upper, columns, k, 0, below, survivors, ordered_key(tl.max(x)), False, BLOCK
        )
        before = (owner < part).to(tl.int32)
        both = tl.sum(tl.where(x > from_key(t), before, 0) + tl.where(x == from_key(t), before << 16, 0))
        base = both & 65535
        ties = both >> 16
    elif (survivors < k) & (reach > FIT):  # what equals the key before the cut completes the set
        t = below
        need = k - survivors
        base = k * 0
    else:
        # Segments: many values may equal the cut. If not, search the row from what is known to one side of it.
        base, reach_before = count_columns(row_ptr, lower, first, columns, from_key(cut), from_key(below), BLOCK)
        above, reach = count_columns(row_ptr, first, upper, columns, from_key(cut), from_key(below), BLOCK)
        above += base
        reach += reach_before
        t = cut
        need = k - above
        if (above >= k) | (reach < k):
            if above >= k:
                reach = above
            else:
                cut = k * 0 + LOWEST
                reach, above = count_columns(row_ptr, lower, upper, columns, from_key(cut), float("inf"), BLOCK)
            t, need = search_threshold(
                tl.zeros((32,), tl.float32), row_ptr, lower, upper, columns,
                k, 0, cut, reach, k * 0 + HIGHEST, True, BLOCK,
            )  # fmt: skip
            below = tl.where((t == 0) | (t == -1), -2, t - 1)
            base, reach_before = count_columns(row_ptr, lower, first, columns, from_key(t), from_key(below), BLOCK)
        ties = tl.maximum(reach_before - base, 0)  # nothing precedes -inf, where nothing is needed either
    base += tl.minimum(ties, need)
    mine = tl.sum(tl.where(parts == part, kept, 0), 0)
    begin += part * FIT
    block = first // 16 * 16
    stop = last
    if from_list:
        block = 0
        stop = mine
    while (block < stop) & (base < k):
        tile = tile_columns(block, BLOCK)
        if from_list:
            x = tl.load(kept_ptr + begin + tile, mask=tile < mine, other=-float("inf"))
        else:
            x = load_columns(row_ptr, tile, first, last, columns, False)
        base, ties = write_chosen(
            x, from_key(t), need, base, ties, from_list, kept_column_ptr + begin, block, row, lower,
            out_ptr, values_ptr, scores_ptr, table_ptr, page_rows_ptr,
            stride_scores, stride_out, stride_values, stride_table, stride_page_rows, page_size,
            ABSOLUTE, HAS_VALUES, HAS_TABLE, HAS_PAGE_ROWS, BLOCK,
        )  # fmt: skip
        block += BLOCK
    if part == SPLITS - 1:
        close_row(
            base, row, k, out_ptr, values_ptr, counts_ptr, stride_out, stride_values, stride_counts,
            HAS_VALUES, HAS_COUNTS,
        )  # fmt: skip
