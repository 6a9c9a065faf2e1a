"""Compiling Triton kernels for chips that are not here, and what the result takes of them."""

import glob
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: The chips that we name, and the shared memory of each in bytes.
TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163_840),
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
}


def compiled(kernel, constants, pointers, target, warps, aligned=(), **options):
    """`kernel` with its pointers as `pointers` says (default *i32) and its numbers too (default i32); names in
    `aligned`, and every pointer, are multiples of 16.
    """
    signature, attrs = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*i32")
            attrs[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = pointers.get(name, "i32")
            if name in aligned:
                attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": warps, **options})


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
