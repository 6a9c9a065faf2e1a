"""Calls that have to be refused before anything is written, and the argument that the refusal has to name."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .calls import Outputs
from .cases import Case
from .selectors import Selector

ROWS, COLUMNS, K = 3, 40, 4


@dataclass(frozen=True, slots=True)
class Refusal:
    """One call that must raise ValueError or TypeError and name `argument`."""

    name: str
    argument: str
    outputs: Outputs
    run: Callable[[], Any]

    def judge(self) -> str:
        """What is wrong with the refusal; empty if nothing."""
        try:
            self.run()
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{self.argument}\b", str(error)):
                return f"{type(error).__name__} does not name {self.argument}: {error}"
            return self.outputs.untouched()
        except Exception as error:  # noqa: BLE001 - whatever else a selector raises is a finding about it
            return f"raised {type(error).__name__}, not ValueError or TypeError: {error}"
        return "accepted"


def refusals(device: torch.device, target: Selector, features: frozenset[str]) -> list[Refusal]:
    """Every refusal that the claimed features allow to ask for."""
    made = [*_select(device, target), *(_decode(device, target.decode) if target.decode else ())]
    return [refusal for needs, refusal in made if needs <= features]


def _select(device: torch.device, target: Selector) -> Iterator[tuple[set[str], Refusal]]:
    scores = torch.randn(ROWS, COLUMNS, device=device)
    elsewhere = torch.device("meta" if device.type == "cpu" else "cpu")

    def ints(*shape: int, dtype: torch.dtype = torch.int32, at: torch.device = device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=at)

    def wrong(
        needs: str,
        argument: str,
        name: str,
        given: object = scores,
        k: object = K,
        out: Callable[..., object] | None = None,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[set[str], Refusal]:
        options = {**more, **(options or {})}
        case = Case(
            ROWS, COLUMNS, K, values=bool(options.get("return_values")), counts=bool(options.get("return_counts"))
        )
        outputs = Outputs(case, device)
        options["out"] = outputs.argument if out is None else out(*outputs.views)
        return {"out", *needs.split()}, Refusal(name, argument, outputs, lambda: target.select(given, k, **options))

    yield wrong("", "scores", "scores of rank 1", scores[0])
    yield wrong("", "scores", "scores of rank 3", scores[None])
    yield wrong("", "scores", "float64 scores", scores.double())
    yield wrong("", "scores", "int32 scores", scores.int())
    yield wrong("", "scores", "scores as a list", scores.tolist())
    yield wrong("", "k", "k of 0", k=0)
    yield wrong("", "k", "negative k", k=-1)
    yield wrong("", "k", "k of 2.0", k=2.0)
    yield wrong("", "k", "k of True", k=True)
    for name in ("start", "end"):
        yield wrong(name, name, f"float {name}", options={name: torch.zeros(ROWS, device=device)})
        yield wrong(name, name, f"int16 {name}", options={name: ints(ROWS, dtype=torch.int16)})
        yield wrong(name, name, f"{name} as an int", options={name: 3})
        yield wrong(name, name, f"{name} of too few rows", options={name: ints(ROWS - 1)})
        yield wrong(name, name, f"{name} of too many rows", options={name: ints(ROWS + 1)})
        yield wrong(name, name, f"{name} of rank 2", options={name: ints(ROWS, 1)})
        yield wrong(name, name, f"{name} elsewhere", options={name: ints(ROWS, at=elsewhere)})
    yield wrong("", "out", "out of too few rows", out=lambda out: out[: ROWS - 1])
    yield wrong("", "out", "out narrower than k", out=lambda out: out[:, : K - 1])
    yield wrong("", "out", "out wider than k", k=K - 1)
    yield wrong("", "out", "out of rank 1", out=lambda out: out[0])
    yield wrong("", "out", "int64 out", out=lambda _: ints(ROWS, K, dtype=torch.int64))
    yield wrong("", "out", "float out", out=lambda _: torch.zeros(ROWS, K, device=device))
    yield wrong("", "out", "out with a column stride", out=lambda _: ints(ROWS, 2 * K)[:, ::2])
    yield wrong("", "out", "out elsewhere", out=lambda _: ints(ROWS, K, at=elsewhere))
    yield wrong("", "out", "out as a list", out=lambda out: [out])
    yield wrong("values", "out", "one out for two results", return_values=True, out=lambda out, _: out)
    yield wrong("values", "out", "two outs for one result", out=lambda out: (out, out))
    yield wrong(
        "values", "out", "values of another dtype", return_values=True, out=lambda out, values: (out, values.half())
    )
    yield wrong(
        "values", "out", "values of too few rows", return_values=True, out=lambda out, values: (out, values[:1])
    )
    yield wrong("counts", "out", "int64 counts", return_counts=True, out=lambda out, counts: (out, counts.long()))
    yield wrong(
        "counts", "out", "counts of too few rows", return_counts=True, out=lambda out, counts: (out, counts[:1])
    )
    yield wrong("column", "index_base", "an unknown index base", index_base="row")
    table = ints(ROWS, 5)
    yield wrong("pages", "page_size", "a page table without page size", page_table=table)
    yield wrong("pages", "page_size", "a page size of 0", page_table=table, page_size=0)
    yield wrong("pages", "page_size", "a page size of 8.0", page_table=table, page_size=8.0)
    yield wrong("pages", "page_size", "a page size without page table", page_size=8)
    yield wrong("pages", "page_table", "a page table of rank 1", page_table=table[0], page_size=8)
    yield wrong("pages", "page_table", "a float page table", page_table=table.float(), page_size=8)
    yield wrong("pages", "page_table", "a page table of too few rows", page_table=table[:2], page_size=8)
    yield wrong("pages", "page_table", "a page table elsewhere", page_table=table.to(elsewhere), page_size=8)
    yield wrong("pages", "page_table", "a page table with a page stride", page_table=ints(ROWS, 6)[:, ::2], page_size=8)
    yield wrong("pages column", "index_base", "columns and pages", page_table=table, page_size=8, index_base="column")
    yield wrong("pages page_rows", "page_rows", "page rows without page table", page_rows=ints(ROWS))
    for name, rows in (("float page rows", torch.zeros(ROWS, device=device)), ("too few page rows", ints(ROWS - 1))):
        yield wrong("pages page_rows", "page_rows", name, page_table=table, page_size=8, page_rows=rows)
    size = target.workspace_size(scores, K) if target.workspace_size else 0
    if size:
        short = torch.zeros(size - 1, dtype=torch.uint8, device=device)
        yield wrong("workspace", "workspace", "a workspace one byte short", workspace=short)
    space = torch.zeros(size, dtype=torch.uint8, device=device)
    yield wrong("workspace", "workspace", "an int32 workspace", workspace=ints(size + 8))
    yield wrong("workspace", "workspace", "a workspace of rank 2", workspace=space[None])
    yield wrong("workspace", "workspace", "a workspace elsewhere", workspace=space.to(elsewhere))
    yield wrong("workspace", "workspace", "a workspace as an int", workspace=size)


def _decode(device: torch.device, decode: Callable[..., Any]) -> Iterator[tuple[set[str], Refusal]]:
    rows = 8
    scores = torch.randn(rows, COLUMNS, device=device)

    def wrong(argument: str, name: str, lens: object, next_n: object = 2) -> tuple[set[str], Refusal]:
        outputs = Outputs(Case(rows, COLUMNS, K), device)
        return {"out", "decode"}, Refusal(
            name, argument, outputs, lambda: decode(scores, K, lens, next_n, outputs.argument)
        )

    lens = torch.full((4,), 30, dtype=torch.int32, device=device)
    yield wrong("seq_lens", "lengths for fewer requests", lens[:3])
    yield wrong("seq_lens", "8 score rows with 6 lengths", torch.full((6,), 30, dtype=torch.int32, device=device), 1)
    yield wrong("seq_lens", "float lengths", lens.float())
    yield wrong("seq_lens", "lengths of rank 0", lens[0])
    yield wrong("seq_lens", "2-D lengths of another width", lens[:, None].expand(4, 3))
    yield wrong("seq_lens", "lengths as a list", lens.tolist())
    yield wrong("next_n", "next_n of 0", lens, 0)
    yield wrong("next_n", "next_n of 2.0", lens, 2.0)
