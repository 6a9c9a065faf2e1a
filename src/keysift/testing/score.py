"""`check_score`: a kernel of score against float64, by the lines of CONTRACT.md."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from keysift import dispatch
from keysift.layout import FP8, IndexLayout
from keysift.ops.score import api, checks, index_scores, paged_index_scores

from .report import Line, Report, same

FORMULA = "score 1: the formula, float32 sums"
WINDOWS = "score 2: the cells of the windows and no others"
ALONE = "score 3: a row does not depend on the others"
PAGES = "score 4: pages, block tables, decode lengths"
REFUSED = "refused input"
REPEAT = "every operation: same bits on every run"
LINES = (FORMULA, WINDOWS, ALONE, PAGES, REFUSED, REPEAT)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPS = 2.0**-24  # half a unit in the last place of float32
#: The same of what a matrix unit adds fp8 products up in, where it does not keep all of float32.
EPS_FP8 = 2.0**-13


@dataclass(frozen=True, slots=True)
class Scoring:
    """One case; rows are requests * next_n where keys lie in pages."""

    rows: int
    columns: int
    heads: int
    head_dim: int
    q_dtype: torch.dtype = torch.float32
    k_dtype: torch.dtype = torch.float32
    scaled: bool = False
    page_size: int = 0  # 0: keys in one piece
    next_n: int = 1
    per_row: bool = False  # 2-D lengths
    gap: int = 4  # bytes between pages, or numbers

    @property
    def lines(self) -> list[str]:
        """The lines of the contract that the case shows."""
        return [FORMULA, WINDOWS, ALONE, *([PAGES] if self.page_size else []), REPEAT]


def cases(device: torch.device) -> list[Scoring]:
    """Every dtype, odd and even sizes, V3.2's index, pages of one token and of many, several queries a request."""
    small, pages = Scoring(4, 70, 3, 20), Scoring(6, 75, 4, 32, page_size=16)
    fp8 = torch.float8_e4m3fn
    if device.type == "cuda" and torch.version.hip and dispatch.device_of(device).arch.startswith("gfx94"):
        fp8 = torch.float8_e4m3fnuz  # the chip's own
    wide = replace(pages, heads=64, head_dim=128, q_dtype=fp8, k_dtype=fp8, scaled=True)
    return [
        *(replace(small, q_dtype=dtype, k_dtype=dtype, scaled=dtype != torch.float32) for dtype in FLOATS),
        replace(small, rows=3, q_dtype=torch.bfloat16, k_dtype=fp8, scaled=True),
        replace(small, rows=1, columns=1, heads=1, head_dim=1),
        replace(small, rows=40, columns=9, heads=8),
        Scoring(2, 300, 64, 128, fp8, fp8, scaled=True),
        *(replace(pages, q_dtype=FLOATS[n], k_dtype=FLOATS[n], page_size=(1, 3, 64)[n]) for n in range(3)),
        replace(pages, q_dtype=torch.bfloat16, k_dtype=fp8, scaled=True, next_n=2),
        replace(pages, q_dtype=fp8, k_dtype=fp8, scaled=True, next_n=3, per_row=True, page_size=7),
        replace(wide, page_size=64),
        # What kernels of other packages take: pages at multiples of 16 bytes.
        replace(wide, heads=32, page_size=64, next_n=2, per_row=True, gap=16),
        replace(wide, page_size=64, rows=5, columns=300, gap=16),
    ]


