"""sparse_mla on an accelerator: the kit, real sizes, and a graph that is replayed with other indices."""

import dataclasses

import pytest
import torch

import keysift
from keysift.testing.sparse_mla import Attention, build, check_sparse_mla, excess

pytestmark = pytest.mark.gpu
V32 = Attention(1, 128, 576, 512, 2048, torch.bfloat16, page_size=64, holes="some")


@pytest.mark.parametrize("kernel", ["triton", "reference", None])
def test_the_kit_passes(kernel):
    report = check_sparse_mla(kernel, "cuda")
    assert report.ok, str(report)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_real_sizes(tokens, heads, fp8):
    """1 token is cut into many parts, 150 into none."""
    case = dataclasses.replace(V32, tokens=tokens, heads=heads, fp8=fp8, k=2048 if tokens < 100 else 512)
    call = build(case, "cuda", tokens)
    out, lse = keysift.sparse_mla(call.q, call.kv, call.indices, call.scale, layout=call.layout, kernel="triton")
    assert max(excess(out, lse, call)) <= 1.0


@pytest.mark.parametrize("tokens", [2, 300])
def test_a_graph_replays_with_other_indices_and_allocates_nothing(tokens):
    case = dataclasses.replace(V32, tokens=tokens, holes="none", k=512)
    call = build(case, "cuda", 0)
    size = keysift.sparse_mla_workspace_size(call.q, call.kv, case.k, kernel="triton")
    out, lse = call.q.new_empty(tokens, 128, 512), call.q.new_empty(tokens, 128, dtype=torch.float32)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def attend():
        keysift.sparse_mla(
            call.q, call.kv, call.indices, call.scale, out=out, lse=lse, workspace=workspace, kernel="triton"
        )

    attend()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    attend()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    call.indices[:, 100:] = -1
    graph.replay()
    assert max(excess(out, lse, call)) <= 1.0
