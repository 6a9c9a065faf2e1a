"""A run as JSON (machine, versions, commit, command, what was found), and two runs compared."""

import datetime as dt
import importlib.metadata
import importlib.resources
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from typing import Any

import torch

import keysift

SCHEMA = 1
PACKAGES = (
    "torch",
    "triton",
    "numba",
    "numpy",
    "cuda-core",
    "flashinfer-python",
    "tokenspeed-deepgemm",
    "sgl-flash-mla",
)
Record = dict[str, Any]


#: What the numbers of a record are, by what was timed.
UNITS = {
    "select": "microseconds of one launch: median, 20th and 80th percentile",
    "score": "microseconds of one launch: median, 20th and 80th percentile",
    "sparse_mla": "microseconds of one launch: median, 20th and 80th percentile",
    "index": "microseconds of one call: median, 20th and 80th percentile; bytes",
    "tpot": "milliseconds of one step of the stack: median, 20th and 80th percentile; stages: median",
}


def new(device: torch.device, mode: str, commit: str | None = None, stage: str = "select") -> Record:
    """A record without cases. `commit` is for a copy of the sources that is no checkout; otherwise git is asked."""
    return {
        "schema": SCHEMA,
        "stage": stage,
        "unit": UNITS[stage],
        "mode": mode,
        "device": _device_name(device),
        "device_type": _device_type(device),
        "driver": _driver(device),
        "versions": _versions(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "load": round(os.getloadavg()[0], 1) if device.type == "cpu" else None,  # of the minute before
        **_commit(commit),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["keysift", *sys.argv[1:]]),
        "cases": {},
    }


def write(record: Record, path: pathlib.Path) -> None:
    """Write `record` to `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def read(path: pathlib.Path, stage: str = "select") -> Record:
    """A record of `write`. Raises ValueError for anything else."""
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or record.get("stage") != stage:
        raise ValueError(f"{path} is no record of `keysift bench {stage}` (schema {SCHEMA})")
    return record


def peers_of(record: Record) -> dict[str, dict[str, Any]]:
    """What peers were recorded to take on that card, by the name of the case; empty for any other."""
    recorded = json.loads(importlib.resources.files(__package__).joinpath("peers_select_h200.json").read_text())
    cases: dict[str, dict[str, Any]] = recorded["cases"]
    return cases if recorded["device"] == record["device"] else {}


def over_floor(entry: dict[str, Any]) -> float | None:
    """The time of the chosen kernel over the read floor of the same run; None where it has no time."""
    chosen = entry.get("kernels", {}).get(entry.get("chosen"), {})
    return chosen["us"] / entry["floor"]["us"] if chosen.get("checked") else None


def losses(now: Record, then: Record, margin: float) -> list[str]:
    """Where the fast path was lost, between two records of one kind of device.

    Of every case in both: the chosen kernel is another (said apart: the reference), it has no time although it had
    one, or its time over the floor grew by more than `margin` (0.1: a tenth). Raises ValueError where the two do not
    compare: other devices, other modes, no case in common.
    """
    for key in ("device_type", "mode"):
        if now[key] != then[key]:
            raise ValueError(f"the record's {key} is {then[key]!r}, this run's is {now[key]!r}")
    common = [name for name in then["cases"] if name in now["cases"]]
    if not common:
        raise ValueError("the record and this run have no case in common")
    found = []
    for name in common:
        new_entry, old_entry = now["cases"][name], then["cases"][name]
        new_ratio, old_ratio = over_floor(new_entry), over_floor(old_entry)
        new_kernel, old_kernel = new_entry.get("chosen"), old_entry.get("chosen")
        if new_kernel != old_kernel:
            fell = ", the fallback" if new_kernel == "reference" else ""
            found.append(f"{name}: kernel {old_kernel!r} was chosen, now {new_kernel!r}{fell}")
        if old_ratio is None:
            continue
        if new_ratio is None:
            found.append(f"{name}: had a time, has none now")
        elif new_ratio > old_ratio * (1 + margin):
            grown = new_ratio / old_ratio - 1
            found.append(f"{name}: {new_ratio:.2f}x the read floor, was {old_ratio:.2f}x ({grown:+.0%})")
    return found


def _device_type(device: torch.device) -> str:
    if device.type == "cuda" and torch.version.hip:
        return "hip"
    return device.type


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {len(models) or '?'} cores"


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "keysift": keysift.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit(commit: str | None) -> dict[str, Any]:
    """The commit of the sources, and whether they differ from it; None where that is not known."""
    if commit is not None:
        return {"commit": commit, "dirty": None}
    here = pathlib.Path(__file__).parent
    head = _git(here, "rev-parse", "HEAD")
    if head is None or _git(here, "ls-files", "--error-unmatch", __file__) is None:
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": _git(here.parent, "status", "--porcelain", ".") != ""}


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
