"""The indexer of one layer, score then select, in bounded memory: what a model or an engine calls.

The scores of all rows at once are rows x columns float32, 4 GB for 8192 tokens over 131072. They are never all held:
some rows are scored, their keys selected, and the memory is used again. A row's scores do not depend on the other rows
of a call, so the selection is the same for every budget.
"""

from collections.abc import Iterator

import torch

from keysift.ops.score import index_scores, paged_index_scores
from keysift.ops.select import select

#: Bytes of scores held at a time unless the caller says otherwise.
MEMORY_BUDGET = 128 << 20


def index_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    topk: int,
    *,
    index_base: str = "window",
    out: torch.Tensor | None = None,
    memory_budget: int = MEMORY_BUDGET,
    score_kernel: str | None = None,
    select_kernel: str | None = None,
) -> torch.Tensor:
    """The topk best keys of packed queries, keys in one piece.

    q, k, k_scale, weights, starts, ends  as `index_scores` takes them: [M, H, D], [N, D], [N], [M, H], [M], [M]
    topk           keys per row, any integer >= 1
    index_base     "window" (column - start) or "column"
    out            int32 [>= M, topk]
    memory_budget  bytes of scores held at a time, at least one row (4 * N)

    Returns int32 [M, topk], -1 at the end of a row that has fewer keys.
    Raises ValueError or TypeError as `index_scores` and `select` do, and if the budget does not hold one row.

    Equivalent to:
        select(index_scores(q, k, k_scale, weights, starts, ends), topk, start=starts, end=ends, index_base=index_base)

    >>> q, k = torch.ones(3, 1, 1), torch.tensor([[5.0], [7.0], [6.0]])
    >>> index_prefill(q, k, None, torch.ones(3, 1), None, torch.tensor([1, 2, 3]), 1).tolist()
    [[0], [1], [1]]
    """
    out = _output(q, topk, out)
    for part in _chunks(q.shape[0], k.shape[0], 1, memory_budget):
        start = None if starts is None else starts[part]
        end = None if ends is None else ends[part]
        scores = index_scores(q[part], k, k_scale, weights[part], start, end, kernel=score_kernel)
        select(scores, topk, start=start, end=end, index_base=index_base, out=out[part], kernel=select_kernel)
    return out[: q.shape[0]]


def index_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    next_n: int = 1,
    *,
    starts: torch.Tensor | None = None,
    index_base: str = "window",
    out: torch.Tensor | None = None,
    memory_budget: int = MEMORY_BUDGET,
    score_kernel: str | None = None,
    select_kernel: str | None = None,
) -> torch.Tensor:
    """The topk best keys of decoding queries against a paged cache.

    q, cache, weights, seq_lens, block_table, next_n  as `paged_index_scores` takes them
    topk           keys per row, any integer >= 1
    starts         [B * next_n] int32 or int64: the first column of each row (left padding), default 0
    index_base     "window" (column - start), "column", or "slot" (page * page_size + offset, through block_table;
                   columns count from 0, so without `starts`)
    out            int32 [>= B * next_n, topk]
    memory_budget  bytes of scores held at a time, at least those of one request

    Returns int32 [B * next_n, topk], -1 at the end of a row that has fewer keys.
    Raises ValueError or TypeError as `paged_index_scores` and `select` do, and if the budget does not hold one request.

    Equivalent to, for next_n = 1:
        scores = paged_index_scores(q, cache, weights, seq_lens, block_table)
        select(scores, topk, start=starts, end=seq_lens, index_base=index_base)

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> q, weights, lens, table = torch.ones(1, 1, 1), torch.ones(1, 1), torch.tensor([3]), torch.tensor([[1, 0]])
    >>> index_decode(q, cache, weights, lens, table, 2, index_base="slot").sort().values
    tensor([[2, 3]], dtype=torch.int32)
    """
    if index_base == "slot" and starts is not None:
        raise ValueError("index_base is 'slot' beside starts; slots count columns from 0, so leave one of them out")
    rows, out = q.shape[0], _output(q, topk, out)
    row = torch.arange(rows, device=q.device)
    if seq_lens.ndim == 1 and next_n > 1:
        lengths = seq_lens.long().clamp(0, block_table.shape[1] * cache.shape[1] + next_n)
        ends = (lengths[:, None] - next_n + 1 + row[:next_n]).flatten()
    else:
        ends = seq_lens.flatten()
    for part in _chunks(rows, block_table.shape[1] * cache.shape[1], next_n, memory_budget):
        requests = slice(part.start // next_n, -(-part.stop // next_n))
        table = block_table[requests]
        scores = paged_index_scores(
            q[part], cache, weights[part], seq_lens[requests], table, next_n, kernel=score_kernel
        )
        start = None if starts is None else starts[part]
        if index_base == "slot":
            select(
                scores, topk, end=ends[part], page_table=table, page_size=cache.shape[1],
                page_rows=(row[: part.stop - part.start] // next_n), out=out[part], kernel=select_kernel,
            )  # fmt: skip
        else:
            select(
                scores, topk, start=start, end=ends[part], index_base=index_base, out=out[part], kernel=select_kernel
            )
    return out[:rows]


def _output(q: torch.Tensor, topk: int, out: torch.Tensor | None) -> torch.Tensor:
    if isinstance(topk, bool) or not isinstance(topk, int):
        raise TypeError(f"topk is {topk!r}; it must be an int")
    if topk < 1:
        raise ValueError(f"topk is {topk}; it must be at least 1")
    return q.new_empty(q.shape[0], topk, dtype=torch.int32) if out is None else out


def _chunks(rows: int, columns: int, group: int, memory_budget: int) -> Iterator[slice]:
    """Slices of rows, whole groups each, whose float32 scores fit the budget."""
    size = memory_budget // max(1, 4 * columns * group) * group
    if size < 1:
        raise ValueError(
            f"memory_budget is {memory_budget} bytes; {group} rows of {columns} scores need {4 * columns * group}"
        )
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))
