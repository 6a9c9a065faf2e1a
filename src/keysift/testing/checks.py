"""What a selection has to be, in two independent ways, and in which line of the contract a wrong one fails.

`oracle` computes the set from the bits of the scores, in integers: no comparison of floats and no sort that could
treat ties, zeros or NaN in a way of its own. `broken` holds the properties that make the set unique, and knows no
right answer.
"""

from collections.abc import Iterator

import torch

from . import inputs
from .calls import POISON, Call, chunks
from .lines import BASE, DECODE, ELIGIBLE, ON_REQUEST, ORDER, OUTPUT, PAGES, SCORES, TIES, WHICH, WINDOWS, Finding

_NOWHERE = -(2**63)
#: Rows explained in one chunk of a failing case.
_EXPLAINED = 4


def oracle(scores: torch.Tensor, k: int, lower: torch.Tensor, upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected columns, ascending, int64 [R, k] with N after them, and how many, int64 [R] (select 2 to 4)."""
    columns = scores.shape[1]
    column = torch.arange(columns, device=scores.device)
    sign, infinity = (1 << 31, 0x7F800000) if scores.dtype == torch.float32 else (1 << 15, 0x7F80)
    if scores.dtype == torch.float16:
        infinity = 0x7C00
    bits = scores.contiguous().view(inputs.INTEGER[scores.dtype]).long()
    magnitude = bits & (sign - 1)
    key = torch.where(bits < 0, -magnitude, magnitude)  # both zeros are 0
    eligible = (column >= lower[:, None]) & (column < upper[:, None]) & (magnitude <= infinity) & (key > -infinity)
    # One integer per column, all different: value first, then the lower column.
    rank = torch.where(eligible, (key << 31) + (2**31 - 1 - column), _NOWHERE)
    best, places = rank.topk(min(k, columns), dim=1)
    places = places.masked_fill(best == _NOWHERE, columns).sort(1).values
    return torch.nn.functional.pad(places, (0, k - places.shape[1]), value=columns), eligible.sum(1).clamp(max=k)


def check(call: Call, results: list[torch.Tensor], poisoned: bool = True) -> list[Finding]:
    """What is wrong with the results of `call`, at most one finding per line. Empty: nothing."""
    found: dict[str, str] = {}
    for rows in chunks(call.scores):
        for line, message in _Rows(call, results, rows, poisoned).findings():
            found.setdefault(line, message)
    return list(found.items())


def check_form(call: Call, results: object) -> list[Finding]:
    """Whether a call that allocates its results returns tensors of the right shapes and dtypes."""
    case, tensors = call.case, results if isinstance(results, tuple) else (results,)
    wanted: list[tuple[str, torch.dtype, tuple[int, ...], str]] = [
        ("indices", torch.int32, (case.rows, case.k), OUTPUT)
    ]
    if case.values:
        wanted.append(("values", case.dtype, (case.rows, case.k), ON_REQUEST))
    if case.counts:
        wanted.append(("counts", torch.int32, (case.rows,), ON_REQUEST))
    if len(tensors) != len(wanted) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return [(OUTPUT, f"the call returns {len(tensors)} results, not ({', '.join(name for name, *_ in wanted)})")]
    found = []
    for tensor, (name, dtype, shape, line) in zip(tensors, wanted, strict=True):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != call.scores.device:
            given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            found.append((line, f"{name} is {given}, not {dtype} {list(shape)} on {call.scores.device}"))
    return found


class _Rows:
    """Some rows of a call beside their results."""

    def __init__(self, call: Call, results: list[torch.Tensor], rows: slice, poisoned: bool) -> None:
        self.call, self.case, self.first, self.poisoned = call, call.case, rows.start, poisoned
        self.scores = call.scores[rows]
        self.lower, self.upper = call.lower[rows], call.upper[rows]
        self.table = call.tables(rows)
        self.given = results[0][rows].long()
        rest = [result[rows] for result in results[1:]]
        self.values = rest.pop(0) if self.case.values else None
        self.counts = rest.pop(0) if self.case.counts else None
        self.wanted, self.found = oracle(self.scores, self.case.k, self.lower, self.upper)

    def findings(self) -> Iterator[Finding]:
        """The first wrong rows explained; where the selection is right, its order, values and counts."""
        wanted = self.expressed(self.wanted, self.lower, self.table)
        differs = (self.given.sort(1).values != wanted.sort(1).values).any(1)
        slot = torch.arange(self.case.k, device=self.given.device)
        # A page of -1 gives slots of -1 among the selected; otherwise -1 comes last.
        late = ((self.given != -1) & (slot >= self.found[:, None])).any(1)
        broken = list(self.broken()) if not (self.case.pages and self.case.pages.negative) else []
        wrong = differs | late
        for _, rows, _ in broken:
            wrong = wrong | rows
        for row in wrong.nonzero()[:_EXPLAINED, 0].tolist():
            line, message = self.explain(row, wanted[row], broken)
            yield line, f"row {self.first + row}: {message}"
        if bool(wrong.any()):
            return
        if self.case.sorted and bool((self.given != wanted).any()):
            row = int((self.given != wanted).any(1).nonzero()[0])
            yield ORDER, f"row {self.first + row}: sorted=True, but {_some(self.given[row])} is not in ascending order"
        yield from self.on_request()

    def expressed(self, columns: torch.Tensor, lower: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        """Columns [R, k] (N: none) in the case's index base, -1 where there is none (select 6)."""
        selected = columns < self.case.columns
        if self.case.base == "column":
            return columns.where(selected, -1)
        position = columns - lower[:, None]
        if table is None or self.case.pages is None:
            return position.where(selected, -1)
        size = self.case.pages.size
        if not table.shape[1]:
            return torch.full_like(position, -1)
        page = table.gather(1, (position // size).where(selected, 0))
        return (page * size + position % size).where(selected & (page >= 0), -1)

    def columns(self) -> torch.Tensor:
        """The given indices as columns [R, k]; -1 where there is none, N where no column could be meant."""
        given, nowhere = self.given, self.case.columns
        if self.case.base == "column":
            return given
        position = given
        if self.case.pages is not None and self.table is not None and self.table.shape[1]:
            size = self.case.pages.size
            pages, order = self.table.sort(1)
            place = torch.searchsorted(pages, given // size).clamp(max=pages.shape[1] - 1)
            known = pages.gather(1, place) == given // size
            position = (order.gather(1, place) * size + given % size).where(known, nowhere)
        return (position + self.lower[:, None]).where(given != -1, -1).clamp(-1, max(nowhere, 0))

    def broken(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """(line, rows [R] bool, what is broken) of every property. Needs no reference: together they leave one set."""
        scores, columns = self.scores, self.columns()
        valid = self.given != -1
        count = self.case.columns
        window = DECODE if self.case.seq_lens is not None else WINDOWS
        outside = valid & ((columns < self.lower[:, None]) | (columns >= self.upper[:, None]))
        yield window, outside.any(1), "an index outside the row's window"
        if not count:
            return
        inside = valid & ~outside
        safe = columns.clamp(0, count - 1)
        ordered = columns.where(inside, -1).sort(1).values
        yield WHICH, ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1), "a column selected twice"
        values = scores.gather(1, safe)
        yield ELIGIBLE, (inside & ~(values > -torch.inf)).any(1), "a NaN or -inf selected"
        column = torch.arange(count, device=scores.device)
        eligible = (column >= self.lower[:, None]) & (column < self.upper[:, None]) & (scores > -torch.inf)
        due = eligible.sum(1).clamp(max=self.case.k)
        yield WHICH, valid.sum(1) != due, "not min(k, eligible) columns selected"
        taken = torch.zeros(scores.shape[0], count + 1, dtype=torch.bool, device=scores.device)
        taken = taken.scatter(1, safe.where(inside, count), True)[:, :count]
        worst = values.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
        left = eligible & ~taken
        full = due == self.case.k
        best = scores.masked_fill(~left, -torch.inf).amax(1)
        yield WHICH, (best > worst[:, 0]) & full, "a larger value left out"
        last = column.where(taken & (scores == worst), -1).amax(1)
        first = column.where(left & (scores == worst), count).amin(1)
        yield TIES, (first < last) & full, "a higher column taken among equal values"

    def explain(self, row: int, wanted: torch.Tensor, broken: list[tuple[str, torch.Tensor, str]]) -> Finding:
        """The line that a wrong row breaks: the most telling explanation first."""
        given, case = self.given[row], self.case
        if self.poisoned and bool((given == POISON).any()):
            return ORDER, f"slot {int((given == POISON).nonzero()[0])} of {case.k} was not written"
        if finding := self.misread(row):
            return finding
        late = ((given[1:] != -1) & (given[:-1] == -1)).nonzero()
        if late.numel() and not (case.pages and case.pages.negative):
            return ORDER, f"-1 in slot {int(late[0])} comes before an index in the next"
        for line, rows, what in broken:
            if bool(rows[row]):
                return line, f"{what}: {self.detail(row, what)}"
        line = PAGES if case.pages else WHICH
        return line, f"gives {_some(given)}, not {_some(wanted)}"

    def misread(self, row: int) -> Finding | None:
        """Whether the row is right for another index base, another window, or another row stride."""
        case, (lower, upper) = self.case, (int(self.lower[row]), int(self.upper[row]))
        given = self.given[row].sort().values

        def same(scores: torch.Tensor, first: int, last: int, bases: tuple[int, ...]) -> bool:
            ends = torch.tensor([[first], [last]], device=scores.device)
            columns = oracle(scores, case.k, ends[0], ends[1])[0][0]
            columns = columns.where(columns < case.columns, -1)
            return any(torch.equal(columns.where(columns < 0, columns - base).sort().values, given) for base in bases)

        scores = self.scores[row : row + 1]
        if case.pages is not None:
            if same(scores, lower, upper, (lower, 0)):
                return PAGES, "the indices are positions or columns, not slots of the page table"
            for other, table in enumerate(self.call.page_table[:8] if self.call.page_table is not None else ()):
                slots = self.expressed(self.wanted[row : row + 1], self.lower[row : row + 1], table[None].long())
                if torch.equal(slots[0].sort().values, given):
                    return PAGES, f"the slots are those of table row {other}"
            return None
        base, other = (0, lower) if case.base == "column" else (lower, 0)
        if base != other and same(scores, lower, upper, (other,)):
            kind = (
                "columns, not relative to the row's start" if other == 0 else "relative to the row's start, not columns"
            )
            return BASE, f"the indices are {kind}"
        window = DECODE if case.seq_lens is not None else WINDOWS
        for what, first, last in (
            ("start is ignored", 0, upper),
            ("end is ignored", lower, case.columns),
            ("window is ignored", 0, case.columns),
            ("window ends one column early", lower, max(upper - 1, lower)),
            ("window ends one column late", lower, min(upper + 1, case.columns)),
        ):
            # Where only the last column of all is missed, the window need not be the reason.
            told = upper < case.columns or window == DECODE or "early" not in what
            if told and (first, last) != (lower, upper) and same(scores, first, last, (first if base else 0, base)):
                return window, f"the row's {what}"
        for what, begin in self.elsewhere(self.first + row):
            if same(self.call.storage[begin : begin + case.columns][None], lower, upper, (base,)):
                return SCORES, f"the row is read where it would lie without its {what}"
        return None

    def elsewhere(self, row: int) -> Iterator[tuple[str, int]]:
        """Where a row would begin for somebody who overlooks how the scores lie; not for a few columns, all alike."""
        layout, columns = self.case.layout, self.case.columns
        if columns < 8:
            return
        if layout.transposed or (layout.row_pad and row):
            yield "stride", layout.offset + row * columns
        if layout.offset and not layout.transposed:
            yield "offset", row * (columns + layout.row_pad)

    def detail(self, row: int, what: str) -> str:
        """Names the columns and values behind a broken property."""
        columns, scores = self.columns()[row], self.scores[row]
        lower, upper = int(self.lower[row]), int(self.upper[row])
        valid = self.given[row] != -1
        if "outside" in what:
            bad = columns[valid & ((columns < lower) | (columns >= upper))]
            return f"column {int(bad[0])} of [{lower}, {upper})"
        chosen = columns[valid & (columns >= lower) & (columns < upper)]
        wanted = self.wanted[row][self.wanted[row] < self.case.columns]
        missing = wanted[~torch.isin(wanted, chosen)]
        extra = chosen[~torch.isin(chosen, wanted)]
        if "twice" in what:
            unique, times = chosen.unique(return_counts=True)
            return f"column {int(unique[times > 1][0])}"
        if "not min" in what:
            return f"{int(valid.sum())} of {int(self.found[row])}"
        words = []
        for name, places in (("taken", extra), ("left out", missing)):
            if places.numel():
                words.append(f"column {int(places[0])} ({scores[places[0]].item()!r}) {name}")
        words.append(f"{missing.numel()} of {wanted.numel()} missing")
        if "equal" in what and extra.numel() and missing.numel():
            signs = torch.signbit(scores[extra]).any() != torch.signbit(scores[missing]).any()
            if not bool(scores[extra[0]]) and bool(signs):
                words.append("+0.0 and -0.0 told apart")
        return ", ".join(words)

    def on_request(self) -> Iterator[Finding]:
        """Values and counts beside a right selection (select 7)."""
        if self.counts is not None and bool((self.counts != self.found).any()):
            row = int((self.counts != self.found).nonzero()[0])
            yield ON_REQUEST, f"row {self.first + row}: counts is {int(self.counts[row])}, not {int(self.found[row])}"
        if self.values is None:
            return
        paged = self.case.pages is not None and self.case.pages.negative
        wanted = self.value_multiset() if paged else self.value_of(self.columns())
        given = self.values.sort(1).values if paged else self.values
        if bool((given != wanted).any()):
            row, slot = (given != wanted).nonzero()[0].tolist()
            values = f"{given[row, slot].item()}, not {wanted[row, slot].item()}"
            yield ON_REQUEST, f"row {self.first + row}: the value in slot {slot} is {values}"

    def value_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The scores at columns [R, k], -inf where there is none."""
        if not self.case.columns:
            return torch.full(columns.shape, -torch.inf, dtype=self.case.dtype, device=columns.device)
        inside = (columns >= 0) & (columns < self.case.columns)
        return self.scores.gather(1, columns.where(inside, 0)).masked_fill(~inside, -torch.inf)

    def value_multiset(self) -> torch.Tensor:
        """Where pages are missing an index says nothing about its column: the values due, in order."""
        return (
            self.value_of(self.wanted.masked_fill(self.expressed(self.wanted, self.lower, self.table) < 0, -1))
            .sort(1)
            .values
        )


def _some(indices: torch.Tensor) -> str:
    head = ", ".join(str(index) for index in indices[:6].tolist())
    return f"[{head}, ...]" if indices.numel() > 6 else f"[{head}]"
