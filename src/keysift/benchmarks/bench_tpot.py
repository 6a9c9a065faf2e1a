"""Time per output token of a stack of attention layers, by selector, with the share of each stage.

On CUDA a sample is one replay of a captured step, event to event, lengths growing by one each time; selectors take
turns. The share of a stage is that of a graph of its launches alone, in all layers, so the shares add up to a little
more or less than the step. On a CPU a sample is one step, and the stages are timed inside it.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from keysift import dispatch
from keysift.benchmarks.stack import MODELS, PAGE_SIZE, STAGES, Select, Stack, select_by, select_torch
from keysift.ops.select import api

Entry = dict[str, Any]
#: Steps that the caches have room for; a run takes as many at most.
STEPS = 512
#: Bytes for caches, of what is free.
SHARE = 0.6
#: A model as it is takes minutes a token on a CPU: this width, and two layers unless the caller says otherwise.
CPU_HIDDEN, CPU_LAYERS = 1024, 2


def run(
    model: str,
    tensor_parallel: int,
    layers: int | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    selectors: Sequence[str],
    device: torch.device,
    seconds: float,
    done: Callable[[str, Entry], None] | None = None,
) -> dict[str, Entry]:
    """Entries by name, `deepseek-v3.2-tp8-1x131072`, each given to `done` as soon as it is there.

    selectors  "torch" (as a generic fallback uses it), "auto" (the dispatch), or a kernel of select
    seconds    of measuring per batch, context and selector, about
    """
    dims = MODELS[model]
    if device.type == "cpu":
        dims = dataclasses.replace(dims, hidden=CPU_HIDDEN)
        layers = layers or CPU_LAYERS
    heads, layers = dims.heads // tensor_parallel, layers or dims.layers
    entries: dict[str, Entry] = {}
    with torch.no_grad():
        for batch in batches:
            for context in contexts:
                name = f"{model}-tp{tensor_parallel}-{batch}x{context}"
                try:
                    stack = Stack(dims, heads, layers, batch, context, STEPS, device, _memory(device))
                    entry = measure(stack, selectors, context, seconds)
                except torch.OutOfMemoryError as error:
                    entry = {"fault": f"out of memory: {error}"}
                facts = {"model": model, "batch": batch, "context": context, "heads": heads, "layers": layers}
                entries[name] = {**facts, "hidden": dims.hidden, **entry}
                stack = None  # type: ignore[assignment] # the next one needs its memory
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if done is not None:
                    done(name, entries[name])
    return entries


def measure(stack: Stack, names: Sequence[str], context: int, seconds: float) -> Entry:
    """One batch and context: check that every selector selects the same, then time them in turns."""
    selectors = {name: _selector(name) for name in names}
    stack.lengths.fill_(context)
    stack.begin()
    _step(stack, selectors[names[0]])
    found = {name: _values(stack, choose) for name, choose in selectors.items()}
    first = next(iter(found.values()))
    faults = [name for name, values in found.items() if not torch.equal(values, first)]
    if faults:
        return {"fault": f"{', '.join(faults)} selected other scores than {names[0]}"}
    time_steps = _time_graphs if stack.device.type == "cuda" else _time_steps
    times = time_steps(stack, selectors, context, seconds)
    chosen = dispatch.choose("select", api.KERNELS, api._problem(stack.scores, stack.dims.topk)).name  # noqa: SLF001
    for name, entry in times.items():
        entry["kernel"] = chosen if name == "auto" else name
    return {"cache_sets": stack.cache_sets, "selectors": times}


def _selector(name: str) -> Select:
    return select_torch if name == "torch" else select_by(None if name == "auto" else name)


def _memory(device: torch.device) -> int:
    return int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2 << 30


def _step(stack: Stack, choose: Select, stages: Iterable[str] = STAGES) -> None:
    for layer in range(len(stack.weights)):
        for stage in stages:
            stack.run(layer, stage, choose)


def _values(stack: Stack, choose: Select) -> torch.Tensor:
    """The scores that are selected of the last layer's, in order: equal for selectors that differ in ties alone."""
    slots = choose(stack.scores, stack.lengths, stack.table, stack.dims.topk).long()
    places = torch.arange(stack.table.shape[1], device=stack.device).expand_as(stack.table)
    order = torch.empty(stack.table.numel(), dtype=torch.int64, device=stack.device)
    order[stack.table.flatten().long()] = places.flatten()
    columns = order[(slots // PAGE_SIZE).clamp(min=0)] * PAGE_SIZE + slots % PAGE_SIZE
    inside = (slots >= 0) & (columns < stack.lengths[:, None])
    values = stack.scores.gather(1, columns.clamp(min=0)).masked_fill(~inside, -torch.inf)
    missing = stack.dims.topk - values.shape[1]  # torch.topk finds no more than there are columns
    return torch.nn.functional.pad(values, (0, missing), value=-torch.inf).sort(1).values


def _entry(samples: Sequence[float], stages: dict[str, float]) -> Entry:
    p20, median, p80 = (round(float(p), 4) for p in np.percentile(samples, (20, 50, 80)))
    rounded = {stage: round(ms, 4) for stage, ms in stages.items()}
    return {"ms": median, "p20_ms": p20, "p80_ms": p80, "rounds": len(samples), "stages_ms": rounded}


def _time_steps(stack: Stack, selectors: dict[str, Select], context: int, seconds: float) -> dict[str, Entry]:
    """Steps on a CPU, selectors in turns."""
    samples: dict[str, list[float]] = {name: [] for name in selectors}
    spent: dict[str, dict[str, list[float]]] = {name: {stage: [] for stage in STAGES} for name in selectors}
    stack.lengths.fill_(context)
    began = time.perf_counter()
    for _ in range(STEPS // len(selectors)):
        for name, choose in selectors.items():
            stages = dict.fromkeys(STAGES, 0.0)
            start = now = time.perf_counter()
            stack.begin()
            for layer in range(len(stack.weights)):
                for stage in STAGES:
                    stack.run(layer, stage, choose)
                    before, now = now, time.perf_counter()
                    stages[stage] += 1e3 * (now - before)
            samples[name].append(1e3 * (now - start))
            for stage, ms in stages.items():
                spent[name][stage].append(ms)
        if time.perf_counter() - began > seconds * len(selectors) and len(samples[name]) >= 5:
            break
    return {
        name: _entry(taken, {stage: statistics.median(ms) for stage, ms in spent[name].items()})
        for name, taken in samples.items()
    }


def _time_graphs(stack: Stack, selectors: dict[str, Select], context: int, seconds: float) -> dict[str, Entry]:
    """Graph replays on CUDA, selectors in turns, then each stage alone."""
    stream = torch.cuda.Stream(stack.device)
    stream.wait_stream(torch.cuda.current_stream(stack.device))
    with torch.cuda.stream(stream):
        graphs = {name: _capture(stack, choose, STAGES) for name, choose in selectors.items()}
        stack.lengths.fill_(context)
        one = statistics.median(_replay(graph) for graph in [*graphs.values()] * 2)
        rounds = max(5, min((STEPS - 8) // len(graphs), int(1e3 * seconds / one)))
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                samples[name].append(_replay(graph))
        shares: dict[str, dict[str, float]] = {name: {} for name in selectors}
        common: dict[str, float] = {}
        for name, choose in selectors.items():
            stack.begin()
            _step(stack, choose)  # what each stage finds, now that only it runs
            for stage in STAGES:
                if stage not in common or stage == "select":
                    graph = _capture(stack, choose, [stage])
                    common[stage] = statistics.median([_replay(graph) for _ in range(12)][2:])
                shares[name][stage] = common[stage]
        torch.cuda.synchronize(stack.device)
    return {name: _entry(samples[name], shares[name]) for name in selectors}


def _capture(stack: Stack, choose: Select, stages: Sequence[str]) -> torch.cuda.CUDAGraph:
    """A whole step, which moves on by a token, or one stage of it in every layer."""
    whole = len(stages) > 1
    for _ in range(2):  # compiles and loads what a capture must not
        if whole:
            stack.begin()
        _step(stack, choose, stages)
    torch.cuda.synchronize(stack.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(stack.device)):
        if whole:
            stack.begin()
        _step(stack, choose, stages)
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds, event to event."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))
