"""cache in Triton, for AMD and NVIDIA alike: a program per token, whatever the operation.

write_index, write_latent (fp8): the token's values, their amax, scale and quotients in registers, then bytes.
write and gather of plain caches: a token's numbers, copied, in the dtype of where they go.
gather_index: a program finds its request by bisection of the cumulative lengths, then copies a key and its scale.
gather_latent (fp8): bytes back to floats, times the scale of their tile.

fp8 and bfloat16 are made by integer arithmetic on the bits of a float32, not by the chip's conversions: so both fp8
formats give the same bytes on every chip and in Triton's interpreter. The division is the correctly rounded one.
Cost: a token is read once and written once, nothing is allocated; 64-bit offsets; no shared memory but a reduction.
"""

import torch
import triton
import triton.language as tl

from keysift.kernels import on_device_of
from keysift.layout import FLOOR, LARGEST, TILE, IndexLayout, LatentLayout

#: Integers as wide as a float, through which its bits are written.
BITS = {4: torch.int32, 2: torch.int16}


def run(operation: str, *arguments: object) -> None:
    """Launch `operation` on the current stream."""
    OPERATIONS[operation](*arguments)  # type: ignore[operator]


def _write_index(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: IndexLayout) -> None:
    size, dim = layout.page_size, layout.head_dim
    with on_device_of(cache):
        if not layout.is_fp8:
            _write_plain(k, cache, slots, size, dim)
            return
        write_fp8_kernel[(k.shape[0], 1)](
            k, cache, slots, *k.stride(), cache.stride(0), slots.stride(0), size, dim,
            TOKEN_BYTES=dim, SCALES_FIRST=size * dim, SCALES_EACH=4, WIDTH=triton.next_power_of_2(dim),
            LARGEST=LARGEST[layout.format], FLOOR=FLOOR, POWER_OF_TWO=layout.scale == "ue8m0",
            FNUZ=layout.format == "e4m3fnuz", ROPE_DIM=0, num_warps=1,
        )  # fmt: skip


def _write_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout) -> None:
    with on_device_of(cache):
        if not layout.is_fp8:
            _write_plain(latent, cache, slots, layout.page_size, layout.dim)
            return
        tiles = layout.value_dim // TILE
        write_fp8_kernel[(latent.shape[0], tiles + (1 if layout.rope_dim else 0))](
            latent, cache, slots, *latent.stride(), cache.stride(0), slots.stride(0), layout.page_size, TILE,
            TOKEN_BYTES=layout.width, SCALES_FIRST=layout.value_dim, SCALES_EACH=layout.width, WIDTH=TILE,
            LARGEST=LARGEST[layout.format], FLOOR=FLOOR, POWER_OF_TWO=layout.scale == "ue8m0",
            FNUZ=layout.format == "e4m3fnuz", ROPE_DIM=layout.rope_dim, num_warps=1,
        )  # fmt: skip


def _write_plain(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, page_size: int, width: int) -> None:
    copy_kernel[(x.shape[0],)](
        x, _bits(cache), slots, *x.stride(), cache.stride(0), slots.stride(0), page_size, width,
        WIDTH=triton.next_power_of_2(width), TO=_name(cache), TO_CACHE=True,
    )  # fmt: skip


def _gather_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    layout: IndexLayout,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    size, dim = layout.page_size, layout.head_dim
    bits = torch.uint8 if layout.is_fp8 else BITS[cache.element_size()]
    scales = out.view(bits) if out_scale is None else _bits(out_scale)  # never written where there are none
    with on_device_of(cache):
        gather_index_kernel[(out.shape[0],)](
            cache.view(bits), block_table, cu_seqlens, out.view(bits), scales,
            cache.stride(0), *block_table.stride(), cu_seqlens.stride(0), out.stride(0), scales.stride(0),
            block_table.shape[0], size, dim, WIDTH=triton.next_power_of_2(dim), SCALES=layout.is_fp8, num_warps=1,
        )  # fmt: skip


