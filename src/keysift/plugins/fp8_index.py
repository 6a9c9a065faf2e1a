"""Index queries and keys in fp8, as DeepSeek-V3.2 serves them: turned by a Hadamard matrix, one scale for each.

A key is kept as its D values and its float32 scale, D + 4 bytes in one uint8 tensor, which every cache class can hold:
a page of one token.
"""

import torch

from keysift.layout import FP8, IndexLayout
from keysift.ops.cache import write_index_cache
from keysift.rotation import hadamard

#: Dtypes that stand for this, and the format that they mean.
FORMATS = {dtype: name for name, dtype in FP8.items()}


def layout(dtype: torch.dtype, head_dim: int) -> IndexLayout:
    """Pages of one token. Raises ValueError for a head size that no fp8 page has."""
    return IndexLayout(FORMATS[dtype], 1, head_dim)


def keys(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., D + 4] of keys [..., D]."""
    form = layout(dtype, k.shape[-1])
    flat = _turned(k).reshape(-1, k.shape[-1])
    pages = form.empty(flat.shape[0], k.device)
    write_index_cache(flat, pages, torch.arange(flat.shape[0], device=k.device), form)
    return pages.view(*k.shape[:-1], form.width)


def split(kept: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values fp8 [N, D] and scales float32 [N] of what `keys` gave for N keys."""
    values, scales = layout(dtype, kept.shape[-1] - 4).views(kept[:, None])
    assert scales is not None  # noqa: S101 - fp8 has scales
    return values[:, 0], scales[:, 0]


def queries(q: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [..., H, D] as fp8, and head weights [..., H] with the scales of the queries in them."""
    values, scales = split(keys(q, dtype).flatten(0, -2), dtype)
    return values.unflatten(0, q.shape[:-1]), weights * scales.unflatten(0, q.shape[:-1])


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Dot products stay the same; a head size that is no power of two has no such matrix and is left as it is."""
    return x if x.shape[-1] & (x.shape[-1] - 1) else hadamard(x)
