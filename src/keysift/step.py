"""One decode step of DeepSeek Sparse Attention: the whole flow as prose. Read this first.

A model that has seen a long text decides, for one new token, which few earlier tokens to look at, and looks only at
those. Per layer it keeps two things of every earlier token: a small index key, to decide with, and a latent, to look
at. Both lie in pages; a request's block table says which pages are its own, and position p of the request is the slot
`block_table[p // page_size] * page_size + p % page_size`.
"""

import torch

from keysift.ops.score import paged_index_scores
from keysift.ops.select import select
from keysift.ops.sparse_mla import sparse_mla


def decode_step(
    q: torch.Tensor,
    latents: torch.Tensor,
    index_q: torch.Tensor,
    index_keys: torch.Tensor,
    index_weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    scale: float,
    value_dim: int = 512,
) -> torch.Tensor:
    """The attention output [B, heads, value_dim] of one new token in each of B requests.

    q             [B, heads, D], the key up-projection already folded in (absorbed)
    latents       [pages, page_size, D]
    index_q       [B, H, d]; index_keys  [pages, page_size, d]; index_weights  [B, H] float32
    seq_lens      [B]; block_table  [B, pages per request], int32 or int64
    topk          tokens to look at; scale  of the softmax; value_dim  columns of a latent that are its value

    >>> latents = index_keys = torch.tensor([[[1.0], [4.0]], [[2.0], [3.0]]])  # two pages of two tokens
    >>> one, weight = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> lens, table = torch.tensor([3]), torch.tensor([[1, 0]])  # the request reads 2, 3, 1
    >>> decode_step(0 * one, latents, one, index_keys, weight, lens, table, topk=2, scale=1.0, value_dim=1)
    tensor([[[2.5000]]])
    """
    # How relevant is every earlier token? Many small heads vote: a dot product, cut at zero, weighted, summed.
    scores = paged_index_scores(index_q, index_keys, index_weights, seq_lens, block_table)
    # Which are the most relevant? Exactly the topk best, as slots; -1 where a request is shorter.
    slots = select(scores, topk, end=seq_lens, page_table=block_table, page_size=index_keys.shape[1])
    # Attend to those alone: the softmax over topk latents, however long the text.
    out, _ = sparse_mla(q, latents, slots, scale, value_dim=value_dim)  # type: ignore[arg-type]
    return out
