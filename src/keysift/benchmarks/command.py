"""The commands of `keysift bench`: from their options to a table, a record and an exit code."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keysift import dispatch
from keysift.benchmarks import bench_index as indexing
from keysift.benchmarks import bench_score as scoring
from keysift.benchmarks import bench_select as bench
from keysift.benchmarks import bench_sparse_mla as attending
from keysift.benchmarks import bench_tpot as tpot
from keysift.benchmarks import record as records
from keysift.benchmarks.cases import Case, case_set
from keysift.benchmarks.report import index_table, score_table, sparse_mla_table, step_table, table
from keysift.benchmarks.stack import MODELS
from keysift.ops.score.api import KERNELS as SCORE_KERNELS
from keysift.ops.select.api import KERNELS, Problem
from keysift.ops.sparse_mla.api import KERNELS as SPARSE_MLA_KERNELS

#: What `--against` allows by default: repeats differ by 1.5 % on a GPU (95th percentile); a shared CPU is noisier.
MARGINS = {"cpu": 0.5, "cuda": 0.1}

Shape = tuple[int | None, int | None, int, str, str, str]


def bench_select(
    shape: Shape,
    kernels: tuple[str, ...],
    set_name: str,
    mode: str,
    device_name: str | None,
    seconds: float,
    json: pathlib.Path | None,
    against: pathlib.Path | None,
    margin: float | None,
    commit: str | None,
) -> None:
    """Exits 1 where a kernel of ours gave a wrong result, or lost against the record; 2 for options that do not fit."""
    _check_writable(json)
    if margin is not None and (margin < 0 or against is None):
        raise typer.BadParameter(f"--margin is {margin}; it may be 0 or more, and goes with --against")
    if shape[0] is not None and set_name != "default":
        raise typer.BadParameter("--rows and --columns name one case, --set many; leave one of them out")
    device = _device("cpu" if set_name == "cpu" else device_name)
    for name in kernels:
        _one_of("--kernel", name, [kernel.name for kernel in KERNELS])
        _check_runs("--kernel", name, device, shape[2])
    if against is not None and kernels:
        raise typer.BadParameter("--against compares the kernel that is chosen; leave --kernel out")
    then = None if against is None else _read(against)
    cases = _cases(shape, set_name, device, then)
    if then is not None and not {case.name for case in cases} & set(then["cases"]):
        raise typer.BadParameter(f"--against: {against} has none of the {len(cases)} cases, {cases[0].name} first")

    record = records.new(device, mode, commit)
    console = _console()
    with _cases_done(record, [case.name for case in cases], json, console) as done:
        bench.run(cases, device, mode=mode, kernels=kernels, seconds=seconds, done=done)
    console.print(table(record))
    faults = _faults(record, json, console)
    lost = (
        _lost(record, then, margin if margin is not None else MARGINS[device.type], console) if then is not None else []
    )
    if faults or lost:
        raise typer.Exit(1)


def _lost(now: records.Record, then: records.Record, margin: float, console: Console) -> list[str]:
    try:
        lost = records.losses(now, then, margin)
    except ValueError as error:
        raise typer.BadParameter(f"--against: {error}") from error
    if now["device"] != then["device"]:
        console.print(f"the record is from {then['device']}; times are compared over each machine's own read floor")
    for loss in lost:
        console.print(f"[red]lost[/] {loss}", highlight=False)
    common = sum(name in now["cases"] for name in then["cases"])
    console.print(
        f"against the record: {common} of its {len(then['cases'])} cases, margin {margin:.0%}: {len(lost)} lost"
    )
    return lost


def _cases(shape: Shape, set_name: str, device: torch.device, then: records.Record | None) -> list[Case]:
    rows, columns, k, data, dtype, phase = shape
    if (rows is None) != (columns is None):
        raise typer.BadParameter("--rows and --columns go together")
    if rows is not None and columns is not None:
        if min(rows, columns, k) < 1:
            raise typer.BadParameter(f"--rows, --columns, --k are {rows}, {columns}, {k}; each must be at least 1")
        return [Case(phase, rows, columns, k, data, dtype)]
    if then is not None and set_name == "default":
        names = [field.name for field in fields(Case)]
        return [Case(**{name: entry[name] for name in names}) for entry in then["cases"].values()]
    return case_set(set_name, device)


def bench_score(
    shape: tuple[str, int | None, int | None, int, str],
    kernels: tuple[str, ...],
    device_name: str | None,
    seconds: float,
    json: pathlib.Path | None,
    commit: str | None,
) -> None:
    """Exits 1 where a kernel of ours gave a wrong result; 2 for options that do not fit."""
    _check_writable(json)
    device = _device(device_name)
    for name in kernels:
        _one_of("--kernel", name, [kernel.name for kernel in SCORE_KERNELS])
    phase, rows, columns, heads, dtype = shape
    cases = scoring.case_set(device)
    if rows is not None or columns is not None:
        if rows is None or columns is None:
            raise typer.BadParameter("--rows and --columns go together")
        if min(rows, columns) < 1 or (phase == "prefill" and rows > columns):
            raise typer.BadParameter("--rows and --columns must be at least 1; a prefill has no more rows than keys")
        cases = [scoring.Case(phase, rows, columns, heads, dtype=dtype)]
    record = records.new(device, "cold", commit, "score")
    _time(record, cases, functools.partial(scoring.run, kernels=kernels, seconds=seconds), device, score_table, json)


def bench_sparse_mla(
    shape: tuple[str, int | None, int | None, int, int, str],
    kernels: tuple[str, ...],
    device_name: str | None,
    seconds: float,
    json: pathlib.Path | None,
    commit: str | None,
) -> None:
    """Exits 1 where a kernel of ours gave a wrong result; 2 for options that do not fit."""
    _check_writable(json)
    device = _device(device_name)
    for name in kernels:
        _one_of("--kernel", name, [kernel.name for kernel in SPARSE_MLA_KERNELS])
    phase, rows, columns, heads, k, dtype = shape
    cases = attending.case_set(device)
    if rows is not None or columns is not None:
        if rows is None or columns is None:
            raise typer.BadParameter("--rows and --columns go together")
        if rows < 1 or k > columns:
            raise typer.BadParameter("--rows must be at least 1, and --columns at least --k, of which all are selected")
        cases = [attending.Case(phase, rows, columns, heads, k, dtype)]
    record, run = records.new(device, "cold", commit, "sparse_mla"), functools.partial(attending.run, kernels=kernels)
    _time(record, cases, functools.partial(run, seconds=seconds), device, sparse_mla_table, json)


def bench_index(
    shape: tuple[str, int | None, int | None, int, int, int, str, int],
    device_name: str | None,
    seconds: float,
    json: pathlib.Path | None,
    commit: str | None,
) -> None:
    """Exits 1 where a selection was wrong; 2 for options that do not fit."""
    _check_writable(json)
    device = _device(device_name)
    phase, rows, columns, k, heads, ratio, dtype, memory_budget = shape
    cases = indexing.case_set(device)
    if rows is not None or columns is not None:
        if rows is None or (phase == "decode") != (columns is not None):
            raise typer.BadParameter("--rows and --columns go together in decode; prefill takes --rows and --ratio")
        keys = rows // ratio if columns is None else columns
        if min(rows, keys) < 1:
            raise typer.BadParameter("--rows and the keys that it leaves must be at least 1")
        own = ratio if phase == "prefill" else 1
        cases = [indexing.Case(phase, rows, keys, k, heads, dtype=dtype, ratio=own, memory_budget=memory_budget)]
    record = records.new(device, "cold", commit, "index")
    _time(record, cases, functools.partial(indexing.run, seconds=seconds), device, index_table, json)


def _time(
    record: records.Record,
    cases: Sequence[Any],
    run: Callable[..., object],
    device: torch.device,
    table_of: Callable[[records.Record], Table],
    json: pathlib.Path | None,
) -> None:
    """Run the cases into the record and print it; exits 1 where a kernel of ours was wrong."""
    console = _console()
    with _cases_done(record, [case.name for case in cases], json, console) as done:
        run(cases, device, done=done)
    console.print(table_of(record))
    if _faults(record, json, console):
        raise typer.Exit(1)


@contextlib.contextmanager
def _cases_done(
    record: records.Record, names: list[str], json: pathlib.Path | None, console: Console
) -> Iterator[Callable[[Any, dict[str, Any]], None]]:
    """A progress bar, and what enters a case into the record and the file."""
    with _progress(console) as progress:
        task = progress.add_task(names[0], total=len(names))

        def done(case: Any, entry: dict[str, Any]) -> None:
            record["cases"][case.name] = entry
            number = len(record["cases"])
            progress.update(task, completed=number, description=names[min(number, len(names) - 1)])
            if json is not None:
                records.write(record, json)

        yield done


def _faults(record: records.Record, json: pathlib.Path | None, console: Console) -> list[str]:
    """What our own kernels did wrong, said below the table, with the machine's load and where the record is."""
    _warn_load(record, console)
    if json is not None:
        console.print(f"record: {json}")
    faults = [f"{name}: {fault}" for name, entry in record["cases"].items() for fault in bench.faults(entry)]
    for fault in faults:
        console.print(f"[red]wrong[/] {fault}", highlight=False)
    return faults


