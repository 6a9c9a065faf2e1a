"""`keysift bench sparse_mla`: what is wrong gets no time, and the record says what was timed."""

import dataclasses
import sys

import pytest
import torch
from typer.testing import CliRunner

from keysift import dispatch
from keysift.benchmarks import app, bench_sparse_mla, record, report
from keysift.ops.sparse_mla import api, reference
from packages import FlashMLA

CPU = torch.device("cpu")
SMALL = bench_sparse_mla.Case("decode", 3, 200, 2, 40)
runner = CliRunner()
pytestmark = pytest.mark.usefixtures("fresh_choices")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "e4m3fn"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_case_is_checked_and_timed(phase, dtype):
    case = dataclasses.replace(SMALL, phase=phase, dtype=dtype)
    entry = bench_sparse_mla.run([case], CPU, kernels=["cpu", "reference"], seconds=0.01)[case.name]
    for name in ("cpu", "reference"):
        assert entry["kernels"][name]["checked"], entry["kernels"][name]
        assert entry["kernels"][name]["us"] > 0
    assert entry["operations"] == 2 * 3 * 2 * 40 * (576 + 512)
    assert entry["read_bytes"] == 3 * 40 * {"float32": 2304, "bfloat16": 1152, "float16": 1152, "e4m3fn": 656}[dtype]
    assert entry["chosen"] == entry["chosen_with_workspace"] == "cpu"


def test_slots_are_different_and_of_the_request():
    call = bench_sparse_mla.build(dataclasses.replace(SMALL, dtype="float32"), CPU, 0)
    pages = [set((row // 64).tolist()) for row in call.indices]
    assert all(len(row.unique()) == 40 for row in call.indices)
    assert not pages[0] & pages[1] | pages[0] & pages[2] | pages[1] & pages[2]


def wrong_by_a_little(q, kv, scales, rope, indices, scale, sink, lengths, out, lse, workspace):
    reference.run(q, kv, scales, rope, indices, scale * 1.001, sink, lengths, out, lse, workspace)


def without_lse(q, kv, scales, rope, indices, scale, sink, lengths, out, lse, workspace):
    reference.run(q, kv, scales, rope, indices, scale, sink, lengths, out, torch.empty_like(lse), workspace)


def fails(*_):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wrong_by_a_little, "times as far from float64"),
        (without_lse, "lse is inf times as far"),
        (fails, "RuntimeError: no such luck"),
    ],
)
def test_a_kernel_that_is_wrong_gets_no_time(monkeypatch, kernel, message):
    load = dispatch._load
    monkeypatch.setattr(dispatch, "_load", lambda entry: kernel if "sparse_mla" in entry else load(entry))
    case = dataclasses.replace(SMALL, dtype="float32")
    found = bench_sparse_mla.run([case], CPU, seconds=0.01)[case.name]["kernels"]["cpu"]
    assert "us" not in found
    assert message in found["fault"]
    done = runner.invoke(app, ["sparse_mla", "--rows", "2", "--columns", "80", "--k", "9", "--seconds", "0.01"])
    assert done.exit_code == 1
    assert "no time" in done.output


@pytest.mark.parametrize(("phase", "dtype"), [("decode", "e4m3fn"), ("prefill", "bfloat16")])
def test_flash_mla_is_timed_beside(monkeypatch, phase, dtype):
    def unmet(problem):
        return [reason for reason in api._unmet_flash_mla(problem) if not reason.startswith("device")]

    monkeypatch.setattr(dispatch, "_is_installed", lambda package: True)
    rows = [dataclasses.replace(row, unmet=unmet) if row.name == "flash_mla" else row for row in api.KERNELS]
    monkeypatch.setattr(api, "KERNELS", tuple(rows))
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMLA())
    monkeypatch.setattr(FlashMLA, "PLANS_LAST", True)
    case = bench_sparse_mla.Case(phase, 2, 192, 64, 128, dtype)
    entry = bench_sparse_mla.run([case], CPU, kernels=["cpu"], seconds=0.01)[case.name]
    assert entry["others"]["flash_mla alone"]["checked"], entry["others"]
    assert set(sys.modules["flash_mla"].seen) == {phase}


def test_the_recorded_times_are_those_of_the_cases_of_a_gpu():
    names = {case.name for case in bench_sparse_mla.case_set(torch.device("cuda"))}
    assert set(bench_sparse_mla.FLASH_MLA_H200) <= names
    assert len(names) == len(bench_sparse_mla.FLASH_MLA_H200) + 2  # 16 heads, which it does not take


def test_the_table_compares_with_what_is_recorded():
    (name, us), *_ = bench_sparse_mla.FLASH_MLA_H200.items()
    made = record.new(CPU, "cold", stage="sparse_mla")
    time = {"us": us / 2, "p20_us": 1.0, "p80_us": 2.0, "gbps": 1.0, "tflops": 1.0, "checked": True}
    made |= {"device": "NVIDIA H200", "cases": {name: {"kernels": {"triton": time}, "others": {}}}}
    table = report.sparse_mla_table(made)
    assert [column.header for column in table.columns][-1] == "flash_mla"
    assert list(table.columns[-1].cells) == ["2.00"]


def test_the_command_writes_a_record(tmp_path):
    path = tmp_path / "record.json"
    arguments = ["--rows", "2", "--columns", "80", "--k", "9", "--heads", "2", "--seconds", "0.01", "--json", str(path)]
    done = runner.invoke(app, ["sparse_mla", *arguments])
    assert done.exit_code == 0, done.output
    assert list(record.read(path, "sparse_mla")["cases"]) == ["decode-2x80-h2-k9-bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "3"], "go together"),
        (["--rows", "0", "--columns", "9", "--k", "3"], "at least 1"),
        (["--rows", "1", "--columns", "9"], "at least --k"),
        (["--kernel", "fast"], "--kernel is 'fast'"),
    ],
)
def test_options_that_do_not_fit(arguments, message):
    done = runner.invoke(app, ["sparse_mla", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
