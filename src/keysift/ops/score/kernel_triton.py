"""score in Triton, for AMD and NVIDIA alike: products of a tile of keys with the heads of some queries.

Keys are the rows of the product, so that the sum over heads stays within a thread's accumulators and a few shuffles:
[BLOCK_N keys, D] x [D, queries * H] -> relu -> * weights -> sum over H -> * k_scale.
Prefill: a program keeps a tile of keys and walks over BLOCK_M queries, some at a time, whose loads are pipelined; a
tile that none of their windows touches is left at once, so the causal half costs half.
Decode: as many programs as keep the chip busy share the tiles of all requests evenly, whatever their lengths: each
forms the running sum of tiles from the lengths, takes its part, and walks through it, request by request. The grid
depends on shapes alone, the work on the live lengths alone. The next_n queries of a request share the loaded tile.
Each cell comes from one product of the same shape, so a row's scores do not depend on the others in the call.
Cost: prefill is bound by the product, 2 * H * D operations a cell beside 3 H of the epilogue; decode by reading D + 4
bytes a key (fp8) until H * next_n exceeds about 64. fp8 products accumulate as the chip's matrix unit does.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from keysift.dispatch import TRITON_INTERPRETS, device_of
from keysift.kernels import on_device_of
from keysift.layout import FP8

INTERPRETS = tl.constexpr(TRITON_INTERPRETS)
#: Programs of the decode kernel for each processor: one waits for memory, the other multiplies; a third has no room.
RESIDENT = 2
#: The queries of a request stay on the chip while its tiles pass, where they are no more bytes than these.
KEPT_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Plan:
    """Tile sizes, from static facts."""

    compute: str  # dtype of the product: "fp8" (as stored), "bf16", "fp16", "fp32"
    block_n: int
    heads: int  # padded to a power of two
    queries: int  # at a time, in prefill
    head_dim: int  # padded
    warps: int
    stages: int

    @property
    def size(self) -> int:
        """Bytes of a number in the product."""
        return {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}[self.compute]

    @property
    def decode_n(self) -> int:
        """Keys in a tile of decode, whose loads are pipelined too."""
        return self.block_n if self.compute == "fp8" else min(self.block_n, 64)

    @property
    def decode_warps(self) -> int:
        """Narrow keys wait for memory more than for the product; and with four warps ptxas for sm_100 spills."""
        return 8 if self.head_dim <= 64 else self.warps


def plan(q_dtype: torch.dtype, k_dtype: torch.dtype, heads: int, head_dim: int) -> Plan:
    """Tiles whose operands fit 64 KB of shared memory for 16-bit and 8-bit products, the least of the chips we name."""
    dtypes = {q_dtype, k_dtype}
    if len(dtypes) == 1 and q_dtype in FP8.values():
        compute, size = "fp8", 1
    elif dtypes <= {torch.bfloat16, *FP8.values()}:
        compute, size = "bf16", 2
    elif dtypes <= {torch.float16, *FP8.values()}:
        compute, size = "fp16", 2
    else:
        compute, size = "fp32", 4
    padded_heads, padded_dim = triton.next_power_of_2(heads), max(32, triton.next_power_of_2(head_dim))
    columns = max(16, padded_heads, 128 if size == 1 else 64 if size == 2 else 32)  # of the product
    block_n = 128 if size * padded_dim <= 256 else 64
    stages = 3 if size == 1 else 2
    return Plan(
        compute,
        block_n,
        padded_heads,
        columns // padded_heads,
        padded_dim,
        8 if columns * block_n > 8192 else 4,
        stages,
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    next_n: int,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch on the current stream; write the cells of `out` [M, N] inside each row's window."""
    rows, heads, head_dim = q.shape
    p = plan(q.dtype, k.dtype, heads, head_dim)
    scale = weights if k_scale is None else k_scale  # an absent tensor is never read
    facts: dict[str, object] = {
        "HEADS": heads,
        "DIM": head_dim,
        "BLOCK_H": p.heads,
        "BLOCK_D": p.head_dim,
        "BLOCK_N": p.block_n,
    }
    facts |= {"COMPUTE": p.compute, "HAS_SCALE": k_scale is not None, "num_warps": p.warps, "num_stages": p.stages}
    with on_device_of(q):
        if block_table is None:
            bounds = (weights if starts is None else starts, weights if ends is None else ends)
            block_m = 32 * p.queries
            grid = (triton.cdiv(k.shape[0], p.block_n), triton.cdiv(rows, block_m))
            score_prefill_kernel[grid](
                q, k, scale, weights, *bounds, out, rows, k.shape[0], *q.stride(), *k.stride(),
                0 if k_scale is None else k_scale.stride(0), *weights.stride(),
                0 if starts is None else starts.stride(0), 0 if ends is None else ends.stride(0), out.stride(0),
                HAS_START=starts is not None, HAS_END=ends is not None, QUERIES=p.queries, BLOCK_M=block_m, **facts,
            )  # fmt: skip
            return
        assert ends is not None  # noqa: S101 - paged scores come with lengths
        page_size, requests = k.shape[1], block_table.shape[0]
        columns = min(block_table.shape[1] * page_size, out.shape[1])
        tiles = requests * triton.cdiv(columns, p.decode_n)
        programs = max(1, min(tiles, RESIDENT * device_of(q.device).processors))
        score_decode_kernel[(programs,)](
            q, k, scale, weights, ends, block_table, out, requests, columns, page_size, *q.stride(), *k.stride(),
            *((0, 0) if k_scale is None else k_scale.stride()), *weights.stride(), ends.stride(0),
            *block_table.stride(), out.stride(0), NEXT_N=next_n, PER_ROW=ends.shape[0] == rows and next_n > 1,
            BLOCK_NEXT=triton.next_power_of_2(next_n),
            PAGE_SHIFT=page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1,
            REQUESTS=128 if requests > 1 else 1,
            KEPT=next_n * max(16, p.heads) * p.head_dim * p.size <= KEPT_BYTES,
            **facts | {"BLOCK_H": max(16, p.heads), "BLOCK_N": p.decode_n, "num_warps": p.decode_warps},
        )  # fmt: skip


