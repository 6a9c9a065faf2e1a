"""sparse_mla in parts, by request, within a workspace, and where users of its peers met faults."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keysift
from attention import KERNELS, assert_close, make
from keysift import LatentLayout, dispatch
from keysift.ops.sparse_mla import api
from keysift.testing import sparse_mla as kit
from keysift.testing.sparse_mla import check_sparse_mla


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kit_passes(kernel, seed):
    report = check_sparse_mla(kernel, seed=100 * seed)
    assert report.ok, str(report)
    assert not report.not_claimed


@pytest.mark.parametrize("line", [kit.FORMULA, kit.INDICES, kit.SINK, kit.OUTPUT, kit.REPEAT])
def test_the_kit_sees_what_is_broken(line, monkeypatch, fresh_choices):
    """A kernel that breaks a line is reported in that line."""
    from keysift.ops.sparse_mla import reference

    turn = iter(range(1000))

    def broken(q, kv, scales, rope, indices, scale, sink, topk_length, out, lse, workspace):
        if line == kit.FORMULA:
            scale *= 1.0001
        elif line == kit.INDICES:
            indices = indices.clamp(min=0)
        elif line == kit.SINK:
            sink = topk_length = None
        reference.run(q, kv, scales, rope, indices, scale, sink, topk_length, out, lse, workspace)
        if line == kit.OUTPUT and out.storage_offset():
            out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()
        elif line == kit.REPEAT:
            out[0, 0, 0] *= 1 + 2.0**-20 * (next(turn) % 2)

    table = tuple(
        dataclasses.replace(kernel, entry="broken:run") if kernel.name == "reference" else kernel
        for kernel in api.KERNELS
    )
    monkeypatch.setattr(api, "KERNELS", table)
    load = dispatch._load
    monkeypatch.setattr(dispatch, "_load", lambda entry: broken if entry == "broken:run" else load(entry))
    report = check_sparse_mla("reference")
    assert line in report.failed
    assert f"seed {report.seed}" in str(report) or "seed" in report.lines[line].first_failure


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_writes_what_it_is_given_and_nothing_else(kernel):
    q, kv, indices = make(6, 4, 20, 100, 30)
    requests = (q.view(3, 2, 4, 20), kv.view(25, 4, 20), indices.view(3, 2, 30))
    size = keysift.sparse_mla_workspace_size(requests[0], requests[1], 30, value_dim=11, kernel=kernel)
    out, lse = torch.full((5, 2, 4, 11), torch.nan), torch.full((5, 2, 4), torch.nan)
    workspace = torch.full((size + 8,), 0x7F, dtype=torch.uint8)
    given_back = keysift.sparse_mla_decode(
        *requests, 0.3, value_dim=11, out=out[1:4], lse=lse[1:4], workspace=workspace[4 : 4 + size], kernel=kernel
    )
    assert given_back[0].data_ptr() == out[1:].data_ptr()
    fresh = keysift.sparse_mla_decode(*requests, 0.3, value_dim=11, kernel=kernel)
    assert torch.equal(out[1:4], fresh[0])
    assert torch.equal(lse[1:4], fresh[1])
    assert out[[0, 4]].isnan().all()
    assert lse[[0, 4]].isnan().all()
    assert (workspace[:4] == 0x7F).all()
    assert (workspace[-4:] == 0x7F).all()


@pytest.mark.parametrize(
    ("given_out", "message"),
    [
        ({"out": torch.empty(6, 4, 11)}, r"out has shape \[6, 4, 11\]"),
        ({"out": torch.empty(3, 2, 4, 12)}, "out has shape"),
        ({"out": torch.empty(3, 2, 4, 22)[..., ::2]}, "out has shape .* must be contiguous"),
        ({"lse": torch.empty(3, 2)}, r"lse has shape \[3, 2\]"),
    ],
)
def test_decode_refuses_outputs_of_another_shape(given_out, message):
    q, kv, indices = make(6, 4, 20, 100, 30)
    with pytest.raises(ValueError, match=message):
        keysift.sparse_mla_decode(
            q.view(3, 2, 4, 20), kv.view(25, 4, 20), indices.view(3, 2, 30), 0.3, value_dim=11, **given_out
        )


def test_a_workspace_of_a_byte_too_few_is_refused(monkeypatch, fresh_choices):
    q, kv, indices = make(2, 3, 8, 20, 6)
    table = tuple(
        dataclasses.replace(kernel, workspace_size=lambda problem: 64) if kernel.name == "reference" else kernel
        for kernel in api.KERNELS
    )
    monkeypatch.setattr(api, "KERNELS", table)
    options = {"value_dim": 4, "kernel": "reference"}
    assert keysift.sparse_mla_workspace_size(q, kv, 6, **options) == 64
    out = torch.full((2, 3, 4), torch.nan)
    with pytest.raises(ValueError, match="workspace has 63 bytes; this call needs 64"):
        keysift.sparse_mla(q, kv, indices, 1.0, out=out, workspace=torch.empty(63).byte(), **options)
    assert out.isnan().all()
    with pytest.raises(ValueError, match="k is -1"):
        keysift.sparse_mla_workspace_size(q, kv, -1, **options)


@given(st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30)
def test_parts_of_a_selection_combine_to_the_whole(parts, seed):
    q, kv, indices = make(4, 3, 20, 200, 40, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, parts, indices.shape, generator=generator)
    owner[0] = 0  # the other parts of token 0 are empty
    indices[1] = -1
    pieces = [keysift.sparse_mla(q, kv, indices.where(owner == part, -1), 0.3, value_dim=11) for part in range(parts)]
    outs, lses = torch.stack([out for out, _ in pieces]), torch.stack([lse for _, lse in pieces])
    outs[lses == -torch.inf] = torch.nan  # an empty part may hold anything
    out, lse = keysift.combine_partials(outs, lses)
    assert_close((out, lse), q, kv, indices, 0.3, 11)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_parts_combine_into_what_they_are_given(out_dtype):
    outs, lses = torch.randn(3, 2, 5, 7), torch.randn(3, 2, 5)
    outs[1, 0], lses[1, 0] = torch.nan, -torch.inf
    lses[:, 1, 1] = -torch.inf
    out, lse = torch.full((4, 5, 7), torch.nan, dtype=out_dtype), torch.full((4, 5), torch.nan)
    strided = outs.transpose(1, 2).contiguous().transpose(1, 2)
    result = keysift.combine_partials(strided, lses, out=out[1:3], lse=lse[1:3])
    assert result[0].data_ptr() == out[1:].data_ptr()
    weights = lses.double().softmax(0).nan_to_num(0.0)
    wanted = (weights[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    assert ((out[1:3].double() - wanted).abs() <= 1e-6 + torch.finfo(out_dtype).eps / 2 * wanted.abs()).all()
    torch.testing.assert_close(lse[1:3].double(), lses.double().logsumexp(0))
    assert out[[0, 3]].isnan().all()
    assert lse[[0, 3]].isnan().all()


PARTS, SUMS = torch.zeros(3, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((PARTS, SUMS[:2]), {}, ValueError, r"lses has shape \[2\]"),
        ((PARTS[:0], SUMS[:0]), {}, ValueError, "one part at least"),
        ((PARTS.double(), SUMS), {}, TypeError, "outs is torch.float64"),
        ((PARTS, SUMS.half()), {}, TypeError, "lses is torch.float16"),
        ((PARTS, SUMS), {"out": torch.zeros(3)}, ValueError, r"out has shape \[3\]"),
        ((PARTS, SUMS), {"out": torch.zeros(8)[::2]}, ValueError, "out .* must be contiguous"),
        ((PARTS, SUMS), {"lse": torch.zeros(1)}, ValueError, "lse has shape"),
        ((PARTS, SUMS), {"kernel": "cuda"}, ValueError, "kernel is 'cuda'; combine_partials has"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        keysift.combine_partials(*args, **options)


def test_combining_is_an_operator():
    args = (torch.randn(3, 2, 4), torch.randn(3, 2), torch.empty(2, 4), torch.empty(2), None)
    torch.library.opcheck(
        torch.ops.keysift.combine_partials.default, args, test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(lambda x, y: keysift.combine_partials(x, y)[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(*args[:2]), keysift.combine_partials(*args[:2])[0])
    empty, lse = keysift.combine_partials(torch.zeros(2, 0, 4), torch.zeros(2, 0))
    assert empty.shape == (0, 4)
    assert lse.shape == (0,)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 512])
def test_what_lies_beyond_a_length_looks_like_a_slot_and_is_none(kernel, length):
    q, kv, indices = make(65, 2, 12, 600, 512, seed=length)
    kv[indices[:, length:].unique().long()] = torch.nan
    kept = indices[:, :length].unique().long()
    kv[kept] = torch.randn(len(kept), 12)
    lengths = torch.full((65,), length, dtype=torch.int32)
    result = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=8, topk_length=lengths, kernel=kernel)
    assert_close(result, q, kv, indices[:, :length], 0.3, 8)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("selected", [0, 3, 40])
def test_eight_ranks_of_which_most_own_nothing(kernel, selected):
    """Context parallel decode: a rank drops foreign positions and translates its own; all of them join."""
    ranks = 8
    q, kv, positions = make(2, 3, 12, 64, 64, seed=selected)
    positions[:, selected:] = -1
    pieces = []
    for rank in range(ranks):
        local = torch.where((positions >= 0) & (positions % ranks == rank), positions // ranks, -1)
        pieces.append(keysift.sparse_mla(q, kv[rank::ranks], local, 0.3, value_dim=8, kernel=kernel))
    joined = keysift.combine_partials(torch.stack([o for o, _ in pieces]), torch.stack([s for _, s in pieces]))
    assert not joined[0].isnan().any()
    assert_close(joined, q, kv, positions, 0.3, 8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prefill_in_chunks_is_the_prefill(kernel):
    q, kv, indices = make(50, 3, 20, 200, 40)
    whole = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=11, kernel=kernel)
    for size in (1, 7, 49):
        chunks = [
            keysift.sparse_mla(a, kv, b, 0.3, value_dim=11, kernel=kernel)
            for a, b in zip(q.split(size), indices.split(size), strict=True)
        ]
        for part, one in enumerate(whole):
            torch.testing.assert_close(torch.cat([chunk[part] for chunk in chunks]), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["bfloat16", "e4m3fn"])
def test_slots_beyond_32_bits_of_elements(kernel, format):
    """A page and its stride in 32 bits, their product not; the memory between the pages is never touched."""
    layout = LatentLayout(format, 2, 128, 64, page_stride=2**30 + 1024)
    cache = layout.empty(4)
    latents = torch.randn(3, 192).bfloat16()
    slots = torch.tensor([1, 7, 2])
    keysift.write_latent_cache(latents, cache, slots, layout)
    numbers = keysift.gather_latent_cache(cache, slots, layout)
    q, indices = torch.randn(1, 2, 192).bfloat16(), torch.tensor([[7, -1, 1, 2]], dtype=torch.int32)
    found = keysift.sparse_mla(q, cache, indices, 0.1, value_dim=128, layout=layout, kernel=kernel)
    wanted = keysift.sparse_mla(
        q, numbers, torch.tensor([[1, -1, 0, 2]], dtype=torch.int32), 0.1, value_dim=128, kernel=kernel
    )  # fmt: skip
    torch.testing.assert_close(found[0], wanted[0], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1])


def test_a_page_of_the_wrong_width_is_refused():
    """The 584-byte token of V4 is not the 656-byte one of V3.2."""
    q, indices = torch.randn(1, 2, 576), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache has shape \[4, 64, 584\]"):
        keysift.sparse_mla(q, torch.zeros(4, 64, 584).byte(), indices, 1.0, layout=LatentLayout("e4m3fn"))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda:sm_90", []),
        ("hip:gfx942", []),
        ("cuda:sm_75", ["device is cuda:sm_75, needs sm_80 or later"]),
        ("cuda:sm_86", []),
    ],
)
def test_which_chips_run_the_triton_kernel(device, reason):
    problem = api.Problem(dispatch.parse_device(device), torch.bfloat16, torch.bfloat16, 1, 128, 576, 512, 2048)
    assert dict(dispatch.explain(api.KERNELS, problem))["triton"] == reason
    strided = dataclasses.replace(problem, column_stride=2, dim=576)
    assert "column stride of kv is 2, needs 1" in dict(dispatch.explain(api.KERNELS, strided))["triton"]
    large = dataclasses.replace(problem, dtype=torch.float32, kv_dtype=torch.float32, value_dim=960, dim=1024)
    unmet = dict(dispatch.explain(api.KERNELS, large))["triton"]
    assert any("shared memory" in one for one in unmet) is (device != "cuda:sm_90")
