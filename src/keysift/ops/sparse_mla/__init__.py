"""q, indices, latents -> output, lse."""

from .api import combine_partials, sparse_mla, sparse_mla_decode

__all__ = ["combine_partials", "sparse_mla", "sparse_mla_decode"]