@triton.jit
def operand(x, COMPUTE: tl.constexpr):
    """What enters the product; the interpreter multiplies bfloat16 wrongly, so there everything is float32."""
    wide: tl.constexpr = INTERPRETS or COMPUTE == "fp32"
    if wide and x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif wide:
        y = x.to(tl.float32)
    elif COMPUTE == "bf16":
        y = x.to(tl.bfloat16)
    elif COMPUTE == "fp16":
        y = x.to(tl.float16)
    else:
        y = x
    return y


@triton.jit
def weigh(keys, queries, weights, COMPUTE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_H: tl.constexpr):
    """[BLOCK_N, QUERIES] scores of keys [BLOCK_N, D] against queries [D, QUERIES * BLOCK_H]."""
    dots = tl.dot(keys, queries, input_precision="ieee")
    logits = tl.maximum(dots, 0.0) * weights[None, :]
    return tl.sum(tl.reshape(logits, (keys.shape[0], QUERIES, BLOCK_H)), 2)


@triton.jit
def clamp(x, low, high):
    """x within [low, high]."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit(do_not_specialize=["rows", "columns"])
def score_prefill_kernel(
    q_ptr, k_ptr, scale_ptr, weights_ptr, start_ptr, end_ptr, out_ptr, rows, columns,
    stride_q, stride_q_head, stride_q_dim, stride_k, stride_k_dim, stride_scale, stride_weights, stride_weights_head,
    stride_start, stride_end, stride_out,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_START: tl.constexpr, HAS_END: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, BLOCK_M rows)."""
    first = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The columns that any of these rows looks at.
    row = first + tl.arange(0, BLOCK_M)
    low = 0
    high = columns
    if HAS_START:
        start = tl.load(start_ptr + row.to(tl.int64) * stride_start, mask=row < rows, other=columns)
        low = tl.min(clamp(start, 0, columns).to(tl.int32), 0)
    if HAS_END:
        end = tl.load(end_ptr + row.to(tl.int64) * stride_end, mask=row < rows, other=0)
        high = tl.max(clamp(end, 0, columns).to(tl.int32), 0)
    tile_first = tl.program_id(0) * BLOCK_N
    if (tile_first < high) & (tile_first + BLOCK_N > low):
        dim = tl.arange(0, BLOCK_D)
        inside = (column[:, None] < columns) & (dim[None, :] < DIM)
        place = column.to(tl.int64)[:, None] * stride_k + dim.to(tl.int64)[None, :] * stride_k_dim
        keys = operand(tl.load(k_ptr + place, mask=inside, other=0.0), COMPUTE)
        scale = tl.full((BLOCK_N,), 1.0, tl.float32)
        if HAS_SCALE:
            scale = tl.load(scale_ptr + column.to(tl.int64) * stride_scale, mask=column < columns, other=0.0)
        for begin in range(first, tl.minimum(first + BLOCK_M, rows), QUERIES):
            head = tl.arange(0, QUERIES * BLOCK_H) % BLOCK_H
            query = (begin + tl.arange(0, QUERIES * BLOCK_H) // BLOCK_H).to(tl.int64)
            real = (query < rows) & (head < HEADS)
            address = q_ptr + query[None, :] * stride_q + head[None, :] * stride_q_head + dim[:, None] * stride_q_dim
            queries = operand(tl.load(address, mask=real[None, :] & (dim[:, None] < DIM), other=0.0), COMPUTE)
            weights = tl.load(weights_ptr + query * stride_weights + head * stride_weights_head, mask=real, other=0.0)
            scores = weigh(keys, queries, weights, COMPUTE, QUERIES, BLOCK_H) * scale[:, None]
            number = begin + tl.arange(0, QUERIES)
            write = (number < rows)[None, :] & (column < columns)[:, None]
            if HAS_START:
                starts = tl.load(start_ptr + number.to(tl.int64) * stride_start, mask=number < rows, other=0)
                write = write & (column[:, None] >= starts[None, :])
            if HAS_END:
                ends = tl.load(end_ptr + number.to(tl.int64) * stride_end, mask=number < rows, other=0)
                write = write & (column[:, None] < ends[None, :])
            tl.store(out_ptr + number.to(tl.int64)[None, :] * stride_out + column[:, None], scores, mask=write)


@triton.jit
def reaches(
    request, end_ptr, requests, columns, stride_end,
    NEXT_N: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_NEXT: tl.constexpr,
):  # fmt: skip
    """The columns that any query of each of the requests looks at; 0 beyond the last request."""
    if PER_ROW:
        turn = tl.arange(0, BLOCK_NEXT)
        row = request[:, None].to(tl.int64) * NEXT_N + turn[None, :]
        present = (request < requests)[:, None] & (turn < NEXT_N)[None, :]
        lengths = tl.load(end_ptr + row * stride_end, mask=present, other=0)
        return tl.max(clamp(lengths, 0, columns).to(tl.int32), 1)
    lengths = tl.load(end_ptr + request.to(tl.int64) * stride_end, mask=request < requests, other=0)
    return clamp(lengths, 0, columns).to(tl.int32)


@triton.jit
def query_of(
    q_ptr, weights_ptr, row, stride_q, stride_q_head, stride_q_dim, stride_weights, stride_weights_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The queries [D, BLOCK_H] of a row, as they enter the product, and their weights."""
    dim = tl.arange(0, BLOCK_D)
    head = tl.arange(0, BLOCK_H)
    address = q_ptr + row * stride_q + head[None, :] * stride_q_head + dim[:, None] * stride_q_dim
    real = (head < HEADS)[None, :] & (dim < DIM)[:, None]
    queries = operand(tl.load(address, mask=real, other=0.0), COMPUTE)
    weights = tl.load(weights_ptr + row * stride_weights + head * stride_weights_head, mask=head < HEADS, other=0.0)
    return queries, weights


@triton.jit
def page_of(row_ptr, column, reach, page_size, stride_table_page, PAGE_SHIFT: tl.constexpr):
    """The pages of columns; 0 beyond the reach of a request."""
    if PAGE_SHIFT >= 0:
        number = column >> PAGE_SHIFT
    else:
        number = column // page_size
    return tl.load(row_ptr + number.to(tl.int64) * stride_table_page, mask=column < reach, other=0)


@triton.jit(do_not_specialize=["requests", "columns"])
def score_decode_kernel(
    q_ptr, k_ptr, scale_ptr, weights_ptr, end_ptr, table_ptr, out_ptr, requests, columns, page_size,
    stride_q, stride_q_head, stride_q_dim, stride_page, stride_k, stride_k_dim, stride_scale_page, stride_scale,
    stride_weights, stride_weights_head, stride_end, stride_table, stride_table_page, stride_out,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_SCALE: tl.constexpr, NEXT_N: tl.constexpr, PER_ROW: tl.constexpr,
    BLOCK_NEXT: tl.constexpr, PAGE_SHIFT: tl.constexpr, KEPT: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Program p of P: tiles [p * T // P, (p + 1) * T // P) of the T tiles of all requests, one after another.

    REQUESTS are looked at together; 1: there is one.
    """
    total = tl.cast(requests * 0, tl.int64)
    for block in range(0, requests, REQUESTS):
        reach = reaches(
            block + tl.arange(0, REQUESTS), end_ptr, requests, columns, stride_end, NEXT_N, PER_ROW, BLOCK_NEXT
        )
        total += tl.sum((reach + BLOCK_N - 1) // BLOCK_N, 0)
    begin = tl.program_id(0) * total // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * total // tl.num_programs(0)

    request = tl.cast(requests * 0, tl.int32)  # how many requests end at or before `begin`
    before = tl.cast(requests * 0, tl.int64)  # and the tiles that they have
    if REQUESTS > 1:
        carry = tl.cast(requests * 0, tl.int64)
        for block in range(0, requests, REQUESTS):
            number = block + tl.arange(0, REQUESTS)
            reach = reaches(number, end_ptr, requests, columns, stride_end, NEXT_N, PER_ROW, BLOCK_NEXT)
            ends = carry + tl.cumsum((reach + BLOCK_N - 1) // BLOCK_N, 0)
            passed = (ends <= begin) & (number < requests)
            request += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
            carry = tl.max(ends, 0)

    dim = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    while begin < end:
        reach = tl.max(reaches(request + one, end_ptr, requests, columns, stride_end, NEXT_N, PER_ROW, BLOCK_NEXT), 0)
        tiles = (reach + BLOCK_N - 1) // BLOCK_N
        last = tl.minimum(tiles.to(tl.int64), end - before).to(tl.int32)
        kept = ()
        kept_weights = ()
        row_ends = ()
        for turn in tl.static_range(NEXT_N):
            row = request.to(tl.int64) * NEXT_N + turn
            if PER_ROW:
                row_ends = row_ends + (tl.load(end_ptr + row * stride_end),)
            else:
                row_ends = row_ends + (tl.load(end_ptr + request.to(tl.int64) * stride_end) - NEXT_N + turn + 1,)
            if KEPT:
                queries, weights = query_of(
                    q_ptr, weights_ptr, row, stride_q, stride_q_head, stride_q_dim, stride_weights,
                    stride_weights_head, HEADS, DIM, BLOCK_H, BLOCK_D, COMPUTE,
                )  # fmt: skip
                kept = kept + (queries,)
                kept_weights = kept_weights + (weights,)
        row_ptr = table_ptr + request.to(tl.int64) * stride_table
        first = (begin - before).to(tl.int32)
        # Pages are looked up a tile ahead: so the keys of the tiles to come wait for no other load.
        next_page = page_of(
            row_ptr, first * BLOCK_N + tl.arange(0, BLOCK_N), reach, page_size, stride_table_page, PAGE_SHIFT
        )
        for tile in range(first, last):
            column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = column < reach
            page = next_page.to(tl.int64)
            next_page = page_of(row_ptr, column + BLOCK_N, reach, page_size, stride_table_page, PAGE_SHIFT)
            if PAGE_SHIFT >= 0:
                offset = (column & ((1 << PAGE_SHIFT) - 1)).to(tl.int64)
            else:
                offset = (column % page_size).to(tl.int64)
            place = (page * stride_page + offset * stride_k)[:, None] + dim.to(tl.int64)[None, :] * stride_k_dim
            keys = tl.load(k_ptr + place, mask=inside[:, None] & (dim[None, :] < DIM), other=0.0)
            keys = operand(keys, COMPUTE)
            scale = tl.full((BLOCK_N,), 1.0, tl.float32)
            if HAS_SCALE:
                at = page * stride_scale_page + offset * stride_scale
                scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
            for turn in tl.static_range(NEXT_N):
                row = request.to(tl.int64) * NEXT_N + turn
                if KEPT:
                    scores = tl.sum(weigh(keys, kept[turn], kept_weights[turn], COMPUTE, 1, BLOCK_H), 1) * scale
                else:
                    queries, weights = query_of(
                        q_ptr, weights_ptr, row, stride_q, stride_q_head, stride_q_dim, stride_weights,
                        stride_weights_head, HEADS, DIM, BLOCK_H, BLOCK_D, COMPUTE,
                    )  # fmt: skip
                    scores = tl.sum(weigh(keys, queries, weights, COMPUTE, 1, BLOCK_H), 1) * scale
                tl.store(out_ptr + row * stride_out + column, scores, mask=inside & (column < row_ends[turn]))
        begin = before + last
        before += tiles
        request += 1
