"""What score refuses, before anything is launched. Messages name the argument, what was given, what is accepted."""

import torch

from keysift.checks import FLOATS, INTEGERS, check_device, check_dtype, check_positive, refuse_first
from keysift.layout import FP8, IndexLayout

FLOATS_AND_FP8 = (*FLOATS, *FP8.values())


def check_queries(q: torch.Tensor, weights: torch.Tensor) -> None:
    """q [M, H, D] with weights [M, H]."""
    check_dtype("q", q, FLOATS_AND_FP8)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [rows, heads, head size]")
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"q has shape {list(q.shape)}; heads and head size must be at least 1")
    check_dtype("weights", weights, (torch.float32,))
    check_device("weights", weights, "q", q)
    if weights.shape != q.shape[:2]:
        raise ValueError(
            f"weights has shape {list(weights.shape)}; q has {list(q.shape[:2])} rows and heads, which it must match"
        )


def check_keys(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None) -> None:
    """k [N, D] in one piece, k_scale [N]."""
    check_dtype("k", k, FLOATS_AND_FP8)
    check_device("k", k, "q", q)
    if k.ndim != 2 or k.shape[1] != q.shape[2]:
        raise ValueError(
            f"k has shape {list(k.shape)}; q has heads of {q.shape[2]}, so it must be [columns, {q.shape[2]}]"
        )
    if k_scale is not None:
        check_dtype("k_scale", k_scale, (torch.float32,))
        check_device("k_scale", k_scale, "q", q)
        if k_scale.shape != k.shape[:1]:
            raise ValueError(
                f"k_scale has shape {list(k_scale.shape)}; k has {k.shape[0]} keys, so it must be [{k.shape[0]}]"
            )


def check_cache(
    q: torch.Tensor, cache: torch.Tensor, layout: IndexLayout | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """cache [pages, page_size, D], or as the layout says; returns keys [pages, page_size, D] and their scales."""
    if layout is not None:
        if not isinstance(layout, IndexLayout):
            raise TypeError(f"layout is {type(layout).__name__}; it must be a keysift.IndexLayout")
        layout.check(cache)
    elif isinstance(cache, torch.Tensor) and cache.dtype == torch.uint8:
        raise TypeError("cache is torch.uint8, fp8 keys with their scales; layout must say which, an IndexLayout")
    else:
        check_dtype("cache", cache, FLOATS)
    check_device("cache", cache, "q", q)
    head_dim = cache.shape[-1] if layout is None else layout.head_dim
    if cache.ndim != 3 or cache.shape[1] == 0 or head_dim != q.shape[2]:
        raise ValueError(
            f"cache has shape {list(cache.shape)}; q has heads of {q.shape[2]}, "
            f"so its keys must be [pages, page size, {q.shape[2]}]"
        )
    return (cache, None) if layout is None else layout.views(cache)


def check_windows(q: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor | None) -> None:
    """One bound per row, or none."""
    for name, bound in (("starts", starts), ("ends", ends)):
        if bound is not None:
            check_dtype(name, bound, INTEGERS)
            check_device(name, bound, "q", q)
            if bound.shape != q.shape[:1]:
                raise ValueError(
                    f"{name} has shape {list(bound.shape)}; q has {q.shape[0]} rows, so it must be [{q.shape[0]}]"
                )


def check_requests(q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, next_n: int) -> torch.Tensor:
    """Lengths [B] or [B, next_n] and a block table [B, P] for B * next_n rows; returns the lengths flat."""
    check_positive(next_n=next_n)
    for name, tensor in (("seq_lens", seq_lens), ("block_table", block_table)):
        check_dtype(name, tensor, INTEGERS)
        check_device(name, tensor, "q", q)
    if seq_lens.ndim not in (1, 2) or (seq_lens.ndim == 2 and seq_lens.shape[1] != next_n):
        raise ValueError(
            f"seq_lens has shape {list(seq_lens.shape)}; it may be [B] or [B, next_n] with next_n = {next_n}"
        )
    requests = seq_lens.shape[0]
    if requests * next_n != q.shape[0]:
        raise ValueError(
            f"seq_lens has {requests} requests of next_n = {next_n} tokens; "
            f"q has {q.shape[0]} rows, not {requests * next_n}"
        )
    if block_table.ndim != 2 or block_table.shape[0] != requests:
        raise ValueError(f"block_table has shape {list(block_table.shape)}; it must be [{requests}, pages per request]")
    return seq_lens.reshape(-1)


def check_out(q: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    """out float32 [at least M, at least `columns`] with adjacent columns."""
    check_dtype("out", out, (torch.float32,))
    check_device("out", out, "q", q)
    if out.ndim != 2 or out.shape[0] < q.shape[0] or out.shape[1] < columns:
        raise ValueError(f"out has shape {list(out.shape)}; it must be [at least {q.shape[0]}, at least {columns}]")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out has stride {out.stride(1)} in its last dimension; it must be 1")


def check_window_values(columns: int, starts: torch.Tensor | None, ends: torch.Tensor | None) -> None:
    """KEYSIFT_CHECK=1: refuse windows that clamping would change. Synchronises."""
    for name, bound in (("starts", starts), ("ends", ends)):
        if bound is not None:
            refuse_first(name, bound, (bound < 0) | (bound > columns), f"[0, {columns}]")
    if starts is not None and ends is not None:
        refuse_first("ends", ends, ends < starts, "the row's start or more")


def check_request_values(
    k: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, next_n: int, columns: int
) -> None:
    """KEYSIFT_CHECK=1: refuse lengths that clamping would change, and pages that the cache lacks. Synchronises."""
    least = next_n - 1 if seq_lens.ndim == 1 else 0
    refuse_first("seq_lens", seq_lens, (seq_lens < least) | (seq_lens > columns), f"[{least}, {columns}]")
    reached = seq_lens if seq_lens.ndim == 1 else seq_lens.amax(1)
    first_column = torch.arange(block_table.shape[1], device=k.device) * k.shape[1]
    bad = (first_column < reached[:, None]) & ((block_table < 0) | (block_table >= k.shape[0]))
    refuse_first("block_table", block_table, bad, f"pages of [0, {k.shape[0]}) below the request's length")
