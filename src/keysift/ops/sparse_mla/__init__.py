"""q, indices, latents -> output, lse."""

from .api import sparse_mla

__all__ = ["sparse_mla"]
