"""score and index on the GPU that is here: the kit's lines, and rows of a million keys."""

import pytest
import torch

import keysift
from keysift.testing import check_index, check_score, index_kernels, score_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", ["triton", "reference"])
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
