"""What the tests of sparse_mla share: inputs, and the judgement of a result."""

import torch

from keysift import dispatch
from keysift.ops.sparse_mla.api import KERNELS as TABLE
from keysift.ops.sparse_mla.api import Problem
from keysift.testing.sparse_mla import Call, excess

FACTS = Problem(dispatch.parse_device("cpu"), torch.float32, torch.float32, 1, 1, 1, 1, 1)
#: Kernels that run here.
KERNELS = [kernel.name for kernel in TABLE if not kernel.unmet(FACTS)]


def make(tokens, heads, dim, slots, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    kv = torch.randn(slots, dim, generator=generator).to(dtype)
    indices = torch.stack([torch.randperm(slots, generator=generator)[:k] for _ in range(tokens)]).int()
    return q, kv, indices


def assert_close(result, q, kv, indices, scale, value_dim):
    """Not further from float64 than the kit allows every kernel."""
    out, lse = result
    assert out.shape[2] == value_dim
    assert max(excess(out, lse, Call(q, kv, kv.double(), indices, scale, None, None, None))) <= 1.0
