"""k, latent -> pages."""

from .api import (
    cumulative_lengths,
    gather_index_cache,
    gather_latent_cache,
    write_index_cache,
    write_latent_cache,
)

__all__ = [
    "cumulative_lengths",
    "gather_index_cache",
    "gather_latent_cache",
    "write_index_cache",
    "write_latent_cache",
]
