"""The cases that every select kernel is judged by, as data. A case says what is asked; `calls.py` builds it.

`report` says where a case comes from: the words of somebody who met that fault in some implementation of this job.
Tiers: `tiny` is small enough for an interpreter, `cpu` adds long rows, `gpu` adds what a small machine cannot hold.
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from . import inputs

TIERS = ("tiny", "cpu", "gpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
#: Bounds that clamping has to survive.
EXTREMES = (-(2**63), 2**63 - 1, -(2**62), 2**62)

# One bound per row: given values, repeated over the rows, or "random", or "causal" (row r ends at r + 1).
Bounds = tuple[int, ...] | str | None


@dataclass(frozen=True, slots=True)
class Layout:
    """How the scores lie in memory: a view of a larger buffer whose other elements hold junk."""

    row_pad: int = 0  # row stride - columns
    offset: int = 0  # storage offset, in elements
    transposed: bool = False  # column stride is rows: served or refused


@dataclass(frozen=True, slots=True)
class Pages:
    """The page table of a case."""

    size: int
    count: int | None = None  # pages per table row; default: just enough for every column
    rows: str = "own"  # "own": row r uses table row r; "shared": one row, stride 0; "mapped": through page_rows
    negative: bool = False  # some pages are -1
    first: int = 0  # the lowest page id
    dtype: torch.dtype = torch.int32


@dataclass(frozen=True, slots=True)
class Case:
    """One call of select, or of its decode or prefill form."""

    rows: int
    columns: int
    k: int
    data: str = "normal"
    dtype: torch.dtype = F32
    start: Bounds = None
    end: Bounds = None
    bounds_dtype: torch.dtype = torch.int32
    bounds_stride: int = 1
    seq_lens: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None  # the decode form
    next_n: int = 1
    prefill: bool = False  # the prefill form, with start and end
    layout: Layout = Layout()
    sorted: bool = False
    values: bool = False
    counts: bool = False
    base: str = "window"
    pages: Pages | None = None
    out: str = "strided"  # "strided" or "tight" views with canaries around them, or "none"
    workspace: bool = False
    tier: str = "tiny"
    report: str = ""

    def __str__(self) -> str:
        """What is asked, in words; unique among the cases, so that the data is seeded by it."""
        words = [f"{self.rows} x {self.columns}, k={self.k}", self.data, str(self.dtype).removeprefix("torch.")]
        for field in dataclasses.fields(self)[5:-2]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}".replace("torch.", ""))
        return ", ".join(words) + (f" ({self.report})" if self.report else "")


def cases(tier: str = "cpu") -> list[Case]:
    """Every case up to `tier`. Raises ValueError for an unknown tier."""
    if tier not in TIERS:
        raise ValueError(f"tier is {tier!r}; it may be {', '.join(map(repr, TIERS))}")
    allowed = TIERS[: TIERS.index(tier) + 1]
    made = (*_which(), *_special(), *_windows(), *_phases(), *_layouts(), *_results(), *_sizes())
    return list({str(case): case for case in made if case.tier in allowed}.values())


def _which() -> Iterator[Case]:
    """Value distributions: a set that is silently wrong."""
    for data, dtype in product(inputs.DISTRIBUTIONS, DTYPES):
        yield Case(2, 500, 70, data, dtype)
        yield Case(2, 1500, 300, data, dtype, tier="cpu")
        yield Case(2 if dtype == F32 else 1, 33000, 2048, data, dtype, tier="cpu")
    for data in ("normal", "relu", "all_equal", "low_bits", "nan_50", "signed_zeros", "ulp_ladder"):
        yield Case(8, 131072, 2048, data, tier="gpu")
        yield Case(64, 65536, 512, data, BF16, tier="gpu")
    yield Case(1, 16384, 512, "band_10")
    overflow = "report: a 4096-entry candidate buffer overflows on plain normal data"
    yield Case(2, 65536, 2048, tier="cpu", report=overflow)
    yield Case(2, 262144, 2048, tier="cpu", report=overflow)
    yield Case(1, 1048576, 2048, tier="cpu", report=overflow)
    for columns in (65536, 262144, 1048576):
        yield Case(8, columns, 2048, tier="gpu", report=overflow)
    equal_bits = "report: illegal access when the leading 22 bits agree"
    yield from (
        Case(2, columns, 2048, "low_bits", report=equal_bits, tier=t) for columns, t in ((4096, "tiny"), (32768, "cpu"))
    )
    yield Case(4, 32768, 2048, "low_bits", report=equal_bits, tier="gpu")
    yield Case(
        2, 8192, 2048, "crowd", report="report: ties clipped in arrival order, though equal only in a coarse key"
    )
    for dtype in DTYPES:
        yield Case(
            2, 65536, 1024, "mod_64", dtype, tier="cpu", report="report: smallest selected value is not the 1024th"
        )
        yield Case(2, 4096, 64, "mod_64", dtype)
    coarse = "report: the retry repeats the coarse key"
    yield Case(3, 16384, 512, "band_10", start=(0, 100, 4001), prefill=True, tier="cpu", report=coarse)
    traffic = "report: overflow on real traffic, a long prompt in a wide buffer"
    yield Case(2, 262144, 2048, "heavy_tailed", end=(134249,), tier="cpu", report=traffic)
    yield from (
        Case(rows, 262144, 2048, "heavy_tailed", end=(134249,), tier="gpu", report=traffic) for rows in (32, 33)
    )
    yield Case(6, 1000, 70, "tie_distance", report="report: lanes that tie each retire their own winner")
    yield Case(5, 300, 100, "two_valued", BF16, report="report: ties settled by arrival")


def _special() -> Iterator[Case]:
    """NaN, infinities, padding values."""
    shares = ("normal", "nan_50", "nan_83", "nan_100")
    garbage = "report: uninitialised indices where a row is mostly NaN"
    for data in shares:
        yield Case(5, 1243, 512, data, counts=True, report=garbage)
        yield Case(4869, 1243, 512, data, tier="gpu", report=garbage)
    yield Case(4869, 1243, 512, "nan_83", tier="cpu", report=garbage)
    padding = "report: the padding value outranks -inf, and the index lies past the row"
    for width in (45, 51, 64, 67):
        ends = tuple(first + width for first in range(4))
        yield Case(4, 96, 16, "few_finite", start=(0, 1, 2, 3), end=ends, values=True, counts=True, report=padding)
    for width in range(45, 68):
        lying = Layout(row_pad=13, offset=width % 4)
        yield Case(2, width, 16, "few_finite", layout=lying, tier="cpu" if width % 3 else "tiny", report=padding)
    yield Case(3, 700, 400, "lowest", start=(0, 5, 9), end=(333, 640, 700), counts=True)
    yield Case(6, 8192, 512, "specials", report="report: non-finite scores leave slots unset", values=True)
    yield Case(64, 8192, 512, "specials", tier="cpu", report="report: non-finite scores leave slots unset")
    for rows, tier in ((1, "tiny"), (5, "tiny"), (511, "cpu"), (512, "cpu"), (513, "cpu")):
        yield Case(
            rows, 32, 4, "nan_row", BF16, tier=tier, report="report: NaN ranks by position, or only above 512 rows"
        )


def _windows() -> Iterator[Case]:
    clamp = "report: effective length clamped to [0, columns - start]"
    for dtype in (torch.int32, torch.int64):
        yield Case(
            4, 500, 64, start=(0, 499, 500, 501), end=(-3, 0, 1, 500), bounds_dtype=dtype, counts=True, report=clamp
        )
        yield Case(
            5, 500, 64, start=(0, 499, 500, 501), end=(497, 499, 501, 1000, 500), bounds_dtype=dtype, report=clamp
        )
        yield Case(7, 300, 40, start=(-5, 0, 299, 10, -1), end=(300, 301, 7, 10, 9, 11, 100), bounds_dtype=dtype)
        yield Case(6, 2000, 128, "relu", start="random", end="random", bounds_dtype=dtype)
        yield Case(6, 1000, 100, start="random", end="random", bounds_dtype=dtype, bounds_stride=2)
    wide = torch.int64
    yield Case(8, 200, 30, start=EXTREMES, end=(200, 100, -1, 150, 0, 50, 3), bounds_dtype=wide, counts=True)
    yield Case(8, 200, 30, end=EXTREMES, bounds_dtype=wide, counts=True)
    yield Case(16, 200, 30, start=EXTREMES, end=(*EXTREMES[1:], *EXTREMES, *EXTREMES[:1]), bounds_dtype=wide)
    yield Case(4, 200, 30, start=(-(2**31), 2**31 - 1, 0, 7), end=(2**31 - 1, -(2**31), 2**31 - 1, 2**31 - 1))
    yield Case(3, 1000, 100, end=(1000, 517, 3))
    yield Case(3, 1000, 100, start=(0, 517, 990))
    yield Case(20, 20, 6, end="causal", counts=True)
    yield Case(300, 300, 64, end="causal", counts=True, tier="cpu")
    yield Case(2048, 8192, 2048, end="causal", tier="gpu")
    packed = "report: packed requests, windows that do not begin at column 0, one of one token"
    yield Case(3, 2400, 512, start=(0, 700, 1900), end=(700, 1900, 1901), prefill=True, report=packed)
    yield Case(3, 2400, 512, "ascending", start=(0, 700, 1900), end=(700, 1900, 1901), report=packed)
    bounded = "report: work bounded by the allocated width instead of the length"
    yield Case(2, 131072, 2048, end=(4096,), pages=Pages(64, 64), tier="cpu", report=bounded)
    yield Case(8, 131072, 2048, end=(4096,), pages=Pages(1, 4096), tier="gpu", report=bounded)
    mixed = "report: rows shorter than k mixed with long rows leave stale counters"
    yield Case(6, 4000, 1024, end=(500, 4000), report=mixed)
    yield Case(12, 60000, 2048, end=(1000, 60000), tier="cpu", report=mixed)
    yield Case(300, 60000, 2048, end=(1000, 60000), tier="gpu", report=mixed)
    yield Case(4, 20000, 512, end=(1, 500, 513, 20000), tier="cpu", report="report: short rows leave a cluster early")
    for columns, tier in ((8192, "cpu"), (1048576, "gpu")):
        yield Case(4, columns, 2048, end=(8000,), tier=tier, report="report: columns past the length are read")


def _phases() -> Iterator[Case]:
    """Decode and prefill as engines call them."""
    yield Case(3, 700, 64, seq_lens=(700, 1, 65))
    yield Case(6, 700, 64, seq_lens=(700, 65, 1), next_n=2)
    yield Case(8, 700, 64, seq_lens=(3, 900), next_n=4, report="report: draft tokens longer than the sequence")
    yield Case(6, 300, 32, seq_lens=(-1, 0, 1), next_n=2, bounds_dtype=torch.int64)
    yield Case(8, 300, 32, seq_lens=EXTREMES, next_n=2, bounds_dtype=torch.int64)
    yield Case(4, 300, 32, seq_lens=EXTREMES, bounds_dtype=torch.int64)
    yield Case(
        8, 300, 32, seq_lens=((2**62, -(2**62)), (5, 300), (0, 301), (-1, 7)), next_n=2, bounds_dtype=torch.int64
    )
    drafts = "report: padded rows of a draft batch reach the result"
    yield Case(6, 400, 48, seq_lens=((399, 400), (123, 0), (7, 8)), next_n=2, report=drafts)
    ends = "report: per-row ends 2, 2, 2, 2 where the length alone gives 0, 0, 1, 2"
    yield Case(4, 40, 8, seq_lens=((2, 2, 2, 2),), next_n=4, report=ends)
    yield Case(4, 40, 8, seq_lens=(2,), next_n=4, report=ends)
    yield Case(
        12, 900, 128, seq_lens=(900, 400, 130), next_n=4, report="report: draft steps read another request's rows"
    )
    yield Case(2, 900, 128, seq_lens=(900, 400), dtype=F16, workspace=True)
    yield Case(16, 65536, 2048, seq_lens=(65536, 1, 3000, 40000), next_n=4, tier="gpu")
    yield Case(5, 900, 128, start=(0, 10, 20), end=(900, 10, 500, 21), prefill=True, workspace=True)


def _layouts() -> Iterator[Case]:
    padded = "report: rows padded to a multiple of 256, the width taken as the row stride"
    yield Case(4, 997, 128, layout=Layout(row_pad=3), report=padded)
    yield Case(2, 900000, 2048, layout=Layout(row_pad=96), tier="gpu", report=padded)
    yield Case(2, 90000, 2048, layout=Layout(row_pad=24), tier="cpu", report=padded)
    for dtype, offset in product(DTYPES, (1, 2, 3, 5)):
        yield Case(3, 1025, 100, dtype=dtype, layout=Layout(offset, offset))
    yield Case(5, 257, 40, layout=Layout(transposed=True), report="report: a column stride that is not 1 is misread")
    for rows, tier in ((3, "tiny"), (63, "cpu"), (64, "cpu"), (65, "cpu"), (66, "cpu"), (96, "cpu")):
        heads = Layout(row_pad=31 * 600, offset=1200)
        yield Case(rows, 600, 64, layout=heads, tier=tier, report="report: head stride taken for the row stride")
    far = "report: rows * columns beyond 32 bits"
    yield Case(2200, 1000000, 512, dtype=F16, tier="gpu", report=far)
    yield Case(2200, 1000000, 512, tier="gpu", report=far)
    yield Case(2200, 500000, 512, layout=Layout(row_pad=500000), tier="gpu", dtype=BF16, report=far)
    yield Case(4200, 1048576, 512, dtype=BF16, end=(30000,), tier="gpu", report=far)
    yield Case(3, 200000, 64, layout=Layout(row_pad=2**30), dtype=F16, tier="gpu", report=far)
    chunks = "report: rows in chunks give another result than all at once"
    yield Case(30, 5000, 256, tier="cpu", report=chunks)
    yield Case(300, 50000, 2048, tier="gpu", report=chunks)


def _results() -> Iterator[Case]:
    """Order, index base, values, counts, output views, workspaces."""
    ragged = functools.partial(Case, start=(0, 1, 77, 400), end=(600, 500, 90, 400))
    for sort, values, counts in product((False, True), (False, True), (False, True)):
        asked = functools.partial(ragged, sorted=sort, values=values, counts=counts)
        for data, dtype, tier in (("infinities", F32, "tiny"), ("relu", F16, "cpu"), ("normal", BF16, "cpu")):
            yield asked(5, 600, 50, data, dtype, base="column", tier=tier)
            yield asked(5, 600, 50, data, dtype, out="none", tier=tier)
            yield asked(4, 600, 50, data, dtype, out="tight", workspace=True, tier=tier)
        yield asked(4, 200, 20, "relu", F16 if sort else BF16, out="none" if values else "strided", workspace=counts)
    yield Case(3, 2500, 2048, sorted=True, values=True)
    yield Case(3, 2500, 2500, "signed_zeros", sorted=True, values=True)
    yield Case(2, 1000, 2048, "nan_50", sorted=True, values=True, counts=True)
    for size, rows in product((1, 2, 53, 64, 256), ("own", "shared", "mapped")):
        tier = "tiny" if size in (1, 53) else "cpu"
        yield ragged(4, 900, 70, pages=Pages(size, rows=rows), sorted=rows == "own", tier=tier)
    yield ragged(4, 900, 70, pages=Pages(61, rows="mapped", dtype=torch.int64), sorted=True, counts=True, values=True)
    for count in (0, 1, 5):
        yield Case(4, 900, 70, pages=Pages(64, count), counts=True, values=True, start=(0, 3, 600, 880))
    yield ragged(4, 900, 70, pages=Pages(69, negative=True), sorted=True, values=True, counts=True)
    yield ragged(4, 900, 200, "relu", pages=Pages(16, negative=True, rows="mapped"), counts=True)
    yield Case(
        2,
        900,
        70,
        pages=Pages(64, first=(2**31 - 1) // 64 - 15),
        report="report: slot arithmetic once page ids get high",
    )
    yield Case(2, 900, 70, pages=Pages(64, first=300000, dtype=torch.int64), end=(900, 65))


def _sizes() -> Iterator[Case]:
    narrow = "report: fewer columns than k"
    for columns in (0, 1, 63, 64):
        yield Case(2, columns, 2048, values=True, counts=True, report=narrow)
    for columns in (2047, 2048, 2049):
        yield Case(1, columns, 2048, report=narrow)
    for rows in (0, 1, 2):
        for columns in (0, 1, 5):
            yield Case(rows, columns, 3, "relu", values=True, counts=True, sorted=True)
            yield Case(rows, columns, 3, out="none", counts=True, base="column")
    yield Case(0, 900, 64, seq_lens=(), next_n=2, report="report: no rows at all, a launch of size zero")
    yield Case(0, 900, 64, pages=Pages(64), start=(0,), report="report: no rows at all, a launch of size zero")
    for k in (1, 2, 3, 7, 31, 63, 64, 65, 100, 512, 1000, 1024, 1025):
        yield Case(1, 1600, k, "relu" if k % 2 else "normal")
    for k in (1, 511, 512, 1000, 2048, 4096, 5000, 30000):
        yield Case(2, 40000, k, tier="cpu")
    for columns in (2, 3, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 2049):
        yield Case(1, columns, 512 if columns > 512 else 9)
    for columns in (8448, 33024, 524288):
        yield Case(1, columns, 512, tier="cpu", report="report: more columns than a block has threads")
    yield Case(2048, 8192, 2048, tier="gpu")
    yield Case(1, 4194304, 2048, tier="gpu")
    yield Case(70000, 300, 16, tier="gpu")
