"""The indexer selects what score and select together select, whatever the memory budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keysift
from keysift import dispatch, indexer


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
        ({"memory_budget": 399}, ValueError, "memory_budget is 399 bytes; 1 rows of 100 scores, .* need 400"),
        ({"memory_budget": 1e6}, TypeError, "memory_budget is 1000000.0"),
        ({"index_base": "slots"}, ValueError, "index_base is 'slots'"),
        ({"out": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "out has shape"),
        ({"starts": torch.tensor([0, 0])}, ValueError, "starts has shape"),
        ({"layout": keysift.IndexLayout("float32", 99, 16)}, ValueError, "cache has shape"),
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": torch.zeros(2, 4)}, ValueError, "weights has shape"),
        ({"ends": torch.tensor([1, 1])}, ValueError, "ends has shape"),
        ({"k_scale": torch.ones(101)}, ValueError, "k_scale has shape"),
        ({"page_table": torch.zeros(1, 7).int()}, ValueError, "page_size is None"),
        ({"page_size": 4}, ValueError, "page_size is given without page_table"),
        ({"memory_budget": 4 * 3}, ValueError, "memory_budget is 12 bytes; 1 rows of 4 scores, .* need 16"),
    ],
)
def test_refusals_of_prefill(options, error, message):
    """Also of what only a later part of the rows would have met."""
    q, k, weights = make(1, 100)
    arguments = {"q": q, "k": k, "k_scale": None, "weights": weights, "starts": None, "ends": None, "topk": 3}
    out = torch.full((1, 3), 7, dtype=torch.int32)
    with pytest.raises(error, match=message):
        keysift.index_prefill(**arguments | {"out": out} | options)
    assert (out == 7).all()


def test_checked_values_name_rows_of_the_call(monkeypatch):
    """Not rows of the part that meets them."""
    monkeypatch.setattr(dispatch, "CHECK_VALUES", True)
    q, k, weights = make(9, 100)
    ends = torch.tensor([100] * 8 + [101])
    with pytest.raises(ValueError, match=r"ends\[8\] is 101"):
        keysift.index_prefill(q, k, None, weights, None, ends, 3, memory_budget=800)
    with pytest.raises(ValueError, match=r"seq_lens\[8\] is 101"):
        keysift.index_decode(q, k[None], weights, ends, torch.zeros(9, 1).int(), 3, memory_budget=800)
    ends[8] = 7
    for budget in (400, 399, 80):  # a row at a time, and in pieces whose shifted windows are none of the caller's
        keysift.index_prefill(q, k, None, weights, None, ends, 3, memory_budget=budget)


@st.composite
def packed(draw):
    """Queries with whole numbers, so that scores are often equal, and windows of every kind."""
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def numbers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).float()

    q, k, weights = numbers(rows, 2, 4), numbers(columns, 4), numbers(rows, 2)
    k[torch.rand(columns, generator=generator) < 0.1] = torch.nan
    bound = st.one_of(st.integers(-5, columns + 5), st.sampled_from([-(2**63), -(2**31), 2**31, 2**63 - 1]))
    starts, ends = (
        draw(st.one_of(st.none(), st.lists(bound, min_size=rows, max_size=rows).map(torch.LongTensor)))
        for _ in range(2)
    )
    return q, k, weights, starts, ends


@settings(max_examples=40)
@given(packed(), st.integers(1, 40), st.integers(1, 50), st.sampled_from(["window", "column", "slot"]))
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_pieces_of_a_row_select_what_the_whole_row_selects(kernel, call, topk, piece, base):
    q, k, weights, starts, ends = call
    options = {"index_base": base}
    if base == "slot":
        table = torch.arange(3 * 4).view(3, 4).flip(1).int()
        table[1, 2] = -1
        options = {"page_table": table, "page_size": 19, "page_rows": torch.arange(len(q)) % 3}
    args = (q, k, None, weights, starts, ends, topk)
    kernels = {"score_kernel": kernel, "select_kernel": kernel}
    wanted = keysift.index_prefill(*args, **options, **kernels)
    found = keysift.index_prefill(*args, **options, **kernels, memory_budget=4 * (topk + piece))
    assert torch.equal(_ascending(found), _ascending(wanted))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "e4m3fn"])
@pytest.mark.parametrize("base", ["window", "column", "slot"])
@pytest.mark.parametrize("per_row", [False, True])
def test_pieces_of_paged_rows(kernel, format, base, per_row):
    layout, next_n = keysift.IndexLayout(format, 16, 16), 3
    cache = layout.empty(40)
    keysift.write_index_cache(torch.randn(640, 16), cache, torch.arange(640), layout)
    table = torch.randperm(40)[:27].view(3, 9).int()
    q, _, weights = make(9, 0)
    lens = torch.tensor([144, 33, 2])
    if per_row:
        lens = torch.stack((lens - 2, lens * 0, lens), 1).int()
    starts = None if base == "slot" else torch.tensor([0, 5, 0, 1, 2, 3, 0, 1, 200])
    args = (q, cache, weights, lens, table, 20, next_n)
    options = {"layout": layout, "starts": starts, "index_base": base}
    options |= {"score_kernel": kernel, "select_kernel": kernel}
    wanted = _ascending(keysift.index_decode(*args, **options))
    for columns in (20 + 16, 20 + 47, 143):
        found = keysift.index_decode(*args, **options, memory_budget=4 * next_n * columns)
        assert torch.equal(_ascending(found), wanted)
    with pytest.raises(ValueError, match="3 rows of 36 scores, the least at a time for topk = 20, need 432"):
        keysift.index_decode(*args, **options, memory_budget=4 * next_n * (20 + 16) - 1)


def test_a_million_keys_per_row():
    """Each row alone is four times the budget."""
    generator = torch.Generator().manual_seed(0)
    columns, ends = 1_000_003, torch.tensor([1_000_003, 700_001])
    q, k = torch.randn(2, 1, 4, generator=generator), torch.randn(columns, 4, generator=generator)
    weights = torch.ones(2, 1)
    found = keysift.index_prefill(q, k, None, weights, None, ends, 2048, memory_budget=1 << 20)
    assert torch.equal(_ascending(found), _ascending(keysift.index_prefill(q, k, None, weights, None, ends, 2048)))


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_compressed_cache_is_counted_in_its_keys(ratio):
    """The token at a position looks at the keys of whole groups of `ratio` tokens up to its own."""
    positions = torch.tensor([0, ratio - 2, ratio - 1, 5 * ratio - 1, 5 * ratio])
    q, k, weights = make(5, 8)
    found = keysift.index_prefill(q, k, None, weights, None, (positions + 1) // ratio, 8)
    for position, row in zip(positions.tolist(), _ascending(found), strict=True):
        whole = [key for key in range(8) if (key + 1) * ratio <= position + 1]
        assert row[row >= 0].tolist() == whole


def test_a_whole_graph_can_be_traced_through_both():
    q, k, weights = make(4, 60)
    ends, table = torch.tensor([60, 7, 3, 0]), torch.arange(6).view(2, 3).int()

    def step(q, k, weights, ends):
        prefill = keysift.index_prefill(q, k, None, weights, None, ends, 5, memory_budget=4 * 40)
        decode = keysift.index_decode(q, k.view(6, 10, 16), weights, ends[::2] // 2, table, 5, 2, index_base="slot")
        return prefill + 1, decode + 1

    for found, wanted in zip(
        torch.compile(step, backend="eager", fullgraph=True)(q, k, weights, ends),
        step(q, k, weights, ends),
        strict=True,
    ):
        assert torch.equal(found, wanted)


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
