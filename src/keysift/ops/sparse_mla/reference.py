"""What sparse_mla means, in torch, on any device. CONTRACT.md, sparse_mla."""

import torch

#: Latent elements gathered at a time; bounds the memory of the fallback without changing its result.
ELEMENTS = 1 << 26


@torch.no_grad()
def run(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write `out` [T, heads, value_dim] and `lse` [T, heads], some tokens at a time."""
    chunk = max(1, ELEMENTS // (indices.shape[1] * kv.shape[1]))
    for first in range(0, q.shape[0], chunk):
        part = slice(first, first + chunk)
        attend(q[part], kv, indices[part], scale, out[part], lse[part])


def attend(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """A few tokens, everything in float32."""
    valid = indices >= 0  # [T, k]
    latents = kv[indices.clamp(min=0)].float().masked_fill(~valid[..., None], 0.0)  # [T, k, D]
    logits = scale * torch.einsum("thd,tkd->thk", q.float(), latents)
    logits = logits.masked_fill(~valid[:, None], -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    # A token without any valid index has no highest logit: its exponentials are all exp(-inf) = 0.
    exponentials = (logits - highest.masked_fill(highest == -torch.inf, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    summed = torch.einsum("thk,tkd->thd", exponentials, latents[..., : out.shape[2]])
    out.copy_(summed / total.masked_fill(total == 0, 1.0))
    lse.copy_((highest + total.log()).squeeze(-1))
