"""`check_select`: any selector against every line of the contract."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import calls, checks, inputs, lines
from .cases import Case, cases
from .fuzz import random_cases
from .lines import ALONE, INPUTS, LINES, OUTPUT, REFUSED, REPEAT, WORKSPACE, Finding
from .refusals import refusals
from .report import Line, Report
from .selectors import FEATURES, Selector, claims

#: Features without which a case is still worth asking, and what is asked instead.
_PLAINER: dict[str, dict[str, object]] = {
    "out": {"out": "none"},
    "workspace": {"workspace": False},
    "values": {"values": False},
    "counts": {"counts": False},
    "sorted": {"sorted": False},
    "prefill": {"prefill": False},
}


def check_select(
    fn: Callable[..., Any],
    *,
    decode: Callable[..., Any] | None = None,
    workspace_size: Callable[[torch.Tensor, int], int] | None = None,
    features: Iterable[str] = FEATURES,
    accepts: Callable[[Case], bool] = lambda _: True,
    device: torch.device | str = "cpu",
    tier: str = "cpu",
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Judge a selector by CONTRACT.md, select 1-9, and report line by line.

    fn              takes what `keysift.select` takes; options that are the default are not passed. A `Selector`
                    brings its decode and prefill forms, its workspace size and what it cannot run
    decode          `decode(scores, k, seq_lens, next_n, out)`, as `keysift.select_decode`
    workspace_size  bytes of `workspace=` that a call needs, as `keysift.select_workspace_size`
    features        what the selector claims to do (default: all of `FEATURES`); what it does not claim is not asked,
                    and a line that nothing was asked about is reported as not claimed
    accepts         a narrower claim: a case for which it is False is not asked
    device, tier    where the calls run, and up to which size: "tiny", "cpu", "gpu"
    seed            of the data and of the random cases
    progress        called as `progress(done, total, case)` after every case

    Every output is poisoned and lies inside canaries, everything outside a window is junk, each call runs twice before
    the right answer is computed, and two rows of it run alone. Raises ValueError for an unknown feature or tier.

    >>> report = check_select(lambda scores, k: scores.topk(k).indices, features=(), accepts=lambda case: False)
    >>> report.ok, len(report.not_claimed) == len(report.lines)
    (False, True)
    """
    features = frozenset(features)
    if unknown := features - FEATURES:
        raise ValueError(f"features holds {sorted(unknown)}; it may hold {', '.join(sorted(FEATURES))}")
    if not isinstance(fn, Selector):
        fn = Selector(getattr(fn, "__name__", type(fn).__name__), fn)
    target = dataclasses.replace(fn, decode=decode or fn.decode, workspace_size=workspace_size or fn.workspace_size)
    for feature, given in (
        ("decode", target.decode),
        ("prefill", target.prefill),
        ("workspace", target.workspace_size),
    ):
        features -= frozenset() if given else {feature}
    asked: dict[str, Case] = {}
    for full in (*cases(tier), *random_cases(seed, tier)):
        case = claimed(full, features)
        if not claims(case) - features and accepts(case):
            asked[str(case)] = case
    refused = refusals(torch.device(device), target, features) if "refusals" in features else []
    report = Report(target.name, seed, f"tier {tier}", {name: Line(name) for name in LINES})
    total = len(asked) + len(refused)
    for done, case in enumerate(asked.values(), start=1):
        _Judgement(target, case, torch.device(device), seed).enter(report)
        if progress:
            progress(done, total, str(case))
    line = report.lines[REFUSED]
    for done, refusal in enumerate(refused, start=len(asked) + 1):
        line.count(refusal.judge(), refusal.name)
        if progress:
            progress(done, total, refusal.name)
    return report


def claimed(case: Case, features: frozenset[str]) -> Case:
    """The case without the options that are not claimed, where it still says something."""
    for feature, plainer in _PLAINER.items():
        if feature not in features:
            case = dataclasses.replace(case, **plainer)  # type: ignore[arg-type]
    return case


