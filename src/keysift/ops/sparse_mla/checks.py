"""What sparse_mla refuses, before anything is launched. Messages name argument, what was given, what is accepted."""

import torch

from keysift.checks import FLOATS, INTEGERS, check_device, check_dtype, refuse_first
from keysift.layout import LatentLayout


def check_queries(q: torch.Tensor) -> None:
    """q [T, heads, D]."""
    check_dtype("q", q, FLOATS)
    if q.ndim != 3 or q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(
            f"q has shape {list(q.shape)}; it must be [tokens, heads, head size], heads and size at least 1"
        )


def check_latents(
    q: torch.Tensor, kv: torch.Tensor, value_dim: int, layout: LatentLayout | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """kv [N, D] or [pages, page_size, D] or as the layout says; 1 <= value_dim <= D.

    Returns latents [pages, page_size, D], and the scales and rotary parts of fp8 ones.
    """
    dim = q.shape[2]
    if layout is not None:
        if not isinstance(layout, LatentLayout):
            raise TypeError(f"layout is {type(layout).__name__}; it must be a keysift.LatentLayout")
        layout.check(kv)
    elif isinstance(kv, torch.Tensor) and kv.dtype == torch.uint8:
        raise TypeError("kv is torch.uint8, fp8 latents with their scales; layout must say which, a LatentLayout")
    else:
        check_dtype("kv", kv, FLOATS)
    check_device("kv", kv, "q", q)
    width = kv.shape[-1] if layout is None else layout.dim
    if kv.ndim not in (2, 3) or width != dim:
        raise ValueError(
            f"kv has shape {list(kv.shape)}; q has heads of {dim}, "
            f"so it may be [slots, {dim}] or [pages, page size, {dim}]"
        )
    if kv.shape[:-1].numel() >= 2**31:
        raise ValueError(f"kv has {kv.shape[:-1].numel()} slots; an int32 index reaches 2**31 - 1")
    if isinstance(value_dim, bool) or not isinstance(value_dim, int):
        raise TypeError(f"value_dim is {value_dim!r}; it must be an int")
    most = dim if layout is None or not layout.is_fp8 else layout.value_dim
    if not 1 <= value_dim <= most:
        raise ValueError(f"value_dim is {value_dim} (512 where it is left out); it may be 1 to {most} with this kv")
    if layout is not None and layout.is_fp8:
        return layout.views(kv)
    return (kv if kv.ndim == 3 else kv[None]), None, None


def check_extras(q: torch.Tensor, sink: torch.Tensor | None, topk_length: torch.Tensor | None) -> None:
    """sink float32 [heads], topk_length integers [T]."""
    if sink is not None:
        check_dtype("sink", sink, (torch.float32,))
        check_device("sink", sink, "q", q)
        if sink.shape != q.shape[1:2]:
            raise ValueError(
                f"sink has shape {list(sink.shape)}; q has {q.shape[1]} heads, so it must be [{q.shape[1]}]"
            )
    if topk_length is not None:
        check_dtype("topk_length", topk_length, INTEGERS)
        check_device("topk_length", topk_length, "q", q)
        if topk_length.shape != q.shape[:1]:
            raise ValueError(
                f"topk_length has shape {list(topk_length.shape)}; q has {q.shape[0]} tokens, "
                f"so it must be [{q.shape[0]}]"
            )


def check_requests(
    q: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """q [B, next_n, heads, D], indices [B, next_n, k], topk_length [B, next_n], contiguous out and lse."""
    for name, tensor, form in (("q", q, "[B, next_n, heads, head size]"), ("indices", indices, "[B, next_n, k]")):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.ndim != form.count(",") + 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {form}")
    if indices.shape[:2] != q.shape[:2]:
        raise ValueError(f"indices has shape {list(indices.shape)}; q has {list(q.shape[:2])} requests and tokens")
    if topk_length is not None and topk_length.shape != q.shape[:2]:
        raise ValueError(f"topk_length has shape {list(topk_length.shape)}; it must be {list(q.shape[:2])}")
    for name, given, rank in (("out", out, 4), ("lse", lse, 3)):
        if given is None:
            continue
        check_dtype(name, given, FLOATS)
        if given.ndim != rank or given.shape[:2] != q.shape[:2] or not given.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(given.shape)}, strides {list(given.stride())}; it must be contiguous and "
                f"begin with {list(q.shape[:2])}, {rank} dimensions in all"
            )


def check_indices(q: torch.Tensor, indices: torch.Tensor) -> None:
    """indices int32 [T, k]."""
    check_dtype("indices", indices, (torch.int32,))
    check_device("indices", indices, "q", q)
    if indices.ndim != 2 or indices.shape[0] != q.shape[0]:
        raise ValueError(
            f"indices has shape {list(indices.shape)}; q has {q.shape[0]} tokens, so it must be [{q.shape[0]}, k]"
        )


def check_out(q: torch.Tensor, name: str, tensor: torch.Tensor, dtype: torch.dtype, tail: tuple[int, ...]) -> None:
    """[at least T, *tail] with contiguous rows."""
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, "q", q)
    if tensor.ndim != 1 + len(tail) or tensor.shape[0] < q.shape[0] or tensor.shape[1:] != tail:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {[f'at least {q.shape[0]}', *tail]}")
    if tensor.shape[0] and not tensor[0].is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; the part of a token must be contiguous")


def check_workspace(q: torch.Tensor, workspace: torch.Tensor | None) -> None:
    """Flat bytes on q's device; the kernel that is chosen checks the size."""
    if workspace is None:
        return
    check_dtype("workspace", workspace, (torch.uint8,))
    check_device("workspace", workspace, "q", q)
    if workspace.ndim != 1 or not workspace.is_contiguous():
        raise ValueError(f"workspace has shape {list(workspace.shape)}; it must be flat and contiguous")


def check_k(k: int) -> None:
    """The width of indices, when they are not there yet."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k is {k!r}; it must be an int")
    if k < 0:
        raise ValueError(f"k is {k}; it must be at least 0")


def check_parts(outs: torch.Tensor, lses: torch.Tensor) -> None:
    """outs [S, ..., V] and lses [S, ...] of at least one part."""
    check_dtype("outs", outs, FLOATS)
    check_dtype("lses", lses, (torch.float32,))
    check_device("lses", lses, "outs", outs)
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or len(lses) == 0:
        raise ValueError(
            f"lses has shape {list(lses.shape)}; outs has {list(outs.shape)}, [parts, ..., value_dim], so it must be "
            f"{list(outs.shape[:-1])}, with one part at least"
        )


def check_combined(
    outs: torch.Tensor, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: torch.Size
) -> None:
    """What combine_partials writes: contiguous, of that shape."""
    check_dtype(name, tensor, dtypes)
    check_device(name, tensor, "outs", outs)
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, strides {list(tensor.stride())}; it must be contiguous, "
            f"{list(shape)}"
        )


def check_values(kv: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> None:
    """KEYSIFT_CHECK=1: refuse slots that kv lacks; any negative index other than -1 is one. Synchronises."""
    slots = kv.shape[:-1].numel()
    wrong = (indices < -1) | (indices >= slots)
    if topk_length is not None:  # what lies behind may be anything
        wrong &= torch.arange(indices.shape[1], device=indices.device) < topk_length[:, None]
    refuse_first("indices", indices, wrong, f"-1 or [0, {slots})")
