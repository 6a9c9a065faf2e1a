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

#: Registers a thread and bytes of stack (spills), by (threads, survivors a thread): what the launch shapes were
#: measured with. A change that needs more is a change to measure again.
BOUNDS = {(256, 16): (128, 0), (512, 8): (96, 8), (512, 16): (128, 16)}


def resources(path):
    tool = glob.glob(str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump*"))[0]
    report = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return [int(number) for number in found.groups()]


@pytest.mark.parametrize("shape", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_80", torch.float32),
        ("sm_90", torch.float32),
        ("sm_90", torch.bfloat16),
        ("sm_90", torch.float16),
        ("sm_100", torch.float32),
    ],
    ids=str,
)
def test_select_compiles_within_its_bounds(tmp_path, arch, dtype, shape):
    plan = kernel_cuda.Plan(1, *shape)
    path = tmp_path / "select.cubin"
    path.write_bytes(kernel_cuda.cubin(arch, dtype, plan))
    registers, stack, static = resources(path)
    most_registers, most_stack = BOUNDS[shape]
    assert registers <= most_registers
    assert stack <= most_stack
    assert static + plan.shared_memory <= 100 * 1024  # two CTAs on the smallest chip that has clusters; one on sm_80


def test_every_shape_is_among_those_compiled():
    for rows in (1, 4, 16, 64, 256, 8192):
        for columns in (64, 4096, 16384, 32768, 65536, 131072, 1 << 20):
            for k in (1, 512, 2048, 4096):
                for arch, processors in (("sm_80", 108), ("sm_90", 132), ("sm_100", 148)):
                    plan = kernel_cuda.plan(rows, columns, k, processors, arch)
                    assert (plan.threads, plan.slots) in BOUNDS
                    assert plan.ctas == 1 or arch != "sm_80"
                    assert k <= plan.threads * plan.slots * 2 // 3 or columns <= plan.threads * plan.slots
