"""Every CUDA C++ kernel compiles through NVRTC for every chip that we name, within recorded registers."""

import glob
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")
triton = pytest.importorskip("triton")  # its wheel brings cuobjdump

from keysift.ops.select import kernel_cuda  # noqa: E402
from keysift.ops.sparse_mla import kernel_cuda as mla  # noqa: E402
from keysift.ops.sparse_mla import kernel_cuda_plan as mla_plan  # noqa: E402

#: Registers a thread and bytes of stack (spills) by variant: a change that needs more is a change to measure again.
BOUNDS = {
    kernel_cuda.FEW: (128, 24),
    kernel_cuda.LONG: (128, 0),
    kernel_cuda.MANY: (80, 64),
    kernel_cuda.MANY_LONGER: (64, 48),
    kernel_cuda.MANY_LONG: (128, 32),
    **dict.fromkeys(kernel_cuda.WHOLE_FEW, (104, 0)),
    **dict.fromkeys(kernel_cuda.WHOLE_MANY, (80, 16)),
}


#: One of each source is compiled for every chip and dtype, the others for the first two.
EVERYWHERE = (kernel_cuda.FEW, kernel_cuda.WHOLE_MANY[1])


def dump(path, what):
    tool = glob.glob(str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump*"))[0]
    return subprocess.run([tool, what, str(path)], capture_output=True, text=True, check=True).stdout


def resources(path, kernel="select_kernel"):
    found = re.search(rf"Function {kernel}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(path, "-res-usage"))
    return [int(number) for number in found.groups()]


TARGETS = [
    ("sm_80", torch.float32),
    ("sm_90", torch.float32),
    ("sm_90", torch.bfloat16),
    ("sm_90", torch.float16),
    ("sm_100", torch.float32),
]


@pytest.mark.parametrize(
    ("variant", "arch", "dtype"),
    [(variant, *target) for variant in BOUNDS for target in (TARGETS if variant in EVERYWHERE else TARGETS[:2])],
    ids=str,
)
def test_select_compiles_within_its_bounds(tmp_path, variant, arch, dtype):
    path = tmp_path / "select.cubin"
    path.write_bytes(kernel_cuda.cubin(arch, dtype, variant))
    registers, stack, static = resources(path)
    most_registers, most_stack = BOUNDS[variant]
    assert registers <= most_registers
    assert stack <= most_stack
    assert static + variant.most_shared_memory <= 100 * 1024  # two CTAs on the smallest chip that has clusters


@pytest.mark.parametrize("columns", [1, 4096, 16383, 16384])
def test_rows_that_registers_hold_get_no_cluster(columns):
    assert kernel_cuda.plan(1, columns, 2048, 132, "sm_90").ctas == 1
    assert kernel_cuda.plan(1, 16384 + columns, 2048, 132, "sm_90").ctas > 1


def test_every_shape_is_among_those_compiled():
    for rows in (1, 4, 16, 64, 256, 8192):
        for columns in (64, 4096, 16384, 32768, 65536, 131072, 1 << 20):
            for k in (1, 512, 2048, 4096):
                for arch, processors in (("sm_80", 108), ("sm_90", 132), ("sm_100", 148)):
                    plan = kernel_cuda.plan(rows, columns, k, processors, arch)
                    assert plan.variant in BOUNDS
                    assert plan.variant.whole == (columns <= (8192 if rows >= processors else 16384))
                    assert plan.ctas == 1 or (arch != "sm_80" and not plan.variant.whole)
                    capacity = plan.variant.threads * plan.variant.slots
                    assert columns <= capacity or (k <= capacity * 2 // 3 and not plan.variant.whole)
                    assert plan.shared_memory <= plan.variant.most_shared_memory


@pytest.mark.parametrize(
    "variant", [mla.Variant(fp8, wide) for fp8 in (False, True) for wide in (True, False)], ids=str
)
def test_sparse_mla_compiles_within_its_bounds(tmp_path, variant):
    path = tmp_path / "sparse_mla.cubin"
    path.write_bytes(mla.cubin(variant))
    registers, stack, static = resources(path, "sparse_mla_kernel")
    assert registers * mla.THREADS <= 65536
    assert stack <= (16 if variant == mla.Variant(fp8=True, wide=False) else 0)
    assert static + mla_plan.SHARED <= 227 * 1024
    assert resources(path, "combine_kernel")[1] == 0
    code = dump(path, "-sass")
    # What a tile needs is unrolled, and waited for once by each: 36 products for logits, 4 for each half of the values.
    assert [len(re.findall(rf"HGMMA.64x{n}x16", code)) for n in (64, 256)] == [36, 8]
    assert code.count("WARPGROUP.DEPBAR") == 3
    # Registers that the warpgroups leave or take: as many as the launch gave.
    shares = [int(found, 16) for found in re.findall(r"USETMAXREG\S+ (?:UP\d, )?0x(\w+)", code)]
    assert sum(shares) == 3 * registers


@pytest.mark.parametrize(
    ("rows", "heads", "parts"), [(1, 128, 32), (16, 128, 4), (64, 64, 2), (64, 16, 2), (128, 128, 1)]
)
def test_few_tokens_of_sparse_mla_are_cut_into_parts_that_fill_the_chip(rows, heads, parts):
    assert mla_plan.parts(132, rows, heads, 2048) == parts
    size = mla_plan.workspace(132, rows, heads, 2048)
    assert size == (4 * parts * rows * heads * 513 + 16 if parts > 1 else 0)
