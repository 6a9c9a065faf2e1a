"""How sparse_mla is launched in Triton: tiles and parts from static facts, without Triton, so that any machine can ask.

Shared memory bounds a tile. Of D columns of s bytes (both parts padded to whole chunks) two tiles lie there on NVIDIA
(four on sm_100), s * D * 2 * TILE, and for blocks of 64 heads the queries, s * D * 64. At D = 576 in 16 bits that is
147 KB for 64 heads and 74 KB for fewer, in tiles of 32; 37 KB in tiles of 16. On AMD one tile lies there, s * D * TILE,
37 KB in tiles of 32. tests/test_triton_compile_mla.py compares `Plan.shared` with what the compiler takes.
Registers bound the heads: 64 * 512 float32 sums are 128 registers of each of 256 threads.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch

from keysift.dispatch import TRITON_INTERPRETS, Device
from keysift.layout import TILE as SCALED

#: A workspace may be any slice of bytes.
ALIGNMENT = 16
#: Bytes of shared memory that a program may have. A chip that is not named is taken to have the least of all.
SHARED = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
    "gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
LEAST_SHARED = 48 << 10
#: Chips that multiply blocks of 64 rows from shared memory, which leaves the registers to the sums: columns of a chunk
#: that need fewest registers, and tiles that Triton keeps at a time.
WIDE = {"sm_90": (256, 2), "sm_100": (512, 4), "sm_103": (512, 4)}
#: Selected latents at a time, the first that fit: on an H200 tiles of 64 take 0.6 to 0.8 of the time of 32.
TILES = {"sm_90": [64, 32, 16]}
FP8_CHIPS = ("sm_89", "sm_90", "sm_10", "sm_12", "gfx95", "gfx12")
#: What starting a part and joining it costs, in tiles.
PART_COST = 2
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


@functools.lru_cache(maxsize=4096)
def plan(
    device: Device, q: torch.dtype, kv: torch.dtype, rows: int, heads: int, latent_dim: int, rope_dim: int, k: int
) -> Plan:
    """The tiles of a problem; `shared` may exceed what the chip has, which the table then refuses.

    latent_dim is the part of a latent that holds the values, with a scale for each 128 if they are fp8; rope_dim the
    rest.
    """
    compute, is_fp8 = compute_dtype(q, kv), kv == torch.float8_e4m3fn
    limit, is_amd = shared_limit(device), device.type == "hip"
    # On sm_90, fp8 would spill: four accumulators of 64 heads beside what the conversion needs.
    is_wide = compute != "fp32" and not (is_fp8 and device.arch == "sm_90")
    wide, kept = WIDE.get(device.arch, (0, 2)) if is_wide else (0, 2)
    widest = wide or (64 if compute == "fp32" else SCALED)
    chunk = SCALED if is_fp8 else min(widest, max(16, power_of_two(latent_dim)))
    rope_chunk = min(SCALED, max(16, power_of_two(rope_dim)))
    columns = math.ceil(latent_dim / chunk) * chunk + math.ceil(rope_dim / rope_chunk) * rope_chunk
    if compute == "fp32" or (is_amd and is_fp8):
        most, tiles = 16, [16]
    elif is_amd:
        most, tiles = 32, [32, 16]
    else:
        most, tiles = (64 if wide and columns <= 640 else 32), TILES.get(device.arch, [32, 16])
    most = min(most, max(16, power_of_two(heads)))
    for block_h in (size for size in (64, 32, 16) if size <= most):
        for tile in tiles:
            if is_amd:
                rows_kept = max(
                    block_h, tile if limit < 128 << 10 else 2 * tile
                )  # with room, the next tile is under way
            elif block_h == 64:
                rows_kept = block_h + kept * tile
            else:  # queries go to registers, and float32 ones pass through shared memory
                rows_kept = max(block_h, 2 * tile) + (8 if compute == "fp32" else 0)
            shared = BYTES[compute] * columns * rows_kept + (8 << 10)
            best = Plan(compute, block_h, chunk, rope_chunk, tile, 4 if is_amd else 8, shared)
            if shared <= limit:
                return _with_parts(best, device.processors, rows * math.ceil(heads / block_h), k, limit)
    return best  # of 16 heads, and too large


def _with_parts(p: Plan, processors: int, programs: int, k: int, limit: int) -> Plan:
    """The plan with k cut so that the longest walk is shortest: waves of programs times the tiles of a part."""
    tiles, resident = max(1, math.ceil(k / p.tile)), processors * min(2, limit // p.shared)

    def cost(parts: int) -> int:
        each = math.ceil(tiles / parts) + (PART_COST if parts > 1 else 0)
        return math.ceil(max(1, programs) * parts / resident) * each

    choices = [1 << power for power in range(tiles.bit_length())]
    parts = min((parts for parts in choices if parts <= tiles), key=cost)
    return replace(p, parts=parts)


def shared_limit(device: Device) -> int:
    """Bytes of shared memory of a program on `device`; the interpreter has no limit."""
    return 1 << 40 if TRITON_INTERPRETS else SHARED.get(device.arch, LEAST_SHARED)


def precision(device: Device, p: Plan) -> str:
    """How float32 is multiplied: by AMD's float32 product, by three of NVIDIA's, whose loss is below 2**-20."""
    return "tf32x3" if p.compute == "fp32" and device.type == "cuda" else "ieee"


def has_fp8(device: Device) -> bool:
    """True where the chip converts e4m3fn itself; the interpreter does not know its NaN."""
    return device.arch.startswith(FP8_CHIPS) and not TRITON_INTERPRETS


def power_of_two(number: int) -> int:
    """The least one that is not less."""
    return 1 << max(0, number - 1).bit_length()
