"""sparse_mla in Triton: plan and launch; kernel_triton_code.py has the algorithm.

Shared memory is what bounds a tile. Of D columns of s bytes (both parts padded to whole chunks), on NVIDIA two tiles lie
there, s * D * 2 * TILE, and for blocks of 64 heads the queries, s * D * 64: at D = 576 in 16 bits 147 KB for 64 heads and
74 KB for fewer, in tiles of 32; 37 KB in tiles of 16. On AMD a tile lies there, s * D * TILE: 37 KB in tiles of 32.
Registers bound the heads: 64 * 512 float32 sums are 128 registers of each of 256 threads.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import triton

from keysift.dispatch import TRITON_INTERPRETS, Device, device_of
from keysift.layout import TILE as SCALED

from .kernel_triton_code import combine_kernel, sparse_mla_kernel

#: Bytes of shared memory that a program may have. A chip that is not named is taken to have the least of all.
SHARED = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
    "gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
LEAST_SHARED = 48 << 10
#: Chips with instructions for products of 64 rows from shared memory, which leave the registers to the sums.
WIDE = {"sm_90": 256, "sm_100": 512, "sm_103": 512}  # and the columns of a chunk that need fewest registers
FP8_CHIPS = ("sm_89", "sm_90", "sm_10", "sm_12", "gfx95", "gfx12")
#: What starting a part and joining it costs, in tiles.
PART_COST = 2
ALIGNMENT = 16
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is launched, from static facts alone."""

    compute: str  # dtype of the products: "bf16", "fp16", "fp32"
    block_h: int  # heads of a program
    chunk: int  # columns of a product
    rope_chunk: int
    tile: int  # selected latents at a time
    warps: int
    shared: int  # bytes, at most
    parts: int = 1  # of k
    stages: int = 2

    def workspace(self, rows: int, heads: int, value_dim: int) -> int:
        """Bytes for the output and lse of every part."""
        return 4 * self.parts * rows * heads * (value_dim + 1) + ALIGNMENT if self.parts > 1 else 0


def compute_dtype(q: torch.dtype, kv: torch.dtype) -> str:
    """The narrowest dtype that holds both exactly; fp8 tokens have bfloat16 beside them."""
    if q == torch.bfloat16 and kv in (torch.bfloat16, torch.float8_e4m3fn):
        return "bf16"
    return "fp16" if q == kv == torch.float16 else "fp32"


def plan(
    device: Device, q: torch.dtype, kv: torch.dtype, rows: int, heads: int, latent_dim: int, rope_dim: int, k: int
) -> Plan:
    """The tiles of a problem; `shared` may exceed what the chip has, which the table then refuses.

    latent_dim is the part of a latent that holds the values, with a scale for each 128 if they are fp8; rope_dim the rest.
    """
    compute, is_fp8 = compute_dtype(q, kv), kv == torch.float8_e4m3fn
    limit, is_amd = shared_limit(device), device.type == "hip"
    wide = WIDE.get(device.arch, 0) if compute != "fp32" and not (is_fp8 and device.arch == "sm_90") else 0
    widest = wide or (64 if compute == "fp32" else SCALED)
    chunk = SCALED if is_fp8 else min(widest, max(16, triton.next_power_of_2(latent_dim)))
    rope_chunk = min(SCALED, max(16, triton.next_power_of_2(rope_dim)))
    columns = math.ceil(latent_dim / chunk) * chunk + math.ceil(rope_dim / rope_chunk) * rope_chunk
    if compute == "fp32" or (is_amd and is_fp8):
        most, tiles = 16, (16,)
    elif is_amd:
        most, tiles = 32, (32, 16)
    else:
        most, tiles = (64 if wide and columns <= 640 else 32), (32, 16)
    best = None
    for block_h in (size for size in (64, 32, 16) if size <= min(most, max(16, triton.next_power_of_2(heads)))):
        for tile in tiles:
            if is_amd:
                rows_kept = max(block_h, tile if limit < 128 << 10 else 2 * tile)  # with room, the next tile is under way
            elif block_h == 64:
                rows_kept = block_h + 2 * tile
            else:  # queries go to registers, and float32 ones pass through shared memory
                rows_kept = max(block_h, 2 * tile) + (8 if compute == "fp32" else 0)
            shared = BYTES[compute] * columns * rows_kept + (8 << 10)
            best = Plan(compute, block_h, chunk, rope_chunk, tile, 4 if is_amd else 8, shared)
            if shared <= limit:
                return _with_parts(best, device.processors, rows * math.ceil(heads / block_h), k, limit)
    assert best is not None  # noqa: S101 - 16 heads are always tried
    return best


