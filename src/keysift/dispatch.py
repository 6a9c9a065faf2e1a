"""Which kernel runs: the only place that decides.

A stage keeps its kernels in one ordered table (`KERNELS` in its `api.py`). Each `Kernel` answers, from static facts
alone, which of its constraints a problem does not meet; `choose` takes the first row that answers with nothing.
No device value and no exception ever takes part, so a captured graph replays the kernel that its shapes call for.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from torch.utils import _python_dispatch

#: Where keysift was imported; a forked child has torch's records of threads without the threads.
PROCESS = os.getpid()

#: `KEYSIFT_CHECK=1`, read once: values in lengths, tables and indices are checked too, which synchronises.
CHECK_VALUES = os.environ.get("KEYSIFT_CHECK") == "1"

#: Triton runs on the CPU, in its interpreter, for tests.
TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

#: For a device that is only named (`explain`), the packages a GPU installation brings.
GPU_PACKAGES = ("triton", "cuda.core", "cuda.bindings")

#: Multiprocessors or compute units of a device that is only named.
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304, "gfx950": 256}


@dataclass(frozen=True, slots=True)
class Device:
    """Static facts of a device: what kind it is, and whether an optional package can be used with it."""

    type: str  # "cpu", "cuda" or "hip"
    arch: str  # "sm_90", "gfx942"; empty on a CPU
    is_local: bool = True  # False: named for `explain`, not present
    processors: int = 1  # multiprocessors, compute units

    def has(self, package: str) -> bool:
        """True if `package` can be imported here, without importing it; assumed for a device that is only named.

        With a hyphen it names a distribution: several bring a module of one name, with other arguments.
        """
        return package in GPU_PACKAGES if not self.is_local else _is_installed(package)

    def __str__(self) -> str:
        return f"{self.type}:{self.arch}" if self.arch else self.type


class Problem(Protocol):
    """What a stage knows about a call before it runs: device, dtypes, shapes, strides, k."""

    @property
    def device(self) -> Device:
        """Where the call runs."""

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""

    def __hash__(self) -> int:
        """A choice is remembered by its problem."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of a stage's table."""

    name: str
    unmet: Callable[[Any], list[str]]  # constraints that a problem does not meet; empty: it can run
    entry: str  # "module:function", imported on first use
    workspace_size: Callable[[Any], int] = lambda _: 0  # bytes of scratch it wants

    def load(self) -> Callable[..., None]:
        """The entry point; its module is imported by the first call."""
        return _load(self.entry)


def choose(stage: str, table: Sequence[Kernel], problem: Problem, name: str | None = None) -> Kernel:
    """The first kernel of `table` that can run `problem`, or the one called `name`.

    Without `name`, `KEYSIFT_<STAGE>` (read once) names one. Raises ValueError: an unknown name, a named kernel with
    unmet constraints (each is listed), or no kernel at all (each kernel is listed with its reasons).
    """
    forced = None if name is not None else _forced(stage)
    try:
        return _choose(stage, tuple(table), problem, forced if name is None else name)
    except ValueError as error:
        if forced is None:
            raise
        raise ValueError(f"{error} (KEYSIFT_{stage.upper()}={forced} names it)") from error


def explain(table: Sequence[Kernel], problem: Problem) -> list[tuple[str, list[str]]]:
    """Every kernel of `table` in order with what it lacks for `problem`; the first with nothing lacking runs."""
    return [(kernel.name, kernel.unmet(problem)) for kernel in table]


@functools.lru_cache(maxsize=4096)
def _choose(stage: str, table: tuple[Kernel, ...], problem: Problem, name: str | None) -> Kernel:
    if name is not None:
        named = [kernel for kernel in table if kernel.name == name]
        if not named:
            raise ValueError(f"kernel is {name!r}; {stage} has {', '.join(repr(kernel.name) for kernel in table)}")
        if unmet := named[0].unmet(problem):
            raise ValueError(f"kernel {name!r} cannot run this {stage}: {'; '.join(unmet)}")
        return named[0]
    for kernel in table:
        if not kernel.unmet(problem):
            if kernel is table[-1] and problem.device.type not in ("cpu", "meta"):
                _warn_reference(stage, problem.kind, _reasons(table[:-1], problem))
            return kernel
    raise ValueError(f"no kernel can run this {stage}:\n{_reasons(table, problem)}")


@functools.cache
def _warn_reference(stage: str, kind: str, reasons: str) -> None:
    """Once per kind of problem: a silent slow path is the fault that this library exists to prevent."""
    warnings.warn(
        f"keysift.{stage} runs its reference for {kind}, far slower than a kernel:\n{reasons}",
        RuntimeWarning,
        stacklevel=2,
    )


def _reasons(table: Sequence[Kernel], problem: Problem) -> str:
    return "\n".join(f"  {kernel.name}: {'; '.join(kernel.unmet(problem))}" for kernel in table)


@functools.cache
def _forced(stage: str) -> str | None:
    return os.environ.get(f"KEYSIFT_{stage.upper()}") or None


@functools.cache
def _is_installed(package: str) -> bool:
    if "-" in package:
        return any(importlib.metadata.distributions(name=package))
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


@functools.cache
def _load(entry: str) -> Callable[..., None]:
    module, function = entry.split(":")
    loaded: Callable[..., None] = getattr(importlib.import_module(module), function)
    return loaded


@functools.cache
def device_of(device: torch.device) -> Device:
    """The facts of a torch device."""
    if device.type != "cuda":
        return Device(device.type, "")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device("hip", properties.gcnArchName.split(":")[0], processors=properties.multi_processor_count)
    return Device("cuda", f"sm_{properties.major}{properties.minor}", processors=properties.multi_processor_count)


def checks_values() -> bool:
    """With KEYSIFT_CHECK=1, but not in a trace, which has no values."""
    return CHECK_VALUES and not torch.compiler.is_compiling()


def is_watched(tensor: torch.Tensor) -> bool:
    """True where a call has to go through torch's dispatcher: for a trace, a dispatch mode, a profiler, or torch.func,
    whose tensors have no memory.

    Nobody else can tell whether an operator was called or its function, but for the clock: the way through the
    dispatcher takes 6 us, and several times as long when it has to be read from memory again.
    """
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not torch.Tensor
        or _python_dispatch.is_in_torch_dispatch_mode()
        or torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - as below; of vmap, functionalize
        or profiler._is_profiler_enabled  # noqa: SLF001 - torch has no public name for it
    )


def parse_device(text: str) -> Device:
    """A device from words: "cpu", "cuda" (the one here), "cuda:sm_90", "hip:gfx942". Raises ValueError otherwise."""
    if text == "cpu":
        return Device("cpu", "")
    if text == "cuda" and torch.cuda.is_available():
        return device_of(torch.device("cuda"))
    kind, _, arch = text.partition(":")
    if (kind == "cuda" and re.fullmatch(r"sm_(7[05]|8[0679]|90|1[0-2][0-9])", arch)) or (
        kind == "hip" and re.fullmatch(r"gfx(9[04][0-9a-f]|950|1[0-2][0-9a-f]{2})", arch)
    ):
        return Device(kind, arch, is_local=False, processors=PROCESSORS.get(arch, 100))
    here = "cpu, cuda," if torch.cuda.is_available() else "cpu (torch finds no cuda here)"
    raise ValueError(
        f"device is {text!r}; it may be {here} or a named chip: cuda:sm_70 to cuda:sm_129 (as cuda:sm_90), "
        "hip:gfx900 to hip:gfx12.. (as hip:gfx942)"
    )
