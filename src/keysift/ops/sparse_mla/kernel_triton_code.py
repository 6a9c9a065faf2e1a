"""sparse_mla in Triton, for AMD and NVIDIA alike.

1. A program has a token, BLOCK_H heads and a part of the token's k indices; its queries stay on the chip.
2. It reads the indices once to find the first and the last that is not -1, and walks between them, TILE at a time.
3. The TILE selected latents are gathered by index, each a contiguous row, once: they are keys and values. What is
   masked is loaded as 0, so that no NaN of an unselected row reaches a product.
4. logits = q . latents^T, online softmax in base 2, then acc += p . values; all sums in float32, p in the dtype of q.
5. The columns of a latent come in CHUNKs, each with its own product and accumulator: so a head size that is no power of
   two (512 + 64) costs nothing. An fp8 latent has a chunk per scale: fp8 becomes bfloat16 without rounding, and the
   scale multiplies the chunk's logits, and the chunk's p before it is rounded. That costs heads * TILE multiplications
   a chunk instead of 128 * TILE, and no digit: bfloat16 values times a scale would be rounded.
6. Few tokens leave the chip idle, so k is cut into parts: each leaves a float32 output and an lse, which
   `combine_kernel` joins, the one of `combine_partials`.
Cost: 2 * heads * k * (D + value_dim) operations a token, and k * D numbers read for every BLOCK_H heads.
"""

import triton
import triton.language as tl

from keysift.dispatch import TRITON_INTERPRETS

INTERPRETS = tl.constexpr(TRITON_INTERPRETS)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
#: Indices read at a time when the -1 at the ends are left out.
SCAN = tl.constexpr(1024)


@triton.jit
def operand(x, COMPUTE: tl.constexpr):
    """What enters a product; the interpreter multiplies bfloat16 wrongly, so there everything is float32."""
    if (INTERPRETS or COMPUTE == "fp32") and x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETS or COMPUTE == "fp32":
        y = x.to(tl.float32)
    elif COMPUTE == "bf16":
        y = x.to(tl.bfloat16)
    else:
        y = x.to(tl.float16)
    return y


@triton.jit
def from_fp8(byte, NATIVE: tl.constexpr):
    """e4m3fn in float32, exactly: by the chip, or by shifting exponent and mantissa into place."""
    if NATIVE:
        x = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = byte.to(tl.int32)
        x = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), x)
    return x


@triton.jit
def store(pointer, x, mask):
    """Rounded to nearest; the interpreter's own cast to bfloat16 truncates."""
    if INTERPRETS and pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointer, x, mask=mask)


@triton.jit
def sink_share(lse, sink_ptr, head, mask):
    """What the sink leaves of the output, for an lse in base 2; nothing is left of nothing."""
    sink = tl.load(sink_ptr + head, mask=mask, other=0.0) * LOG2_E
    return tl.where(lse == -float("inf"), 0.0, 1.0 / (1.0 + tl.exp2(sink - lse)))


