"""score and index on the GPU that is here: the kit's lines, and rows of a million keys."""

import importlib.util

import pytest
import torch

import keysift
from keysift.testing import check_index, check_score, index_kernels, score_kernels

pytestmark = pytest.mark.gpu


needs_deep_gemm = pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")


@pytest.mark.parametrize("kernel", ["triton", "reference", pytest.param("deep_gemm", marks=needs_deep_gemm)])
def test_the_kit_passes(kernel):
    assert not dict(score_kernels("cuda"))[kernel]
    report = check_score(kernel, "cuda")
    assert report.ok, str(report)


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_the_index_keeps_its_lines(kernel):
    assert kernel is None or not dict(index_kernels("cuda"))[kernel]
    report = check_index(kernel, "cuda")
    assert report.ok, str(report)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_million_keys_per_row_in_pieces(q_dtype):
    columns, rows = 1 << 20, 4
    q, k = torch.randn(rows, 64, 128, device="cuda"), torch.randn(columns, 128, device="cuda")
    weights, ends = torch.randn(rows, 64, device="cuda"), columns - torch.arange(rows, device="cuda") * 7
    args = (q.to(q_dtype), k.to(q_dtype), None, weights, None, ends, 512)
    whole = keysift.index_prefill(*args)
    assert torch.equal(whole.sort(1).values, keysift.index_prefill(*args, memory_budget=1 << 20).sort(1).values)


@needs_deep_gemm
@pytest.mark.parametrize("next_n", [1, 2])
def test_deep_gemm_decodes_as_triton_does_in_a_graph(next_n):
    """Lengths change between capture and replay; those of zero are among them."""
    layout, requests, pages = keysift.IndexLayout("e4m3fn"), 17, 40
    cache = layout.empty(requests * pages, "cuda")
    slots = torch.arange(requests * pages * 64, device="cuda")
    keysift.write_index_cache(torch.randn(len(slots), 128, device="cuda"), cache, slots, layout)
    q = torch.randn(requests * next_n, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(requests * next_n, 64, device="cuda")
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    lengths = torch.full((requests,), pages * 64, dtype=torch.int32, device="cuda")

    def score(kernel):
        return keysift.paged_index_scores(q, cache, weights, lengths, table, next_n, layout=layout, kernel=kernel)

    score("deep_gemm")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = score("deep_gemm")
    for seed in range(5):
        torch.manual_seed(seed)
        lengths.copy_(torch.randint(-5, pages * 64 + 5, (requests,)))
        lengths[torch.rand(requests) < 0.3] = 0
        graph.replay()
        right = score("triton")
        ends = (lengths[:, None] - next_n + 1 + torch.arange(next_n, device="cuda")).flatten()
        inside = torch.arange(pages * 64, device="cuda") < ends[:, None]
        torch.testing.assert_close(found[inside], right[inside], rtol=1e-3, atol=1e-2)
