"""Selectors that each break one line of the contract, in ways that published kernels did."""

import torch

LOWEST = torch.finfo(torch.float32).min


class Plain:
    """A right selector in small steps, for a subclass to break one of them. It knows no page tables."""

    def __call__(
        self, scores, k, *, start=None, end=None, out=None, sorted=False, return_values=False, return_counts=False,
        index_base="window", workspace=None,
    ):  # fmt: skip
        lower, upper = self.window(scores, start, end)
        column = torch.arange(scores.shape[1])
        inside = (column >= lower[:, None]) & (column < upper[:, None])
        columns, values, counts = self.best(self.read(scores), k, self.eligible(scores, inside), upper)
        if sorted:
            columns, order = columns.masked_fill(columns < 0, 2**31).sort(1)
            columns = columns.masked_fill(columns == 2**31, -1)
            values = values.gather(1, order)
        indices = self.express(columns, lower, index_base)
        self.scratch(workspace)
        results = [indices.int(), *([values] if return_values else []), *([counts.int()] if return_counts else [])]
        if out is None:
            return results[0] if len(results) == 1 else tuple(results)
        outs = out if isinstance(out, tuple) else (out,)
        for given, result in zip(outs, results, strict=True):
            self.write(given, result)
        return out

    def window(self, scores, start, end):
        rows, columns = scores.shape
        lower = torch.zeros(rows, dtype=torch.long) if start is None else start.long().clamp(0, columns)
        upper = torch.full((rows,), columns) if end is None else end.long().clamp(0, columns)
        return lower, torch.maximum(lower, upper)

    def read(self, scores):
        return scores

    def eligible(self, scores, inside):
        return inside & (scores > -torch.inf)

    def best(self, scores, k, eligible, upper):
        columns = self.rank(scores, eligible)[:, :k]
        columns = torch.nn.functional.pad(columns, (0, k - columns.shape[1]))
        counts = eligible.sum(1).clamp(max=k)
        none = torch.arange(k) >= counts[:, None]
        if not scores.shape[1]:
            return columns.masked_fill(none, -1), scores.new_full(columns.shape, -torch.inf), counts
        return columns.masked_fill(none, -1), scores.gather(1, columns).masked_fill(none, -torch.inf), counts

    def rank(self, scores, eligible):
        """Columns, best first; stable sorts, so the lower column among equals."""
        by_value = (scores + 0.0).masked_fill(~eligible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        late = (~eligible).gather(1, by_value).int().sort(dim=1, stable=True).indices
        return by_value.gather(1, late)

    def express(self, columns, lower, index_base):
        return columns if index_base == "column" else (columns - lower[:, None]).masked_fill(columns < 0, -1)

    def scratch(self, workspace):
        if workspace is not None:
            workspace.fill_(1)

    def write(self, out, result):
        out[: result.shape[0]].copy_(result)


def coarse_key(scores, bits):
    """The first `bits` bits of an order-preserving float16 key."""
    pattern = scores.half().contiguous().view(torch.int16).long()
    return (torch.where(pattern < 0, ~pattern & 0xFFFF, pattern | 0x8000) & 0xFFFF) >> (16 - bits)


class TruncatingBuffer(Plain):
    """Candidates of the coarse bin that holds rank k go into a buffer; what does not fit is dropped."""

    keys, capacity = (8,), 4096

    def eligible(self, scores, inside):
        eligible = super().eligible(scores, inside)
        for row in range(scores.shape[0]):
            for bits in self.keys if scores.shape[1] else ():
                key = coarse_key(scores[row], bits).masked_fill(~eligible[row], -1)
                boundary = key.sort(descending=True).values[min(self.k, key.numel()) - 1]
                among = (key == boundary).nonzero()[:, 0]
                if among.numel() <= self.capacity:
                    break
                if bits == self.keys[-1]:
                    eligible[row, among[self.capacity :]] = False
        return eligible

    def __call__(self, scores, k, **options):
        broken = type(self)()
        broken.k = k
        return super(TruncatingBuffer, broken).__call__(scores, k, **options)


class CoarseRetry(TruncatingBuffer):
    """On overflow it tries again, with a key that is hardly finer."""

    keys, capacity = (8, 10), 2048


class AbsoluteColumns(Plain):
    def express(self, columns, lower, index_base):
        return columns


class UnwrittenTail(Plain):
    def write(self, out, result):
        part = out[: result.shape[0]]
        part.copy_(torch.where(result == -1, part, result) if result.dtype == torch.int32 else result)


class IgnoredEnd(Plain):
    def window(self, scores, start, end):
        return super().window(scores, start, None)


class IgnoredStart(Plain):
    def window(self, scores, start, end):
        return super().window(scores, None, end)


class NaNFirst(Plain):
    def eligible(self, scores, inside):
        return inside & ~(scores == -torch.inf)


class MinusInfinitySelected(Plain):
    def eligible(self, scores, inside):
        return inside & ~scores.isnan()


class TiesByArrival(Plain):
    """Among equals the one that is met first, from the row's end."""

    def rank(self, scores, eligible):
        return scores.shape[1] - 1 - super().rank(scores.flip(1), eligible.flip(1))


class ZerosToldApart(Plain):
    def rank(self, scores, eligible):
        negative = (scores == 0) & scores.signbit()
        return super().rank(scores.double().masked_fill(negative, -1e-60), eligible)


class OneRowTooMany(Plain):
    def write(self, out, result):
        super().write(out, result)
        out[result.shape[0] :].zero_()


class StrideTakenAsK(Plain):
    def write(self, out, result):
        tight = (result.shape[1], 1) if result.ndim == 2 else (1,)
        out.as_strided(result.shape, tight, out.storage_offset()).copy_(result)


class PaddingOutranks(Plain):
    """Lanes up to a multiple of 64 past the window hold the lowest float, and may be selected."""

    def best(self, scores, k, eligible, upper):
        column = torch.arange(scores.shape[1] + 64)
        lanes = (column >= upper[:, None]) & (column < (upper[:, None] + 63) // 64 * 64)
        scores = torch.nn.functional.pad(scores, (0, 64)).masked_fill(lanes, torch.finfo(scores.dtype).min)
        return super().best(scores, k, torch.nn.functional.pad(eligible, (0, 64)) | lanes, upper)


class ValuesAsFloat32(Plain):
    def __call__(self, scores, k, **options):
        results = super().__call__(scores, k, **options)
        if options.get("return_values") and "out" not in options:
            return (results[0], results[1].float(), *results[2:])
        return results


class Duplicates(Plain):
    def best(self, scores, k, eligible, upper):
        columns, values, counts = super().best(scores, k, eligible, upper)
        last = (counts - 1).clamp(min=0)[:, None]
        return columns.scatter(1, last, columns[:, :1]), values, counts


class Nondeterministic(Plain):
    """The right set in the order of arrival."""

    def __init__(self):
        self.calls = 0

    def best(self, scores, k, eligible, upper):
        columns, values, counts = super().best(scores, k, eligible, upper)
        self.calls += 1
        arrival = torch.arange(k).expand(columns.shape[0], k).clone()
        if self.calls % 2:
            arrival = torch.where(arrival < counts[:, None], counts[:, None] - 1 - arrival, arrival)
        return columns.gather(1, arrival), values.gather(1, arrival), counts


class SortedIgnored(Plain):
    def __call__(self, scores, k, **options):
        return super().__call__(scores, k, **{**options, "sorted": False})


class CountsOfWindow(Plain):
    def best(self, scores, k, eligible, upper):
        columns, values, _ = super().best(scores, k, eligible, upper)
        return columns, values, upper.clamp(max=k)


class RowStrideTakenAsWidth(Plain):
    def read(self, scores):
        return scores.as_strided(scores.shape, (scores.shape[1], 1), scores.storage_offset())

    def eligible(self, scores, inside):
        return super().eligible(self.read(scores), inside)


class InputCleaned(Plain):
    def read(self, scores):
        return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


class WorkspaceOverrun(Plain):
    def scratch(self, workspace):
        if workspace is not None:
            workspace.as_strided((workspace.numel() + 1,), (1,), workspace.storage_offset()).fill_(1)


class AloneIsShorter(Plain):
    """One row by itself takes another path, which forgets the last column."""

    def eligible(self, scores, inside):
        eligible = super().eligible(scores, inside)
        if scores.shape[0] == 1 and scores.shape[1] > 1:
            eligible[:, -1] = False
        return eligible


class NothingShort(Plain):
    """No rows, or fewer columns than k, are none of its business."""

    def __call__(self, scores, k, **options):
        if not scores.shape[0] or k > scores.shape[1]:
            raise RuntimeError("selected index k out of range")
        return super().__call__(scores, k, **options)


class Int64Indices(Plain):
    def __call__(self, scores, k, **options):
        results = super().__call__(scores, k, **options)
        if "out" in options:
            return results
        return (results[0].long(), *results[1:]) if isinstance(results, tuple) else results.long()


def decode_off_by_one(scores, k, seq_lens, next_n, out=None):
    """The row's own token is not counted."""
    ends = seq_lens.flatten().long() if seq_lens.ndim == 2 else None
    if ends is None:
        token = torch.arange(scores.shape[0])
        ends = seq_lens.long().clamp(0, scores.shape[1] + next_n)[token // next_n] - next_n + token % next_n
    return Plain()(scores, k, end=ends, **({} if out is None else {"out": out}))


def pages_of_row(scores, k, *, page_rows=None, page_table=None, **options):
    """`page_rows` is not read: row r takes table row r."""
    from keysift import select

    if page_rows is not None:
        page_rows = torch.arange(scores.shape[0], dtype=page_rows.dtype) % page_table.shape[0]
    return select(scores, k, page_table=page_table, page_rows=page_rows, kernel="reference", **options)
