"""sparse_mla on a CPU: gather, then two batched matrix products.

Parallel over tokens and heads (torch's threads). The selected latents of some tokens are gathered once as float32 and
serve as keys and as values; the softmax works in place on the logits. Bound by the gather for few heads, by arithmetic
for many.
"""

import torch

#: Bytes of gathered latents and logits at a time; a decode step of 16 requests at V3.2's sizes.
BYTES = 96 << 20


@torch.no_grad()
def run(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write `out` [T, heads, value_dim] and `lse` [T, heads]."""
    chunk = max(1, BYTES // (4 * indices.shape[1] * (kv.shape[1] + q.shape[1])))
    for first in range(0, q.shape[0], chunk):
        part = slice(first, first + chunk)
        _attend(q[part].float(), kv, indices[part], scale, out[part], lse[part])


def _attend(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    tokens, k = indices.shape
    absent = indices < 0
    padded = bool(absent.any())
    slots = indices.clamp(min=0) if padded else indices
    latents = kv.index_select(0, slots.flatten()).float().view(tokens, k, kv.shape[1])
    if padded:
        latents.masked_fill_(absent.unsqueeze(-1), 0.0)  # slot 0 stood in for them, and it may hold NaN
    logits = torch.bmm(q, latents.transpose(1, 2)).mul_(scale)  # [T, heads, k]
    if padded:
        logits.masked_fill_(absent.unsqueeze(1), -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = logits.sub_(shift).exp_().sum(-1, keepdim=True)
    summed = torch.bmm(logits, latents[..., : out.shape[2]])
    out.copy_(summed.div_(total.masked_fill(total == 0, 1.0)))
    torch.add(highest.squeeze(-1), total.squeeze(-1).log_(), out=lse)