def _gather_latent(cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout, out: torch.Tensor) -> None:
    rows, size = slots.shape[0], layout.page_size
    strides = (cache.stride(0), slots.stride(0))
    with on_device_of(cache):
        if not layout.is_fp8:
            copy_kernel[(rows,)](
                _bits(out), cache, slots, *out.stride(), *strides, size, layout.dim,
                WIDTH=triton.next_power_of_2(layout.dim), TO=_name(out), TO_CACHE=False,
            )  # fmt: skip
            return
        gather_latent_kernel[(rows, layout.value_dim // TILE + (1 if layout.rope_dim else 0))](
            cache, slots, _bits(out), *strides, *out.stride(), size,
            TOKEN_BYTES=layout.width, VALUE_DIM=layout.value_dim, ROPE_DIM=layout.rope_dim, TILE=TILE,
            ROPE_WIDTH=triton.next_power_of_2(max(layout.rope_dim, 1)), TO=_name(out), num_warps=1,
        )  # fmt: skip


OPERATIONS = {
    "write_index": _write_index,
    "write_latent": _write_latent,
    "gather_index": _gather_index,
    "gather_latent": _gather_latent,
}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@triton.jit
def as_float(x):
    """Numbers as float32; bfloat16 by its bits, as the interpreter's cast loses denormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bits_as(x, TO: tl.constexpr):
    """The bits of numbers in the dtype TO: as they are, or rounded to the nearest, ties to even, NaN the quiet one."""
    wide = as_float(x)
    number = tl.abs(wide) <= float("inf")
    if TO == "float32":  # one way out each: Triton 3.6 compiles what stands behind a return too
        bits = wide.to(tl.int32, bitcast=True)
        if x.dtype != tl.float32:
            bits = tl.where(number, bits, 0x7FC00000)
    elif TO == "float16":
        if x.dtype == tl.float16:
            bits = x.to(tl.int16, bitcast=True)
        else:
            half = wide.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            bits = tl.where(number, half, 0x7E00).to(tl.int16)
    elif x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True)
    else:
        whole = wide.to(tl.uint32, bitcast=True)
        rounded = ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).to(tl.int32)
        bits = tl.where(number, rounded, 0x7FC0).to(tl.int16)
    return bits


@triton.jit
def to_fp8(x, FNUZ: tl.constexpr):
    """The byte of float32 numbers within the format's range: to the nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Exponents are biased by 127 here and by 7 (8) there; the least normal number is 2**-6 (2**-7).
    bias: tl.constexpr = 952 if FNUZ else 960
    least: tl.constexpr = 0x3C000000 if FNUZ else 0x3C800000
    shifter: tl.constexpr = 8192.0 if FNUZ else 16384.0  # its last bit is the step of the subnormal numbers
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - bias
    absolute = magnitude.to(tl.float32, bitcast=True)
    small = tl.where(magnitude < least, absolute, 0.0) + shifter
    subnormal = small.to(tl.uint32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < least, subnormal, normal)
    if FNUZ:  # the byte 0x80 is NaN, and there is one zero
        code = tl.where(code == 0, code, code | sign)
        return tl.where(magnitude > 0x7F800000, 0x80, code).to(tl.uint8)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | sign).to(tl.uint8)  # NaN without its sign, as everywhere


@triton.jit
def from_e4m3fn(code):
    """Bytes as float32."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    x = tl.where(code > 127, -x, x)
    return tl.where(magnitude == 0x7F, float("nan"), x)


@triton.jit(do_not_specialize=["page_size"])
def write_fp8_kernel(
    x_ptr, cache_ptr, slots_ptr, stride_x, stride_x_column, stride_page, stride_slots, page_size, dim,
    TOKEN_BYTES: tl.constexpr, SCALES_FIRST: tl.constexpr, SCALES_EACH: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, FNUZ: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): `dim` values that share a scale; the tile behind the last is the rotary part.

    In a page, token `offset` has its values from TOKEN_BYTES * offset on, and its scales from SCALES_FIRST +
    SCALES_EACH * offset on.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + token * stride_slots).to(tl.int64)
    if slot >= 0:
        offset = slot % page_size
        page_ptr = cache_ptr + slot // page_size * stride_page
        column = tl.arange(0, WIDTH)
        x_ptr += token * stride_x
        first = tile * dim
        if (ROPE_DIM > 0) & (tile == tl.num_programs(1) - 1):
            rope_ptr = page_ptr + TOKEN_BYTES * offset + TOKEN_BYTES - 2 * ROPE_DIM
            for begin in range(0, ROPE_DIM, WIDTH):
                rotary = begin + column
                inside = rotary < ROPE_DIM
                x = tl.load(x_ptr + (first + rotary).to(tl.int64) * stride_x_column, mask=inside, other=0.0)
                bits = bits_as(x, "bfloat16").to(tl.int32)
                tl.store(rope_ptr + 2 * rotary, (bits & 0xFF).to(tl.uint8), mask=inside)
                tl.store(rope_ptr + 2 * rotary + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=inside)
        else:
            inside = column < dim
            x = as_float(tl.load(x_ptr + (first + column).to(tl.int64) * stride_x_column, mask=inside, other=0.0))
            absolute = tl.abs(x)
            amax = tl.max(tl.where(absolute < float("inf"), absolute, 0.0), 0)
            scale = tl.div_rn(tl.maximum(amax, FLOOR), amax * 0.0 + LARGEST)
            if POWER_OF_TWO:
                scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
            y = tl.div_rn(x, tl.zeros_like(x) + scale)
            y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))  # NaN stays
            tl.store(page_ptr + TOKEN_BYTES * offset + first + column, to_fp8(y, FNUZ), mask=inside)
            byte = tl.arange(0, 4)
            bits = scale.to(tl.int32, bitcast=True) >> (8 * byte)
            place = SCALES_FIRST + SCALES_EACH * offset + 4 * tile
            tl.store(page_ptr + place + byte, (bits & 0xFF).to(tl.uint8))


@triton.jit(do_not_specialize=["page_size"])
def copy_kernel(
    x_ptr, cache_ptr, slots_ptr, stride_x, stride_x_column, stride_page, stride_slots, page_size, width,
    WIDTH: tl.constexpr, TO: tl.constexpr, TO_CACHE: tl.constexpr,
):  # fmt: skip
    """Program token: its numbers to the cache, or from it, zeros where it has no slot; TO is the dtype they get."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * stride_slots).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    x_ptr += token * stride_x + column.to(tl.int64) * stride_x_column
    cache_ptr += slot // page_size * stride_page + slot % page_size * width + column
    present = column < tl.where(slot >= 0, width, 0)
    if TO_CACHE:
        tl.store(cache_ptr, bits_as(tl.load(x_ptr, mask=inside, other=0.0), TO), mask=present)
    else:
        tl.store(x_ptr, bits_as(tl.load(cache_ptr, mask=present, other=0.0), TO), mask=inside)


