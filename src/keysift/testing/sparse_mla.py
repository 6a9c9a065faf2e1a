"""`check_sparse_mla`: a kernel of sparse_mla against float64, by the lines of CONTRACT.md."""

from dataclasses import dataclass, replace

import torch

from keysift import dispatch
from keysift.layout import LatentLayout
from keysift.ops.sparse_mla import api, checks, combine_partials, sparse_mla, sparse_mla_workspace_size

from .report import Line, Report, same

EPS = 2.0**-24  # half a unit in the last place of float32
FORMULA = "sparse_mla 1: the formula, float32 sums"
INDICES = "sparse_mla 2: -1 anywhere, nothing selected"
SINK = "sparse_mla 3: attention sink, topk_length"
PARTS = "sparse_mla 4: parts joined"
OUTPUT = "every operation: outputs and workspace, nothing beside them"
REPEAT = "every operation: same bits on every run"
REFUSED = "refused input"
#: Selected slots of a token: all of k, holes anywhere, holes at the ends only, a single one, nothing.
HOLES = ("none", "some", "ends", "one", "all")


@dataclass(frozen=True, slots=True)
class Attention:
    """One case: sizes, formats, and what is asked for beyond the formula."""

    tokens: int
    heads: int
    dim: int
    value_dim: int
    k: int
    dtype: torch.dtype = torch.float32
    page_size: int = 0  # 0: latents in one piece; otherwise pages lie apart
    fp8: bool = False
    power_of_two: bool = False  # the scales of fp8
    holes: str = "none"
    sink: bool = False
    lengths: bool = False
    spread: float = 1.0  # of the logits

    @property
    def lines(self) -> list[str]:
        """The lines of the contract that the case shows."""
        return [
            FORMULA, *([INDICES] if self.holes != "none" else []), *([SINK] if self.sink or self.lengths else []),
            OUTPUT, REPEAT,
        ]  # fmt: skip


