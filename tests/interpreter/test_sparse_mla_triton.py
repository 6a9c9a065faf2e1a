"""sparse_mla in Triton's interpreter: the kit's cases, k whole and in parts, and what only this kernel can break."""

import dataclasses
import os

import pytest
import torch

import keysift
from keysift import LatentLayout, dispatch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before Triton is imported", allow_module_level=True)

from attention import assert_close, make
from keysift.ops.sparse_mla import kernel_triton_plan as plans
from keysift.testing.sparse_mla import Attention, build, check_sparse_mla, excess

pytestmark = pytest.mark.usefixtures("fresh_choices")


def planned(monkeypatch, **changes):
    """Every plan with these changes."""
    made = plans.plan

    def changed(*facts):
        return dataclasses.replace(made(*facts), **changes)

    monkeypatch.setattr(plans, "plan", changed)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_kit_passes(monkeypatch, parts):
    """A third of k is a tile at most here, so one of the parts may be empty."""
    planned(monkeypatch, parts=parts, tile=16)
    report = check_sparse_mla("triton", seed=parts)
    assert report.ok, str(report)
    assert not report.not_claimed


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("k", [32, 33, 1100])
def test_holes_of_whole_tiles(monkeypatch, parts, k):
    """-1 at the ends, in the middle, at every tile's edge; k of whole tiles and not, beyond one scan of the indices."""
    planned(monkeypatch, parts=parts, tile=16)
    q, kv, indices = make(7, 2, 12, 1200, k)
    place = torch.arange(k)
    indices[0, k // 2 :] = -1
    indices[1, : k // 2] = -1
    indices[2, (place >= 16) & (place < k - 1)] = -1
    indices[3, place % 16 == 0] = -1
    indices[4] = -1
    indices[5, place % 16 != 15] = -1
    kv[~torch.isin(torch.arange(1200), indices[indices >= 0])] = torch.nan
    result = keysift.sparse_mla(q, kv, indices, 0.3, value_dim=8, kernel="triton")
    assert_close(result, q, kv, indices, 0.3, 8)


@pytest.mark.parametrize(
    ("heads", "dim", "value_dim"), [(1, 1, 1), (8, 64, 64), (64, 40, 24), (65, 20, 4), (20, 300, 130), (3, 150, 2)]
)
def test_sizes_that_fill_no_block(heads, dim, value_dim):
    q, kv, indices = make(2, heads, dim, 60, 21)
    result = keysift.sparse_mla(q, kv, indices, dim**-0.5, value_dim=value_dim, kernel="triton")
    assert_close(result, q, kv, indices, dim**-0.5, value_dim)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_queries_and_latents_of_two_dtypes(dtypes):
    q, kv, indices = make(2, 3, 24, 60, 21)
    q, kv = q.to(dtypes[0]), kv.to(dtypes[1])
    result = keysift.sparse_mla(q, kv, indices, 0.2, value_dim=16, kernel="triton")
    assert_close(result, q, kv, indices, 0.2, 16)


@pytest.mark.parametrize("page_size", [5, 8])
def test_strides_of_everything(page_size):
    """Queries heads first, indices every other column, latents a slice of wider rows in pages that lie apart."""
    q, kv, indices = make(3, 4, 20, 40, 16)
    wide = torch.full((40 // page_size, page_size + 1, 33), torch.nan)
    wide[:, :page_size, 7:27] = kv.view(-1, page_size, 20)
    every_other = torch.full((3, 32), 10**9, dtype=torch.int32)
    every_other[:, ::2] = indices
    lengths = torch.full((3, 2), 10**9)
    lengths[:, 0] = torch.tensor([16, 3, 0])
    result = keysift.sparse_mla(
        q.transpose(0, 1).contiguous().transpose(0, 1), wide[:, :page_size, 7:27], every_other[:, ::2], 0.3,
        value_dim=11, topk_length=lengths[:, 0], kernel="triton",
    )  # fmt: skip
    cut = indices.where(torch.arange(16) < lengths[:, :1], -1)
    assert_close(result, q, kv, cut, 0.3, 11)


def test_every_byte_of_fp8():
    """All 254 numbers, negative zero and the smallest included; a NaN that is selected shows."""
    layout = LatentLayout("e4m3fn", 4, 128, 2)
    cache = layout.empty(4)
    cache.zero_()
    values, scales, _ = layout.views(cache)
    codes = values.view(torch.uint8).view(16, 128)
    codes[0], codes[1] = torch.arange(128), torch.arange(128) + 128
    codes[0, 127] = codes[1, 127] = 0
    scales.fill_(1.0)
    q = torch.zeros(2, 1, 130)
    indices = torch.tensor([[0], [1]], dtype=torch.int32)
    out, _ = keysift.sparse_mla(q, cache, indices, 1.0, value_dim=128, layout=layout, kernel="triton")
    assert torch.equal(out[:, 0], values.float().view(16, 128)[:2])
    codes[1, 5] = 0xFF
    out, _ = keysift.sparse_mla(q, cache, indices, 1.0, value_dim=128, layout=layout, kernel="triton")
    assert out[1, 0, 5].isnan()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("value_dim", [1, 128, 200])
def test_fewer_values_than_an_fp8_latent_has(value_dim):
    case = Attention(2, 3, 256 + 10, 256, 20, fp8=True, page_size=4, holes="some")
    call = build(case, "cpu", 3)
    out, lse = keysift.sparse_mla(
        call.q, call.kv, call.indices, call.scale, value_dim=value_dim, layout=call.layout, kernel="triton"
    )
    assert max(excess(out, lse, call)) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_combine_as_the_reference_does(dtype):
    outs, lses = torch.randn(4, 3, 5, 24).to(dtype), 30 * torch.randn(4, 3, 5)
    outs[1, 0], lses[1, 0] = torch.nan, -torch.inf
    lses[:, 1, 1] = -torch.inf
    found, wanted = (keysift.combine_partials(outs, lses, kernel=kernel) for kernel in ("triton", "reference"))
    torch.testing.assert_close(found[0], wanted[0], rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)
    assert (found[0][1, 1] == 0).all()


@pytest.mark.parametrize("format", ["bfloat16", "e4m3fn"])
def test_slots_beyond_32_bits_of_elements(format):
    """A page and its stride in 32 bits, their product not; the memory between the pages is never touched."""
    layout = LatentLayout(format, 2, 128, 64, page_stride=2**30 + 1024)
    cache = layout.empty(4)
    slots = torch.tensor([0, 7])
    keysift.write_latent_cache(torch.randn(2, 192).bfloat16(), cache, slots, layout, kernel="reference")
    numbers = keysift.gather_latent_cache(cache, slots, layout, kernel="reference")
    q, indices = torch.randn(1, 2, 192), torch.tensor([[7, 0]], dtype=torch.int32)
    found = keysift.sparse_mla(q, cache, indices, 0.1, value_dim=128, layout=layout, kernel="triton")
    assert_close(found, q, numbers.float(), torch.tensor([[1, 0]]).int(), 0.1, 128)


def test_bfloat16_is_rounded_to_nearest():
    """Queries of zeros give the mean of two latents, exactly until it is rounded."""
    latents = torch.randn(2, 64).bfloat16()
    indices = torch.tensor([[0, 1]], dtype=torch.int32)
    out, _ = keysift.sparse_mla(torch.zeros(1, 1, 64).bfloat16(), latents, indices, 1.0, value_dim=64, kernel="triton")
    assert torch.equal(out[0, 0], latents.float().mean(0).bfloat16())


def test_parts_follow_the_rows_that_there_are():
    """Few tokens: parts that fill the chip, and a workspace for them; many: none of both."""
    device = dispatch.parse_device("cuda:sm_90")
    sizes = (torch.bfloat16, torch.bfloat16)
    few, many = (plans.plan(device, *sizes, rows, 128, 512, 64, 2048) for rows in (1, 4096))
    assert few.parts * 2 * 1 <= 132 < 2 * few.parts * 2 * 2
    assert few.workspace(1, 128, 512) == 4 * few.parts * 128 * 513 + plans.ALIGNMENT
    assert (many.parts, many.workspace(4096, 128, 512)) == (1, 0)
