"""sparse_mla: attention over the selected latents. CONTRACT.md, sparse_mla, is what every kernel here means."""

from dataclasses import dataclass

import torch

from keysift import dispatch
from keysift.dispatch import Device, Kernel
from keysift.layout import LatentLayout

from . import checks


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

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        return f"{self.dtype} queries on {self.kv_dtype} latents on {self.device}".replace("torch.", "")


def _unmet_cpu(problem: Problem) -> list[str]:
    return [] if problem.device.type == "cpu" else [f"device is {problem.device}, needs cpu"]


def _unmet_reference(problem: Problem) -> list[str]:
    return []


KERNELS = (
    Kernel("cpu", _unmet_cpu, "keysift.ops.sparse_mla.kernel_cpu:run"),
    Kernel("reference", _unmet_reference, "keysift.ops.sparse_mla.reference:run"),
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
    torch.ops.keysift.sparse_mla(q, latents, scales, rope, indices, float(scale), sink, topk_length, out, lse, kernel)
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
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla` as an engine's decode calls it: next_n query tokens per request against a paged cache.

    q            [B, next_n, heads, D]
    cache        [pages, page_size, ..], plain or as `layout` says
    indices      [B, next_n, k] int32 slots
    topk_length  [B, next_n]
    Everything else as `sparse_mla`, which also says what it raises.

    Returns (out [B, next_n, heads, value_dim], lse [B, next_n, heads]).

    Equivalent to:
        sparse_mla(q.flatten(0, 1), cache, indices.flatten(0, 1), scale)

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> q, slots = torch.zeros(1, 1, 1, 1), torch.tensor([[[3, 0, -1]]], dtype=torch.int32)
    >>> sparse_mla_decode(q, cache, slots, 1.0, value_dim=1)[0].item()
    2.5
    """
    checks.check_requests(q, indices, topk_length)
    out, lse = sparse_mla(
        q.flatten(0, 1), cache, indices.flatten(0, 1), scale, value_dim=value_dim, layout=layout, sink=sink,
        topk_length=None if topk_length is None else topk_length.flatten(), kernel=kernel,
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def combine_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint selections: parts of one selection, or shards of a context.

    outs  [S, ..., V] of S parts; lses  float32 [S, ...], natural logarithms
    Returns (out [..., V] of outs' dtype, lse float32 [...]); a part of lse -inf has selected nothing and takes no part,
    whatever its out holds. Raises ValueError where the shapes do not go together.

    Equivalent to:
        weights = lses.softmax(0)
        (weights[..., None] * outs).sum(0), lses.logsumexp(0)

    >>> outs, lses = torch.tensor([[1.0], [5.0], [torch.nan]]), torch.tensor([0.0, 0.0, -torch.inf])
    >>> combine_partials(outs, lses)
    (tensor([3.]), tensor(0.6931))
    """
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or len(lses) == 0:
        raise ValueError(
            f"lses has shape {list(lses.shape)}; outs has {list(outs.shape)}, [parts, ..., value_dim], so it must be "
            f"{list(outs.shape[:-1])}, with one part at least"
        )
    highest = lses.amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lses - shift).exp()
    total = weights.sum(0)
    parts = (outs.float() * weights[..., None]).masked_fill(weights[..., None] == 0, 0.0)
    out = parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(outs.dtype), shift + total.log()


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


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
    kernel: str | None,
) -> None:
    """The operator: choose a kernel from static facts and run it.

    kv [pages, page_size, D], or fp8 values [pages, page_size, value_dim] beside their scales and rotary parts.
    """
    tokens, heads, dim = q.shape
    problem = Problem(
        dispatch.device_of(q.device), q.dtype, kv.dtype, tokens, heads, dim, out.shape[2], indices.shape[1]
    )
    chosen = dispatch.choose("sparse_mla", KERNELS, problem, kernel)
    if dispatch.CHECK_VALUES:
        checks.check_values(kv, indices)
    if tokens == 0:
        return
    if problem.k == 0 or kv.numel() == 0:
        out[:tokens].zero_()
        lse[:tokens].fill_(-torch.inf)
        return
    chosen.load()(q, kv, scales, rope, indices, scale, sink, topk_length, out[:tokens], lse[:tokens])


def _sparse_mla_fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_LIBRARY.define(
    "sparse_mla(Tensor q, Tensor kv, Tensor? scales, Tensor? rope, Tensor indices, float scale, Tensor? sink, "
    "Tensor? topk_length, Tensor(a!) out, Tensor(b!) lse, str? kernel) -> ()"
)
_LIBRARY.impl("sparse_mla", _sparse_mla, "CompositeExplicitAutograd")
torch.library.register_fake("keysift::sparse_mla", _sparse_mla_fake, lib=_LIBRARY)
