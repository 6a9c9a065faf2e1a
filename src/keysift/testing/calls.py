"""A case made real: scores inside junk, poisoned outputs inside canaries, windows as the contract clamps them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from . import inputs
from .cases import Bounds, Case

#: Elements handled at a time where a pass would otherwise need as much memory again as the scores.
CELLS = 1 << 24
POISON = 0x7F7F7F7F
_POISON = {torch.int32: POISON, torch.float32: 0x7FC5A5A5, torch.bfloat16: 0x7FD5, torch.float16: 0x7ED5}
_WORKSPACE_GUARD = 256  # bytes on both sides; keeps the alignment that an allocation has
_WORKSPACE_CANARY = 0x5A


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call, and the window [lower, upper) of each row after clamping, [R] int64."""

    case: Case
    storage: torch.Tensor  # flat; scores is a view of it
    scores: torch.Tensor  # [R, N]
    lower: torch.Tensor
    upper: torch.Tensor
    start: torch.Tensor | None = None
    end: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None  # [T, P]
    page_rows: torch.Tensor | None = None

    def options(self) -> dict[str, object]:
        """Keyword arguments of `select`, only those that are not the default."""
        case = self.case
        given: dict[str, object] = {
            "start": self.start,
            "end": self.end,
            "sorted": case.sorted or None,
            "return_values": case.values or None,
            "return_counts": case.counts or None,
            "index_base": case.base if case.base != "window" else None,
            "page_table": self.page_table,
            "page_size": case.pages.size if case.pages else None,
            "page_rows": self.page_rows,
        }
        return {name: value for name, value in given.items() if value is not None}

    def row(self, row: int) -> "Call":
        """The call for one row alone."""
        one = slice(row, row + 1)
        table = self.page_table
        if table is not None and self.page_rows is None:
            table = table[one]
        lens = None if self.seq_lens is None else self.upper_before_clamping(row)
        return replace(
            self,
            case=replace(self.case, rows=1, next_n=1),
            scores=self.scores[one],
            lower=self.lower[one],
            upper=self.upper[one],
            start=None if self.start is None else self.start[one],
            end=None if self.end is None else self.end[one],
            seq_lens=lens,
            page_table=table,
            page_rows=None if self.page_rows is None else self.page_rows[one],
        )

    def upper_before_clamping(self, row: int) -> torch.Tensor:
        """The row's length as 2-D lengths [1, 1]."""
        return self.upper[row].to(self.case.bounds_dtype).reshape(1, 1)

    def tables(self, rows: slice) -> torch.Tensor | None:
        """The page ids of some rows, int64 [rows, P]."""
        if self.page_table is None:
            return None
        table = self.page_table if self.page_rows is None else self.page_table[self.page_rows.long()]
        return table[rows].long()

    def inputs(self) -> list[torch.Tensor]:
        """What the call may read and must not write."""
        given = (self.storage, self.start, self.end, self.seq_lens, self.page_table, self.page_rows)
        return [tensor for tensor in given if tensor is not None]


def build(case: Case, device: torch.device, seed: int) -> Call:
    """The call of `case`. The same seed gives the same call."""
    generator = inputs.generator(device, seed, str(case))
    storage, scores = _scores(case, generator)
    draw = torch.Generator().manual_seed(seed)
    starts, given_ends, lens = _bounds(case.start, case, draw), _bounds(case.end, case, draw), None
    ends = given_ends
    if case.seq_lens is not None:
        lens = torch.tensor(case.seq_lens, dtype=case.bounds_dtype, device=device)
        ends = list(_decode_ends(case))
    windowed = starts is not None or ends is not None
    lower = [min(max(bound, 0), case.columns) for bound in starts or [0] * case.rows]
    ends = [case.columns] * case.rows if ends is None else ends
    upper = [max(min(bound, case.columns), first) for bound, first in zip(ends, lower, strict=True)]
    table, page_rows = _pages(case, draw, device)
    if table is not None and case.pages:
        upper = [min(last, first + table.shape[1] * case.pages.size) for first, last in zip(lower, upper, strict=True)]
    first, last = (torch.tensor(bounds, dtype=torch.int64, device=device) for bounds in (lower, upper))
    if windowed or table is not None:
        _dirty(scores, first, last)
    return Call(
        case,
        storage,
        scores,
        first,
        last,
        start=_strided(starts, case, device),
        end=_strided(given_ends, case, device),
        seq_lens=lens,
        page_table=table,
        page_rows=page_rows,
    )


