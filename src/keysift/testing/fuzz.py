"""Cases drawn at random: the combinations that nobody thought of."""

import random
from typing import Any

import torch

from . import inputs
from .cases import DTYPES, EXTREMES, Bounds, Case, Layout, Pages

#: (cases, largest columns, largest rows) by tier.
SIZES = {"tiny": (40, 400, 4), "cpu": (200, 8000, 10), "gpu": (600, 200000, 40)}


def random_cases(seed: int, tier: str) -> list[Case]:
    """The cases of this seed."""
    count, columns, rows = SIZES[tier]
    draw = random.Random(seed)  # noqa: S311 - cases, not secrets
    return [random_case(draw, columns, rows) for _ in range(count)]


def random_case(draw: random.Random, most_columns: int, most_rows: int) -> Case:
    """One case; sizes are small as often as large."""
    rows, columns = 1 + int(most_rows * draw.random() ** 2), int(most_columns ** draw.random())
    k = draw.choice([1, 2, int(most_columns ** draw.random()), max(columns // 2, 1), max(columns, 1), columns + 1])
    case: dict[str, Any] = {
        "data": draw.choice(list(inputs.DISTRIBUTIONS)),
        "dtype": draw.choice(DTYPES),
        "sorted": draw.random() < 0.3,
        "values": draw.random() < 0.3,
        "counts": draw.random() < 0.3,
        "out": draw.choice(["strided", "strided", "tight", "none"]),
        "workspace": draw.random() < 0.5,
        "bounds_dtype": draw.choice([torch.int32, torch.int64]),
        "bounds_stride": draw.choice([1, 1, 3]),
        "layout": Layout(draw.choice([0, 0, draw.randrange(1, 40)]), draw.choice([0, 0, draw.randrange(1, 8)])),
    }
    form = draw.choice(["plain", "windows", "windows", "column", "pages", "decode"])
    if form == "decode":
        next_n = draw.randrange(1, 4)
        rows = next_n * max(rows // next_n, 1)
        lens = tuple(draw.randrange(-3, columns + 4) for _ in range(rows // next_n))
        return Case(rows, columns, k, seq_lens=lens, next_n=next_n, **{**case, **_PLAIN})
    if form != "plain":
        case["start"], case["end"] = _bound(draw, case, columns), _bound(draw, case, columns)
    if form == "column":
        case["base"] = "column"
    if form == "pages":
        size = draw.choice([1, 2, 16, 53, 64, 69])
        count = draw.choice([None, draw.randrange(0, columns // size + 3)])
        case["pages"] = Pages(size, count, draw.choice(["own", "shared", "mapped"]), draw.random() < 0.3)
    return Case(rows, columns, k, **case)


#: The decode form gives indices alone.
_PLAIN = {"sorted": False, "values": False, "counts": False}


def _bound(draw: random.Random, case: dict[str, Any], columns: int) -> Bounds:
    few = [draw.randrange(-columns // 8 - 1, columns + columns // 8 + 2) for _ in range(draw.randrange(1, 5))]
    if case["bounds_dtype"] == torch.int64:
        few.append(draw.choice(EXTREMES))
    return draw.choice([None, "random", tuple(few)])
