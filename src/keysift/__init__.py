"""keysift: DeepSeek Sparse Attention, exactly and fast, on CPU, NVIDIA and AMD."""

from keysift.indexer import index_decode, index_prefill
from keysift.ops.score import index_scores, paged_index_scores
from keysift.ops.select import select, select_decode, select_prefill, select_workspace_size
from keysift.ops.sparse_mla import sparse_mla
from keysift.plugins.transformers_patch import accelerate, restore

__version__ = "0.1.0"
__all__ = [
    "accelerate",
    "index_decode",
    "index_prefill",
    "index_scores",
    "paged_index_scores",
    "restore",
    "select",
    "select_decode",
    "select_prefill",
    "select_workspace_size",
    "sparse_mla",
]
