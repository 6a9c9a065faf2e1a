"""The kernel that hands score to the package deep_gemm: what it needs, and what it makes of the arguments."""

import dataclasses
import importlib

import pytest
import torch

import keysift
from keysift import dispatch
from keysift.ops.score import api
from keysift.testing.score import Scoring, build, check_score
from packages import DeepGemm, standing_in

MODULE = "keysift.ops.score.kernel_deep_gemm"
FP8 = torch.float8_e4m3fn
FACTS = api.Problem(dispatch.Device("cuda", "sm_90", processors=132), FP8, FP8, 4, 8192, 64, 128)
PAGED = dataclasses.replace(FACTS, page_size=64)
pytestmark = pytest.mark.usefixtures("fresh_choices")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_installed", lambda package: True)


@pytest.fixture
def package(monkeypatch, installed):
    """A stand-in, which runs on a CPU."""
    with standing_in(monkeypatch, api, DeepGemm()) as package:
        yield package


def test_the_kit_passes(package):
    report = check_score("deep_gemm")
    assert report.ok, str(report)
    assert not report.not_claimed
    assert report.declined
    assert set(package.seen) == {"decode", "prefill"}


@pytest.mark.parametrize("scaled", [False, True])
def test_keys_of_any_strides_without_windows(package, scaled):
    call = build(Scoring(4, 70, 64, 128, FP8, FP8, scaled=True), torch.device("cpu"), 1)
    k = torch.randn(70, 128).to(FP8)
    wide = torch.zeros(70, 131, dtype=torch.uint8)[:, 1:129]
    wide.copy_(k.view(torch.uint8))
    scale = torch.rand(70, 2)[:, 1] if scaled else None
    found = keysift.index_scores(call.q, wide.view(FP8), scale, call.weights, kernel="deep_gemm")
    torch.testing.assert_close(found, keysift.index_scores(call.q, k, scale, call.weights, kernel="reference"))


def test_lengths_and_tables_of_64_bits(package):
    """Lengths beyond the table, or negative, are clamped."""
    layout = keysift.IndexLayout("e4m3fn")
    cache = layout.empty(6)
    keysift.write_index_cache(torch.randn(6 * 64, 128), cache, torch.arange(6 * 64), layout)
    q, weights = torch.randn(3, 64, 128).to(FP8), torch.randn(3, 64)
    table, lengths = torch.tensor([[5, 0], [1, 2], [-7, 9]]), torch.tensor([1 << 40, 70, -3])
    found, right = (
        keysift.paged_index_scores(q, cache, weights, lengths, table.clamp(0, 5), layout=layout, kernel=kernel)
        for kernel in ("deep_gemm", "reference")
    )
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[1, :70], right[1, :70])


def test_keys_without_their_scales_behind_them_are_refused(package):
    kernel, layout = importlib.import_module(MODULE), keysift.IndexLayout("e4m3fn")
    one, other = layout.empty(2), layout.empty(2)
    assert kernel.whole(*layout.views(one)).squeeze(2).equal(one)
    with pytest.raises(ValueError, match="scales behind the keys"):
        kernel.whole(layout.views(one)[0], layout.views(other)[1])


@pytest.mark.parametrize("facts", [FACTS, PAGED])
def test_it_comes_after_triton(installed, facts):
    assert dispatch.choose("score", api.KERNELS, facts).name == "triton"
    assert dispatch.choose("score", api.KERNELS, facts, "deep_gemm").name == "deep_gemm"


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_installed", lambda package: package != "deep_gemm")
    assert dict(dispatch.explain(api.KERNELS, FACTS))["deep_gemm"] == ["the package deep_gemm is not installed"]


@pytest.mark.parametrize(
    ("facts", "changes", "reason"),
    [
        (FACTS, {"device": dispatch.Device("cuda", "sm_80")}, "needs cuda:sm_90 or cuda:sm_100"),
        (FACTS, {"q_dtype": torch.bfloat16}, "queries are torch.bfloat16"),
        (FACTS, {"k_dtype": torch.bfloat16}, "keys are torch.bfloat16"),
        (FACTS, {"heads": 16}, "needs 32 or 64"),
        (FACTS, {"head_dim": 96}, "needs 32, 64 or 128"),
        (PAGED, {"page_size": 16}, "pages have 16 tokens, needs 64"),
        (PAGED, {"is_aligned": False}, "multiples of 16 bytes"),
        (PAGED, {"rows": 5000}, "at most 4096"),
        (PAGED, {"next_n": 3}, "next_n is 3, needs at most 2"),
        (PAGED, {"may_allocate": False}, "nothing may be allocated"),
    ],
)
def test_what_it_needs(installed, facts, changes, reason):
    (found,) = api._unmet_deep_gemm(dataclasses.replace(facts, **changes))
    assert reason in found


def test_out_is_refused(package):
    q, k, weights = torch.zeros(2, 64, 128).to(FP8), torch.zeros(5, 128).to(FP8), torch.zeros(2, 64)
    with pytest.raises(ValueError, match="out is given"):
        keysift.index_scores(q, k, None, weights, out=torch.empty(2, 5), kernel="deep_gemm")