@dataclass(slots=True)
class Call:
    """The tensors of a case; keys and scales of every request as numbers, and the windows that are meant."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor  # float64 [requests, columns, D]; one request where keys are in one piece
    scales: torch.Tensor  # float64 [requests, columns]
    windows: list[tuple[int, int]]
    arguments: tuple[object, ...]  # behind q: as the public function takes them, without out
    options: dict[str, object]


def build(case: Scoring, device: torch.device, seed: int) -> Call:
    """Random tensors; what no window reaches is NaN, and tables name no page there."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.rows, case.heads, case.head_dim, generator=generator).to(case.q_dtype)
    weights = torch.randn(case.rows, case.heads, generator=generator)
    requests = case.rows // case.next_n if case.page_size else 1
    keys = torch.randn(requests, case.columns, case.head_dim, generator=generator).to(case.k_dtype)
    scales = torch.rand(requests, case.columns, generator=generator) + 0.5 if case.scaled else None
    bounds = torch.randint(-3, case.columns + 4, (2, case.rows), generator=generator)
    if case.page_size:
        return _paged(case, q, weights, keys, scales, bounds[1], device, generator)
    starts, ends = bounds
    ends[0] = case.columns
    windows = _windows(starts, ends, case.columns)
    reached = torch.zeros(case.columns, dtype=torch.bool)
    for low, high in windows:
        reached[low:high] = True
    k, scale = keys[0], None if scales is None else scales[0]
    _junk(k)[~reached] = 0x7F if case.k_dtype in FP8.values() else torch.nan
    numbers = torch.ones(1, case.columns) if scales is None else scales
    arguments = [x if x is None else x.to(device) for x in (k, scale, weights, starts, ends)]
    return Call(
        q.to(device), weights.to(device), keys.double(), numbers.double(), windows, tuple(arguments), {}
    )  # fmt: skip


