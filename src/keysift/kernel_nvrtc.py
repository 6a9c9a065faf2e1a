"""How a kernel in CUDA C++ gets to a GPU: compiled by NVRTC, kept on disk, loaded and launched by the driver."""

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache


def compiled(source: str, arch: str, macros: Sequence[tuple[str, str]]) -> bytes:
    """The machine code for "sm_80", "sm_90", ...; kept on disk by source, options and NVRTC version."""
    # sm_90 and later have instructions of their own only under the architecture-specific name.
    name = arch if int(arch.removeprefix("sm_")) < 90 else arch + "a"
    options = ProgramOptions(arch=name, std="c++17", define_macro=list(macros))
    with FileStreamProgramCache() as cache:
        return bytes(Program(source, "c++", options).compile("cubin", cache=cache).code)


def loaded(
    index: int, code: bytes, name: str, shared_memory: int, *, large_clusters: bool = False
) -> driver.CUfunction:
    """A kernel on device `index`, which may have that many bytes of shared memory beside its own, or clusters of 16."""
    with torch.cuda.device(index):
        (library,) = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        (kernel,) = check(driver.cuLibraryGetKernel(library, name.encode()))
        (device,) = check(driver.cuDeviceGet(index))
        limits = {driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared_memory}
        if large_clusters:
            limits[driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for attribute, value in limits.items():
            check(driver.cuKernelSetAttribute(attribute, value, kernel, device))
        return driver.CUfunction(int(kernel))  # a kernel of a library is launched as a function


def configuration(
    ctas: int, threads: int, shared_memory: int, stream: int, attributes: Sequence[driver.CUlaunchAttribute] = ()
) -> driver.CUlaunchConfig:
    """How a launch looks; never written again, so threads may share it."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_memory
    config.hStream = driver.CUstream(stream)
    if attributes:
        config.attrs, config.numAttrs = list(attributes), len(attributes)
    return config


def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned, without its status. Raises RuntimeError naming the status."""
    status, *rest = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {status}")
    return tuple(rest)
