"""sparse_mla, each kernel by name, against float64 and the contract's lines."""

import pytest
import torch

import keysift
from keysift import dispatch
from keysift.ops.sparse_mla import kernel_cpu
from keysift.ops.sparse_mla.api import KERNELS as TABLE

KERNELS = [kernel.name for kernel in TABLE]
EPS = 2.0**-24  # half a unit in the last place of float32
# tokens, heads, D, value_dim, slots, k
SHAPES = [(1, 128, 576, 512, 400, 300), (7, 3, 5, 2, 40, 9), (30, 1, 1, 1, 10, 1), (2, 16, 36, 36, 64, 64)]


def make(tokens, heads, dim, slots, k, dtype=torch.float32):
    q, kv = torch.randn(tokens, heads, dim).to(dtype), torch.randn(slots, dim).to(dtype)
    indices = torch.stack([torch.randperm(slots)[:k] for _ in range(tokens)]).int()
    return q, kv, indices


def assert_close(result, q, kv, indices, scale, value_dim):
    """Not further from float64 than float32 sums in any order may be, then rounded to the output's dtype."""
    out, lse = result
    half_ulp = torch.finfo(out.dtype).eps / 2
    for token in range(q.shape[0]):
        slots = indices[token][indices[token] >= 0].long()
        queries, latents = q[token].double(), kv[slots].double()
        if len(slots) == 0:
            assert (out[token] == 0).all()
            assert (lse[token] == -torch.inf).all()
            continue
        logits = scale * queries @ latents.T
        off = (q.shape[2] + 2) * EPS * abs(scale) * queries.abs() @ latents.abs().T
        slack = 2 * off.amax(1, keepdim=True) + (len(slots) + 6) * EPS
        wanted = logits.softmax(-1) @ latents[:, :value_dim]
        bound = slack * (logits.softmax(-1) @ latents[:, :value_dim].abs()) * 1.01 + half_ulp * wanted.abs() + 1e-30
        assert ((out[token].double() - wanted).abs() <= bound).all(), f"token {token}"
        wanted_lse = logits.logsumexp(-1)
        assert ((lse[token].double() - wanted_lse).abs() <= slack[:, 0] * 1.01 + 4 * EPS * wanted_lse.abs()).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_formula(kernel, shape, dtype):
    tokens, heads, dim, value_dim, slots, k = shape
    q, kv, indices = make(tokens, heads, dim, slots, k, dtype)
    scale = dim**-0.5
    result = keysift.sparse_mla(q, kv, indices, scale, value_dim=value_dim, kernel=kernel)
    assert result[0].dtype == dtype
    assert result[0].shape == (tokens, heads, value_dim)
    assert result[1].dtype == torch.float32
    assert_close(result, q, kv, indices, scale, value_dim)


@pytest.mark.parametrize("kernel", KERNELS)
def test_minus_one_takes_no_part_and_unselected_rows_do_not_matter(kernel):
    q, kv, indices = make(6, 4, 20, 100, 30)
    indices[0] = -1
    indices[1, 1:] = -1
    indices[2, ::2] = -1
    indices[3, :7] = -1
    indices[4][indices[4] == 0] = -1
    indices[indices == 0] = -1  # slot 0 stands in for an absent one, so it must not shine through
    selected = indices[indices >= 0].long().unique()
    poisoned = torch.full_like(kv, torch.nan)
    poisoned[selected] = kv[selected]
    result = keysift.sparse_mla(q, poisoned, indices, 0.3, value_dim=11, kernel=kernel)
    assert_close(result, q, kv, indices, 0.3, 11)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_too_large_for_an_exponential(kernel):
    q, kv, indices = make(3, 2, 8, 50, 20)
    assert_close(
        keysift.sparse_mla(1e3 * q, kv, indices, 1.0, value_dim=4, kernel=kernel), 1e3 * q, kv, indices, 1.0, 4
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_is_bounded_by_blocks_that_do_not_show(kernel, monkeypatch):
    module = kernel_cpu if kernel == "cpu" else __import__("keysift.ops.sparse_mla.reference", fromlist=["run"])
    q, kv, indices = make(23, 4, 20, 100, 30)
    indices[5:9] = -1
    whole = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, kernel=kernel)
    monkeypatch.setattr(module, "BYTES" if kernel == "cpu" else "ELEMENTS", 10_000)
    for one, other in zip(whole, keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, kernel=kernel), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_but_the_tokens_is_written(kernel):
    q, kv, indices = make(3, 4, 20, 100, 30)
    out, lse = torch.full((7, 4, 11), torch.nan), torch.full((7, 4), torch.nan)
    returned = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, out=out[1:6], lse=lse[1:6], kernel=kernel)
    assert returned[0].data_ptr() == out[1:].data_ptr()
    assert torch.equal(out.isnan().all(2).all(1), torch.tensor([True, False, False, False, True, True, True]))
    assert torch.equal(lse.isnan().any(1), torch.tensor([True, False, False, False, True, True, True]))
    fresh = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, kernel=kernel)
    assert torch.equal(out[1:4], fresh[0])
    assert torch.equal(lse[1:4], fresh[1])


