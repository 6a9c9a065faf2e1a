"""select on a CPU, compiled by numba: one reading of the window, whatever the values.

Scores are compared by rank, an unsigned integer: 0 for +inf, larger for smaller scores, equal for -0.0 and +0.0, and
at least `2 * infinity` for what is not eligible. For every row (kernel_cpu_code.py, functions of these names):
1. cut      a few hundred scattered samples give a rank that somewhat more than k scores should beat (long rows only);
2. gather   compares 64 scores at a time with the cut and appends what beats it, in column order, to a list of bounded
            length; a full list is reduced to its k best, and the worst of them is the new cut, so that equal or
            crowded scores cost no second reading;
3. keep     finds the k-th best of the list by histograms over the range that is left, drops what is worse, and the
            last of what equals it;
4. publish  in ascending column order, so `sorted` comes for nothing.
Only if fewer than k beat the cut while others were left (1 row of normal scores in 1000) is the row read again, with a
wider cut, in the end with none.
Parallel over rows; with fewer long rows than threads also over pieces of a row, whose last thread settles it.
Cost: scores are read once, and (N k)^(1/3) / 2 cache lines of a row once more for the sample; 12 bytes a list entry.
The first call compiles, for 32-bit or for 16-bit scores: about 5 s, once a machine, for numba keeps the code on disk.
"""

import ctypes
import functools
import os
from array import array
from collections.abc import Callable
from typing import Any

import torch
from numba import cfunc, types

from keysift.dispatch import PROCESS

from .kernel_cpu_code import BINS, LINE, work_16, work_32

#: Bit patterns of +inf.
INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

#: Scores, and the scores that a row's fixed cost is worth, that one thread deals with while the others would wake.
SERIAL, ROW = 1 << 15, 1024
#: Scores in a piece of a row, at least: each piece takes the whole row's sample again.
PIECE = 1 << 17
#: List entries beyond 2k: what the sample lets through above k, with room to spare.
ROOM = 1024


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
    """Write `out` [R, k], `values` and `counts`, ascending whatever `sorted` is; scratch is in `workspace`, if given.

    Without it each thread allocates its own: an allocation by torch takes as long as selecting from a short row.
    """
    rows, columns = scores.shape
    threads, parts, capacity = _plan(rows, columns, k)
    if workspace is None and parts > 1:
        workspace = scores.new_empty(workspace_size(rows, columns, k), dtype=torch.uint8)
    scratch = 0
    if workspace is not None:
        slots = (workspace.numel() - LINE) // _slot(capacity)
        if slots < (rows * parts if parts > 1 else 1):
            raise ValueError(
                f"workspace has {workspace.numel()} bytes; it must have {workspace_size(rows, columns, k)}"
            )
        if parts == 1:
            threads = min(threads, slots)
        scratch = -(-workspace.data_ptr() // LINE) * LINE
    tasks, size = rows * parts, scores.element_size()
    pages, table_stride = (-1, 0) if page_table is None else (page_table.shape[1], page_table.stride(0))
    call = array("q", (
        0, 0, tasks, max(1, tasks // (8 * threads)), parts, scratch, capacity,
        rows, columns, k, INFINITY[scores.dtype], size, scores.data_ptr(), scores.stride(0), next_n,
        index_base == "column", page_size, pages, table_stride,
        *_integers(start), *_integers(end), *_integers(page_table)[:2],
        *_integers(page_rows), out.data_ptr(), out.stride(0), *_floats(values), *_floats(counts),
    ))  # fmt: skip
    if parts > 1:
        call.extend([0] * rows)  # pieces done
    code, entry = _kernel(size)
    address, _ = call.buffer_info()
    team = _team() if threads > 1 else None
    if team is None:
        entry(address)
    else:
        team(code.address, address, threads, 0)


def workspace_size(rows: int, columns: int, k: int) -> int:
    """Bytes of scratch: three lists of about 2k entries and a histogram for each thread that torch has, or piece."""
    threads, parts, capacity = _plan(rows, columns, k)
    return LINE + _slot(capacity) * (rows * parts if parts > 1 else threads)


def _plan(rows: int, columns: int, k: int) -> tuple[int, int, int]:
    """Threads, pieces per row, list entries per piece."""
    capacity = -(-(min(2 * k + ROOM, columns) + 64) // 64) * 64  # a block of 64 is appended before its length is known
    if rows * (columns + ROW) <= SERIAL or _team() is None:
        return 1, 1, capacity
    available = torch.get_num_threads()
    parts = max(1, min(-(-available // max(rows, 1)), columns // PIECE))
    return max(1, min(available, rows * parts)), parts, capacity


def _slot(capacity: int) -> int:
    return 4 * (3 * capacity + BINS)


def _integers(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.data_ptr(), tensor.element_size(), tensor.stride(0))


def _floats(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


def _team() -> Callable[..., None] | None:
    """Entry to a parallel region of the OpenMP library that torch has loaded; None where there is none or after a fork.

    torch's threads are awake after an operation, and a pool beside theirs would compete with them for the cores.
    Several Python threads may enter at once. A forked child has the pool's records without its threads, and would
    wait for them for ever.
    """
    return _openmp() if os.getpid() == PROCESS else None


@functools.cache
def _openmp() -> Callable[..., None] | None:
    try:
        team = ctypes.CDLL(None).GOMP_parallel  # libgomp and libomp both have it
    except (AttributeError, TypeError):  # no such symbol, or no global symbols on this platform
        return None
    team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team


@functools.cache
def _kernel(size: int) -> tuple[Any, Callable[[int], None]]:
    """The machine code for scores of 4 or 2 bytes: numba's object, which keeps it alive, and a callable."""
    work, signature = (work_32 if size == 4 else work_16), types.void(types.intp)
    try:
        code = cfunc(signature, cache=True)(work)
    except RuntimeError as error:  # numba found no folder that it may keep it in
        if "no locator available" not in str(error):
            raise
        code = cfunc(signature)(work)
    return code, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
