"""`keysift bench`: times on this machine, each of a result that was checked in the same run."""

import pathlib
from typing import Annotated

import typer

app = typer.Typer(help="Time keysift on this machine; a result that is not right gets no time.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Keep `select` a command of its own."""


@app.command()
def select(
    rows: Annotated[int | None, typer.Option(help="Score rows; with --columns: one case instead of a set.")] = None,
    columns: Annotated[int | None, typer.Option(help="Columns of the scores.")] = None,
    k: Annotated[int, typer.Option(help="Keys selected per row.")] = 2048,
    data: Annotated[str, typer.Option(help="normal, relu, equal, narrow, sorted, heavy or nan1.")] = "normal",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    phase: Annotated[str, typer.Option(help="decode: whole rows; prefill: causal windows.")] = "decode",
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel by name; may be repeated. Default: the chosen one.")
    ] = None,
    cases: Annotated[
        str, typer.Option("--set", help="default, all (118 cases with recorded peers), goals or cpu.")
    ] = "default",
    mode: Annotated[str, typer.Option(help="cold: inputs rotate; warm: one input; producer: after a copy.")] = "cold",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(help="Measuring time per case, about.")] = 1.5,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the record here, case by case.")] = None,
    against: Annotated[
        pathlib.Path | None, typer.Option(help="Exit 1 where this run lost against that record; runs its cases.")
    ] = None,
    margin: Annotated[float | None, typer.Option(help="What --against lets the time over the floor grow by.")] = None,
    commit: Annotated[str | None, typer.Option(help="The sources' commit, where they are no checkout.")] = None,
) -> None:
    """Time select, checked, beside the read floor, torch.topk and what is recorded of peers."""
    from keysift.benchmarks.command import bench_select

    shape = (rows, columns, k, data, dtype, phase)
    bench_select(shape, tuple(kernel or ()), cases, mode, device, seconds, json, against, margin, commit)
