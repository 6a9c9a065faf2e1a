"""The Triton kernels of score compile for every chip that we name, with its own fp8 product, and without spills."""

import re

import pytest
import torch

pytest.importorskip("triton")
from compiling import TARGETS, compiled, spills
from keysift.ops.score import kernel_triton as kernels

NAMES = {
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float32: "fp32",
}  # fmt: skip
NATIVE = {"gfx942": torch.float8_e4m3fnuz}
#: (queries' and keys' dtype, heads, head size): "fp8" is the chip's own.
CASES = [
    ("fp8", "fp8", 64, 128),
    ("fp8", "fp8", 32, 128),
    ("bfloat16", "fp8", 64, 128),
    ("bfloat16", "bfloat16", 64, 128),
    ("float16", "float16", 8, 64),
    ("float32", "float32", 16, 32),
]
#: What multiplies fp8 by fp8, so that an upcast does not go unnoticed; sm_80 has no such instruction.
FP8_PRODUCT = {
    "gfx942": r"v_mfma_f32_\S*fp8_fp8",
    "gfx950": r"v_mfma_\S*(f8f6f4|fp8_fp8)",
    "sm_90": r"wgmma\.mma_async\S*e4m3\.e4m3",
    "sm_100": r"(tcgen05\.mma\S*f8f6f4|mma\S*e4m3\.e4m3)",
}


def dtype_of(name, chip):
    return NATIVE.get(chip, torch.float8_e4m3fn) if name == "fp8" else getattr(torch, name)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("chip", "case"),
    # sm_80 has no fp8, as the table says
    [(chip, case) for chip in TARGETS for case in CASES if chip != "sm_80" or "fp8" not in case],
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one)),
)
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_score_compiles_within_the_chip(chip, case, form):
    target, shared_memory = TARGETS[chip]
    q_name, k_name, heads, head_dim = case
    q_dtype, k_dtype = dtype_of(q_name, chip), dtype_of(k_name, chip)
    p = kernels.plan(q_dtype, k_dtype, heads, head_dim)
    constants = {"HEADS": heads, "DIM": head_dim, "BLOCK_H": p.heads, "BLOCK_D": p.head_dim, "BLOCK_N": p.block_n}
    constants |= {"COMPUTE": p.compute, "HAS_SCALE": True}
    if form == "prefill":
        kernel = kernels.score_prefill_kernel
        constants |= {"HAS_START": True, "HAS_END": True, "QUERIES": p.queries, "BLOCK_M": 32 * p.queries}
    else:
        kernel = kernels.score_decode_kernel
        constants |= {
            "NEXT_N": 2,
            "PER_ROW": False,
            "BLOCK_NEXT": 2,
            "BLOCK_H": max(16, p.heads),
            "BLOCK_N": p.decode_n,
            "PAGE_SHIFT": 6,
            "REQUESTS": 16,
            "KEPT": 2 * max(16, p.heads) * p.head_dim * p.size <= kernels.KEPT_BYTES,
        }
    pointers = {"q_ptr": f"*{NAMES[q_dtype]}", "k_ptr": f"*{NAMES[k_dtype]}"}
    pointers |= dict.fromkeys(("scale_ptr", "weights_ptr", "out_ptr"), "*fp32")
    ones = {"stride_q_dim": 1, "stride_k_dim": 1, "stride_weights_head": 1}  # Triton specialises on a stride of 1
    aligned = [
        name for name in kernel.arg_names if name.startswith("stride") and name not in ("stride_start", "stride_end")
    ]
    options = {"num_stages": p.stages}
    warps = p.warps if form == "prefill" else p.decode_warps
    binary = compiled(kernel, constants | ones, pointers, target, warps, aligned, **options)
    assert binary.metadata.shared <= shared_memory
    assert spills(binary, target) == 0
    if q_name == k_name == "fp8":
        text = binary.asm["amdgcn" if target.backend == "hip" else "ptx"]
        assert re.search(FP8_PRODUCT[chip], text), f"no {FP8_PRODUCT[chip]}"
