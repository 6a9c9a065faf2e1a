"""How time is taken: the same inputs for every variant, variants interleaved, median and spread.

On a CPU a sample is one call. Inputs rotate (a repeated row is learnt by the branch predictor), every round runs every
variant once, in another order and on another input each, so that all of them find the caches in the same state.

On a GPU a sample is one replay of a CUDA graph of up to 20 launches, event to event, and the time of a launch is the
replay's over the launches. Variants are interleaved replay by replay. Modes:
  cold      inputs rotate inside the graph, and 256 MiB of foreign memory are touched before each replay, outside the
            timed region, so that the L2 cache holds foreign lines
  warm      every launch reads the same input, and an untimed replay goes before each timed one
  producer  a copy writes the scores before each launch; the time is that of copy and launch less that of copies alone,
            measured beside it; the L2 cache as in cold
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

MODES = ("cold", "warm", "producer")
GRAPH_LAUNCHES = 20
GRAPH_BYTES = 20e9  # read by one graph at most, though every graph has two launches
PAIRS = 10  # of copy and launch, in producer mode
FOREIGN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to time: `launch(i)` runs it once on input i. Nothing in it may synchronise."""

    name: str
    launch: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of one launch: the median and the 20th and 80th percentile of `rounds` samples."""

    us: float
    p20_us: float
    p80_us: float
    rounds: int
    launches: int  # in a sample

    @classmethod
    def of(cls, samples: Sequence[float], launches: int) -> "Time":
        """From samples in microseconds, each of `launches` launches."""
        p20, median, p80 = (float(p) / launches for p in np.percentile(samples, (20, 50, 80)))
        return cls(round(median, 3), round(p20, 3), round(p80, 3), len(samples), launches)


class Clock(Protocol):
    """Runs and times variants on the inputs 0 .. inputs - 1."""

    device: torch.device
    mode: str
    inputs: int

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Everything that is timed, and the making of its inputs, happens inside this."""

    def use(self, inputs: int, read_bytes: int, produce: Callable[[int], object] | None) -> None:
        """Turn to a case: its inputs, the bytes that one launch reads, what writes the scores in producer mode."""

    def forget(self) -> None:
        """Give back what the case held."""

    def replay(self, variant: Variant) -> None:
        """Run `variant` once on every input that is timed, as it is timed, and wait for it."""

    def glance(self, variant: Variant) -> float:
        """A rough time in microseconds, to choose between variants of which one will be measured."""

    def measure(self, variants: Sequence[Variant]) -> dict[str, Time]:
        """Times by name."""


