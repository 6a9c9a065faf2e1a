"""sparse_mla on this machine: check, time, check again, beside FlashMLA's own call where it is installed.

Bound by 2 * heads * (D + value_dim) operations for each selected latent with many heads, by reading it with few.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from keysift import dispatch
from keysift.benchmarks.harness import Clock, Time, Variant, clock_of, rates, run_cases, sampled, time_right
from keysift.layout import LatentLayout
from keysift.ops.cache import gather_latent_cache, write_latent_cache
from keysift.ops.sparse_mla import api, checks, sparse_mla, sparse_mla_workspace_size
from keysift.testing.sparse_mla import Call as Expected
from keysift.testing.sparse_mla import excess

Entry = dict[str, Any]
PAGE_SIZE, VALUE_DIM, DIM = 64, 512, 576
SEED = 30
#: Inputs in rotation, and the bytes that they may take.
INPUTS, BYTES = 4, {"cpu": 256 << 20, "cuda": 24 << 30}
#: Of a call, compared with float64.
SAMPLED_ROWS = 4
SCALE = 192**-0.5
#: Microseconds of FlashMLA (sgl-flash-mla 1.0.0) on an H200, recorded 2026-12-01 with CUDA-graph replays, cold.
FLASH_MLA_H200 = {
    "decode-1x16384-h128-k2048-e4m3fn": 19.1, "decode-16x16384-h128-k2048-e4m3fn": 41.7,
    "decode-64x16384-h128-k2048-e4m3fn": 91.2, "decode-128x16384-h128-k2048-e4m3fn": 177.0,
    "decode-64x16384-h64-k2048-e4m3fn": 76.4, "prefill-1024x16384-h128-k2048-bfloat16": 1041.0,
    "prefill-4096x65536-h128-k2048-bfloat16": 4160.0, "prefill-4096x65536-h64-k2048-bfloat16": 2219.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One shape. Decode: `rows` requests of `columns` cached tokens each; prefill: `rows` tokens over `columns`."""

    phase: str
    rows: int
    columns: int
    heads: int = 128
    k: int = 2048
    dtype: str = "e4m3fn"  # of the latents

    @property
    def name(self) -> str:
        """`decode-64x16384-h128-k2048-e4m3fn`."""
        return f"{self.phase}-{self.rows}x{self.columns}-h{self.heads}-k{self.k}-{self.dtype}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        return 2 * self.rows * self.heads * self.k * (DIM + VALUE_DIM)

    @property
    def layout(self) -> LatentLayout:
        """Scales are powers of two, which every kernel takes."""
        return LatentLayout(self.dtype, PAGE_SIZE, VALUE_DIM, DIM - VALUE_DIM, "ue8m0")

    @property
    def read_bytes(self) -> int:
        """Selected latents, once for each token."""
        return self.rows * self.k * self.layout.width * self.layout.dtype.itemsize

    @property
    def q_dtype(self) -> torch.dtype:
        """bfloat16 over an fp8 cache, otherwise that of the latents."""
        return torch.bfloat16 if self.layout.is_fp8 else self.layout.dtype


def case_set(device: torch.device) -> list[Case]:
    """The published shapes, and a rank's 16 heads; or what a CPU does in a minute."""
    if device.type == "cpu":
        return [
            Case("decode", 1, 8192, dtype="float32"),
            *(Case("decode", 4, 8192, 16, dtype=dtype) for dtype in ("float32", "bfloat16", "e4m3fn")),
            Case("prefill", 16, 4096, dtype="float32"),
        ]
    return [
        *(Case("decode", rows, 16384, heads) for heads, batches in DECODES for rows in batches),
        Case("prefill", 1024, 16384, dtype="bfloat16"),
        *(Case("prefill", 4096, 65536, heads, dtype="bfloat16") for heads in (128, 64)),
    ]


#: Heads, and requests at a time.
DECODES = ((128, (1, 16, 64, 128)), (64, (64,)), (16, (1, 64)))


