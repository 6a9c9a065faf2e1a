"""sparse_mla, each kernel by name, against float64 and the contract's lines."""

import pytest
import torch

import keysift
from attention import KERNELS, assert_close, make
from keysift import IndexLayout, LatentLayout, dispatch
from keysift.ops.sparse_mla import kernel_cpu

# tokens, heads, D, value_dim, slots, k
SHAPES = [(1, 128, 576, 512, 400, 300), (7, 3, 5, 2, 40, 9), (30, 1, 1, 1, 10, 1), (2, 16, 36, 36, 64, 64)]


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 4, 25])
def test_pages_may_lie_apart(kernel, page_size):
    q, kv, indices = make(3, 4, 20, 100, 30)
    pages = 100 // page_size
    pool = torch.full((pages, page_size + 3, 20), torch.nan)
    pool[:, :page_size] = kv.view(pages, page_size, 20)
    apart = keysift.sparse_mla(q, pool[:, :page_size], indices, 0.3, value_dim=11, kernel=kernel)
    together = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, kernel=kernel)
    assert torch.equal(apart[0], together[0])
    assert torch.equal(apart[1], together[1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", [None, 4 * 280 + 8])
def test_fp8_tokens_are_what_gathering_them_gives(kernel, stride):
    layout = LatentLayout("e4m3fn", 4, 256, 8, page_stride=stride)
    cache = layout.empty(10)
    cache.untyped_storage().fill_(0x7F)  # NaN wherever nothing is written
    q, kv, indices = make(3, 4, 264, 40, 12)
    indices[0, 3:] = indices[1, :2] = -1
    used = indices[indices >= 0].long().unique()
    keysift.write_latent_cache(kv[used], cache, used, layout)
    numbers = torch.full((40, 264), torch.nan)
    numbers[used] = keysift.gather_latent_cache(cache, used, layout)
    found = keysift.sparse_mla(q, cache, indices, 0.3, value_dim=256, layout=layout, kernel=kernel)
    wanted = keysift.sparse_mla(q, numbers, indices, 0.3, value_dim=256, kernel=kernel)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_takes_its_share_of_the_sum_and_lengths_cut_the_selection(kernel):
    q, kv, indices = make(4, 3, 20, 100, 30)
    lengths, sink = torch.tensor([30, 7, 0, 100]), torch.tensor([0.3, -torch.inf, 40.0])
    out, lse = keysift.sparse_mla(
        q, kv, indices, 0.3, value_dim=11, sink=sink, topk_length=lengths, kernel=kernel
    )  # fmt: skip
    for token, length in enumerate(lengths.tolist()):
        chosen = kv[indices[token, :length].long()].double()
        logits = torch.cat((0.3 * q[token].double() @ chosen.T, sink[:, None].double()), 1)
        wanted = logits.softmax(1)[:, :-1] @ chosen[:, :11]
        torch.testing.assert_close(out[token].double(), wanted.nan_to_num(0.0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[token].double(), logits[:, :-1].logsumexp(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_is_the_same_by_request_and_token(kernel):
    q, kv, indices = make(6, 4, 20, 100, 30)
    lengths = torch.tensor([30, 1, 2, 3, 4, 0])
    flat = keysift.sparse_mla(
        q, kv.view(25, 4, 20), indices, 0.3, value_dim=11, topk_length=lengths, kernel=kernel
    )  # fmt: skip
    for next_n in (1, 2, 3):
        shape = (6 // next_n, next_n)
        out, lse = keysift.sparse_mla_decode(
            q.unflatten(0, shape), kv.view(25, 4, 20), indices.unflatten(0, shape), 0.3, value_dim=11,
            topk_length=lengths.unflatten(0, shape), kernel=kernel,
        )  # fmt: skip
        assert torch.equal(out.flatten(0, 1), flat[0])
        assert torch.equal(lse.flatten(0, 1), flat[1])
    with pytest.raises(ValueError, match=r"indices has shape \[6, 30\]"):
        keysift.sparse_mla_decode(q[None], kv[None], indices, 0.3, value_dim=11)
    with pytest.raises(ValueError, match="topk_length has shape"):
        keysift.sparse_mla_decode(q[None], kv[None], indices[None], 0.3, value_dim=11, topk_length=lengths)


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
    ((Q, KV, INDICES, 1.0), {"layout": LatentLayout("float32", 64, 4, 4)}, ValueError, "cache has shape"),
    ((Q, KV, INDICES, 1.0), {"layout": IndexLayout()}, TypeError, "layout is IndexLayout"),
    ((Q, KV, INDICES, 1.0), {"sink": torch.zeros(2)}, ValueError, "sink has shape"),
    ((Q, KV, INDICES, 1.0), {"topk_length": torch.zeros(3).int()}, ValueError, "topk_length has shape"),
    ((Q, KV, INDICES.long(), 1.0), {}, TypeError, "indices is torch.int64"),
    ((Q, KV, INDICES[:1], 1.0), {}, ValueError, "indices has shape"),
    ((Q, KV, INDICES, "1"), {}, TypeError, "scale is '1'"),
    ((Q, KV, INDICES, 1.0), {"value_dim": 9}, ValueError, r"value_dim is 9 .* it may be 1 to 8"),
    ((Q, KV, INDICES, 1.0), {"value_dim": True}, TypeError, "value_dim is True"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(1, 3, 4)}, ValueError, "out has shape"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(2, 3, 4).half()}, TypeError, "out is torch.float16"),
    ((Q, KV, INDICES, 1.0), {"out": torch.empty(2, 3, 8)[..., :4]}, ValueError, "out has strides"),
    ((Q, KV, INDICES, 1.0), {"lse": torch.empty(2, 4)}, ValueError, "lse has shape"),
    ((Q, KV, INDICES, 1.0), {"workspace": torch.empty(9)}, TypeError, "workspace is torch.float32"),
    ((Q, KV, INDICES, 1.0), {"workspace": torch.empty(3, 3).byte()}, ValueError, "workspace has shape"),
    ((Q, KV, INDICES, 1.0), {"kernel": "triton"}, ValueError, "kernel 'triton' cannot run .* needs cuda or hip"),
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
    args = (Q, KV[None], None, None, INDICES, 1.0, None, None, torch.empty(2, 3, 4), torch.empty(2, 3), None, None)
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
