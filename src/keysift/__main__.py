"""The command line: keysift demo | explain | check | bench, the same as `python -m keysift`."""

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import keysift
from keysift import dispatch

if TYPE_CHECKING:
    from keysift.testing import Report, Selector

app = typer.Typer(
    name="keysift",
    help="DeepSeek Sparse Attention, exactly and fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
explain = typer.Typer(no_args_is_help=True, help="Which kernel a call gets, why, and why not each other one.")
app.add_typer(explain, name="explain")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keysift {keysift.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _keysift(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the command itself."""


# `demo` and `bench` bring their own options: everything behind the verb is theirs, and they are imported when called.
_VERBATIM = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

Float = Literal["float32", "bfloat16", "float16"]
Rows = Annotated[int, typer.Option(min=0, help="Query tokens in the call.")]
Columns = Annotated[int, typer.Option(min=0, help="Key positions in a score row.")]
K = Annotated[int, typer.Option("--k", min=1, help="Keys to keep per row.")]
Device = Annotated[str, typer.Option(help="cpu, cuda (the one here), cuda:sm_90, hip:gfx942 or the like.")]


@explain.command("cache")
def explain_cache(
    operation: Annotated[
        Literal["write_index", "write_latent", "gather_index", "gather_latent"], typer.Option(help="What is done.")
    ] = "write_index",
    format: Annotated[Literal["e4m3fn", "e4m3fnuz", Float], typer.Option(help="Of the cache.")] = "e4m3fn",
    rows: Rows = 64,
    width: Annotated[int, typer.Option(min=1, help="Numbers per token.")] = 128,
    device: Device = "cpu",
) -> None:
    """Tokens into pages, and back."""
    from keysift.ops.cache import api

    problem = api.Problem(_device(device), operation, format, rows, width)
    _explain("cache", api.KERNELS, problem, f"{operation}, {rows} tokens of {width}, {format}")


@explain.command("score")
def explain_score(
    rows: Rows = 64,
    columns: Columns = 131072,
    heads: Annotated[int, typer.Option(min=1, help="Index heads.")] = 64,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of an index head.")] = 128,
    q_dtype: Annotated[Literal[Float, "float8_e4m3fn"], typer.Option(help="Queries.")] = "bfloat16",
    k_dtype: Annotated[Literal[Float, "float8_e4m3fn"], typer.Option(help="Keys.")] = "bfloat16",
    page_size: Annotated[int, typer.Option(min=0, help="Tokens in a page of the cache; 0: keys in one piece.")] = 0,
    device: Device = "cpu",
) -> None:
    """Index logits of query rows against cached keys."""
    from keysift.ops.score import api

    problem = api.Problem(_device(device), _dtype(q_dtype), _dtype(k_dtype), rows, columns, heads, head_dim, page_size)
    layout = f"pages of {page_size}" if page_size else "keys in one piece"
    _explain(
        "score",
        api.KERNELS,
        problem,
        f"{rows} x {columns}, {heads} heads of {head_dim}, {q_dtype} x {k_dtype}, {layout}",
    )


@explain.command("select")
def explain_select(
    rows: Rows = 64,
    columns: Columns = 131072,
    k: K = 2048,
    dtype: Annotated[Float, typer.Option(help="Scores.")] = "float32",
    column_stride: Annotated[int, typer.Option(min=0, help="Elements between neighbouring columns.")] = 1,
    device: Device = "cpu",
) -> None:
    """The k best columns of every score row."""
    from keysift.ops.select import api

    problem = api.Problem(_device(device), _dtype(dtype), rows, columns, k, column_stride)
    _explain("select", api.KERNELS, problem, f"{rows} x {columns}, k = {k}, {dtype}")


@explain.command("sparse_mla")
def explain_sparse_mla(
    rows: Rows = 64,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 128,
    k: K = 2048,
    dim: Annotated[int, typer.Option(min=1, help="Latent and RoPE part together.")] = 576,
    value_dim: Annotated[int, typer.Option(min=1, help="Latent part.")] = 512,
    dtype: Annotated[Float, typer.Option(help="Queries.")] = "bfloat16",
    kv_dtype: Annotated[Literal[Float, "float8_e4m3fn"], typer.Option(help="Latents.")] = "bfloat16",
    scale: Annotated[Literal["float32", "ue8m0"], typer.Option(help="Of fp8 latents.")] = "float32",
    device: Device = "cpu",
) -> None:
    """Attention over the selected latents."""
    from keysift.ops.sparse_mla import api

    scaled = value_dim if kv_dtype == "float8_e4m3fn" else 0
    problem = api.Problem(
        _device(device), _dtype(dtype), _dtype(kv_dtype), rows, heads, dim, value_dim, k, latent_dim=scaled,
        power_of_two=scale == "ue8m0",
    )  # fmt: skip
    call = f"{rows} rows, {heads} heads, k = {k}, {dim} -> {value_dim}, {dtype} x {kv_dtype}"
    _explain("sparse_mla", api.KERNELS, problem, call)


@app.command(add_help_option=False, context_settings=_VERBATIM)
def demo(context: typer.Context) -> None:
    """A DSA model generates with stock transformers and with keysift: same tokens, times by stage, a figure."""
    from keysift.demo import demo as run

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(run)
    inner(args=context.args, prog_name="keysift demo")


@app.command()
def check(
    tier: Annotated[
        Literal["tiny", "cpu", "gpu"], typer.Option(help="Up to which size: seconds, minutes, GPU.")
    ] = "cpu",
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; may be repeated. Default: all.")] = None,
    stage: Annotated[
        Literal["cache", "score", "select", "index", "sparse_mla"] | None,
        typer.Option(help="Only this stage. Default: all that are judged."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: every device here.")] = None,
    seed: Annotated[int, typer.Option(help="Of the data and of the random cases.")] = 0,
) -> None:
    """Judge every kernel that can run on this machine by every line of the contract; exit code 1 if one is broken."""
    from keysift.testing import STAGES, select_kernels

    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if device not in (None, *present):
        raise typer.BadParameter(f"device is {device!r}; here it may be {', '.join(present)}", param_hint="--device")
    names = [name for name, _ in select_kernels()]
    if unknown := [name for name in kernel or [] if name not in names]:
        raise typer.BadParameter(f"kernel is {unknown[0]!r}; select has {', '.join(names)}", param_hint="--kernel")
    console = _console()
    reports = []
    for where in [device] if device else present:
        for name, selector in select_kernels(where) if stage in (None, "select") else ():
            if kernel and name not in kernel:
                continue
            if isinstance(selector, list):
                console.print(f"{name} does not run on {where}: {'; '.join(selector)}\n", markup=False)
                continue
            reports.append(_judge(selector, where, tier, seed, console))
            console.print(reports[-1])
        for other, (kernels, judge) in STAGES.items():
            for name, unmet in kernels(where) if stage in (None, other) else ():
                if (not kernel or name in kernel) and not unmet:
                    reports.append(judge(name, where, seed))
                    console.print(reports[-1])
    if not reports:
        raise typer.BadParameter(f"{', '.join(kernel or names)} cannot run on {device or 'any device here'}")
    broken = [report.subject for report in reports if not report.ok]
    verdict = f"broken: {', '.join(broken)}" if broken else "all keep the contract"
    console.print(f"kernels judged: {len(reports)}; {verdict}", markup=False)
    if broken:
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings=_VERBATIM)
def bench(context: typer.Context) -> None:
    """Times on this machine, each checked in the same run."""
    from keysift.benchmarks import app as inner

    inner(args=context.args, prog_name="keysift bench")


def _judge(selector: "Selector", device: str, tier: str, seed: int, console: Console) -> "Report":
    """The kit's report on one kernel, with a progress bar meanwhile."""
    from keysift.testing import check_select

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{selector.name} on {device}", total=None)

        def show(done: int, total: int, _: str) -> None:
            progress.update(task, completed=done, total=total)

        return check_select(selector, device=device, tier=tier, seed=seed, progress=show)


def _explain(stage: str, table: Sequence[dispatch.Kernel], problem: Any, call: str) -> None:
    """Print the table of `stage` with the kernel that runs marked, or every other one's reasons."""
    say = functools.partial(_console().print, markup=False, soft_wrap=True)
    device: dispatch.Device = problem.device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about the reference; said below
        try:
            chosen = dispatch.choose(stage, table, problem)
        except ValueError as error:  # KEYSIFT_<STAGE> names a kernel that does not exist or cannot run this
            raise typer.BadParameter(str(error)) from error
    say(f"{stage}: {call}, on {device}")
    width = max(len(kernel.name) for kernel in table)
    reasons = dispatch.explain(table, problem)
    first = next(name for name, unmet in reasons if not unmet)
    reached = False
    for name, unmet in reasons:
        if name == chosen.name:
            reached = True
            reason = "runs: " + (
                "the first that meets every constraint" if name == first else "the environment names it"
            )
        elif unmet:
            reason = "no: " + "; ".join(unmet)
        else:
            reason = "could run, but " + ("comes later in the table" if reached else "the environment names another")
        say(f"{'->' if name == chosen.name else '  '} {name:<{width}}  {reason}")
    if chosen is table[-1] and device.type != "cpu":
        say(f"The reference is far slower than a kernel; a call on {device} warns once.")
    if not device.is_local:
        say(f"{device} is only named: {', '.join(dispatch.GPU_PACKAGES)} count as installed, as beside a GPU.")


def _device(text: str) -> dispatch.Device:
    try:
        return dispatch.parse_device(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _console() -> Console:
    console = Console(highlight=False)
    # What goes to a file or a pipe is as wide as it needs to be.
    return console if console.is_terminal else Console(width=160, highlight=False)


def main() -> None:
    """The console script."""
    app(prog_name="keysift")


if __name__ == "__main__":
    main()
