"""The kit catches what it is there to catch, names the line that is broken, and lets a right selector pass."""

import dataclasses
import importlib.util
import io
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from rich.console import Console

import keysift
from keysift.testing import FEATURES, Case, Selector, cases, check_select, inputs, lines, select_kernels
from keysift.testing.calls import build
from keysift.testing.checks import oracle
from keysift.testing.fuzz import random_cases

_spec = importlib.util.spec_from_file_location("broken", Path(__file__).with_name("broken.py"))
broken = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(broken)

REFERENCE = dict(select_kernels("cpu"))["reference"]

#: What the plain selector can do: everything but page tables and decode; it trusts its arguments.
PLAIN = FEATURES - {"pages", "page_rows", "decode", "prefill", "refusals"}

#: (selector, the line it must be caught in, words of the finding, lines that break with it)
BROKEN = [
    (broken.TruncatingBuffer(), lines.WHICH, "left out", ()),
    (broken.CoarseRetry(), lines.WHICH, "left out", ()),
    (broken.AbsoluteColumns(), lines.BASE, "are columns, not relative to the row's start", ()),
    (broken.UnwrittenTail(), lines.ORDER, "was not written", ()),
    (broken.IgnoredEnd(), lines.WINDOWS, "the row's end is ignored", ()),
    (broken.IgnoredStart(), lines.WINDOWS, "the row's start is ignored", ()),
    (broken.NaNFirst(), lines.ELIGIBLE, "a NaN or -inf selected", ()),
    (broken.MinusInfinitySelected(), lines.ELIGIBLE, "a NaN or -inf selected", ()),
    (broken.TiesByArrival(), lines.TIES, "a higher column taken among equal values", ()),
    (broken.ZerosToldApart(), lines.TIES, "+0.0 and -0.0 told apart", ()),
    (broken.OneRowTooMany(), lines.OUTPUT, "was written", ()),
    (broken.StrideTakenAsK(), lines.OUTPUT, "was written", ()),
    (broken.PaddingOutranks(), lines.WINDOWS, "outside the row's window", ()),
    (broken.ValuesAsFloat32(), lines.ON_REQUEST, "values is torch.float32", ()),
    (broken.Duplicates(), lines.WHICH, "selected twice", ()),
    (broken.Nondeterministic(), lines.REPEAT, "other bits", ()),
    (broken.SortedIgnored(), lines.ORDER, "not in ascending order", ()),
    (broken.CountsOfWindow(), lines.ON_REQUEST, "counts is", ()),
    (broken.RowStrideTakenAsWidth(), lines.SCORES, "without its stride", ()),
    (broken.InputCleaned(), lines.INPUTS, "an input was changed", ()),
    (broken.WorkspaceOverrun(), lines.WORKSPACE, "was written", ()),
    (broken.AloneIsShorter(), lines.ALONE, "alone gives another set", (lines.WHICH,)),
    (broken.NothingShort(), lines.SIZES, "raised RuntimeError", ()),
    (broken.Int64Indices(), lines.OUTPUT, "torch.int64", ()),
]


def half(case):
    """Half of the cases, and all that are long: enough to catch each of the broken."""
    return case.columns > 4096 or zlib.crc32(str(case).encode()) % 2 == 0


def plain(select):
    return Selector(type(select).__name__, select, workspace_size=lambda scores, k: 100)


def test_a_right_selector_passes_and_claims_no_more_than_it_says():
    report = check_select(plain(broken.Plain()), features=PLAIN, tier="tiny")
    assert report.ok, str(report)
    assert report.not_claimed == [lines.DECODE, lines.PAGES, lines.REFUSED]


@pytest.mark.parametrize(("selector", "line", "words", "also"), BROKEN, ids=[type(row[0]).__name__ for row in BROKEN])
def test_a_broken_selector_is_caught_and_named(selector, line, words, also):
    report = check_select(plain(selector), features=PLAIN, accepts=half, tier="tiny")
    assert not report.ok
    assert set(report.failed) == {line, *also}, str(report)
    assert words in report.lines[line].first_failure, str(report)
    assert "seed 0, " in report.lines[line].first_failure


def test_decode_lengths_off_by_one_are_named():
    selector = dataclasses.replace(REFERENCE, decode=broken.decode_off_by_one, unmet=None)
    report = check_select(selector, features=FEATURES - {"refusals", "workspace"}, tier="tiny")
    assert report.failed == [lines.DECODE], str(report)


