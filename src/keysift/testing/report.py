"""What a judgement found, line by line of the contract."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(slots=True)
class Line:
    """One line of the contract."""

    name: str
    passed: int = 0
    failed: int = 0
    undecided: int = 0  # cases of this line that failed in another one
    first_failure: str = ""  # seed, case and what was broken

    def count(self, failure: str, where: str) -> None:
        """Enter a case: `failure` says what was broken in it, and is empty if nothing was."""
        if not failure:
            self.passed += 1
            return
        self.failed += 1
        self.first_failure = self.first_failure or f"{where}: {failure}"

    @property
    def verdict(self) -> str:
        """One of "failed", "undecided", "passed"; "not claimed" where no case was run."""
        if self.failed:
            return "failed"
        if self.undecided:
            return "undecided"
        return "passed" if self.passed else "not claimed"


@dataclass(slots=True)
class Report:
    """The judgement of one subject. `str(report)` is a table; rich prints it as one too."""

    subject: str
    seed: int
    scope: str  # "tier cpu", "on cuda:0": how much was tried, or where
    lines: dict[str, Line] = field(default_factory=dict)
    declined: int = 0  # cases that the selector declares it cannot run

    @property
    def ok(self) -> bool:
        """True if something was judged and every line that was is kept."""
        verdicts = {line.verdict for line in self.lines.values()}
        return "passed" in verdicts and not verdicts & {"failed", "undecided"}

    @property
    def failed(self) -> list[str]:
        """The names of the lines that are broken."""
        return [line.name for line in self.lines.values() if line.verdict == "failed"]

    @property
    def not_claimed(self) -> list[str]:
        """The names of the lines that nothing was shown about."""
        return [line.name for line in self.lines.values() if line.verdict == "not claimed"]

    @property
    def title(self) -> str:
        """Who was judged, by what, with which result."""
        cases = "case" if self.declined == 1 else "cases"
        declined = f", {self.declined} {cases} declined, as the kernel's constraints say" if self.declined else ""
        verdict = "keeps the contract" if self.ok else "breaks the contract"
        return f"{self.subject}: {verdict} ({self.scope}, seed {self.seed}{declined})"

    def __str__(self) -> str:
        width = max((len(name) for name in self.lines), default=0)
        shown = [self.title]
        for line in self.lines.values():
            shown.append(f"  {line.name:<{width}}  {_outcome(line)}")
            if line.first_failure:
                shown.append(f"      {line.first_failure}")
        return "\n".join(shown)

    def __rich__(self) -> "Table":
        from rich.table import Table

        table = Table("line of the contract", "outcome", "first failure", title=self.title)
        style = {"failed": "red", "undecided": "yellow", "passed": "green", "not claimed": "dim"}
        for line in self.lines.values():
            outcome = f"[{style[line.verdict]}]{_outcome(line)}[/]"
            table.add_row(line.name, outcome, line.first_failure.replace("[", r"\["))
        return table


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal everywhere, NaN to NaN: what is poisoned or undefined holds NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _outcome(line: Line) -> str:
    judged = line.passed + line.failed + line.undecided
    words = {
        "failed": f"failed {line.failed} of {judged}",
        "undecided": f"undecided: {line.undecided} of {judged} cases failed in another line",
        "passed": f"passed {line.passed}",
        "not claimed": "not claimed",
    }
    return words[line.verdict]
