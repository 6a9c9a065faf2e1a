"""One decode step, the whole flow, against the formulas written out in float64."""

import torch

from keysift.step import decode_step


def test_the_flow():
    requests, heads, dim, value_dim, index_heads, index_dim, topk, page_size = 3, 4, 12, 10, 16, 16, 8, 5
    table = torch.randperm(30)[:18].view(requests, 6).int()
    latents, index_keys = torch.randn(30, page_size, dim), torch.randn(30, page_size, index_dim)
    q, index_q = torch.randn(requests, heads, dim), torch.randn(requests, index_heads, index_dim)
    weights = torch.rand(requests, index_heads)
    lens = torch.tensor([30, 17, 4], dtype=torch.int32)
    out = decode_step(q, latents, index_q, index_keys, weights, lens, table, topk, 0.4, value_dim)
    for b in range(requests):
        keys = index_keys[table[b].long()].flatten(0, 1)[: lens[b]].double()
        kv = latents[table[b].long()].flatten(0, 1)[: lens[b]].double()
        scores = weights[b].double() @ (index_q[b].double() @ keys.T).relu()
        chosen = kv[scores.topk(min(topk, len(scores))).indices]
        wanted = (0.4 * q[b].double() @ chosen.T).softmax(-1) @ chosen[:, :value_dim]
        torch.testing.assert_close(out[b].double(), wanted, rtol=1e-5, atol=1e-5)
