"""What sparse_mla means, in torch, on any device. CONTRACT.md, sparse_mla."""

import torch

from keysift.layout import TILE, take

#: Latent elements gathered at a time; bounds the memory of the fallback without changing its result.
ELEMENTS = 1 << 26


@torch.no_grad()
def run(
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
) -> None:
    """Write `out` [T, heads, value_dim] and `lse` [T, heads], some tokens at a time."""
    if topk_length is not None:
        counts = torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
        indices = indices.where(counts, -1)
    chunk = max(1, ELEMENTS // (indices.shape[1] * q.shape[2]))
    for first in range(0, q.shape[0], chunk):
        part = slice(first, first + chunk)
        latents = gather(kv, scales, rope, indices[part])
        attend(q[part], latents, indices[part] >= 0, scale, sink, out[part], lse[part])


def gather(
    kv: torch.Tensor, scales: torch.Tensor | None, rope: torch.Tensor | None, indices: torch.Tensor
) -> torch.Tensor:
    """The selected latents [T, k, D] in float32, zeros for -1."""
    slot = indices.clamp(min=0).long()
    page, offset = slot // kv.shape[1], slot % kv.shape[1]
    if scales is None or rope is None:
        latents = kv[page, offset].float()
    else:
        values = take(kv, page, offset).float() * scales[page, offset].repeat_interleave(TILE, -1)
        latents = torch.cat((values, rope[page, offset].float()), -1)
    return latents.masked_fill((indices < 0)[..., None], 0.0)


def attend(
    q: torch.Tensor,
    latents: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """A few tokens, everything in float32."""
    logits = scale * torch.einsum("thd,tkd->thk", q.float(), latents)
    logits = logits.masked_fill(~valid[:, None], -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    # A token without any valid index has no highest logit: its exponentials are all exp(-inf) = 0.
    exponentials = (logits - highest.masked_fill(highest == -torch.inf, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    summed = torch.einsum("thk,tkd->thd", exponentials, latents[..., : out.shape[2]])
    sums = (highest + total.log()).squeeze(-1)
    result = summed / total.masked_fill(total == 0, 1.0)
    if sink is not None:  # its share of the sum is lost; nothing is lost of nothing
        result = result * (sums - sink).sigmoid().masked_fill(sums == -torch.inf, 0.0)[..., None]
    out.copy_(result)
    lse.copy_(sums)


@torch.no_grad()
def combine(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Join parts: outs [S, R, V], lses [S, R] -> out [R, V], lse [R]."""
    highest = lses.amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lses - shift).exp()
    total = weights.sum(0)
    # What a part of weight 0 holds is not a number to multiply: it may be NaN.
    parts = (outs.float() * weights[..., None]).masked_fill(weights[..., None] == 0, 0.0)
    out.copy_(parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None])
    lse.copy_(shift + total.log())