def test_a_page_table_row_of_another_request_is_named():
    report = check_select(broken.pages_of_row, features=FEATURES - {"refusals"}, tier="tiny")
    # What a row gets depends on where it stands in the batch, so that it may get something else alone.
    assert set(report.failed) - {lines.ALONE} == {lines.PAGES}, str(report)
    assert "the slots are those of table row" in report.lines[lines.PAGES].first_failure


def test_a_selector_that_refuses_nothing_is_named():
    def accepts_all(scores, k, **options):
        return None

    report = check_select(accepts_all, features=FEATURES, accepts=lambda case: False, tier="tiny")
    assert report.failed == [lines.REFUSED]
    assert report.lines[lines.REFUSED].passed == 0
    assert "accepted" in report.lines[lines.REFUSED].first_failure


def test_a_refusal_that_comes_after_writing_or_names_nothing_is_no_refusal():
    def writes_first(scores, k, *, out=None, **options):
        for given in out if isinstance(out, tuple) else (out,):
            if isinstance(given, torch.Tensor) and given.device.type != "meta":
                given.zero_()
        raise ValueError(
            "scores, k, start, end, out, index_base, page_size, page_table, page_rows: one of them is wrong"
        )

    def says_nothing(scores, k, **options):
        raise ValueError("bad argument")

    for selector, words in ((writes_first, "was written"), (says_nothing, "does not name scores")):
        report = check_select(selector, accepts=lambda case: False, tier="tiny")
        assert report.failed == [lines.REFUSED]
        assert words in report.lines[lines.REFUSED].first_failure


def test_a_declared_constraint_has_to_be_refused_in_its_own_words():
    def even(scores, k):
        return ["k is odd, needs even"] if k % 2 else []

    def silent(scores, k, **options):
        return keysift.select(scores, k, kernel="reference", **options)

    def honest(scores, k, **options):
        if k % 2:
            raise ValueError("kernel 'even': k is odd, needs even")
        return silent(scores, k, **options)

    def some(case):
        return case.rows < 3

    report = check_select(
        Selector("honest", honest, unmet=even), features=FEATURES - {"refusals"}, accepts=some, tier="tiny"
    )
    assert report.ok, str(report)
    assert report.declined > 20
    report = check_select(
        Selector("silent", silent, unmet=even), features=FEATURES - {"refusals"}, accepts=some, tier="tiny"
    )
    assert report.failed == [lines.REFUSED]
    assert "not refused, though k is odd, needs even" in report.lines[lines.REFUSED].first_failure


def test_a_peer_is_judged_by_what_it_claims():
    """torch.topk on whole float32 rows: right but for ties and what is not a number; nothing else is asked of it."""

    def topk(scores, k):
        return scores.topk(k).indices.int()

    def ordinary(case):
        return 0 < case.k <= case.columns and case.data in ("normal", "uniform", "ulp_ladder")

    report = check_select(topk, features=(), accepts=ordinary, tier="tiny")
    assert report.ok, str(report)
    assert {lines.WINDOWS, lines.DECODE, lines.OUTPUT, lines.ON_REQUEST, lines.PAGES, lines.REFUSED} <= set(
        report.not_claimed
    )
    report = check_select(topk, features=(), accepts=lambda case: 0 < case.k <= case.columns, tier="tiny")
    assert not report.ok
    assert {lines.ELIGIBLE, lines.TIES} <= set(report.failed), str(report)


def test_nothing_judged_is_not_a_pass():
    report = check_select(keysift.select, features=(), accepts=lambda case: False, tier="tiny")
    assert not report.ok
    assert len(report.not_claimed) == len(report.lines)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="features holds \\['speed'\\]"):
        check_select(keysift.select, features={"speed"})
    with pytest.raises(ValueError, match="tier is 'huge'"):
        check_select(keysift.select, tier="huge")


def test_the_report_prints_as_text_and_as_a_table():
    report = check_select(plain(broken.IgnoredEnd()), features=PLAIN, accepts=lambda case: case.rows < 4, tier="tiny")
    out = io.StringIO()
    Console(file=out, width=2000).print(report)
    for text in (str(report), out.getvalue()):
        assert "IgnoredEnd: breaks the contract" in text
        assert "the row's end is ignored" in text
        assert "not claimed" in text


def test_progress_reaches_its_total():
    seen = []
    check_select(
        REFERENCE,
        accepts=lambda case: case.k == 7,
        tier="tiny",
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total, _ in seen} == {len(seen)}


@pytest.mark.parametrize("tier", ["tiny", "cpu", "gpu"])
def test_cases_have_names_of_their_own(tier):
    names = [str(case) for case in cases(tier)]
    assert len(set(names)) == len(names)


