"""select: the k best columns of every score row. CONTRACT.md, select 1-10, is what every kernel here means."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from keysift import dispatch, kernels
from keysift.dispatch import Device, Kernel

from . import checks


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts that decide which kernel selects."""

    device: Device
    dtype: torch.dtype
    rows: int
    columns: int
    k: int
    column_stride: int = 1
    sorted: bool = False

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        return f"{self.dtype} on {self.device}".removeprefix("torch.")


def _unmet_cpu(problem: Problem) -> list[str]:
    return [
        *kernels.unmet_cpu(problem),
        *([] if problem.column_stride == 1 else [f"column stride is {problem.column_stride}, needs 1"]),
    ]


def _workspace_cpu(problem: Problem) -> int:
    from .kernel_cpu import workspace_size

    return workspace_size(problem.rows, problem.columns, problem.k)


def _unmet_cuda(problem: Problem) -> list[str]:
    device = problem.device
    fits = problem.k <= 5400 or problem.columns <= 8192
    recent = device.type == "cuda" and int(device.arch.removeprefix("sm_")) >= 80
    return [
        *_unmet_sizes(problem),
        *([] if device.type == "cuda" else [f"device is {device}, needs cuda"]),
        *([] if recent or device.type != "cuda" else [f"device is {device}, needs sm_80 or later"]),
        *kernels.unmet_nvrtc(device),
        *([] if problem.column_stride == 1 else [f"column stride is {problem.column_stride}, needs 1"]),
        *([] if fits else [f"k is {problem.k}, needs at most 5400 where rows have more than 8192 columns"]),
    ]


def _unmet_sizes(problem: Problem) -> list[str]:
    """Columns and places are 32-bit numbers on a GPU, with room for a tile beyond the last."""
    sizes = {"columns": (problem.columns, 2**31 - 2**17), "k": (problem.k, 2**30), "rows": (problem.rows, 2**26)}
    return [f"{name} is {size}, needs at most {most}" for name, (size, most) in sizes.items() if size > most]


def _unmet_triton(problem: Problem) -> list[str]:
    return [
        *_unmet_sizes(problem),
        *kernels.unmet_triton(problem.device),
        *([] if problem.column_stride == 1 else [f"column stride is {problem.column_stride}, needs 1"]),
    ]


def _workspace_triton(problem: Problem) -> int:
    from .kernel_triton import workspace_size

    return workspace_size(problem.rows, problem.columns, problem.k, problem.device.processors)


KERNELS = (
    Kernel("cpu", _unmet_cpu, "keysift.ops.select.kernel_cpu:run", _workspace_cpu),
    Kernel("cuda", _unmet_cuda, "keysift.ops.select.kernel_cuda:run"),
    Kernel("triton", _unmet_triton, "keysift.ops.select.kernel_triton:run", _workspace_triton),
    Kernel("reference", kernels.unmet_nothing, "keysift.ops.select.reference:run"),
)