def _scores(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns, layout = case.rows, case.columns, case.layout
    stride = columns + layout.row_pad
    storage = torch.empty(layout.offset + rows * stride + 64, dtype=case.dtype, device=generator.device)
    for first, junk in enumerate(_junk(case.dtype)):
        storage[first::3] = junk
    strides = (1, rows) if layout.transposed else (stride, 1)
    scores = storage.as_strided((rows, columns), strides, layout.offset)
    return storage, scores.copy_(inputs.make(case.data, rows, columns, case.dtype, generator))


def _junk(dtype: torch.dtype) -> tuple[float, ...]:
    """What nobody may read: each would win, or spoil a comparison. +inf comes first, where a start might be ignored."""
    return torch.inf, torch.finfo(dtype).max, torch.nan


def _dirty(scores: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> None:
    """Junk in every column outside the row's window."""
    column = torch.arange(scores.shape[1], device=scores.device)
    junk = torch.tensor(_junk(scores.dtype), dtype=scores.dtype, device=scores.device)[column % 3]
    for rows in chunks(scores):
        inside = (column >= lower[rows, None]) & (column < upper[rows, None])
        scores[rows] = torch.where(inside, scores[rows], junk)


def chunks(scores: torch.Tensor, cells: int = CELLS) -> Iterator[slice]:
    """Slices of rows, each of about `cells` scores."""
    rows = max(1, cells // max(scores.shape[1], 1))
    return (slice(first, min(first + rows, scores.shape[0])) for first in range(0, scores.shape[0], rows))


def _bounds(bounds: Bounds, case: Case, draw: torch.Generator) -> list[int] | None:
    """One bound per row."""
    if bounds is None or not case.rows:
        return None if bounds is None else []
    if bounds == "causal":
        return list(range(1, case.rows + 1))
    if bounds == "random":  # a fifth beyond either side
        drawn = torch.randint(-case.columns // 5, case.columns * 6 // 5 + 1, (case.rows,), generator=draw)
        return [int(bound) for bound in drawn]
    return list(islice(cycle(int(bound) for bound in bounds), case.rows))


def _decode_ends(case: Case) -> Iterator[int]:
    """Where each row ends, in exact integers (select 2)."""
    for length in case.seq_lens or ():
        if isinstance(length, tuple):
            yield from length
        else:
            yield from (length - case.next_n + j + 1 for j in range(case.next_n))


def _strided(bounds: list[int] | None, case: Case, device: torch.device) -> torch.Tensor | None:
    """Bounds [R], as every `bounds_stride`-th element of a larger tensor."""
    if bounds is None:
        return None
    step = case.bounds_stride
    whole = torch.full((len(bounds) * step,), 1, dtype=case.bounds_dtype, device=device)
    whole[::step] = torch.tensor(bounds, dtype=case.bounds_dtype, device=device)
    return whole[::step]


def _pages(case: Case, draw: torch.Generator, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A table [T, P] of shuffled page ids inside a wider one of wrong ids, and the row map."""
    pages = case.pages
    if pages is None:
        return None, None
    count = -(-case.columns // pages.size) if pages.count is None else pages.count
    rows = {"own": case.rows, "shared": 1, "mapped": 3}[pages.rows]
    whole = torch.full((rows, count + 3), 7 if pages.first else 2**24, dtype=pages.dtype)
    for row in range(rows):
        whole[row, :count] = pages.first + torch.randperm(count, generator=draw)
    if pages.negative:
        whole[:, 1::3] = -1
    table = whole.to(device)[:, :count]
    if pages.rows == "shared":
        return table.expand(case.rows, count), None
    if pages.rows == "own":
        return table, None
    return table, torch.tensor([(2 * row + 1) % 3 for row in range(case.rows)], dtype=pages.dtype, device=device)


class Outputs:
    """Poisoned outputs that are views inside canaries, and a poisoned workspace."""

    def __init__(self, case: Case, device: torch.device, workspace_bytes: int | None = None, fill: int = 0x7F) -> None:
        self.rows = case.rows
        self.views: list[torch.Tensor] = []
        self._buffers: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []  # name, buffer, the part to write, poison
        self._add("out", case, torch.int32, case.k, device)
        if case.values:
            self._add("values", case, case.dtype, case.k, device)
        if case.counts:
            self._add("counts", case, torch.int32, 0, device)
        self.workspace: torch.Tensor | None = None
        self._guard = torch.empty(0, dtype=torch.uint8)
        if workspace_bytes is not None:
            size = workspace_bytes + 2 * _WORKSPACE_GUARD
            self._guard = torch.full((size,), _WORKSPACE_CANARY, dtype=torch.uint8, device=device)
            self.workspace = self._guard[_WORKSPACE_GUARD : _WORKSPACE_GUARD + workspace_bytes].fill_(fill)

    def _add(self, name: str, case: Case, dtype: torch.dtype, width: int, device: torch.device) -> None:
        """A buffer of integers, so that canaries compare as bits, and its view as `dtype`."""
        rows, integer = case.rows, inputs.INTEGER.get(dtype, torch.int32)
        spare, pad = (1, 5) if case.out == "strided" else (0, 0)
        shape, first = ((rows + spare + 4, width + pad), pad // 2) if width else ((rows + spare + 4,), 0)
        buffer = torch.full(shape, _POISON[dtype], dtype=integer, device=device)
        region = buffer[2 : 2 + rows + spare]
        region = region[:, first : first + width] if width else region
        self._buffers.append((name, buffer, region[:rows], _POISON[dtype]))
        self.views.append(region.view(dtype))

    @property
    def argument(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What `out=` takes."""
        return self.views[0] if len(self.views) == 1 else tuple(self.views)

    def results(self) -> list[torch.Tensor]:
        """The R rows that the call had to write."""
        return [view[: self.rows] for view in self.views]

    def trespass(self) -> str:
        """Where the call wrote outside its rows; empty if nowhere."""
        for name, buffer, region, poison in self._buffers:
            wrote = buffer != poison
            _same_view(wrote, region).fill_(False)
            if wrong := _first(wrote):
                return f"{name} is a view; element {wrong} of the buffer around it was written"
        return ""

    def untouched(self) -> str:
        """The first element that was written at all; empty if none was."""
        for name, buffer, _, poison in self._buffers:
            if wrong := _first(buffer != poison):
                return f"{name} was written at {wrong} of its buffer"
        return ""

    def workspace_trespass(self) -> str:
        """Which byte beside the workspace was written; empty if none."""
        if self.workspace is None:
            return ""
        wrong = self._guard != _WORKSPACE_CANARY
        wrong[_WORKSPACE_GUARD : _WORKSPACE_GUARD + self.workspace.numel()] = False
        if not (place := _first(wrong)):
            return ""
        return f"byte {place[0] - _WORKSPACE_GUARD} of a workspace of {self.workspace.numel()} bytes was written"


def _same_view(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that `view` is of another tensor with the same strides."""
    return tensor.as_strided(view.shape, view.stride(), view.storage_offset())


def _first(wrong: torch.Tensor) -> list[int]:
    return [int(place) for place in wrong.nonzero()[0]] if bool(wrong.any()) else []


def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sums of the bits, weighted by place: they differ when any element does."""
    sums = [torch.zeros((), dtype=torch.int64, device=tensors[0].device)]
    for tensor in tensors:
        bits = tensor.view(inputs.INTEGER.get(tensor.dtype, tensor.dtype))
        flat = bits if bits.ndim == 1 else bits.reshape(-1)
        weight = torch.arange(min(CELLS, flat.numel()), device=flat.device) * 2 + 1
        for first in range(0, flat.numel(), CELLS):
            part = flat[first : first + CELLS].long()
            sums.append((part * weight[: part.numel()]).sum())
    return torch.stack(sums)
