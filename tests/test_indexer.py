"""The indexer selects what score and select together select, whatever the memory budget."""

import pytest
import torch

import keysift
from keysift import indexer


def make(rows, columns, heads=4, head_dim=16):
    return torch.randn(rows, heads, head_dim), torch.randn(columns, head_dim), torch.randn(rows, heads)


@pytest.mark.parametrize("index_base", ["window", "column"])
def test_prefill_does_not_depend_on_the_budget(index_base):
    q, k, weights = make(50, 300)
    starts, ends = torch.full((50,), 7), torch.arange(50) * 6 + 3
    scores = keysift.index_scores(q, k, None, weights, starts, ends)
    wanted = keysift.select(scores, 20, start=starts, end=ends, index_base=index_base, sorted=True)
    for budget in (1200, 5000, 1 << 27):
        found = keysift.index_prefill(
            q, k, None, weights, starts, ends, 20, index_base=index_base, memory_budget=budget
        )
        assert torch.equal(_ascending(found), wanted)


def test_prefill_holds_no_more_scores_than_the_budget(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        indexer, "index_scores", lambda *a, **o: sizes.append(a[0].shape[0]) or keysift.index_scores(*a, **o)
    )
    q, k, weights = make(50, 300)
    keysift.index_prefill(q, k, None, weights, None, None, 20, memory_budget=10 * 1200 + 1199)
    assert sizes == [10] * 5


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("per_row", [False, True])
def test_decode_in_columns_and_in_slots(next_n, per_row):
    cache = torch.randn(20, 16, 16)
    table = torch.randperm(20)[:15].view(3, 5).int()
    q, _, weights = make(3 * next_n, 0)
    lens = torch.tensor([80, 33, 5], dtype=torch.int32)
    ends = (lens[:, None] - next_n + 1 + torch.arange(next_n)).int()
    seq_lens = ends if per_row else lens
    scores = keysift.paged_index_scores(q, cache, weights, seq_lens, table, next_n)
    wanted = keysift.select(scores, 10, end=ends.flatten(), sorted=True)
    for budget in (80 * 4 * next_n, 1 << 27):
        columns = keysift.index_decode(q, cache, weights, seq_lens, table, 10, next_n, memory_budget=budget)
        assert torch.equal(_ascending(columns), wanted)
        slots = keysift.index_decode(
            q, cache, weights, seq_lens, table, 10, next_n, index_base="slot", memory_budget=budget
        )
        rows = torch.arange(3 * next_n)[:, None] // next_n
        expected = torch.where(wanted < 0, -1, table[rows, wanted // 16] * 16 + wanted % 16)
        assert torch.equal(slots.sort().values, expected.sort().values)


def test_decode_with_left_padding():
    cache = torch.randn(2, 60, 16)
    q, _, weights = make(2, 0)
    starts, lens, table = torch.tensor([0, 25]), torch.tensor([60, 60]), torch.tensor([[0], [1]])
    found = keysift.index_decode(q, cache, weights, lens, table, 40, starts=starts, index_base="column")
    assert (found[0] >= 0).all()
    assert found[1].sort(descending=True).values.tolist() == [*range(59, 24, -1), *[-1] * 5]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_budget": 399}, ValueError, "memory_budget is 399 bytes; 1 rows of 100 scores need 400"),
        ({"topk": 0}, ValueError, "topk is 0"),
        ({"topk": "3"}, TypeError, "topk is '3'"),
        ({"select_kernel": "fast"}, ValueError, "kernel is 'fast'"),
        ({"score_kernel": "fast"}, ValueError, "kernel is 'fast'"),
        ({"index_base": "slot", "starts": torch.tensor([0])}, ValueError, "index_base is 'slot' beside starts"),
    ],
)
def test_refusals(options, error, message):
    q, k, weights = make(1, 100)
    args = (q, k[None], weights, torch.tensor([100]), torch.tensor([[0]]))
    with pytest.raises(error, match=message):
        keysift.index_decode(*args, **{"topk": 3, **options})


def _ascending(columns):
    """Selected columns in ascending order, -1 last."""
    last = torch.iinfo(torch.int32).max
    ascending = columns.where(columns >= 0, last).sort().values
    return ascending.where(ascending < last, -1)


@pytest.mark.parametrize("length", [-(2**63), -(2**31), 2**62])
def test_extreme_lengths_mean_empty_or_full(length):
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(4, 2, 4, generator=generator), torch.randn(4, 2, generator=generator)
    cache, table = torch.randn(6, 2, 4, generator=generator), torch.tensor([[0, 1], [2, 3]])
    indices = keysift.index_decode(q, cache, weights, torch.tensor([length, 3]), table, 3, 2)
    counted = (indices >= 0).sum(1).tolist()
    assert counted == ([0, 0, 2, 3] if length < 0 else [3, 3, 2, 3])
