"""sparse_mla in CUDA C++ for sm_90: compile and launch; the algorithm stands in kernel_cuda.cu."""

import ctypes
import functools
import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from cuda.bindings import driver

from keysift import kernel_nvrtc as nvrtc
from keysift.dispatch import device_of

from . import kernel_cuda_plan as plans

#: struct Arguments and struct Combination of the kernels: fields of eight bytes.
_ARGUMENTS, _COMBINATION = struct.Struct("28q"), struct.Struct("11q")
THREADS, COMBINE_THREADS = 384, 128


class Variant(NamedTuple):
    """What is compiled apart."""

    fp8: bool
    wide: bool  # rows of q and kv begin at multiples of 16 bytes, those of out at multiples of 8

    @property
    def macros(self) -> list[tuple[str, str]]:
        """What the source is compiled with."""
        return [("FP8", str(int(self.fp8))), ("WIDE", str(int(self.wide))), ("SHARED", str(plans.SHARED))]


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    rope: torch.Tensor | None,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """Launch on the current stream; write `out` [T, heads, 512] and `lse` [T, heads]."""
    rows, heads, value_dim = out.shape
    device, k = device_of(q.device), indices.shape[1]
    parts = plans.parts(device.processors, rows, heads, k)
    variant = Variant(scales is not None, _is_wide(q, kv, rope, out))
    stream = torch.cuda.current_stream(q.device).cuda_stream
    sinks = (0, 0) if sink is None else (sink.data_ptr(), sink.stride(0))
    each = rows * heads
    outs, lses = out.data_ptr(), lse.data_ptr()
    strides = 0, 2 * out.stride(0), 0, lse.stride(0)
    if parts > 1:
        assert workspace is not None  # noqa: S101 - parts come with the workspace that the table asks for
        outs = -(-workspace.data_ptr() // plans.ALIGNMENT) * plans.ALIGNMENT
        lses = outs + 4 * parts * each * value_dim
        strides = 4 * each * value_dim, 4 * heads * value_dim, each, heads
    size = kv.element_size()
    arguments = _ARGUMENTS.pack(
        q.data_ptr(), *(2 * stride for stride in q.stride()),
        kv.data_ptr(), _address(scales), _address(rope),
        size * kv.stride(0), size * kv.stride(1), kv.shape[1],
        indices.data_ptr(), *indices.stride(),
        _address(topk_length), *((0, 0) if topk_length is None else _vector(topk_length)),
        *sinks,
        outs, *strides[:2], lses, *strides[2:],
        heads, k, parts, _bits(scale * math.log2(math.e)),
    )  # fmt: skip
    ctas = math.ceil(heads / plans.HEADS) * parts * rows
    with torch.cuda.device(q.device):  # the launch goes to the current context, which a new thread lacks
        _start(q.device.index, "sparse_mla_kernel", variant, ctas, stream, arguments)
        if parts > 1:
            joined = _COMBINATION.pack(
                outs, lses, *sinks, out.data_ptr(), 2 * out.stride(0), lse.data_ptr(), lse.stride(0), parts, each, heads
            )  # fmt: skip
            _start(q.device.index, "combine_kernel", variant, each, stream, joined)


def _is_wide(q: torch.Tensor, kv: torch.Tensor, rope: torch.Tensor | None, out: torch.Tensor) -> bool:
    """Whether every row that is read begins at a multiple of 16 bytes, and every one written at one of 8."""
    places = _address(rope), *_places(q), *_places(kv)
    return q.stride(2) == 1 and not any(x % 16 for x in places) and not any(x % 8 for x in _places(out))


def _places(tensor: torch.Tensor) -> list[int]:
    """The address of a tensor of rows, and in bytes how far they lie apart."""
    size = tensor.element_size()
    apart = [size * tensor.stride(i) for i in range(tensor.ndim - 1) if tensor.shape[i] > 1]
    return [tensor.data_ptr(), *apart]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(tensor: torch.Tensor) -> tuple[int, bool]:
    """(stride, whether its integers are 64 bits wide)."""
    return tensor.stride(0), tensor.dtype == torch.int64


def _bits(number: float) -> int:
    """Those of the float32 nearest to a number."""
    bits: int = struct.unpack("I", ctypes.c_float(number))[0]
    return bits


def _start(index: int, name: str, variant: Variant, ctas: int, stream: int, arguments: bytes) -> None:
    config, kernel = _launch(index, name, variant, ctas, stream)
    packed = ctypes.create_string_buffer(arguments)
    pointers = ctypes.c_void_p(ctypes.addressof(packed))
    nvrtc.check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


@functools.lru_cache(maxsize=4096)
def _launch(
    index: int, name: str, variant: Variant, ctas: int, stream: int
) -> tuple[driver.CUlaunchConfig, driver.CUfunction]:
    if name == "sparse_mla_kernel":
        config = nvrtc.configuration(ctas, THREADS, plans.SHARED, stream)
    else:  # may start before the parts end, for which it waits itself
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = nvrtc.configuration(ctas, COMBINE_THREADS, 0, stream, [early])
    return config, _kernel(index, name, variant)


@functools.cache
def _kernel(index: int, name: str, variant: Variant) -> driver.CUfunction:
    return nvrtc.loaded(index, cubin(variant), name, plans.SHARED if name == "sparse_mla_kernel" else 0)


def cubin(variant: Variant) -> bytes:
    """The machine code of one variant, of both kernels."""
    source = (Path(__file__).parent / "kernel_cuda.cu").read_text()
    return nvrtc.compiled(source, "sm_90", variant.macros)
