"""The benchmark's command, its records, and figures that come from nowhere else."""

import copy
import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from keysift.benchmarks import app, record
from keysift.benchmarks.cases import DATA, SETS, Case, case_set, every
from keysift.ops.select import api

ROOT = pathlib.Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = Case("decode", 5, 300, 16)


def bench(*options):
    return CliRunner().invoke(app, ["select", *options])


def small(*options):
    return bench("--rows", "5", "--columns", "300", "--k", "16", "--seconds", "0.01", "--device", "cpu", *options)


# What is timed


def test_the_118_cases_are_those_that_peers_are_recorded_for():
    peers = record.peers_of({"device": "NVIDIA H200"})
    cases = {case.name: case for case in every()}
    assert len(cases) == len(every()) == 118
    assert cases.keys() == peers.keys()
    for name, case in cases.items():
        assert {key: peers[name][key] for key in ("phase", "rows", "columns", "k", "data")} == {
            key: getattr(case, key) for key in ("phase", "rows", "columns", "k", "data")
        }
    assert record.peers_of({"device": "another card"}) == {}


def test_every_set_has_distinct_cases_of_known_data():
    for name in SETS:
        for device in ("cpu", "cuda"):
            cases = case_set(name, torch.device(device))
            assert cases
            assert len({case.name for case in cases}) == len(cases)
            assert {case.data for case in cases} <= set(DATA)
    promised = {
        Case("decode", *shape, data=data) for shape in ((1, 131072), (64, 32768)) for data in ("normal", "equal")
    }
    assert promised <= set(case_set("default", CPU))


def test_prefill_windows_are_causal_and_never_negative():
    assert Case("prefill", 4, 6).ends(CPU).tolist() == [3, 4, 5, 6]
    assert Case("prefill", 4, 2).ends(CPU).tolist() == [0, 0, 1, 2]
    assert Case("decode", 3, 6).ends(CPU).tolist() == [6, 6, 6]


@pytest.mark.parametrize("data", DATA)
def test_data_are_the_same_in_every_run_and_other_for_every_input(data):
    case = Case("decode", 3, 200, data=data)
    first, again, second = case.scores(CPU, 0), case.scores(CPU, 0), case.scores(CPU, 1)
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))
    assert torch.equal(first, second) == (data == "equal")
    assert first.isnan().any().item() == case.has_nan
    if data == "sorted":
        assert (first.diff(dim=1) >= 0).all()


# The command, its record, and records compared


def test_the_record_says_what_was_measured_where(tmp_path):
    path = tmp_path / "record.json"
    assert small("--json", str(tmp_path / "deeper" / "record.json")).exit_code == 2  # nothing is measured for no folder
    result = small("--json", str(path), "--kernel", "reference", "--kernel", "cpu")
    assert result.exit_code == 0, result.output
    assert SMALL.name in result.output
    made = record.read(path)
    assert {
        "device",
        "device_type",
        "driver",
        "versions",
        "threads",
        "commit",
        "dirty",
        "date",
        "command",
        "mode",
    } <= set(made)
    assert made["device_type"] == "cpu"
    assert made["versions"]["torch"] == torch.__version__
    entry = made["cases"][SMALL.name]
    assert list(entry["kernels"]) == ["reference", "cpu"]
    assert entry["read_bytes"] == 5 * 300 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "4"], "--columns"),
        (["--rows", "4", "--columns", "8", "--k", "0"], "at least 1"),
        (["--set", "most"], "goals"),
        (["--rows", "3", "--columns", "9", "--set", "cpu"], "leave one of them out"),
        (["--margin", "0.1"], "goes with --against"),
        (["--kernel", "cuda", "--device", "cpu"], "cannot run here: device is cpu, needs cuda"),
        (["--mode", "hot"], "cold"),
        (["--data", "odd", "--rows", "4", "--columns", "8"], "narrow"),
        (["--kernel", "nobody"], "reference"),
        (["--against", "missing.json"], "missing.json"),
        (["--seconds", "0"], "seconds"),
    ],
)
def test_options_that_do_not_fit_exit_2(options, message):
    result = bench(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())  # the box breaks lines


def fabricated(us=10.0, chosen="cpu", floor_us=2.0, **facts):
    time = {"us": us, "p20_us": us, "p80_us": us, "rounds": 20, "launches": 1, "gbps": 1.0, "checked": True}
    entry = {
        **dataclasses.asdict(SMALL),
        "chosen": chosen,
        "kernels": {chosen: time},
        "others": {"fallback": {**time, "us": 40.0}, "topk": {**time, "us": 35.0}},
        "floor": {"how": "serial", **time, "us": floor_us},
    }
    made = record.new(CPU, "cold", commit="0" * 40)
    return {**made, "cases": {SMALL.name: entry}, **facts}


