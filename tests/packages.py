"""Stand-ins for packages of kernels: they refuse what those refuse, and answer in torch what those answer."""

import contextlib
import dataclasses
import sys
import types

import torch

from keysift.layout import IndexLayout, LatentLayout
from keysift.ops.score import reference as score
from keysift.ops.sparse_mla import reference as sparse_mla


@contextlib.contextmanager
def standing_in(monkeypatch, api, package):
    """`package` as the installed one of its name, and its row of a stage's table, which then runs on a CPU."""
    name = package.__name__

    def unmet(problem):
        return [reason for reason in needs(problem) if not reason.startswith("device")]

    (needs,) = (row.unmet for row in api.KERNELS if row.name == name)
    rows = [dataclasses.replace(row, unmet=unmet) if row.name == name else row for row in api.KERNELS]
    module = f"{api.__package__}.kernel_{name}"
    monkeypatch.setattr(api, "KERNELS", tuple(rows))
    monkeypatch.setitem(sys.modules, name, package)
    sys.modules.pop(module, None)
    yield package
    sys.modules.pop(module, None)


class DeepGemm(types.ModuleType):
    """deep_gemm: what it is given is kept in `seen`, and cells that no window reaches hold 99."""

    def __init__(self):
        super().__init__("deep_gemm")
        self.seen = []

    def fp8_mqa_logits(self, q, kv, weights, starts, ends, clean_logits=True):
        k, scale = kv
        rows, columns = q.shape[0], k.shape[0]
        assert not clean_logits
        for x in (q, k, scale, starts, ends):
            assert x.is_contiguous()
        assert starts.dtype == ends.dtype == torch.int32
        assert starts.shape == ends.shape == (rows,)
        assert bool((starts >= 0).all() and (ends <= columns).all() and (starts <= ends).all())
        self.seen.append("prefill")
        out = torch.full((rows, columns + 256), 99.0, device=q.device)[:, :columns]
        score.run(q, k, scale, weights, starts, ends, 1, None, out)
        return out

    def get_paged_mqa_logits_metadata(self, context_lens, page_size, processors):
        assert context_lens.ndim == 2
        assert context_lens.is_contiguous()
        assert context_lens.dtype == torch.int32
        assert page_size == 64
        return torch.zeros(processors + 1, 2, dtype=torch.int32, device=context_lens.device)

    def fp8_paged_mqa_logits(self, q, cache, weights, lengths, table, plan, columns, clean_logits=False):
        requests, next_n, _, head_dim = q.shape
        assert not clean_logits
        assert lengths.shape == (requests, next_n)
        assert table.dtype == lengths.dtype == plan.dtype == torch.int32
        assert q.is_contiguous()
        assert weights.is_contiguous()
        assert cache.dtype == torch.uint8
        assert cache.shape[1:] == (64, 1, head_dim + 4)
        assert cache.stride(1) == head_dim + 4
        assert bool((lengths >= 0).all() and (lengths <= columns).all())
        self.seen.append("decode")
        k, scale = IndexLayout("e4m3fn", 64, head_dim).views(cache.squeeze(2))
        out = torch.full((requests * next_n, -(-columns // 256) * 256), 99.0, device=q.device)[:, :columns]
        # Whole pages are scored, and every token of a request as far as its last length says.
        ends = (lengths[:, -1:].repeat(1, next_n) + 63).div(64, rounding_mode="floor") * 64
        table = table.clamp(0, cache.shape[0] - 1)
        score.run(q.flatten(0, 1), k, scale, weights, None, ends.flatten().clamp(max=columns), next_n, table, out)
        return out


class FlashMLA(types.ModuleType):
    """flash_mla: of a token without any valid index, lse is +inf, as that package gives it."""

    PLANS_LAST = False  # a plan may serve other calls, of the same shapes

    def __init__(self):
        super().__init__("flash_mla")
        self.seen = []

    def get_mla_metadata(self):
        return types.SimpleNamespace(used=False), None

    def flash_mla_with_kvcache(
        self, q, cache, block_table, lengths, value_dim, plan, *, softmax_scale, indices, use_legacy, attn_sink=None
    ):
        assert block_table is None
        assert lengths is None
        assert self.PLANS_LAST or not plan.used, "what a plan holds belongs to one call"
        plan.used = True
        assert q.shape[1] == 1
        assert cache.shape[2:] == (1, 656)
        assert cache.dtype == torch.float8_e4m3fn
        assert cache.stride(1) == 656
        self.seen.append("decode")
        latents = LatentLayout("e4m3fn", cache.shape[1]).views(cache.squeeze(2).view(torch.uint8))
        out, lse = self._attend(q[:, 0], latents, indices[:, 0], softmax_scale, value_dim, attn_sink, use_legacy, 64)
        return out[:, None], lse[..., None]

    def flash_mla_sparse_fwd(self, q, kv, indices, scale, value_dim=512, attn_sink=None, use_legacy=False):
        assert kv.ndim == indices.ndim == 3
        self.seen.append("prefill")
        latents = kv.transpose(0, 1), None, None
        out, lse = self._attend(q, latents, indices[:, 0], scale, value_dim, attn_sink, use_legacy, 128)
        return out, lse.clone(), lse

    def _attend(self, q, latents, indices, scale, value_dim, sink, use_legacy, tile):
        tokens, heads, dim = q.shape
        assert use_legacy
        assert heads in (64, 128)
        assert (dim, value_dim) == (576, 512)
        assert q.dtype == torch.bfloat16
        assert indices.shape[1] % tile == 0
        assert q.stride(2) == indices.stride(1) == 1
        assert q.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in q.stride()[:2])
        out, lse = q.new_empty(tokens, heads, value_dim), q.new_empty(tokens, heads, dtype=torch.float32)
        sparse_mla.run(q, *latents, indices, scale, sink, None, out, lse, None)
        return out, lse.masked_fill(lse == -torch.inf, torch.inf)
