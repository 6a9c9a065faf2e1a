"""cache: tokens into pages, and back. CONTRACT.md, Caches, is what every kernel here means."""

import functools
from dataclasses import dataclass

import torch

from keysift import dispatch, kernels
from keysift.checks import FLOATS
from keysift.dispatch import Device, Kernel
from keysift.layout import FP8, IndexLayout, LatentLayout

from . import checks


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts that decide which kernel writes or gathers."""

    device: Device
    operation: str  # "write_index", "write_latent", "gather_index", "gather_latent"
    format: str
    rows: int
    width: int  # numbers per token

    @property
    def kind(self) -> str:
        """What the warning about a reference is given once for."""
        return f"{self.operation} of {self.format} on {self.device}"


def _unmet_triton(problem: Problem) -> list[str]:
    return kernels.unmet_triton(problem.device)


KERNELS = (
    Kernel("cpu", kernels.unmet_cpu, "keysift.ops.cache.kernel_cpu:run"),
    Kernel("triton", _unmet_triton, "keysift.ops.cache.kernel_triton:run"),
    Kernel("reference", kernels.unmet_nothing, "keysift.ops.cache.reference:run"),
)


def write_index_cache(
    k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: IndexLayout, *, kernel: str | None = None
) -> None:
    """Write index keys into their pages, quantised where the layout is fp8.

    k             [T, D] float32, bfloat16 or float16
    cache         [pages, page_size, D + 4] uint8, or [pages, page_size, D] of a plain layout; any page stride
    slot_mapping  [T] int32 or int64: token t goes to page slot // page_size, offset slot % page_size; a negative one is
                  skipped, a slot that occurs twice the caller's error
    layout        the format of the cache
    kernel        a kernel of `keysift explain cache` by name; it runs or raises

    fp8: scale = max(amax, 1e-4) / 448 (224 for e4m3fnuz), rounded up to a power of two for "ue8m0"; value = x / scale
    in float32, to the nearest, ties to even. amax is that of the finite numbers: an infinity becomes the largest value,
    a NaN stays NaN, and neither touches another token. The same bytes from every kernel.
    Raises ValueError or TypeError before anything is written.
    Formula: the indexer cache of DeepSeek-V3.2 (2025).

    Equivalent to, for a plain layout without negative slots:
        cache[slot_mapping // page_size, slot_mapping % page_size] = k.to(cache.dtype)

    >>> layout = IndexLayout("e4m3fn", page_size=2, head_dim=4)
    >>> cache = torch.zeros(1, 2, 8, dtype=torch.uint8)
    >>> write_index_cache(torch.tensor([[448.0, 1.0, -2.0, 0.0]]), cache, torch.tensor([1]), layout)
    >>> cache.flatten()[4:8].view(torch.float8_e4m3fn).float(), cache.flatten()[8:].view(torch.float32)
    (tensor([448.,   1.,  -2.,   0.]), tensor([0., 1.]))
    """
    checks.check_layout(layout, IndexLayout)
    layout.check(cache)
    checks.check_tokens("k", k, layout.head_dim, cache)
    checks.check_slots("slot_mapping", slot_mapping, k.shape[0], cache)
    torch.ops.keysift.write_index_cache(
        k, cache, slot_mapping, layout.format, layout.page_size, layout.head_dim, layout.scale, kernel
    )


def write_latent_cache(
    latent: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: LatentLayout,
    *,
    kernel: str | None = None,
) -> None:
    """Write latents into their pages, quantised where the layout is fp8.

    latent        [T, value_dim + rope_dim] float32, bfloat16 or float16
    cache         [pages, page_size, width of the layout]; any page stride
    slot_mapping  [T] int32 or int64, negative: skipped; as `write_index_cache`
    layout        the format of the cache
    kernel        a kernel of `keysift explain cache` by name; it runs or raises

    e4m3fn: every 128 values of the latent share a scale, made as that of an index key; the rotary part becomes
    bfloat16. Numbers that change their dtype are rounded to the nearest, ties to even; a NaN is then the quiet one.
    Raises ValueError or TypeError before anything is written.

    Equivalent to, for a plain layout without negative slots:
        cache[slot_mapping // page_size, slot_mapping % page_size] = latent.to(cache.dtype)

    >>> layout = LatentLayout("bfloat16", page_size=2, value_dim=2, rope_dim=1)
    >>> cache = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    >>> write_latent_cache(torch.tensor([[1.0, 2.0, 3.0]]), cache, torch.tensor([1]), layout)
    >>> cache[0, 1].tolist()
    [1.0, 2.0, 3.0]
    """
    checks.check_layout(layout, LatentLayout)
    layout.check(cache)
    checks.check_tokens("latent", latent, layout.dim, cache)
    checks.check_slots("slot_mapping", slot_mapping, latent.shape[0], cache)
    torch.ops.keysift.write_latent_cache(
        latent, cache, slot_mapping, layout.format, layout.page_size, layout.value_dim, layout.rope_dim, layout.scale,
        kernel,
    )  # fmt: skip


def gather_index_cache(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    tokens: int,
    layout: IndexLayout,
    *,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The index keys of several requests in one piece, as `index_scores` takes them: for prefill over a cached prefix.

    cache        as `write_index_cache` fills it
    block_table  [B, P] int32 or int64: position p of request b lies in page block_table[b, p // page_size]
    cu_seqlens   [B + 1] int32 or int64, on the device: 0, then the end of each request among the rows; of lengths
                 [B], `cumulative_lengths` makes it
    tokens       rows to gather, at least cu_seqlens[-1]; a number of the host, so that nothing synchronises
    layout       the format of the cache
    out          [>= tokens, D] fp8 or plain, any row stride; out_scale  float32 [>= tokens], any stride
    kernel       a kernel of `keysift explain cache` by name; it runs or raises

    Returns (k [tokens, D] in the format of the cache, k_scale float32 [tokens] or None where there is none). Rows at or
    beyond cu_seqlens[-1] are not written; table entries that no request reaches may hold anything.
    Raises ValueError or TypeError before anything is written.

    Equivalent to, for a plain layout and each request b:
        out[cu_seqlens[b] : cu_seqlens[b + 1]] = cache[block_table[b]].flatten(0, 1)[: length of b]

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> layout = IndexLayout("float32", page_size=2, head_dim=1)
    >>> ends = torch.tensor([0, 1, 4])  # one token of the first request, three of the second
    >>> gather_index_cache(cache, torch.tensor([[0, 0], [1, 0]]), ends, 4, layout)[0].flatten().tolist()
    [1.0, 3.0, 4.0, 1.0]
    """
    checks.check_layout(layout, IndexLayout)
    layout.check(cache)
    checks.check_requests(block_table, cu_seqlens, tokens, cache)
    dtype = FP8.get(layout.format, layout.dtype)
    if out is None:
        out = torch.empty(tokens, layout.head_dim, dtype=dtype, device=cache.device)
    checks.check_out("out", out, tokens, layout.head_dim, (dtype,), cache)
    if layout.is_fp8:
        if out_scale is None:
            out_scale = torch.empty(tokens, dtype=torch.float32, device=cache.device)
        checks.check_out("out_scale", out_scale, tokens, None, (torch.float32,), cache)
    elif out_scale is not None:
        raise ValueError(f"out_scale is given; a cache of {layout.format} has no scales")
    torch.ops.keysift.gather_index_cache(
        cache, block_table, cu_seqlens, layout.format, layout.page_size, layout.head_dim, out[:tokens],
        None if out_scale is None else out_scale[:tokens], kernel,
    )  # fmt: skip
    return out[:tokens], None if out_scale is None else out_scale[:tokens]


def cumulative_lengths(seq_lens: torch.Tensor) -> torch.Tensor:
    """The `cu_seqlens` of `gather_index_cache`: int32 [B + 1], 0 and then the sums of the lengths [B] so far.

    seq_lens  [B] int32 or int64, on any device; nothing synchronises

    Equivalent to:
        torch.cat((torch.zeros(1), seq_lens.cumsum(0))).int()

    >>> cumulative_lengths(torch.tensor([3, 0, 2]))
    tensor([0, 3, 3, 5], dtype=torch.int32)
    """
    checks.check_slots("seq_lens", seq_lens, None, seq_lens)
    return torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


def gather_latent_cache(
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: LatentLayout,
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """The latents of slots, as numbers.

    cache   as `write_latent_cache` fills it
    slots   [N] int32 or int64; negative: zeros
    layout  the format of the cache
    dtype   of the result: float32, bfloat16 or float16
    out     [>= N, value_dim + rope_dim] of that dtype
    kernel  a kernel of `keysift explain cache` by name; it runs or raises

    Returns [N, value_dim + rope_dim], value * scale in float32, then rounded to `dtype`.
    Raises ValueError or TypeError before anything is written.

    Equivalent to, for a plain layout without negative slots:
        cache.flatten(0, 1)[slots].to(dtype)

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> layout = LatentLayout("float32", page_size=2, value_dim=1, rope_dim=0)
    >>> gather_latent_cache(cache, torch.tensor([3, -1, 0]), layout).flatten().tolist()
    [4.0, 0.0, 1.0]
    """
    checks.check_layout(layout, LatentLayout)
    layout.check(cache)
    checks.check_slots("slots", slots, None, cache)
    rows = slots.shape[0]
    if dtype not in FLOATS:
        raise TypeError(f"dtype is {dtype}; it may be {', '.join(str(one) for one in FLOATS)}")
    if out is None:
        out = torch.empty(rows, layout.dim, dtype=dtype, device=cache.device)
    checks.check_out("out", out, rows, layout.dim, (dtype,), cache)
    torch.ops.keysift.gather_latent_cache(
        cache, slots, layout.format, layout.page_size, layout.value_dim, layout.rope_dim, out[:rows], kernel
    )
    return out[:rows]


def _run(
    operation: str, layout: IndexLayout | LatentLayout, rows: int, kernel: str | None, device: torch.device,
    *arguments: object,
) -> None:  # fmt: skip
    width = layout.head_dim if isinstance(layout, IndexLayout) else layout.dim
    problem = Problem(dispatch.device_of(device), operation, layout.format, rows, width)
    chosen = dispatch.choose("cache", KERNELS, problem, kernel)
    if rows:
        chosen.load()(operation, *arguments)


def _write_index(
    k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, format: str, page_size: int, head_dim: int, scale: str,
    kernel: str | None,
) -> None:  # fmt: skip
    if dispatch.CHECK_VALUES:
        checks.check_slot_values("slot_mapping", slots, cache)
    layout = _index_layout(format, page_size, head_dim, scale)
    _run("write_index", layout, k.shape[0], kernel, cache.device, k, cache, slots, layout)


def _write_latent(
    latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, format: str, page_size: int, value_dim: int,
    rope_dim: int, scale: str, kernel: str | None,
) -> None:  # fmt: skip
    if dispatch.CHECK_VALUES:
        checks.check_slot_values("slot_mapping", slots, cache)
    layout = _latent_layout(format, page_size, value_dim, rope_dim, scale)
    _run("write_latent", layout, latent.shape[0], kernel, cache.device, latent, cache, slots, layout)


def _gather_index(
    cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens: torch.Tensor, format: str, page_size: int,
    head_dim: int, out: torch.Tensor, out_scale: torch.Tensor | None, kernel: str | None,
) -> None:  # fmt: skip
    layout = _index_layout(format, page_size, head_dim, "float32")
    if dispatch.CHECK_VALUES:
        checks.check_request_values(cache, block_table, cu_seqlens, out.shape[0], layout)
    arguments = (cache, block_table, cu_seqlens, layout, out, out_scale)
    _run("gather_index", layout, out.shape[0], kernel, cache.device, *arguments)


def _gather_latent(
    cache: torch.Tensor, slots: torch.Tensor, format: str, page_size: int, value_dim: int, rope_dim: int,
    out: torch.Tensor, kernel: str | None,
) -> None:  # fmt: skip
    if dispatch.CHECK_VALUES:
        checks.check_slot_values("slots", slots, cache)
    layout = _latent_layout(format, page_size, value_dim, rope_dim)
    _run("gather_latent", layout, slots.shape[0], kernel, cache.device, cache, slots, layout, out)


_index_layout = functools.lru_cache(IndexLayout)
_latent_layout = functools.lru_cache(LatentLayout)


def _fake(*args: object) -> None:
    """Everything is written in place, so a trace learns nothing new from the call."""


_LIBRARY = torch.library.Library("keysift", "FRAGMENT")
_INDEX, _LATENT = "str format, int page_size, int head_dim", "str format, int page_size, int value_dim, int rope_dim"
_OPERATORS = {
    "write_index_cache": (f"Tensor k, Tensor(a!) cache, Tensor slots, {_INDEX}, str scale", _write_index),
    "write_latent_cache": (f"Tensor latent, Tensor(a!) cache, Tensor slots, {_LATENT}, str scale", _write_latent),
    "gather_index_cache": (
        f"Tensor cache, Tensor block_table, Tensor cu_seqlens, {_INDEX}, Tensor(a!) out, Tensor(b!)? out_scale",
        _gather_index,
    ),
    "gather_latent_cache": (f"Tensor cache, Tensor slots, {_LATENT}, Tensor(a!) out", _gather_latent),
}
for _name, (_arguments, _function) in _OPERATORS.items():
    _LIBRARY.define(f"{_name}({_arguments}, str? kernel) -> ()")
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keysift::{_name}", _fake, lib=_LIBRARY)
