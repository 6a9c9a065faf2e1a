"""keysift: DeepSeek Sparse Attention, exactly and fast, on CPU, NVIDIA and AMD."""

from keysift.ops.select import select, select_decode, select_prefill, select_workspace_size

__version__ = "0.1.0"
__all__ = ["select", "select_decode", "select_prefill", "select_workspace_size"]
