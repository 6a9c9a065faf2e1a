"""The machine code of kernel_cpu.py: numba functions for one row, and what numba has no name for.

All of it is in one file, since numba tells by the file whether the code that it kept on disk is still right.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

#: Columns up to which settling a whole row takes no longer than taking a sample and gathering.
SHORT = 128
#: Scores compared before the ranks of what was found are taken, while they are in the first-level cache.
CHUNK = 1 << 12
#: Bins of the largest histogram: 8 KiB, a quarter of a first-level cache.
BINS = 1 << 11
#: Bytes that scratch is aligned to.
LINE = 64

#: A call as run() hands it over: int64 each, addresses and element strides, 0 for what is not given (pages: -1).
FIELDS = (
    "next_task", "next_worker", "tasks", "chunk", "parts", "scratch", "capacity",
    "rows", "columns", "k", "infinity", "size", "scores", "stride", "next_n", "absolute", "page_size", "pages",
    "table_stride", "start", "start_size", "start_stride", "end", "end_size", "end_stride", "table", "table_size",
    "page_rows", "page_rows_size", "page_rows_stride", "out", "out_stride", "values", "values_stride",
    "counts", "counts_stride",
)  # fmt: skip
CALL = np.dtype([(name, np.int64) for name in FIELDS])

# Without wrappers for Python, which would take half of the time to compile.
_inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def work_32(address):
    """For float32."""
    _work(address, np.uint32)


def work_16(address):
    """For bfloat16 and float16."""
    _work(address, np.uint16)


@_inner
def _work(address, dtype):
    """One thread takes tasks, rows or pieces of rows, until none is left. address: a CALL, then pieces done per row.

    Without the caller's scratch, which pieces of a row would have to share, the thread takes its own.
    """
    call = _array(address, 1, CALL)[0]
    worker = _fetch_add(address + 8, 1)
    size = call.parts * 4 * (3 * call.capacity + BINS)
    own = np.empty(0 if call.scratch else size + LINE, np.uint8)
    mine = (np.int64(own.ctypes.data) + LINE - 1) // LINE * LINE
    while True:
        first = _fetch_add(address, call.chunk)
        if first >= call.tasks:
            return
        for task in range(first, min(first + call.chunk, call.tasks)):
            row = task // call.parts
            scratch = mine
            if call.scratch:
                scratch = call.scratch + (worker if call.parts == 1 else row) * size
            _select(call, address, row, task % call.parts, scratch, dtype)


@_inner
def _select(call, address, row, piece, scratch, dtype):
    """Piece `piece` of row `row`, and the row's result if that was the last of its pieces."""
    k, parts, capacity, infinity = call.k, call.parts, call.capacity, np.uint32(call.infinity)
    ineligible, entries = np.uint32(2 * infinity), parts * capacity
    histogram = _array(scratch + 12 * entries + 4 * BINS * piece, BINS, np.uint32)
    lists = _array(scratch, 3 * entries, np.uint32)
    columns, ranks, spare = lists[:entries], lists[entries : 2 * entries], lists[2 * entries :]
    mine = slice(piece * capacity, (piece + 1) * capacity)

    lower, upper = _window(call, row)
    scores = _array(call.scores + row * call.stride * call.size, call.columns, dtype)
    cut, room = _cut(scores, lower, upper, k, 1, infinity, ranks[mine], spare[mine], histogram)
    first, last = lower + (upper - lower) * piece // parts, lower + (upper - lower) * (piece + 1) // parts
    found = _gather(scores, first, last, k, cut, room, infinity, columns[mine], ranks[mine], spare[mine], histogram)
    if parts > 1:
        histogram[0] = found
        if _fetch_add(address + 8 * (len(FIELDS) + row), 1) + 1 < parts:
            return
        found = _join(columns, ranks, parts, _array(scratch + 12 * entries, parts * BINS, np.uint32))
    margin = 8
    while found < k and cut < ineligible:
        cut, room = _cut(scores, lower, upper, k, margin, infinity, ranks, spare, histogram)
        found = _gather(scores, lower, upper, k, cut, room, infinity, columns, ranks, spare, histogram)
        margin *= 8
    if found > k:
        found, _ = _keep_best(columns, ranks, found, k, spare, histogram)
    _publish(call, row, lower, scores, columns, found)


