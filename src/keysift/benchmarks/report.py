"""A record as a table."""

from typing import Any

from rich import box
from rich.table import Table

from keysift.benchmarks.bench_score import DEEP_GEMM_H200
from keysift.benchmarks.bench_sparse_mla import FLASH_MLA_H200
from keysift.benchmarks.record import Record, peers_of


def table(record: Record) -> Table:
    """One line per case and kernel of ours, beside what was timed with it and what is recorded of peers."""
    peers = peers_of(record) if record["mode"] != "producer" else {}
    beside = list(dict.fromkeys(name for entry in record["cases"].values() for name in entry.get("others", {})))
    made = _table(
        f"select, {record['mode']}, {record['device']}",
        "us: median (p20-p80). x floor: over reading the same scores once. vs: the other's time over ours; "
        "topk is torch.topk, fallback is torch.topk with mask, cast and -1.",
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


def score_table(record: Record) -> Table:
    """One line per case and kernel of score, ours and others', beside the read floor and DeepGEMM's recorded time."""
    caption = "us: median (p20-p80). x floor: over reading the keys once. deep_gemm: its recorded time over this one."
    return _rates(record, caption, "deep_gemm", DEEP_GEMM_H200)


def sparse_mla_table(record: Record) -> Table:
    """One line per case and kernel of sparse_mla, ours and FlashMLA's own call, beside what is recorded of that."""
    caption = "us: median (p20-p80). GB/s: each selected latent once. flash_mla: its recorded time over this one."
    return _rates(record, caption, "flash_mla", FLASH_MLA_H200)


def _rates(record: Record, caption: str, peer: str, recorded_h200: dict[str, float]) -> Table:
    made = _table(f"{record['stage']}, {record['mode']}, {record['device']}", caption)
    for heading in ("case", "kernel"):
        made.add_column(heading, no_wrap=True)
    has_floor = any("floor" in entry for entry in record["cases"].values())
    for heading in ("us", "GB/s", "TFLOP/s", *(["x floor"] if has_floor else []), peer):
        made.add_column(heading, justify="right")
    recorded = recorded_h200 if record["device"] == "NVIDIA H200" else {}
    for name, entry in record["cases"].items():
        if "fault" in entry:
            made.add_row(name, "", f"[red]no time: {entry['fault']}")
        for kernel, found in {**entry.get("kernels", {}), **entry.get("others", {})}.items():
            if not found["checked"]:
                made.add_row(name, kernel, f"[red]no time: {found['fault']}")
                continue
            floor = entry.get("floor")
            made.add_row(
                name,
                kernel,
                f"{found['us']:.1f} ({found['p20_us']:.1f}-{found['p80_us']:.1f})",
                f"{found['gbps']:.0f}",
                f"{found['tflops']:.2f}",
                *([f"{found['us'] / floor['us']:.2f}" if floor else "-"] if has_floor else []),
                f"{recorded[name] / found['us']:.2f}" if name in recorded else "-",
            )
    return made


def index_table(record: Record) -> Table:
    """One line per case: the whole, its stages alone where they were timed, its memory, and StreamIndex's time."""
    made = _table(
        f"index, {record['device']}",
        "ms: median (p20-p80) of a call. score, select: alone, in the same run. GB: what the call holds beside "
        "its arguments and result. StreamIndex: its published time over ours.",
    )
    made.add_column("case", no_wrap=True)
    for heading in ("ms", "score", "select", "GB", "StreamIndex"):
        made.add_column(heading, justify="right")
    for name, entry in record["cases"].items():
        if "fault" in entry:
            made.add_row(name, f"[red]no time: {entry['fault']}")
            continue
        found, stages, other = entry["index"], entry.get("stages", {}), entry.get("stream_index_h200")
        compared = other is not None and record["device"] == "NVIDIA H200"
        held = f"{(entry['peak_bytes'] - entry['arguments_bytes']) / 1e9:.3f}" if "peak_bytes" in entry else "-"
        made.add_row(
            name,
            f"{found['us'] / 1e3:.3f} ({found['p20_us'] / 1e3:.3f}-{found['p80_us'] / 1e3:.3f})",
            *(f"{stages[stage]['us'] / 1e3:.3f}" if stage in stages else "-" for stage in ("score", "select")),
            held,
            f"{other['us'] / found['us']:.2f}" if compared else "-",
        )
    return made


def step_table(record: Record) -> Table:
    """One line per batch, context and selector: the step, its stages, and what the first selector takes over it."""
    stages = list(
        dict.fromkeys(s for e in record["cases"].values() for t in _times(e).values() for s in t["stages_ms"])
    )
    made = _table(
        f"time per output token, ms, {record['device']}",
        "step: median (p20-p80) of a token in every request. x: what the first selector takes over this one.",
    )
    for heading in ("case", "selector"):
        made.add_column(heading, no_wrap=True)
    for heading in ("step", "x", *stages):
        made.add_column(heading, justify="right")
    for name, entry in record["cases"].items():
        if "fault" in entry:
            made.add_row(name, "", f"[red]no time: {entry['fault']}")
        first = next(iter(_times(entry).values()), None)
        for selector, found in _times(entry).items():
            label = selector if selector in ("torch", found["kernel"]) else f"{selector} ({found['kernel']})"
            made.add_row(
                name,
                label,
                f"{found['ms']:.2f} ({found['p20_ms']:.2f}-{found['p80_ms']:.2f})",
                f"{first['ms'] / found['ms']:.2f}" if first else "-",
                *(f"{found['stages_ms'][stage]:.2f}" for stage in stages),
            )
    return made


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")


def _times(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    times: dict[str, dict[str, Any]] = entry.get("selectors", {})
    return times


def _versus(other: dict[str, Any] | None, found: dict[str, Any]) -> str:
    if other is None:
        return "-"
    return f"{other['us'] / found['us']:.2f}" if other["checked"] else "fails"
