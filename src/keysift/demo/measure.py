"""One variant's generation: tokens, times, memory, and the split by stage."""

import contextlib
import ctypes
import gc
import inspect
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import Progress, TaskID

from keysift import indexer
from keysift.plugins import fp8_index

STAGES = ("score", "select", "sparse_mla", "rest")

#: Stock prefill builds float32 scores [chunk, 64, context]; the chunk of queries is as large as keeps them to this.
SCORE_BYTES = 1 << 30

#: Tokens generated under the profiler, after the timed ones, for the split by stage.
PROFILED_TOKENS = 4


@dataclass
class Run:
    """One variant's generation: what came out and what it took."""

    tokens: list[int]
    logits: torch.Tensor  # float32 [new tokens, vocabulary]
    prefill_s: float
    token_s: list[float]  # seconds between consecutive tokens
    prefill_bytes: int | None  # high-water mark over what was in use before, None where it cannot be measured
    decode_bytes: int | None
    stage_s: dict[str, float] = field(default_factory=dict)  # per token, under the profiler
    profiled_token_s: float = 0.0
    fp8_overlap: list[float] = field(default_factory=list)  # of each selection of a few more tokens

    @property
    def time_per_token(self) -> float:
        """Median seconds per output token, without the profiler."""
        return statistics.median(self.token_s)


class Memory:
    """High-water mark of memory: resident set on a CPU (Linux), allocated device memory on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.how = "torch.cuda.max_memory_allocated"
        if device.type == "cpu":
            try:
                self._clear()
                self.how = "resident set high-water mark, reset through /proc/self/clear_refs"
            except OSError as error:
                self.how = f"not measured: {error}"

    def start(self) -> None:
        """Take what is in use now as the base, and begin a new high-water mark."""
        gc.collect()
        self.reset()
        self.base = self._now() or 0

    def reset(self) -> None:
        """Begin a new high-water mark over the same base."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not self.how.startswith("not"):
            # What the allocator kept of freed memory would count as in use; glibc gives it back on request.
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
            self._clear()

    def peak(self) -> int | None:
        """Bytes over the base at the highest since `reset`."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._status("VmHWM")
        return None if peak is None else peak - self.base

    def _now(self) -> int | None:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self._status("VmRSS")

    def _clear(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak of the resident set

    def _status(self, name: str) -> int | None:
        if self.how.startswith("not"):
            return None
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
        return int(line.split()[1]) * 1024


class Clock:
    """A streamer for `generate`: receives the prompt, then each token as soon as it is known."""

    def __init__(self, memory: Memory, on_token: Callable[[], None]) -> None:
        self.memory, self.on_token = memory, on_token
        self.begin = 0.0  # of the prefill, seconds
        self.prefill_s = 0.0
        self.prefill_bytes: int | None = None
        self.arrivals: list[float] = []  # the first token, as late as decoding goes on, and every other

    def put(self, _value: torch.Tensor) -> None:
        """The prompt or a token, which is on the CPU, so it is complete."""
        now = time.perf_counter()
        if not self.begin:
            self.memory.start()
            self.begin = time.perf_counter()
            return
        if not self.arrivals:
            self.prefill_s, self.prefill_bytes = now - self.begin, self.memory.peak()
            self.memory.reset()
            now = time.perf_counter()
        self.arrivals.append(now)
        self.on_token()

    def end(self) -> None:
        """The last token has come."""


def generate(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int, **options: Any) -> Any:
    """Greedy `model.generate`; the keyword of the cache was renamed between transformers 5.17 and 5.24."""
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{keyword: cache},
        **options,
    )


def measure(model: Any, ids: torch.Tensor, new_tokens: int, memory: Memory, progress: Progress, name: str) -> Run:
    """Prefill and generate with `model` as it is now, then split a few more tokens by stage."""
    from transformers import DynamicCache

    context = ids.shape[1]
    generate(model, ids[:, : min(64, context)], DynamicCache(config=model.config), 2)  # compiles what is compiled
    prefill = progress.add_task(f"{name}: prefill", total=context)
    decode = progress.add_task(f"{name}: generate", total=new_tokens)
    hook = model.model.norm.register_forward_hook(lambda _module, _args, out: _advance(progress, prefill, out.shape[1]))
    clock = Clock(memory, lambda: progress.advance(decode))
    cache = DynamicCache(config=model.config)
    try:
        result = generate(model, ids, cache, new_tokens, streamer=clock, prefill_chunk_size=prefill_chunk(context))
    finally:
        hook.remove()
    run = Run(
        tokens=result.sequences[0, context:].tolist(),
        logits=torch.cat(result.logits).float().cpu(),
        prefill_s=clock.prefill_s,
        token_s=[after - before for before, after in itertools.pairwise(clock.arrivals)],
        prefill_bytes=clock.prefill_bytes,
        decode_bytes=memory.peak(),
    )
    run.stage_s, run.profiled_token_s = split(model, result.sequences, cache, stock=name == "stock")
    if name == "keysift":
        run.fp8_overlap = fp8_overlap(model, result.sequences, cache)
    return run


def _advance(progress: Progress, task: TaskID, tokens: int) -> None:
    if not progress.tasks[task].finished:  # decoding passes here too
        progress.advance(task, tokens)


def prefill_chunk(context: int) -> int:
    """Queries per chunk of the prefill, the same for every variant."""
    return max(1, min(context, SCORE_BYTES // (4 * 64 * context)))


def split(model: Any, sequences: torch.Tensor, cache: Any, *, stock: bool) -> tuple[dict[str, float], float]:
    """Seconds per token of each stage, and of the whole token, from a few more tokens under torch.profiler.

    keysift's stages are its operators. In stock transformers the indexer's `topk` is select, the rest of the indexer
    without its projections is score, and attention without its projections (expanding the latents, masks, the
    attention itself) is sparse_mla. Projections, experts, the head and the host's own work are the rest.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    cuda = sequences.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with (
        stage_ranges(model) if stock else contextlib.nullcontext(),
        torch.profiler.profile(activities=activities) as profile,
    ):
        begin = time.perf_counter()
        generate(model, sequences, cache, PROFILED_TOKENS)
        total = (time.perf_counter() - begin) / PROFILED_TOKENS
    spent = dict.fromkeys(STAGES, 0.0)
    for event in profile.events():
        if event.device_type.name != "CPU":
            continue  # a kernel, or a range's shadow on the device: both are counted in the operator that launched them
        parent = event.cpu_parent.name if event.cpu_parent else ""
        if event.name.startswith("keysift::"):
            stage = event.name.removeprefix("keysift::")
        elif stock and parent.startswith("stage::") and not event.name.startswith("stage::"):
            stage = parent.removeprefix("stage::")  # an operator that a range's module calls itself
            if stage == "score" and event.name == "aten::topk":
                stage = "select"
        else:
            continue
        spent[stage] += (event.device_time_total if cuda else event.cpu_time_total) / 1e6 / PROFILED_TOKENS
    spent["rest"] = total - sum(spent[stage] for stage in STAGES[:-1])
    return spent, total


