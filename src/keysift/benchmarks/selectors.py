"""What is timed beside each other: kernels of ours, torch.topk as it is and as a generic fallback uses it, peers.

A peer is a function of an installed package; to add one is a line in PEERS.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from keysift import dispatch
from keysift.benchmarks.cases import Case
from keysift.benchmarks.harness import Variant
from keysift.ops.select import api

Select = Callable[[torch.Tensor], torch.Tensor]  # scores [R, N] -> indices


@dataclass(frozen=True, slots=True)
class Selector(Variant):
    """A variant whose results can be looked at: `results[i]` is that of input i, once it has run."""

    results: dict[int, torch.Tensor]
    is_ours: bool = False


def chosen_kernel(scores: torch.Tensor, k: int) -> str:
    """The name of the kernel that the dispatch takes."""
    return dispatch.choose("select", api.KERNELS, api._problem(scores, k)).name  # noqa: SLF001 - the call's own facts


def kernel(name: str, case: Case, inputs: list[torch.Tensor], ends: torch.Tensor) -> Selector:
    """A kernel of ours as an engine calls it, with everything allocated beforehand. Raises what `select` raises."""
    size = api.select_workspace_size(inputs[0], case.k, kernel=name)
    workspace = torch.empty(size, dtype=torch.uint8, device=ends.device)
    starts = torch.zeros_like(ends)
    out = {i: torch.empty((case.rows, case.k), dtype=torch.int32, device=ends.device) for i in range(len(inputs))}

    def decode(i: int) -> object:
        return api.select_decode(inputs[i], case.k, ends, 1, out[i], workspace=workspace, kernel=name)

    def prefill(i: int) -> object:
        return api.select_prefill(inputs[i], case.k, starts, ends, out[i], workspace=workspace, kernel=name)

    return Selector(name, decode if case.phase == "decode" else prefill, out, is_ours=True)


def fallback(case: Case, ends: torch.Tensor) -> Select:
    """`torch.topk` as a generic fallback uses it: mask outside the window, top-k, cast, -1. Lengths change with every
    step, so the mask is part of it; where the data hold NaN they are masked as well, or the result would be wrong.
    """
    column = torch.arange(case.columns, device=ends.device)

    def run(scores: torch.Tensor) -> torch.Tensor:
        masked = column >= ends[:, None]
        if case.has_nan:
            masked |= scores.isnan()
        return topk(scores, masked, case.k)

    return run


def topk(scores: torch.Tensor, masked: torch.Tensor, k: int) -> torch.Tensor:
    """What every generic fallback does once it knows what is outside: mask, top-k, cast, -1. int32 [R, min(k, N)]."""
    values, indices = scores.masked_fill(masked, -torch.inf).topk(min(k, scores.shape[1]), sorted=False)
    return indices.int().masked_fill_(values == -torch.inf, -1)


def plain_is_right(case: Case) -> bool:
    """Whether `torch.topk` alone is a selection at all: whole rows of at least k columns, no NaN."""
    return case.phase == "decode" and not case.has_nan and case.k <= case.columns


def _flashinfer(case: Case, ends: torch.Tensor) -> Select:
    transform = importlib.import_module("flashinfer").top_k_ragged_transform
    offsets = torch.zeros_like(ends)
    return lambda scores: transform(scores, offsets, ends, case.k)


#: GPU only; name: (the package it needs, what makes its function).
PEERS: dict[str, tuple[str, Callable[[Case, torch.Tensor], Select]]] = {
    "flashinfer": ("flashinfer", _flashinfer),
}


def makers(
    case: Case, inputs: list[torch.Tensor], ends: torch.Tensor, kernels: Sequence[str]
) -> dict[str, Callable[[], Selector]]:
    """What is timed for a case, by name: `kernels` of ours, and everything of others that this machine has."""
    made: dict[str, Callable[[], Selector]] = {
        name: functools.partial(kernel, name, case, inputs, ends) for name in kernels
    }
    made["fallback"] = lambda: _wrap("fallback", fallback(case, ends), inputs)
    if ends.device.type == "cpu":
        if plain_is_right(case):
            made["topk"] = lambda: _wrap("topk", lambda scores: scores.topk(case.k, sorted=False).indices, inputs)
        return made
    for name, (package, peer) in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            made[name] = functools.partial(_wrap_peer, name, peer, case, inputs, ends)
    return made


def _wrap_peer(
    name: str,
    peer: Callable[[Case, torch.Tensor], Select],
    case: Case,
    inputs: list[torch.Tensor],
    ends: torch.Tensor,
) -> Selector:
    return _wrap(name, peer(case, ends), inputs)


def _wrap(name: str, function: Select, inputs: list[torch.Tensor]) -> Selector:
    results: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        results[i] = function(inputs[i])

    return Selector(name, launch, results)