def select(
    scores: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    out: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    sorted: bool = False,
    return_values: bool = False,
    return_counts: bool = False,
    index_base: str = "window",
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    page_rows: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The k best columns of every score row, exactly, whichever kernel runs.

    scores      [R, N] float32, bfloat16 or float16, any row stride
    k           columns to keep per row, any integer >= 1
    start, end  [R] int32 or int64: the row selects from columns [start, end); clamped; default [0, N)
    out         what the call returns, allocated by the caller: int32 [>= R, k], or a tuple in the order of the return
    sorted      ascending columns instead of any order; the selected ones come first in both cases
    return_values, return_counts  return the selected scores too, and how many there are, as below
    index_base  "window": column - start; "column": the column itself
    page_table  [T, P] int32 or int64 page ids: the result is slots, `page * page_size + offset`, where the page and the
                offset are those of position `column - start`. Columns beyond P pages are not eligible; a negative page
                gives -1. `page_size` goes with it, and `page_rows` [R] int32 or int64 names each row's table row
                (default: row r uses table row r, so T = R).
    workspace   uint8 [>= select_workspace_size(...)], scratch that the call overwrites
    kernel      a kernel of `keysift explain select` by name; it runs or raises

    Returns int32 [R, k], -1 where a row has fewer than k eligible columns (in its window, not NaN, above -inf). The
    set is unique: larger values first, the lower column among equals. With `return_values` the values follow ([R, k],
    the scores' dtype, -inf where the index is -1), with `return_counts` the number selected (int32 [R]), as a tuple.

    Raises ValueError or TypeError before anything is written: a wrong rank, dtype, device or size, `k < 1`, a named
    kernel that cannot run this.

    Equivalent to, for rows without ties, NaN or windows:
        scores.topk(k).indices.int()

    >>> scores = torch.tensor([[0.1, 0.7, 0.3, 0.7]])
    >>> select(scores, 3, sorted=True)
    tensor([[1, 2, 3]], dtype=torch.int32)
    >>> select(scores, 3, start=torch.tensor([2]), return_counts=True, sorted=True)
    (tensor([[ 0,  1, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    checks.check_scores(scores, k)
    rows = scores.shape[0]
    checks.check_windows(scores, rows, "start", start, "end", end)
    if dispatch.checks_values():
        checks.check_window_values(scores, "start", start, "end", end)
    return _run(
        scores, k, start, end, 1, sorted, index_base, page_table, page_size, page_rows,
        out, return_values, return_counts, workspace, kernel,
    )  # fmt: skip


def select_prefill(
    scores: torch.Tensor,
    k: int,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """`select` as an engine's prefill calls it: packed requests, one window per query token.

    scores  [R, N]; row_starts, row_ends  [R] int32 or int64; out  int32 [>= R, k]
    Returns int32 [R, k], columns relative to the row's start, -1 at the end of a row that has fewer than k.
    Raises as `select` does.

    Equivalent to:
        select(scores, k, start=row_starts, end=row_ends, out=out)

    >>> scores = torch.tensor([[9.0, 1.0, 2.0], [9.0, 1.0, 2.0]])
    >>> select_prefill(scores, 2, torch.tensor([1, 1]), torch.tensor([2, 3])).sort().values  # in any order
    tensor([[-1,  0],
            [ 0,  1]], dtype=torch.int32)
    """
    checks.check_scores(scores, k)
    checks.check_windows(scores, scores.shape[0], "row_starts", row_starts, "row_ends", row_ends)
    if dispatch.checks_values():
        checks.check_window_values(scores, "row_starts", row_starts, "row_ends", row_ends)
    indices = _run(
        scores, k, row_starts, row_ends, 1, False, "window", None, None, None,
        out, False, False, workspace, kernel,
    )  # fmt: skip
    return cast("torch.Tensor", indices)


def select_decode(
    scores: torch.Tensor,
    k: int,
    seq_lens: torch.Tensor,
    next_n: int = 1,
    out: torch.Tensor | None = None,
    *,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """`select` as an engine's decode calls it: `next_n` query tokens per request, windows that begin at column 0.

    scores    [B * next_n, N]; lengths count columns
    seq_lens  [B]: row b * next_n + j ends at seq_lens[b] - next_n + j + 1; or
              [B, next_n]: that row ends at seq_lens[b, j], which is how a request with fewer tokens is written
    out       int32 [>= B * next_n, k]
    Returns int32 [B * next_n, k], -1 at the end of a row that has fewer than k.
    Raises as `select` does.

    Equivalent to, for 1-D lengths:
        ends = seq_lens[:, None] - next_n + 1 + torch.arange(next_n)
        select(scores, k, end=ends.flatten(), out=out)

    >>> scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    >>> select_decode(scores, 2, torch.tensor([3]), next_n=2).sort().values  # in any order
    tensor([[0, 1],
            [1, 2]], dtype=torch.int32)
    """
    checks.check_scores(scores, k)
    ends = checks.check_seq_lens(scores, seq_lens, next_n)
    if dispatch.checks_values():
        checks.check_length_values(scores, seq_lens, next_n)
    # 2-D lengths are one explicit end per row, which is what next_n = 1 means.
    indices = _run(
        scores, k, None, ends, next_n if seq_lens.ndim == 1 else 1, False, "window", None, None, None,
        out, False, False, workspace, kernel,
    )  # fmt: skip
    return cast("torch.Tensor", indices)


def select_workspace_size(scores: torch.Tensor, k: int, *, kernel: str | None = None) -> int:
    """Bytes of `workspace` with which `select(scores, k)` allocates nothing; 0 where no scratch is wanted.

    The size depends on shapes, dtype, device and k (on a CPU also on `torch.get_num_threads()`, so ask before a trace),
    and grows with rows, not with rows * columns.

    >>> select_workspace_size(torch.empty(4, 4096), 2048) >= 0
    True
    """
    checks.check_scores(scores, k)
    rows, columns = scores.shape
    return _chosen(scores.device, scores.dtype, rows, columns, k, scores.stride(1), torch.get_num_threads(), kernel)[1]


def _problem(scores: torch.Tensor, k: int) -> Problem:
    rows, columns = scores.shape
    stride = scores.stride(1) if rows and columns > 1 else 1
    return Problem(dispatch.device_of(scores.device), scores.dtype, rows, columns, k, stride)


def _run(
    scores: torch.Tensor,
    k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    sorted: bool,
    index_base: str,
    page_table: torch.Tensor | None,
    page_size: int | None,
    page_rows: torch.Tensor | None,
    out: torch.Tensor | tuple[torch.Tensor, ...] | None,
    return_values: bool,
    return_counts: bool,
    workspace: torch.Tensor | None,
    kernel: str | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The rest of every public function: check, allocate what the caller did not bring, call the operator."""
    rows = scores.shape[0]
    checks.check_index_base(scores, index_base, page_table, page_size, page_rows)
    indices, values, counts = checks.check_out(scores, k, out, return_values, return_counts)
    checks.check_workspace(scores, workspace)
    if page_table is not None and dispatch.checks_values():
        checks.check_page_values(scores, start, end, page_table, page_size or 1, page_rows)
    if indices is None:
        indices = scores.new_empty((rows, k), dtype=torch.int32)
        values = scores.new_empty((rows, k)) if return_values else None
        counts = scores.new_empty((rows,), dtype=torch.int32) if return_counts else None
    select = _OPERATOR if dispatch.is_watched(scores) else _select
    select(
        scores, k, start, end, next_n, page_table, page_rows, page_size or 0, index_base, sorted,
        indices, values, counts, workspace, kernel,
    )  # fmt: skip
    if values is None and counts is None:
        return indices if out is None else _first_rows(indices, rows)
    return tuple(_first_rows(tensor, rows) for tensor in (indices, values, counts) if tensor is not None)


def _first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _select(
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
    kernel: str | None,
) -> None:
    """The operator on every device: choose, then launch."""
    rows, columns = scores.shape
    device, threads = scores.device, torch.get_num_threads()  # a CPU's scratch is per thread
    run, size = _chosen(device, scores.dtype, rows, columns, k, scores.stride(1), threads, kernel)
    if rows == 0:
        return
    if columns == 0:
        out[:rows].fill_(-1)
        if values is not None:
            values[:rows].fill_(-torch.inf)
        if counts is not None:
            counts[:rows].zero_()
        return
    if workspace is not None and workspace.numel() < size:
        raise ValueError(f"workspace has {workspace.numel()} bytes; this call needs {size}")
    run(
        scores, k, start, end, next_n, page_table, page_rows, page_size, index_base, sorted,
        out, values, counts, workspace,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _chosen(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    k: int,
    stride: int,
    threads: int,  # part of the key
    kernel: str | None,
) -> tuple[Callable[..., None], int]:
    """The entry of the kernel that runs and the bytes of scratch that it wants; plain keys, since every call asks."""
    problem = Problem(dispatch.device_of(device), dtype, rows, columns, k, stride if rows and columns > 1 else 1)
    chosen = dispatch.choose("select", KERNELS, problem, kernel)
    return chosen.load(), chosen.workspace_size(problem)


def _select_fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_LIBRARY.define(
    "select(Tensor scores, int k, Tensor? start, Tensor? end, int next_n, Tensor? page_table, Tensor? page_rows, "
    "int page_size, str index_base, bool sorted, Tensor(a!) out, Tensor(b!)? values, Tensor(c!)? counts, "
    "Tensor(d!)? workspace, str? kernel) -> ()"
)
_LIBRARY.impl("select", _select, "CompositeExplicitAutograd")
# Nothing here has a gradient; without this, every call pays for a check of that.
_LIBRARY.impl("select", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("keysift::select", _select_fake, lib=_LIBRARY)
_OPERATOR = torch.ops.keysift.select.default
