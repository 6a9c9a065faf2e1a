"""select in Triton: plan and launch; kernel_triton_code.py has the algorithm."""

from dataclasses import dataclass

import torch
import triton

from keysift.dispatch import device_of
from keysift.kernels import on_device_of

from .kernel_triton_code import select_finish_kernel, select_scan_kernel, select_whole_kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is launched, from its shape alone."""

    fit: int  # values that one program holds in registers
    whole: bool  # a row fits: select_whole_kernel, and nothing below matters
    splits: int = 1  # segments per row
    rows: int = 1  # rows per launch, each with places for survivors
    block: int = 2048  # columns read at a time
    sample: int = 2048
    listed: bool = True  # the survivors of a cut fit; if not, longer rows are searched in memory
    warps: int = 4
    finish_warps: int = 4

    def scan_block(self, element_size: int) -> int:
        """Columns that the scan reads at a time; of 16-bit scores fewer, since ptxas for sm_100 spills beyond."""
        return self.block if element_size == 4 else min(self.block, 4096)

    @property
    def finish_block(self) -> int:
        """Values that the finish reads at a time: 16 a thread, with room for the search."""
        return 512 * self.finish_warps


#: The longest row that one program holds in registers.
WHOLE = 16384
#: Rows per launch, and programs per launch, that there is scratch for.
ROWS = 2048
#: Bytes that the lists are aligned to.
ALIGNMENT = 16
#: Segments per row at most.
SPLITS = 64


def plan(rows: int, columns: int, k: int, processors: int) -> Plan:
    """The launch for a shape: whole rows in registers, or a scan and a finish over segments of rows."""
    if columns <= WHOLE:
        fit = max(triton.next_power_of_2(columns), 64)
        return Plan(fit, True, warps=max(1, min(4, fit // 512), fit // 2048))
    sample = 2048 if columns <= 32768 else 4096
    fit = _fit(columns, k, sample)
    listed = fit <= WHOLE
    fit = min(fit, WHOLE)
    # One wave of programs; a segment of 2048 columns keeps one busy for about as long as its launch takes.
    splits = _power_below(max(1, min(SPLITS, columns // 2048, processors // rows)))
    block = min(8192, _power_below(columns // splits))
    return Plan(fit, False, splits, min(rows, ROWS), block, sample, listed, 4, max(4, fit // 1024))


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _fit(columns: int, k: int, sample: int) -> int:
    """Registers for the survivors of a cut: the expected number and 4.5 standard deviations (see `sample_cut`)."""
    stride = columns / sample
    mean = k / stride
    rank = (mean + 4.5 * mean**0.5 + 4) * 33 / 32
    return max(2048, triton.next_power_of_2(int(stride * (rank + 4.5 * rank**0.5))))


def workspace_size(rows: int, columns: int, k: int, processors: int) -> int:
    """Bytes of scratch: per row and segment, survivors with their columns and three numbers."""
    p = plan(rows, columns, k, processors)
    return 0 if p.whole else 4 * p.rows * p.splits * (2 * p.fit + 3) + ALIGNMENT


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
    """Launch on the current stream. Columns are always written in ascending order, so `sorted` asks nothing more."""
    rows, columns = scores.shape
    processors = device_of(scores.device).processors
    p = plan(rows, columns, k, processors)
    if workspace is None:
        workspace = scores.new_empty(workspace_size(rows, columns, k, processors), dtype=torch.uint8)
    limit = page_table.shape[1] * page_size if page_table is not None else 0
    windows = {"HAS_START": start is not None, "HAS_END": end is not None, "HAS_TABLE": page_table is not None}
    results = {
        "HAS_PAGE_ROWS": page_rows is not None,
        "HAS_VALUES": values is not None,
        "HAS_COUNTS": counts is not None,
        "ABSOLUTE": index_base == "column",
    }
    # An absent tensor is never read; `scores` stands for it.
    inputs = (scores, _given(start, scores), _given(end, scores))
    outputs = (
        _given(page_table, scores),
        _given(page_rows, scores),
        out,
        _given(values, scores),
        _given(counts, scores),
    )
    strides = (
        scores.stride(0), _stride(start), _stride(end), _stride(page_table), _stride(page_rows),
        out.stride(0), _stride(values), _stride(counts),
    )  # fmt: skip
    page_size = max(page_size, 1)
    with on_device_of(scores):
        _launch(p, inputs, outputs, strides, workspace, rows, columns, k, next_n, limit, page_size, windows, results)


def _launch(
    p: Plan,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    workspace: torch.Tensor,
    rows: int,
    columns: int,
    k: int,
    next_n: int,
    limit: int,
    page_size: int,
    windows: dict[str, bool],
    results: dict[str, bool],
) -> None:
    if p.whole:
        select_whole_kernel[(rows,)](
            *inputs, *outputs, columns, k, next_n, limit, page_size, *strides,
            **windows, **results, FIT=p.fit, num_warps=p.warps,
        )  # fmt: skip
        return
    places, header_size = p.rows * p.splits * p.fit, 3 * p.rows * p.splits
    first = -workspace.data_ptr() % ALIGNMENT  # a workspace may be any slice of bytes
    scratch = workspace[first : first + 4 * (2 * places + header_size)].view(torch.int32)
    kept, kept_column, header = scratch.split_with_sizes([places, places, header_size])
    lists = (kept.view(torch.float32), kept_column, header)
    block = p.scan_block(inputs[0].element_size())
    for first_row in range(0, rows, p.rows):
        grid = (p.splits, min(p.rows, rows - first_row))
        select_scan_kernel[grid](
            *inputs, *lists, columns, k, next_n, limit, first_row, *strides[:3],
            **windows, SPLITS=p.splits, FIT=p.fit, BLOCK=block, SAMPLE=p.sample, LISTED=p.listed, num_warps=p.warps,
        )  # fmt: skip
        select_finish_kernel[grid](
            *inputs, *outputs, *lists, columns, k, next_n, limit, page_size, first_row, *strides,
            **windows, **results, SPLITS=p.splits, FIT=p.fit, BLOCK=p.finish_block, num_warps=p.finish_warps,
        )  # fmt: skip


def _given(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in if tensor is None else tensor


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)
