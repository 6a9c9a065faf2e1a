"""Unequal requests: each token gets what it would get alone, and no other row is touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keysift
from keysift import dispatch


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3), st.integers(0, 2**31), st.booleans())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_token_selects_as_if_alone(dtype, tokens, padding, seed, narrow):
    generator = torch.Generator().manual_seed(seed)
    requests, total, pages, topk, next_n = len(tokens), sum(tokens), 3, 6, 4
    q = torch.randn(total + padding, 2, 8, generator=generator).to(dtype)
    weights = torch.randn(total + padding, 2, generator=generator)
    cache = torch.randn(requests * pages + 1, 5, 8, generator=generator)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages)
    seq_lens = torch.tensor([max(n, int(torch.randint(1, 15, (), generator=generator))) for n in tokens]).long()
    starts = torch.tensor([0, *tokens]).cumsum(0)
    if narrow:
        seq_lens, starts, table = seq_lens.int(), starts.int(), table.int()

    rows, row_weights, lengths = keysift.pack_requests(q, weights, seq_lens, starts, next_n)
    assert rows.dtype == dtype
    assert lengths.dtype == seq_lens.dtype
    indices = keysift.index_decode(rows, cache, row_weights, lengths, table, topk, next_n)
    out = torch.full((total + padding, topk), -77, dtype=torch.int32)
    assert keysift.unpack_requests(indices, starts, next_n, out=out) is out

    assert (out[total:] == -77).all()
    for b, count in enumerate(tokens):
        for j in range(count):
            token = int(starts[b]) + j
            alone = keysift.index_decode(
                q[token : token + 1], cache, weights[token : token + 1], seq_lens[b : b + 1] - count + j + 1,
                table[b : b + 1], topk,
            )  # fmt: skip
            assert torch.equal(out[token].sort().values, alone[0].sort().values)
    empty = (lengths == 0).flatten()
    assert (indices[empty] == -1).all()
    assert (row_weights[empty] == 0).all()


def test_a_whole_graph_serves_other_lengths():
    q, weights, lens = torch.randn(6, 2, 4), torch.randn(6, 2), torch.tensor([9, 8, 7])

    def there_and_back(starts):
        rows, _, lengths = keysift.pack_requests(q, weights, lens, starts, 3)
        return keysift.unpack_requests(rows, starts, 3, out=torch.zeros_like(q)), lengths

    compiled = torch.compile(there_and_back, backend="eager", fullgraph=True)
    for starts in (torch.tensor([0, 1, 3, 6]), torch.tensor([0, 3, 3, 4])):
        back, lengths = compiled(starts)
        used = int(starts[-1])
        assert torch.equal(back[:used], q[:used])
        assert (back[used:] == 0).all()
        assert (lengths > 0).sum(1).tolist() == starts.diff().tolist()


Q, W, LENS, STARTS = torch.zeros(3, 2, 4), torch.zeros(3, 2), torch.tensor([5, 5]), torch.tensor([0, 1, 3])
ROWS, OUT = torch.zeros(4, 6), torch.zeros(3, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: keysift.pack_requests(Q[0], W, LENS, STARTS, 2), ValueError, "q has shape"),
        (lambda: keysift.pack_requests(Q, W[:2], LENS, STARTS, 2), ValueError, "weights"),
        (lambda: keysift.pack_requests(Q, W.half(), LENS, STARTS, 2), TypeError, "weights is torch.float16"),
        (lambda: keysift.pack_requests(Q, W, LENS[:1], STARTS, 2), ValueError, "seq_lens has shape"),
        (lambda: keysift.pack_requests(Q, W, LENS.float(), STARTS, 2), TypeError, "seq_lens is torch.float32"),
        (lambda: keysift.pack_requests(Q, W, LENS, STARTS[:0], 2), ValueError, "query_starts has shape"),
        (lambda: keysift.pack_requests(Q, W, LENS, STARTS, 0), ValueError, "next_n is 0"),
        (lambda: keysift.pack_requests(Q, W, LENS, STARTS, 2.0), TypeError, "next_n is 2.0"),
        (lambda: keysift.pack_requests([1], W, LENS, STARTS, 2), TypeError, "q is list"),
        (lambda: keysift.unpack_requests(ROWS[:3], STARTS, 2, out=OUT), ValueError, "rows has shape"),
        (lambda: keysift.unpack_requests(ROWS, STARTS, 2, out=OUT[:, :5]), ValueError, "out has shape"),
        (lambda: keysift.unpack_requests(ROWS, STARTS, 2, out=OUT.half()), TypeError, "out is torch.float16"),
    ],
)
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_checked_values_find_a_request_with_too_many_tokens(monkeypatch):
    monkeypatch.setattr(dispatch, "CHECK_VALUES", True)
    with pytest.raises(ValueError, match=r"query_starts\[2\] is 3"):
        keysift.pack_requests(Q, W, LENS, STARTS, 1)