def cases() -> list[Attention]:
    """Every dtype and format, odd and even sizes, V3.2's token, every kind of hole."""
    v32 = Attention(1, 16, 576, 512, 70)
    wide = Attention(2, 64, 576, 512, 128, torch.bfloat16)
    paged = replace(wide, fp8=True, power_of_two=True, page_size=64)
    small = Attention(3, 3, 24, 16, 40)
    return [
        *(replace(small, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *(replace(small, holes=holes, page_size=3) for holes in HOLES),
        replace(small, dim=5, value_dim=2, heads=1, k=1, page_size=1),
        replace(small, dim=36, value_dim=36, heads=17, dtype=torch.float16, page_size=4),
        replace(small, sink=True, lengths=True, holes="some", page_size=8),
        replace(small, spread=1000.0, sink=True),
        replace(v32, dtype=torch.bfloat16, page_size=64, holes="some"),
        replace(v32, fp8=True, page_size=64, holes="ends", sink=True, lengths=True),
        replace(v32, fp8=True, dtype=torch.bfloat16, page_size=7),
        # What kernels of other packages take: 64 or 128 heads, whole tiles of k.
        replace(wide, holes="some"),
        replace(wide, holes="all", sink=True, lengths=True),
        *(replace(paged, holes=holes) for holes in ("some", "all")),
        replace(paged, heads=128, tokens=1, holes="ends", sink=True, lengths=True),
    ]


@dataclass(slots=True)
class Call:
    """The tensors of a case."""

    q: torch.Tensor
    kv: torch.Tensor  # what the kernel gets
    numbers: torch.Tensor  # the latents that it means, float64 [slots, D]
    indices: torch.Tensor
    scale: float
    sink: torch.Tensor | None
    lengths: torch.Tensor | None
    layout: LatentLayout | None


def build(case: Attention, device: torch.device | str, seed: int) -> Call:
    """Random tensors; whatever is not selected is NaN, and so is the room between pages."""
    generator = torch.Generator().manual_seed(seed)
    size = max(case.page_size, 1)
    slots = size * (2 * case.k // size + 2)
    q = (torch.randn(case.tokens, case.heads, case.dim, generator=generator) * case.spread**0.5).to(case.dtype)
    indices = torch.stack([torch.randperm(slots, generator=generator)[: case.k] for _ in range(case.tokens)]).int()
    place, chance = torch.arange(case.k), torch.rand(case.tokens, case.k, generator=generator)
    if case.holes == "some":
        indices[chance < 0.4] = -1
    elif case.holes == "ends":
        indices[:, (place < case.k // 3) | (place > 2 * case.k // 3)] = -1
    elif case.holes == "one":
        indices[:, 1:] = -1
    elif case.holes == "all":
        indices[::2] = -1
    lengths = torch.randint(-1, case.k + 2, (case.tokens,), generator=generator) if case.lengths else None
    used = indices if lengths is None else indices.where(place < lengths[:, None], -1)
    used = used[used >= 0].long().unique()
    latents = (torch.randn(len(used), case.dim, generator=generator) * case.spread**0.5).to(case.dtype)
    size = case.page_size or slots  # one piece is one page
    numbers = torch.full((slots, case.dim), torch.nan, dtype=torch.float64)
    layout = None
    if case.fp8:
        kind = "ue8m0" if case.power_of_two else "float32"
        layout = LatentLayout("e4m3fn", size, case.value_dim, case.dim - case.value_dim, kind)
        width = layout.width
        pool = torch.full((slots // size, size * width + 16), 0x7F, dtype=torch.uint8)  # NaN in fp8 and in float32
        kv = pool.as_strided((slots // size, size, width), (size * width + 16, width, 1))
        values, scales, rope = layout.views(kv)
        codes, page, offset = values.view(torch.uint8), used // size, used % size
        wide = (latents[:, : case.value_dim] * 100).clamp(-448, 448)  # beyond, some versions of torch make NaN
        codes[page, offset] = wide.to(torch.float8_e4m3fn).view(torch.uint8)
        factors = torch.rand(len(used), scales.shape[2], generator=generator) / 50
        scales[page, offset] = factors.log2().ceil().clamp(min=-9).exp2() if case.power_of_two else factors
        rope[page, offset] = latents[:, case.value_dim :].bfloat16()
        wide = scales[page, offset].double().repeat_interleave(128, 1)
        decoded = codes[page, offset].view(torch.float8_e4m3fn).double()
        numbers[used] = torch.cat((decoded * wide, rope[page, offset].double()), 1)
    else:
        pool = torch.full((slots // size, size + bool(case.page_size), case.dim), torch.nan, dtype=case.dtype)
        kv = pool[:, :size]
        kv[used // size, used % size] = latents
        numbers[used] = latents.double()
    sink = torch.randn(case.heads, generator=generator) if case.sink else None
    moved = [None if x is None else x.to(device) for x in (q, indices, sink, lengths)]
    # A copy would close the gaps between the pages.
    kv = kv if torch.device(device).type == "cpu" else pool.to(device).as_strided(kv.shape, kv.stride())
    return Call(moved[0], kv, numbers, moved[1], case.dim**-0.5, moved[2], moved[3], layout)  # type: ignore[arg-type]


def excess(out: torch.Tensor, lse: torch.Tensor, call: Call) -> tuple[float, float]:
    """How far `out` and `lse` are from float64, in units of what is allowed; above 1, a token or number is wrong.

    Allowed are float32 sums in any order, exponentials within a few units in the last place, each probability rounded
    once to the dtype of q, and the rounding of out.
    """
    worst_out = worst_lse = 0.0
    half_ulp = torch.finfo(out.dtype).eps / 2
    rounded = torch.finfo(call.q.dtype)
    indices = call.indices.cpu()
    if call.lengths is not None:
        indices = indices.where(torch.arange(indices.shape[1]) < call.lengths.cpu()[:, None], -1)
    for token, row in enumerate(indices):
        found, found_lse = out[token].double().cpu(), lse[token].double().cpu()
        latents = call.numbers[row[row >= 0].long()]
        if not len(latents):
            worst_out = max(worst_out, float("inf") if (found != 0).any() else 0.0)
            worst_lse = max(worst_lse, float("inf") if (found_lse != -torch.inf).any() else 0.0)
            continue
        queries, values = call.q[token].double().cpu(), latents[:, : out.shape[2]]
        logits = call.scale * queries @ latents.T
        off = (call.q.shape[2] + 8) * EPS * abs(call.scale) * queries.abs() @ latents.abs().T
        slack = 2 * off.amax(1, keepdim=True) + (len(latents) + 16) * EPS
        weights, sums = logits.softmax(-1), logits.logsumexp(-1)
        if call.sink is not None:
            weights = weights * (sums - call.sink.double().cpu()).sigmoid()[:, None]
            slack = 2 * slack + 8 * EPS * (sums.abs() + call.sink.double().cpu().abs())[:, None]
        wanted = weights @ values
        allowed = (slack + rounded.eps / 2) * (weights @ values.abs()) * 1.01 + half_ulp * wanted.abs()
        allowed += rounded.tiny * rounded.eps * values.abs().sum(0) + 1e-30  # probabilities too small for the dtype
        worst_out = max(worst_out, _ratio((found - wanted).abs(), allowed))
        worst_lse = max(worst_lse, _ratio((found_lse - sums).abs(), slack[:, 0] * 1.01 + 4 * EPS * sums.abs()))
    return worst_out, worst_lse


def _ratio(off: torch.Tensor, allowed: torch.Tensor) -> float:
    return float((off / allowed).nan_to_num(nan=torch.inf).max())


def sparse_mla_kernels(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """Every kernel of sparse_mla by name, with what it lacks on `device` for V3.2's sizes; nothing: it can be judged.

    >>> dict(sparse_mla_kernels("cpu"))["reference"]
    []
    """
    facts = dispatch.device_of(torch.device(device))
    problem = api.Problem(facts, torch.bfloat16, torch.bfloat16, 1, 128, 576, 512, 2048)
    return dispatch.explain(api.KERNELS, problem)


def check_sparse_mla(kernel: str | None = None, device: torch.device | str = "cpu", seed: int = 0) -> Report:
    """Judge a kernel of sparse_mla, by name or the one that is chosen, and report line by line.

    Outputs are poisoned and lie inside canaries, the workspace has the bytes that are asked for and no more, what is
    not selected is NaN, each call runs twice. The numbers are compared with float64, each within what float32 sums and
    the dtypes of the call allow. Cases that the kernel declares it cannot run are counted and left out. Raises
    ValueError for a kernel that does not exist or cannot run on `device`.

    >>> check_sparse_mla("reference").ok
    True
    """
    report = Report(f"sparse_mla {kernel or 'as chosen'}", seed, f"on {torch.device(device)}")
    report.lines = {name: Line(name) for name in (FORMULA, INDICES, SINK, PARTS, OUTPUT, REPEAT, REFUSED)}
    for number, case in enumerate(cases()):
        call = build(case, device, seed + number)
        if _unmet(call, case.value_dim, kernel):
            report.declined += 1
            continue
        found = dict(_findings(case, call, kernel))
        for name in case.lines:
            report.lines[name].count(found.get(name, ""), f"seed {seed + number}, {case}")
    for case in (replace(cases()[0], k=60, holes="some"), *(case for case in cases() if not case.page_size)):
        call = build(case, device, seed)
        if not _unmet(call, case.value_dim, kernel):
            break
    else:
        dispatch.choose("sparse_mla", api.KERNELS, _problem(call, case.value_dim, may_allocate=True), kernel)  # raises
    report.lines[PARTS].count(_parts(call, case.value_dim, kernel), f"seed {seed}, {case}")
    report.lines[REFUSED].count(_refusal(call, case.value_dim, kernel), str(case))
    return report


def _problem(call: Call, value_dim: int, *, may_allocate: bool) -> api.Problem:
    """The static facts of the call."""
    is_exact = call.layout is not None and call.layout.scale == "ue8m0"
    latents, _, rope = checks.check_latents(call.q, call.kv, value_dim, call.layout)
    return api._problem(  # noqa: SLF001 - the call's own facts
        call.q, latents, rope, value_dim, call.indices.shape[1], power_of_two=is_exact, may_allocate=may_allocate
    )


def _unmet(call: Call, value_dim: int, kernel: str | None, *, may_allocate: bool = True) -> list[str]:
    """What a named kernel lacks for the call."""
    reasons = dispatch.explain(api.KERNELS, _problem(call, value_dim, may_allocate=may_allocate))
    return dict(reasons).get(kernel or "", [])


def _options(call: Call, value_dim: int, kernel: str | None) -> dict[str, object]:
    return {
        "value_dim": value_dim, "layout": call.layout, "sink": call.sink, "topk_length": call.lengths, "kernel": kernel
    }  # fmt: skip


def _findings(case: Attention, call: Call, kernel: str | None) -> list[tuple[str, str]]:
    """What the case breaks, by line."""
    options, has_workspace = _options(call, case.value_dim, kernel), not _unmet(
        call, case.value_dim, kernel, may_allocate=False
    )  # fmt: skip
    size = sparse_mla_workspace_size(
        call.q, call.kv, case.k, value_dim=case.value_dim, layout=call.layout, kernel=kernel
    ) if has_workspace else 0  # fmt: skip
    runs = []
    for fill in (torch.nan, 7.0):
        out = call.q.new_full((case.tokens + 2, case.heads, case.value_dim), fill)
        lse = call.q.new_full((case.tokens + 2, case.heads), fill, dtype=torch.float32)
        scratch = torch.full((size + 32,), 0x7F, dtype=torch.uint8, device=call.q.device)
        sparse_mla(
            call.q, call.kv, call.indices, call.scale, out=out[1:-1], lse=lse[1:-1],
            workspace=scratch[8 : 8 + size] if has_workspace else None, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        runs.append((out, lse, scratch))
    (out, lse, scratch), (again, lse_again, _) = runs
    edges = torch.tensor([0, -1], device=out.device)
    found = []
    if not (out[edges].isnan().all() and lse[edges].isnan().all()):
        found.append((OUTPUT, "a row beside those of the call was written"))
    if not ((scratch[:8] == 0x7F).all() and (scratch[8 + size :] == 0x7F).all()):
        found.append((OUTPUT, "more workspace was written than was asked for"))
    if not (same(out[1:-1], again[1:-1]) and same(lse[1:-1], lse_again[1:-1])):
        found.append((REPEAT, "a second run gives other bits"))
    for what, times in zip(("out", "lse"), excess(out[1:-1], lse[1:-1], call), strict=True):
        if times > 1:
            message = f"{what} is {times:.3g} times as far from float64 as is allowed"
            found += [(name, message) for name in case.lines[:-2]]
    return found


def _parts(call: Call, value_dim: int, kernel: str | None) -> str:
    """Three disjoint parts joined against the whole; one of them is empty."""
    owner = torch.arange(call.indices.shape[1], device=call.indices.device) % 2
    options = {"value_dim": value_dim, "kernel": kernel}
    pieces = [
        sparse_mla(call.q, call.kv, call.indices.where(owner == part, -1), call.scale, **options)  # type: ignore[arg-type]
        for part in range(3)
    ]
    outs, lses = torch.stack([out for out, _ in pieces]), torch.stack([lse for _, lse in pieces])
    outs[lses == -torch.inf] = torch.nan
    worst = max(excess(*combine_partials(outs, lses), call))
    return "" if worst <= 1 else f"joined parts are {worst:.3g} times as far from float64 as is allowed"


def _refusal(call: Call, value_dim: int, kernel: str | None) -> str:
    """A head size too few is refused, with its name, before anything is written."""
    out = call.q.new_full((*call.q.shape[:2], value_dim), torch.nan)
    try:
        sparse_mla(call.q[..., 1:], call.kv, call.indices, 1.0, value_dim=value_dim, out=out, kernel=kernel)
    except ValueError as error:
        if "kv has shape" in str(error) and out.isnan().all():
            return ""
        return f"refused with {error}"
    return "latents of another head size were not refused"
