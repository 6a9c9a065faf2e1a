"""What cache means, in torch, on any device. CONTRACT.md, Caches."""

import torch

from keysift.layout import FLOOR, FP8, LARGEST, TILE, IndexLayout, LatentLayout, take


@torch.no_grad()
def write_index(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: IndexLayout) -> None:
    """Write the keys [T, D] to their slots; negative slots are skipped."""
    token, page, offset = places(slots, layout.page_size)
    values, scales = layout.views(cache)
    if scales is None:
        values[page, offset] = _as(k[token], values.dtype)
        return
    codes, scale = quantize(k[token], layout.format, layout.scale)
    _store_fp8(values, page, offset, codes)
    scales[page, offset] = scale


@torch.no_grad()
def write_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout) -> None:
    """Write the latents [T, value_dim + rope_dim] to their slots; negative slots are skipped."""
    token, page, offset = places(slots, layout.page_size)
    if not layout.is_fp8:
        cache[page, offset] = _as(latent[token], cache.dtype)
        return
    values, scales, rope = layout.views(cache)
    tiles = latent[token, : layout.value_dim].unflatten(1, (-1, TILE))
    codes, scale = quantize(tiles, layout.format, layout.scale)
    _store_fp8(values, page, offset, codes.flatten(1))
    scales[page, offset] = scale
    rope[page, offset] = _as(latent[token, layout.value_dim :], torch.bfloat16)


@torch.no_grad()
def gather_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    layout: IndexLayout,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    """The keys of every request, one after another; rows at or beyond cu_seqlens[-1] are not written."""
    row = torch.arange(min(out.shape[0], int(cu_seqlens[-1])), device=cache.device)
    request = torch.searchsorted(cu_seqlens, row, right=True) - 1
    position = row - cu_seqlens[request]
    page = block_table[request, position // layout.page_size].long()
    offset = position % layout.page_size
    values, scales = layout.views(cache)
    out[row] = take(values, page, offset)
    if scales is not None and out_scale is not None:
        out_scale[row] = scales[page, offset]


@torch.no_grad()
def gather_latent(cache: torch.Tensor, slots: torch.Tensor, layout: LatentLayout, out: torch.Tensor) -> None:
    """The latents of the slots [N], as numbers; zeros for negative slots."""
    token, page, offset = places(slots, layout.page_size)
    out[: len(slots)] = 0
    if not layout.is_fp8:
        out[token] = cache[page, offset].to(out.dtype)
        return
    values, scales, rope = layout.views(cache)
    tiles = take(values, page, offset).float().unflatten(1, (-1, TILE))
    out[token, : layout.value_dim] = (tiles * scales[page, offset][..., None]).flatten(1).to(out.dtype)
    out[token, layout.value_dim :] = rope[page, offset].to(out.dtype)


def places(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which tokens have a slot, and the pages and offsets of those."""
    token = (slots >= 0).nonzero()[:, 0]
    slot = slots[token].long()
    return token, slot // page_size, slot % page_size


def quantize(x: torch.Tensor, format: str, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and the float32 scale of the last dimension: scale = amax / largest, value = x / scale.

    amax is that of the finite numbers, at least 1e-4; infinities become the largest value, NaN stays NaN.
    """
    x = x.float()
    amax = x.abs().masked_fill(~x.isfinite(), 0.0).amax(-1).clamp(min=FLOOR)
    scale = amax / torch.full_like(amax, LARGEST[format])  # by a number, a GPU multiplies with its inverse
    if scale_format == "ue8m0":  # up to a power of two: any bit of the mantissa carries into the exponent
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    values = (x / scale[..., None]).clamp(-LARGEST[format], LARGEST[format])
    return values.masked_fill_(values.isnan(), torch.nan).to(FP8[format]), scale  # its sign depends on the processor


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype, NaN as the quiet one: which bits torch makes of it depends on the processor."""
    return x if x.dtype == dtype else x.to(dtype).masked_fill_(x.isnan(), torch.nan)


def _store_fp8(values: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, codes: torch.Tensor) -> None:
    """As bytes: torch has no indexed write for fp8."""
    values.view(torch.uint8)[page, offset] = codes.view(torch.uint8)


def run(operation: str, *arguments: object) -> None:
    """The entry of the table."""
    OPERATIONS[operation](*arguments)  # type: ignore[operator]


OPERATIONS = {
    "write_index": write_index,
    "write_latent": write_latent,
    "gather_index": gather_index,
    "gather_latent": gather_latent,
}