@_inner
def _cut(scores, lower, upper, k, margin, infinity, ranks, spare, histogram):
    """The rank that somewhat more than k scores of the window should beat; 2 * infinity, which every eligible one does.

    Also the length at which the list is first reduced: k where so many scores equal the cut that it would fill up.
    margin: by how much the sample is mistrusted; the kernel comes back with 8 times more when a row fell short of k.
    """
    count, room = upper - lower, len(ranks) - 64
    if count <= SHORT or 2 * k >= count:
        return np.uint32(2 * infinity), room
    # Near here the cost of samples and that of entries gathered for nothing balance.
    groups = min(max(64, int((k * count) ** (1 / 3)) // 2), count // 16, len(ranks) // 4)
    expected = 4 * groups * k / count
    wanted = min(k, margin * int(expected + 2.5 * expected**0.5 + 4))  # the best k samples are k scores
    if 2 * wanted > 4 * groups:
        return np.uint32(2 * infinity), room
    stratum = (count << 32) // groups
    for i in range(groups):
        # Scattered within equal strata, so that no period in the scores meets the sample's; four from a cache line.
        jitter = ((i * 0x9E3779B1) & 0xFFFFFFFF) * ((stratum >> 32) - 3) >> 32
        for j in range(4):
            ranks[4 * i + j] = _rank(scores[lower + (i * stratum >> 32) + jitter + j], infinity)
    rank, _ = _kth(ranks, 4 * groups, wanted, spare, histogram)
    beat = 0
    for i in range(4 * groups):
        beat += ranks[i] <= rank
    return np.uint32(min(rank, 2 * infinity - 1) + 1), k if beat * count > room * 4 * groups else room


@_inner
def _gather(scores, first, last, k, cut, room, infinity, columns, ranks, spare, histogram):
    """Append what beats `cut` of scores[first:last] to the list, in column order; returns its length.

    room: the length beyond which the list is reduced, for the first time.
    """
    found, column = np.int64(0), first
    while column < last:
        done, begin, stop = found, column, min(column + CHUNK, last)
        while column + 64 <= stop and found <= room:
            mask = _beats(scores, column, cut, infinity)
            if mask:
                number, tail = _bit_count(mask), _view(columns, found, 64)
                if number == 64:
                    for i in range(64):
                        tail[i] = column + i
                else:
                    # Four at a time: what the last ones write past the end is written over by the next block.
                    for i in range(0, number, 4):
                        for j in range(4):
                            tail[i + j] = np.uint64(column) + _lowest_bit(mask)
                            mask &= mask - np.uint64(1)
                found += number
            column += 64
        if column + 64 > stop and found <= room:
            while column < stop:
                columns[found] = column
                found += _rank(scores[column], infinity) < cut
                column += 1
        number = found - done
        new, where = _view(ranks, done, number), _view(columns, done, number)
        if number == column - begin:  # all of them: neighbours, which the compiler takes eight at a time
            near = _view(scores, begin, number)
            for i in range(number):
                new[i] = _rank(near[i], infinity)
        else:
            for i in range(number):
                new[i] = _rank(scores[where[i]], infinity)
        if found > room:
            # A later score that only equals the k-th best loses to it by its column.
            found, cut = _keep_best(columns, ranks, found, k, spare, histogram)
            room = len(columns) - 64
    return found


@_inner
def _kth(ranks, count, need, spare, histogram):
    """The `need`-th smallest of ranks[:count], and how many of those equal to it are among the first `need`.

    Rounds of a histogram over the range that is left, of which one bin stays; `spare` holds what is in it.
    """
    source = ranks
    while True:
        low, high = source[0], source[0]
        for i in range(count):
            low, high = min(low, source[i]), max(high, source[i])
        if need == count:
            return high, count
        if low == high or need == 1:
            return low, need
        bins = BINS
        while bins > 64 and 2 * bins > count:
            bins >>= 1
        shift = np.uint32(0)
        while (high - low) >> shift >= bins:
            shift += np.uint32(1)
        histogram[:bins] = 0
        for i in range(count):
            histogram[np.uint32(source[i] - low) >> shift] += np.uint32(1)
        bucket = 0
        while need > histogram[bucket]:
            need -= np.int64(histogram[bucket])
            bucket += 1
        low = np.uint32(low + (bucket << shift))
        if shift == 0:
            return low, need
        inside = np.uint64(0)
        for i in range(count):
            rank = source[i]
            spare[inside] = rank
            inside += np.uint64(np.uint32(rank - low) >> shift == 0)
        source, count = spare, np.int64(inside)


@_inner
def _keep_best(columns, ranks, count, k, spare, histogram):
    """Reduce the list to its k best, in place and in order; returns k and the worst rank kept."""
    worst, ties = _kth(ranks, count, k, spare, histogram)
    kept, first = np.uint64(0), count
    for i in range(count):
        if ties == 0:
            first = i
            break
        rank = ranks[i]
        columns[kept], ranks[kept] = columns[i], rank
        kept += np.uint64(rank <= worst)
        ties -= rank == worst
    for i in range(first, count):
        rank = ranks[i]
        columns[kept], ranks[kept] = columns[i], rank
        kept += np.uint64(rank < worst)
    return k, worst


@_inner
def _join(columns, ranks, parts, histograms):
    """Close the gaps between the lists of a row's pieces, of lengths histograms[BINS * piece]; returns the length."""
    capacity, found = len(columns) // parts, np.int64(0)
    for piece in range(parts):
        length = np.int64(histograms[piece * BINS])
        for i in range(length):
            columns[found + i] = columns[piece * capacity + i]
            ranks[found + i] = ranks[piece * capacity + i]
        found += length
    return found


@_inner
def _publish(call, row, lower, scores, columns, found):
    """The row of `out`, and of `values` and `counts` where they are wanted."""
    k = call.k
    out = _array(call.out + 4 * row * call.out_stride, k, np.int32)
    base = np.int64(0) if call.absolute else lower
    for i in range(found):
        out[i] = columns[i] - base
    out[found:] = -1
    lowest = call.infinity + (1 << (8 * call.size - 1))
    values = _array(call.values + call.size * row * call.values_stride, k if call.values else 0, scores.dtype)
    if call.values:
        for i in range(found):
            values[i] = scores[columns[i]]
        values[found:] = lowest
    if call.counts:
        _array(call.counts + 4 * row * call.counts_stride, 1, np.int32)[0] = found
    if call.pages >= 0:
        table_row = _read(call.page_rows, call.page_rows_size, row * call.page_rows_stride) if call.page_rows else row
        table = call.table + call.table_size * table_row * call.table_stride
        page_size = np.uint32(min(call.page_size, 1 << 31))  # no position is larger
        for i in range(found):
            index = np.int64(np.uint32(out[i]) // page_size)
            page = _read(table, call.table_size, index)
            if page >= 0:
                out[i] = page * call.page_size + (out[i] - index * page_size)
            else:
                out[i] = -1
                if call.values:
                    values[i] = lowest


@_inner
def _window(call, row):
    """[lower, upper), clamped to the columns, and to the pages there are."""
    lower, upper = np.int64(0), call.columns
    if call.start:
        lower = min(max(_read(call.start, call.start_size, row * call.start_stride), np.int64(0)), call.columns)
    if call.end:
        end = _read(call.end, call.end_size, row // call.next_n * call.end_stride)
        upper = min(max(end, -1), call.columns + call.next_n) - call.next_n + row % call.next_n + 1
    if call.pages >= 0:
        upper = min(upper, lower + call.pages * min(call.page_size, 1 << 31))
    return lower, max(min(upper, call.columns), lower)


@_inner
def _read(address, size, index):
    """Element `index` of int32 (size 4) or int64 (size 8) at `address`."""
    if size == 4:
        return np.int64(_array(address + 4 * index, 1, np.int32)[0])
    return _array(address + 8 * index, 1, np.int64)[0]


@_inner
def _array(address, count, dtype):
    return carray(_pointer(address), (count,), dtype)


@_inner
def _view(values, first, count):
    """values[first : first + count], without what a slice costs in checks."""
    return _array(values.ctypes.data + values.itemsize * first, count, values.dtype)


def _rank(bits, infinity):
    """uint32: 0 for +inf, larger for smaller scores; NaN of either sign and -inf are at least 2 * infinity."""
    raise NotImplementedError  # numba compiles the overload below instead; Python never calls this


@overload(_rank)
def _rank_of_width(bits, infinity):
    sign = 1 << (bits.bitwidth - 1)

    def rank(bits, infinity):
        magnitude = np.uint32(bits & (sign - 1))
        return np.uint32(infinity + magnitude) if bits & sign else np.uint32(infinity - magnitude)

    return rank


@intrinsic
def _beats(typing_context, scores, column, cut, infinity):
    """uint64: bit i says whether the rank of scores[column + i] is below `cut`."""
    wide = scores.dtype == types.uint32

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        lanes = ir.VectorType(ir.FloatType() if wide else ir.IntType(16), 64)
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), lanes.as_pointer())
        scores, cut, infinity = builder.load(pointer, align=4 if wide else 2), arguments[2], arguments[3]
        if wide:  # as floats, which takes one instruction: x > the float of rank `cut`, false for NaN
            negative = builder.icmp_unsigned(">", cut, infinity)
            below = builder.or_(builder.sub(cut, infinity), ir.Constant(cut.type, 1 << 31))
            bits = builder.select(negative, below, builder.sub(infinity, cut))
            mask = builder.fcmp_ordered(">", scores, splat(builder, builder.bitcast(bits, lanes.element)))
        else:
            sign = builder.ashr(scores, ir.Constant(lanes, [15] * 64))
            magnitude = builder.and_(scores, ir.Constant(lanes, [0x7FFF] * 64))
            key = builder.sub(builder.xor(magnitude, sign), sign)
            rank = builder.sub(splat(builder, builder.trunc(infinity, lanes.element)), key)
            mask = builder.icmp_unsigned("<", rank, splat(builder, builder.trunc(cut, lanes.element)))
        return builder.bitcast(mask, ir.IntType(64))

    def splat(builder, scalar):
        undefined, zero = ir.Constant(ir.VectorType(scalar.type, 64), ir.Undefined), ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(undefined, scalar, zero)
        return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))

    return types.uint64(scores, types.int64, types.uint32, types.uint32), generate


@intrinsic
def _lowest_bit(typing_context, mask):
    """Position of the lowest set bit of a uint64; 0 for 0."""

    def generate(context, builder, signature, arguments):
        position = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.and_(position, ir.Constant(ir.IntType(64), 63))

    return types.uint64(types.uint64), generate


@intrinsic
def _bit_count(typing_context, mask):
    """How many bits of a uint64 are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@intrinsic
def _fetch_add(typing_context, address, value):
    """Atomic: the int64 at `address`, to which `value` is added."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate
