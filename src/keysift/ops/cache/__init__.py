"""k, latent -> pages."""

from .api import gather_index_cache, gather_latent_cache, write_index_cache, write_latent_cache

__all__ = ["gather_index_cache", "gather_latent_cache", "write_index_cache", "write_latent_cache"]
