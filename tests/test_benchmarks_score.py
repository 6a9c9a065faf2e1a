"""`keysift bench score` and `index`: what is wrong gets no time, and the record says what was timed."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from keysift import dispatch, indexer
from keysift.benchmarks import app, bench_index, bench_score, harness, record
from keysift.ops.score import reference
from packages import DeepGemm

CPU = torch.device("cpu")
runner = CliRunner()
pytestmark = pytest.mark.usefixtures("fresh_choices")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "e4m3fn"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_case_of_score_is_checked_and_timed(phase, dtype):
    case = bench_score.Case(phase, 3, 150, 4, 16, dtype)
    entry = bench_score.run([case], CPU, kernels=["cpu", "reference"], seconds=0.01)[case.name]
    for name in ("cpu", "reference"):
        assert entry["kernels"][name]["checked"], entry["kernels"][name]
        assert entry["kernels"][name]["us"] > 0
    assert entry["operations"] == 2 * 4 * 16 * case.cells
    assert ("floor" in entry) == (phase == "decode")
    if phase == "decode":
        assert case.read_bytes == 3 * 150 * {"float32": 64, "bfloat16": 32, "e4m3fn": 20}[dtype]
    else:
        assert case.cells == 148 + 149 + 150


def test_a_table_wider_than_the_keys():
    case = bench_score.Case("decode", 2, 100, 4, 16, "float32", width=1000)
    assert case.name == "decode-2x100-h4-float32-in1000"
    assert bench_score.build(case, CPU, 0).out.shape == (2, 1024)
    assert bench_score.run([case], CPU, seconds=0.01)[case.name]["kernels"]["cpu"]["checked"]


def wrong_by_a_little(q, k, k_scale, weights, starts, ends, next_n, table, out):
    reference.run(q, k, k_scale, weights * 1.001, starts, ends, next_n, table, out)


def beyond_the_end(q, k, k_scale, weights, starts, ends, next_n, table, out):
    reference.run(q, k, k_scale, weights, starts, ends, next_n, table, out)
    out[0, -1] = 0.0


def fails(*_):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wrong_by_a_little, "times as far from float64"),
        (beyond_the_end, "a cell beyond its end was written"),
        (fails, "RuntimeError: no such luck"),
    ],
)
def test_a_kernel_of_score_that_is_wrong_gets_no_time(monkeypatch, kernel, message, tmp_path):
    monkeypatch.setattr(dispatch, "_load", lambda entry: kernel)
    case = bench_score.Case("prefill", 3, 150, 4, 16, "float32")
    found = bench_score.run([case], CPU, seconds=0.01)[case.name]["kernels"]["cpu"]
    assert "us" not in found
    assert message in found["fault"]
    done = runner.invoke(app, ["score", "--phase", "prefill", "--rows", "3", "--columns", "150", "--seconds", "0.01"])
    assert done.exit_code == 1
    assert "no time" in done.output


def test_the_recorded_times_are_those_of_the_cases_of_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "device_of", lambda _: dispatch.parse_device("cuda:sm_90"))
    names = {case.name for case in bench_score.case_set(torch.device("cuda"))}
    assert set(bench_score.DEEP_GEMM_H200) <= names
    tokens = {case.rows for case in bench_index.case_set(torch.device("cuda")) if case.ratio == 4}
    assert tokens == set(bench_index.STREAM_INDEX_H200)


def test_cases_of_index_are_checked_and_timed(tmp_path):
    cases = [
        bench_index.Case("decode", 2, 200, 12, 4, 16, "e4m3fn"),
        bench_index.Case("prefill", 90, 22, 12, 4, 16, "bfloat16", ratio=4, memory_budget=80),
        bench_index.Case("prefill", 40, 40, 12, 4, 16, "float32"),
    ]
    for case, entry in zip(cases, bench_index.run(cases, CPU, seconds=0.01).values(), strict=True):
        assert entry.get("checked"), entry
        assert entry["index"]["us"] > 0
        assert set(entry.get("stages", {})) == ({"score", "select"} if case.phase == "decode" else set())


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_an_index_that_selects_other_keys_gets_no_time(monkeypatch, phase):
    select = indexer.select

    def worst(scores, topk, **options):
        return select(-scores, topk, **options)

    monkeypatch.setattr(indexer, "select", worst)
    case = bench_index.Case(phase, 50, 50, 12, 4, 16, "float32")
    entry = bench_index.run([case], CPU, seconds=0.01)[case.name]
    assert "index" not in entry
    assert "best keys" in entry["fault"]


def test_the_commands_write_records(tmp_path):
    for arguments in (
        ["score", "--rows", "2", "--columns", "80", "--heads", "2"],
        ["index", "--rows", "2", "--columns", "80", "--k", "9", "--heads", "2"],
        ["index", "--phase", "prefill", "--rows", "80", "--ratio", "4", "--k", "9", "--heads", "2"],
    ):
        path = tmp_path / "record.json"
        done = runner.invoke(app, [*arguments, "--seconds", "0.01", "--json", str(path)])
        assert done.exit_code == 0, done.output
        written = record.read(path, arguments[0])
        assert len(written["cases"]) == 1
        assert next(iter(written["cases"])).split("-")[1] in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "--rows", "3"], "go together"),
        (["score", "--rows", "0", "--columns", "9"], "at least 1"),
        (["score", "--phase", "prefill", "--rows", "10", "--columns", "9"], "no more rows than keys"),
        (["score", "--kernel", "fast"], "--kernel is 'fast'"),
        (["index", "--rows", "3"], "go together"),
        (["index", "--phase", "prefill", "--rows", "3", "--columns", "9"], "go together"),
        (["index", "--phase", "prefill", "--rows", "3", "--ratio", "4"], "at least 1"),
    ],
)
def test_options_that_do_not_fit(arguments, message):
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_deep_gemm_is_called_as_it_wants_to_be(monkeypatch, phase):
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm())
    case = bench_score.Case(phase, 3, 150, 4, 16, "e4m3fn")
    calls = [bench_score.build(case, CPU, 0)]
    clock = harness.CpuClock("cold", 0.01)
    variant, given = bench_score._deep_gemm(calls), {}
    assert bench_score._check(case, calls, clock, variant, given) is None
    assert bench_score._check(case, calls, clock, variant, given) is None
    assert sys.modules["deep_gemm"].seen == [phase, phase]
