"""The kits for score and index find the faults that such code has had, each in its own line."""

import pytest
import torch

from keysift import dispatch, indexer
from keysift.ops.score import api, reference
from keysift.testing import check_index, check_score, index, index_kernels, score, score_kernels

pytestmark = pytest.mark.usefixtures("fresh_choices")


def patched(change):
    """The reference with its arguments (q, k, k_scale, weights, starts, ends, next_n, block_table, out) changed."""

    def kernel(*arguments):
        reference.run(*change(*arguments))

    return kernel


@patched
def weight_before_relu(q, k, k_scale, weights, *more):
    return q.float() * weights[:, :, None], k, k_scale, torch.ones_like(weights), *more


@patched
def scale_forgotten(q, k, k_scale, *more):
    return q, k, None, *more


@patched
def starts_forgotten(q, k, k_scale, weights, starts, *more):
    return q, k, k_scale, weights, None, *more


@patched
def ends_as_if_next_n_were_1(q, k, k_scale, weights, starts, ends, next_n, *more):
    if len(ends) < len(q):
        ends = ends.repeat_interleave(next_n)
    return q, k, k_scale, weights, starts, ends, next_n, *more


@patched
def page_table_in_order(q, k, k_scale, weights, starts, ends, next_n, table, out):
    table = table if table is None else torch.arange(table.numel()).view(table.shape)
    return q, k, k_scale, weights, starts, ends, next_n, table, out


def whole_rows_written(q, k, k_scale, weights, starts, ends, next_n, table, out):
    out.zero_()
    reference.run(q, k, k_scale, weights, starts, ends, next_n, table, out)


def neighbour_row_written(q, k, k_scale, weights, starts, ends, next_n, table, out):
    reference.run(q, k, k_scale, weights, starts, ends, next_n, table, out)
    behind = out.storage_offset() + len(out) * out.stride(0)
    if behind + out.shape[1] <= out.untyped_storage().size() // 4:
        out.as_strided((1, out.shape[1]), out.stride(), behind).zero_()


def scaled_by_the_largest_of_the_call(q, k, k_scale, weights, *more):
    """As a quantisation per call would: alone, a row has other bits."""
    largest = weights.abs().amax()
    reference.run(q, k, k_scale, weights / largest, *more)
    out, starts, ends, next_n, table = more[-1], more[0], more[1], more[2], more[3]
    columns = out.shape[1] if table is None else min(out.shape[1], table.shape[1] * k.shape[1])
    lower, upper = reference.windows(len(q), columns, starts, ends, next_n, q.device)
    column = torch.arange(columns)
    inside = (column >= lower[:, None]) & (column < upper[:, None])
    out[:, :columns][inside] *= largest


def other_every_time(q, k, k_scale, weights, starts, ends, next_n, table, out):
    weights = weights * (1 + torch.rand(()) * 1e-6)
    reference.run(q, k, k_scale, weights, starts, ends, next_n, table, out)


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (weight_before_relu, score.FORMULA),
        (scale_forgotten, score.FORMULA),
        (starts_forgotten, score.WINDOWS),
        (ends_as_if_next_n_were_1, score.WINDOWS),
        (page_table_in_order, score.PAGES),
        (whole_rows_written, score.WINDOWS),
        (neighbour_row_written, score.WINDOWS),
        (scaled_by_the_largest_of_the_call, score.ALONE),
        (other_every_time, score.REPEAT),
    ],
)
def test_a_broken_kernel_of_score_is_found_in_its_line(monkeypatch, kernel, line):
    monkeypatch.setattr(dispatch, "_load", lambda entry: kernel)
    report = check_score("reference")
    assert line in report.failed, str(report)
    assert "seed " in report.lines[line].first_failure


def test_a_call_that_is_not_refused_is_found(monkeypatch):
    monkeypatch.setattr(api.checks, "check_keys", lambda *_: None)
    monkeypatch.setattr(dispatch, "_load", lambda entry: lambda *_: None)
    assert score.REFUSED in check_score("reference").failed


def test_every_kernel_of_score_is_judged():
    assert [name for name, _ in score_kernels()] == [kernel.name for kernel in api.KERNELS]
    for name, unmet in score_kernels():
        report = check_score(None if unmet else name, seed=3)
        assert report.ok, str(report)
        assert not report.not_claimed


@pytest.mark.parametrize("kernel", [name for name, unmet in index_kernels() if not unmet])
def test_the_index_keeps_its_lines(kernel):
    report = check_index(kernel, seed=3)
    assert report.ok, str(report)
    assert not report.not_claimed


def broken_based(monkeypatch):
    monkeypatch.setattr(indexer, "_based", lambda best, low, base, table, size, rows: best)


def first_piece_only(monkeypatch):
    whole = indexer._best_of_pieces
    monkeypatch.setattr(
        indexer, "_best_of_pieces", lambda s, low, high, columns, piece, *more: whole(s, low, high, piece, piece, *more)
    )


def the_later_column_wins(monkeypatch):
    """The best so far not in the order of their columns."""
    select = indexer.select

    def backwards(*arguments, **options):
        found = select(*arguments, **options)
        if not isinstance(found, tuple):
            return found
        place = (found[0] >= 0).sum(1, keepdim=True) - 1 - torch.arange(found[0].shape[1])
        return tuple(x.gather(1, place.clamp(min=0)).where(place >= 0, x) for x in found)

    monkeypatch.setattr(indexer, "select", backwards)


def budget_ignored(monkeypatch):
    monkeypatch.setattr(indexer, "_plan", lambda rows, columns, *_: (iter([slice(0, rows)]), columns))


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (broken_based, index.PIECES),
        (first_piece_only, index.PIECES),
        (the_later_column_wins, index.TIES),
        (budget_ignored, index.REFUSED),
    ],
)
def test_a_broken_index_is_found_in_its_line(monkeypatch, fault, line):
    fault(monkeypatch)
    report = check_index("cpu")
    assert line in report.failed, str(report)


def test_kernels_that_do_not_exist_are_refused():
    for check in (check_score, check_index):
        with pytest.raises(ValueError, match="kernel is 'fast'"):
            check("fast")
