"""cache on a CPU: torch's own indexed reads and writes, some tokens at a time.

Parallel inside torch's operations. BLOCK tokens at a time keep the float32 copies that quantising makes in the
second-level cache. Cost: a token is read once and written once.
"""

import itertools

import torch

from keysift.layout import FLOOR, FP8, LARGEST, TILE, IndexLayout, LatentLayout, take

BLOCK = 1024


@torch.no_grad()
def run(operation: str, *arguments: object) -> None:
    """Do `operation`."""
    OPERATIONS[operation](*arguments)  # type: ignore[operator]


def write_index(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: IndexLayout) -> None:
    """Write the keys [T, D] to their slots."""
    values, scales = layout.views(cache)
    for token, page, offset in _blocks(slots, layout.page_size):
        if scales is None:
            values[page, offset] = _as(k[token], values.dtype)
        else:
            codes, scale = _quantize(k[token].float(), layout)
            values.view(torch.uint8)[page, offset] = codes
            scales[page, offset] = scale


def write_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout) -> None:
    """Write the latents [T, value_dim + rope_dim] to their slots."""
    for token, page, offset in _blocks(slots, layout.page_size):
        part = latent[token]
        if not layout.is_fp8:
            cache[page, offset] = _as(part, cache.dtype)
            continue
        values, scales, rope = layout.views(cache)
        codes, scale = _quantize(part[:, : layout.value_dim].float().unflatten(1, (-1, TILE)), layout)
        values.view(torch.uint8)[page, offset] = codes.flatten(1)
        scales[page, offset] = scale
        rope[page, offset] = _as(part[:, layout.value_dim :], torch.bfloat16)


def gather_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    layout: IndexLayout,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    """Whole pages of one request after another."""
    values, scales = layout.views(cache)
    size, ends = layout.page_size, cu_seqlens.tolist()
    for request, (first, last) in enumerate(itertools.pairwise(ends)):
        last = min(last, len(out))  # noqa: PLW2901 - rows that nobody asked for
        for position in range(0, last - first, BLOCK * size):
            count = min(BLOCK * size, last - first - position)
            pages = block_table[request, position // size : -(-(position + count) // size)].long()
            rows = slice(first + position, first + position + count)
            out[rows] = take(values, pages).flatten(0, 1)[:count]
            if scales is not None and out_scale is not None:
                out_scale[rows] = scales[pages].flatten()[:count]


def gather_latent(cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout, out: torch.Tensor) -> None:
    """Some slots at a time; a negative one reads slot 0, and is zero."""
    for first in range(0, len(slots), BLOCK):
        part = slots[first : first + BLOCK]
        slot, result = part.clamp(min=0).long(), out[first : first + len(part)]
        page, offset = slot // layout.page_size, slot % layout.page_size
        if layout.is_fp8:
            values, scales, rope = layout.views(cache)
            codes = take(values, page, offset)
            result[:, : layout.value_dim] = codes.float().mul_(scales[page, offset].repeat_interleave(TILE, 1))
            result[:, layout.value_dim :] = rope[page, offset]
        else:
            result.copy_(cache[page, offset])
        result[part < 0] = 0


OPERATIONS = {
    "write_index": write_index,
    "write_latent": write_latent,
    "gather_index": gather_index,
    "gather_latent": gather_latent,
}


def _blocks(slots: torch.Tensor, page_size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, pages, offsets) of what has a slot, BLOCK at a time."""
    token = (slots >= 0).nonzero()[:, 0]
    slot = slots[token].long()
    pieces = (token, slot // page_size, slot % page_size)
    return list(zip(*(piece.split(BLOCK) for piece in pieces), strict=True))


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype, NaN as the quiet one: which bits torch makes of it depends on the processor."""
    return x if x.dtype == dtype else x.to(dtype).masked_fill_(x.isnan(), torch.nan)


def _quantize(x: torch.Tensor, layout: IndexLayout | LatentLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and the scale of the last dimension."""
    largest = LARGEST[layout.format]
    scale = x.abs().masked_fill_(~x.isfinite(), 0.0).amax(-1).clamp_(min=FLOOR).div_(largest)
    if layout.scale == "ue8m0":
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = x.div_(scale.unsqueeze(-1)).clamp_(-largest, largest).to(FP8[layout.format]).view(torch.uint8)
    return codes.masked_fill_(codes & 0x7F == 0x7F, 0x7F), scale  # NaN without its sign
