"""q, indices, latents -> output, lse."""

from .api import combine_partials, sparse_mla, sparse_mla_decode, sparse_mla_workspace_size

__all__ = ["combine_partials", "sparse_mla", "sparse_mla_decode", "sparse_mla_workspace_size"]
