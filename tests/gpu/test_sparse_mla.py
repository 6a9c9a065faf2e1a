"""sparse_mla on an accelerator: the kit, real sizes, and a graph that is replayed with other indices."""

import dataclasses
import importlib.util

import pytest
import torch

import keysift
from keysift.testing.sparse_mla import Attention, build, check_sparse_mla, excess

pytestmark = pytest.mark.gpu
needs_flash_mla = pytest.mark.skipif(importlib.util.find_spec("flash_mla") is None, reason="needs flash_mla")
V32 = Attention(1, 128, 576, 512, 2048, torch.bfloat16, page_size=64, holes="some")


@pytest.mark.parametrize("kernel", ["triton", "reference", None, pytest.param("flash_mla", marks=needs_flash_mla)])
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


@needs_flash_mla
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("holes", ["none", "some", "ends", "one", "all"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 128), (7, 64), (150, 128), (1500, 64)])
def test_flash_mla_in_real_sizes(tokens, heads, holes, fp8):
    k = 2048 if tokens < 100 else 256
    case = dataclasses.replace(
        V32, tokens=tokens, heads=heads, holes=holes, fp8=fp8, power_of_two=fp8, page_size=64 if fp8 else 0, k=k
    )
    call = build(case, "cuda", tokens)
    out, lse = keysift.sparse_mla(call.q, call.kv, call.indices, call.scale, layout=call.layout, kernel="flash_mla")
    looked_at = slice(0, None, max(1, tokens // 100))
    some = dataclasses.replace(call, q=call.q[looked_at], indices=call.indices[looked_at])
    assert max(excess(out[looked_at], lse[looked_at], some)) <= 1.0


@needs_flash_mla
@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_of_flash_mla_replays_with_other_indices(fp8):
    case = dataclasses.replace(V32, tokens=3, fp8=fp8, power_of_two=fp8, page_size=64 if fp8 else 0, holes="none")
    call = build(case, "cuda", 0)
    out, lse = call.q.new_empty(3, 128, 512), call.q.new_empty(3, 128, dtype=torch.float32)

    def attend():
        keysift.sparse_mla(
            call.q, call.kv, call.indices, call.scale, layout=call.layout, out=out, lse=lse, kernel="flash_mla"
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    call.indices[:, 100:] = -1
    call.indices[1] = -1
    graph.replay()
    assert max(excess(out, lse, call)) <= 1.0
