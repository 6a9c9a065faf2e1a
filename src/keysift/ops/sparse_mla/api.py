"""sparse_mla: attention over the selected latents. CONTRACT.md, sparse_mla, is what every kernel here means."""

from dataclasses import dataclass

import torch

from keysift import dispatch, kernels
from keysift.checks import FLOATS
from keysift.dispatch import Device, Kernel
from keysift.layout import LatentLayout

from . import checks, kernel_cuda_plan
from . import kernel_triton_plan as plans


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts that decide which kernel attends."""

    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rows: int
    heads: int
    dim: int
    value_dim: int
    k: int
    column_stride: int = 1  # of kv
    latent_dim: int = 0  # columns of an fp8 latent that have scales, at least value_dim; 0: kv is not fp8
    page_stride: int = 0  # of kv; 0: a slot is a row, whatever the page size
    is_aligned: bool = True  # every latent begins at a multiple of 16 bytes
    power_of_two: bool = False  # the scales of fp8 latents
    may_allocate: bool = True  # there is no workspace that the call must make do with

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        return f"{self.dtype} queries on {self.kv_dtype} latents on {self.device}".replace("torch.", "")


def _unmet_cuda(problem: Problem) -> list[str]:
    device, kv = problem.device, problem.kv_dtype
    wanted = (
        (f"dtype of q is {problem.dtype}", problem.dtype == torch.bfloat16, "bfloat16"),
        (f"dtype of kv is {kv}", kv in (torch.bfloat16, torch.float8_e4m3fn), "bfloat16 or float8_e4m3fn"),
        (f"head size is {problem.dim}", problem.dim == 576, "576"),
        (f"value_dim is {problem.value_dim}", problem.value_dim == 512, "512"),
        (f"scaled columns of kv are {problem.latent_dim}", problem.latent_dim in (0, 512), "512"),
        (f"column stride of kv is {problem.column_stride}", problem.column_stride == 1, "1"),
        # Latents times their scales are rounded to bfloat16: powers of two lose nothing.
        ("scales are any float32", not problem.latent_dim or problem.power_of_two, "LatentLayout(scale='ue8m0')"),
    )
    return [
        *([] if device.arch == "sm_90" else [f"device is {device}, needs cuda:sm_90"]),
        *kernels.unmet_nvrtc(device),
        *(f"{what.replace('torch.', '')}, needs {need}" for what, is_met, need in wanted if not is_met),
    ]


def _workspace_cuda(problem: Problem) -> int:
    return kernel_cuda_plan.workspace(problem.device.processors, problem.rows, problem.heads, problem.k)


def _unmet_flash_mla(problem: Problem) -> list[str]:
    p, is_fp8 = problem, problem.latent_dim > 0
    tile, sizes = (64 if is_fp8 else 128), (p.dim, p.latent_dim or 512, p.value_dim)
    facts = (
        (p.device.arch == "sm_90", f"device is {p.device}, needs cuda:sm_90"),
        (p.device.has("sgl-flash-mla"), "the package sgl-flash-mla is not installed"),
        (p.dtype == torch.bfloat16, f"queries are {p.dtype}, needs torch.bfloat16"),
        (is_fp8 or p.kv_dtype == torch.bfloat16, f"kv is {p.kv_dtype}, needs torch.bfloat16 or fp8"),
        (p.heads in (64, 128), f"heads are {p.heads}, needs 64 or 128"),
        (sizes == (576, 512, 512), f"latents are {p.dim} with values of {p.value_dim}, needs 576 with 512"),
        (p.k % tile == 0, f"k is {p.k}, needs a multiple of {tile} for this kv"),
        (p.column_stride == 1, f"column stride of kv is {p.column_stride}, needs 1"),
        (p.is_aligned, "latents begin anywhere, needs multiples of 16 bytes"),
        (is_fp8 or p.page_stride == 0, f"pages of bfloat16 are {p.page_stride} elements apart, needs no gaps"),
        (p.page_stride < 1 << 31, f"pages are {p.page_stride} bytes apart, needs less than 2**31"),
        # It rounds scales, and latents times their scales, to bfloat16.
        (not is_fp8 or p.power_of_two, "scales are any float32, needs powers of two: LatentLayout(scale='ue8m0')"),
        (p.may_allocate, "a workspace is given, so nothing may be allocated; it allocates its results"),
    )
    return [reason for is_met, reason in facts if not is_met]


def _unmet_triton(problem: Problem) -> list[str]:
    unmet = _unmet_gpu(problem)
    if problem.column_stride != 1:
        unmet.append(f"column stride of kv is {problem.column_stride}, needs 1")
    if problem.dim > 1024:
        unmet.append(f"head size is {problem.dim}, needs at most 1024")
    elif problem.device.type == "cpu":  # the interpreter has no shared memory
        return unmet
    elif (wanted := _plan(problem).shared) > (limit := plans.shared_limit(problem.device)):
        unmet.append(f"shared memory is {limit} bytes, needs {wanted} for latents of {problem.dim}")
    return unmet


def _unmet_gpu(problem: "Problem | Combination") -> list[str]:
    """What both Triton kernels here need."""
    device = problem.device
    old = device.type == "cuda" and int(device.arch.removeprefix("sm_")) < 80
    return [*([f"device is {device}, needs sm_80 or later"] if old else []), *kernels.unmet_triton(device)]


def _plan(problem: Problem) -> plans.Plan:
    p, latent_dim = problem, problem.latent_dim or problem.value_dim
    return plans.plan(p.device, p.dtype, p.kv_dtype, p.rows, p.heads, latent_dim, p.dim - latent_dim, p.k)


def _workspace_triton(problem: Problem) -> int:
    return _plan(problem).workspace(problem.rows, problem.heads, problem.value_dim)


KERNELS = (
    Kernel("cpu", kernels.unmet_cpu, "keysift.ops.sparse_mla.kernel_cpu:run"),
    Kernel("cuda", _unmet_cuda, "keysift.ops.sparse_mla.kernel_cuda:run", _workspace_cuda),
    Kernel("flash_mla", _unmet_flash_mla, "keysift.ops.sparse_mla.kernel_flash_mla:run"),
    Kernel("triton", _unmet_triton, "keysift.ops.sparse_mla.kernel_triton:run", _workspace_triton),
    Kernel("reference", kernels.unmet_nothing, "keysift.ops.sparse_mla.reference:run"),
)


@dataclass(frozen=True, slots=True)
class Combination:
    """The static facts that decide which kernel joins parts."""

    device: Device
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        return f"{self.dtype} parts on {self.device}".removeprefix("torch.")


COMBINE_KERNELS = (
    Kernel("triton", _unmet_gpu, "keysift.ops.sparse_mla.kernel_triton:combine"),
    Kernel("reference", kernels.unmet_nothing, "keysift.ops.sparse_mla.reference:combine"),
)


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    value_dim: int = 512,
    layout: LatentLayout | None = None,
    sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over the latents that were selected for it; all heads share them (MLA, absorbed).

    q            [T, heads, D] float32, bfloat16 or float16: the latent part, then the RoPE part
    kv           [N, D], or [pages, page_size, D] where a slot is `page * page_size + offset`; float32, bfloat16 or
                 float16, or what `layout` says; any page stride. One row is the key; its first value_dim columns are
                 the value
    indices      [T, k] int32 slots; -1, at any position, takes no part; a duplicate counts twice, the caller's error.
                 Columns of one request are slots of a kv that begins at its first column
    scale        what q . kv is multiplied by before the softmax
    value_dim    columns of the value, at most D; the default is that of V3.2 and GLM-5
    layout       the format of the cache; needed where it is fp8 (uint8 [pages, page_size, 656])
    sink         [heads] float32: a logit beside the selected ones that carries no value; it takes its share of the sum
    topk_length  [T] int32 or int64: how many indices of a row count, from the first on; default all
    out          [>= T, heads, value_dim] of q's dtype; lse  float32 [>= T, heads]; contiguous rows
    workspace    uint8 [>= sparse_mla_workspace_size(...)], scratch that the call overwrites; with it and out and lse,
                 nothing is allocated
    kernel       a kernel of `keysift explain sparse_mla` by name; it runs or raises

    Returns (out [T, heads, value_dim], lse [T, heads]): lse is the natural logarithm of the sum of exponentials,
    without the sink. A token without any valid index gets out = 0 and lse = -inf. Sums are accumulated in float32. What
    rows of kv that are not selected hold (NaN, stale data) does not matter. There is no gradient.
    Raises ValueError or TypeError before anything is written.
    Formula: multi-head latent attention of DeepSeek-V2 (2024) over the selection of DeepSeek-V3.2 (2025).

    Equivalent to, for one token without -1:
        logits = scale * q @ kv[indices].T
        logits.softmax(-1) @ kv[indices][:, :value_dim], logits.logsumexp(-1)

    >>> q, kv = torch.ones(1, 1, 2), torch.tensor([[1.0, 0.0], [torch.nan, 9.0], [3.0, -2.0]])
    >>> out, lse = sparse_mla(q, kv, torch.tensor([[2, -1, 0]], dtype=torch.int32), 1.0, value_dim=1)
    >>> out
    tensor([[[2.]]])
    """
    checks.check_queries(q)
    latents, scales, rope = checks.check_latents(q, kv, value_dim, layout)
    checks.check_indices(q, indices)
    checks.check_extras(q, sink, topk_length)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale is {scale!r}; it must be a number")
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, value_dim)
    if lse is None:
        lse = q.new_empty(tokens, heads, dtype=torch.float32)
    checks.check_out(q, "out", out, q.dtype, (heads, value_dim))
    checks.check_out(q, "lse", lse, torch.float32, (heads,))
    checks.check_workspace(q, workspace)
    attend = _OPERATOR if dispatch.is_watched(q) else _sparse_mla
    attend(
        q, latents, scales, rope, indices, float(scale), sink, topk_length, out, lse, workspace, kernel,
        layout is not None and layout.scale == "ue8m0",
    )  # fmt: skip
    return _first(out, q.shape[0]), _first(lse, q.shape[0])


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    value_dim: int = 512,
    layout: LatentLayout | None = None,
    sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla` as an engine's decode calls it: next_n query tokens per request against a paged cache.

    q            [B, next_n, heads, D]
    cache        [pages, page_size, ..], plain or as `layout` says
    indices      [B, next_n, k] int32 slots
    topk_length  [B, next_n]
    out          [B, next_n, heads, value_dim] of q's dtype; lse  float32 [B, next_n, heads]; contiguous
    Everything else as `sparse_mla`, which also says what it raises.

    Returns (out [B, next_n, heads, value_dim], lse [B, next_n, heads]).

    Equivalent to:
        sparse_mla(q.flatten(0, 1), cache, indices.flatten(0, 1), scale)

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> q, slots = torch.zeros(1, 1, 1, 1), torch.tensor([[[3, 0, -1]]], dtype=torch.int32)
    >>> sparse_mla_decode(q, cache, slots, 1.0, value_dim=1)[0].item()
    2.5
    """
    checks.check_requests(q, indices, topk_length, out, lse)
    attended, sums = sparse_mla(
        q.flatten(0, 1), cache, indices.flatten(0, 1), scale, value_dim=value_dim, layout=layout, sink=sink,
        topk_length=None if topk_length is None else topk_length.flatten(),
        out=None if out is None else out.flatten(0, 1), lse=None if lse is None else lse.flatten(0, 1),
        workspace=workspace, kernel=kernel,
    )  # fmt: skip
    return attended.unflatten(0, q.shape[:2]), sums.unflatten(0, q.shape[:2])


def sparse_mla_workspace_size(
    q: torch.Tensor,
    kv: torch.Tensor,
    k: int,
    *,
    value_dim: int = 512,
    layout: LatentLayout | None = None,
    kernel: str | None = None,
) -> int:
    """Bytes of `workspace` with which `sparse_mla` or `sparse_mla_decode` allocates nothing; 0 where none is wanted.

    q, kv, value_dim, layout and kernel are those of the call; k is the width of its indices. The size depends on
    shapes, dtypes and the device alone. Raises ValueError or TypeError as the call does.

    >>> q, kv = torch.empty(2, 128, 576), torch.empty(64, 576)
    >>> sparse_mla_workspace_size(q, kv, 2048) >= 0
    True
    """
    flat = q.flatten(0, 1) if isinstance(q, torch.Tensor) and q.ndim == 4 else q
    checks.check_queries(flat)
    latents, _, rope = checks.check_latents(flat, kv, value_dim, layout)
    checks.check_k(k)
    ue8m0 = layout is not None and layout.scale == "ue8m0"
    problem = _problem(flat, latents, rope, value_dim, k, power_of_two=ue8m0, may_allocate=False)
    return dispatch.choose("sparse_mla", KERNELS, problem, kernel).workspace_size(problem)


def combine_partials(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint selections: parts of one selection, or shards of a context.

    outs    [S, ..., V] float32, bfloat16 or float16 of S parts; lses  float32 [S, ...], natural logarithms
    out     [..., V] of any of these dtypes, default that of outs; lse  float32 [...]; contiguous
    kernel  "triton" or "reference"; it runs or raises

    Returns (out, lse). A part of lse -inf has selected nothing and takes no part, whatever its out holds; where all
    are, out is 0 and lse -inf. Sums are accumulated in float32, in the order of the parts. A sink belongs to the whole:
    give it to none of the parts. There is no gradient.
    Raises ValueError or TypeError before anything is written.

    Equivalent to:
        weights = lses.softmax(0)
        (weights[..., None] * outs).sum(0), lses.logsumexp(0)

    >>> outs, lses = torch.tensor([[1.0], [5.0], [torch.nan]]), torch.tensor([0.0, 0.0, -torch.inf])
    >>> combine_partials(outs, lses)
    (tensor([3.]), tensor(0.6931))
    """
    checks.check_parts(outs, lses)
    if out is None:
        out = outs.new_empty(outs.shape[1:])
    if lse is None:
        lse = lses.new_empty(lses.shape[1:])
    checks.check_combined(outs, "out", out, FLOATS, outs.shape[1:])
    checks.check_combined(outs, "lse", lse, (torch.float32,), lses.shape[1:])
    torch.ops.keysift.combine_partials(outs, lses, out, lse, kernel)
    return out, lse


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


def _problem(
    q: torch.Tensor,
    kv: torch.Tensor,
    rope: torch.Tensor | None,
    value_dim: int,
    k: int,
    *,
    power_of_two: bool,
    may_allocate: bool,
) -> Problem:
    (rows, heads, dim), (page, row, column) = q.shape, kv.stride()
    device = dispatch.device_of(q.device)
    latent_dim = 0 if rope is None else kv.shape[2]
    if kv.shape[0] < 2 or page == kv.shape[1] * row:
        page = 0
    # The caching allocator gives multiples of more than 16 bytes, so the place in the storage tells.
    offset = 0 if torch.compiler.is_compiling() else kv.storage_offset()  # a trace does not know it
    is_aligned = not (offset | page | row) * kv.element_size() % 16
    column = column if kv.shape[2] > 1 else 1
    return Problem(
        device, q.dtype, kv.dtype, rows, heads, dim, value_dim, k, column, latent_dim, page, is_aligned, power_of_two,
        may_allocate,
    )  # fmt: skip


def _sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    rope: torch.Tensor | None,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
    kernel: str | None,
    power_of_two: bool = False,
) -> None:
    """The operator: choose a kernel from static facts and run it.

    kv [pages, page_size, D], or fp8 values [pages, page_size, value_dim] beside their scales and rotary parts.
    """
    problem = _problem(
        q, kv, rope, out.shape[2], indices.shape[1], power_of_two=power_of_two, may_allocate=workspace is None
    )
    tokens = problem.rows
    chosen = dispatch.choose("sparse_mla", KERNELS, problem, kernel)
    size = chosen.workspace_size(problem)
    if workspace is not None and workspace.numel() < size:
        raise ValueError(f"workspace has {workspace.numel()} bytes; this call needs {size}")
    if dispatch.CHECK_VALUES:
        checks.check_values(kv, indices, topk_length)
    if tokens == 0:
        return
    if problem.k == 0 or kv.numel() == 0:
        out[:tokens].zero_()
        lse[:tokens].fill_(-torch.inf)
        return
    if workspace is None and size:
        workspace = q.new_empty(size, dtype=torch.uint8)
    with kernels.full_precision(q.device):
        chosen.load()(q, kv, scales, rope, indices, scale, sink, topk_length, out[:tokens], lse[:tokens], workspace)


def _combine_partials(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, kernel: str | None
) -> None:
    """The operator: rows are flattened, a view where they follow one another."""
    problem = Combination(dispatch.device_of(outs.device), outs.dtype)
    chosen = dispatch.choose("combine_partials", COMBINE_KERNELS, problem, kernel)
    if out.numel():
        parts, value_dim = outs.shape[0], outs.shape[-1]
        rows = outs.reshape(parts, -1, value_dim), lses.reshape(parts, -1), out.view(-1, value_dim), lse.view(-1)
        with kernels.full_precision(outs.device):
            chosen.load()(*rows)
    else:
        lse.copy_(lses.logsumexp(0))


def _fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_LIBRARY.define(
    "sparse_mla(Tensor q, Tensor kv, Tensor? scales, Tensor? rope, Tensor indices, float scale, Tensor? sink, "
    "Tensor? topk_length, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace, str? kernel, "
    "bool power_of_two=False) -> ()"
)
_LIBRARY.define("combine_partials(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse, str? kernel) -> ()")
for _name, _function in (("sparse_mla", _sparse_mla), ("combine_partials", _combine_partials)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    # Nothing here has a gradient; without this, every call pays for a check of that.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"keysift::{_name}", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.keysift.sparse_mla.default
