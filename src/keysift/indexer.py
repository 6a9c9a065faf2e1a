"""The indexer of one layer, score then select, in bounded memory: what a model or an engine calls.

The scores of all rows at once are rows x columns float32, 4 GB for 8192 tokens over 131072. They are never all held:
some rows are scored, their keys selected, and the memory is used again. Where a single row is too long, it is scored
piece by piece: the best so far stand before the next piece, and select takes the best of both. Those best are in column
order, so that an earlier column still wins among equals. A score depends on its query and its key alone: the selection
is the same for every budget.
"""

from collections.abc import Callable, Iterator

import torch

from keysift import dispatch
from keysift.checks import check_positive
from keysift.layout import IndexLayout
from keysift.ops.score import checks as score_checks
from keysift.ops.score import index_scores, paged_index_scores
from keysift.ops.select import checks as select_checks
from keysift.ops.select import select

#: Bytes of scores held at a time unless the caller says otherwise.
MEMORY_BUDGET = 128 << 20
#: Pieces of a row begin at multiples of this many columns, where the budget allows it.
STEP = 512


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
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    page_rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    memory_budget: int = MEMORY_BUDGET,
    score_kernel: str | None = None,
    select_kernel: str | None = None,
) -> torch.Tensor:
    """The topk best keys of packed queries, keys in one piece.

    q, k, k_scale, weights, starts, ends  as `index_scores` takes them: [M, H, D], [N, D], [N], [M, H], [M], [M]
    topk           keys per row, any integer >= 1
    index_base     "window" (column - start) or "column"
    page_table, page_size, page_rows  slots instead of columns, as `select` takes them
    out            int32 [>= M, topk]
    memory_budget  bytes of scores held at a time, at least those of topk + 1 columns; the result is the same for all

    A cache with one key for every `ratio` tokens (V4: 4 or 128) counts its columns in keys: the token at `position` may
    look at ends = (position + 1) // ratio of them.

    Returns int32 [M, topk], -1 at the end of a row that has fewer keys.
    Raises ValueError or TypeError before anything is written: as `index_scores` and `select` do, and for a budget that
    is too small.

    Equivalent to:
        select(index_scores(q, k, k_scale, weights, starts, ends), topk, start=starts, end=ends, index_base=index_base)

    >>> q, k = torch.ones(3, 1, 1), torch.tensor([[5.0], [7.0], [6.0]])
    >>> index_prefill(q, k, None, torch.ones(3, 1), None, torch.tensor([1, 2, 3]), 1).tolist()
    [[0], [1], [1]]
    """
    score_checks.check_queries(q, weights)
    score_checks.check_keys(q, k, k_scale)
    score_checks.check_windows(q, starts, ends)
    select_checks.check_index_base(weights, index_base, page_table, page_size, page_rows)
    rows, columns = q.shape[0], k.shape[0]
    out = _output(weights, topk, out)
    if dispatch.checks_values():
        score_checks.check_window_values(columns, starts, ends)
        if page_table is not None:
            select_checks.check_page_values(weights, starts, ends, page_table, page_size or 1, page_rows)
    if page_table is not None and page_rows is None:
        page_rows = torch.arange(rows, device=q.device)
    parts, piece = _plan(rows, columns, 1, 1, topk, memory_budget)
    for part in parts:
        start, end = _part(starts, part), _part(ends, part)
        table_rows = _part(page_rows, part)
        if piece == columns:
            scores = index_scores(q[part], k, k_scale, weights[part], start, end, kernel=score_kernel)
            select(
                scores, topk, start=start, end=end, index_base=index_base, page_table=page_table, page_size=page_size,
                page_rows=table_rows, out=out[part], kernel=select_kernel,
            )  # fmt: skip
            continue

        def score(
            first: int, last: int, low: torch.Tensor, high: torch.Tensor, to: torch.Tensor, part: slice = part
        ) -> None:
            scale = None if k_scale is None else k_scale[first:last]
            index_scores(q[part], k[first:last], scale, weights[part], low, high, out=to, kernel=score_kernel)

        low, high = _bounds(start, end, weights[part], columns)
        if page_table is not None and page_size is not None:
            high = torch.minimum(high, low + page_table.shape[1] * page_size)
        best = _best_of_pieces(score, low, high, columns, piece, topk, select_kernel)
        out[part] = _based(best, low, index_base, page_table, page_size or 1, table_rows)
    return out[:rows]


