"""sparse_mla: attention over the selected latents. CONTRACT.md, sparse_mla, is what every kernel here means."""

from dataclasses import dataclass

import torch

from keysift import dispatch
from keysift.dispatch import Device, Kernel

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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over the latents that were selected for it; all heads share them (MLA, absorbed).

    q          [T, heads, D] float32, bfloat16 or float16: the latent part, then the RoPE part
    kv         [N, D], or [pages, page_size, D] where a slot is `page * page_size + offset`; float32, bfloat16 or
               float16. One row is the key; its first value_dim columns are the value
    indices    [T, k] int32 slots; -1, at any position, takes no part; a duplicate counts twice, the caller's error
    scale      what q . kv is multiplied by before the softmax
    value_dim  columns of the value, 512 in V3.2 and GLM-5, at most D
    out        [>= T, heads, value_dim] of q's dtype; lse  float32 [>= T, heads]; contiguous rows
    kernel     a kernel of `keysift explain sparse_mla` by name; it runs or raises

    Returns (out [T, heads, value_dim], lse [T, heads]): lse is the natural logarithm of the sum of exponentials. A
    token without any valid index gets out = 0 and lse = -inf. Sums are accumulated in float32. What rows of kv that are
    not selected hold (NaN, stale data) does not matter.
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
    checks.check_latents(q, kv, value_dim)
    checks.check_indices(q, indices)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale is {scale!r}; it must be a number")
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, value_dim)
    if lse is None:
        lse = q.new_empty(tokens, heads, dtype=torch.float32)
    checks.check_out(q, "out", out, q.dtype, (heads, value_dim))
    checks.check_out(q, "lse", lse, torch.float32, (heads,))
    torch.ops.keysift.sparse_mla(q, kv, indices, float(scale), out, lse, kernel)
    return _first(out, q.shape[0]), _first(lse, q.shape[0])


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


def _sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str | None,
) -> None:
    """The operator: choose a kernel from static facts and run it."""
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
    chosen.load()(q, kv.flatten(0, -2), indices, scale, out[:tokens], lse[:tokens])


def _sparse_mla_fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_LIBRARY.define(
    "sparse_mla(Tensor q, Tensor kv, Tensor indices, float scale, Tensor(a!) out, Tensor(b!) lse, str? kernel) -> ()"
)
_LIBRARY.impl("sparse_mla", _sparse_mla, "CompositeExplicitAutograd")
torch.library.register_fake("keysift::sparse_mla", _sparse_mla_fake, lib=_LIBRARY)