def _paged(
    case: Scoring,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    ends: torch.Tensor,
    device: torch.device,
    generator: torch.Generator,
) -> Call:
    """The keys of requests in pages that lie apart and in no order; ends [rows] become lengths."""
    size, requests, next_n = case.page_size, len(keys), case.next_n
    pages = -(-case.columns // size)
    if case.per_row:
        lengths, rows = ends.view(requests, next_n), ends
    else:
        lengths = ends[::next_n].contiguous()
        rows = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).flatten()
    windows = _windows(torch.zeros_like(rows), rows, pages * size)
    name = str(case.k_dtype).removeprefix("torch.").removeprefix("float8_")
    width = case.head_dim + 4 if case.scaled else case.head_dim
    stride = size * width + case.gap
    layout = IndexLayout(name, size, case.head_dim, page_stride=stride)
    pool = torch.full((requests * pages * stride,), 0x7F if case.scaled else torch.nan, dtype=layout.dtype)
    cache = pool.as_strided((requests * pages, size, width), (stride, width, 1))
    values, scale = layout.views(cache)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    numbers = torch.full((requests, pages * size, case.head_dim), torch.nan, dtype=torch.float64)
    factors = torch.ones(requests, pages * size, dtype=torch.float64)
    for b in range(requests):
        # Columns beyond `columns` are there where the last page has them, and are scored where a length reaches them.
        reach = max(high for _, high in windows[b * next_n : (b + 1) * next_n])
        place = torch.arange(reach)
        known = keys[b].float()[place % case.columns].to(case.k_dtype)
        page = table[b, place // size].long()
        _junk(values)[page, place % size] = _junk(known)
        numbers[b, :reach] = known.double()
        if scale is not None and scales is not None:
            scale[page, place % size] = scales[b][place % case.columns]
            factors[b, :reach] = scales[b][place % case.columns].double()
        table[b, -(-reach // size) :] = -7
    moved = pool.to(device).as_strided(cache.shape, cache.stride())
    arguments = (moved, weights.to(device), lengths.to(device), table.to(device), next_n)
    return Call(q.to(device), weights.to(device), numbers, factors, windows, arguments, {"layout": layout})


def _junk(x: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed, also of fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _windows(starts: torch.Tensor, ends: torch.Tensor, columns: int) -> list[tuple[int, int]]:
    lower = starts.clamp(0, columns)
    upper = torch.maximum(ends.clamp(0, columns), lower)
    return list(zip(lower.tolist(), upper.tolist(), strict=True))


def score_kernels(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """Every kernel of score by name, with what it lacks on `device` for V3.2's sizes; nothing: it can be judged.

    >>> dict(score_kernels("cpu"))["reference"]
    []
    """
    facts, fp8 = dispatch.device_of(torch.device(device)), torch.float8_e4m3fn
    problems = [api.Problem(facts, dtype, dtype, 6, 75, 64, 128, 64) for dtype in (torch.bfloat16, fp8)]
    return [(kernel.name, min((kernel.unmet(problem) for problem in problems), key=len)) for kernel in api.KERNELS]


def check_score(kernel: str | None = None, device: torch.device | str = "cpu", seed: int = 0) -> Report:
    """Judge a kernel of score, by name or the one that is chosen, and report line by line.

    Outputs are poisoned and lie inside canaries; keys that no window reaches are NaN, and table entries there name no
    page; each call runs twice, and every row once alone. Numbers are compared with float64, each within what float32
    sums allow (products of fp8 on a GPU: within what its matrix unit keeps of them). Cases that the kernel declares it
    cannot run are counted and left out; one that must not be given `out` gives its own, of which the windows are
    looked at. Raises ValueError for a kernel that does not exist or cannot run on `device`.

    >>> check_score("reference").ok
    True
    """
    report = Report(f"score {kernel or 'as chosen'}", seed, f"on {torch.device(device)}")
    report.lines = {name: Line(name) for name in LINES}
    for number, case in enumerate(cases(torch.device(device))):
        call = build(case, torch.device(device), seed + number)
        if unmet(case, call, kernel, may_allocate=True):
            report.declined += 1
            continue
        found = dict(_findings(case, call, kernel))
        for name in case.lines:
            report.lines[name].count(found.get(name, ""), f"seed {seed + number}, {case}")
    if kernel is not None and report.declined == len(cases(torch.device(device))):
        dispatch.choose("score", api.KERNELS, problem_of(case, call, may_allocate=True), kernel)  # raises
    case = cases(torch.device(device))[0]
    report.lines[REFUSED].count(_refusal(case, build(case, torch.device(device), seed), kernel), str(case))
    return report


def problem_of(case: Scoring, call: Call, *, may_allocate: bool) -> api.Problem:
    """The static facts of the call."""
    k, table = call.arguments[0], call.arguments[3] if case.page_size else None
    if case.page_size:
        k, _ = checks.check_cache(call.q, k, call.options["layout"])  # type: ignore[arg-type]
    out = call.weights.new_empty(case.rows, call.keys.shape[1])
    return api._problem(call.q, k, table, out, case.next_n, may_allocate=may_allocate)  # type: ignore[arg-type] # noqa: SLF001


def unmet(case: Scoring, call: Call, kernel: str | None, *, may_allocate: bool) -> list[str]:
    """What a named kernel lacks for the call."""
    reasons = dispatch.explain(api.KERNELS, problem_of(case, call, may_allocate=may_allocate))
    return dict(reasons).get(kernel or "", [])


def _score(case: Scoring, call: Call, rows: slice, out: torch.Tensor, kernel: str | None) -> None:
    """The scores of some rows, whole requests where keys lie in pages, into `out`."""
    if unmet(case, call, kernel, may_allocate=False):  # only where it may allocate
        found = _scored(case, call, rows, None, kernel)
        for row, (low, high) in enumerate(call.windows[rows]):
            out[row, low:high] = found[row, low:high]
        return
    _scored(case, call, rows, out, kernel)


def _scored(case: Scoring, call: Call, rows: slice, out: torch.Tensor | None, kernel: str | None) -> torch.Tensor:
    q, options = call.q[rows], {**call.options, "out": out, "kernel": kernel}
    if not case.page_size:
        k, scale, weights, starts, ends = call.arguments
        return index_scores(q, k, scale, weights[rows], starts[rows], ends[rows], **options)  # type: ignore[arg-type,index]
    cache, weights, lengths, table, next_n = call.arguments
    requests = slice(rows.start // case.next_n, rows.stop // case.next_n)
    return paged_index_scores(
        q, cache, weights[rows], lengths[requests], table[requests], next_n, **options  # type: ignore[arg-type,index]
    )  # fmt: skip


def _findings(case: Scoring, call: Call, kernel: str | None) -> Iterator[tuple[str, str]]:
    """What the case breaks, by line."""
    columns = call.keys.shape[1]
    every, runs = slice(0, case.rows), []
    for fill in (torch.nan, 7.0):
        whole = torch.full((case.rows + 2, columns + 5), fill, device=call.q.device)
        _score(case, call, every, whole[1:-1, 2 : 2 + columns], kernel)
        runs.append(whole.cpu())
    found = runs[0][1:-1, 2 : 2 + columns]
    for row, (low, high) in enumerate(call.windows):
        for poisoned, fill in zip(runs, (torch.nan, 7.0), strict=True):
            outside = poisoned[row + 1].clone()
            outside[2 + low : 2 + high] = fill
            if not same(outside, torch.full_like(outside, fill)):
                yield WINDOWS, f"row {row}: a cell outside [{low}, {high}) was written"
        if not torch.equal(found[row, low:high], runs[1][row + 1, 2 + low : 2 + high]):
            yield REPEAT, f"row {row}: a second run gives other bits"
        off, allowed = distance(case, call, row, found[row, low:high])
        if not bool((off <= allowed).all()):
            place = int((off > allowed).nonzero()[0]) if bool((off > allowed).any()) else 0
            message = (
                f"row {row}, column {low + place}: off by {float(off[place]):.3g}, {float(allowed[place]):.3g} allowed"
            )
            yield FORMULA, message
            yield PAGES, message
    if not (runs[0][[0, -1]].isnan().all() and (runs[1][[0, -1]] == 7.0).all()):
        yield WINDOWS, "a row beside those of the call was written"
    for first in range(0, case.rows, case.next_n):
        part = slice(first, first + case.next_n)
        alone = torch.full((case.next_n, columns), torch.nan, device=call.q.device)
        _score(case, call, part, alone, kernel)
        if not same(alone.cpu(), found[part]):
            yield ALONE, f"rows {first} to {part.stop - 1} alone have other bits"


def distance(case: Scoring, call: Call, row: int, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the scores of a row's window are from float64, and how far they may be."""
    low, high = call.windows[row]
    request = row // case.next_n if case.page_size else 0
    keys, scale = call.keys[request, low:high], call.scales[request, low:high]
    narrow = call.q.is_cuda and case.q_dtype in FP8.values() and case.k_dtype in FP8.values()
    wanted, allowed = exact(call.q[row].cpu(), call.weights[row].cpu(), keys, scale, narrow=narrow)
    return (found.double() - wanted).abs().nan_to_num(nan=torch.inf), allowed


def exact(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor, *, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [N] of one query [H, D] in float64, and how far float32 sums in any order may be from them.

    keys [N, D] and scale [N] float64; narrow: fp8 products in a matrix unit, which keeps less of them.
    """
    q, weights = q.double(), weights.double()
    units = (sum(q.shape) + 4) * EPS + (EPS_FP8 if narrow else 0.0)
    size = (weights.abs() @ (q.abs() @ keys.abs().T)) * scale
    return (weights @ (q @ keys.T).relu()) * scale, units * size + 1e-37


def _refusal(case: Scoring, call: Call, kernel: str | None) -> str:
    """Queries of another head size are refused, with the name of what does not fit, before anything is written."""
    k, scale, weights, starts, ends = call.arguments
    out = torch.full((case.rows, case.columns), torch.nan, device=call.q.device)
    try:
        index_scores(call.q[..., 1:], k, scale, weights, starts, ends, out=out, kernel=kernel)  # type: ignore[arg-type]
    except ValueError as error:
        if "k has shape" in str(error) and out.isnan().all():
            return ""
        return f"refused with {error}"
    return "keys of another head size were not refused"
