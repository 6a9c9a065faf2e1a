"""What cache refuses, before anything is launched. Messages name the argument, what was given, what is accepted."""

import torch

from keysift.checks import FLOATS, INTEGERS, check_device, check_dtype, refuse_first
from keysift.layout import IndexLayout


def check_layout(layout: object, kind: type) -> None:
    """The layout object of the cache at hand."""
    if not isinstance(layout, kind):
        raise TypeError(f"layout is {type(layout).__name__}; it must be a keysift.{kind.__name__}")


def check_tokens(name: str, tokens: torch.Tensor, width: int, cache: torch.Tensor) -> None:
    """[T, width] of a float dtype."""
    check_dtype(name, tokens, FLOATS)
    check_device(name, tokens, "cache", cache)
    if tokens.ndim != 2 or tokens.shape[1] != width:
        raise ValueError(f"{name} has shape {list(tokens.shape)}; the layout makes it [tokens, {width}]")


def check_slots(name: str, slots: torch.Tensor, count: int | None, cache: torch.Tensor) -> None:
    """[T] integers, one per token where there are tokens."""
    check_dtype(name, slots, INTEGERS)
    check_device(name, slots, "cache", cache)
    if slots.ndim != 1 or (count is not None and slots.shape[0] != count):
        raise ValueError(f"{name} has shape {list(slots.shape)}; it must be [{'slots' if count is None else count}]")


def check_requests(block_table: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int, cache: torch.Tensor) -> None:
    """A block table [B, P], cumulative lengths [B + 1], and how many rows are asked for."""
    for name, tensor in (("block_table", block_table), ("cu_seqlens", cu_seqlens)):
        check_dtype(name, tensor, INTEGERS)
        check_device(name, tensor, "cache", cache)
    if block_table.ndim != 2:
        raise ValueError(f"block_table has shape {list(block_table.shape)}; it must be [requests, pages per request]")
    if cu_seqlens.shape != (block_table.shape[0] + 1,):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; block_table has {block_table.shape[0]} requests, "
            f"so it must be [{block_table.shape[0] + 1}]: 0, then the end of each request"
        )
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"tokens is {tokens!r}; it must be an int")
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}; it must be at least 0")


def check_out(
    name: str, out: torch.Tensor, rows: int, width: int | None, dtypes: tuple[torch.dtype, ...], cache: torch.Tensor
) -> None:
    """[at least `rows`, width], or [at least `rows`]; the last dimension contiguous."""
    check_dtype(name, out, dtypes)
    check_device(name, out, "cache", cache)
    tail = () if width is None else (width,)
    if out.ndim != 1 + len(tail) or out.shape[0] < rows or out.shape[1:] != tail:
        raise ValueError(f"{name} has shape {list(out.shape)}; it must be {[f'at least {rows}', *tail]}")
    if tail and out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"{name} has stride {out.stride(1)} in its last dimension; it must be 1")


def check_slot_values(name: str, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """KEYSIFT_CHECK=1: refuse slots that the cache lacks. Synchronises."""
    most = cache.shape[0] * cache.shape[1]
    refuse_first(name, slots, slots >= most, f"negative (skipped) or [0, {most})")


def check_request_values(
    cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int, layout: IndexLayout
) -> None:
    """KEYSIFT_CHECK=1: refuse lengths that do not ascend or outgrow table or rows, and pages that the cache lacks."""
    lengths = cu_seqlens.diff()
    most = block_table.shape[1] * layout.page_size
    refuse_first("cu_seqlens", cu_seqlens[:1], cu_seqlens[:1] != 0, "0 at the beginning")
    wrong = torch.nn.functional.pad((lengths < 0) | (lengths > most), (1, 0))
    refuse_first("cu_seqlens", cu_seqlens, wrong, f"0 to {most} more than the one before it")
    refuse_first("cu_seqlens", cu_seqlens, cu_seqlens > tokens, f"at most tokens, which is {tokens}")
    first = torch.arange(block_table.shape[1], device=cache.device) * layout.page_size
    bad = (first < lengths[:, None]) & ((block_table < 0) | (block_table >= cache.shape[0]))
    refuse_first("block_table", block_table, bad, f"pages of [0, {cache.shape[0]}) below the request's length")
