"""select on a GPU: the kit with all that needs the memory, and what only a GPU shows: graphs and synchronisation."""

import pytest
import torch

import keysift
from keysift.testing import check_select, select_kernels

pytestmark = pytest.mark.gpu


def kernels():
    """The names of what runs on the GPU that is here; nothing where there is none."""
    if not torch.cuda.is_available():
        return []
    return [name for name, selector in select_kernels("cuda") if callable(selector)]


def fast():
    """The kernels that promise to allocate nothing and never to wait."""
    return [name for name in kernels() if name != "reference"]


@pytest.mark.parametrize("kernel", kernels())
def test_the_contract_is_kept(kernel):
    report = check_select(dict(select_kernels("cuda"))[kernel], device="cuda", tier="gpu")
    assert report.ok, str(report)


@pytest.mark.parametrize("kernel", fast())
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 131072, 2048), (6, 30000, 512), (256, 8192, 2048)])
def test_a_graph_is_replayed_with_other_lengths(kernel, rows, columns, k):
    scores = torch.randn(rows, columns, device="cuda")
    lens = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    size = keysift.select_workspace_size(scores, k, kernel=kernel)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    keysift.select_decode(scores, k, lens, 1, out, workspace=workspace, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keysift.select_decode(scores, k, lens, 1, out, workspace=workspace, kernel=kernel)
    for seed, most in enumerate((columns, 3, columns // 2, 0, columns)):
        generator = torch.Generator("cuda").manual_seed(seed)
        scores.copy_(torch.randn(rows, columns, generator=generator, device="cuda"))
        lens.copy_(torch.randint(0, most + 1, (rows,), generator=generator, device="cuda"))
        out.fill_(0x7F7F7F7F)
        graph.replay()
        wanted = keysift.select(scores, k, end=lens, kernel="reference")
        assert torch.equal(out.sort(1).values, wanted.sort(1).values), f"seed {seed}"


# torch says so of the mode itself; what it does detect becomes an error.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("kernel", fast())
@pytest.mark.parametrize(("rows", "columns"), [(1, 131072), (64, 32768), (2048, 8192)])
def test_nothing_is_allocated_and_nothing_waits(kernel, rows, columns):
    scores, k = torch.randn(rows, columns, device="cuda"), 2048
    ends = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    size = keysift.select_workspace_size(scores, k, kernel=kernel)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def call():
        keysift.select(scores, k, end=ends, out=out, workspace=workspace, kernel=kernel)

    call()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
