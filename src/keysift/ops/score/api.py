"""score: the index logits of every query row. CONTRACT.md, score, is what every kernel here means."""

from dataclasses import dataclass

import torch

from keysift import dispatch, kernels
from keysift.dispatch import Device, Kernel
from keysift.layout import IndexLayout

from . import checks


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts that decide which kernel scores."""

    device: Device
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    rows: int
    columns: int
    heads: int
    head_dim: int
    page_size: int = 0  # 0: keys in one piece
    next_n: int = 1
    is_aligned: bool = True  # every page begins at a multiple of 16 bytes
    may_allocate: bool = True  # the caller gave no `out`

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        form = f"pages of {self.page_size}" if self.page_size else "ragged"
        return f"{self.k_dtype} keys ({form}) on {self.device}".removeprefix("torch.")


def _unmet_triton(problem: Problem) -> list[str]:
    fits = problem.heads <= 256 and problem.head_dim <= 256
    return [
        *kernels.unmet_triton(problem.device),
        *([] if fits else [f"heads are {problem.heads} of {problem.head_dim}, needs at most 256 of 256"]),
        *_unmet_fp8(problem),
    ]


def _unmet_deep_gemm(problem: Problem) -> list[str]:
    p, most = problem, 2 if problem.device.arch == "sm_90" else 64
    facts = (
        (p.device.arch in ("sm_90", "sm_100"), f"device is {p.device}, needs cuda:sm_90 or cuda:sm_100"),
        (p.device.has("deep_gemm"), "the package deep_gemm is not installed"),
        (p.q_dtype == torch.float8_e4m3fn, f"queries are {p.q_dtype}, needs torch.float8_e4m3fn"),
        (p.k_dtype == torch.float8_e4m3fn, f"keys are {p.k_dtype}, needs torch.float8_e4m3fn"),
        (p.heads in (32, 64), f"heads are {p.heads}, needs 32 or 64"),
        (p.head_dim in (32, 64, 128), f"head size is {p.head_dim}, needs 32, 64 or 128"),
        (p.page_size in (0, 64), f"pages have {p.page_size} tokens, needs 64"),
        (p.is_aligned, "pages begin anywhere, needs multiples of 16 bytes"),
        (p.page_size == 0 or p.rows <= 4096, f"{p.rows} rows are decoded, needs at most 4096, for its plan"),
        (p.next_n <= most, f"next_n is {p.next_n}, needs at most {most}"),
        (p.may_allocate, "out is given, so nothing may be allocated; it allocates its results"),
    )
    return [reason for is_met, reason in facts if not is_met]


def _unmet_fp8(problem: Problem) -> list[str]:
    """Chips convert and multiply their own fp8 only."""
    arch = problem.device.arch
    if not arch:
        return []
    formats = {str(dtype).removeprefix("torch.float8_") for dtype in (problem.q_dtype, problem.k_dtype)}
    own = "e4m3fnuz" if arch.startswith("gfx94") else "" if arch.startswith(("sm_7", "sm_80", "sm_86")) else "e4m3fn"
    foreign = sorted((formats & {"e4m3fn", "e4m3fnuz"}) - {own})
    needs = f"needs float8_{own}" if own else "which has no fp8"
    return [f"dtype is float8_{foreign[0]} on {problem.device}, {needs}"] if foreign else []


KERNELS = (
    Kernel("cpu", kernels.unmet_cpu, "keysift.ops.score.kernel_cpu:run"),
    Kernel("triton", _unmet_triton, "keysift.ops.score.kernel_triton:run"),
    Kernel("deep_gemm", _unmet_deep_gemm, "keysift.ops.score.kernel_deep_gemm:run"),  # its copy takes time too
    Kernel("reference", kernels.unmet_nothing, "keysift.ops.score.reference:run"),
)


def index_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """The index logits of packed queries against keys in one piece: prefill.

    q             [M, H, D] float32, bfloat16, float16, float8_e4m3fn or float8_e4m3fnuz
    k             [N, D] any of these, not necessarily the one of q
    k_scale       [N] float32, one per key, or None for 1
    weights       [M, H] float32; query scale, D**-0.5 and H**-0.5 are folded in by the caller
    starts, ends  [M] int32 or int64: row m is scored against keys [start, end); clamped; default [0, N)
    out           float32 [>= M, >= N], any row stride
    kernel        a kernel of `keysift explain score` by name; it runs or raises

    Returns float32 [M, N] (or `out`), accumulated in float32. A cell outside its row's window is not written: it holds
    whatever the memory held. The scores of one row do not depend on the other rows of the call.
    Raises ValueError or TypeError before anything is written.
    Formula: the lightning indexer of DeepSeek-V3.2 (DeepSeek-AI, 2025), ReLU before the head weight.

    Equivalent to, without windows:
        torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q, k).relu(), weights) * k_scale

    >>> q, k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[2.0, 3.0], [-4.0, 5.0]])
    >>> index_scores(q, k, None, torch.tensor([[1.0, 10.0]]))
    tensor([[32., 50.]])
    """
    checks.check_queries(q, weights)
    checks.check_keys(q, k, k_scale)
    checks.check_windows(q, starts, ends)
    (rows, columns), may_allocate = (q.shape[0], k.shape[0]), out is None
    if dispatch.checks_values():
        checks.check_window_values(columns, starts, ends)
    if out is None:
        out = q.new_empty(rows, columns, dtype=torch.float32)
    checks.check_out(q, out, columns)
    torch.ops.keysift.score(q, k, k_scale, weights, starts, ends, 1, None, out, kernel, may_allocate)
    return out if out.shape[0] == weights.shape[0] else out[: weights.shape[0]]


def paged_index_scores(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    next_n: int = 1,
    *,
    layout: IndexLayout | None = None,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """The index logits of decoding queries against a paged cache: `next_n` queries per request, windows from column 0.

    q            [B * next_n, H, D] float32, bfloat16, float16 or fp8; row b * next_n + j is query j of request b
    cache        [pages, page_size, D] float32, bfloat16 or float16, or what `layout` says; any page stride
    weights      [B * next_n, H] float32; query scale, D**-0.5 and H**-0.5 are folded in by the caller
    seq_lens     [B]: row b * next_n + j ends at seq_lens[b] - next_n + j + 1; or
                 [B, next_n]: that row ends at seq_lens[b, j]; int32 or int64, clamped to the columns
    block_table  [B, P] int32 or int64: column c of request b lies in page block_table[b, c // page_size]. Entries that
                 no row of the request reaches may hold anything
    layout       the format of the cache; needed where it is fp8 (uint8 [pages, page_size, D + 4])
    out          float32 [>= B * next_n, W], any row stride; W columns are scored at most, default P * page_size
    kernel       a kernel of `keysift explain score` by name; it runs or raises

    Returns float32 [B * next_n, W]; cells at or beyond a row's end are not written. A cache [B, T, D] of one piece per
    request is pages of T with the block table [[0], [1], ...].
    Raises ValueError or TypeError before anything is written.

    Equivalent to, for next_n = 1 and each request b:
        k = cache[block_table[b]].flatten(0, 1)
        index_scores(q[b : b + 1], k, None, weights[b : b + 1], ends=seq_lens[b : b + 1])

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> q, weights = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> paged_index_scores(q, cache, weights, torch.tensor([4]), torch.tensor([[1, 0]]))
    tensor([[3., 4., 1., 2.]])
    """
    checks.check_queries(q, weights)
    k, k_scale = checks.check_cache(q, cache, layout)
    ends, may_allocate = checks.check_requests(q, seq_lens, block_table, next_n), out is None
    if out is None:
        out = q.new_empty(q.shape[0], block_table.shape[1] * cache.shape[1], dtype=torch.float32)
    checks.check_out(q, out, 0)
    if dispatch.checks_values():
        checks.check_request_values(
            k, seq_lens, block_table, next_n, min(out.shape[1], block_table.shape[1] * k.shape[1])
        )
    torch.ops.keysift.score(q, k, k_scale, weights, None, ends, next_n, block_table, out, kernel, may_allocate)
    return out if out.shape[0] == weights.shape[0] else out[: weights.shape[0]]


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
    next_n: int = 1,
    *,
    may_allocate: bool = False,
) -> Problem:
    columns, page_size = (k.shape[0], 0) if block_table is None else (out.shape[1], k.shape[1])
    (rows, heads, head_dim), device = q.shape, dispatch.device_of(q.device)
    # The caching allocator gives multiples of more than 16 bytes, so the place in the storage tells.
    begins = k.storage_offset() | (k.stride(0) if page_size and k.shape[0] > 1 else 0)
    is_aligned = not page_size or not begins * k.element_size() % 16
    return Problem(
        device, q.dtype, k.dtype, rows, columns, heads, head_dim, page_size, next_n, is_aligned, may_allocate
    )  # fmt: skip


def _score(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    next_n: int,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
    kernel: str | None,
    may_allocate: bool = False,
) -> None:
    """The operator: choose a kernel from static facts and run it. `ends` holds one length per row or per request."""
    problem = _problem(q, k, block_table, out, next_n, may_allocate=may_allocate)
    chosen = dispatch.choose("score", KERNELS, problem, kernel)
    if problem.rows and problem.columns:
        with kernels.full_precision(q.device):
            chosen.load()(q, k, k_scale, weights, starts, ends, next_n, block_table, out[: problem.rows])


def _score_fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_LIBRARY.define(
    "score(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor? starts, Tensor? ends, int next_n, "
    "Tensor? block_table, Tensor(a!) out, str? kernel, bool may_allocate=False) -> ()"
)
_LIBRARY.impl("score", _score, "CompositeExplicitAutograd")
torch.library.register_fake("keysift::score", _score_fake, lib=_LIBRARY)
