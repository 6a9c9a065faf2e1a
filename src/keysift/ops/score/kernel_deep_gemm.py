"""score by the package deep_gemm (MIT), DeepSeek's own fp8 kernels for sm_90 and sm_100: from arguments to arguments.

Its prefill keeps some queries in a thread block and walks over the keys of their windows; its decode shares the pages
of all requests evenly among the multiprocessors, by a plan that a first kernel makes of the lengths. What differs from
the contract is made up for here, or declared unmet in the table:
  bounds     must lie within the columns, start before end, int32: clamped here
  lengths    one for each query of a request, of which the last says how far the keys of all of them are read: here
             every one is the longest, and the cells behind a shorter query's end are among those that nobody reads
  results    it allocates them, whole tiles, whose cells outside the windows hold anything; they are copied to `out`,
             8 bytes a cell. Declared unmet where the caller gives `out`: such a call must allocate nothing, and what
             its cells outside the windows hold must stay
"""

import deep_gemm
import torch

from keysift.dispatch import device_of


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
    """Copy what the package gives to the columns of `out` [M, N] that there are keys for."""
    q, weights = _packed(q), _packed(weights)
    if block_table is None:
        rows, columns = q.shape[0], k.shape[0]
        scale = k.new_ones(columns, dtype=torch.float32) if k_scale is None else k_scale
        low = q.new_zeros(rows, dtype=torch.int32) if starts is None else _within(starts, columns)
        high = low.new_full((rows,), columns) if ends is None else torch.maximum(_within(ends, columns), low)
        found = deep_gemm.fp8_mqa_logits(q, (_packed(k), _packed(scale)), weights, low, high, clean_logits=False)
    else:
        assert ends is not None  # noqa: S101 - paged scores come with lengths
        columns = min(block_table.shape[1] * k.shape[1], out.shape[1])
        cache, queries = whole(k, k_scale), q.unflatten(0, (-1, next_n))
        reach = _within(ends, columns).view(len(block_table), -1).amax(1, keepdim=True)
        lengths = reach.expand(-1, next_n).contiguous()
        table = block_table.int().contiguous()
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, k.shape[1], device_of(q.device).processors)
        found = deep_gemm.fp8_paged_mqa_logits(
            queries, cache, weights, lengths, table, plan, columns, clean_logits=False
        )  # fmt: skip
    out[:, :columns].copy_(found)


def whole(k: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The cache, bytes [pages, page_size, 1, D + 4], that keys and scales are views of.

    Raises ValueError where they are not: only a caller of the operator itself can have made them so.
    """
    pages, size, dim = k.shape
    if scale is None or scale.data_ptr() - k.data_ptr() != size * dim or k.stride()[1:] != (dim, 1):
        raise ValueError(f"k has strides {list(k.stride())}; it must be of pages with their scales behind the keys")
    return k.view(torch.uint8).as_strided((pages, size, 1, dim + 4), (k.stride(0), dim + 4, dim + 4, 1))


def _within(bound: torch.Tensor, columns: int) -> torch.Tensor:
    return bound.clamp(0, columns).int().contiguous()


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Contiguous from a multiple of 16 bytes on, as the chip's bulk copies want it."""
    is_packed = x.is_contiguous() and not x.data_ptr() % 16
    return x if is_packed else x.clone(memory_format=torch.contiguous_format)
