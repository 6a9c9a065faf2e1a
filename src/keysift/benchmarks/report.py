"""A record as a table."""

from typing import Any

from rich import box
from rich.table import Table

from keysift.benchmarks.record import Record, peers_of


def table(record: Record) -> Table:
    """One line per case and kernel of ours, beside what was timed with it and what is recorded of peers."""
    peers = peers_of(record) if record["mode"] != "producer" else {}
    beside = list(dict.fromkeys(name for entry in record["cases"].values() for name in entry.get("others", {})))
    made = Table(
        title=f"select, {record['mode']}, {record['device']}",
        caption="us: median (p20-p80). x floor: over reading the same scores once. vs: the other's time over ours; "
        "topk is torch.topk, fallback is torch.topk with mask, cast and -1.",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("case", no_wrap=True)
    made.add_column("kernel")
    for heading in ("us", "GB/s", "x floor", *(f"vs {name}" for name in beside)):
        made.add_column(heading, justify="right")
    if peers:
        made.add_column("vs best recorded peer", justify="right")
    suffix = "_warm" if record["mode"] == "warm" else ""
    for name, entry in record["cases"].items():
        if "fault" in entry:
            made.add_row(name, "", f"[red]no time: {entry['fault']}")
        for kernel, found in entry.get("kernels", {}).items():
            if not found["checked"]:
                made.add_row(name, kernel, f"[red]no time: {found['fault']}")
                continue
            cells = [_versus(entry["others"].get(other), found) for other in beside]
            if name in peers:
                us, peer = peers[name][f"best{suffix}_us"], peers[name][f"best{suffix}"]
                cells.append(f"{peer} {us / found['us']:.2f}")
            made.add_row(
                name,
                kernel,
                f"{found['us']:.1f} ({found['p20_us']:.1f}-{found['p80_us']:.1f})",
                f"{found['gbps']:.0f}",
                f"{found['us'] / entry['floor']['us']:.2f}",
                *cells,
            )
    return made


def _versus(other: dict[str, Any] | None, found: dict[str, Any]) -> str:
    if other is None:
        return "-"
    return f"{other['us'] / found['us']:.2f}" if other["checked"] else "fails"
