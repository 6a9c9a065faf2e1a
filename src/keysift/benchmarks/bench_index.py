"""index_prefill and index_decode on this machine: time, peak memory, and the selection of some rows checked.

Decode stands beside its two stages alone in the same run; prefill of a compressed cache beside the published table of
StreamIndex (arXiv 2605.02568), which never builds the score matrix either.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from keysift import indexer
from keysift.benchmarks import bench_score
from keysift.benchmarks.harness import Clock, Time, Variant, clock_of, run_cases, sampled
from keysift.ops.score import index_scores
from keysift.ops.select import reference, select_decode, select_workspace_size

Entry = dict[str, Any]
#: Milliseconds and gigabytes of one layer on one H200, bfloat16, by tokens.
STREAM_INDEX_H200 = {
    32768: (31.0, 0.40), 65536: (122.0, 0.59), 131072: (485.0, 0.96), 262144: (1935.0, 1.71), 1048576: (30900.0, 6.21),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Decode: `rows` requests of `columns` keys. Prefill: `rows` tokens, one key for every `ratio`, causal."""

    phase: str
    rows: int
    columns: int
    topk: int
    heads: int = 64
    head_dim: int = 128
    dtype: str = "e4m3fn"
    ratio: int = 1
    memory_budget: int = indexer.MEMORY_BUDGET

    @property
    def name(self) -> str:
        """`prefill-131072x32768-k512-h64-bfloat16`."""
        return f"{self.phase}-{self.rows}x{self.columns}-k{self.topk}-h{self.heads}-{self.dtype}"


def prefill(tokens: int, dtype: str, ratio: int = 4, heads: int = 64, topk: int = 512) -> Case:
    """V4-Flash's index over a text of its own length."""
    return Case("prefill", tokens, tokens // ratio, topk, heads, dtype=dtype, ratio=ratio)


def case_set(device: torch.device) -> list[Case]:
    """What the project promises on a GPU, or what a CPU does in a minute."""
    if device.type == "cpu":
        return [
            Case("decode", 1, 131072, 2048, dtype="float32"),
            Case("decode", 8, 8192, 2048, dtype="float32"),
            prefill(2048, "float32", heads=8),
        ]
    return [
        *(Case("decode", rows, columns, 2048) for rows in (1, 64) for columns in (8192, 131072)),
        *(prefill(tokens, dtype) for dtype in ("bfloat16", "e4m3fn") for tokens in STREAM_INDEX_H200),
    ]


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    seconds: float = 1.5,
    done: Callable[[Case, Entry], None] | None = None,
) -> dict[str, Entry]:
    """Time `cases` and return their entries by name, each given to `done` as soon as it is there."""
    clock = clock_of(device, "cold", seconds)

    def measure(case: Case) -> Entry:
        return asdict(case) | (_decode(case, clock) if case.phase == "decode" else _prefill(case, device, seconds))

    return run_cases(cases, clock, measure, done)


def _score_case(case: Case) -> bench_score.Case:
    return bench_score.Case(case.phase, case.rows, case.columns, case.heads, case.head_dim, case.dtype)


def _decode(case: Case, clock: Clock) -> Entry:
    """The whole beside its stages, graph by graph or call by call."""
    device, scored = clock.device, _score_case(case)
    size = scored.read_bytes + 4 * scored.cells
    limit = bench_score.BYTES[device.type] // size
    calls = [bench_score.build(scored, device, n) for n in range(max(1, min(bench_score.INPUTS, limit)))]
    outs = [torch.empty(case.rows, case.topk, dtype=torch.int32, device=device) for _ in calls]
    scratch = torch.empty(select_workspace_size(calls[0].out, case.topk), dtype=torch.uint8, device=device)

    def whole(i: int) -> None:
        call = calls[i]
        assert call.table is not None  # noqa: S101 - decode
        indexer.index_decode(
            call.q, call.keys, call.weights, call.ends, call.table, case.topk, layout=call.layout, out=outs[i],
            memory_budget=case.memory_budget,
        )  # fmt: skip

    variants = [
        Variant("index", whole),
        Variant("score", lambda i: calls[i].launch(None, calls[i].out)),
        Variant(
            "select", lambda i: select_decode(calls[i].out, case.topk, calls[i].ends, 1, outs[i], workspace=scratch)
        ),
    ]
    clock.use(len(calls), size, None)
    for variant in variants[::-1]:  # the whole last: what it leaves is looked at
        clock.replay(variant)
    fault = None
    for call, out in zip(calls[: clock.inputs], outs, strict=False):
        for row in sampled(case.rows):
            fault = fault or _fault(call.out[row : row + 1], out[row], int(call.ends[row]), case.topk)
    if fault is not None:
        return {"fault": fault}
    times = clock.measure(variants)
    entry: Entry = {variant.name: asdict(times[variant.name]) for variant in variants}
    return {"index": entry.pop("index"), "stages": entry, "checked": True}


