"""The lines of CONTRACT.md that select is judged by, and which of them a case can show."""

from collections.abc import Iterator

import torch

from . import inputs
from .cases import Case, Layout

SCORES = "select 1: scores, strides, dtypes"
WINDOWS = "select 2: windows"
DECODE = "select 2: decode lengths"
ELIGIBLE = "select 3: NaN and infinities"
WHICH = "select 4: the largest values"
TIES = "select 4: the lower column among equals"
ALONE = "select 4: a row alone gives the same set"
ORDER = "select 5: every slot, selected first, sorted"
BASE = "select 6: index base"
PAGES = "select 6: page table"
ON_REQUEST = "select 7: values and counts"
OUTPUT = "select 8: output views"
SIZES = "select 9: empty, short and all-NaN rows"
REFUSED = "refused input"
REPEAT = "every operation: same bits on every run"
INPUTS = "every operation: inputs left alone"
WORKSPACE = "every operation: workspace"

LINES = (
    SCORES, WINDOWS, DECODE, ELIGIBLE, WHICH, TIES, ALONE, ORDER, BASE, PAGES, ON_REQUEST, OUTPUT, SIZES, REFUSED,
    REPEAT, INPUTS, WORKSPACE,
)  # fmt: skip

#: A line, and what breaks it.
Finding = tuple[str, str]


def lines_of(case: Case) -> Iterator[str]:
    """The lines that `case` shows, the most particular first."""
    held = {
        SIZES: not case.rows or case.k > case.columns or case.data == "nan_100",
        PAGES: case.pages is not None,
        BASE: case.pages is None and case.start is not None,
        DECODE: case.seq_lens is not None,
        WINDOWS: case.start is not None or case.end is not None,
        ON_REQUEST: case.values or case.counts,
        WORKSPACE: case.workspace,
        SCORES: case.layout != Layout() or case.dtype != torch.float32,
        ELIGIBLE: case.data in inputs.SPECIAL,
        TIES: case.data in inputs.TIED,
        WHICH: True,
        ORDER: True,
        OUTPUT: case.out != "none",
        REPEAT: True,
        ALONE: case.rows > 1,
        INPUTS: True,
    }
    return (line for line, shown in held.items() if shown)
