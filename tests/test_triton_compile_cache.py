"""The Triton kernels of cache compile for every chip that we name, without spills and with hardly any shared memory."""

import pytest

pytest.importorskip("triton")
from compiling import TARGETS, compiled, spills
from keysift.ops.cache import kernel_triton as kernels

BYTES = {"cache_ptr": "*u8", "slots_ptr": "*i64", "out_ptr": "*u8"}
INDEX = {"TOKEN_BYTES": 128, "SCALES_FIRST": 8192, "SCALES_EACH": 4, "WIDTH": 128, "LARGEST": 448.0, "FLOOR": 1e-4}
LATENT = {"TOKEN_BYTES": 656, "SCALES_FIRST": 512, "SCALES_EACH": 656, "WIDTH": 128, "LARGEST": 448.0, "FLOOR": 1e-4}
CASES = {
    "index keys": (
        kernels.write_fp8_kernel,
        {**INDEX, "POWER_OF_TWO": True, "FNUZ": False, "ROPE_DIM": 0},
        {**BYTES, "x_ptr": "*bf16"},
    ),
    "index keys of MI300": (
        kernels.write_fp8_kernel,
        {**INDEX, "LARGEST": 224.0, "POWER_OF_TWO": False, "FNUZ": True, "ROPE_DIM": 0},
        {**BYTES, "x_ptr": "*fp32"},
    ),
    "latents": (
        kernels.write_fp8_kernel,
        {**LATENT, "POWER_OF_TWO": False, "FNUZ": False, "ROPE_DIM": 64},
        {**BYTES, "x_ptr": "*bf16"},
    ),
    "latents as they are": (
        kernels.copy_kernel,
        {"WIDTH": 1024, "TO": "bfloat16", "TO_CACHE": True},
        {"x_ptr": "*bf16", "cache_ptr": "*i16", "slots_ptr": "*i64"},
    ),
    "latents to bfloat16": (
        kernels.copy_kernel,
        {"WIDTH": 1024, "TO": "bfloat16", "TO_CACHE": True},
        {"x_ptr": "*fp32", "cache_ptr": "*i16", "slots_ptr": "*i64"},
    ),
    "latents from bfloat16": (
        kernels.copy_kernel,
        {"WIDTH": 1024, "TO": "float16", "TO_CACHE": False},
        {"x_ptr": "*i16", "cache_ptr": "*bf16", "slots_ptr": "*i32"},
    ),
    "latents as float32": (
        kernels.copy_kernel,
        {"WIDTH": 1024, "TO": "float32", "TO_CACHE": True},
        {"x_ptr": "*fp32", "cache_ptr": "*i32", "slots_ptr": "*i64"},
    ),
    "latents as float16": (
        kernels.copy_kernel,
        {"WIDTH": 1024, "TO": "float16", "TO_CACHE": False},
        {"x_ptr": "*i16", "cache_ptr": "*fp16", "slots_ptr": "*i32"},
    ),
    "gathered keys": (kernels.gather_index_kernel, {"WIDTH": 128, "SCALES": True}, BYTES),
    "gathered latents": (
        kernels.gather_latent_kernel,
        {"TOKEN_BYTES": 656, "VALUE_DIM": 512, "ROPE_DIM": 64, "TILE": 128, "ROPE_WIDTH": 64, "TO": "bfloat16"},
        {**BYTES, "out_ptr": "*i16"},
    ),
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_cache_compiles_within_the_chip(chip, case):
    kernel, constants, pointers = CASES[case]
    target, _ = TARGETS[chip]
    binary = compiled(kernel, constants, pointers, target, 1)
    assert binary.metadata.shared <= 1024
    assert spills(binary, target) == 0
