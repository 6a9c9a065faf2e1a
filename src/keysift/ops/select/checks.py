"""What select refuses, before anything is launched. Messages name the argument, what was given, what is accepted."""

import torch

from keysift.checks import FLOATS, INTEGERS, check_device, check_dtype, check_positive, check_stored, refuse_first


def check_scores(scores: torch.Tensor, k: int) -> None:
    """scores [R, N] of a float dtype that we serve; k >= 1."""
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores is {type(scores).__name__}; it must be a torch.Tensor")
    if scores.ndim != 2:
        raise ValueError(f"scores has shape {list(scores.shape)}; it must be [rows, columns]")
    if scores.dtype not in FLOATS:
        raise TypeError(f"scores is {scores.dtype}; it may be {', '.join(str(dtype) for dtype in FLOATS)}")
    check_stored("scores", scores)
    if scores.shape[1] >= 2**31:
        raise ValueError(f"scores has {scores.shape[1]} columns; an int32 index reaches 2**31 - 1")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k is {k!r}; it must be an int")
    if not 1 <= k < 2**31:
        raise ValueError(f"k is {k}; it must be at least 1, and counts in an int32")


def check_windows(
    scores: torch.Tensor,
    rows: int,
    start_name: str,
    start: torch.Tensor | None,
    end_name: str,
    end: torch.Tensor | None,
) -> None:
    """One bound per row, or none."""
    for name, bound in ((start_name, start), (end_name, end)):
        if bound is not None:
            _check_integers(scores, name, bound)
            if bound.shape != (rows,):
                raise ValueError(
                    f"{name} has shape {list(bound.shape)}; scores has {rows} rows, so it must be [{rows}]"
                )


