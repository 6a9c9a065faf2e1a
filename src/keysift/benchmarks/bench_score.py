"""score on this machine: check, time, check again, beside the read floor (decode) and DeepGEMM where it is installed.

Decode reads every live key once, D + 4 bytes in fp8; prefill is bound by 2 H D operations a cell.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from keysift import dispatch
from keysift.benchmarks import floor
from keysift.benchmarks.harness import Clock, Time, Variant, clock_of, rates, run_cases, sampled, time_right
from keysift.layout import FP8, IndexLayout
from keysift.ops.cache import write_index_cache
from keysift.ops.score import api, index_scores, paged_index_scores
from keysift.testing.score import exact

Entry = dict[str, Any]
PAGE_SIZE = 64
SEED = 20
#: Inputs in rotation, and the bytes that they and their results may take.
INPUTS, BYTES = 8, {"cpu": 256 << 20, "cuda": 24 << 30}
#: Microseconds of DeepGEMM 2.5 on an H200, recorded 2026-12-01 with CUDA-graph replays, cold.
DEEP_GEMM_H200 = {
    "prefill-2048x8192-h64-e4m3fn": 246.0, "prefill-2048x32768-h64-e4m3fn": 1028.0,
    "prefill-4096x65536-h64-e4m3fn": 4073.0, "prefill-8192x32768-h64-e4m3fn": 3951.0,
    "decode-1x8192-h64-e4m3fn": 3.4, "decode-1x65536-h64-e4m3fn": 4.5, "decode-1x131072-h64-e4m3fn": 5.7,
    "decode-16x8192-h64-e4m3fn": 5.7, "decode-16x65536-h64-e4m3fn": 38.2, "decode-16x131072-h64-e4m3fn": 72.1,
    "decode-64x8192-h64-e4m3fn": 21.6, "decode-64x65536-h64-e4m3fn": 140.0, "decode-64x131072-h64-e4m3fn": 276.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One shape. Decode: `rows` requests of `columns` cached keys; prefill: the last `rows` of `columns`, causal."""

    phase: str
    rows: int
    columns: int
    heads: int = 64
    head_dim: int = 128
    dtype: str = "e4m3fn"  # of queries and keys
    width: int | None = None  # columns that the block table has room for, where it is wider than the keys

    @property
    def name(self) -> str:
        """`decode-64x131072-h64-e4m3fn`."""
        width = f"-in{self.width}" if self.width else ""
        return f"{self.phase}-{self.rows}x{self.columns}-h{self.heads}-{self.dtype}{width}"

    @property
    def cells(self) -> int:
        """Scores that are written."""
        if self.phase == "decode":
            return self.rows * self.columns
        return sum(max(0, self.columns - self.rows + row + 1) for row in range(self.rows))

    @property
    def operations(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.heads * self.head_dim * self.cells

    @property
    def read_bytes(self) -> int:
        """Keys and their scales, once."""
        keys = self.rows * self.columns if self.phase == "decode" else self.columns
        return keys * (self.head_dim + 4 if self.dtype in FP8 else self.head_dim * self.torch_dtype.itemsize)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of queries and keys."""
        made: torch.dtype = FP8[self.dtype] if self.dtype in FP8 else getattr(torch, self.dtype)
        return made


def case_set(device: torch.device) -> list[Case]:
    """What the project promises on a GPU (the published shapes), or what a CPU does in a minute."""
    if device.type == "cpu":
        return [
            *(Case("decode", rows, columns, dtype="float32") for rows, columns in ((1, 8192), (1, 131072), (8, 8192))),
            Case("decode", 1, 8192, dtype="bfloat16"),
            Case("decode", 1, 8192, dtype="float32", width=131072),
            Case("prefill", 64, 4096, dtype="float32"),
        ]
    own = "e4m3fnuz" if dispatch.device_of(device).arch.startswith("gfx94") else "e4m3fn"
    shapes = [(rows, columns) for rows in (1, 16, 64) for columns in (8192, 65536, 131072)]
    prefill = ((2048, 8192), (2048, 32768), (4096, 65536), (8192, 32768))
    return [
        *(Case("decode", *shape, dtype=own) for shape in shapes),
        *(Case("prefill", *shape, dtype=own) for shape in prefill),
        *(Case("decode", *shape, dtype="bfloat16") for shape in ((1, 131072), (64, 131072))),
        Case("prefill", 2048, 32768, dtype="bfloat16"),
        Case("decode", 1, 8000, dtype=own),
        Case("decode", 1, 8000, dtype=own, width=1 << 20),
    ]


@dataclass(slots=True)
class Call:
    """One input: the tensors of a call, and where its scores go."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor  # prefill: [N, D]; decode: the cache
    scale: torch.Tensor | None
    ends: torch.Tensor  # int32: of each row, or the length of each request
    table: torch.Tensor | None
    layout: IndexLayout | None
    out: torch.Tensor

    def launch(self, kernel: str | None, out: torch.Tensor | None) -> None:
        """As a caller does, with everything allocated beforehand that the kernel lets be."""
        if self.table is None:
            self.out = index_scores(
                self.q, self.keys, self.scale, self.weights, None, self.ends, out=out, kernel=kernel
            )
        else:
            self.out = paged_index_scores(
                self.q, self.keys, self.weights, self.ends, self.table, layout=self.layout, out=out, kernel=kernel
            )

    def lacks(self, kernel: str) -> list[str]:
        """What a kernel lacks for the call with everything allocated beforehand."""
        keys = self.keys if self.layout is None else self.layout.views(self.keys)[0]
        problem = api._problem(self.q, keys, self.table, self.out)  # noqa: SLF001 - the call's own facts
        return dict(dispatch.explain(api.KERNELS, problem))[kernel]


def build(case: Case, device: torch.device, number: int) -> Call:
    """Random queries and keys, the same for every run on one kind of device; pages in no order."""
    generator = torch.Generator(device).manual_seed(SEED + number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q = normal(case.rows, case.heads, case.head_dim).to(case.torch_dtype)
    weights = normal(case.rows, case.heads)
    if case.phase == "prefill":
        k = normal(case.columns, case.head_dim).to(case.torch_dtype)
        scale = torch.rand(case.columns, generator=generator, device=device) + 0.5 if case.dtype in FP8 else None
        ends = torch.arange(case.rows, dtype=torch.int32, device=device) + (case.columns - case.rows + 1)
        out = torch.empty(case.rows, case.columns, device=device)
        return Call(q, weights, k, scale, ends, None, None, out)
    layout = IndexLayout(case.dtype, PAGE_SIZE, case.head_dim)
    pages = -(-case.columns // PAGE_SIZE)
    cache = layout.empty(case.rows * pages, device)
    for first in range(0, case.rows * pages, 4096):  # some at a time: the numbers are four times as wide
        part = cache[first : first + 4096]
        slots = torch.arange(part.shape[0] * PAGE_SIZE, device=device)
        write_index_cache(normal(len(slots), case.head_dim), part, slots, layout, kernel="reference")
    order = torch.randperm(case.rows * pages, generator=generator, device=device).int().view(case.rows, pages)
    room = -(-(case.width or case.columns) // PAGE_SIZE)
    table = torch.zeros(case.rows, room, dtype=torch.int32, device=device)
    table[:, :pages] = order
    lengths = torch.full((case.rows,), case.columns, dtype=torch.int32, device=device)
    out = torch.empty(case.rows, room * PAGE_SIZE, device=device)
    return Call(q, weights, cache, None, lengths, table, layout, out)


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    kernels: Sequence[str] = (),
    seconds: float = 1.5,
    done: Callable[[Case, Entry], None] | None = None,
) -> dict[str, Entry]:
    """Time `cases`, cold, and return their entries by name, each given to `done` as soon as it is there.

    kernels  kernels of score by name; the one that the dispatch chooses where none is given
    """
    clock = clock_of(device, "cold", seconds)
    return run_cases(cases, clock, lambda case: run_case(case, clock, kernels), done)


def run_case(case: Case, clock: Clock, kernels: Sequence[str]) -> Entry:
    """One case: everything that was measured on it."""
    device = clock.device
    size = case.read_bytes + 4 * case.cells
    calls = [build(case, device, n) for n in range(max(1, min(INPUTS, BYTES[device.type] // size)))]
    clock.use(len(calls), size, None)
    first = calls[0]
    keys = first.keys if first.layout is None else first.layout.views(first.keys)[0]
    problem = api._problem(first.q, keys, first.table, first.out)  # noqa: SLF001 - the call's own facts
    chosen = dispatch.choose("score", api.KERNELS, problem).name
    variants = [_ours(name, calls) for name in kernels or (chosen,)]
    if device.type == "cuda" and importlib.util.find_spec("deep_gemm") and case.dtype in FP8:
        variants.append(_deep_gemm(calls))
    way = _floor(case, calls, clock)
    given: dict[str, list[torch.Tensor]] = {}
    results, times = time_right(
        clock,
        variants,
        lambda variant: _check(case, calls, clock, variant, given),
        lambda time: _entry(case, time),
        [] if way is None else [way],
    )
    entry: Entry = {**asdict(case), "inputs": len(calls), "chosen": chosen}
    entry |= {"read_bytes": case.read_bytes, "operations": case.operations}
    entry["kernels"] = {name: results.pop(name) for name in kernels or (chosen,)}
    entry["others"] = results
    if way is not None:
        entry["floor"] = {"how": way.name, **_entry(case, times[way.name])}
    return entry


def _ours(name: str, calls: Sequence[Call]) -> Variant:
    gives_out = not calls[0].lacks(name)  # a kernel that allocates refuses it; whatever else it lacks, the call says
    return Variant(name, lambda i: calls[i].launch(name, calls[i].out if gives_out else None))


def _deep_gemm(calls: Sequence[Call]) -> Variant:
    """The published kernels, cells outside the windows left as they are; their scores are copied to be looked at."""
    deep_gemm = importlib.import_module("deep_gemm")
    processors = dispatch.device_of(calls[0].q.device).processors

    def launch(i: int) -> None:
        call = calls[i]
        if call.table is None:
            starts = torch.zeros_like(call.ends)
            call.out = deep_gemm.fp8_mqa_logits(
                call.q, (call.keys, call.scale), call.weights, starts, call.ends, clean_logits=False
            )
            return
        plan = plans[i]
        call.out = deep_gemm.fp8_paged_mqa_logits(
            call.q[:, None], call.keys[:, :, None], call.weights, lengths[i], call.table, plan, call.out.shape[1],
            clean_logits=False,
        )  # fmt: skip

    lengths = [call.ends[:, None] for call in calls]  # [B, next_n]
    plans = [
        None if call.table is None else deep_gemm.get_paged_mqa_logits_metadata(length, PAGE_SIZE, processors)
        for call, length in zip(calls, lengths, strict=True)
    ]
    return Variant("deep_gemm alone", launch)


def _floor(case: Case, calls: Sequence[Call], clock: Clock) -> Variant | None:
    """Reading the bytes of the keys once; None for prefill, which other things bind."""
    if case.phase == "prefill":
        return None
    words = [call.keys.flatten().view(torch.float32).view(case.rows, -1) for call in calls]
    ends = torch.full((case.rows,), words[0].shape[1], dtype=torch.int32, device=clock.device)
    return floor.fastest(clock, floor.ways_to_read(words, ends))


def _check(
    case: Case, calls: Sequence[Call], clock: Clock, variant: Variant, given: dict[str, list[torch.Tensor]]
) -> str | None:
    """What is wrong with the scores of `variant`, run once more over poison, or None.

    given  where each variant's scores went: a graph that is replayed writes where it wrote when it was captured
    """
    own = [call.out for call in calls]
    try:
        for call, out in zip(calls, given.get(variant.name, own), strict=True):
            call.out = out.fill_(torch.nan)
        clock.replay(variant)
        given[variant.name] = [call.out for call in calls]
        for number, call in enumerate(calls[: clock.inputs]):
            if problem := _fault(case, call, is_kept=not variant.name.startswith("deep_gemm")):
                return f"input {number}: {problem}"
    finally:
        for call, out in zip(calls, own, strict=True):
            call.out = out
    return None


def _fault(case: Case, call: Call, *, is_kept: bool) -> str | None:
    """Some rows against float64, all their columns; `is_kept`: no cell outside the window may be written."""
    for row in sampled(case.rows):
        end = int(call.ends[row])
        keys, scale = _keys(call, row, end)
        narrow = case.dtype in FP8 and call.q.is_cuda
        wanted, allowed = exact(call.q[row], call.weights[row], keys, scale, narrow=narrow)
        off = (call.out[row, :end].double() - wanted).abs()
        if not bool((off <= allowed).all()):
            worst = float((off / allowed).nan_to_num(nan=torch.inf).max())
            return f"row {row} is {worst:.3g} times as far from float64 as float32 sums may be"
        if is_kept and not bool(call.out[row, end:].isnan().all()):
            return f"row {row}: a cell beyond its end was written"
    return None


def _keys(call: Call, row: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and scales that a row looks at, float64."""
    if call.table is None or call.layout is None:
        scale = torch.ones(end, dtype=torch.float64, device=call.q.device) if call.scale is None else call.scale[:end]
        return call.keys[:end].double(), scale.double()
    pages = call.table[row, : -(-end // PAGE_SIZE)].long()
    values, scales = call.layout.views(call.keys)
    if scales is None:
        return values[pages].flatten(0, 1)[:end].double(), torch.ones(end, dtype=torch.float64, device=call.q.device)
    codes = values.view(torch.uint8)[pages].flatten(0, 1)[:end].view(values.dtype)
    return codes.double(), scales[pages].flatten()[:end].double()


def _entry(case: Case, time: Time) -> Entry:
    return rates(time, case.read_bytes, case.operations)
