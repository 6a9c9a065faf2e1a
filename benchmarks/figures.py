"""Figures and tables from the records in benchmarks/results; nothing here measures anything.

python benchmarks/figures.py select RECORD --out FILE   time over the read floor against columns, a panel per row count
python benchmarks/figures.py tpot RECORD --out FILE     a step of the stack, stage by stage, a bar per selector
python benchmarks/figures.py index RECORD --out FILE    time and memory of a prefill index against its tokens
python benchmarks/figures.py readme                     write the blocks between the marks in README.md and docs anew
"""

import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from keysift.benchmarks.cases import Case
from keysift.benchmarks.record import Record, over_floor, peers_of, read

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: select -->", "<!-- /figures: select -->"
#: What README shows of a record, where the record has it.
SHOWN = {
    "cpu": [
        *(Case("decode", *shape) for shape in ((1, 131072), (64, 32768), (64, 4096), (1, 2048))),
        *(Case("decode", *shape, data=data) for shape in ((1, 131072), (64, 32768)) for data in ("equal", "narrow")),
        Case("decode", 64, 32768, 64),
    ],
    "cuda": [
        *(Case("decode", rows, columns) for rows in (1, 16, 64, 256) for columns in (8192, 32768, 131072)),
        *(Case("decode", 64, 131072, data=data) for data in ("equal", "narrow")),
        *(Case("prefill", *shape) for shape in ((2048, 8192), (2048, 32768), (8192, 8192), (8192, 65536))),
    ],
}

#: Warm for what keysift has kernels for, grey for the rest.
STAGE_COLOURS = {
    "project": "0.85",
    "cache": "tab:olive",
    "score": "tab:orange",
    "select": "tab:red",
    "sparse_mla": "tab:blue",
    "output": "0.7",
}

app = typer.Typer(help=__doc__, no_args_is_help=True)


@app.command()
def select(
    record: pathlib.Path,
    out: Annotated[pathlib.Path, typer.Option(help="A .png, .svg or .pdf.")] = pathlib.Path("select.svg"),
    k: Annotated[int, typer.Option(help="Keys selected per row.")] = 2048,
) -> None:
    """Draw a record: normal float32 data, ours in colour, what is recorded of peers and torch.topk in grey."""
    draw(read(record), out, k)
    typer.echo(f"figure: {out}")


@app.command()
def tpot(
    record: pathlib.Path,
    out: Annotated[pathlib.Path, typer.Option(help="A .png, .svg or .pdf.")] = pathlib.Path("tpot.svg"),
) -> None:
    """Draw the steps of a record of `keysift bench tpot`: a panel per batch and context, stages stacked."""
    draw_steps(read(record, "tpot"), out)
    typer.echo(f"figure: {out}")


@app.command()
def index(
    record: pathlib.Path,
    out: Annotated[pathlib.Path, typer.Option(help="A .png, .svg or .pdf.")] = pathlib.Path("index.svg"),
) -> None:
    """Draw the prefill cases of a record of `keysift bench index`: ours in colour, StreamIndex's table in grey."""
    draw_index(read(record, "index"), out)
    typer.echo(f"figure: {out}")


@app.command()
def readme() -> None:
    """Write the figures in README.md and docs anew from the records in benchmarks/results."""
    for name, blocks in BLOCKS.items():
        path = ROOT / name
        text = path.read_text()
        for word, make in blocks.items():
            text = with_block(text, make(RESULTS), word)
        path.write_text(text)
        typer.echo(f"figures: {path}")


