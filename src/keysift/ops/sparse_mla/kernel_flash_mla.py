"""sparse_mla by the package flash_mla (MIT), DeepSeek's own kernels for sm_90: from arguments to arguments.

Latents of bfloat16 go to its prefill, which gives a block of 64 heads of a token to a thread block; fp8 ones to its
decode, which shares k among all multiprocessors, so few tokens keep the chip busy too. Bound by the products, on wgmma.
What differs from the contract is made up for here, or declared unmet in the table:
  a token without any valid index  its lse is +inf there: turned round
  topk_length                      not every kernel of it looks at that: what lies behind becomes -1 here
  fp8                              scales, and latents times scales, are rounded to bfloat16: only where neither loses
                                   a digit, by scales that are powers of two
  outputs                          it allocates them, and its scratch, from torch's allocator, also into a graph that
                                   is captured; they are copied to `out` and `lse`. Declared unmet where a workspace
                                   is given, since such a call must allocate nothing
Which multiprocessor takes what is planned anew on the device by each call, from shapes alone; a replay plans too.
"""

import flash_mla
import torch

#: Tokens that the decode kernel is given at a time; it holds heads * 2 KB of partial sums for each.
TOKENS = 1024


@torch.no_grad()
def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    rope: torch.Tensor | None,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """Copy what the package gives to `out` [T, heads, 512] and `lse` [T, heads]."""
    if topk_length is not None:
        counts = torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
        indices = indices.where(counts, -1)
    q, indices = _regular(q), indices if indices.stride(1) == 1 else indices.contiguous()
    sink = None if sink is None else sink.contiguous()
    if scales is None or rope is None:
        rows = kv.as_strided((kv.shape[0] * kv.shape[1], 1, kv.shape[2]), (kv.stride(1), kv.stride(1), 1))
        found, _, sums = flash_mla.flash_mla_sparse_fwd(
            q, rows, indices[:, None], scale, out.shape[2], attn_sink=sink, use_legacy=True
        )
        _hand_over(found, sums, out, lse)
        return
    cache = whole(kv, scales, rope)
    for first in range(0, q.shape[0], TOKENS):
        part, (plan, _) = slice(first, first + TOKENS), flash_mla.get_mla_metadata()
        found, sums = flash_mla.flash_mla_with_kvcache(
            q[part, None], cache, None, None, out.shape[2], plan,
            softmax_scale=scale, indices=indices[part, None], attn_sink=sink, use_legacy=True,
        )  # fmt: skip
        _hand_over(found.squeeze(1), sums.squeeze(2), out[part], lse[part])


def whole(kv: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The cache [pages, page_size, 1, 656] that values, scales and rotary parts are views of.

    Raises ValueError where they are not: only a caller of the operator itself can have made them so.
    """
    width = kv.shape[2] + 4 * scales.shape[2] + 2 * rope.shape[2]
    places = [part.data_ptr() - kv.data_ptr() for part in (scales, rope)]
    if places != [kv.shape[2], kv.shape[2] + 4 * scales.shape[2]] or kv.stride(1) != width:
        raise ValueError(
            f"scales and rope lie {places} bytes behind kv, rows {kv.stride(1)} apart: no cache of {width}"
        )
    return kv.as_strided((*kv.shape[:2], 1, width), (kv.stride(0), width, width, 1))


def _regular(q: torch.Tensor) -> torch.Tensor:
    """Queries that the chip's bulk copies can read: adjacent columns, everything at multiples of 16 bytes."""
    token, head, column = q.stride()
    is_regular = column == 1 and not (token | head) % 8 and not q.data_ptr() % 16
    return q if is_regular else q.clone(memory_format=torch.contiguous_format)


def _hand_over(found: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    out.copy_(found)
    torch.nan_to_num(sums, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse)
