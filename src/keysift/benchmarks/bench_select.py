"""select on this machine: check, time, check again; a time is only ever given for a result that was right twice."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from keysift.benchmarks import floor, selectors
from keysift.benchmarks.cases import DTYPES, Case
from keysift.benchmarks.check import POISON, Expected, expect, fault
from keysift.benchmarks.harness import Clock, Time, clock_of, run_cases
from keysift.benchmarks.selectors import Selector

POOL_INPUTS = 20
POOL_BYTES = {"cpu": 128 << 20, "cuda": 8 << 30}
Entry = dict[str, Any]


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    mode: str = "cold",
    kernels: Sequence[str] = (),
    seconds: float = 1.5,
    done: Callable[[Case, Entry], None] | None = None,
) -> dict[str, Entry]:
    """Time `cases` and return their entries by name, each of them given to `done` as soon as it is there.

    mode     one of harness.MODES
    kernels  kernels of ours by name; the one that the dispatch chooses where none is given
    seconds  of measuring per case, about, checks and warm-up apart
    """
    clock = clock_of(device, mode, seconds)
    floors: dict[tuple[str, int, int, str], str] = {}
    return run_cases(cases, clock, lambda case: run_case(case, clock, kernels, floors), done)


def run_case(case: Case, clock: Clock, kernels: Sequence[str], floors: dict[tuple[str, int, int, str], str]) -> Entry:
    """One case: everything that was measured on it. `floors` remembers by shape which way to read was the fastest."""
    ends = case.ends(clock.device)
    pool = [case.scores(clock.device, number) for number in range(_pool_inputs(case, clock.device))]
    inputs, produce = pool, None
    if clock.mode == "producer":
        inputs = [torch.empty_like(pool[0])] * len(pool)
        produce = _copies(pool, inputs[0])
    read_bytes = int(ends.sum()) * pool[0].element_size()
    clock.use(len(pool), read_bytes, produce)
    expected = [expect(scores, ends, case.k) for scores in pool[: clock.inputs]]

    chosen = selectors.chosen_kernel(pool[0], case.k)
    entry: Entry = {**asdict(case), "read_bytes": read_bytes, "inputs": clock.inputs, "chosen": chosen}
    results: dict[str, Entry] = {}
    right: list[Selector] = []
    for name, maker in selectors.makers(case, inputs, ends, kernels or (chosen,)).items():
        selector, problem = _attempt(maker, clock, expected)
        if selector is None:
            results[name] = {"checked": False, "fault": problem}
        else:
            right.append(selector)

    shape = (case.phase, case.rows, case.columns, case.dtype)
    ways = [way for way in floor.ways_to_read(inputs, ends) if way.name == floors.get(shape, way.name)]
    way = floor.fastest(clock, ways)
    floors[shape] = way.name
    times = clock.measure([*right, way])
    for selector in right:
        problem = _check(clock, selector, expected)
        results[selector.name] = _entry(times[selector.name], read_bytes) if problem is None else {
            "checked": False, "fault": f"after timing: {problem}",
        }  # fmt: skip
    ours = {name: results.pop(name) for name in kernels or (chosen,)}
    return {
        **entry,
        "kernels": ours,
        "others": results,
        "floor": {"how": way.name, **_entry(times[way.name], read_bytes)},
    }


def faults(entry: Entry) -> list[str]:
    """What went wrong with our own kernels in a case."""
    found = [entry["fault"]] if "fault" in entry else []
    return found + [f"{name}: {e['fault']}" for name, e in entry.get("kernels", {}).items() if not e["checked"]]


def _attempt(
    maker: Callable[[], Selector], clock: Clock, expected: Sequence[Expected]
) -> tuple[Selector | None, str | None]:
    """A selector that gives the right results, or why there is none."""
    try:
        selector = maker()
        clock.replay(selector)
        problem = _check(clock, selector, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kernel or peer: it goes into the record and sets the exit code
        return None, f"{type(error).__name__}: {error}"
    return (selector, None) if problem is None else (None, problem)


def _check(clock: Clock, selector: Selector, expected: Sequence[Expected]) -> str | None:
    """Run once more over poisoned results, as it is timed, and look at every input's."""
    for result in selector.results.values():
        result.fill_(POISON)
    clock.replay(selector)
    for i, right in enumerate(expected):
        if problem := fault(selector.results[i], right, is_ours=selector.is_ours):
            return f"input {i}: {problem}"
    return None


def _entry(time: Time, read_bytes: int) -> Entry:
    return {**asdict(time), "gbps": round(read_bytes / max(time.us, 1e-3) / 1e3, 2), "checked": True}


def _pool_inputs(case: Case, device: torch.device) -> int:
    size = case.rows * case.columns * DTYPES[case.dtype].itemsize
    if device.type == "cpu":
        return max(3, min(POOL_INPUTS, POOL_BYTES["cpu"] // size))
    free = torch.cuda.mem_get_info(device)[0]
    return max(1, min(POOL_INPUTS, min(POOL_BYTES["cuda"], free // 4) // size))


def _copies(pool: Sequence[torch.Tensor], target: torch.Tensor) -> Callable[[int], object]:
    return lambda i: target.copy_(pool[i])
