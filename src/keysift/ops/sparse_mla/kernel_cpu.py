"""sparse_mla on a CPU: gather, then two batched matrix products.

Parallel over tokens and heads (torch's threads). The selected latents of some tokens are gathered once as float32 and
serve as keys and as values; the softmax works in place on the logits. Bound by the gather for few heads, by arithmetic
for many.
"""

import torch

from keysift.layout import TILE

#: Bytes of gathered latents and logits at a time; a decode step of 16 requests at V3.2's sizes.
BYTES = 96 << 20


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
    workspace: torch.Tensor,
) -> None:
    """Write `out` [T, heads, value_dim] and `lse` [T, heads]."""
    if topk_length is not None:
        indices = indices.where(torch.arange(indices.shape[1]) < topk_length[:, None], -1)
    chunk = max(1, BYTES // (4 * indices.shape[1] * (q.shape[2] + q.shape[1])))
    for first in range(0, q.shape[0], chunk):
        part = slice(first, first + chunk)
        absent = indices[part] < 0
        padded = bool(absent.any())
        slots = indices[part].clamp(min=0) if padded else indices[part]
        latents = _gather(kv, scales, rope, slots.flatten()).view(*slots.shape, q.shape[2])
        _attend(q[part].float(), latents, absent if padded else None, scale, out[part], lse[part])
        if sink is not None:
            out[part] *= (lse[part] - sink).sigmoid_().masked_fill_(lse[part] == -torch.inf, 0.0).unsqueeze(-1)


def _gather(
    kv: torch.Tensor, scales: torch.Tensor | None, rope: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """The latents of slots [n] as float32 [n, D]."""
    pages, size, dim = kv.shape
    if scales is None or rope is None:
        if pages == 1 or size == 1 or kv.stride(0) == size * kv.stride(1):  # no gaps between the pages
            return kv.reshape(pages * size, dim).index_select(0, slots).float()
        return kv[slots // size, slots % size].float()
    page, offset = slots // size, slots % size
    latents = torch.empty(len(slots), dim + rope.shape[2])
    values = kv.view(torch.uint8)[page, offset].view(kv.dtype)  # torch indexes no fp8
    torch.mul(values.float(), scales[page, offset].repeat_interleave(TILE, 1), out=latents[:, :dim])
    latents[:, dim:] = rope[page, offset]
    return latents


def _attend(
    q: torch.Tensor,
    latents: torch.Tensor,
    absent: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if absent is not None:
        latents.masked_fill_(absent.unsqueeze(-1), 0.0)  # slot 0 stood in for them, and it may hold NaN
    logits = torch.bmm(q, latents.transpose(1, 2)).mul_(scale)  # [T, heads, k]
    if absent is not None:
        logits.masked_fill_(absent.unsqueeze(1), -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = logits.sub_(shift).exp_().sum(-1, keepdim=True)
    summed = torch.bmm(logits, latents[..., : out.shape[2]])
    out.copy_(summed.div_(total.masked_fill(total == 0, 1.0)))
    torch.add(highest.squeeze(-1), total.squeeze(-1).log_(), out=lse)
