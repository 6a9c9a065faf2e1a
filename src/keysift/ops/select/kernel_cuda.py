"""select in CUDA C++: plan, compile and launch; the algorithms stand in kernel_cuda.cu and kernel_cuda_whole.cu."""

import ctypes
import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from cuda.bindings import driver

from keysift import kernel_nvrtc as nvrtc
from keysift.dispatch import device_of

_FOLDER = Path(__file__).parent
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MINUS_INFINITY = {torch.float32: "-__int_as_float(0x7f800000)", torch.bfloat16: "0xff80", torch.float16: "0xfc00"}
#: struct Arguments of the kernel: 27 fields of eight bytes.
_ARGUMENTS = struct.Struct("27q")


class Variant(NamedTuple):
    """What is compiled apart."""

    whole: bool  # kernel_cuda_whole.cu: a row's values stay in registers; kernel_cuda.cu: what reaches a cut, in lists
    threads: int
    slots: int  # values, or survivors of the cut, that a thread holds
    blocks: int = 1  # CTAs that a processor shall hold at a time: bounds the registers

    @property
    def source(self) -> str:
        """The program, behind what both share."""
        name = "kernel_cuda_whole.cu" if self.whole else "kernel_cuda.cu"
        return "\n".join(
            (_FOLDER / part).read_text() for part in ("kernel_cuda_parts.cuh", "kernel_cuda_out.cuh", name)
        )

    @property
    def most_shared_memory(self) -> int:
        """Bytes beside the kernel's own: value and column of all that lists hold."""
        return 0 if self.whole else 8 * self.threads * self.slots


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is launched, from its shape alone."""

    variant: Variant
    ctas: int  # per row; more than one: a cluster
    shared_memory: int  # bytes beside the kernel's own


#: Rows that registers hold, the first that is wide enough: for rows that leave processors idle or nearly so, where more
#: threads end a row sooner, and for many, where fewer do less that is not for an element.
WHOLE_FEW = (Variant(True, 512, 8), Variant(True, 512, 16, 2), Variant(True, 512, 32))
WHOLE_MANY = (Variant(True, 256, 8, 4), Variant(True, 256, 16, 4), Variant(True, 256, 32, 3))
#: Longer rows, in lists: few rows or a cluster each; many of them.
FEW, LONG = Variant(False, 512, 8), Variant(False, 512, 16)
MANY, MANY_LONGER, MANY_LONG = Variant(False, 256, 16, 3), Variant(False, 512, 8, 2), Variant(False, 256, 32, 2)
#: What k may be at most for lists of 4096 survivors.
SHORT_LISTS = 2600


def plan(rows: int, columns: int, k: int, processors: int, arch: str) -> Plan:
    """Whole rows in registers, or lists of survivors: clusters while rows leave processors idle, lists as long as the
    survivors of a cut need.

    Thresholds measured on an H200, see docs/select.md.
    """
    many = rows >= processors
    if columns <= (8192 if many else 16384):
        variants = WHOLE_MANY if rows >= 4 * processors else WHOLE_FEW
        return Plan(next(v for v in variants if columns <= v.threads * v.slots), 1, 0)
    if k > SHORT_LISTS or columns > 32768:
        variant = MANY_LONG if many else LONG
    else:
        variant = FEW if not many else MANY if columns <= 16384 else MANY_LONGER
    ctas = 1
    if int(arch.removeprefix("sm_")) >= 90:
        while ctas < 16 and columns // (ctas * 2) >= 4096:
            if rows * ctas * 2 > (processors if ctas == 1 and columns > 32768 else processors // 2):
                break
            ctas *= 2
    return Plan(variant, ctas, variant.most_shared_memory)


def run(
    scores: torch.Tensor,
    k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    page_table: torch.Tensor | None,
    page_rows: torch.Tensor | None,
    page_size: int,
    index_base: str,
    sorted: bool,
    out: torch.Tensor,
    values: torch.Tensor | None,
    counts: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Launch on the current stream; one kernel, no scratch in global memory."""
    device = device_of(scores.device)
    rows, columns = scores.shape
    shape = plan(rows, columns, k, device.processors, device.arch)
    stream = torch.cuda.current_stream(scores.device).cuda_stream
    config, kernel = _launch(scores.device.index, device.arch, scores.dtype, shape, rows, stream)
    arguments = pack(
        scores, k, start, end, next_n, page_table, page_rows, page_size, index_base, sorted, out, values, counts
    )
    pointers = ctypes.c_void_p(ctypes.addressof(arguments))
    with torch.cuda.device(scores.device):  # the launch goes to the current context, which a new thread lacks
        nvrtc.check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


def pack(
    scores: torch.Tensor,
    k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    page_table: torch.Tensor | None,
    page_rows: torch.Tensor | None,
    page_size: int,
    index_base: str,
    sorted: bool,
    out: torch.Tensor,
    values: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> ctypes.Array[ctypes.c_char]:
    """struct Arguments of the kernels."""
    fields = (
        scores.data_ptr(), scores.stride(0), scores.shape[1],
        *_vector(start), *_vector(end), next_n,
        *_vector(page_table), page_table.shape[1] if page_table is not None else -1, max(page_size, 1),
        *_vector(page_rows),
        out.data_ptr(), out.stride(0),
        *_vector(values)[:2], *_vector(counts)[:2],
        k, index_base == "column", sorted,
    )  # fmt: skip
    return ctypes.create_string_buffer(_ARGUMENTS.pack(*fields))


@functools.lru_cache(maxsize=4096)
def _launch(
    index: int, arch: str, dtype: torch.dtype, shape: Plan, rows: int, stream: int
) -> tuple[driver.CUlaunchConfig, driver.CUfunction]:
    """A configuration that is never written again, so threads may share it, and its kernel."""
    attributes = []
    if shape.ctas > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = shape.ctas, 1, 1
        attributes.append(attribute)
    config = nvrtc.configuration(rows * shape.ctas, shape.variant.threads, shape.shared_memory, stream, attributes)
    return config, _kernel(index, arch, dtype, shape.variant)


def _vector(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """(address, stride of the first dimension, whether its integers are 64 bits wide)."""
    return (0, 0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0), tensor.dtype == torch.int64)


def cubin(arch: str, dtype: torch.dtype, variant: Variant) -> bytes:
    """The machine code of one variant for "sm_80", "sm_90", ..."""
    return nvrtc.compiled(variant.source, arch, macros(dtype, variant))


def macros(dtype: torch.dtype, variant: Variant) -> list[tuple[str, str]]:
    """What the source of a variant is compiled with."""
    return [
        ("DTYPE", str(_DTYPES[dtype])),
        ("MINUS_INFINITY", _MINUS_INFINITY[dtype]),
        ("THREADS", str(variant.threads)),
        ("SLOTS", str(variant.slots)),
        ("BLOCKS", str(variant.blocks)),
    ]


@functools.cache
def _kernel(index: int, arch: str, dtype: torch.dtype, variant: Variant) -> driver.CUfunction:
    """The loaded kernel of one variant on one device, with its limits raised."""
    large = not variant.whole and int(arch.removeprefix("sm_")) >= 90
    code = cubin(arch, dtype, variant)
    return nvrtc.loaded(index, code, "select_kernel", variant.most_shared_memory, large_clusters=large)
