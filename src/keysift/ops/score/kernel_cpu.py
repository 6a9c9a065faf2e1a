"""score on a CPU: batches of equal matrix products.

Parallel over the batch (torch's threads). Every cell comes from a product of one and the same shape, one query's
[H, D] times a tile of [D, TILE] keys, whatever the call: so a row's scores cannot depend on the other rows, which a
product over all rows at once would not promise. The batch runs over rows (prefill) or over tiles (decode), and its
logits stay in the cache. Bound by arithmetic.
"""

import torch

#: Keys per product: large enough for the matrix product's speed, small enough that a short row wastes little.
TILE = 512
#: Logits per batch, H * TILE each; 4 MB of float32.
CELLS = 1 << 20
#: Floats per 64 bytes, what torch aligns an allocation to.
ALIGNMENT = 16
#: Heads are filled up to a multiple of this: left-over rows of a product go through kernels that round by batch size.
HEADS = 8


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
    """Write the cells of `out` [M, N] inside each row's window."""
    if block_table is None:
        windows = _windows(q.shape[0], k.shape[0], starts, ends, 1)
        _score(q, k, k_scale, weights, windows, out)
        return
    page_size = k.shape[1]
    columns = min(block_table.shape[1] * page_size, out.shape[1])
    windows = _windows(q.shape[0], columns, None, ends, next_n)
    for request, table in enumerate(block_table):
        rows = slice(request * next_n, (request + 1) * next_n)
        reached = max(upper for _, upper in windows[rows])
        if reached:
            pages = table[: -(-reached // page_size)]
            if int(pages.min()) < 0 or int(pages.max()) >= len(k):  # indexing would take -1 for the last page
                raise IndexError(f"block_table[{request}] names pages {pages.tolist()}; cache has {len(k)}")
            scale = None if k_scale is None else _pages(k_scale, pages)
            _score(q[rows], _pages(k, pages), scale, weights[rows], windows[rows], out[rows])


def _pages(k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The keys of a request [pages * page_size, D], or their scales; not copied when they are one page (a cache in one
    piece).
    """
    if len(table) > 1:
        if k.element_size() > 1:
            return k.index_select(0, table).flatten(0, 1)
        return k.view(torch.uint8).index_select(0, table).view(k.dtype).flatten(0, 1)  # fp8, which torch does not index
    return k[int(table[0])]


def _windows(
    rows: int, columns: int, starts: torch.Tensor | None, ends: torch.Tensor | None, next_n: int
) -> list[tuple[int, int]]:
    lower = [0] * rows if starts is None else [min(max(start, 0), columns) for start in starts.tolist()]
    if ends is None:
        upper = [columns] * rows
    else:
        upper = ends.tolist()
        if len(upper) != rows:
            upper = [end - next_n + 1 + j for end in upper for j in range(next_n)]
    return [(low, max(low, min(high, columns))) for low, high in zip(lower, upper, strict=True)]


def _score(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    windows: list[tuple[int, int]],
    out: torch.Tensor,
) -> None:
    rows, heads, _ = q.shape
    if heads % HEADS:
        q = torch.nn.functional.pad(q.float(), (0, 0, 0, HEADS - heads % HEADS))
    batch = max(1, CELLS // (q.shape[1] * TILE))
    if rows * TILE >= k.shape[0]:
        for first in range(0, rows, batch):
            part = slice(first, first + batch)
            _score_rows(_aligned(q[part]), k, k_scale, _aligned(weights[part]), windows[part], out[part])
    else:
        q, weights = _aligned(q), _aligned(weights)
        for row in range(rows):
            _score_tiles(q[row], k, k_scale, weights[row], *windows[row], out[row], batch)


def _score_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    windows: list[tuple[int, int]],
    out: torch.Tensor,
) -> None:
    """Some rows, tile by tile: q [R, H, D], out [R, N]."""
    rows, _, head_dim = q.shape
    lower, upper = min(low for low, _ in windows), max(high for _, high in windows)
    inner_lower, inner_upper = max(low for low, _ in windows), min(high for _, high in windows)
    for first in range(lower // TILE * TILE, upper, TILE):
        last = min(first + TILE, upper)
        keys = _tiles(k, first, first + TILE).expand(rows, TILE, head_dim)
        scores = _logits(q, keys, weights)[:, : last - first]
        if k_scale is not None:
            scores *= k_scale[first:last]
        if inner_lower <= first and last <= inner_upper:
            out[:, first:last] = scores
        else:
            bounds = torch.tensor(windows, device="cpu")
            column = torch.arange(first, last, device="cpu")
            inside = (column >= bounds[:, :1]) & (column < bounds[:, 1:])
            out[:, first:last][inside] = scores[inside]


def _score_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    lower: int,
    upper: int,
    out: torch.Tensor,
    batch: int,
) -> None:
    """One row, some tiles at a time: q [H, D], out [N]."""
    for first in range(lower // TILE * TILE, upper, batch * TILE):
        tiles = min(batch, -(-(upper - first) // TILE))
        keys = _tiles(k, first, first + tiles * TILE)
        scores = _logits(q.expand(tiles, *q.shape), keys, weights.expand(tiles, -1)).flatten()
        low, high = max(lower, first), min(upper, first + tiles * TILE)
        part = scores[low - first : high - first]
        out[low:high] = part if k_scale is None else part * k_scale[low:high]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A float32 copy of x [R, ...] whose rows all begin at a multiple of 64 bytes."""
    width = x[0].numel()
    whole = x.new_empty(len(x), -(-width // ALIGNMENT) * ALIGNMENT, dtype=torch.float32)
    whole[:, :width] = x.flatten(1)
    return whole[:, :width].unflatten(1, x.shape[1:])


def _tiles(k: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Keys [first, last) as float32 [tiles, TILE, D], adjacent and aligned, the last tile filled up with zeros."""
    keys = k[first:last]
    is_ready = keys.dtype == torch.float32 and keys.is_contiguous() and keys.data_ptr() % (4 * ALIGNMENT) == 0
    if len(keys) < last - first or not is_ready:
        whole = k.new_empty(last - first, k.shape[1], dtype=torch.float32)
        whole[: len(keys)] = keys
        whole[len(keys) :] = 0.0
        keys = whole
    return keys.view(-1, TILE, k.shape[1])


def _logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores [batch, TILE] of q [batch, >= H, D] against keys [batch, TILE, D] with weights [batch, H]."""
    dots = torch.bmm(q, keys.transpose(1, 2))[:, : weights.shape[1]].relu_()  # [batch, H, TILE]
    return torch.bmm(weights.unsqueeze(1), dots).squeeze(1)
