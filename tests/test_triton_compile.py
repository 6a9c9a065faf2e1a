"""Every Triton kernel compiles for every chip that we name, within its shared memory, without spills, without a GPU."""

import glob
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from keysift.dispatch import PROCESSORS  # noqa: E402
from keysift.ops.select import kernel_triton  # noqa: E402

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163_840),
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
}
PLAIN = {
    "HAS_START": True,
    "HAS_END": True,
    "HAS_TABLE": False,
    "HAS_PAGE_ROWS": False,
    "HAS_VALUES": False,
    "HAS_COUNTS": False,
    "ABSOLUTE": False,
}
EVERYTHING = {**PLAIN, "HAS_TABLE": True, "HAS_PAGE_ROWS": True, "HAS_VALUES": True, "HAS_COUNTS": True}
# rows, columns, k, dtype, results: each plan that differs, each dtype and option once.
SHAPES = [
    (1, 4096, 2048, "fp32", PLAIN),
    (256, 16384, 512, "bf16", EVERYTHING),
    (1, 131072, 2048, "fp32", PLAIN),
    (2048, 32768, 2048, "fp16", EVERYTHING),
    (256, 131072, 2048, "fp32", PLAIN),
    (4, 1 << 20, 100_000, "fp32", PLAIN),
]
POINTERS = {"scores_ptr": None, "values_ptr": None, "kept_ptr": "*fp32", "start_ptr": "*i64"}


def compiled(kernel, constants, dtype, target, warps):
    signature, attrs = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*i32") or f"*{dtype}"
            attrs[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name in ("columns", "stride_scores", "stride_out"):
                attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": warps})


def spills(binary, target):
    """Registers spilled to memory, from the resource report of the chip's own tool chain."""
    if target.backend == "hip":
        return sum(int(count) for count in re.findall(r"vgpr_spill_count:\s+(\d+)", binary.asm["amdgcn"]))
    tools = glob.glob(str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        report = subprocess.run([tools[0], "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])


def launches(rows, columns, k, results, processors, element_size=4):
    """The kernels of a shape with their constants and warps, as `kernel_triton.run` launches them."""
    plan = kernel_triton.plan(rows, columns, k, processors)
    windows = {name: results[name] for name in ("HAS_START", "HAS_END", "HAS_TABLE")}
    if plan.whole:
        return [(kernel_triton.select_whole_kernel, {**results, "FIT": plan.fit}, plan.warps)]
    shape = {"SPLITS": plan.splits, "FIT": plan.fit}
    scan = {**windows, **shape, "BLOCK": plan.scan_block(element_size), "SAMPLE": plan.sample, "LISTED": plan.listed}
    finish = {**results, **shape, "BLOCK": plan.finish_block}
    return [
        (kernel_triton.select_scan_kernel, scan, plan.warps),
        (kernel_triton.select_finish_kernel, finish, plan.finish_warps),
    ]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}-k{shape[2]}-{shape[3]}")
def test_select_compiles_within_the_chip(chip, shape):
    target, shared_memory = TARGETS[chip]
    rows, columns, k, dtype, results = shape
    element_size = int(dtype[-2:]) // 8
    for kernel, constants, warps in launches(rows, columns, k, results, PROCESSORS[chip], element_size):
        binary = compiled(kernel, constants, dtype, target, warps)
        assert binary.metadata.shared <= shared_memory, kernel.__name__
        assert spills(binary, target) == 0, kernel.__name__
