"""The kernel that hands sparse_mla to the package flash_mla: what it needs, and what it makes of the arguments."""

import dataclasses
import importlib

import pytest
import torch

import keysift
from keysift import dispatch, kernels
from keysift.ops.sparse_mla import api
from keysift.testing.sparse_mla import Attention, build, check_sparse_mla, excess
from packages import FlashMLA, standing_in

MODULE = "keysift.ops.sparse_mla.kernel_flash_mla"
DECODE = Attention(5, 64, 576, 512, 128, torch.bfloat16, page_size=64, fp8=True, power_of_two=True, holes="some")
PREFILL = dataclasses.replace(DECODE, page_size=0, fp8=False, power_of_two=False)
HERE = dispatch.Device("cuda", "sm_90", processors=132)
FACTS = api.Problem(HERE, torch.bfloat16, torch.bfloat16, 1, 128, 576, 512, 2048)
FP8 = dataclasses.replace(FACTS, kv_dtype=torch.float8_e4m3fn, latent_dim=512, power_of_two=True)
pytestmark = pytest.mark.usefixtures("fresh_choices")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_installed", lambda package: True)


@pytest.fixture
def package(monkeypatch, installed):
    """A stand-in, which runs on a CPU."""
    with standing_in(monkeypatch, api, FlashMLA()) as package:
        yield package


def test_the_kit_passes(package):
    report = check_sparse_mla("flash_mla")
    assert report.ok, str(report)
    assert not report.not_claimed
    assert report.declined
    assert set(package.seen) == {"decode", "prefill"}


@pytest.mark.parametrize("case", [DECODE, PREFILL])
def test_arguments_of_any_strides(package, case):
    """Queries and indices of a wider tensor, at odd places; results into a wider one."""
    call = build(case, "cpu", 3)
    q = torch.zeros(7, 64, 579, dtype=torch.bfloat16)[1:6, :, 1:577]
    q.copy_(call.q)
    indices = call.indices.repeat_interleave(2, 1)[:, ::2]
    out, lse = torch.full((9, 64, 512), 7.0, dtype=torch.bfloat16), torch.full((9, 64), 7.0)
    sink = torch.randn(64, 2)[:, 0]
    keysift.sparse_mla(
        q, call.kv, indices, call.scale, layout=call.layout, sink=sink, out=out, lse=lse, kernel="flash_mla"
    )
    assert max(excess(out[:5], lse[:5], dataclasses.replace(call, sink=sink))) <= 1.0
    assert bool((out[5:] == 7).all() and (lse[5:] == 7).all())


def test_many_tokens_are_decoded_some_at_a_time(package, monkeypatch):
    monkeypatch.setattr(importlib.import_module(MODULE), "TOKENS", 2)
    call = build(DECODE, "cpu", 0)
    result = keysift.sparse_mla(call.q, call.kv, call.indices, call.scale, layout=call.layout, kernel="flash_mla")
    assert max(excess(*result, call)) <= 1.0
    assert package.seen == ["decode"] * 3


def test_parts_of_different_caches_are_refused(package):
    kernel, layout = importlib.import_module(MODULE), keysift.LatentLayout("e4m3fn")
    one, other = layout.empty(2), layout.empty(2)
    assert kernel.whole(*layout.views(one)).squeeze(2).view(torch.uint8).equal(one)
    with pytest.raises(ValueError, match="no cache of 656"):
        kernel.whole(*layout.views(one)[:2], layout.views(other)[2])


@pytest.mark.parametrize("facts", [FACTS, FP8])
@pytest.mark.usefixtures("installed")
def test_it_is_chosen_where_it_can_run_and_cuda_cannot(monkeypatch, facts):
    assert dispatch.choose("sparse_mla", api.KERNELS, facts).name == "cuda"
    dispatch._choose.cache_clear()
    monkeypatch.setattr(kernels, "_has_nvrtc", lambda device: False)
    assert dispatch.choose("sparse_mla", api.KERNELS, facts).name == "flash_mla"


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_installed", lambda package: package != "sgl-flash-mla")
    monkeypatch.setattr(kernels, "_has_nvrtc", lambda device: False)
    assert dict(dispatch.explain(api.KERNELS, FACTS))["flash_mla"] == ["the package sgl-flash-mla is not installed"]
    assert dispatch.choose("sparse_mla", api.KERNELS, FACTS).name == "triton"
    with pytest.raises(ValueError, match="sgl-flash-mla is not installed"):
        dispatch.choose("sparse_mla", api.KERNELS, FACTS, "flash_mla")


@pytest.mark.parametrize(
    ("facts", "changes", "reason"),
    [
        (FACTS, {"device": dispatch.Device("cuda", "sm_100")}, "needs cuda:sm_90"),
        (FACTS, {"dtype": torch.float16}, "needs torch.bfloat16"),
        (FACTS, {"kv_dtype": torch.float32}, "needs torch.bfloat16 or fp8"),
        (FACTS, {"heads": 16}, "heads are 16, needs 64 or 128"),
        (FACTS, {"dim": 512}, "needs 576 with 512"),
        (FACTS, {"value_dim": 256}, "needs 576 with 512"),
        (FP8, {"latent_dim": 384}, "needs 576 with 512"),
        (FACTS, {"k": 64}, "needs a multiple of 128"),
        (FP8, {"k": 96}, "needs a multiple of 64"),
        (FACTS, {"column_stride": 2}, "column stride"),
        (FACTS, {"is_aligned": False}, "multiples of 16 bytes"),
        (FACTS, {"page_stride": 576 * 65}, "needs no gaps"),
        (FP8, {"page_stride": 1 << 31}, "less than 2"),
        (FP8, {"power_of_two": False}, "scale='ue8m0'"),
        (FACTS, {"may_allocate": False}, "nothing may be allocated"),
    ],
)
def test_what_it_needs(installed, facts, changes, reason):
    (found,) = api._unmet_flash_mla(dataclasses.replace(facts, **changes))
    assert reason in found


def test_the_facts_are_those_of_the_call(package, monkeypatch):
    """Gaps between pages, where latents begin, a workspace: as the call has them."""
    q, indices = torch.zeros(1, 64, 576, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.int32)
    pool = torch.zeros(4 * 65 * 576, dtype=torch.bfloat16)

    def lacks(kv, **options):
        try:
            keysift.sparse_mla(q, kv, indices, 1.0, kernel="flash_mla", **options)
        except ValueError as error:
            return str(error)
        return ""

    assert not lacks(pool[: 256 * 576].view(4, 64, 576))
    assert not lacks(pool.view(-1, 576))
    assert "37440 elements apart" in lacks(pool.view(4, 65, 576)[:, :64])
    assert "16 bytes" in lacks(pool[1 : 1 + 64 * 576].view(64, 576))
    assert "a workspace is given" in lacks(pool.view(-1, 576), workspace=torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a workspace is given"):
        keysift.sparse_mla_workspace_size(q, pool.view(-1, 576), 128, kernel="flash_mla")
    assert keysift.sparse_mla_workspace_size(q, pool.view(-1, 576), 128) == 0
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8)
    assert "scale='ue8m0'" in lacks(cache, layout=keysift.LatentLayout("e4m3fn"))
    assert not lacks(cache, layout=keysift.LatentLayout("e4m3fn", scale="ue8m0"))