def bench_tpot(
    model: str,
    tensor_parallel: int,
    batch: str,
    context: str,
    layers: int | None,
    select: str,
    device_name: str | None,
    seconds: float,
    json: pathlib.Path | None,
    commit: str | None,
) -> None:
    """Exits 1 where selectors selected differently; 2 for options that do not fit."""
    _check_writable(json)
    device = _device(device_name)
    dims = MODELS[model]
    if dims.heads % tensor_parallel:
        raise typer.BadParameter(f"--tensor-parallel is {tensor_parallel}; it must divide {model}'s {dims.heads} heads")
    names = select.split(",")
    for name in names:
        _one_of("--select", name, ["torch", "auto", *(kernel.name for kernel in KERNELS)])
        _check_runs("--select", name, device, dims.topk)
    batches, contexts = _numbers("--batch", batch), _numbers("--context", context)
    record = records.new(device, "graph" if device.type == "cuda" else "step", commit, "tpot")
    console, total = _console(), len(batches) * len(contexts)
    with _progress(console) as progress:
        task = progress.add_task(f"{model}, {len(names)} selectors", total=total)

        def done(name: str, entry: tpot.Entry) -> None:
            record["cases"][name] = entry
            progress.advance(task)
            if json is not None:
                records.write(record, json)

        tpot.run(model, tensor_parallel, layers, batches, contexts, names, device, seconds, done)
    console.print(step_table(record))
    _warn_load(record, console)
    if json is not None:
        console.print(f"record: {json}")
    if any("fault" in entry for entry in record["cases"].values()):
        raise typer.Exit(1)


