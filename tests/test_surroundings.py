"""What surrounds a call does not change it: autocast, torch's defaults, how tensors are stored."""

import contextlib

import pytest
import torch

import keysift
from keysift import dispatch

KERNELS = ["cpu", "reference"]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


def everything(kernel):
    """Every stage once: prefill, decode, paged, fp8, windows, sink, parts."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    def integers(*values):
        return torch.tensor(values, device="cpu")

    q, weights, k = numbers(6, 3, 16), numbers(6, 3), numbers(80, 16)
    ends = integers(80, 3, 0, 77, 40, 41)
    layout = keysift.IndexLayout("e4m3fn", 16, 16)
    cache = layout.empty(5, "cpu")
    keysift.write_index_cache(k, cache, torch.arange(80, device="cpu"), layout, kernel=kernel)
    table, lens = integers([0, 1, 2], [3, 4, 1]), integers(48, 20)
    named = {"score_kernel": kernel, "select_kernel": kernel}
    prefill = keysift.index_prefill(q, k, None, weights, None, ends, 9, memory_budget=4 * 30, **named)
    decode = keysift.index_decode(q, cache, weights, lens, table, 9, 3, layout=layout, **named)
    scores = keysift.index_scores(q, k, None, weights, kernel=kernel)
    latents, queries = numbers(80, 24), numbers(6, 4, 24)
    options = {"value_dim": 16, "sink": numbers(4), "topk_length": integers(9, 2, 0, 9, 9, 1), "kernel": kernel}
    out, lse = keysift.sparse_mla(queries, latents, prefill, 0.2, **options)
    joined, _ = keysift.combine_partials(torch.stack((out, out)), torch.stack((lse, lse)))
    rows = keysift.pack_requests(q, weights, lens, integers(0, 1, 4), 3)
    tensors = (prefill.sort(1).values, decode.sort(1).values, scores, out, lse, joined, cache, *rows)
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("around", SURROUNDINGS)
def test_nothing_changes(around, kernel):
    wanted = everything(kernel)
    with SURROUNDINGS[around]():
        found = everything(kernel)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def negated(x):
    return torch._neg_view(x)


SCORES, OUT = torch.randn(2, 9), torch.zeros(2, 3, dtype=torch.int32)
Q, K, W = torch.randn(2, 1, 4), torch.randn(9, 4), torch.randn(2, 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: keysift.select(negated(SCORES), 3), "scores"),
        (lambda: keysift.select(SCORES, 3, end=negated(torch.tensor([9, 9]))), "end"),
        (lambda: keysift.select(SCORES, 3, out=negated(OUT)), "out"),
        (lambda: keysift.index_scores(negated(Q), K, None, W), "q"),
        (lambda: keysift.index_scores(Q, negated(K), None, W), "k"),
        (lambda: keysift.sparse_mla(Q, negated(K), OUT, 1.0, value_dim=4), "kv"),
    ],
)
def test_a_view_that_is_negated_when_read_is_refused(call, name):
    """Its memory holds other numbers than it shows."""
    with pytest.raises(ValueError, match=rf"^{name} is a view that torch negates .* give {name}.resolve_neg"):
        call()


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match=r"scores is torch.sparse_coo; it must be torch.strided"):
        keysift.select(SCORES.to_sparse(), 3)


def test_an_empty_tensor_may_have_any_stride():
    scores, out = (
        torch.empty(0).as_strided((0, 9), (0, 0)),
        OUT[:0].as_strided((0, 3), (0, 0)),
    )
    assert keysift.select(scores, 3, out=out, kernel="cpu") is out


@pytest.mark.parametrize("k", [2**31, 2**63])
def test_a_k_that_no_count_holds_is_refused(k):
    with pytest.raises(ValueError, match=f"k is {k}; it must be at least 1, and counts in an int32"):
        keysift.select(SCORES, k)


def test_an_empty_name_is_no_kernel():
    with pytest.raises(ValueError, match="kernel is ''; select has 'cpu'"):
        keysift.select(SCORES, 3, kernel="")


def test_a_slot_beyond_the_latents_is_named():
    with pytest.raises(IndexError, match="indices hold slot 9; kv has 9"):
        keysift.sparse_mla(Q, K, torch.tensor([[0, 9], [1, 2]], dtype=torch.int32), 1.0, value_dim=4, kernel="cpu")


def test_checked_values_let_legal_junk_pass(monkeypatch):
    """Behind topk_length, empty rows of 2-D lengths, the last page of an int32."""
    monkeypatch.setattr(dispatch, "CHECK_VALUES", True)
    indices = torch.tensor([[0, 99], [1, -7]], dtype=torch.int32)
    keysift.sparse_mla(Q, K, indices, 1.0, value_dim=4, topk_length=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"indices\[0, 1\] is 99"):
        keysift.sparse_mla(Q, K, indices, 1.0, value_dim=4)
    lens, table = torch.tensor([[9, 0]]), torch.tensor([[0]])
    keysift.paged_index_scores(Q, K[None], W, lens, table, 2)
    pages = torch.tensor([[1], [1]])
    found = keysift.select(SCORES, 1, page_table=pages, page_size=2**30)
    assert (found >= 2**30).all()
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 2"):
        keysift.select(SCORES, 1, page_table=pages + 1, page_size=2**30)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 10"):
        keysift.paged_index_scores(Q[:1], K[None], W[:1], torch.tensor([10]), table, out=torch.zeros(1, 20))


def test_transformations_of_functions_are_refused():
    """Their tensors have no memory to read; torch says that it cannot transform an operator that writes."""
    ends = torch.tensor([1, 9])
    for function, argument in (
        (lambda end: keysift.select(SCORES, 3, end=end), ends),
        (lambda scores: keysift.select(scores, 3, end=ends), SCORES),
    ):
        with pytest.raises(RuntimeError, match="functionalizing operators"):
            torch.func.functionalize(function)(argument)


def test_every_unmet_constraint_is_listed():
    with pytest.raises(ValueError, match=r"device is cpu, needs cuda; .*column stride is 40.*k is 6000"):
        keysift.select(torch.randn(9000, 40).t()[:, :8500], 6000, kernel="cuda")


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_output_of_16_bits_is_rounded_once_also_with_a_sink(kernel):
    generator = torch.Generator().manual_seed(1)
    q, kv = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((4, 3, 16), (50, 16)))
    indices = torch.randint(0, 50, (4, 20), generator=generator, dtype=torch.int32)
    options = {"value_dim": 16, "sink": torch.randn(3, generator=generator), "kernel": kernel}
    narrow, _ = keysift.sparse_mla(q, kv, indices, 0.3, **options)
    wide, _ = keysift.sparse_mla(q.float(), kv.float(), indices, 0.3, **options)
    assert (narrow != wide.bfloat16()).float().mean() < 0.02


def test_what_stands_behind_the_last_index_costs_nothing_and_changes_nothing():
    generator = torch.Generator().manual_seed(2)
    q, kv = torch.randn(3, 2, 8, generator=generator), torch.randn(40, 8, generator=generator)
    indices = torch.randint(0, 40, (3, 9), generator=generator, dtype=torch.int32)
    indices[1, 4] = -1
    padded = torch.nn.functional.pad(indices, (0, 500), value=-1)
    for few, many in ((indices, padded), (indices[:0], padded[:0]), (indices * 0 - 1, padded * 0 - 1)):
        one = keysift.sparse_mla(q[: len(few)], kv, few, 0.3, value_dim=8, kernel="cpu")
        other = keysift.sparse_mla(q[: len(few)], kv, many, 0.3, value_dim=8, kernel="cpu")
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: keysift.LatentLayout(rope_dim=1.5), TypeError, "rope_dim is 1.5"),
        (lambda: keysift.LatentLayout(page_stride="x"), TypeError, "page_stride is 'x'"),
        (lambda: keysift.LatentLayout(scale="e8m0"), ValueError, "scale is 'e8m0'"),
        (lambda: keysift.IndexLayout(page_stride=0), ValueError, "page_stride is 0"),
        (
            lambda: keysift.select(SCORES, 3, page_table=OUT, page_size=2**63),
            ValueError,
            "page_size is 9223372036854775808",
        ),
        (lambda: keysift.select(SCORES, 3, out=[OUT, OUT], return_values=True), TypeError, "out is list"),
    ],
)
def test_odd_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
