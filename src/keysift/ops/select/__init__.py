"""logits, windows -> top-k indices."""

from .api import select, select_decode, select_prefill, select_workspace_size

__all__ = ["select", "select_decode", "select_prefill", "select_workspace_size"]
