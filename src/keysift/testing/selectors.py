"""What can be judged: any callable with the signature of `keysift.select`, and every kernel of ours by name."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keysift import dispatch
from keysift.ops.select import api

from .cases import Case

#: What a selector may be able to do beyond `fn(scores, k)` on dense float32 rows. A peer claims some of it.
FEATURES = frozenset(
    {
        "start", "end", "int64", "decode", "prefill", "strides", "float16", "bfloat16", "sorted", "values", "counts",
        "column", "pages", "page_rows", "out", "workspace", "refusals",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector and, where it has them, its decode and prefill forms, its workspace size and what it cannot run.

    `unmet(scores, k)` lists the constraints that a call does not meet; such a call has to be refused with these words.
    """

    name: str
    select: Callable[..., Any]
    decode: Callable[..., Any] | None = None
    prefill: Callable[..., Any] | None = None
    workspace_size: Callable[[torch.Tensor, int], int] | None = None
    unmet: Callable[[torch.Tensor, int], list[str]] | None = None

    def __call__(self, scores: torch.Tensor, k: int, **options: Any) -> Any:
        """`select`, so that a selector is what it judges."""
        return self.select(scores, k, **options)


def select_kernels(device: torch.device | str = "cpu") -> list[tuple[str, Selector | list[str]]]:
    """(name, what to judge) of every kernel of select in the order of its table.

    What to judge is a `Selector` that runs that kernel and no other, or, where no call on `device` could run it, the
    list of its unmet constraints.

    >>> [name for name, selector in select_kernels("cpu") if callable(selector)]
    ['cpu', 'reference']
    """
    facts = dispatch.device_of(torch.device(device))
    found: list[tuple[str, Selector | list[str]]] = []
    for kernel in api.KERNELS:
        reasons = [kernel.unmet(api.Problem(facts, torch.float32, 4, columns, 512)) for columns in (1024, 65536)]
        found.append((kernel.name, forced(kernel) if not all(reasons) else reasons[0]))
    return found


def forced(kernel: dispatch.Kernel) -> Selector:
    """The public functions with this kernel asked for by name."""

    def unmet(scores: torch.Tensor, k: int) -> list[str]:
        columns = scores.shape[1]
        stride = scores.stride(1) if columns > 1 else 1
        facts = dispatch.device_of(scores.device)
        return kernel.unmet(api.Problem(facts, scores.dtype, scores.shape[0], columns, k, stride))

    return Selector(
        kernel.name,
        functools.partial(api.select, kernel=kernel.name),
        functools.partial(api.select_decode, kernel=kernel.name),
        functools.partial(api.select_prefill, kernel=kernel.name),
        functools.partial(api.select_workspace_size, kernel=kernel.name),
        unmet,
    )


def claims(case: Case) -> set[str]:
    """The features that a case asks for."""
    bounds = (case.start, case.end, case.seq_lens)
    asked = {
        "start": case.start is not None,
        "end": case.end is not None,
        "int64": case.bounds_dtype == torch.int64 and bounds != (None, None, None),
        "decode": case.seq_lens is not None,
        "prefill": case.prefill,
        "strides": bool(case.layout.row_pad or case.layout.transposed or case.bounds_stride != 1),
        "sorted": case.sorted,
        "values": case.values,
        "counts": case.counts,
        "column": case.base == "column",
        "pages": case.pages is not None,
        "page_rows": case.pages is not None and case.pages.rows == "mapped",
        "out": case.out != "none",
        "workspace": case.workspace,
        "float16": case.dtype == torch.float16,
        "bfloat16": case.dtype == torch.bfloat16,
    }
    return {feature for feature, wanted in asked.items() if wanted}
