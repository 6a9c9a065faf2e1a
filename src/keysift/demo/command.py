"""`keysift demo`: a DeepSeek-V3.2 model, scaled to this machine, generates with stock transformers and with keysift.

Both must give the same tokens; then the times mean something.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .measure import PROFILED_TOKENS, Memory, Run, measure, prefill_chunk
from .model import VARIANTS, build_model, scaling, variant
from .report import describe, draw, record, show

DEFAULT_TEXT = Path(__file__).parent / "sparse_attention.txt"

#: What a run of about two minutes allows on two cores; the text has to be as long.
DEFAULT_CONTEXT = {"cpu": 4096, "cuda": 8192}


def demo(
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, readable=True, help="Read as bytes.")
    ] = DEFAULT_TEXT,
    context: Annotated[
        int | None, typer.Option(help="Tokens of the text to read. Default: 4096 on a CPU (two minutes), 8192 on CUDA.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 16,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; V3.2 has 128.")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Layers; V3.2 has 61.")] = 2,
    hidden: Annotated[int, typer.Option(min=64, help="Hidden size, a multiple of 64; V3.2 has 7168.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    png: Annotated[Path, typer.Option(dir_okay=False, help="Where the figure goes.")] = Path("demo.png"),
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write a record of the run.")] = None,
) -> None:
    """A DeepSeek-V3.2 model, scaled to this machine, generates with stock transformers and with keysift.

    Exits with 1 if their tokens differ.
    """
    console = Console()
    if hidden % 64:
        raise typer.BadParameter(f"hidden is {hidden}; it must be a multiple of 64", param_hint="--hidden")
    where, ids = check(text, context, device, (png, json_path))
    model = build_model(ids.shape[1], heads, layers, hidden, seed).to(where)
    memory = Memory(where)
    load = os.getloadavg()[0]  # of the minute before
    conditions = {
        "context": ids.shape[1],
        "new_tokens": new_tokens,
        "prefill_chunk": prefill_chunk(ids.shape[1]),
        "seed": seed,
        "text": text.name,
        "load_average": load,
    }
    console.print(f"[bold]DeepSeek-V3.2, scaled to {describe(where)}[/bold]\n{scaling(model)}", highlight=False)
    console.print(
        f"Context: {ids.shape[1]} bytes of {text.name}, prefilled in chunks of {conditions['prefill_chunk']} queries "
        f"by every variant, since stock scores are float32 [chunk, 64, context].\n"
        f"Peak memory over the loaded model: {memory.how}.",
        markup=False,
        highlight=False,
    )
    if load > 0.5 * (os.cpu_count() or 1):
        console.print(f"This machine is busy (load {load:.1f}): times are longer than they need be.")
    runs = {}
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name in VARIANTS:
            with variant(model, name):
                runs[name] = measure(model, ids, new_tokens, memory, progress, name)
    if not compare(console, runs):
        console.print("No times are shown for tokens that differ.")
        raise typer.Exit(1)
    show(console, runs)
    profiled = runs["keysift"].profiled_token_s / runs["keysift"].time_per_token
    console.print(
        f"Stages come from {PROFILED_TOKENS} more tokens under torch.profiler; "
        f"a keysift token takes {profiled:.2f} times as long there."
    )
    shares = runs["keysift"].fp8_overlap
    console.print(
        f"With index_dtype=torch.float8_e4m3fn {sum(shares) / len(shares):.1%} of the selected keys stay the same, "
        f"at least {min(shares):.1%} in each of {len(shares)} selections.",
        highlight=False,
    )
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No figure: it needs matplotlib, which comes with pip install 'keysift\\[bench]'.")
    else:
        caption = f"DeepSeek-V3.2 scaled to {layers} layers, {heads} heads; context {ids.shape[1]}\n{describe(where)}"
        draw(png, runs, caption)
        console.print(f"Figure: {png}")
    if json_path is not None:
        written = record(model, where, memory, runs, conditions)
        json_path.write_text(json.dumps(written, indent=1) + "\n")
        console.print(f"Record: {json_path}")


def check(
    text: Path, context: int | None, device: str, outputs: Sequence[Path | None]
) -> tuple[torch.device, torch.Tensor]:
    """The device and the prompt [1, context] of byte tokens, or typer.BadParameter (exit code 2)."""
    if importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter("the demo needs transformers: pip install 'keysift[transformers]'")
    if device not in DEFAULT_CONTEXT:
        raise typer.BadParameter(f"device is {device!r}; it may be cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device is 'cuda'; torch finds none here", param_hint="--device")
    for path in outputs:
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no folder {path.parent}", param_hint="--png or --json")
    content = text.read_bytes()
    if len(content) < 2:
        raise typer.BadParameter(
            f"text is {text}, of {len(content)} bytes; it must have at least 2", param_hint="--text"
        )
    if context is None:
        context = min(DEFAULT_CONTEXT[device], len(content))
    if not 2 <= context <= len(content):
        raise typer.BadParameter(
            f"context is {context}; {text.name} has {len(content)} bytes, so it may be 2 to {len(content)}",
            param_hint="--context",
        )
    return torch.device(device), torch.tensor([list(content[:context])], device=device)


def compare(console: Console, runs: dict[str, Run]) -> bool:
    """Say whether every variant gave stock's tokens, and how much that proves."""
    stock = runs["stock"]
    best, second = stock.logits.topk(2).values.unbind(1)
    margin = float((best - second).min())
    console.print(
        f"Stock tokens: {len(set(stock.tokens))} different ones among {len(stock.tokens)}; "
        f"the best logit leads the second by at least {margin:.2g}.",
        highlight=False,
    )
    same = True
    for name in VARIANTS[1:]:
        if runs[name].tokens == stock.tokens:
            apart = float((runs[name].logits - stock.logits).abs().max())
            console.print(
                f"[green]{name}: the same {len(stock.tokens)} tokens[/green], logits within {apart:.1e}.",
                highlight=False,
            )
        else:
            first = next(
                i
                for i, (ours, theirs) in enumerate(zip(runs[name].tokens, stock.tokens, strict=True))
                if ours != theirs
            )
            console.print(
                f"[red]{name}: token {first} is {runs[name].tokens[first]}, stock gives {stock.tokens[first]}[/red] "
                f"(stock's lead there: {float(best[first] - second[first]):.2g}).",
                highlight=False,
            )
            same = False
    return same