@triton.jit(do_not_specialize=["k", "page_size", "parts"])
def sparse_mla_kernel(
    q_ptr, kv_ptr, scales_ptr, rope_ptr, indices_ptr, length_ptr, sink_ptr, out_ptr, lse_ptr,
    scale, k, page_size, parts,
    stride_q, stride_q_head, stride_q_dim, stride_kv_page, stride_kv, stride_scales_page, stride_scales,
    stride_rope_page, stride_rope, stride_indices, stride_index, stride_length,
    stride_out_part, stride_out, stride_lse_part, stride_lse,
    HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, PAGED: tl.constexpr, PAGE_SHIFT: tl.constexpr, WHOLE: tl.constexpr,
    HAS_LENGTH: tl.constexpr, HAS_SINK: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, ROPE_CHUNK: tl.constexpr, TILE: tl.constexpr, ROPE_UNIT: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, part, token), the first fastest: they share latents in the chip's cache.

    LATENT_DIM and ROPE_DIM are the columns behind kv_ptr and rope_ptr. PAGE_SHIFT is log2 of the page size, -1 if it is
    no power of two. WHOLE: every tile lies in the row of indices, and all of them count. The strides of rope_ptr count
    ROPE_UNIT numbers: Triton takes a stride for aligned where it is a multiple of 16, and an fp8 token has 8 * 41.
    """
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    CHUNKS: tl.constexpr = (LATENT_DIM + CHUNK - 1) // CHUNK
    ROPE_CHUNKS: tl.constexpr = (ROPE_DIM + ROPE_CHUNK - 1) // ROPE_CHUNK
    program = tl.program_id(0)
    head = (program % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    part = program // BLOCKS % parts
    token = (program // BLOCKS // parts).to(tl.int64)

    # The columns of this part, without the -1 at both of its ends.
    first = part * tl.cdiv(tl.cdiv(k, TILE), parts) * TILE
    last = tl.minimum(first + tl.cdiv(tl.cdiv(k, TILE), parts) * TILE, k)
    if HAS_LENGTH:
        length = tl.load(length_ptr + token * stride_length)
        last = tl.minimum(last.to(tl.int64), tl.maximum(length, 0).to(tl.int64)).to(tl.int32)
    indices_ptr += token * stride_indices
    low = last
    high = tl.minimum(first, last)
    for block in range(first, last, SCAN):
        seen = block + tl.arange(0, SCAN)
        index = tl.load(indices_ptr + seen.to(tl.int64) * stride_index, mask=seen < last, other=-1)
        low = tl.minimum(low, tl.min(tl.where(index >= 0, seen, last), 0))
        high = tl.maximum(high, tl.max(tl.where(index >= 0, seen + 1, first), 0))
    low = first + tl.maximum(low - first, 0) // TILE * TILE

    q_head_ptr = q_ptr + token * stride_q + head.to(tl.int64)[:, None] * stride_q_head
    column = tl.arange(0, CHUNK)
    rope_column = tl.arange(0, ROPE_CHUNK)
    queries = ()
    accs = ()
    for c in tl.static_range(CHUNKS):
        q_at = c * CHUNK + column
        q_here = real[:, None] & (q_at < LATENT_DIM)[None, :]
        query = tl.load(q_head_ptr + q_at[None, :].to(tl.int64) * stride_q_dim, mask=q_here, other=0.0)
        queries = queries + (operand(query, COMPUTE),)
        accs = accs + (tl.zeros((BLOCK_H, CHUNK), tl.float32),)
    rope_queries = ()
    for c in tl.static_range(ROPE_CHUNKS):
        r_at = c * ROPE_CHUNK + rope_column
        r_here = real[:, None] & (r_at < ROPE_DIM)[None, :]
        r_place = (LATENT_DIM + r_at)[None, :].to(tl.int64) * stride_q_dim
        rope_queries = rope_queries + (operand(tl.load(q_head_ptr + r_place, mask=r_here, other=0.0), COMPUTE),)

    highest = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(low, high, TILE):
        place = start + tl.arange(0, TILE)
        if WHOLE:
            slot = tl.load(indices_ptr + place.to(tl.int64) * stride_index)
        else:
            slot = tl.load(indices_ptr + place.to(tl.int64) * stride_index, mask=place < high, other=-1)
        valid = slot >= 0
        if not PAGED:
            page = tl.zeros((TILE,), tl.int64)
            offset = slot.to(tl.int64)
        elif PAGE_SHIFT >= 0:
            page = (slot >> PAGE_SHIFT).to(tl.int64)
            offset = (slot & ((1 << PAGE_SHIFT) - 1)).to(tl.int64)
        else:
            page = (slot // page_size).to(tl.int64)
            offset = (slot % page_size).to(tl.int64)
        row_ptr = kv_ptr + (page * stride_kv_page + offset * stride_kv)[:, None]
        rope_row_ptr = rope_ptr + ((page * stride_rope_page + offset * stride_rope) * ROPE_UNIT)[:, None]

        logits = tl.zeros((BLOCK_H, TILE), tl.float32)
        latents = ()
        scales = ()
        for c in tl.static_range(CHUNKS):
            at = c * CHUNK + column
            here = valid[:, None]
            if LATENT_DIM % CHUNK:
                here = here & (at < LATENT_DIM)[None, :]
            loaded = tl.load(row_ptr + at[None, :], mask=here, other=0)
            if FP8:
                latent = operand(from_fp8(loaded, NATIVE), COMPUTE)
                chunk_scale = tl.load(
                    scales_ptr + page * stride_scales_page + offset * stride_scales + c, mask=valid, other=0.0
                )
                scales = scales + (chunk_scale,)
                logits += tl.dot(queries[c], tl.trans(latent), input_precision=PRECISION) * chunk_scale[None, :]
            else:
                latent = operand(loaded, COMPUTE)
                logits = tl.dot(queries[c], tl.trans(latent), logits, input_precision=PRECISION)
            latents = latents + (latent,)
        for c in tl.static_range(ROPE_CHUNKS):
            rope_at = c * ROPE_CHUNK + rope_column
            rope_here = valid[:, None]
            if ROPE_DIM % ROPE_CHUNK:
                rope_here = rope_here & (rope_at < ROPE_DIM)[None, :]
            rope = tl.load(rope_row_ptr + rope_at[None, :], mask=rope_here, other=0.0)
            rope = operand(rope, COMPUTE)
            logits = tl.dot(rope_queries[c], tl.trans(rope), logits, input_precision=PRECISION)

        logits = tl.where(valid[None, :], logits * scale, -float("inf"))
        above = tl.maximum(highest, tl.max(logits, 1))
        # Where nothing is finite yet, every exponential is exp2(-inf) = 0.
        shift = tl.where(above == -float("inf"), 0.0, above)
        p = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(highest - shift)
        total = total * fade + tl.sum(p, 1)
        highest = above
        faded = ()
        for c in tl.static_range(CHUNKS):
            weight = p
            if FP8:
                weight = p * scales[c][None, :]
            acc = accs[c] * fade[:, None]
            faded = faded + (tl.dot(operand(weight, COMPUTE), latents[c], acc, input_precision=PRECISION),)
        accs = faded

    sums = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), highest + tl.log2(sums))
    share = 1.0 / sums
    if HAS_SINK:
        share *= sink_share(lse, sink_ptr, head, real)
    part = part.to(tl.int64)
    tl.store(lse_ptr + part * stride_lse_part + token * stride_lse + head, lse * LN_2, mask=real)
    out_ptr += part * stride_out_part + token * stride_out
    for c in tl.static_range(CHUNKS):
        out_at = c * CHUNK + column
        written = real[:, None] & (out_at < VALUE_DIM)[None, :]
        store(out_ptr + head[:, None] * VALUE_DIM + out_at[None, :], accs[c] * share[:, None], written)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(
    outs_ptr, lses_ptr, sink_ptr, out_ptr, lse_ptr, parts,
    stride_outs_part, stride_outs, stride_outs_dim, stride_lses_part, stride_lses, stride_out, stride_lse,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Program r joins the parts of row r, which is head r % HEADS of token r // HEADS, in their order."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    lses_ptr += row * stride_lses
    outs_ptr += row * stride_outs
    highest = tl.cast(-float("inf"), tl.float32)
    for part in range(parts):
        highest = tl.maximum(highest, tl.load(lses_ptr + tl.cast(part, tl.int64) * stride_lses_part))
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    column = tl.arange(0, BLOCK_V)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for part in range(parts):
        place = tl.cast(part, tl.int64)
        weight = tl.exp2((tl.load(lses_ptr + place * stride_lses_part) - shift) * LOG2_E)
        wanted = tl.where(weight == 0.0, 0, VALUE_DIM)  # a part of weight 0 may hold anything
        x = tl.load(outs_ptr + place * stride_outs_part + column * stride_outs_dim, mask=column < wanted, other=0.0)
        acc += weight * operand(x, "fp32")
        total += weight
    sums = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), shift + tl.log2(sums) * LN_2)
    share = 1.0 / sums
    if HAS_SINK:
        share *= sink_share(lse * LOG2_E, sink_ptr, head, True)
    tl.store(lse_ptr + token * stride_lse + head, lse)
    out_ptr += token * stride_out + head * VALUE_DIM
    store(out_ptr + column, acc * share, column < VALUE_DIM)
