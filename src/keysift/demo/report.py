"""What the demo shows and writes: the table, the figure, the record."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import keysift

from .measure import STAGES, Memory, Run
from .model import VARIANTS, WORDS


def show(console: Console, runs: dict[str, Run]) -> None:
    """The table: a column per variant."""
    table = Table("", *runs)
    for column in table.columns[1:]:
        column.justify = "right"
    stock = runs["stock"].time_per_token
    table.add_row("time per output token", *(_milliseconds(run.time_per_token) for run in runs.values()), style="bold")
    table.add_row("  stock takes", *(f"{stock / run.time_per_token:.1f} x" for run in runs.values()), end_section=True)
    for stage in STAGES:
        table.add_row(f"  {stage}", *(_milliseconds(run.stage_s[stage]) for run in runs.values()))
    table.add_section()
    table.add_row("prefill", *(f"{run.prefill_s:.1f} s" for run in runs.values()))
    table.add_row("peak memory, prefill", *(_mebibytes(run.prefill_bytes) for run in runs.values()))
    table.add_row("peak memory, decode", *(_mebibytes(run.decode_bytes) for run in runs.values()))
    console.print(table)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mebibytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**20:.0f} MiB"


def draw(path: Path, runs: dict[str, Run], caption: str) -> None:
    """A figure: time per token in all and by stage, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    labels = ("time per token", *STAGES)
    for number, (name, colour) in enumerate(zip(VARIANTS, ("#9a9a9a", "#e0a33a", "#2a6fb0"), strict=True)):
        run = runs[name]
        milliseconds = [1e3 * seconds for seconds in (run.time_per_token, *(run.stage_s[stage] for stage in STAGES))]
        places = [place + 0.27 * (number - 1) for place in range(len(labels))]
        bars = axes.bar(places, milliseconds, width=0.26, color=colour, label=name)
        axes.bar_label(bars, [f"{value:.3g}" for value in milliseconds], fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("milliseconds per output token")
    axes.set_title(caption, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def describe(device: torch.device) -> str:
    """The processor's or the GPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def commit() -> str | None:
    """The commit of the source tree that this runs from, with "+" if it has changes; None outside a checkout."""
    here = Path(__file__).parent
    asked = ("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")
    try:
        head, changes = (
            subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changes)


def record(
    model: Any, device: torch.device, memory: Memory, runs: dict[str, Run], conditions: dict[str, Any]
) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat the figures, as JSON."""
    return {
        "what": "keysift demo",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["keysift", *sys.argv[1:]]),
        "device": describe(device),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), "keysift": keysift.__version__}
        | {name: metadata.version(name) for name in ("torch", "transformers", "numba")},
        "configuration": {name: getattr(model.config, name) for names in WORDS.values() for name in names},
        **conditions,
        "memory": memory.how,
        "runs": {
            name: {
                "time_per_token_s": run.time_per_token,
                "token_s": run.token_s,
                "prefill_s": run.prefill_s,
                "prefill_peak_bytes": run.prefill_bytes,
                "decode_peak_bytes": run.decode_bytes,
                "stage_s": run.stage_s,
                "profiled_token_s": run.profiled_token_s,
                "stock_over_this": runs["stock"].time_per_token / run.time_per_token,
                "tokens": run.tokens,
                **({"fp8_overlap": run.fp8_overlap} if run.fp8_overlap else {}),
            }
            for name, run in runs.items()
        },
    }
