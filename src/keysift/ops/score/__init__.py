"""q, index keys -> logits."""

from .api import index_scores, paged_index_scores

__all__ = ["index_scores", "paged_index_scores"]