def check_seq_lens(scores: torch.Tensor, seq_lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """Lengths [B] or [B, next_n] for B * next_n score rows; returns them flat."""
    check_positive(next_n=next_n)
    _check_integers(scores, "seq_lens", seq_lens)
    rows = scores.shape[0]
    if seq_lens.ndim not in (1, 2) or (seq_lens.ndim == 2 and seq_lens.shape[1] != next_n):
        raise ValueError(
            f"seq_lens has shape {list(seq_lens.shape)}; it may be [B] or [B, next_n] with next_n = {next_n}"
        )
    if seq_lens.shape[0] * next_n != rows:
        raise ValueError(
            f"seq_lens has {seq_lens.shape[0]} requests of next_n = {next_n} tokens; "
            f"scores has {rows} rows, not {seq_lens.shape[0] * next_n}"
        )
    return seq_lens if seq_lens.ndim == 1 else seq_lens.reshape(-1)


def check_index_base(
    scores: torch.Tensor,
    index_base: str,
    page_table: torch.Tensor | None,
    page_size: int | None,
    page_rows: torch.Tensor | None,
) -> None:
    """A named base, or a page table with its page size."""
    if index_base not in ("window", "column"):
        raise ValueError(f"index_base is {index_base!r}; it may be 'window' or 'column', or give page_table for slots")
    if page_table is None:
        if page_size is not None or page_rows is not None:
            raise ValueError(f"{'page_size' if page_size is not None else 'page_rows'} is given without page_table")
        return
    rows = scores.shape[0]
    if index_base != "window":
        raise ValueError(
            f"index_base is {index_base!r} beside page_table; slots are counted from the window, so leave it out"
        )
    if isinstance(page_size, bool) or not isinstance(page_size, int) or not 1 <= page_size < 2**31:
        raise ValueError(f"page_size is {page_size!r}; with page_table it must be an int from 1 to 2**31 - 1")
    _check_integers(scores, "page_table", page_table)
    if page_table.ndim != 2 or (page_table.shape[1] > 1 and page_table.stride(1) != 1):
        raise ValueError(
            f"page_table has shape {list(page_table.shape)}, strides {list(page_table.stride())}; "
            "it must be [table rows, pages] with adjacent pages"
        )
    if page_rows is None:
        if page_table.shape[0] != rows:
            raise ValueError(
                f"page_table has {page_table.shape[0]} rows; scores has {rows}; "
                "give page_rows to name each row's table row"
            )
        return
    _check_integers(scores, "page_rows", page_rows)
    if page_rows.shape != (rows,):
        raise ValueError(f"page_rows has shape {list(page_rows.shape)}; scores has {rows} rows, so it must be [{rows}]")


def check_out(
    scores: torch.Tensor,
    k: int,
    out: torch.Tensor | tuple[torch.Tensor, ...] | None,
    return_values: bool,
    return_counts: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`out` in the order of the return, taken apart into (indices, values, counts)."""
    if out is None:
        return None, None, None
    if isinstance(out, torch.Tensor) and not (return_values or return_counts):
        _check_result(scores, "out", out, torch.int32, k)
        return out, None, None
    names = ["indices", *(["values"] if return_values else []), *(["counts"] if return_counts else [])]
    if not isinstance(out, tuple) and len(names) > 1:
        raise TypeError(f"out is {type(out).__name__}; this call returns ({', '.join(names)}), so it must be a tuple")
    given = out if isinstance(out, tuple) else (out,)
    if len(given) != len(names):
        raise ValueError(f"out holds {len(given)} tensors; this call returns ({', '.join(names)})")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in zip(names, given, strict=True):
        label = "out" if len(names) == 1 else f"out ({name})"
        dtype, width = (scores.dtype if name == "values" else torch.int32), (None if name == "counts" else k)
        _check_result(scores, label, tensor, dtype, width)
        found[name] = tensor
    return found["indices"], found.get("values"), found.get("counts")


def _check_result(
    scores: torch.Tensor, label: str, tensor: torch.Tensor, dtype: torch.dtype, width: int | None
) -> None:
    """A result of at least as many rows as `scores`, each of `width` adjacent numbers, or of one."""
    rows, shape = scores.shape[0], () if width is None else (width,)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{label} is {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{label} is {tensor.dtype}; it must be {dtype}")
    check_device(label, tensor, "scores", scores)
    if tensor.ndim != 1 + len(shape) or tensor.shape[0] < rows or tensor.shape[1:] != shape:
        wanted = f"[at least {rows}]" if width is None else f"[at least {rows}, {width}]"
        raise ValueError(f"{label} has shape {list(tensor.shape)}; it must be {wanted}")
    check_stored(label, tensor)
    if shape and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{label} has stride {tensor.stride(-1)} in its last dimension; it must be 1")


def check_workspace(scores: torch.Tensor, workspace: torch.Tensor | None) -> None:
    """Flat bytes on the scores' device; the kernel that is chosen checks the size."""
    if workspace is None:
        return
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace is {type(workspace).__name__}; it must be a torch.Tensor")
    if workspace.dtype != torch.uint8:
        raise TypeError(f"workspace is {workspace.dtype}; it must be torch.uint8")
    if workspace.ndim != 1 or not workspace.is_contiguous():
        raise ValueError(f"workspace has shape {list(workspace.shape)}; it must be flat and contiguous")
    check_device("workspace", workspace, "scores", scores)


def check_window_values(
    scores: torch.Tensor, start_name: str, start: torch.Tensor | None, end_name: str, end: torch.Tensor | None
) -> None:
    """KEYSIFT_CHECK=1: refuse windows that clamping would change. Synchronises."""
    columns = scores.shape[1]
    for name, bound in ((start_name, start), (end_name, end)):
        if bound is not None:
            refuse_first(name, bound, (bound < 0) | (bound > columns), f"[0, {columns}]")
    if start is not None and end is not None:
        refuse_first(end_name, end, end < start, f"{start_name} of its row or more")


def check_length_values(scores: torch.Tensor, seq_lens: torch.Tensor, next_n: int) -> None:
    """KEYSIFT_CHECK=1: refuse lengths that clamping would change. Synchronises."""
    columns, least = scores.shape[1], next_n - 1 if seq_lens.ndim == 1 else 0
    refuse_first("seq_lens", seq_lens, (seq_lens < least) | (seq_lens > columns), f"[{least}, {columns}]")


def check_page_values(
    scores: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    page_table: torch.Tensor,
    page_size: int,
    page_rows: torch.Tensor | None,
) -> None:
    """KEYSIFT_CHECK=1: refuse page ids, below a row's length, that no page has or whose slots no int32 holds, and
    page_rows that the table lacks. Synchronises.
    """
    table_rows, pages = page_table.shape
    if page_rows is not None:
        refuse_first("page_rows", page_rows, (page_rows < 0) | (page_rows >= table_rows), f"[0, {table_rows})")
    rows, columns = scores.shape
    own = torch.arange(rows, device=scores.device) if page_rows is None else page_rows.long()
    first = torch.zeros_like(own) if start is None else start.long()
    last = torch.full_like(own, columns) if end is None else end.long()
    largest = 2**31 // page_size  # page * page_size + offset is an int32
    page = torch.arange(pages, device=scores.device)
    reached = torch.zeros(table_rows, dtype=torch.int64, device=scores.device)
    reached.scatter_reduce_(0, own, (last - first).clamp(min=0), "amax")
    bad = (page * page_size < reached[:, None]) & ((page_table < 0) | (page_table >= largest))
    refuse_first("page_table", page_table, bad, f"[0, {largest}) below the length of a row that reads it")


def _check_integers(scores: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    check_dtype(name, tensor, INTEGERS)
    check_device(name, tensor, "scores", scores)
