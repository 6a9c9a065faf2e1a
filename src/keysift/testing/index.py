"""`check_index`: index_prefill and index_decode against a sort of all scores, whatever the memory budget."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from keysift import dispatch
from keysift.indexer import index_decode, index_prefill
from keysift.layout import IndexLayout
from keysift.ops.cache import write_index_cache
from keysift.ops.score import api as score_api
from keysift.ops.score import index_scores, paged_index_scores
from keysift.ops.select import api as select_api

from .report import Line, Report

WHICH = "index 1: the best keys of all scores"
TIES = "index 2: the lower column among equals"
BUDGET = "index 3: the same for every memory budget"
PIECES = "index 4: rows longer than the budget, piece by piece"
BASE = "index 5: windows, columns, slots"
OUTPUT = "index 6: every slot of the rows, and no other row"
REFUSED = "refused input"
LINES = (WHICH, TIES, BUDGET, PIECES, BASE, OUTPUT, REFUSED)


@dataclass(frozen=True, slots=True)
class Indexing:
    """One case; pages of `page_size` tokens are decoded against, keys in one piece are prefilled against."""

    rows: int
    columns: int
    topk: int
    base: str = "window"
    whole: bool = False  # whole numbers, so that many scores are equal
    format: str = "float32"
    page_size: int = 0
    next_n: int = 1
    per_row: bool = False

    @property
    def lines(self) -> list[str]:
        """The lines that the case shows."""
        return [WHICH, *([TIES] if self.whole else []), BUDGET, PIECES, BASE, OUTPUT]


def cases() -> list[Indexing]:
    """Both phases, every base, ties, more keys than there are, pages of every kind."""
    return [
        *(Indexing(5, 150, 12, base) for base in ("window", "column", "slot")),
        *(Indexing(5, 150, 12, base, whole=True) for base in ("window", "slot")),
        Indexing(3, 40, 64, whole=True),
        Indexing(1, 7, 1, format="bfloat16"),
        *(Indexing(4, 130, 9, base, page_size=16, next_n=2) for base in ("window", "column", "slot")),
        Indexing(6, 96, 10, "slot", whole=True, page_size=1, next_n=3, per_row=True),
        Indexing(3, 130, 70, "slot", format="e4m3fn", page_size=64),
    ]


@dataclass(slots=True)
class Call:
    """A case's scores and windows, and the public function that is judged with all but `out` and `memory_budget`."""

    scores: torch.Tensor  # [rows, columns] by the kernel that is judged
    low: torch.Tensor
    high: torch.Tensor
    slots: torch.Tensor  # [rows, columns]: what a column is in the case's base
    run: Callable[..., torch.Tensor]
    least: int  # the smallest budget, bytes