def test_tiers_contain_one_another():
    tiers = [{str(case) for case in cases(tier)} for tier in ("tiny", "cpu", "gpu")]
    assert tiers[0] < tiers[1] < tiers[2]


def test_every_distribution_is_asked_for_in_every_dtype():
    asked = {(case.data, case.dtype) for case in cases("tiny")}
    wanted = {
        (data, dtype) for data in inputs.DISTRIBUTIONS for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert wanted <= asked


def test_the_same_seed_builds_the_same_call():
    case = next(case for case in cases("tiny") if case.start == "random")
    one, same, other = (build(case, torch.device("cpu"), seed) for seed in (3, 3, 4))
    assert torch.equal(one.storage.view(torch.int32), same.storage.view(torch.int32))
    assert torch.equal(one.lower, same.lower)
    assert not torch.equal(one.storage.view(torch.int32), other.storage.view(torch.int32))
    assert [str(case) for case in random_cases(5, "tiny")] == [str(case) for case in random_cases(5, "tiny")]
    assert random_cases(5, "tiny") != random_cases(6, "tiny")


def test_everything_outside_a_window_is_junk():
    call = build(
        Case(3, 40, 5, start=(7, 0, 40), end=(30, 0, 40), layout=lines.Layout(row_pad=2, offset=1)),
        torch.device("cpu"),
        0,
    )
    inside = torch.zeros(3, 40, dtype=torch.bool)
    inside[0, 7:30] = True
    worst = torch.finfo(torch.float32).max
    assert bool((call.scores.isnan() | (call.scores >= worst) == ~inside).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_distributions_are_what_they_say(dtype):
    def made(name, columns=4000):
        return inputs.make(name, 4, columns, dtype, inputs.generator("cpu", 0, name))

    assert bool((made("relu") == 0).float().mean() > 0.4)
    assert made("all_equal").unique().numel() == 1
    for name, share in (("nan_1", 0.01), ("nan_50", 0.5), ("nan_83", 0.83), ("nan_100", 1.0)):
        nan = made(name).isnan()
        assert abs(float(nan.float().mean()) - share) < 0.02
        assert 0 < int(made(name).signbit()[nan].sum()) < int(nan.sum())
    zeros = made("signed_zeros")
    zeros = zeros[zeros == 0]
    assert 0.4 < float(zeros.signbit().float().mean()) < 0.6
    tiny = torch.finfo(dtype).tiny
    assert bool((made("denormals").abs() < tiny).all())
    assert bool((made("denormals") != 0).any())
    assert made("lowest").min() == -torch.inf
    assert bool((made("lowest") == torch.finfo(dtype).min).any())
    assert bool((made("few_finite") > -torch.inf).sum(1).eq(3).all())
    ladder = made("ulp_ladder").view(inputs.INTEGER[dtype]).long().sort(1).values
    assert bool((ladder.diff(dim=1) == 1).all())
    if dtype == torch.float32:
        low = made("low_bits").view(torch.int32)
        assert bool((low >> 10 == 0x3F900000 >> 10).all())
        assert low.unique().numel() > 900
        crowd = made("crowd", 8192)
        assert int(((crowd >= 1) & (crowd < 1.25)).sum(1).min()) > 4096


def test_the_oracle_by_hand():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[1.0, nan, -0.0, 0.0, inf, -inf, 1.0, -nan, -2.0]])
    whole = torch.tensor([0]), torch.tensor([9])
    for k, wanted in (
        (1, [4]),
        (2, [0, 4]),
        (3, [0, 4, 6]),
        (4, [0, 2, 4, 6]),
        (5, [0, 2, 3, 4, 6]),
        (7, [0, 2, 3, 4, 6, 8, 9]),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            columns, found = oracle(scores.to(dtype), k, *whole)
            assert columns.tolist() == [wanted]
            assert found.tolist() == [min(k, 6)]
    assert oracle(scores, 2, torch.tensor([2]), torch.tensor([4]))[0].tolist() == [[2, 3]]
    assert oracle(scores, 2, torch.tensor([5]), torch.tensor([5]))[1].tolist() == [0]


def test_the_kernels_are_those_of_the_table():
    assert [name for name, _ in select_kernels("cpu")] == [kernel.name for kernel in keysift.ops.select.api.KERNELS]
    for name, selector in select_kernels("cpu"):
        assert callable(selector) or (selector and all(isinstance(reason, str) for reason in selector)), name


def test_the_kit_needs_neither_pytest_nor_hypothesis():
    code = (
        "import sys; sys.modules.update(pytest=None, hypothesis=None); import keysift.testing; "
        "sys.exit(any(name in sys.modules for name in ('triton', 'numba', 'transformers', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