def _prefill(case: Case, device: torch.device, seconds: float) -> Entry:
    """Whole calls, with what they hold beside their arguments and their result."""
    call = _text(case, device)
    out = torch.full((case.rows, case.topk), -9, dtype=torch.int32, device=device)

    def whole() -> None:
        indexer.index_prefill(
            call.q, call.keys, call.scale, call.weights, None, call.ends, case.topk, out=out,
            memory_budget=case.memory_budget,
        )  # fmt: skip

    began = time.perf_counter()
    whole()
    held: Entry = {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        whole()
        torch.cuda.synchronize(device)
        held = {"peak_bytes": torch.cuda.max_memory_allocated(device), "arguments_bytes": before}
    one = time.perf_counter() - began
    for row in sampled(case.rows):
        end = int(call.ends[row])
        part = slice(row, row + 1)
        scores = index_scores(call.q[part], call.keys, call.scale, call.weights[part], None, call.ends[part])
        if problem := _fault(scores, out[row], end, case.topk):
            return {"fault": f"row {row}: {problem}"}
    samples = [_elapsed(whole, device) for _ in range(max(3, min(20, int(seconds / max(one, 1e-6)))))]
    entry: Entry = {"index": asdict(Time.of(samples, 1)), **held, "checked": True}
    if case.ratio == 4 and case.rows in STREAM_INDEX_H200:
        milliseconds, gigabytes = STREAM_INDEX_H200[case.rows]
        entry["stream_index_h200"] = {"us": 1e3 * milliseconds, "bytes": gigabytes * 1e9}
    return entry


def _text(case: Case, device: torch.device) -> bench_score.Call:
    """The tokens of a whole text, which outnumber their keys where the cache is compressed."""
    generator = torch.Generator(device).manual_seed(bench_score.SEED)
    dtype = _score_case(case).torch_dtype
    q = torch.empty(case.rows, case.heads, case.head_dim, dtype=dtype, device=device)
    for first in range(0, case.rows, 8192):  # some at a time: float32 is up to four times as wide
        part = q[first : first + 8192]
        part.copy_(torch.randn(part.shape, generator=generator, device=device).to(dtype))
    k = torch.randn(case.columns, case.head_dim, generator=generator, device=device).to(dtype)
    scale = torch.rand(case.columns, generator=generator, device=device) + 0.5 if dtype.itemsize == 1 else None
    weights = torch.randn(case.rows, case.heads, generator=generator, device=device)
    ends = (torch.arange(case.rows, dtype=torch.int32, device=device) + 1) // case.ratio
    return bench_score.Call(q, weights, k, scale, ends, None, None, weights)


def _fault(scores: torch.Tensor, found: torch.Tensor, end: int, topk: int) -> str | None:
    """A row's indices against the reference's on the row's scores [1, N]."""
    low, high = (torch.tensor([bound], device=scores.device) for bound in (0, end))
    wanted = reference.select_windows(scores, topk, low, high)[0][0]
    if torch.equal(found.sort().values, wanted.to(found.dtype).sort().values):
        return None
    common = len(set(found.tolist()) & set(wanted.tolist()) - {-1})
    return f"{common} of the {int((wanted >= 0).sum())} best keys"


def _elapsed(call: Callable[[], None], device: torch.device) -> float:
    """Microseconds of one call."""
    if device.type == "cpu":
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
