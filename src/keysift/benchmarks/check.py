"""Whether a result is right, for inputs of any size: what has not passed here is not timed.

Every row's values are compared, exactly, with what `torch.topk` finds among the eligible scores (in the window, not
NaN); for kernels of ours the sets of indices of some rows are compared with the reference too: values do not show ties.
"""

from dataclasses import dataclass

import torch

from keysift.ops.select import reference

POISON = 0x7F7F7F7F
CELLS = 1 << 26  # scores looked at together; bounds the memory
SAMPLED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """What the selections of one input have to be."""

    scores: torch.Tensor  # [R, N]
    ends: torch.Tensor  # [R]: windows [0, end)
    values: torch.Tensor  # [R, k] descending, -inf where there are fewer
    rows: torch.Tensor  # [S] rows whose indices are known
    indices: torch.Tensor  # [S, k] ascending, -1 first


def expect(scores: torch.Tensor, ends: torch.Tensor, k: int) -> Expected:
    """The right answer for `scores` [R, N] with windows [0, ends[r])."""
    rows, columns = scores.shape
    column = torch.arange(columns, device=scores.device)
    values = scores.new_full((rows, k), -torch.inf)
    for part in _parts(scores):
        eligible = (column < ends[part, None]) & (scores[part] > -torch.inf)  # NaN > -inf is false
        top = scores[part].masked_fill(~eligible, -torch.inf).topk(min(k, columns)).values
        values[part, : top.shape[1]] = top
    sampled = torch.linspace(0, rows - 1, min(rows, SAMPLED_ROWS), device=scores.device).long()
    upper = ends[sampled].long()
    indices = reference.select_windows(scores[sampled], k, torch.zeros_like(upper), upper)[0]
    return Expected(scores, ends, values, sampled, indices.sort(1).values)


def fault(found: torch.Tensor, expected: Expected, *, is_ours: bool) -> str | None:
    """What is wrong with the indices `found` [R, >= 0], or None. `is_ours`: held to the whole contract."""
    for part in _parts(expected.scores):
        scores, ends, values = expected.scores[part], expected.ends[part], expected.values[part]
        indices = found[part].long()
        if indices.shape[1] < values.shape[1]:
            indices = torch.nn.functional.pad(indices, (0, values.shape[1] - indices.shape[1]), value=-1)
        selected = indices >= 0
        ascending = indices.sort(1).values
        got = scores.gather(1, indices.clamp(0, scores.shape[1] - 1)).masked_fill(~selected, -torch.inf)
        wrong = {
            "an index outside the window": ((indices < -1) | (indices >= ends[:, None])).any(1),
            "an index twice": ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)).any(1),
            "another number of indices than it should": selected.sum(1) != (values > -torch.inf).sum(1),
            "other values than torch.topk finds": (got.sort(1, descending=True).values != values).any(1),
        }
        if is_ours:
            wrong["-1 before an index"] = (selected[:, 1:] & ~selected[:, :-1]).any(1)
        for what, rows in wrong.items():
            if rows.any():
                first = part.start + int(rows.nonzero()[0])
                return f"row {first} has {what} ({int(rows.sum())} such rows of {len(rows)})"
    if is_ours:
        other = (found[expected.rows].long().sort(1).values != expected.indices).any(1)
        if other.any():
            return f"row {int(expected.rows[other][0])} selects other columns than the reference"
    return None


def _parts(scores: torch.Tensor) -> list[slice]:
    rows, columns = scores.shape
    step = max(1, CELLS // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