def fp8_overlap(model: Any, sequences: torch.Tensor, cache: Any) -> list[float]:
    """Of the keys that each layer selects for a few more tokens, the share that fp8 queries and keys select too."""
    shares = []
    exact = indexer.index_decode
    dtype = torch.float8_e4m3fn

    def both(
        q: torch.Tensor, pages: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, table: torch.Tensor, topk: int,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        indices = exact(q, pages, weights, ends, table, topk, **options)
        narrow_q, narrow_weights = fp8_index.queries(q, weights, dtype)
        kept, layout = fp8_index.keys(pages[0], dtype)[:, None], fp8_index.layout(dtype, q.shape[-1])
        each = torch.arange(kept.shape[0], dtype=torch.int32, device=q.device)[None]
        own = options | {"layout": layout, "out": None}
        narrow = exact(narrow_q, kept, narrow_weights, ends, each, topk, **own)
        selected = set(indices[0].tolist()) - {-1}
        shares.append(len(selected & set(narrow[0].tolist())) / max(1, len(selected)))
        return indices

    with mock.patch.object(indexer, "index_decode", both):
        generate(model, sequences, cache, PROFILED_TOKENS)
    return shares


@contextlib.contextmanager
def stage_ranges(model: Any) -> Iterator[None]:
    """Profiler ranges `stage::<name>` round the modules of stock attention; the innermost one counts."""
    handles = []
    for layer in model.model.layers:
        attention = layer.self_attn
        stages = {attention: "sparse_mla", attention.indexer: "score"}
        stages |= {
            module: "rest"
            for name, module in [*attention.named_children(), *attention.indexer.named_children()]
            if name not in ("indexer", "kv_b_proj")  # kv_b_proj is what expands the latents
        }
        for module, stage in stages.items():
            span = Span(f"stage::{stage}")
            handles += [module.register_forward_pre_hook(span.enter), module.register_forward_hook(span.leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Span:
    """A profiler range that a module's hooks enter and leave."""

    def __init__(self, name: str) -> None:
        self.name = name

    def enter(self, _module: Any, _args: Any) -> None:
        """Before the module's forward."""
        self.range = torch.profiler.record_function(self.name)
        self.range.__enter__()

    def leave(self, _module: Any, _args: Any, _out: Any) -> None:
        """After it."""
        self.range.__exit__(None, None, None)
