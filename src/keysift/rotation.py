"""Rotations of queries and keys that the model layer applies before a cache sees them."""

import math

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension.

    x  [..., n], n a power of two
    Returns the same shape and dtype; sums are made in float32.

    Dot products stay the same, and an outlier is spread over all n values, so that fp8 with one scale a token loses
    less. DeepSeek-V3.2's indexer turns queries and keys so before it quantises them. Raises ValueError for another n.

    >>> hadamard(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    tensor([1., 1., 1., 1.])
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"x has {n} values in its last dimension; it must be a power of two")
    turned: torch.Tensor = x.float().reshape(-1, n)
    half = 1
    while half < n:
        first, second = turned.view(-1, n // (2 * half), 2, half).unbind(2)
        turned = torch.stack((first + second, first - second), 2).view(-1, n)
        half *= 2
    return (turned / math.sqrt(n)).to(x.dtype).view(x.shape)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotary position embedding of the last dimension: n / 2 pairs of values, each turned by its own angle.

    x            [..., n], n even
    cos, sin     [..., n / 2] that broadcast against the pairs
    interleaved  True: pairs are neighbours (0, 1), (2, 3), ..; False: half a row apart (0, n / 2), (1, n / 2 + 1), ..

    Returns the same shape and dtype, pairs where they were. A model pairs in one way, its queries and keys alike:
    attention of DeepSeek-V3.2 and GLM-5 interleaved, the indexer of V3.2 half-split, that of GLM-5 interleaved.
    Raises ValueError for an odd n. Formula: Su et al., RoFormer (2021).

    >>> cos, sin = torch.tensor([0.0]), torch.tensor([1.0])  # a quarter turn
    >>> rope(torch.tensor([1.0, 2.0]), cos, sin, interleaved=True)
    tensor([-2.,  1.])
    """
    n = x.shape[-1]
    if n % 2:
        raise ValueError(f"x has {n} values in its last dimension; it must be an even number")
    if interleaved:
        first, second = x.unflatten(-1, (n // 2, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