@triton.jit(do_not_specialize=["requests", "page_size"])
def gather_index_kernel(
    cache_ptr, table_ptr, ends_ptr, out_ptr, scale_ptr,
    stride_page, stride_table, stride_table_page, stride_ends, stride_out, stride_scale, requests, page_size, dim,
    WIDTH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Program row: the key at this place among all requests'."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends_ptr + requests * stride_ends):
        low = row * 0  # the last request that begins at or before this row
        high = low + requests
        while high - low > 1:
            middle = (low + high) // 2
            begins_before = tl.load(ends_ptr + middle * stride_ends) <= row
            low = tl.where(begins_before, middle, low)
            high = tl.where(begins_before, high, middle)
        position = row - tl.load(ends_ptr + low * stride_ends)
        offset = position % page_size
        page = tl.load(table_ptr + low * stride_table + position // page_size * stride_table_page).to(tl.int64)
        page_ptr = cache_ptr + page * stride_page
        column = tl.arange(0, WIDTH)
        inside = column < dim
        value = tl.load(page_ptr + offset * dim + column, mask=inside)
        tl.store(out_ptr + row * stride_out + column, value, mask=inside)
        if SCALES:
            byte = tl.arange(0, 4)
            part = tl.load(page_ptr + tl.cast(page_size, tl.int64) * dim + 4 * offset + byte)
            tl.store(scale_ptr + row * stride_scale, tl.sum(part.to(tl.int32) << (8 * byte), 0))


@triton.jit(do_not_specialize=["page_size"])
def gather_latent_kernel(
    cache_ptr, slots_ptr, out_ptr, stride_page, stride_slots, stride_out, stride_out_column, page_size,
    TOKEN_BYTES: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, TILE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): 128 values of e4m3fn times their scale; the tile behind the last is the rotary part."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + token * stride_slots).to(tl.int64)
    present = tl.where(slot >= 0, 1, 0)  # times a length: how much of it is read
    token_ptr = cache_ptr + slot // page_size * stride_page + slot % page_size * TOKEN_BYTES
    out_ptr += token * stride_out
    if tile < VALUE_DIM // TILE:
        column = tile * TILE + tl.arange(0, TILE)
        code = tl.load(token_ptr + column, mask=column < VALUE_DIM * present, other=0)
        byte = tl.arange(0, 4)
        part = tl.load(token_ptr + VALUE_DIM + 4 * tile + byte, mask=byte < 4 * present, other=0)
        bits = tl.sum(part.to(tl.int32) << (8 * byte), 0)
        x = from_e4m3fn(code) * bits.to(tl.float32, bitcast=True)
        tl.store(out_ptr + column.to(tl.int64) * stride_out_column, bits_as(x, TO))
    else:
        rotary = tl.arange(0, ROPE_WIDTH)
        first = TOKEN_BYTES - 2 * ROPE_DIM + 2 * rotary
        read = rotary < ROPE_DIM * present
        low = tl.load(token_ptr + first, mask=read, other=0).to(tl.int32)
        high = tl.load(token_ptr + first + 1, mask=read, other=0).to(tl.int32)
        turned = ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)
        place = (VALUE_DIM + rotary).to(tl.int64) * stride_out_column
        tl.store(out_ptr + place, bits_as(turned, TO), mask=rotary < ROPE_DIM)