class CpuClock:
    """Calls, one by one. What writes the scores in producer mode runs before each call, untimed."""

    def __init__(self, mode: str, seconds: float) -> None:
        self.device = torch.device("cpu")
        self.mode = mode
        self.inputs = 1
        self._seconds = seconds
        self._produce: Callable[[int], object] | None = None

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to enter."""
        return contextlib.nullcontext()

    def use(self, inputs: int, read_bytes: int, produce: Callable[[int], object] | None) -> None:  # noqa: ARG002
        """Bytes do not matter here: a sample is one call."""
        self.inputs = 1 if self.mode == "warm" else inputs
        self._produce = produce

    def forget(self) -> None:
        """Drop what writes the scores."""
        self._produce = None

    def replay(self, variant: Variant) -> None:
        """One call per input."""
        for i in range(self.inputs):
            self._sample(variant, i)

    def glance(self, variant: Variant) -> float:
        """The median of nine calls."""
        self._sample(variant, 0)
        return float(np.median([self._sample(variant, i % self.inputs) for i in range(1, 10)]))

    def measure(self, variants: Sequence[Variant]) -> dict[str, Time]:
        """15 to 400 rounds, as many as the seconds allow."""
        began = time.perf_counter()
        for variant in variants:
            self._sample(variant, 0)
        rounds = _rounds(self._seconds, time.perf_counter() - began, 15, 400)
        samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
        order, shuffle = list(enumerate(variants)), random.Random(0)  # noqa: S311 - an order, not a secret
        for number in range(rounds):
            shuffle.shuffle(order)
            for place, variant in order:
                i = (number + place * self.inputs // len(variants)) % self.inputs
                samples[variant.name].append(self._sample(variant, i))
        return {name: Time.of(times, 1) for name, times in samples.items()}

    def _sample(self, variant: Variant, i: int) -> float:
        if self._produce is not None:
            self._produce(i)
        began = time.perf_counter_ns()
        variant.launch(i)
        return (time.perf_counter_ns() - began) / 1e3


class GpuClock:
    """Graph replays, on a stream of its own: a graph cannot be captured on the default stream."""

    def __init__(self, device: torch.device, mode: str, seconds: float) -> None:
        self.device = device
        self.mode = mode
        self.inputs = 1
        self._seconds = seconds
        self._produce: Callable[[int], object] | None = None
        self._launches = GRAPH_LAUNCHES
        self._stream = torch.cuda.Stream(device)
        self._foreign = torch.zeros(FOREIGN_BYTES // 4, dtype=torch.int32, device=device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Make the clock's stream the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def use(self, inputs: int, read_bytes: int, produce: Callable[[int], object] | None) -> None:
        """Bytes set how many launches a graph has."""
        most = GRAPH_LAUNCHES if produce is None else PAIRS
        self._launches = max(2, min(most, int(GRAPH_BYTES / max(read_bytes, 1))))
        self.inputs = 1 if self.mode == "warm" else min(inputs, self._launches)
        self._produce = produce

    def forget(self) -> None:
        """Drop the graphs and hand unused memory back, which the next case needs in other sizes."""
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self._produce = None
        torch.cuda.empty_cache()

    def replay(self, variant: Variant) -> None:
        """One graph replay."""
        self._graph(variant).replay()
        torch.cuda.synchronize(self.device)

    def glance(self, variant: Variant) -> float:
        """The median of three replays, one dropped before; its graph is dropped after."""
        self._round([variant])
        us = float(np.median([self._round([variant])[0] for _ in range(3)])) / self._launches
        del self._graphs[variant.name]
        return us

    def measure(self, variants: Sequence[Variant]) -> dict[str, Time]:
        """7 to 40 rounds, as many as the seconds allow, after three that are dropped."""
        timed = list(variants)
        if self._produce is not None:
            timed.append(Variant("copies alone", lambda _: None))
        for _ in range(2):
            self._round(timed)
        began = time.perf_counter()
        self._round(timed)
        rounds = _rounds(self._seconds, time.perf_counter() - began, 7, 40)
        samples = np.array([self._round(timed) for _ in range(rounds)])  # [rounds, variants]
        if self._produce is not None:
            samples = samples[:, :-1] - samples[:, -1:]
        return {v.name: Time.of(samples[:, n].tolist(), self._launches) for n, v in enumerate(variants)}

    def _round(self, variants: Sequence[Variant]) -> list[float]:
        """One replay of each, in microseconds.

        What goes before each (foreign memory touched, or an untimed replay) also keeps the GPU busy until the host has
        queued the timed replay behind it.
        """
        graphs = [self._graph(variant) for variant in variants]
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in variants]
        for graph, (start, stop) in zip(graphs, pairs, strict=True):
            if self.mode == "warm":
                graph.replay()
            else:
                self._foreign.add_(1)
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]

    def _graph(self, variant: Variant) -> torch.cuda.CUDAGraph:
        if variant.name not in self._graphs:
            self._run(variant, 1)  # compiles and loads what a capture must not
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                self._run(variant, self._launches)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to hear about
                    graph.capture_end()
                raise
            graph.capture_end()
            self._graphs[variant.name] = graph
        return self._graphs[variant.name]

    def _run(self, variant: Variant, launches: int) -> None:
        for launch in range(launches):
            i = launch % self.inputs
            if self._produce is not None:
                self._produce(i)
            variant.launch(i)


C = TypeVar("C", bound="Named")


class Named(Protocol):
    """A case of a benchmark, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What a record calls it."""


def clock_of(device: torch.device, mode: str, seconds: float) -> Clock:
    """The clock of a device, for about `seconds` a case."""
    return CpuClock(mode, seconds) if device.type == "cpu" else GpuClock(device, mode, seconds)


def run_cases(
    cases: Sequence[C],
    clock: Clock,
    measure: Callable[[C], dict[str, Any]],
    done: Callable[[C, dict[str, Any]], None] | None,
) -> dict[str, dict[str, Any]]:
    """What `measure` finds of each case, by its name, given to `done` as soon as it is there; too little memory is a
    fault of the case.
    """
    entries: dict[str, dict[str, Any]] = {}
    with torch.no_grad(), clock.stream():
        for case in cases:
            try:
                entries[case.name] = measure(case)
            except torch.OutOfMemoryError as error:
                entries[case.name] = {**asdict(case), "fault": f"out of memory: {error}"}
            clock.forget()
            if done is not None:
                done(case, entries[case.name])
    return entries


def time_right(
    clock: Clock,
    variants: Sequence[Variant],
    check: Callable[[Variant], str | None],
    entry: Callable[[Time], dict[str, Any]],
    beside: Sequence[Variant] = (),
) -> tuple[dict[str, dict[str, Any]], dict[str, Time]]:
    """Time what `check` finds right before and after; return the entries by name, and all times.

    check   runs a variant over poison and says what is wrong with its results, or None; what it raises is wrong too
    entry   what a record says of a time; a variant that is wrong gets its fault instead
    beside  timed with them, and not checked here
    """
    found = {variant.name: _looked_at(check, variant) for variant in variants}
    times = clock.measure([*(variant for variant in variants if found[variant.name] is None), *beside])
    results: dict[str, dict[str, Any]] = {}
    for variant in variants:
        fault = found[variant.name]
        if fault is None and (later := _looked_at(check, variant)) is not None:
            fault = f"after timing: {later}"
        results[variant.name] = entry(times[variant.name]) if fault is None else {"checked": False, "fault": fault}
    return results, times


def _looked_at(check: Callable[[Variant], str | None], variant: Variant) -> str | None:
    try:
        return check(variant)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kernel or peer: it goes into the record and sets the exit code
        return f"{type(error).__name__}: {error}"


def rates(time: Time, read_bytes: int, operations: int) -> dict[str, Any]:
    """A time as an entry of a record, with what it means in bytes and operations."""
    us = max(time.us, 1e-3)
    return {
        **asdict(time),
        "gbps": round(read_bytes / us / 1e3, 2),
        "tflops": round(operations / us / 1e6, 3),
        "checked": True,
    }


def sampled(rows: int, most: int = 8) -> list[int]:
    """The rows that are looked at, spread from the first to the last."""
    found: list[int] = torch.linspace(0, rows - 1, min(rows, most)).long().tolist()
    return found


def _rounds(seconds: float, one_round: float, least: int, most: int) -> int:
    return max(least, min(most, int(seconds / max(one_round, 1e-6))))
