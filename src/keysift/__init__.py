"""keysift: DeepSeek Sparse Attention, exactly and fast, on CPU, NVIDIA and AMD."""

from keysift.indexer import index_decode, index_prefill
from keysift.layout import IndexLayout, LatentLayout
from keysift.ops.cache import gather_index_cache, gather_latent_cache, write_index_cache, write_latent_cache
from keysift.ops.score import index_scores, paged_index_scores
from keysift.ops.select import select, select_decode, select_prefill, select_workspace_size
from keysift.ops.sparse_mla import combine_partials, sparse_mla, sparse_mla_decode, sparse_mla_workspace_size
from keysift.packing import pack_requests, unpack_requests
from keysift.plugins.transformers_patch import accelerate, restore

__version__ = "0.1.0"
__all__ = [
    "IndexLayout",
    "LatentLayout",
    "accelerate",
    "combine_partials",
    "gather_index_cache",
    "gather_latent_cache",
    "index_decode",
    "index_prefill",
    "index_scores",
    "pack_requests",
    "paged_index_scores",
    "restore",
    "select",
    "select_decode",
    "select_prefill",
    "select_workspace_size",
    "sparse_mla",
    "sparse_mla_decode",
    "sparse_mla_workspace_size",
    "unpack_requests",
    "write_index_cache",
    "write_latent_cache",
]