def index_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    next_n: int = 1,
    *,
    layout: IndexLayout | None = None,
    starts: torch.Tensor | None = None,
    index_base: str = "window",
    out: torch.Tensor | None = None,
    memory_budget: int = MEMORY_BUDGET,
    score_kernel: str | None = None,
    select_kernel: str | None = None,
) -> torch.Tensor:
    """The topk best keys of decoding queries against a paged cache.

    q, cache, weights, seq_lens, block_table, next_n, layout  as `paged_index_scores` takes them
    topk           keys per row, any integer >= 1
    starts         [B * next_n] int32 or int64: the first column of each row (left padding), default 0
    index_base     "window" (column - start), "column", or "slot" (page * page_size + offset, through block_table;
                   columns count from 0, so without `starts`)
    out            int32 [>= B * next_n, topk]
    memory_budget  bytes of scores held at a time, at least those of topk columns and a page for one request; the result
                   is the same for all

    Lengths count columns: in a cache with one key for every `ratio` tokens, keys. Requests of unequal numbers of tokens
    are packed by `pack_requests`.

    Returns int32 [B * next_n, topk], -1 at the end of a row that has fewer keys.
    Raises ValueError or TypeError before anything is written: as `paged_index_scores` and `select` do, and for a budget
    that is too small.

    Equivalent to, for next_n = 1:
        scores = paged_index_scores(q, cache, weights, seq_lens, block_table)
        select(scores, topk, start=starts, end=seq_lens, index_base=index_base)

    >>> cache = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> q, weights, lens, table = torch.ones(1, 1, 1), torch.ones(1, 1), torch.tensor([3]), torch.tensor([[1, 0]])
    >>> index_decode(q, cache, weights, lens, table, 2, index_base="slot").sort().values
    tensor([[2, 3]], dtype=torch.int32)
    """
    score_checks.check_queries(q, weights)
    keys, _ = score_checks.check_cache(q, cache, layout)
    score_checks.check_requests(q, seq_lens, block_table, next_n)
    score_checks.check_windows(q, starts, None)
    if index_base == "slot" and starts is not None:
        raise ValueError("index_base is 'slot' beside starts; slots count columns from 0, so leave one of them out")
    if index_base not in ("window", "column", "slot"):
        raise ValueError(f"index_base is {index_base!r}; it may be 'window', 'column' or 'slot'")
    out, page_size = _output(weights, topk, out), cache.shape[1]
    rows, columns = q.shape[0], block_table.shape[1] * page_size
    if dispatch.checks_values():
        score_checks.check_request_values(keys, seq_lens, block_table, next_n, columns)
        score_checks.check_window_values(columns, starts, None)
    if seq_lens.ndim == 1 and next_n > 1:
        lengths = seq_lens.long().clamp(0, columns + next_n)
        ends = (lengths[:, None] - next_n + 1 + torch.arange(next_n, device=q.device)).flatten()
    else:
        ends = seq_lens.flatten()
    parts, piece = _plan(rows, columns, next_n, page_size, topk, memory_budget)
    for part in parts:
        requests = slice(part.start // next_n, -(-part.stop // next_n))
        table, start, end = block_table[requests], _part(starts, part), ends[part]
        slots: tuple[torch.Tensor, int, torch.Tensor] | tuple[None, None, None] = (None, None, None)
        if index_base == "slot":  # with each row's row of `table`
            slots = (table, page_size, torch.arange(part.stop - part.start, device=q.device) // next_n)
        if piece == columns:
            lens = seq_lens[requests]
            scores = paged_index_scores(
                q[part], cache, weights[part], lens, table, next_n, layout=layout, kernel=score_kernel
            )
            select(
                scores, topk, start=start, end=end, index_base="window" if index_base == "slot" else index_base,
                page_table=slots[0], page_size=slots[1], page_rows=slots[2], out=out[part], kernel=select_kernel,
            )  # fmt: skip
            continue

        def score(
            first: int, last: int, _: torch.Tensor, high: torch.Tensor, to: torch.Tensor, part: slice = part,
            table: torch.Tensor = table,
        ) -> None:  # fmt: skip
            pages = table[:, first // page_size : -(-last // page_size)]
            lengths = high.view(-1, next_n)
            paged_index_scores(
                q[part], cache, weights[part], lengths, pages, next_n, layout=layout, out=to, kernel=score_kernel
            )

        low, high = _bounds(start, end, weights[part], columns)
        best = _best_of_pieces(score, low, high, columns, piece, topk, select_kernel)
        out[part] = _based(best, low, index_base, slots[0], page_size, slots[2])
    return out[:rows]


def _output(weights: torch.Tensor, topk: int, out: torch.Tensor | None) -> torch.Tensor:
    check_positive(topk=topk)
    select_checks.check_out(weights, topk, out, False, False)
    return weights.new_empty(weights.shape[0], topk, dtype=torch.int32) if out is None else out


def _plan(
    rows: int, columns: int, group: int, page_size: int, topk: int, memory_budget: int
) -> tuple[Iterator[slice], int]:
    """Slices of rows, whole groups each, whose float32 scores fit the budget; and how many columns are scored at once.

    All of them if a group's scores fit; if not, pieces of whole pages, beside the topk that are kept.
    """
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int):
        raise TypeError(f"memory_budget is {memory_budget!r}; it must be an int, bytes")
    groups = memory_budget // max(1, 4 * columns * group)
    if groups:
        return _slices(rows, groups * group), columns
    piece = memory_budget // (4 * group) - topk
    step = -(-STEP // page_size) * page_size
    piece = piece // step * step if piece >= step else piece // page_size * page_size
    if piece < 1:
        least = min(columns, topk + page_size)
        raise ValueError(
            f"memory_budget is {memory_budget} bytes; {group} rows of {least} scores, the least at a time for "
            f"topk = {topk}, need {4 * group * least}"
        )
    return _slices(rows, group), piece


def _slices(rows: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _part(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _bounds(
    start: torch.Tensor | None, end: torch.Tensor | None, rows: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clamped window of each row, int64."""
    row = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    low = row if start is None else start.long().clamp(0, columns)
    high = row + columns if end is None else end.long().clamp(0, columns)
    return low, torch.maximum(low, high)


def _best_of_pieces(
    score: Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], None],
    low: torch.Tensor,
    high: torch.Tensor,
    columns: int,
    piece: int,
    topk: int,
    kernel: str | None,
) -> torch.Tensor:
    """The topk best columns of windows [low, high), ascending, -1 last; `score` fills a piece of every row."""
    rows = low.shape[0]
    scores = low.new_full((rows, topk + piece), -torch.inf, dtype=torch.float32)  # the best so far, then a piece
    best = low.new_full((rows, topk), -1)
    for first in range(0, columns, piece):
        last = min(first + piece, columns)
        lower, upper = (bound.sub(first).clamp(0, last - first) for bound in (low, high))
        score(first, last, lower, upper, scores[:, topk : topk + last - first])
        # Where a window begins inside the piece, nothing was kept before it.
        begin = torch.where(low > first, topk + lower, 0)
        place, values = select(
            scores, topk, start=begin, end=topk + upper, index_base="column", sorted=True, return_values=True,
            kernel=kernel,
        )  # fmt: skip
        place = place.long()
        kept = best.gather(1, place.clamp(0, topk - 1))
        best = torch.where(place < topk, kept, place + (first - topk)).where(place >= 0, -1)
        scores[:, :topk] = values
    return best


def _based(
    best: torch.Tensor,
    low: torch.Tensor,
    index_base: str,
    page_table: torch.Tensor | None,
    page_size: int,
    page_rows: torch.Tensor | None,
) -> torch.Tensor:
    """Columns in the base that the caller wants, as `select` gives them."""
    if index_base == "column":
        return best
    position = best - low[:, None]
    if page_table is None or page_rows is None:
        return position.where(best >= 0, -1)
    page = page_table[page_rows.long()].long().gather(1, (position // page_size).clamp(min=0))
    return (page * page_size + position % page_size).where((best >= 0) & (page >= 0), -1)