def test_pages_are_slots():
    q, kv, indices = make(3, 4, 20, 100, 30)
    flat, paged = (keysift.sparse_mla(q, x, indices, 0.3, value_dim=11) for x in (kv, kv.view(25, 4, 20)))
    assert torch.equal(flat[0], paged[0])


@pytest.mark.parametrize(("slots", "k"), [(10, 0), (0, 5)])
def test_nothing_to_attend_to(slots, k):
    q, kv, indices = torch.randn(2, 3, 4), torch.randn(slots, 4), torch.full((2, k), -1, dtype=torch.int32)
    out, lse = keysift.sparse_mla(q, kv, indices, 1.0, value_dim=2)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert keysift.sparse_mla(q[:0], kv, indices[:0], 1.0, value_dim=2)[0].shape == (0, 3, 2)


Q, KV, INDICES = torch.randn(2, 3, 8), torch.randn(10, 8), torch.zeros(2, 4, dtype=torch.int32)
REFUSED = [
    ((Q[0], KV, INDICES, 1.0), {}, ValueError, "q has shape"),
    ((Q.double(), KV, INDICES, 1.0), {}, TypeError, "q is torch.float64"),
    ((Q, KV.to(torch.uint8), INDICES, 1.0), {}, TypeError, "kv is torch.uint8"),
    ((Q, KV[:, :7], INDICES, 1.0), {}, ValueError, "kv has shape"),
    ((Q, torch.randn(4, 6, 8)[:, :3], INDICES, 1.0), {}, ValueError, "kv has strides"),
    ((Q, KV, INDICES.long(), 1.0), {}, TypeError, "indices is torch.int64"),
    ((Q, KV, INDICES[:1], 1.0), {}, ValueError, "indices has shape"),
    ((Q, KV, INDICES, "1"), {}, TypeError, "scale is '1'"),
    ((Q, KV, INDICES, 1.0), {"value_dim": 9}, ValueError, "value_dim is 9; it may be 1 to 8"),
    ((Q, KV, INDICES, 1.0), {"value_dim": True}, TypeError, "value_dim is True"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(1, 3, 4)}, ValueError, "out has shape"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(2, 3, 4).half()}, TypeError, "out is torch.float16"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(2, 3, 8)[..., :4]}, ValueError, "out has strides"),
    ((Q, KV, INDICES, 1.0), {"lse": torch.empty(2, 4)}, ValueError, "lse has shape"),
    ((Q, KV, INDICES, 1.0), {"kernel": "fast"}, ValueError, "kernel is 'fast'"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), REFUSED)
def test_refusals_name_the_argument(args, options, error, message):
    with pytest.raises(error, match=message):
        keysift.sparse_mla(*args, **{"value_dim": 4, **options})


def test_checked_values(monkeypatch):
    monkeypatch.setattr(dispatch, "CHECK_VALUES", True)
    bad = INDICES.clone()
    bad[1, 2] = 10
    with pytest.raises(ValueError, match=r"indices\[1, 2\] is 10; it may be -1 or \[0, 10\)"):
        keysift.sparse_mla(Q, KV, bad, 1.0, value_dim=4)


def test_the_operator():
    """Its schema and fake are true, and a whole graph can be traced through it."""
    args = (Q, KV, INDICES, 1.0, torch.empty(2, 3, 4), torch.empty(2, 3), None)
    torch.library.opcheck(torch.ops.keysift.sparse_mla.default, args, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(
        lambda q: keysift.sparse_mla(q, KV, INDICES, 1.0, value_dim=4)[0], backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(Q), keysift.sparse_mla(Q, KV, INDICES, 1.0, value_dim=4)[0])


def test_a_token_is_the_same_beside_others_and_a_gradient_is_not_asked_for():
    latents = torch.tensor([[-torch.inf], [2.0]])
    query = torch.ones(2, 1, 1, requires_grad=True)
    indices = torch.tensor([[0], [-1]], dtype=torch.int32)
    for kernel in ("cpu", "reference"):
        alone = keysift.sparse_mla(query[:1], latents, indices[:1], 1.0, value_dim=1, kernel=kernel)
        out, lse = keysift.sparse_mla(query, latents, indices, 1.0, value_dim=1, kernel=kernel)
        assert torch.equal(alone[1], lse[:1])
        assert not out.requires_grad
        taller = torch.zeros(5, 1, 1)
        cut, _ = keysift.sparse_mla(query, latents, indices, 1.0, value_dim=1, out=taller, kernel=kernel)
        assert cut.shape == (2, 1, 1)
