"""What select means, in torch, on any device. CONTRACT.md, select 1-10."""

import torch

#: Scores sorted at a time; bounds the memory of the fallback without changing its result.
CELLS = 1 << 24


@torch.no_grad()
def run(
    scores: torch.Tensor,
    k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    page_table: torch.Tensor | None,
    page_rows: torch.Tensor | None,
    page_size: int,
    index_base: str,
    sorted: bool,
    out: torch.Tensor,
    values: torch.Tensor | None,
    counts: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Write `out` [R, k], `values` and `counts`, some rows at a time. Allocates; uses no workspace."""
    rows, columns = scores.shape
    lower, upper = windows(rows, columns, start, end, next_n, scores.device)
    if page_table is not None:
        upper = torch.minimum(upper, lower + page_table.shape[1] * page_size)
        table_rows = torch.arange(rows, device=scores.device) if page_rows is None else page_rows.long()
    chunk = max(1, CELLS // columns)
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        best, best_values, found = select_windows(scores[part], k, lower[part], upper[part])
        if sorted:
            best, order = best.where(best >= 0, columns).sort(1)
            best = best.where(best < columns, -1)
            best_values = best_values.gather(1, order)
        selected = best >= 0
        position = best - lower[part, None]
        if page_table is not None and page_table.shape[1]:
            position = position.where(selected, 0)
            page = page_table[table_rows[part, None], position // page_size].long()
            result = (page * page_size + position % page_size).where(selected & (page >= 0), -1)
            best_values = best_values.masked_fill(result < 0, -torch.inf)
        else:
            result = best if index_base == "column" else position.where(selected, -1)
        out[part].copy_(result)
        if values is not None:
            values[part].copy_(best_values)
        if counts is not None:
            counts[part].copy_(found)


def windows(
    rows: int, columns: int, start: torch.Tensor | None, end: torch.Tensor | None, next_n: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clamped window [lower, upper) of every row, int64 [R] each (select 2)."""
    row = torch.arange(rows, device=device)
    lower = torch.zeros_like(row) if start is None else start.long().clamp(0, columns)
    if end is None:
        upper = torch.full_like(row, columns)
    else:  # clamped before the arithmetic, which the largest integers would overflow
        upper = end.long().clamp(0, columns + next_n)[row // next_n] - next_n + row % next_n + 1
    return lower, torch.maximum(upper.clamp(max=columns), lower)


def select_windows(
    scores: torch.Tensor, k: int, lower: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns [R, k] best first (-1 where there is none), their values, and how many (select 3 and 4)."""
    columns = scores.shape[1]
    column = torch.arange(columns, device=scores.device)
    eligible = (column >= lower[:, None]) & (column < upper[:, None]) & (scores > -torch.inf)  # NaN > -inf is false
    # A stable sort keeps the lower column first among equals; some sorts tell -0.0 from +0.0, so 0.0 is added.
    order = (scores + 0.0).masked_fill(~eligible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    if k > columns:
        order = torch.nn.functional.pad(order, (0, k - columns))
    order = order[:, :k]
    found = eligible.sum(1).clamp(max=k)
    selected = torch.arange(k, device=scores.device) < found[:, None]
    values = scores.gather(1, order).masked_fill(~selected, -torch.inf)
    return order.where(selected, -1), values, found