def test_a_record_without_the_case_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "then.json"
    path.write_text(json.dumps(fabricated()))
    result = bench("--rows", "3", "--columns", "77", "--against", str(path))
    assert result.exit_code == 2
    assert "decode-3x77" in result.output


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (fabricated(), ""),
        (fabricated(us=10.9), ""),
        (fabricated(us=11.1), r"5\.55x the read floor, was 5\.00x \(\+11%\)"),
        (fabricated(us=20.0, floor_us=4.0), ""),  # the whole machine is slower, not the kernel
        (fabricated(us=10.0, floor_us=1.5), r"\+33%"),
        (fabricated(chosen="reference"), "'cpu' was chosen, now 'reference', the fallback"),
        (fabricated(chosen="other"), "'cpu' was chosen, now 'other'$"),
    ],
)
def test_losses(now, lost):
    found = record.losses(now, fabricated(), 0.1)
    assert len(found) == (1 if lost else 0)
    assert re.search(lost, "".join(found))


def test_a_time_that_is_gone_is_a_loss():
    now = fabricated()
    now["cases"][SMALL.name]["kernels"]["cpu"] = {"checked": False, "fault": "row 0"}
    assert record.losses(now, fabricated(), 0.1) == [f"{SMALL.name}: had a time, has none now"]


@pytest.mark.parametrize("other", [fabricated(mode="warm"), fabricated(device_type="cuda"), fabricated(cases={})])
def test_records_that_do_not_compare_are_refused(other):
    with pytest.raises(ValueError, match="record"):
        record.losses(fabricated(), other, 0.1)


@pytest.mark.parametrize(
    ("then", "exit_code"),
    [
        (fabricated(us=1e6, floor_us=1.0), 0),
        (fabricated(us=1.0, floor_us=1e6), 1),
        (fabricated(us=1e6, floor_us=1.0, chosen="other"), 1),
        (fabricated(mode="warm"), 2),
    ],
)
def test_against_a_record_runs_its_cases_and_exits(tmp_path, then, exit_code):
    path = tmp_path / "then.json"
    record.write(then, path)
    result = bench("--against", str(path), "--seconds", "0.01", "--device", "cpu")
    assert result.exit_code == exit_code, result.output
    assert ("1 of its 1 cases" in result.output) == (exit_code < 2)
    assert ("lost decode-5x300-k16-normal" in " ".join(result.output.split())) == (exit_code == 1)


def test_against_notices_that_the_fast_path_was_taken_out(tmp_path, monkeypatch):
    """The regression that the project starts from: the row of the fast kernel leaves the table."""
    path = tmp_path / "then.json"
    assert small("--json", str(path)).exit_code == 0
    monkeypatch.setattr(api, "KERNELS", api.KERNELS[-1:])
    result = small("--against", str(path), "--margin", "1000")
    assert result.exit_code == 1
    assert "now 'reference', the fallback" in " ".join(result.output.split())


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({"schema": 1, "stage": "score"}))
    with pytest.raises(ValueError, match="no record"):
        record.read(tmp_path / "other.json")


def test_optional_packages_are_imported_only_when_needed():
    packages = {"numba", "triton", "matplotlib", "cuda.core", "hypothesis", "pytest"}
    code = f"import sys, keysift.benchmarks.command; print(sorted({packages} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Figures


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def many(device):
    """A fabricated record of two row counts and three widths, one of them without a time."""
    made = fabricated(device=device, device_type="cuda")
    entry = made["cases"].pop(SMALL.name)
    for case in [Case("decode", rows, columns) for rows in (1, 64) for columns in (8192, 32768, 131072)]:
        facts = {"rows": case.rows, "columns": case.columns, "k": 2048}
        made["cases"][case.name] = {**copy.deepcopy(entry), **facts}
    made["cases"]["decode-64x8192-k2048-normal"]["kernels"]["cpu"] = {"checked": False, "fault": "row 0"}
    return made


@pytest.mark.parametrize("device", ["NVIDIA H200", "another card"])
def test_the_figure_is_written(figures, tmp_path, device):
    record.write(many(device), tmp_path / "record.json")
    out = tmp_path / "select.svg"
    result = CliRunner().invoke(figures.app, ["select", str(tmp_path / "record.json"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    drawn = out.read_text()
    assert drawn.count('<g id="axes_') == 2
    assert 'id="legend_1"' in drawn


def test_readme_tables_hold_the_numbers_of_the_record(figures, tmp_path):
    record.write(many("NVIDIA H200"), tmp_path / "select-h200.json")
    made = figures.block(tmp_path)
    assert "| 1 x 131072 | 2048 | normal | cpu | 10.0 (10.0 to 10.0) | 5.0x | 40.0 | 4.0x | 8.3 (sgl_v2_pdl) |" in made
    assert "64 x 8192" not in made
    assert f"torch {torch.__version__}" in made
    assert "commit 000000000000" in made
    text = figures.with_block(f"before {figures.BEGIN} old {figures.END} after", made)
    assert text == f"before {figures.BEGIN}\n\n{made}\n\n{figures.END} after"
    with pytest.raises(ValueError, match="no block"):
        figures.with_block("nothing here", made)


def test_pages_say_what_the_records_say(figures):
    for name, blocks in figures.BLOCKS.items():
        text = (ROOT / name).read_text()
        for word, make in blocks.items():
            made = figures.with_block(text, make(figures.RESULTS), word)
            assert made == text, f"{name}: run python benchmarks/figures.py readme"