def draw(record: Record, out: pathlib.Path, k: int) -> None:
    """One panel per phase and row count; time over the read floor of the same run against columns."""
    from matplotlib import ticker

    plt = _pyplot()
    panels: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for name, entry in record["cases"].items():
        if (entry["k"], entry["data"], entry["dtype"]) == (k, "normal", "float32") and over_floor(entry) is not None:
            panels[entry["phase"], entry["rows"]].append({"name": name, **entry})
    if not panels:
        raise typer.BadParameter(f"the record has no timed case of k = {k} with normal float32 data")
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(3.4 * across, 2.8 * down), squeeze=False, sharex=True, sharey=True
    )
    for axis, ((phase, rows), entries) in zip(axes.flat, sorted(panels.items()), strict=False):
        entries.sort(key=lambda entry: int(entry["columns"]))
        columns = [entry["columns"] for entry in entries]
        for label, points, style in _lines(entries, peers_of(record)):
            axis.plot(columns, points, label=label, **style)
        axis.set(title=f"{phase}, {rows} row{'s' if rows > 1 else ''}", xscale="log", yscale="log")
        axis.xaxis.set_major_locator(ticker.LogLocator(base=2))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick / 1024:g}k"))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:g}"))
        axis.tick_params(labelbottom=True)
        axis.grid(visible=True, which="both", alpha=0.2)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("time / read floor")
    handles = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"select, k = {k}, {record['mode']}, {record['device']}, {record['date']}")
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    _save(figure, out)


