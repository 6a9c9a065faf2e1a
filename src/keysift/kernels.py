"""What kernels need, and do, alike in every stage: constraints for the tables, and where a launch goes."""

import contextlib
import functools

import torch

from keysift import dispatch
from keysift.dispatch import Device, Problem


def unmet_cpu(problem: Problem) -> list[str]:
    """What a kernel for CPUs needs."""
    return [] if problem.device.type == "cpu" else [f"device is {problem.device}, needs cpu"]


def unmet_triton(device: Device) -> list[str]:
    """What every Triton kernel needs."""
    runs = device.type in ("cuda", "hip") or dispatch.TRITON_INTERPRETS
    return [
        *([] if runs else [f"device is {device}, needs cuda or hip"]),
        *([] if device.has("triton") else ["the package triton is not installed"]),
    ]


def unmet_nvrtc(device: Device) -> list[str]:
    """What every kernel in CUDA C++ needs."""
    return [] if _has_nvrtc(device) else ["cuda-core or NVRTC is not installed (pip install 'keysift[cuda]')"]


@functools.cache
def _has_nvrtc(device: Device) -> bool:
    if not (device.has("cuda.core") and device.has("cuda.bindings")):
        return False
    if not device.is_local:
        return True
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        return False
    return True


def unmet_nothing(_problem: object) -> list[str]:
    """What a reference needs."""
    return []


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Without autocast, which would round what torch multiplies: a stage computes what its arguments say."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING


_NOTHING = contextlib.nullcontext()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: inside this it is the tensor's; the interpreter has none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else _NOTHING