@dataclass(slots=True)
class Call:
    """One input: the tensors of a call, and where its results go."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    layout: LatentLayout
    out: torch.Tensor
    lse: torch.Tensor

    def launch(self, kernel: str, workspace: torch.Tensor | None) -> None:
        """As a caller does, with everything allocated beforehand that the kernel lets be."""
        sparse_mla(
            self.q, self.kv, self.indices, SCALE, layout=self.layout, out=self.out, lse=self.lse, workspace=workspace,
            kernel=kernel,
        )  # fmt: skip

    def problem(self, *, may_allocate: bool) -> api.Problem:
        """The call's static facts."""
        latents, _, rope = checks.check_latents(self.q, self.kv, VALUE_DIM, self.layout)
        return api._problem(  # noqa: SLF001 - as the call itself makes them
            self.q, latents, rope, VALUE_DIM, self.indices.shape[1], power_of_two=True, may_allocate=may_allocate
        )


def build(case: Case, device: torch.device, number: int) -> Call:
    """Random queries and latents, k different slots for each token, of pages in no order."""
    generator = torch.Generator(device).manual_seed(SEED + number)
    owners = case.rows if case.phase == "decode" else 1
    pages = -(-case.columns // PAGE_SIZE)
    q = torch.randn(case.rows, case.heads, DIM, generator=generator, device=device).to(case.q_dtype)
    kv = case.layout.empty(owners * pages, device)
    for first in range(0, owners * pages, 1024):  # some at a time: the numbers are six times as wide
        part = kv[first : first + 1024]
        slots = torch.arange(part.shape[0] * PAGE_SIZE, device=device)
        latents = torch.randn(len(slots), DIM, generator=generator, device=device)
        write_latent_cache(latents, part, slots, case.layout, kernel="reference")
    table = torch.randperm(owners * pages, generator=generator, device=device).view(owners, pages)
    indices = torch.empty(case.rows, case.k, dtype=torch.int32, device=device)
    for first in range(0, case.rows, 256):
        rows = torch.arange(first, min(first + 256, case.rows), device=device)
        columns = torch.rand(len(rows), case.columns, generator=generator, device=device).topk(case.k, 1).indices
        page = table[rows[:, None] if owners > 1 else 0, columns // PAGE_SIZE]
        indices[rows] = (page * PAGE_SIZE + columns % PAGE_SIZE).int()
    out, lse = q.new_empty(case.rows, case.heads, VALUE_DIM), torch.empty(case.rows, case.heads, device=device)
    return Call(q, kv, indices, case.layout, out, lse)


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    kernels: Sequence[str] = (),
    seconds: float = 1.5,
    done: Callable[[Case, Entry], None] | None = None,
) -> dict[str, Entry]:
    """Time `cases`, cold, and return their entries by name, each given to `done` as soon as it is there.

    kernels  kernels of sparse_mla by name; what a call gets with a workspace, and without, where none is given
    """
    clock = clock_of(device, "cold", seconds)
    return run_cases(cases, clock, lambda case: run_case(case, clock, kernels), done)


def run_case(case: Case, clock: Clock, kernels: Sequence[str]) -> Entry:
    """One case: everything that was measured on it."""
    device = clock.device
    owners = case.rows if case.phase == "decode" else 1
    size = owners * case.columns * case.layout.width * case.layout.dtype.itemsize
    calls = [build(case, device, n) for n in range(max(1, min(INPUTS, BYTES[device.type] // size)))]
    clock.use(len(calls), case.read_bytes, None)
    choices = [
        dispatch.choose("sparse_mla", api.KERNELS, calls[0].problem(may_allocate=may)).name for may in (False, True)
    ]
    ours = list(kernels or dict.fromkeys(choices))
    variants = [_ours(name, calls) for name in ours]
    if not dict(dispatch.explain(api.KERNELS, calls[0].problem(may_allocate=True)))["flash_mla"]:
        variants.append(_flash_mla(calls))
    expected = [_expected(case, call) for call in calls]
    given: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    results, _ = time_right(
        clock,
        variants,
        lambda variant: _fault(case, calls, expected, clock, variant, given),
        lambda time: _entry(case, time),
    )
    return {
        **asdict(case),
        "inputs": len(calls),
        "chosen": choices[1],
        "chosen_with_workspace": choices[0],
        "read_bytes": case.read_bytes,
        "operations": case.operations,
        "kernels": {name: results.pop(name) for name in ours},
        "others": results,
    }


def _ours(name: str, calls: Sequence[Call]) -> Variant:
    first = calls[0]
    lacks = dict(dispatch.explain(api.KERNELS, first.problem(may_allocate=False)))[name]
    workspace = None  # a kernel that allocates refuses one; whatever else it lacks, the call says
    if not lacks:
        size = sparse_mla_workspace_size(first.q, first.kv, first.indices.shape[1], layout=first.layout, kernel=name)
        workspace = torch.empty(size, dtype=torch.uint8, device=first.q.device)
    return Variant(name, lambda i: calls[i].launch(name, workspace))


def _flash_mla(calls: Sequence[Call]) -> Variant:
    """The package's own call, planned once, as it allows; what it returns is kept to be looked at, not copied."""
    flash_mla = importlib.import_module("flash_mla")
    plans = [flash_mla.get_mla_metadata()[0] for _ in calls]

    def launch(i: int) -> None:
        call = calls[i]
        indices = call.indices[:, None]
        if not call.layout.is_fp8:
            kv = call.kv.flatten(0, 1)[:, None]
            call.out, _, call.lse = flash_mla.flash_mla_sparse_fwd(call.q, kv, indices, SCALE, use_legacy=True)
            return
        out, lse = flash_mla.flash_mla_with_kvcache(
            call.q[:, None], call.kv.view(torch.float8_e4m3fn)[:, :, None], None, None, VALUE_DIM, plans[i],
            softmax_scale=SCALE, indices=indices, use_legacy=True,
        )  # fmt: skip
        call.out, call.lse = out.squeeze(1), lse.squeeze(2)

    return Variant("flash_mla alone", launch)


def _expected(case: Case, call: Call) -> Expected:
    """Some tokens of a call with the latents that they have selected, as float64."""
    rows = sampled(case.rows, SAMPLED_ROWS)
    slots = call.indices[rows].flatten()
    latents = gather_latent_cache(call.kv, slots, call.layout, dtype=torch.float32)
    places = torch.arange(len(slots), dtype=torch.int32).view(len(rows), case.k)
    return Expected(call.q[rows], call.kv, latents.double().cpu(), places, SCALE, None, None, call.layout)


def _fault(
    case: Case,
    calls: Sequence[Call],
    expected: Sequence[Expected],
    clock: Clock,
    variant: Variant,
    given: dict[str, list[tuple[torch.Tensor, torch.Tensor]]],
) -> str | None:
    """What is wrong with the results of `variant`, run once more over poison, or None.

    given  where each variant's results went: a graph that is replayed writes where it wrote when it was captured
    """
    own, rows = [(call.out, call.lse) for call in calls], sampled(case.rows, SAMPLED_ROWS)
    try:
        for call, (out, lse) in zip(calls, given.get(variant.name, own), strict=True):
            call.out, call.lse = out.fill_(torch.nan), lse.fill_(torch.nan)
        clock.replay(variant)
        given[variant.name] = [(call.out, call.lse) for call in calls]
        for number, (call, right) in enumerate(zip(calls[: clock.inputs], expected, strict=False)):
            for what, times in zip(("out", "lse"), excess(call.out[rows], call.lse[rows], right), strict=True):
                if times > 1:
                    return f"input {number}: {what} is {times:.3g} times as far from float64 as it may be"
    finally:
        for call, (out, lse) in zip(calls, own, strict=True):
            call.out, call.lse = out, lse
    return None


def _entry(case: Case, time: Time) -> Entry:
    return rates(time, case.read_bytes, case.operations)
