"""The Triton kernels on a CPU: `make interpreter` runs this folder with TRITON_INTERPRET=1, in a process of its own."""

import dataclasses
import os

import pytest
import torch

from keysift import select
from keysift.ops.select import kernel_triton
from keysift.testing import check_select, select_kernels

pytestmark = pytest.mark.usefixtures("fresh_choices")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before Triton is imported", allow_module_level=True)

TRITON = dict(select_kernels("cpu"))["triton"]

# Long rows made cheap: what a plan for 131072 columns does, on a few hundred. `fit` below the survivors of a cut
# overflows the lists; `listed=False` is a k beyond every list; rows=2 launches more than once.
SMALL = {
    "one segment": kernel_triton.Plan(fit=256, whole=False, splits=1, rows=2, block=256, sample=64),
    "segments": kernel_triton.Plan(fit=256, whole=False, splits=2, rows=2, block=128, sample=64),
    "one segment, lists overflow": kernel_triton.Plan(fit=64, whole=False, splits=1, rows=4, block=256, sample=64),
    "segments, lists overflow": kernel_triton.Plan(fit=64, whole=False, splits=2, rows=4, block=128, sample=64),
    "no list": kernel_triton.Plan(fit=64, whole=False, splits=2, rows=4, block=128, sample=64, listed=False),
}


def with_plan(monkeypatch, plan):
    def planned(rows, columns, k, processors):
        return dataclasses.replace(plan, rows=min(plan.rows, max(rows, 1)))

    monkeypatch.setattr(kernel_triton, "plan", planned)


def test_the_kit_passes_on_short_rows():
    report = check_select(TRITON, tier="tiny")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("data", ["normal", "equal", "two", "sorted", "nan", "infinities", "zeros", "unlucky"])
def test_long_rows_reach_every_branch(monkeypatch, name, data):
    with_plan(monkeypatch, SMALL[name])
    for k in (1, 150):
        scores = long_rows(data, 3, 500, seed=k)
        start, end = torch.tensor([0, 37, 5]), torch.tensor([500, 490, 60])
        given = {"start": start, "end": end, "sorted": True, "return_values": True, "return_counts": True}
        wanted = select(scores, k, kernel="reference", **given)
        found = select(scores, k, kernel="triton", **given)
        for what, one, other in zip(("indices", "values", "counts"), found, wanted, strict=True):
            assert torch.equal(one, other), f"{what} of {data}, k = {k}, seed {k}"


def long_rows(data, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    chance = torch.rand(rows, columns, generator=generator)
    if data == "equal":
        return torch.full_like(normal, 0.7311)
    if data == "two":
        return torch.where(normal > 1.5, 1.0, 0.5)
    if data == "sorted":
        return normal.sort(1).values
    if data == "nan":
        return normal.masked_fill(chance < 0.8, torch.nan)
    if data == "infinities":
        return normal.masked_fill(chance < 0.1, torch.inf).masked_fill(chance > 0.5, -torch.inf)
    if data == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if data == "unlucky":  # the sample sees nothing of the large values: they sit between its columns
        return normal.index_fill(1, torch.arange(3, columns, 50), 100.0)
    return normal


def test_the_workspace_grows_with_rows_and_not_with_columns():
    sizes = [kernel_triton.workspace_size(64, columns, 2048, 132) for columns in (131072, 1 << 20, 1 << 22)]
    assert max(sizes) <= 2 * min(sizes)
    assert kernel_triton.workspace_size(100_000, 65536, 2048, 132) == kernel_triton.workspace_size(
        2048, 65536, 2048, 132
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_through_a_page_table(dtype):
    """-inf where a page is negative; every other value to the bit."""
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"page_table": torch.tensor([[1, -1, 2], [0, 3, -1]]), "page_size": 16}
    found, wanted = (
        select(scores, 9, sorted=True, return_values=True, kernel=kernel, **options)
        for kernel in ("triton", "reference")
    )
    assert (wanted[0] == -1).any()
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
