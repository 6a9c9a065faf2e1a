"""The benchmark times what is right and nothing else: kernels and floors that are wrong in known ways."""

import pathlib
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from keysift.benchmarks import app, bench_select, floor, harness, record
from keysift.benchmarks.cases import Case
from keysift.benchmarks.check import expect, fault
from keysift.dispatch import Kernel
from keysift.ops.select import api, reference

CPU = torch.device("cpu")
SMALL = Case("decode", 5, 300, 16)


def entry_of(case=SMALL, mode="cold", kernels=()):
    return bench_select.run([case], CPU, mode=mode, kernels=kernels, seconds=0.01)[case.name]


@pytest.fixture
def plant(monkeypatch, fresh_choices):
    """Put a kernel first in the table: the reference, then `spoil(call number, scores, indices)`."""

    def planted(spoil):
        calls = []

        def run(scores, *rest):
            reference.run(scores, *rest)
            calls.append(None)
            spoil(len(calls), scores, rest[9])

        monkeypatch.setitem(sys.modules, "planted_kernel", types.SimpleNamespace(run=run))
        kernel = Kernel("planted", lambda problem: [], "planted_kernel:run")
        monkeypatch.setattr(api, "KERNELS", (kernel, *api.KERNELS))
        return calls

    return planted


@pytest.mark.parametrize("mode", harness.MODES)
@pytest.mark.parametrize(
    "case", [SMALL, Case("prefill", 40, 30, 16, "nan1"), Case("decode", 2, 9, 16, "relu", "bfloat16")]
)
def test_everything_timed_was_checked(case, mode):
    entry = entry_of(case, mode)
    assert bench_select.faults(entry) == []
    assert list(entry["kernels"]) == [entry["chosen"]]
    assert ("topk" in entry["others"]) == (case == SMALL)
    timed = [*entry["kernels"].values(), *entry["others"].values(), entry["floor"]]
    for time in timed:
        assert time["checked"] is True
        assert 0 < time["p20_us"] <= time["us"] <= time["p80_us"]
        assert time["rounds"] >= 15
        assert time["gbps"] == pytest.approx(entry["read_bytes"] / time["us"] / 1e3, abs=0.01)


SPOILED = {
    "an index outside the window": lambda out: out[2, :1].fill_(300),
    "unwritten": lambda out: out[4, 7:].fill_(0x7F7F7F7F),
    "an index twice": lambda out: out[0, 1].copy_(out[0, 0]),
    "too few": lambda out: out[1, -1:].fill_(-1),
    "other values": lambda out: out[3, 0].copy_(next(i for i in range(300) if i not in out[3].tolist())),
    "-1 before an index": lambda out: out[1].copy_(out[1].flip(0)),
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("calls_that_are_right", [0, 40])
def test_a_wrong_result_gets_no_time(plant, kind, calls_that_are_right):
    """Wrong from the first call on, or only after the check that goes before the timing."""
    case = Case("decode", 5, 300, 16 if kind != "-1 before an index" else 301)
    calls = plant(lambda number, scores, out: SPOILED[kind](out) if number > calls_that_are_right else None)
    entry = entry_of(case)
    assert entry["chosen"] == "planted"
    assert set(entry["kernels"]["planted"]) == {"checked", "fault"}
    assert entry["kernels"]["planted"]["checked"] is False
    assert entry["kernels"]["planted"]["fault"].startswith("after timing" if calls_that_are_right else "input 0: row")
    assert len(calls) > calls_that_are_right
    assert len(bench_select.faults(entry)) == 1
    assert entry["others"]["fallback"]["checked"] is True


def test_ties_taken_from_the_other_end_get_no_time(plant):
    """The values are right: only the set shows it."""
    plant(lambda number, scores, out: out.copy_((300 - 16 + torch.arange(16)).expand_as(out)))
    found = entry_of(Case("decode", 5, 300, 16, "equal"))["kernels"]["planted"]
    assert found["fault"] == "input 0: row 0 selects other columns than the reference"


def test_a_kernel_that_raises_is_recorded(plant):
    def fail(number, scores, out):
        raise RuntimeError("no luck")

    plant(fail)
    assert entry_of()["kernels"]["planted"] == {"checked": False, "fault": "RuntimeError: no luck"}


def test_a_wrong_result_exits_1_and_prints_no_time(plant, tmp_path):
    plant(lambda number, scores, out: out[0, 0].fill_(-5))
    shape = ["--rows", "5", "--columns", "300", "--k", "16", "--seconds", "0.01", "--device", "cpu"]
    result = CliRunner().invoke(app, ["select", *shape, "--json", str(tmp_path / "record.json")])
    assert result.exit_code == 1
    assert "wrong" in result.output
    assert "no time" in result.output
    assert "us" not in record.read(tmp_path / "record.json")["cases"][SMALL.name]["kernels"]["planted"]


def test_nan_is_not_expected():
    scores = torch.tensor([[torch.nan, 1.0, -torch.inf, 2.0], [-torch.nan, torch.nan, torch.inf, 0.0]])
    expected = expect(scores, torch.tensor([4, 3]), 3)
    assert expected.values.tolist() == [[2.0, 1.0, -torch.inf], [torch.inf, -torch.inf, -torch.inf]]
    assert fault(torch.tensor([[3, 1, -1], [2, -1, -1]]), expected, is_ours=True) is None
    assert "outside the window" in fault(torch.tensor([[3, 1, -1], [2, 3, -1]]), expected, is_ours=False)
    assert "row 0" in fault(torch.tensor([[0, 3, 1], [2, -1, -1]]), expected, is_ours=False)


def test_a_floor_that_reads_too_little_is_refused(monkeypatch):
    def skips_the_last(words, ends, found):
        for row in range(len(ends)):
            found[row, :] = 0
            for word in words[row, : ends[row] - 1]:
                found[row, 0] ^= word

    monkeypatch.setattr(floor, "_cpu_readers", lambda: (skips_the_last, skips_the_last))
    with pytest.raises(RuntimeError, match="serial read floor"):
        floor.ways_to_read([SMALL.scores(CPU, 0)], SMALL.ends(CPU))


def test_the_floor_kernels_compile():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with a CUDA installation")
    from cuda.core import Program, ProgramOptions

    source = pathlib.Path(floor.__file__).with_name("floor.cu").read_text()
    names = [f"select_floor_kernel<{word}, {t}, {u}>" for word, _ in floor.WORDS.values() for t, u in floor.SHAPES]
    for arch in ("sm_80", "sm_90", "sm_100"):
        Program(source, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin", name_expressions=tuple(names))
