"""sparse_mla on a CPU: gather, then two matrix products.

Parallel within a product and a gather (torch's threads). The latents of a token, or of as many small ones as fit the
cache, are gathered as float32 into a buffer that is used again, and serve as keys and as values while they are warm;
the softmax works in place on the logits. Bound by the gather for few heads, by arithmetic for many.
"""

import torch

from keysift.layout import TILE, take

#: Bytes of gathered latents and logits at a time; one token of V3.2's sizes. Ten times as many are half as fast.
BYTES = 6 << 20


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
    """Write `out` [T, heads, value_dim] and `lse` [T, heads]."""
    tokens, heads, dim = q.shape
    k = indices.shape[1]
    if topk_length is not None:
        indices = indices.where(torch.arange(k, device="cpu") < topk_length[:, None], -1)
    chunk = min(tokens, max(1, BYTES // (4 * k * (dim + heads))))
    latents, logits = (q.new_empty(chunk * k * width, dtype=torch.float32) for width in (dim, heads))
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        size, slots = part.stop - first, indices[part]
        if bool((slots < 0).any()):  # what stands behind the last key that one of these tokens selected costs nothing
            used = (slots >= 0).any(0).nonzero()
            slots = slots[:, : int(used[-1]) + 1 if len(used) else 1]
        absent = slots < 0 if bool((slots < 0).any()) else None
        slots, live = slots if absent is None else slots.clamp(min=0), slots.shape[1]
        if int(slots.max()) >= kv.shape[0] * kv.shape[1]:
            raise IndexError(f"indices hold slot {int(slots.max())}; kv has {kv.shape[0] * kv.shape[1]}")
        gathered = latents[: size * live * dim].view(size, live, dim)
        _gather(kv, scales, rope, slots.flatten(), gathered.view(-1, dim))
        scaled, weighed = q[part].float() * scale, logits[: size * heads * live].view(size, heads, live)
        _attend(scaled, gathered, absent, weighed, sink, out[part], lse[part])


def _gather(
    kv: torch.Tensor, scales: torch.Tensor | None, rope: torch.Tensor | None, slots: torch.Tensor, latents: torch.Tensor
) -> None:
    """Write the latents of slots [n] as float32 [n, D]."""
    pages, size, dim = kv.shape
    if scales is not None and rope is not None:
        page, offset = slots // size, slots % size
        torch.mul(take(kv, page, offset).float(), scales[page, offset].repeat_interleave(TILE, 1), out=latents[:, :dim])
        latents[:, dim:] = rope[page, offset]
    elif pages > 1 and size > 1 and kv.stride(0) != size * kv.stride(1):  # gaps between the pages
        latents.copy_(kv[slots // size, slots % size])
    elif kv.dtype == torch.float32:
        torch.index_select(kv.reshape(pages * size, dim), 0, slots, out=latents)
    else:
        latents.copy_(kv.reshape(pages * size, dim).index_select(0, slots))


def _attend(
    q: torch.Tensor,
    latents: torch.Tensor,
    absent: torch.Tensor | None,
    logits: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Some tokens, q times the scale; logits [T, heads, k] is written over."""
    if absent is not None:
        latents.masked_fill_(absent.unsqueeze(-1), 0.0)  # slot 0 stood in for them, and it may hold NaN
    torch.bmm(q, latents.transpose(1, 2), out=logits)
    if absent is not None:
        logits.masked_fill_(absent.unsqueeze(1), -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = logits.sub_(shift).exp_().sum(-1, keepdim=True)
    summed = torch.bmm(logits, latents[..., : out.shape[2]])
    summed.div_(total.masked_fill(total == 0, 1.0))
    torch.add(highest.squeeze(-1), total.squeeze(-1).log_(), out=lse)
    if sink is not None:
        summed *= (lse - sink).sigmoid_().masked_fill_(lse == -torch.inf, 0.0).unsqueeze(-1)
    out.copy_(summed)