def _check_runs(option: str, name: str, device: torch.device, k: int) -> None:
    """A kernel of select by name, on this device at all."""
    problem = Problem(dispatch.device_of(device), torch.float32, 1, 8192, k)
    for kernel in KERNELS:
        if kernel.name == name and (unmet := kernel.unmet(problem)):
            raise typer.BadParameter(f"{option} is {name!r}, which cannot run here: {'; '.join(unmet)}")


def _check_writable(path: pathlib.Path | None) -> None:
    """Before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json is {path}; there is no folder {path.parent}")


def _numbers(option: str, text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise typer.BadParameter(f"{option} is {text!r}; it may be numbers of at least 1 with commas between them")
    return numbers


def _device(name: str | None) -> torch.device:
    if (name or "cuda") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise typer.BadParameter("--device is cuda; torch finds none here")
    return torch.device("cpu")


def _console() -> Console:
    """A table that is written to a file is as wide as it needs to be."""
    return Console() if Console().is_terminal else Console(width=200)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _warn_load(record: records.Record, console: Console) -> None:
    if record["load"] is not None and record["load"] > 0.5:
        console.print(
            f"This machine was busy before (load average {record['load']}): trust no time, and ratios little."
        )


def _read(path: pathlib.Path) -> records.Record:
    try:
        return records.read(path)
    except OSError as error:
        raise typer.BadParameter(f"--against: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(f"--against: {error}") from error


def _one_of(option: str, given: str, accepted: Collection[str]) -> None:
    if given not in accepted:
        raise typer.BadParameter(f"{option} is {given!r}; it may be {', '.join(accepted)}")
