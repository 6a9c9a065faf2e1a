"""Requests with unequal numbers of query tokens, as rows of one decode call and back.

A decode call has `next_n` rows for every request. With speculative decoding a request may bring fewer tokens: its other
rows stand empty, by a length of 0. No step here asks the device for a value, so a graph replays with other lengths.
"""

import torch

from keysift import dispatch
from keysift.checks import INTEGERS, check_device, check_dtype, check_positive, refuse_first


def pack_requests(
    q: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, query_starts: torch.Tensor, next_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index queries of unequal requests as `index_decode` and `paged_index_scores` take them.

    q             [T, H, D] any dtype; weights  [T, H] float32: the query tokens of all requests, one after another
    seq_lens      [B] int32 or int64: the length of each request, its query tokens included
    query_starts  [B + 1] int32 or int64, ascending: request b has tokens [query_starts[b], query_starts[b + 1]), next_n
                  at most. Tokens at or beyond query_starts[B] belong to none (a graph's padding)
    next_n        rows for every request, at least the tokens of the longest

    Returns q [B * next_n, H, D], weights [B * next_n, H] and lengths [B, next_n] of the dtype of `seq_lens`: the j-th
    token of request b is row b * next_n + j, and its row ends behind it. Rows without a token hold zeros, and length 0.
    Raises ValueError or TypeError for a wrong rank, dtype, device or size; with KEYSIFT_CHECK=1 for requests of too
    many tokens.

    >>> q, weights = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), torch.ones(3, 1)
    >>> rows, _, lengths = pack_requests(q, weights, torch.tensor([9, 7]), torch.tensor([0, 1, 3]), next_n=2)
    >>> rows.flatten().tolist(), lengths.tolist()
    ([1.0, 0.0, 2.0, 3.0], [[9, 0], [6, 7]])
    """
    _check_starts(q, "q", query_starts, next_n)
    check_dtype("weights", weights, (torch.float32,))
    check_dtype("seq_lens", seq_lens, INTEGERS)
    for name, tensor in (("weights", weights), ("seq_lens", seq_lens)):
        check_device(name, tensor, "q", q)
    if q.ndim != 3 or weights.shape != q.shape[:2]:
        raise ValueError(
            f"q has shape {list(q.shape)}, weights {list(weights.shape)}; they must be [tokens, heads, head size] and "
            "[tokens, heads]"
        )
    requests = query_starts.shape[0] - 1
    if seq_lens.shape != (requests,):
        raise ValueError(
            f"seq_lens has shape {list(seq_lens.shape)}; query_starts has {requests} requests, "
            f"so it must be [{requests}]"
        )
    turn = torch.arange(next_n, device=q.device)
    token = query_starts[:-1, None].long() + turn  # [B, next_n]
    present = token < query_starts[1:, None]
    lengths = seq_lens[:, None] + (token + 1 - query_starts[1:, None]).to(seq_lens.dtype)
    lengths = torch.where(present, lengths, 0)
    if q.shape[0] == 0:
        return q.new_zeros(requests * next_n, *q.shape[1:]), weights.new_zeros(requests * next_n, q.shape[1]), lengths
    place = token.clamp(0, q.shape[0] - 1).flatten()
    row_present = present.flatten()[:, None]
    packed_q = _rows(q, place, row_present[..., None])
    return packed_q, torch.where(row_present, weights[place], 0.0), lengths


def unpack_requests(rows: torch.Tensor, query_starts: torch.Tensor, next_n: int, *, out: torch.Tensor) -> torch.Tensor:
    """What a decode call gave for packed requests, brought back to their tokens.

    rows          [B * next_n, ...]: indices, scores, outputs
    query_starts  [B + 1], next_n  as `pack_requests` took them
    out           [T, ...] of the dtype of `rows`: the row of every token; tokens at or beyond query_starts[B] are left
                  alone

    Returns out.
    Raises ValueError or TypeError for a wrong rank, dtype, device or size.

    >>> rows, out = torch.tensor([[10], [0], [20], [30]]), torch.full((4, 1), -7)
    >>> unpack_requests(rows, torch.tensor([0, 1, 3]), 2, out=out).flatten().tolist()
    [10, 20, 30, -7]
    """
    _check_starts(rows, "rows", query_starts, next_n)
    check_dtype("out", out, (rows.dtype,))
    check_device("out", out, "rows", rows)
    requests = query_starts.shape[0] - 1
    if rows.ndim < 1 or rows.shape[0] != requests * next_n:
        raise ValueError(
            f"rows has shape {list(rows.shape)}; query_starts has {requests} requests of next_n = {next_n}, "
            f"so it must be [{requests * next_n}, ...]"
        )
    if out.ndim != rows.ndim or out.shape[1:] != rows.shape[1:]:
        raise ValueError(f"out has shape {list(out.shape)}; it must be [tokens, *{list(rows.shape[1:])}]")
    if requests == 0 or out.shape[0] == 0:
        return out
    token = torch.arange(out.shape[0], device=rows.device)
    starts = query_starts.long().contiguous()
    request = torch.searchsorted(starts, token, right=True).sub(1).clamp(0, requests - 1)
    turn = token - starts[request]
    present = ((token < starts[-1]) & (turn >= 0)).view(-1, *[1] * (rows.ndim - 1))
    place = (request * next_n + turn).clamp(0, rows.shape[0] - 1)
    out.copy_(torch.where(present, rows[place], out))
    return out


def _rows(x: torch.Tensor, place: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """x[place], zeros where absent; fp8, which torch does not index, by its bytes."""
    if x.element_size() > 1:
        return torch.where(present, x[place], 0)
    return torch.where(present, x.view(torch.uint8)[place], 0).view(x.dtype)


def _check_starts(tensor: torch.Tensor, name: str, query_starts: torch.Tensor, next_n: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a torch.Tensor")
    check_positive(next_n=next_n)
    check_dtype("query_starts", query_starts, INTEGERS)
    check_device("query_starts", query_starts, name, tensor)
    if query_starts.ndim != 1 or query_starts.shape[0] == 0:
        raise ValueError(f"query_starts has shape {list(query_starts.shape)}; it must be [requests + 1]")
    if dispatch.checks_values():
        tokens = query_starts.diff(prepend=query_starts[:1])
        bad = (tokens < 0) | (tokens > next_n)
        refuse_first("query_starts", query_starts, bad, f"0 to {next_n} more than the one before")
