"""The Triton kernels of sparse_mla compile for every chip that we name, with its matrix instructions, no spills."""

import re

import pytest
import torch

pytest.importorskip("triton")
from compiling import TARGETS, compiled, spills
from keysift import dispatch
from keysift.ops.sparse_mla import kernel_triton as kernels
from keysift.ops.sparse_mla import kernel_triton_plan as plans

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NAMES = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32", FP8: "*u8"}
EVERY = tuple(TARGETS)
#: queries, latents, heads, latent and rotary columns, tokens, chips: V3.2 whole and per rank, and each other plan once.
CASES = {
    "128 heads": (BF16, BF16, 128, 512, 64, 4096, EVERY),
    "128 heads, fp8": (BF16, FP8, 128, 512, 64, 4096, ("gfx950", "sm_90", "sm_100")),
    "16 heads, decode": (BF16, BF16, 16, 512, 64, 1, ("gfx942", "sm_80")),
    "16 heads, fp8, decode": (BF16, FP8, 16, 512, 64, 1, ("gfx942", "sm_80")),
    "32 heads, fp16": (FP16, FP16, 32, 512, 64, 64, ("sm_90",)),
    "8 heads, float32": (FP32, FP32, 8, 512, 64, 8, ("gfx950", "sm_90")),
    "64 heads of 36": (BF16, BF16, 64, 36, 0, 8, ("sm_100",)),
}
#: What multiplies in blocks of 64 heads, and elsewhere.
WIDE = {"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}
NARROW = {
    "gfx942": r"v_mfma",
    "gfx950": r"v_mfma",
    "sm_80": r"mma\.sync",
    "sm_90": r"mma\.sync",
    "sm_100": r"mma\.sync",
}
#: Bytes in memory: blocks of 64 heads put away what the end needs, addresses, and on sm_90 constants of the loop. Tiles
#: of 64 latents there need more than there are registers, and are faster by a quarter all the same.
STACK = {("sm_90", 64): 160, ("sm_90", 32): 112, ("sm_90", 16): 8, ("sm_100", 64): 16}


def facts(chip):
    return dispatch.parse_device(("hip:" if chip.startswith("gfx") else "cuda:") + chip)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("case", "chip"), [(case, chip) for case, facts in CASES.items() for chip in facts[-1]])
def test_sparse_mla_compiles_within_the_chip(case, chip):
    target, shared_memory = TARGETS[chip]
    q, kv, heads, latent_dim, rope_dim, rows, _ = CASES[case]
    k = 2048 if rows > 1 else 2040  # not whole tiles, in decode
    p = plans.plan(facts(chip), q, kv, rows, heads, latent_dim, rope_dim, k)
    constants = {
        "HEADS": heads, "LATENT_DIM": latent_dim, "ROPE_DIM": rope_dim, "VALUE_DIM": latent_dim, "FP8": kv == FP8,
        "NATIVE": plans.has_fp8(facts(chip)), "PAGED": True, "PAGE_SHIFT": 6, "WHOLE": k % p.tile == 0,
        "HAS_LENGTH": rows == 1, "HAS_SINK": p.parts == 1, "COMPUTE": p.compute,
        "PRECISION": plans.precision(facts(chip), p), "BLOCK_H": p.block_h, "CHUNK": p.chunk,
        "ROPE_CHUNK": p.rope_chunk, "TILE": p.tile, "ROPE_UNIT": 8 if kv == FP8 else 1,
        "stride_q_dim": 1, "stride_index": 1,
    }  # fmt: skip
    types = {"q_ptr": NAMES[q], "kv_ptr": NAMES[kv], "scales_ptr": "*fp32", "sink_ptr": "*fp32", "lse_ptr": "*fp32"}
    types |= {"rope_ptr": NAMES[BF16 if kv == FP8 else kv], "out_ptr": NAMES[q] if p.parts == 1 else "*fp32"}
    aligned = [name for name in kernels.sparse_mla_kernel.arg_names if name.startswith("stride_")]
    # The scales of fp8 tokens are 164 numbers apart, and their rotary parts 41 units of 8.
    aligned = [name for name in aligned if "scales" not in name and (kv != FP8 or "rope" not in name)]
    binary = compiled(
        kernels.sparse_mla_kernel, constants, {**types, "scale": "fp32"}, target, p.warps, aligned,
        num_stages=p.stages,
    )  # fmt: skip
    assert binary.metadata.shared <= p.shared <= shared_memory
    assert spills(binary, target) <= STACK.get((chip, p.block_h), 0)
    mnemonic = WIDE.get(chip, NARROW[chip]) if p.block_h == 64 else NARROW[chip]
    assert re.search(mnemonic, binary.asm["ptx" if "ptx" in binary.asm else "amdgcn"])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("chip", TARGETS)
def test_combine_compiles_within_the_chip(chip):
    constants = {"HEADS": 128, "VALUE_DIM": 512, "BLOCK_V": 512, "HAS_SINK": True, "stride_outs_dim": 1}
    types = {"outs_ptr": "*fp32", "lses_ptr": "*fp32", "sink_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    binary = compiled(kernels.combine_kernel, constants, types, TARGETS[chip][0], 4)
    assert binary.metadata.shared <= 1024
    assert spills(binary, TARGETS[chip][0]) == 0
