"""`keysift bench`: times on this machine, each of a result that was checked in the same run."""

import pathlib
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Time keysift on this machine; a result that is not right gets no time.",
    no_args_is_help=True,
    add_completion=False,
)

Data = Literal["normal", "relu", "equal", "narrow", "sorted", "heavy", "nan1"]


@app.command()
def select(
    rows: Annotated[int | None, typer.Option(help="Score rows; with --columns: one case instead of a set.")] = None,
    columns: Annotated[int | None, typer.Option(help="Columns of the scores.")] = None,
    k: Annotated[int, typer.Option(help="Keys selected per row.")] = 2048,
    data: Annotated[Data, typer.Option(help="What the scores are like.")] = "normal",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the scores.")] = "float32",
    phase: Annotated[
        Literal["decode", "prefill"], typer.Option(help="decode: whole rows; prefill: causal windows.")
    ] = "decode",
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel by name; may be repeated. Default: the chosen one.")
    ] = None,
    cases: Annotated[
        Literal["default", "all", "goals", "cpu"],
        typer.Option("--set", help="Which cases; all: the 118 with recorded peers."),
    ] = "default",
    mode: Annotated[
        Literal["cold", "warm", "producer"],
        typer.Option(help="cold: inputs rotate; warm: one input; producer: after a copy."),
    ] = "cold",
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time per case, about.")] = 1.5,
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


@app.command()
def score(
    phase: Annotated[
        Literal["decode", "prefill"], typer.Option(help="decode: paged, whole rows; prefill: causal windows.")
    ] = "decode",
    rows: Annotated[int | None, typer.Option(help="Requests or query tokens; with --columns: one case.")] = None,
    columns: Annotated[int | None, typer.Option(help="Keys, of each request in decode.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Index heads.")] = 64,
    dtype: Annotated[
        Literal["e4m3fn", "e4m3fnuz", "bfloat16", "float16", "float32"], typer.Option(help="Of queries and keys.")
    ] = "bfloat16",
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel by name; may be repeated. Default: the chosen one.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time per case, about.")] = 1.5,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the record here, case by case.")] = None,
    commit: Annotated[str | None, typer.Option(help="The sources' commit, where they are no checkout.")] = None,
) -> None:
    """Time the index logits, checked, beside the read floor and DeepGEMM where it is installed."""
    from keysift.benchmarks.command import bench_score

    bench_score((phase, rows, columns, heads, dtype), tuple(kernel or ()), device, seconds, json, commit)


@app.command("sparse_mla")
def sparse_mla(
    phase: Annotated[
        Literal["decode", "prefill"], typer.Option(help="decode: a cache per request; prefill: one for all tokens.")
    ] = "decode",
    rows: Annotated[int | None, typer.Option(help="Requests or query tokens; with --columns: one case.")] = None,
    columns: Annotated[int | None, typer.Option(help="Cached tokens, of each request in decode.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 128,
    k: Annotated[int, typer.Option(min=1, help="Latents selected per token.")] = 2048,
    dtype: Annotated[
        Literal["e4m3fn", "bfloat16", "float16", "float32"], typer.Option(help="Of the latents.")
    ] = "bfloat16",
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel by name; may be repeated. Default: the chosen ones.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time per case, about.")] = 1.5,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the record here, case by case.")] = None,
    commit: Annotated[str | None, typer.Option(help="The sources' commit, where they are no checkout.")] = None,
) -> None:
    """Time attention over the selected latents, checked, beside FlashMLA where it is installed."""
    from keysift.benchmarks.command import bench_sparse_mla

    bench_sparse_mla((phase, rows, columns, heads, k, dtype), tuple(kernel or ()), device, seconds, json, commit)


@app.command()
def index(
    phase: Annotated[
        Literal["decode", "prefill"], typer.Option(help="decode: paged; prefill: a text from its first token on.")
    ] = "decode",
    rows: Annotated[int | None, typer.Option(help="Requests, or tokens of the text; for one case.")] = None,
    columns: Annotated[int | None, typer.Option(help="decode: keys of each request.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Keys selected per row.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Index heads.")] = 64,
    ratio: Annotated[int, typer.Option(min=1, help="prefill: tokens of the text for every key.")] = 1,
    dtype: Annotated[
        Literal["e4m3fn", "e4m3fnuz", "bfloat16", "float16", "float32"], typer.Option(help="Of queries and keys.")
    ] = "bfloat16",
    memory_budget: Annotated[int, typer.Option(min=1, help="Bytes of scores held at a time.")] = 128 << 20,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time per case, about.")] = 1.5,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the record here, case by case.")] = None,
    commit: Annotated[str | None, typer.Option(help="The sources' commit, where they are no checkout.")] = None,
) -> None:
    """Time index_decode and index_prefill, checked, with the memory that they hold."""
    from keysift.benchmarks.command import bench_index

    bench_index((phase, rows, columns, k, heads, ratio, dtype, memory_budget), device, seconds, json, commit)


@app.command()
def tpot(
    model: Annotated[Literal["deepseek-v3.2", "glm-5"], typer.Option(help="Whose attention.")] = "deepseek-v3.2",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share the heads; one is timed.")] = 8,
    batch: Annotated[str, typer.Option(help="Requests in a step; several with commas.")] = "1",
    context: Annotated[str, typer.Option(help="Cached tokens per request; several with commas.")] = "8192",
    layers: Annotated[int | None, typer.Option(min=1, help="Default: the model's; 2 on a CPU.")] = None,
    select: Annotated[
        str, typer.Option(help="Selectors: torch (as a generic fallback), auto, or a kernel's name; with commas.")
    ] = "torch,auto",
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time per case and selector, about.")] = 5.0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the record here, case by case.")] = None,
    commit: Annotated[str | None, typer.Option(help="The sources' commit, where they are no checkout.")] = None,
) -> None:
    """Time per output token of a stack of attention layers, torch.topk against select, and the share of each stage."""
    from keysift.benchmarks.command import bench_tpot

    bench_tpot(model, tensor_parallel, batch, context, layers, select, device, seconds, json, commit)
