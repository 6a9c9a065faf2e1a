"""What score means, in torch, on any device. CONTRACT.md, score."""

import torch

from keysift.layout import take

#: Keys per product.
TILE = 128


@torch.no_grad()
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    next_n: int,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write the cells of `out` [M, N] inside each row's window. A row and a tile of keys at a time: the library below
    is free to round a product differently for another shape, and a score must depend on its query and its key alone.
    """
    rows = q.shape[0]
    pages, page_size = (1, k.shape[0]) if block_table is None else (block_table.shape[1], k.shape[1])
    columns = min(pages * page_size, out.shape[1])
    column = torch.arange(columns, device=q.device)
    lower, upper = windows(rows, columns, starts, ends, next_n, q.device)
    for row in range(rows):
        inside = (column >= lower[row]) & (column < upper[row])
        keys, scale = k, k_scale
        if block_table is not None:
            # Pages past the row's end may hold anything, so page 0 stands in for them.
            reached = torch.arange(pages, device=q.device) * page_size < upper[row]
            table = block_table[row // next_n].where(reached, 0).long()
            keys = take(k, table).flatten(0, 1)[:columns]
            scale = None if k_scale is None else k_scale[table].flatten()[:columns]
        query, weight = q[row].float().clone(), weights[row].clone()
        tiles = torch.nn.functional.pad(keys.float(), (0, 0, 0, -columns % TILE)).unflatten(0, (-1, TILE))
        # [H, D] x [D, TILE], relu, then [H] x [H, TILE]
        scores = torch.cat([weight @ (query @ tile.T).relu() for tile in tiles])[:columns]
        if scale is not None:
            scores = scores * scale
        out[row, :columns].copy_(torch.where(inside, scores, out[row, :columns]))


def windows(
    rows: int, columns: int, starts: torch.Tensor | None, ends: torch.Tensor | None, next_n: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clamped window [lower, upper) of every row, int64 [M] each; `ends` per row, or per request of next_n rows."""
    row = torch.arange(rows, device=device)
    lower = torch.zeros_like(row) if starts is None else starts.long().clamp(0, columns)
    if ends is None:
        upper = torch.full_like(row, columns)
    elif ends.shape[0] == rows:
        upper = ends.long()
    else:
        upper = ends.long().clamp(0, columns + next_n)[row // next_n] - next_n + row % next_n + 1
    return lower, torch.maximum(upper.clamp(max=columns), lower)
