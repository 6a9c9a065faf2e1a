"""Every Triton kernel compiles for every chip that we name, within its shared memory, without spills, without a GPU."""

import pytest

pytest.importorskip("triton")
from compiling import TARGETS, compiled, spills
from keysift.dispatch import PROCESSORS
from keysift.ops.select import kernel_triton

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
ALIGNED = ("columns", "stride_scores", "stride_out")


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
        pointers = {"scores_ptr": f"*{dtype}", "values_ptr": f"*{dtype}", "kept_ptr": "*fp32", "start_ptr": "*i64"}
        binary = compiled(kernel, constants, pointers, target, warps, ALIGNED)
        assert binary.metadata.shared <= shared_memory, kernel.__name__
        assert spills(binary, target) == 0, kernel.__name__