def _with_parts(p: Plan, processors: int, programs: int, k: int, limit: int) -> Plan:
    """The plan with k cut so that the longest walk is shortest: waves of programs times the tiles of a part."""
    tiles, resident = max(1, math.ceil(k / p.tile)), processors * min(2, limit // p.shared)

    def cost(parts: int) -> int:
        each = math.ceil(tiles / parts) + (PART_COST if parts > 1 else 0)
        return math.ceil(max(1, programs) * parts / resident) * each

    choices = [1 << power for power in range(tiles.bit_length())]
    parts = min((parts for parts in choices if parts <= tiles), key=cost)
    return Plan(p.compute, p.block_h, p.chunk, p.rope_chunk, p.tile, p.warps, p.shared, parts, p.stages)


def shared_limit(device: Device) -> int:
    """Bytes of shared memory of a program on `device`; the interpreter has no limit."""
    return 1 << 40 if TRITON_INTERPRETS else SHARED.get(device.arch, LEAST_SHARED)


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    rope: torch.Tensor | None,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Launch on the current stream; write `out` [T, heads, value_dim] and `lse` [T, heads]."""
    rows, heads, value_dim = out.shape
    k, page_size = indices.shape[1], kv.shape[1]
    latent_dim = value_dim if rope is None else kv.shape[2]
    device = device_of(q.device)
    p = plan(device, q.dtype, kv.dtype, rows, heads, latent_dim, q.shape[2] - latent_dim, k)
    is_fp8 = scales is not None
    if scales is None or rope is None:
        # Of an empty part nothing is read, nor of scales that are not there.
        rope, scales = kv[..., latent_dim:] if latent_dim < kv.shape[2] else kv, lse
        scale_strides = (0, 0)
    else:
        kv, scale_strides = kv.view(torch.uint8), scales.stride()[:2]
    if p.parts == 1:
        part_out, part_lse = out, lse
        strides = (0, out.stride(0), 0, lse.stride(0))
    else:
        part_out, part_lse = _parts(workspace, p.parts, rows, heads, value_dim)
        strides = (part_out.stride(0), part_out.stride(1), part_lse.stride(0), part_lse.stride(1))
    shift = page_size.bit_length() - 1
    with _on(q):
        sparse_mla_kernel[(math.ceil(heads / p.block_h) * p.parts * rows,)](
            q, kv, scales, rope, indices, _given(topk_length, indices), _given(sink, lse), part_out, part_lse,
            scale * math.log2(math.e), k, page_size, p.parts,
            *q.stride(), *kv.stride()[:2], *scale_strides, *rope.stride()[:2], *indices.stride(),
            0 if topk_length is None else topk_length.stride(0), *strides,
            HEADS=heads, LATENT_DIM=latent_dim, ROPE_DIM=q.shape[2] - latent_dim, VALUE_DIM=value_dim,
            FP8=is_fp8, NATIVE=is_fp8 and has_fp8(device),
            PAGED=kv.shape[0] > 1 and kv.stride(0) != page_size * kv.stride(1),
            PAGE_SHIFT=shift if page_size == 1 << shift else -1,
            WHOLE=k % p.tile == 0 and topk_length is None, HAS_LENGTH=topk_length is not None,
            HAS_SINK=sink is not None and p.parts == 1, COMPUTE=p.compute, PRECISION=precision(device, p),
            BLOCK_H=p.block_h, CHUNK=p.chunk, ROPE_CHUNK=p.rope_chunk, TILE=p.tile,
            num_warps=p.warps, num_stages=p.stages,
        )  # fmt: skip
        if p.parts > 1:
            _combine(part_out.flatten(1, 2), part_lse.flatten(1), sink, out, lse, heads)


def precision(device: Device, p: Plan) -> str:
    """How float32 is multiplied: by AMD's float32 product, by three of NVIDIA's, whose loss is below 2**-20."""
    return "tf32x3" if p.compute == "fp32" and device.type == "cuda" else "ieee"


def has_fp8(device: Device) -> bool:
    """True where the chip converts e4m3fn itself; the interpreter does not know its NaN."""
    return device.arch.startswith(FP8_CHIPS) and not TRITON_INTERPRETS


def combine(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Join parts: outs [S, R, V], lses [S, R] -> out [R, V], lse [R]."""
    with _on(outs):
        _combine(outs, lses, None, out, lse, 1)


def _combine(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, heads: int
) -> None:
    parts, rows, value_dim = outs.shape
    combine_kernel[(rows,)](
        outs, lses, _given(sink, lses), out, lse, parts, *outs.stride(), *lses.stride(), out.stride(0), lse.stride(0),
        HEADS=heads, VALUE_DIM=value_dim, BLOCK_V=triton.next_power_of_2(value_dim), HAS_SINK=sink is not None,
        num_warps=4 if value_dim > 256 else 1,
    )  # fmt: skip


def _parts(
    workspace: torch.Tensor, parts: int, rows: int, heads: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as float32 outputs [parts, rows, heads, value_dim] and lses [parts, rows, heads]."""
    first = -workspace.data_ptr() % ALIGNMENT  # a workspace may be any slice of bytes
    each = parts * rows * heads
    numbers = workspace[first : first + 4 * each * (value_dim + 1)].view(torch.float32)
    outs, lses = numbers.split_with_sizes([each * value_dim, each])
    return outs.view(parts, rows, heads, value_dim), lses.view(parts, rows, heads)


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device; the interpreter has none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _given(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in if tensor is None else tensor
