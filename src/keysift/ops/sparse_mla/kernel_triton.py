"""sparse_mla in Triton: launch; kernel_triton_code.py has the algorithm, kernel_triton_plan.py the sizes."""

import math

import torch

from keysift.dispatch import device_of
from keysift.kernels import on_device_of

from . import kernel_triton_plan as plans
from .kernel_triton_code import combine_kernel, sparse_mla_kernel


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
    """Launch on the current stream; write `out` [T, heads, value_dim] and `lse` [T, heads]."""
    rows, heads, value_dim = out.shape
    k, page_size = indices.shape[1], kv.shape[1]
    latent_dim = value_dim if rope is None else kv.shape[2]
    device = device_of(q.device)
    p = plans.plan(device, q.dtype, kv.dtype, rows, heads, latent_dim, q.shape[2] - latent_dim, k)
    is_fp8 = scales is not None
    scale_strides: tuple[int, ...] = (0, 0)
    if scales is None or rope is None:
        # Of an empty part nothing is read, nor of scales that are not there.
        rope, scales = kv[..., latent_dim:] if latent_dim < kv.shape[2] else kv, lse
    else:
        kv, scale_strides = kv.view(torch.uint8), scales.stride()[:2]
    if p.parts == 1:
        part_out, part_lse = out, lse
        strides = (0, out.stride(0), 0, lse.stride(0))
    else:
        assert workspace is not None  # noqa: S101 - parts come with the workspace that the table asks for
        part_out, part_lse = _parts(workspace, p.parts, rows, heads, value_dim)
        strides = (part_out.stride(0), part_out.stride(1), part_lse.stride(0), part_lse.stride(1))
    shift = page_size.bit_length() - 1
    unit = 8 if is_fp8 and not any(stride % 8 for stride in rope.stride()[:2]) else 1
    with on_device_of(q):
        sparse_mla_kernel[(math.ceil(heads / p.block_h) * p.parts * rows,)](
            q, kv, scales, rope, indices, _given(topk_length, indices), _given(sink, lse), part_out, part_lse,
            scale * math.log2(math.e), k, page_size, p.parts,
            *q.stride(), *kv.stride()[:2], *scale_strides, rope.stride(0) // unit, rope.stride(1) // unit,
            *indices.stride(),
            0 if topk_length is None else topk_length.stride(0), *strides,
            HEADS=heads, LATENT_DIM=latent_dim, ROPE_DIM=q.shape[2] - latent_dim, VALUE_DIM=value_dim,
            FP8=is_fp8, NATIVE=is_fp8 and plans.has_fp8(device),
            PAGED=kv.shape[0] > 1 and kv.stride(0) != page_size * kv.stride(1),
            PAGE_SHIFT=shift if page_size == 1 << shift else -1,
            WHOLE=k % p.tile == 0 and topk_length is None, HAS_LENGTH=topk_length is not None,
            HAS_SINK=sink is not None and p.parts == 1, COMPUTE=p.compute, PRECISION=plans.precision(device, p),
            BLOCK_H=p.block_h, CHUNK=p.chunk, ROPE_CHUNK=p.rope_chunk, TILE=p.tile, ROPE_UNIT=unit,
            num_warps=p.warps, num_stages=p.stages,
        )  # fmt: skip
        if p.parts > 1:
            _combine(part_out.flatten(1, 2), part_lse.flatten(1), sink, out, lse, heads)


def combine(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Join parts: outs [S, R, V], lses [S, R] -> out [R, V], lse [R]."""
    with on_device_of(outs):
        _combine(outs, lses, None, out, lse, 1)


def _combine(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, heads: int
) -> None:
    parts, rows, value_dim = outs.shape
    combine_kernel[(rows,)](
        outs, lses, _given(sink, lses), out, lse, parts, *outs.stride(), *lses.stride(), out.stride(0), lse.stride(0),
        HEADS=heads, VALUE_DIM=value_dim, BLOCK_V=plans.power_of_two(value_dim), HAS_SINK=sink is not None,
        num_warps=4 if value_dim > 256 else 1,
    )  # fmt: skip


def _parts(
    workspace: torch.Tensor, parts: int, rows: int, heads: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as float32 outputs [parts, rows, heads, value_dim] and lses [parts, rows, heads]."""
    first = -workspace.data_ptr() % plans.ALIGNMENT  # a workspace may be any slice of bytes
    each = parts * rows * heads
    numbers = workspace[first : first + 4 * each * (value_dim + 1)].view(torch.float32)
    outs, lses = numbers.split_with_sizes([each * value_dim, each])
    return outs.view(parts, rows, heads, value_dim), lses.view(parts, rows, heads)


def _given(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in if tensor is None else tensor