def draw_steps(record: Record, out: pathlib.Path) -> None:
    """One panel per case; a bar per selector, its stages stacked, the step beside them as a line."""
    plt = _pyplot()
    cases = {name: entry for name, entry in record["cases"].items() if "selectors" in entry}
    if not cases:
        raise typer.BadParameter("the record has no timed case")
    across = min(4, len(cases))
    down = -(-len(cases) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 3.2 * down), squeeze=False)
    for axis, (name, entry) in zip(axes.flat, cases.items(), strict=False):
        for place, found in enumerate(entry["selectors"].values()):
            bottom = 0.0
            for stage, ms in found["stages_ms"].items():
                axis.bar(place, ms, 0.6, bottom=bottom, color=STAGE_COLOURS[stage], label=stage if not place else None)
                bottom += ms
            axis.hlines(found["ms"], place - 0.38, place + 0.38, color="black", label=None if place else "whole step")
            axis.annotate(f"{found['ms']:.2f}", (place, max(bottom, found["ms"])), ha="center", va="bottom")
        axis.set(title=name, xticks=range(len(entry["selectors"])), xticklabels=list(entry["selectors"]))
        axis.margins(y=0.12)
    for axis in list(axes.flat)[len(cases) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms per output token")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    layers = next(iter(cases.values()))["layers"]
    figure.suptitle(f"{layers} attention layers, {record['device']}, {record['date']}")
    figure.tight_layout(rect=(0, 0.08, 1, 0.98))
    _save(figure, out)


def draw_index(record: Record, out: pathlib.Path) -> None:
    """Time and memory beside arguments and result, against tokens; a line per dtype."""
    plt = _pyplot()
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in record["cases"].values():
        if entry["phase"] == "prefill" and "index" in entry:
            lines[entry["dtype"]].append(entry)
    if not lines:
        raise typer.BadParameter("the record has no timed case of prefill")
    figure, (time, memory) = plt.subplots(1, 2, figsize=(9, 3.4))
    for dtype, entries in lines.items():
        entries.sort(key=lambda entry: int(entry["rows"]))
        tokens = [entry["rows"] for entry in entries]
        time.plot(tokens, [entry["index"]["us"] / 1e3 for entry in entries], marker="o", label=f"keysift, {dtype}")
        memory.plot(tokens, [_held(entry) for entry in entries], marker="o")
    beside = [entry for entry in next(iter(lines.values())) if "stream_index_h200" in entry]
    style = {"color": "0.6", "marker": "."}
    tokens = [entry["rows"] for entry in beside]
    time.plot(
        tokens, [entry["stream_index_h200"]["us"] / 1e3 for entry in beside], label="StreamIndex, published", **style
    )
    memory.plot(tokens, [entry["stream_index_h200"]["bytes"] / 1e9 for entry in beside], **style)
    time.set(ylabel="ms, one layer")
    memory.set(ylabel="GB beside arguments and result", ylim=(0.1, 10))
    for axis in (time, memory):
        axis.set(xscale="log", yscale="log", xlabel="tokens")
        axis.grid(visible=True, alpha=0.2)
    figure.legend(*time.get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.suptitle(f"index of DeepSeek-V4-Flash, prefill, {record['device']}, {record['date']}")
    figure.tight_layout(rect=(0, 0.08, 1, 0.98))
    _save(figure, out)


def _held(entry: Mapping[str, Any]) -> float:
    return float(entry["peak_bytes"] - entry["arguments_bytes"]) / 1e9


def _pyplot() -> Any:
    """matplotlib's, drawing to files: small ones, and the same every time."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "keysift"})
    from matplotlib import pyplot as plt

    return plt


def _save(figure: Any, out: pathlib.Path) -> None:
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    _pyplot().close(figure)


def _lines(
    entries: list[dict[str, Any]], peers: dict[str, dict[str, Any]]
) -> list[tuple[str, list[float], dict[str, Any]]]:
    """(label, one value per entry, style) of a panel; nan where there is no value."""
    nan = float("nan")

    def recorded(key: str) -> list[float]:
        found = [peers.get(entry["name"]) for entry in entries]
        return [nan if peer is None else peer[key] / peer["floor_us"] for peer in found]

    fallback = [entry["others"].get("fallback", {}) for entry in entries]
    lines: list[tuple[str, list[float], dict[str, Any]]] = [
        (
            "torch.topk as fallback",
            [t["us"] / e["floor"]["us"] if t.get("checked") else nan for t, e in zip(fallback, entries, strict=True)],
            {"color": "0.7", "marker": ".", "linestyle": ":"},
        ),
        (
            "keysift",
            [over_floor(entry) or nan for entry in entries],
            {"color": "tab:blue", "marker": "o", "linewidth": 2},
        ),
    ]
    chosen = {entry["chosen"] for entry in entries}
    for name in sorted({name for entry in entries for name in entry["kernels"]} - chosen):
        times = [entry["kernels"].get(name, {}) for entry in entries]
        points = [t["us"] / e["floor"]["us"] if t.get("checked") else nan for t, e in zip(times, entries, strict=True)]
        lines.append((f"keysift, {name}", points, {"color": "tab:cyan", "marker": ".", "linewidth": 1}))
    if peers:
        lines += [
            ("best recorded peer", recorded("best_us"), {"color": "0.55", "marker": "."}),
            (
                "best recorded always-exact peer",
                recorded("best_always_exact_us"),
                {"color": "0.55", "marker": ".", "linestyle": "--"},
            ),
        ]
    return lines


def block(results: pathlib.Path) -> str:
    """What README says between its marks: a table per record, beside its machine, versions, date and command."""
    records = [read(path) for path in sorted(results.glob("select-*.json"))]
    return "\n\n".join(_section(record) for record in records)


def kernels_block(results: pathlib.Path) -> str:
    """What docs/select.md says of a record with several kernels: each beside the floor and the fallback."""
    parts = []
    for path in sorted(results.glob("select-*.json")):
        record = read(path)
        names = list(dict.fromkeys(name for entry in record["cases"].values() for name in entry["kernels"]))
        if len(names) < 2:
            continue
        heads = [f"{name}, us | over the floor | fallback's time over it" for name in names]
        lines = [
            f"**{record['device']}** ({record['mode']}):",
            "",
            f"| rows x columns | data | floor, us | fallback, us | {' | '.join(heads)} |",
            "|---|---|---|---|" + "---|---|---|" * len(names),
        ]
        for case in SHOWN["cuda"]:
            entry = record["cases"].get(case.name)
            if entry is None:
                continue
            floor, fallback = entry["floor"]["us"], entry["others"]["fallback"]["us"]
            cells = [f"{case.rows} x {case.columns} {case.phase}", case.data, _us(floor), _us(fallback)]
            for name in names:
                us = entry["kernels"][name]["us"]
                cells += [_us(us), f"{us / floor:.1f}x", f"{fallback / us:.1f}x"]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join([*lines, "", _source(record)]))
    return "\n\n".join(parts)


def tpot_block(results: pathlib.Path) -> str:
    """Time per output token by selector: the records of `keysift bench tpot`."""
    parts = []
    for path in sorted(results.glob("tpot-*.json")):
        record = read(path, "tpot")
        cases = [entry for entry in record["cases"].values() if "selectors" in entry]
        names = list(dict.fromkeys(name for entry in cases for name in entry["selectors"]))
        first = cases[0]
        stack = f"{first['layers']} attention layers of width {first['hidden']}, {first['heads']} heads"
        lines = [
            f"**{record['device']}**, {first['model']}, {stack}:",
            "",
            f"| batch x context | {' | '.join(f'{name}, ms (select alone)' for name in names)} | faster |",
            "|---|" + "---|" * (len(names) + 1),
        ]
        for entry in cases:
            found = [entry["selectors"][name] for name in names]
            cells = [f"{times['ms']:.2f} ({times['stages_ms']['select']:.2f})" for times in found]
            ratio = f"{found[0]['ms'] / found[-1]['ms']:.2f}x"
            shape = f"{entry['batch']} x {entry['context']}"
            lines.append(f"| {' | '.join([shape, *cells, ratio])} |")
        parts.append("\n".join([*lines, "", _source(record)]))
    return "\n\n".join(parts) or "No run is recorded yet; `keysift bench tpot` measures it on your machine."


def index_block(results: pathlib.Path) -> str:
    """What docs/index.md says: decode beside its stages, prefill beside StreamIndex."""
    parts = []
    for path in sorted(results.glob("index-*.json")):
        record = read(path, "index")
        cases = [entry for entry in record["cases"].values() if "index" in entry]
        lines = [
            f"**{record['device']}**:",
            "",
            "| decode | index, us | score alone | select alone |",
            "|---|---|---|---|",
        ]
        for entry in (entry for entry in cases if "stages" in entry):
            stages = [_us(entry["stages"][stage]["us"]) for stage in ("score", "select")]
            cells = [f"{entry['rows']} x {entry['columns']}, k = {entry['topk']}", _us(entry["index"]["us"]), *stages]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            "| prefill, tokens | dtype | index, ms | GB | StreamIndex's time over ours |",
            "|---|---|---|---|---|",
        ]
        for entry in (entry for entry in cases if entry["phase"] == "prefill"):
            other = entry.get("stream_index_h200")
            ratio = "" if other is None else f"{other['us'] / entry['index']['us']:.1f}x"
            cells = [
                str(entry["rows"]),
                entry["dtype"],
                f"{entry['index']['us'] / 1e3:.1f}",
                f"{_held(entry):.2f}",
                ratio,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join([*lines, "", _source(record)]))
    return "\n\n".join(parts)


def peers_block(results: pathlib.Path, stage: str, pattern: str) -> str:
    """What docs/score.md and docs/sparse_mla.md say: ours beside the package that was timed in the same run."""
    parts = []
    for path in sorted(results.glob(pattern)):
        record = read(path, stage)
        peer = next((name for entry in record["cases"].values() for name in entry["others"]), None)
        lines = [
            f"**{record['device']}** ({record['mode']}):",
            "",
            f"| case | kernel | us | TFLOP/s | GB/s | {peer or 'peer'}, us | its time over ours |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, entry in record["cases"].items():
            for kernel, found in entry["kernels"].items():
                if not found["checked"]:
                    continue
                other = entry["others"].get(peer, {})
                beside = [_us(other["us"]), f"{other['us'] / found['us']:.2f}x"] if other.get("checked") else ["", ""]
                cells = [name, kernel, _us(found["us"]), f"{found['tflops']:.0f}", f"{found['gbps']:.0f}", *beside]
                lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join([*lines, "", _source(record)]))
    return "\n\n".join(parts)


def demo_block(results: pathlib.Path) -> str:
    """What README says of the whole model: the demo's records."""
    parts = []
    for path in sorted(results.glob("demo-*.json")):
        record = json.loads(path.read_text())
        runs = record["runs"]
        stock = runs["stock"]["time_per_token_s"]
        k = record["configuration"]["index_topk"]
        lines = [
            f"**{record['device']}**, {record['context']} tokens of context, k = {k}:",
            "",
            f"| | {' | '.join(runs)} |",
            "|---|" + "---|" * len(runs),
        ]
        rows = {
            "time per output token, ms": [f"{1e3 * run['time_per_token_s']:.1f}" for run in runs.values()],
            "stock takes": [f"{stock / run['time_per_token_s']:.1f}x" for run in runs.values()],
            "prefill, s": [f"{run['prefill_s']:.1f}" for run in runs.values()],
            "peak memory of prefill, MiB": [f"{run['prefill_peak_bytes'] / 2**20:.0f}" for run in runs.values()],
            "peak memory of decode, MiB": [f"{run['decode_peak_bytes'] / 2**20:.0f}" for run in runs.values()],
        }
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
        parts.append("\n".join([*lines, "", _source(record)]))
    return "\n\n".join(parts) or "No run is recorded yet; `make demo` measures it on your machine."


def with_block(text: str, made: str, word: str = "select") -> str:
    """`text` with `made` between the marks of `word`. Raises ValueError where a mark is missing."""
    begin, end = BEGIN.replace("select", word), END.replace("select", word)
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no block between {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{made}\n\n{end}", text)


#: What stands between which marks, by file.
BLOCKS = {
    "README.md": {"demo": demo_block, "select": block},
    "docs/select.md": {"kernels": kernels_block},
    "docs/tpot.md": {"tpot": tpot_block},
    "docs/index.md": {"index": index_block},
    "docs/score.md": {"score": lambda results: peers_block(results, "score", "score-*.json")},
    "docs/sparse_mla.md": {"sparse_mla": lambda results: peers_block(results, "sparse_mla", "sparse-mla-*.json")},
}


def _source(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commit = (record["commit"] or "unknown")[:12] + (", with changes" if record.get("dirty") else "")
    return f"`{record['command']}`, {record['date']}, commit {commit}, {versions}"


def _section(record: Record) -> str:
    peers = peers_of(record)
    other = "topk" if record["device_type"] == "cpu" else "fallback"
    heading = "`torch.topk`, unsorted" if other == "topk" else "`torch.topk` as a fallback uses it"
    facts = [record["mode"], *([f"driver {record['driver']}"] if record["driver"] else [])]
    if record["threads"]:
        facts.append(f"{record['threads']} threads, load average {record['load']} beforehand")
    lines = [
        f"**{record['device']}** ({', '.join(facts)}):",
        "",
        "| rows x columns | k | data | kernel | us (p20 to p80) | over the read floor | "
        f"{heading}, us | its time over ours |" + (" best recorded peer, us |" if peers else ""),
        "|---|---|---|---|---|---|---|---|" + ("---|" if peers else ""),
    ]
    for case in SHOWN["cpu" if record["device_type"] == "cpu" else "cuda"]:
        entry = record["cases"].get(case.name)
        if entry is None or over_floor(entry) is None:
            continue
        ours, beside = entry["kernels"][entry["chosen"]], entry["others"].get(other, {"checked": False})
        phase = "" if case.phase == "decode" else " prefill"
        cells = [
            f"{case.rows} x {case.columns}{phase}",
            str(case.k),
            case.data,
            entry["chosen"],
            f"{_us(ours['us'])} ({_us(ours['p20_us'])} to {_us(ours['p80_us'])})",
            f"{over_floor(entry):.1f}x",
            *([_us(beside["us"]), f"{beside['us'] / ours['us']:.1f}x"] if beside["checked"] else ["-", "-"]),
        ]
        if peers:
            peer = peers.get(case.name)
            cells.append(f"{_us(peer['best_us'])} ({peer['best']})" if peer else "-")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _source(record)]
    return "\n".join(lines)


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


if __name__ == "__main__":
    app()