@dataclass(slots=True)
class _Judgement:
    """One case against one selector."""

    target: Selector
    case: Case
    device: torch.device
    seed: int

    def enter(self, report: Report) -> None:
        """Run the case and count it in every line that it shows."""
        call = calls.build(self.case, self.device, self.seed)
        unmet = self.target.unmet(call.scores, self.case.k) if self.target.unmet else []
        where = f"seed {self.seed}, {self.case}"
        if unmet:
            report.declined += 1
            report.lines[REFUSED].count(self.refuses(call, unmet), where)
            return
        found = dict(self.findings(call))
        for name in lines.lines_of(self.case):
            line = report.lines[name]
            if not found:
                line.passed += 1
            elif name not in found:
                line.undecided += 1
        for name, message in found.items():
            report.lines[name].count(message, where)

    def findings(self, call: calls.Call) -> list[Finding]:
        """What the case breaks; nothing if all is well."""
        before = calls.fingerprint(call.inputs())
        try:
            first, results = self.run(call, 0x7F)
            again, repeated = self.run(call, 0xC3)
        except Exception as error:  # noqa: BLE001 - whatever a selector raises is a finding about it
            if self.case.layout.transposed and isinstance(error, ValueError | TypeError):
                return []
            return [(next(lines.lines_of(self.case)), f"raised {type(error).__name__}: {error}")]
        found: list[Finding] = []
        if not torch.equal(before, calls.fingerprint(call.inputs())):
            found.append((INPUTS, "an input was changed"))
            call = calls.build(self.case, self.device, self.seed)
        if first is None:
            found += checks.check_form(call, results)
            if found:
                return found
        given = list(results) if isinstance(results, tuple) else [results]
        second = list(repeated) if isinstance(repeated, tuple) else [repeated]
        if any(not _same_bits(one, other) for one, other in zip(given, second, strict=True)):
            found.append((REPEAT, "a second run gives other bits"))
        for outputs in (first, again):
            if outputs is not None and (message := outputs.workspace_trespass()):
                found.append((WORKSPACE, message))
            if outputs is not None and (message := outputs.trespass()):
                found.append((OUTPUT, message))
                return found  # who writes elsewhere has not written here
        found += checks.check(call, given, poisoned=first is not None)
        return found or (self.alone(call, given) if self.case.rows > 1 else [])

    def run(self, call: calls.Call, fill: int) -> tuple[calls.Outputs | None, Any]:
        """One call into fresh poisoned outputs: the outputs (None where the call allocates) and the results."""
        case = call.case
        size = None
        if case.workspace and self.target.workspace_size:
            size = self.target.workspace_size(call.scores, case.k)
        outputs = calls.Outputs(case, self.device, size, fill)
        returned = invoke(self.target, call, outputs, with_out=case.out != "none")
        if case.out == "none":
            return None, returned
        return outputs, tuple(outputs.results())

    def alone(self, call: calls.Call, given: list[torch.Tensor]) -> list[Finding]:
        """The middle and the last row by themselves."""
        for row in sorted({self.case.rows // 2, self.case.rows - 1}):
            try:
                _, results = self.run(call.row(row), 0x7F)
            except Exception as error:  # noqa: BLE001 - as above
                return [(ALONE, f"row {row} alone raised {type(error).__name__}: {error}")]
            indices = results[0] if isinstance(results, tuple) else results
            if not torch.equal(indices[0].sort().values, given[0][row].sort().values):
                return [(ALONE, f"row {row} alone gives another set than among {self.case.rows} rows")]
        return []

    def refuses(self, call: calls.Call, unmet: list[str]) -> str:
        """What is wrong with how an undoable call is refused; empty if nothing."""
        outputs = calls.Outputs(self.case, self.device)
        try:
            invoke(self.target, call, outputs, with_out=True)
        except ValueError as error:
            missing = [reason for reason in unmet if reason not in str(error)]
            return f"the refusal does not say {missing[0]!r}: {error}" if missing else outputs.untouched()
        return f"not refused, though {'; '.join(unmet)}"


def invoke(target: Selector, call: calls.Call, outputs: calls.Outputs, with_out: bool) -> Any:
    """The call in the form that its case asks for."""
    case = call.case
    more: dict[str, Any] = {} if outputs.workspace is None else {"workspace": outputs.workspace}
    if case.seq_lens is not None and target.decode:
        return target.decode(
            call.scores, case.k, call.seq_lens, case.next_n, outputs.argument if with_out else None, **more
        )
    if case.prefill and target.prefill:
        return target.prefill(call.scores, case.k, call.start, call.end, outputs.argument if with_out else None, **more)
    if with_out:
        more["out"] = outputs.argument
    return target.select(call.scores, case.k, **call.options(), **more)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((_bits(one) == _bits(other)).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(inputs.INTEGER.get(tensor.dtype, tensor.dtype))