def build(case: Indexing, kernel: str | None, device: torch.device, seed: int) -> Call:
    """Random queries and keys; windows of every kind, in prefill with starts."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator)
        return (x.round() if case.whole else x).to(device)

    q, weights = numbers(case.rows, 4, 16), numbers(case.rows, 4)
    if case.page_size:
        return _decode(case, kernel, q, weights, numbers, generator)
    k = numbers(case.columns, 16).to(getattr(torch, case.format))
    k[torch.rand(case.columns, generator=generator).to(device) < 0.1] = torch.nan
    starts, ends = torch.randint(-3, case.columns + 4, (2, case.rows), generator=generator).to(device)
    starts[0], ends[0] = -(2**40), 2**40
    low = starts.clamp(0, case.columns)
    high = torch.maximum(ends.clamp(0, case.columns), low)
    column = torch.arange(case.columns, device=device)
    slots, options = _bases(case, column, low, device, generator)
    if case.base == "slot":
        high = torch.minimum(high, low + (case.columns // 2 // 7) * 7)
    scores = index_scores(q, k, None, weights, starts, ends, kernel=kernel)

    def run(**more: object) -> torch.Tensor:
        kernels = {"score_kernel": kernel, "select_kernel": kernel}
        return index_prefill(q, k, None, weights, starts, ends, case.topk, **options, **kernels, **more)  # type: ignore[arg-type]

    return Call(scores, low, high, slots, run, 4 * (case.topk + 1))


def _bases(
    case: Indexing, column: torch.Tensor, low: torch.Tensor, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, object]]:
    """What a column is called in each row, and how the call says so; slots through tables of half the columns."""
    if case.base == "column":
        return column.expand(case.rows, -1), {"index_base": "column"}
    position = column - low[:, None]
    if case.base == "window":
        return position, {}
    size, pages = 7, case.columns // 2 // 7
    table = torch.randperm(3 * pages, generator=generator).view(3, pages).to(device)
    table[1, 1] = -1
    table_rows = torch.randint(0, 3, (case.rows,), generator=generator).to(device)
    page = table[table_rows].gather(1, (position // size).clamp(0, pages - 1))
    slots = (page * size + position % size).where(page >= 0, -1)
    return slots, {"page_table": table, "page_size": size, "page_rows": table_rows}


def _decode(
    case: Indexing,
    kernel: str | None,
    q: torch.Tensor,
    weights: torch.Tensor,
    numbers: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> Call:
    size, next_n, requests = case.page_size, case.next_n, case.rows // case.next_n
    pages = -(-case.columns // size)
    layout = IndexLayout(case.format, size, 16)
    tokens = requests * pages * size
    cache = layout.empty(requests * pages, q.device)
    write_index_cache(numbers(tokens, 16), cache, torch.arange(tokens, device=q.device), layout, kernel="reference")
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).to(q.device)
    lengths = torch.randint(next_n, pages * size + 1, (requests,), generator=generator).to(q.device)
    turn = torch.arange(next_n, device=q.device)
    ends = lengths[:, None] - next_n + 1 + turn
    if case.per_row:
        lengths = ends = ends.where(turn != 1, 0)
    columns, high = pages * size, ends.flatten().clamp(0, pages * size)
    column = torch.arange(columns, device=q.device)
    slots = column.expand(case.rows, -1)
    if case.base == "slot":
        row_tables = table.repeat_interleave(next_n, 0)
        slots = row_tables[:, column // size] * size + column % size
    scores = paged_index_scores(q, cache, weights, lengths, table, next_n, layout=layout, kernel=kernel)

    def run(**more: object) -> torch.Tensor:
        options = {"layout": layout, "index_base": case.base, "score_kernel": kernel, "select_kernel": kernel, **more}
        return index_decode(q, cache, weights, lengths, table, case.topk, next_n, **options)  # type: ignore[arg-type]

    return Call(scores, torch.zeros_like(high), high, slots, run, 4 * next_n * (case.topk + size))


def index_kernels(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """The kernels that both score and select have, with what they lack on `device`; nothing: they can be judged.

    >>> dict(index_kernels("cpu"))["reference"]
    []
    """
    facts = dispatch.device_of(torch.device(device))
    scoring = score_api.Problem(facts, torch.float32, torch.float32, 5, 150, 4, 16)
    selecting = dict(dispatch.explain(select_api.KERNELS, select_api.Problem(facts, torch.float32, 5, 150, 12)))
    scored = dispatch.explain(score_api.KERNELS, scoring)
    return [(name, unmet + selecting[name]) for name, unmet in scored if name in selecting]


def check_index(kernel: str | None = None, device: torch.device | str = "cpu", seed: int = 0) -> Report:
    """Judge index_prefill and index_decode with one kernel of score and select, or those that are chosen.

    What is right is a stable sort of all scores of the same kernel. Each call is repeated with budgets of all scores,
    some rows, one row, and pieces of a row; outputs are poisoned and lie inside canaries. Raises
    ValueError for a kernel that does not exist or cannot run on `device`.

    >>> check_index("reference").ok
    True
    """
    report = Report(f"index {kernel or 'as chosen'}", seed, f"on {torch.device(device)}")
    report.lines = {name: Line(name) for name in LINES}
    for number, case in enumerate(cases()):
        call = build(case, kernel, torch.device(device), seed + number)
        found = dict(_findings(case, call))
        for name in case.lines:
            report.lines[name].count(found.get(name, ""), f"seed {seed + number}, {case}")
        report.lines[REFUSED].count(_refusal(case, call), str(case))
    return report


def _findings(case: Indexing, call: Call) -> Iterator[tuple[str, str]]:
    """What the case breaks, by line."""
    right, equals = _expected(case, call)
    columns, group = call.scores.shape[1], case.next_n
    row = 4 * group * columns
    budgets = {"everything": 1 << 27, "one row more": row + 4 * group, "a row": row}
    budgets |= {"two pieces": max(call.least, row * 2 // 3), "small pieces": min(max(call.least, row // 5), row)}
    for what, budget in budgets.items():
        out = torch.full((case.rows + 2, case.topk), -9, dtype=torch.int32, device=call.scores.device)
        call.run(out=out[1:-1], memory_budget=budget)
        if not (out[[0, -1]] == -9).all():
            yield OUTPUT, f"{what}: a row beside those of the call was written"
        for number, indices in enumerate(out[1:-1].cpu().tolist()):
            wanted = right[number]
            if sorted(indices) == sorted([*wanted, *[-1] * (case.topk - len(wanted))]):
                continue
            message = f"budget for {what} ({budget} bytes), row {number}"
            if budget < row:
                yield PIECES, message
            if budget < 1 << 27:
                yield BUDGET, message
            else:
                yield WHICH, message
                yield BASE, message
            if equals[number]:
                yield TIES, message


def _expected(case: Indexing, call: Call) -> tuple[list[list[int]], list[bool]]:
    """The right indices of every row, and whether equals stood on both sides of the border."""
    right, equals = [], []
    for row in range(case.rows):
        low, high = int(call.low[row]), int(call.high[row])
        scores = call.scores[row, low:high].cpu()
        order = scores.nan_to_num(nan=-torch.inf).sort(descending=True, stable=True).indices
        order = order[scores[order] > -torch.inf]  # NaN is not
        best = order[: case.topk]
        right.append(call.slots[row, low:high].cpu()[best].tolist())
        border = order[case.topk - 1 : case.topk + 1]
        equals.append(len(border) == 2 and bool(scores[border[0]] == scores[border[1]]))
    return right, equals


def _refusal(case: Indexing, call: Call) -> str:
    """A budget that holds nothing is refused by name, and nothing is written."""
    out = torch.full((case.rows, case.topk), -9, dtype=torch.int32, device=call.scores.device)
    try:
        call.run(out=out, memory_budget=3)
    except ValueError as error:
        return "" if "memory_budget is 3" in str(error) and (out == -9).all() else f"refused with {error}"
    return "a budget of 3 bytes was not refused"
